"""A client's JSON schema for llguidance: ignored keywords, keywords that are dropped and where, results of trials."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from lab.attack.schemas import schemas
from redline.chat.constraint import dumped, grammars, of_schema
from redline.chat.schema import FORMATS, GREATEST, MOST_SCHEMAS, Written, loosen
from redline.chat.vocabulary import grammar_tokens
from redline.policy.grammar import parser_limits
from tests.clocks import FakeClock
from tests.tiny_tokenizer import tokenizer

TOKENS = grammar_tokens(tokenizer())
TEXT = {"type": "string"}
TINY, BIG = -(2**63), 2**63 - 1
DOUBLE = 1.7976931348623157e308


def matcher(schema: dict[str, Any], *, white_space: bool = True) -> LLMatcher:
    text = grammars([of_schema("schema", dumped(schema), white_space=white_space)])
    return LLMatcher(TOKENS, text, log_level=0, limits=parser_limits())


def fits(schema: dict[str, Any]) -> bool:
    return not matcher(schema).is_error()


def takes(schema: dict[str, Any], text: str, *, white_space: bool = True) -> bool:
    made, ids = matcher(schema, white_space=white_space), list(tokenizer().encode(text))
    assert not made.is_error(), made.get_error()
    return made.validate_tokens(ids) == len(ids) and all(map(made.consume_token, ids)) and made.is_accepting()


@pytest.mark.parametrize(
    ("schema", "followed"),
    [
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
        ({"type": "string", "uniqueItems": True}, TEXT),
        ({"type": "object", "propertyNames": TEXT}, {"type": "object"}),
        ({"type": "object", "propertyNames": {"type": ["string", "null"], "title": "key"}}, {"type": "object"}),
        ({"propertyNames": True, "unevaluatedProperties": {}, "dependentRequired": {}, "not": False}, {}),
        ({"type": "string", "format": "iso8601", "maxLength": 3}, {"type": "string", "maxLength": 3}),
        ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
        ({"title": "x", "default": 1, "x-order": 2, "discriminator": {"propertyName": "kind"}, "$schema": "y"}, {}),
        ({"if": {"const": 1}, "contains": {}, "minContains": 0, "then": True}, None),
        ({"if": {"const": 1}, "contains": {}, "minContains": 0}, {}),
        ({"type": "string", "maxLength": 5.0, "minLength": 1}, {"type": "string", "maxLength": 5, "minLength": 1}),
        ({"type": "string", "maxLength": 2**63 - 1}, TEXT),
        (
            {"items": [TEXT], "additionalItems": False, "type": "array"},
            {"type": "array", "prefixItems": [TEXT], "items": False},
        ),
        ({"minimum": 1, "exclusiveMinimum": True, "maximum": 2, "exclusiveMaximum": False}, None),
        (True, {}),
    ],
)
def test_what_has_no_effect_is_left_out_without_a_complaint(schema: Any, followed: dict[str, Any] | None):
    written = Written(schema)
    if followed is None:
        assert (written.complaint is None) == ("minimum" in schema)
    else:
        assert (written.schema, written.complaint) == (followed, None)


def test_the_known_formats_are_those_that_llguidance_knows():
    others = ["int32", "int64", "float", "password", "byte", "binary", "regex", "iri", "idn-email", "uri-reference"]
    for format in (*FORMATS, *others):
        assert fits({"type": "string", "format": format}) == (format in FORMATS)


@pytest.mark.parametrize(
    ("keyword", "place"),
    [
        ({"uniqueItems": True}, "uniqueItems"),
        ({"contains": {}}, "contains"),
        ({"not": {}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"dependencies": {"a": ["b"]}}, "dependencies"),
        ({"propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"propertyNames": {"type": [[]]}}, "propertyNames"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"$ref": "https://x.example/y"}, "$ref"),
        ({"$ref": "#/nowhere/0"}, "$ref"),
        ({"$ref": 1}, "$ref"),
        ({"$dynamicRef": "#a"}, "$dynamicRef"),
        ({"type": "any"}, "type"),
        ({"type": []}, "type"),
        ({"type": [{}]}, "type"),
        ({"required": True}, "required"),
        ({"required": [1]}, "required"),
        ({"properties": []}, "properties"),
        ({"properties": {"a~/": None}}, "properties/a~0~1"),
        ({"items": None}, "items"),
        ({"anyOf": {}}, "anyOf"),
        ({"allOf": [{}, 1]}, "allOf/1"),
        ({"enum": 1}, "enum"),
        ({"enum": [9007199254740993]}, "enum"),
        ({"const": 10**400}, "const"),
        ({"maxLength": "5"}, "maxLength"),
        ({"minItems": -1}, "minItems"),
        ({"minItems": 1.5}, "minItems"),
        ({"pattern": 1}, "pattern"),
        ({"multipleOf": 0}, "multipleOf"),
        ({"minimum": "1"}, "minimum"),
        ({"minimum": 10**20}, "minimum"),
        ({"maximum": -(10**400)}, "maximum"),
    ],
)
def test_what_cannot_be_followed_is_left_out_at_its_own_place_alone(keyword: dict[str, Any], place: str):
    def around(inner: dict[str, Any]) -> dict[str, Any]:
        city = {"type": "string", "enum": ["Oslo"]}
        properties = {"city": city, "tags": {"items": {"title": "t", **inner}}}
        return {"type": "object", "properties": properties, "required": ["city"], "additionalProperties": False}

    written = Written(around(keyword))
    assert written.complaint is not None
    assert written.complaint.endswith(f", at #/properties/tags/items/{place}")
    assert fits(written.schema)
    assert takes(written.schema, '{"city":"Oslo","tags":[]}')
    assert not takes(written.schema, '{"city":"Rome"}')
    assert not takes(written.schema, '{"city":"Oslo","other":1}')


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("a", "#/$defs/a"),
        ("Größe", "#/$defs/Größe"),
        ("Größe", "#/$defs/Gr%C3%B6%C3%9Fe"),
        ("a b", "#/$defs/a b"),
        ("a~b/c", "#/$defs/a~0b~1c"),
        ("List[int]", "#/$defs/List[int]"),
        ("50%25", "#/$defs/50%25"),
        ("x", "#anchored"),
        ("x", "https://x.example/root#/$defs/x"),
        ("x", "part"),
        ("x", "https://x.example/part"),
    ],
)
def test_references_lead_to_their_place_however_they_are_written(name: str, reference: str):
    definition = {"type": "integer", "$anchor": "anchored", "$id": "part"}
    identity = {"$id": "https://x.example/root"} if name == "x" else {}
    written = Written({**identity, "properties": {"n": {"$ref": reference}}, "$defs": {name: definition}})
    assert written.complaint is None
    assert takes(written.schema, '{"n":1}')
    assert not takes(written.schema, '{"n":"1"}')


def test_references_may_go_round_in_circles_and_lead_anywhere():
    tree = {"type": "object", "properties": {"v": {"type": "integer"}, "inner": {"$ref": "#"}, "w": {}}}
    tree["properties"]["w"] = {"$ref": "#/properties/v"}
    written = Written({**tree, "additionalProperties": False})
    assert takes(written.schema, '{"v":1,"inner":{"v":2,"w":3}}')
    assert not takes(written.schema, '{"inner":{"w":"3"}}')


@pytest.mark.parametrize(
    ("bounds", "within", "beyond"),
    [
        ({"type": "integer", "minimum": TINY, "maximum": BIG}, (1, -1, 9 * 10**18), (10**19,)),
        (
            {"type": "integer", "exclusiveMinimum": TINY - 1, "exclusiveMaximum": BIG + 1},
            (0, -9 * 10**18),
            (-(10**19),),
        ),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, (0, 10**18), (-1,)),
        ({"type": "number", "minimum": -DOUBLE, "maximum": DOUBLE}, (0, 1e300, -1.5), ()),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": DOUBLE}, (0.5, 10**30), (0, -1)),
        ({"type": "integer", "minimum": 10**18}, (10**18,), (10**17, -1)),
        ({"type": "number", "maximum": -(10**18)}, (-(10**18),), (0,)),
        ({"type": "integer", "exclusiveMinimum": 2**53}, (2**53 + 2,), (2**53,)),
        ({"type": "integer", "minimum": 2**53 + 1}, (2**53 + 2,), (2**53,)),
        ({"minimum": TINY, "maximum": 5}, (5, '"x"', "null"), (6,)),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 2**63}, (4,), (3,)),
        ({"type": "number", "maximum": 5.5, "exclusiveMaximum": 2**60}, (5.5,), (5.6, 6)),
    ],
)
def test_bounds_are_kept_but_for_what_no_number_reaches(
    bounds: dict[str, Any], within: tuple[Any, ...], beyond: tuple[Any, ...]
):
    written = Written(bounds)
    assert written.complaint is None
    for number in within:
        assert takes(written.schema, str(number)), number
    for number in beyond:
        assert not takes(written.schema, str(number)), number


def test_the_greatest_bound_is_one_that_llguidance_follows():
    for kind in ("integer", "number"):
        assert fits({"type": kind, "minimum": -GREATEST, "maximum": GREATEST})


def test_a_union_that_cannot_be_shown_to_be_disjoint_takes_any_of_its_branches():
    def branch(tag: str, key: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": {"const": tag}, key: TEXT}, "required": [key]}

    written = Written({"oneOf": [branch("cat", "meows"), branch("dog", "barks")]})
    assert takes(written.schema, '{"kind":"dog","barks":"x"}')
    assert not takes(written.schema, '{"kind":"cow","barks":"x"}')


def test_objects_can_be_closed():
    inner = {"properties": {"a": {"properties": {"b": {}}}, "c": {"additionalProperties": TEXT, "properties": {}}}}
    closed = Written(inner, closed=True).schema
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"]["additionalProperties"] is False
    assert closed["properties"]["c"]["additionalProperties"] == TEXT
    assert "additionalProperties" not in Written(inner).schema


def test_a_schema_is_written_once_for_all_references_and_not_beyond_a_bound():
    with pytest.raises(ValueError, match="50000 schemas"):
        Written({"anyOf": [{}] * MOST_SCHEMAS})
    nested: dict[str, Any] = {"properties": {str(n): {} for n in range(2000)}}
    for _ in range(40):
        nested = {"items": nested}
    references = [{"$ref": "#/$defs/x" + "/items" * n} for n in range(40)]
    with pytest.raises(ValueError, match="50000 schemas"):
        Written({"anyOf": references, "$defs": {"x": nested}})
    assert len(Written({"anyOf": references[:1] * 1000, "$defs": {"x": nested}}).definitions) == 1


def test_a_place_is_bounded():
    written = Written({"properties": {"k" * 100_000: {"properties": {"a": {"not": {}}}}}})
    assert len(str(written.complaint)) < 400
    assert max(map(len, written.places.values())) <= 300


def loosened(schema: dict[str, Any], seconds: float = 60.0) -> tuple[dict[str, Any], str]:
    written = Written(schema)
    assert not fits(written.schema)
    return loosen(written, fits, seconds)


BAD = {"type": "string", "pattern": "(?=a)b"}
GOOD = {"type": "string", "maxLength": 3}


@pytest.mark.parametrize(
    ("schema", "left", "places"),
    [
        ({"properties": {"a": BAD, "b": GOOD}}, {"properties": {"a": TEXT, "b": GOOD}}, "#/properties/a/pattern"),
        ({"anyOf": [GOOD, {"items": BAD}, BAD]}, {"anyOf": [GOOD, {"items": TEXT}, TEXT]}, "#/anyOf/1/items/pattern"),
        (
            {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": {"items": BAD}, "b": GOOD}},
            {
                "anyOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}],
                "$defs": {"0": {"items": TEXT}, "1": GOOD},
            },
            "#/$defs/a/items/pattern",
        ),
        ({"properties": {"a": {}}, "minProperties": 1}, {"properties": {"a": {}}}, "#/minProperties"),
        (
            {"properties": {"a": GOOD}, "patternProperties": {"(?=a)b": TEXT}, "additionalProperties": False},
            {"properties": {"a": GOOD}},
            "#/patternProperties",
        ),
        ({"type": "string", "enum": []}, TEXT, "#/enum"),
        ({"allOf": [TEXT, {"type": "integer"}]}, {"allOf": [TEXT, {}]}, "#/allOf/1/type"),
    ],
)
def test_trials_find_the_keyword_that_cannot_be_followed(schema: dict[str, Any], left: dict[str, Any], places: str):
    assert loosened({"title": "x", **schema}) == (left, places)


def test_trials_are_few_and_end_when_their_time_does(monkeypatch: pytest.MonkeyPatch):
    wide = {"type": "object", "properties": {f"p{n}": GOOD for n in range(100)} | {"x": BAD}}
    tried: list[dict[str, Any]] = []

    def counted(schema: dict[str, Any]) -> bool:
        tried.append(schema)
        return fits(schema)

    left, place = loosen(Written(wide), counted, 60.0)
    assert place == "#/properties/x/pattern"
    assert len(tried) <= 10
    assert len(left["properties"]) == 101
    clock = FakeClock()

    def late(schema: dict[str, Any]) -> bool:
        clock.advance(1.0)
        return fits(schema)

    monkeypatch.setattr("redline.clock.thread_time", clock)
    left, place = loosen(Written(wide), late, 0.5)
    assert fits(left)
    assert left["type"] == "object"


def test_random_schemas_are_written_as_they_are():
    for asked in schemas(60, seed=5):
        written = Written(asked)
        if written.complaint is None:
            assert fits(asked) == fits(written.schema), json.dumps(asked)
