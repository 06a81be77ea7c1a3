"""Every kind of check, with correct answers, and with wrong answers of the kinds that models give."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.bench.quality import run_code
from redline.bench.quality.checks import GradedCall, check_check, grade
from redline.bench.quality.json_value import check_schema, same, violation

WEATHER = {"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}, "tags": {"type": "array"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def call(name: str, arguments: str) -> GradedCall:
    return {"name": name, "arguments": arguments}


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        (933, "413 + 520 = 933."),
        (933, "**933**"),
        (1234567, "It is 1,234,567"),
        (-12, "5 - 17 = -12"),
        (-12, "so x is −12."),
        (15, "pages 12-15"),
        (2.5, "That makes 2.50 euros"),
        (4, "the parts are 3, 4"),
        (7, "(10)-7"),
    ],
)
def test_the_last_number_of_the_answer_counts(expected: float, answer: str) -> None:
    assert grade({"number": expected}, answer, []).ok is True


@pytest.mark.parametrize("answer", ["", "none", "933 is wrong, it is 934", "9 33", "-933", "933.5", "1,933"])
def test_another_number_is_wrong(answer: str) -> None:
    assert grade({"number": 933}, answer, []).ok is False


def test_tool_calls_match_in_any_order_and_by_json_value() -> None:
    check = {"tool_calls": [WEATHER, {"name": "add", "arguments": {"a": 1, "b": [True]}}]}
    answer = [call("add", '{"b": [true], "a": 1.0}'), call("get_weather", '{"days":3,"city":"Oslo"}')]
    assert grade(check, "", answer).ok is True


@pytest.mark.parametrize(
    "calls",
    [
        [],
        [call("get_weather", '{"city": "Oslo"}')],
        [call("get_weather", '{"city": "Oslo", "days": "3"}')],
        [call("get_weather", '{"city": "Oslo", "days": 3')],
        [call("weather", '{"city": "Oslo", "days": 3}')],
        [call("get_weather", '{"city": "Oslo", "days": 3}')] * 2,
        [call("get_weather", "[" * 100_000)],
    ],
)
def test_missing_extra_or_misshapen_calls_are_wrong(calls: list[GradedCall]) -> None:
    assert grade({"tool_calls": [WEATHER]}, "", calls).ok is False


def test_the_same_call_may_be_wanted_twice() -> None:
    twice = [call("get_weather", '{"city": "Oslo", "days": 3}')] * 2
    assert grade({"tool_calls": [WEATHER, WEATHER]}, "", twice).ok is True


def test_no_tool_calls_means_none() -> None:
    assert grade({"no_tool_calls": True}, "Hello!", []).ok is True
    assert grade({"no_tool_calls": True}, "", [call("get_weather", "{}")]).ok is False


def test_json_must_be_one_value_that_fits_schema_and_expectation() -> None:
    check = {"json": {"schema": SCHEMA, "value": {"name": "Ada", "age": 36}}}
    assert grade(check, ' {"age": 36.0, "name": "Ada"}\n', []).ok is True
    for wrong in (
        'Here: {"name": "Ada", "age": 36}',
        '{"name": "Ada", "age": 36} {}',
        '```json\n{"name": "Ada", "age": 36}\n```',
        '{"name": "Ada", "age": 37}',
        '{"name": "Ada", "age": "36"}',
        '{"name": "Ada"}',
        '{"name": "Ada", "age": 36, "x": 1}',
        "NaN",
    ):
        assert grade(check, wrong, []).ok is False, wrong


def test_a_schema_alone_leaves_the_value_open() -> None:
    assert grade({"json": {"schema": SCHEMA}}, '{"name": "Bo", "age": 0, "tags": []}', []).ok is True


def test_contains_wants_all_and_contains_any_wants_one() -> None:
    assert grade({"contains": ["Paris", "SEINE"]}, "paris lies on the Seine", []).ok is True
    assert grade({"contains": ["Paris", "Loire"]}, "paris lies on the Seine", []).ok is False
    assert grade({"contains_any": ["cannot", "unable"]}, "I cannot see the future.", []).ok is True
    assert grade({"contains_any": ["cannot", "unable"]}, "Tomorrow it rains.", []).ok is False


def test_equals_ignores_case_space_and_final_punctuation_only() -> None:
    assert grade({"equals": "der Hund"}, "  Der Hund.\n", []).ok is True
    assert grade({"equals": "der Hund"}, "der Hund bellt", []).ok is False
    assert grade({"equals": "犬"}, "犬。", []).ok is True


@pytest.mark.parametrize("end", [*".!?。！？ ", "?! ", " .\n", "\t"])
def test_any_final_punctuation_is_none_of_the_answer(end: str) -> None:
    assert grade({"equals": "Oslo"}, f"Oslo{end}", []).ok is True
    assert grade({"equals": f"Oslo{end}"}, "Oslo", []).ok is True
    assert grade({"equals": "Oslo"}, f"{end}x{end}Oslo", []).ok is False


def test_equals_knows_letters_whose_cases_differ_in_length_and_keeps_other_signs() -> None:
    assert grade({"equals": "Straße"}, "STRASSE", []).ok is True
    assert grade({"equals": "Oslo"}, "\n Oslo", []).ok is True
    for answer in ("Oslo,", "Oslo:", "Oslo)", "-Oslo", ".Oslo", "Os lo", "Oslo. Yes"):
        assert grade({"equals": "Oslo"}, answer, []).ok is False, answer


def test_two_keys_must_both_hold() -> None:
    check = {"number": 4, "no_tool_calls": True}
    assert grade(check, "4", []).ok is True
    assert grade(check, "4", [call("f", "{}")]).ok is False
    assert grade(check, "5", []).ok is False


@pytest.mark.parametrize(
    ("check", "says"),
    [
        ({}, "expected at least one key"),
        ({"nubmer": 3}, "nubmer"),
        ({"no_tool_calls": False}, "no_tool_calls: expected true"),
        ({"number": "3"}, "check.number: Expected"),
        ({"contains": "a"}, "check.contains: Expected `array`"),
        ({"contains_any": []}, "check.contains_any: Expected `array` of length >= 1"),
        ({"json": None}, "check.json: Expected `object`"),
        ({"tool_calls": [{"name": "f"}]}, r"check.tool_calls\[0\]: .*arguments"),
        ({"asserts": {"function": "f"}}, "check.asserts: .*code"),
    ],
)
def test_a_misspelt_check_is_an_error_not_a_grade(check: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        grade(check, "3", [])


def test_code_is_not_run_unless_asked_for() -> None:
    check = {"asserts": {"function": "double", "code": "assert double(4) == 8"}}
    assert grade(check, "def double(x): return 2 * x", []).ok is None


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("def double(x):\n    return 2 * x\n", True),
        ("Sure.\n```python\ndef double(x):\n    return 2 * x\n```\nUse `double(4)`.", True),
        ("```\n>>> double(4)\n8\n```\n\n```python\ndef double(x):\n    return 2 * x\n```", True),
        ("def double(x): return 3 * x", False),
        ("def twice(x): return 2 * x", False),
        ("I cannot do that.", False),
    ],
)
def test_a_function_passes_when_its_asserts_hold(answer: str, right: bool) -> None:
    check = {"asserts": {"function": "double", "code": "assert double(4) == 8\nassert double(0) == 0"}}
    assert grade(check, answer, [], run_code=True).ok is right


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.5, 1.0, 2.0])
    | st.sampled_from(["", "a", "ab"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"name": "Ada", "age": 36}, None),
        ({"name": "Ada", "age": 36.0, "tags": [1, "a"]}, None),
        ({"name": "Ada", "age": True}, "$.age"),
        ({"name": "Ada", "age": -1}, "$.age"),
        ({"name": "Ada"}, "$"),
        ({"name": "Ada", "age": 1, "more": 1}, "$"),
        ([], "$"),
    ],
)
def test_a_value_is_held_against_its_schema_and_the_place_is_named(value: Any, place: str | None) -> None:
    found = violation(value, SCHEMA)
    assert found is None if place is None else found and found.startswith(f"{place}: ")


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "objekt"}, r"\$\.type: 'objekt' is not"),
        ({"properties": {"a": {"typo": 1}}}, r"\$\.properties\.a: .*'typo' was unexpected"),
        ({"anyOf": [{"items": {"$ref": "http://127.0.0.1:9/schema"}}]}, r"\$ref is not allowed here"),
        ({"$ref": "#"}, r"\$ref is not allowed here"),
        ({"$id": "http://127.0.0.1:9/"}, r"\$id is not allowed here"),
        ({"$schema": "http://127.0.0.1:9/schema"}, r"\$schema"),
        ({"format": "date"}, "format is not allowed here"),
        ({"pattern": "("}, "is not a 'regex'"),
        ({"minimum": "3"}, "is not of type 'number'"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused_where_it_is_wrong(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        violation({}, schema)
    with pytest.raises(ValueError, match=says):
        check_check({"json": {"schema": schema}})


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(2_000):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="nested too deeply"):
        check_schema(schema)


def test_a_value_that_is_nested_deeply_or_far_from_zero_is_wrong_and_no_traceback() -> None:
    deep = "[" * 900 + "]" * 900
    assert grade({"json": {"value": 1}}, deep, []).ok is False
    assert grade({"json": {"schema": {"type": "object"}}}, deep, []).ok is False
    assert grade({"json": {"schema": {"multipleOf": 0.5}}}, "1e999", []).ok is False
    assert grade({"json": {"schema": {"multipleOf": 0.5}}}, "1e308", []).ok is True


def test_a_pattern_has_only_so_much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert violation("aab", {"pattern": "a+b$"}) is None
    assert "does not match" in str(violation("b'\"\ud800", {"pattern": "^a"}))
    monkeypatch.setattr(run_code.run_asserts, "__defaults__", (0.5,))
    assert "still running" in str(violation("a" * 60 + "!", {"pattern": "^(a+)+$"}))


@given(JSON)
def test_every_value_is_the_same_as_itself_and_true_is_not_one(value: Any) -> None:
    assert same(value, value)
    assert not same([True], [1])
