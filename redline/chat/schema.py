"""Rewrites a client's JSON schema into one that llguidance compiles.

`Written` walks down the schema and knows every keyword. It drops keywords without effect (annotations,
`uniqueItems: false`, a `format` that llguidance does not know), and keywords with an effect that llguidance does not
support (`uniqueItems: true`, `not`, a reference to another document): each only at its own place, and the first of the
latter kind is reported. `loosen` finds the remaining unsupported keywords by trial: for a pattern with a look-ahead,
for example, llguidance raises an error without a place.

Schemas may be hostile. Both functions are meant for a process that can be killed, and bound the schemas that they
write; only `loosen` recurses, to the schema's nesting depth.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast
from urllib.parse import unquote, urljoin

from redline import clock

MOST_SCHEMAS = 50_000  # maximum number of subschemas: llguidance compiles no more
MOST_ADDRESS = 2048  # maximum characters of an id or a reference: each is joined with others
PLACE_CHARS = 300  # maximum characters of a reported place
MOST_LEFT_OUT = 32  # maximum number of keywords that `loosen` finds one by one
# An unknown format is an annotation (JSON Schema 2020-12, validation, 7.2.3).
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
GREATEST = (1 << 63) - 1024  # the greatest double below 2^63: llguidance supports no bound beyond it
UNREACHED = 3.4028234663852886e38  # the greatest float32: no number that a model writes exceeds such a bound
_MOST_COUNT = 1 << 32  # of characters, items or properties: no answer has more
_EXACT = 1 << 53  # doubles represent every integer up to here
_OPEN = 10**18  # a bound of this size or more, away from zero, compiles only together with a bound on the other side

_ALL = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_NUMBERS, _STRING = frozenset(("integer", "number")), frozenset(("string",))
_ARRAY, _OBJECT = frozenset(("array",)), frozenset(("object",))
# The keywords that llguidance supports, each with the value types that it applies to. If two contradict each other,
# `loosen` drops the later one.
_FOLLOWED = {
    "$ref": _ALL, "const": _ALL, "enum": _ALL,
    "minimum": _NUMBERS, "exclusiveMinimum": _NUMBERS, "maximum": _NUMBERS, "exclusiveMaximum": _NUMBERS,
    "multipleOf": _NUMBERS,
    "minLength": _STRING, "maxLength": _STRING, "format": _STRING, "pattern": _STRING,
    "prefixItems": _ARRAY, "items": _ARRAY, "minItems": _ARRAY, "maxItems": _ARRAY,
    "properties": _OBJECT, "patternProperties": _OBJECT, "additionalProperties": _OBJECT, "required": _OBJECT,
    "minProperties": _OBJECT, "maxProperties": _OBJECT,
    "allOf": _ALL, "anyOf": _ALL, "oneOf": _ALL,
}  # fmt: skip
_NOT_FOLLOWED = {
    "uniqueItems": _ARRAY, "contains": _ARRAY, "unevaluatedItems": _ARRAY,
    "propertyNames": _OBJECT, "unevaluatedProperties": _OBJECT, "dependentRequired": _OBJECT,
    "dependentSchemas": _OBJECT, "dependencies": _OBJECT,
    "not": _ALL, "if": _ALL, "$dynamicRef": _ALL, "$recursiveRef": _ALL,
}  # fmt: skip
# Keywords with a meaning that depends on sibling keywords.
_NEEDS = {"additionalProperties": ("properties", "patternProperties"), "items": ("prefixItems",)}


class _Unusable(Exception):
    """The reason why a keyword with an effect is left out."""


class _Resource(NamedTuple):
    """The base that a reference is relative to."""

    schema: Any
    place: str


class Written:
    """A rewritten schema. complaint: the first keyword with an effect that was left out, and its place."""

    def __init__(self, schema: Any, *, closed: bool = False) -> None:
        """closed: forbid additional properties in objects that list properties and do not mention others."""
        self._root = _Resource(schema, "#")
        self._closed = closed
        self._written = 0
        self._todo: deque[tuple[dict[str, Any], dict[str, Any], str, _Resource]] = deque()
        self._names: dict[int, str] = {}  # names of the referenced places
        self._index: dict[str, _Resource] | None = None  # parts with an id or an anchor
        self.places: dict[int, str] = {}  # place of each written schema, by its `id`
        self.definitions: dict[str, dict[str, Any]] = {}
        self.complaint: str | None = None
        root = self._inner(schema, self._root.place, self._root)
        self.schema: dict[str, Any] = root if isinstance(root, dict) else {}
        if root is False:
            self._complain("no value fits the schema false", self._root.place)
        self.places[id(self.schema)] = self._root.place
        while self._todo:
            self._write(*self._todo.popleft())
        if self.definitions:
            self.schema["$defs"] = self.definitions

    def _inner(self, schema: Any, place: str, base: _Resource) -> dict[str, Any] | bool:
        """The output for a schema, which is filled in later."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._complain("a schema has to be an object or a boolean", place)
            return True
        self._written += 1
        if self._written > MOST_SCHEMAS:
            raise ValueError(f"it has more than {MOST_SCHEMAS} schemas")
        fields, written = cast("dict[str, Any]", schema), dict[str, Any]()
        self.places[id(written)] = place
        self._todo.append((fields, written, place, _Resource(fields, place) if _identity(fields) else base))
        return written

    def _complain(self, message: str, place: str) -> None:
        if self.complaint is None:
            self.complaint = f"{message}, at {place}"

    def _write(self, schema: dict[str, Any], written: dict[str, Any], place: str, base: _Resource) -> None:
        types = _ALL
        try:
            if "type" in schema:
                names = _types(schema["type"])
                written["type"], types = schema["type"], frozenset(names)
        except _Unusable as error:
            self._complain(str(error), _below(place, "type"))
        schema = _modern(schema, closed=self._closed)
        for keyword, kinds in _FOLLOWED.items():
            if keyword in schema and kinds & types:
                try:
                    self._follow(keyword, schema[keyword], written, _below(place, keyword), base)
                except _Unusable as error:
                    self._complain(str(error), _below(place, keyword))
        if kinds_of_bounds := [keyword for keyword in _BOUNDS if keyword in written]:
            try:
                bounds = _bounds({keyword: written.pop(keyword) for keyword in kinds_of_bounds})
            except _Unusable as error:
                self._complain(str(error), _below(place, kinds_of_bounds[0]))
            else:
                written.update(bounds)
        for keyword, kinds in _NOT_FOLLOWED.items():
            if keyword in schema and kinds & types and _has_effect(keyword, schema):
                self._complain(f"{keyword} is not supported", _below(place, keyword))

    def _follow(self, keyword: str, value: Any, written: dict[str, Any], place: str, base: _Resource) -> None:
        """Write a keyword that llguidance supports. Raises _Unusable for an unsupported value."""
        match keyword:
            case "$ref":
                self._refer(value, written, base)
                return
            case "properties" | "patternProperties":
                fields = _of(dict, value, f"{keyword} has to be an object")
                value = {name: self._inner(one, _below(place, name), base) for name, one in fields.items()}
            case "additionalProperties" | "items":
                value = self._inner(value, place, base)
            case "allOf" | "anyOf" | "oneOf" | "prefixItems":
                schemas = _of(list, value, f"{keyword} has to be a list of schemas")
                value = [self._inner(one, _below(place, str(index)), base) for index, one in enumerate(schemas)]
            case "required":
                if not all(isinstance(name, str) for name in _of(list, value, "required has to be a list of names")):
                    raise _Unusable("required has to be a list of names")
            case "const":
                _check_exact([value])
            case "enum":
                _check_exact(_of(list, value, "enum has to be a list"))
            case "pattern":
                _of(str, value, "a pattern has to be a string")
            case "format":
                if value not in FORMATS:
                    return
            case "multipleOf":
                if _number(keyword, value) <= 0:
                    raise _Unusable("multipleOf has to be above 0")
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                _number(keyword, value)
            case _:
                value = _count(keyword, value)
                if keyword.startswith("max") and value >= _MOST_COUNT:
                    return
        written[keyword] = value

    # -- References ------------------------------------------------------------------------------------------------

    def _refer(self, reference: Any, written: dict[str, Any], base: _Resource) -> None:
        target, base = self._target(_of(str, reference, "$ref has to be a string"), base)
        if target.schema is self._root.schema:
            written["$ref"] = "#"
            return
        name = self._names.get(id(target.schema))
        if name is None:
            definition = self._inner(target.schema, target.place, base)
            if isinstance(definition, bool):
                if not definition:
                    written["enum"] = []
                return
            name = self._names[id(target.schema)] = str(len(self.definitions))
            self.definitions[name] = definition
        written["$ref"] = f"#/$defs/{name}"

    def _target(self, reference: str, base: _Resource) -> tuple[_Resource, _Resource]:
        """The referenced part of the schema, and the base of its own references. Raises _Unusable for a reference
        without a target."""
        if len(reference) > MOST_ADDRESS:
            raise _Unusable(f"$ref has {len(reference)} characters; at most {MOST_ADDRESS} are read")
        address, _, fragment = reference.partition("#")
        resources = [base, self._root]  # some schema bundlers keep ids next to references that are relative to the root
        if address:
            resources = [one for one in [self._known(address)] if one]
            if not resources:
                raise _Unusable(f"$ref to {reference[:PLACE_CHARS]!r} is not supported: only to places in the schema")
        if fragment and not fragment.startswith("/"):
            resources = [one for one in [self._known(f"#{unquote(fragment)}")] if one]
            fragment = ""
        for resource in resources:
            for pointer in (unquote(fragment), fragment):
                if (found := _pointed(resource, pointer)) is not None:
                    return found, resource
        raise _Unusable(f"Pointer {reference.removeprefix('#')[:PLACE_CHARS]!r} does not exist")

    def _known(self, address: str) -> _Resource | None:
        """The part with this id, or with this anchor (after `#`)."""
        root = _identity(self._root.schema) or ""
        if self._index is None:
            self._index = {}
            stack = [self._root]
            while stack:
                part = stack.pop()
                for name in (_identity(part.schema), _anchor(part.schema)):
                    if name is not None:
                        self._index.setdefault(_joined(root, name), part)
                stack += [_Resource(inner, _below(part.place, name)) for name, inner in _parts(part.schema)]
        return self._index.get(_joined(root, address))


def _identity(schema: Any) -> str | None:
    if not isinstance(schema, dict):
        return None
    fields = cast("dict[str, Any]", schema)
    name = fields.get("$id", fields.get("id"))
    return name.removesuffix("#") if isinstance(name, str) and len(name) <= MOST_ADDRESS else None


def _anchor(schema: Any) -> str | None:
    name = cast("dict[str, Any]", schema).get("$anchor") if isinstance(schema, dict) else None
    return f"#{name}" if isinstance(name, str) else None


def _joined(base: str, address: str) -> str:
    try:
        return address if address.startswith("#") else urljoin(base, address)
    except ValueError:
        return address


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from cast("dict[str, Any]", value).items()
    elif isinstance(value, list):
        yield from ((str(index), inner) for index, inner in enumerate(cast("list[Any]", value)))


def _pointed(resource: _Resource, pointer: str) -> _Resource | None:
    """The target of a JSON pointer; None if there is none."""
    value, place = resource
    for name in pointer.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and name in value:
            value = cast("dict[str, Any]", value)[name]
        elif isinstance(value, list) and name.isdecimal() and int(name[:9]) < len(cast("list[Any]", value)):
            value = cast("list[Any]", value)[int(name[:9])]
        else:
            return None
        place = _below(place, name)
    return _Resource(value, place)


def _below(place: str, name: str) -> str:
    return f"{place}/{name[:PLACE_CHARS].replace('~', '~0').replace('/', '~1')}"[:PLACE_CHARS]


# -- Values of keywords --------------------------------------------------------------------------------------------


def _modern(schema: dict[str, Any], *, closed: bool) -> dict[str, Any]:
    """Convert to JSON Schema 2020-12: earlier, a list in `items` was the prefix of an array and `additionalItems` the
    schema of its rest, and `exclusiveMinimum` and `exclusiveMaximum` were booleans."""
    changed: dict[str, Any] = {}
    if isinstance(schema.get("items"), list):
        changed = {"prefixItems": schema["items"], "items": schema.get("additionalItems", True)}
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(schema.get(exclusive), bool):
            changed[exclusive] = schema.get(bound) if schema[exclusive] else None
    if closed and "additionalProperties" not in schema and ("properties" in schema or "patternProperties" in schema):
        changed["additionalProperties"] = False
    if not changed:
        return schema
    return {keyword: value for keyword, value in {**schema, **changed}.items() if changed.get(keyword, 0) is not None}


def _types(value: Any) -> list[str]:
    names = cast("list[Any]", value) if isinstance(value, list) else [value]
    for name in names:
        if not isinstance(name, str) or name not in _ALL:
            raise _Unusable(f"Invalid type: {str(name)[:PLACE_CHARS]}")
    if not names:
        raise _Unusable("type has to name a type")
    return names


def _of(kind: type, value: Any, message: str) -> Any:
    if not isinstance(value, kind):
        raise _Unusable(message)
    return value


def _number(keyword: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Unusable(f"{keyword} has to be a number")
    return value


def _count(keyword: str, value: Any) -> int:
    """A non-negative integer; 5.0 is accepted as one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != value // 1:
        raise _Unusable(f"{keyword} has to be an integer, 0 or more")
    return int(value)


def _check_exact(values: list[Any]) -> None:
    """Raise _Unusable for an integer that llguidance would change, since it reads doubles."""
    for value in values:
        if isinstance(value, int) and abs(value) > _EXACT and (abs(value) > GREATEST or int(float(value)) != value):
            raise _Unusable(f"{str(value)[:40]} is an integer that no double holds")


_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def _bounds(given: dict[str, Any]) -> dict[str, Any]:
    """Bounds that llguidance supports; none is wider than the given ones, except beyond every reachable number.

    Raises _Unusable if no number that llguidance can bound is within them.
    """
    lower = _bound(given, "minimum", "exclusiveMinimum", -1)
    upper = _bound(given, "maximum", "exclusiveMaximum", 1)
    if not upper and any(value >= _OPEN for value in lower.values()):
        upper = {"maximum": GREATEST}
    if not lower and any(value <= -_OPEN for value in upper.values()):
        lower = {"minimum": -GREATEST}
    return {**lower, **upper}


def _bound(given: dict[str, Any], inclusive: str, exclusive: str, sign: int) -> dict[str, Any]:
    """The bounds of one side. sign: -1 for a lower bound, which is treated as an upper bound of the negative number."""
    found: dict[str, Any] = {}
    for keyword in (inclusive, exclusive):
        value = given.get(keyword)
        if value is None or value * sign >= UNREACHED:
            continue
        most = min(value * sign, GREATEST)
        if most < -GREATEST:
            raise _Unusable(f"{keyword} {value} leaves no number that can be followed")
        if abs(most) <= _EXACT and (keyword == inclusive or abs(most) < _EXACT):
            found[keyword] = value
            continue
        near = float(most)  # llguidance computes in doubles, which cannot distinguish neighbouring integers here
        if near > most or (keyword == exclusive and near == value * sign):
            near = math.nextafter(near, -math.inf)
        if near < -GREATEST:
            raise _Unusable(f"{keyword} {value} leaves no number that can be followed")
        if inclusive not in found or near < found[inclusive] * sign:
            found[inclusive] = sign * int(near)
    return found


def _has_effect(keyword: str, schema: dict[str, Any]) -> bool:
    value = schema[keyword]
    match keyword:
        case "uniqueItems" | "not":
            return value is not False
        case "contains":
            return schema.get("minContains") != 0 or "maxContains" in schema
        case "if":
            return "then" in schema or "else" in schema
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return value != {}
        case "propertyNames" | "unevaluatedItems" | "unevaluatedProperties":
            of_keys = {"string"} if keyword == "propertyNames" else set[str]()
            return not _takes_all(value, of_keys)
        case _:
            return True


def _takes_all(schema: Any, types: set[str]) -> bool:
    """Whether a schema accepts every value, or every value of these types, because it has only annotations."""
    if not isinstance(schema, dict):
        return schema is True
    fields = cast("dict[str, Any]", schema)
    if fields.keys() & (_FOLLOWED.keys() | _NOT_FOLLOWED.keys()):
        return False
    if "type" not in fields:
        return True
    kinds: Any = fields["type"]
    return bool(types) and all(name in (kinds if isinstance(kinds, list) else [kinds]) for name in types)


# -- What only a trial finds ---------------------------------------------------------------------------------------


def loosen(written: Written, fits: Callable[[dict[str, Any]], bool], seconds: float) -> tuple[dict[str, Any], str]:
    """A schema that does not compile, without the keywords that prevent it, and the place of the first of them.

    fits: whether a schema compiles. seconds: limit of CPU time; after it, or once MOST_LEFT_OUT keywords were left out,
    all remaining keywords are left out.
    """
    keywords = _Keywords(written)
    until = clock.thread_time() + seconds
    without: set[int] = set()
    place = ""
    low = 1 if next(iter(written.schema), None) == "type" else 0  # this number of keywords compiles: a type alone does
    while len(without) < MOST_LEFT_OUT:
        above = len(keywords)
        while above - low > 1 and clock.thread_time() < until:
            middle = (low + above) // 2
            if fits(keywords.schema(middle, without)):
                low = middle
            else:
                above = middle
        if above - low != 1:
            break
        place = place or keywords.place(low)
        without.add(low)
        low = above
        if fits(whole := keywords.schema(len(keywords), without)):
            return whole, place
    return keywords.schema(low, without), place


class _Keywords:
    """The keywords of a schema in an order in which they can be added one by one: each after the keyword that contains
    its schema, and a definition after the first reference to it."""

    def __init__(self, written: Written) -> None:
        self._written = written
        self._numbers: dict[tuple[int, str], int] = {}
        self._places: list[tuple[dict[str, Any], str]] = []
        stack, seen = [written.schema], set[int]()
        while stack:
            schema = stack.pop()
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            inner: list[dict[str, Any]] = []
            for keyword, value in schema.items():
                if keyword != "$defs":
                    self._numbers[id(schema), keyword] = len(self._places)
                    self._places.append((schema, keyword))
                    inner += self._schemas(keyword, value)
            stack += reversed(inner)

    def __len__(self) -> int:
        return len(self._places)

    def place(self, number: int) -> str:
        schema, keyword = self._places[number]
        return _below(self._written.places[id(schema)], keyword)

    def schema(self, most: int, without: set[int]) -> dict[str, Any]:
        """The schema of the first `most` keywords, except those in `without`."""
        made = self._made(self._written.schema, most, without)
        definitions = {name: self._made(one, most, without) for name, one in self._written.definitions.items()}
        return {**made, "$defs": definitions} if definitions else made

    def _schemas(self, keyword: str, value: Any) -> list[dict[str, Any]]:
        match keyword:
            case "$ref":
                inner = [self._written.schema if value == "#" else self._written.definitions[value.rpartition("/")[2]]]
            case "properties" | "patternProperties":
                inner = list(value.values())
            case "allOf" | "anyOf" | "oneOf" | "prefixItems":
                inner = value
            case "items" | "additionalProperties":
                inner = [value]
            case _:
                inner = []
        return [one for one in inner if isinstance(one, dict)]

    def _made(self, schema: dict[str, Any] | bool, most: int, without: set[int]) -> Any:
        if isinstance(schema, bool):
            return schema
        made: dict[str, Any] = {}
        for keyword, value in schema.items():
            number = self._numbers.get((id(schema), keyword), most)
            if number >= most or number in without:
                continue
            if any(other in schema and other not in made for other in _NEEDS.get(keyword, ())):
                continue
            match keyword:
                case "properties" | "patternProperties":
                    made[keyword] = {name: self._made(one, most, without) for name, one in value.items()}
                case "allOf" | "prefixItems":
                    made[keyword] = [self._made(one, most, without) for one in value]
                case "anyOf" | "oneOf":  # skip alternatives that are still empty: they would accept every value
                    if begun := [one for one in value if self._begun(one, most)]:
                        made[keyword] = [self._made(one, most, without) for one in begun]
                case "items" | "additionalProperties":
                    made[keyword] = self._made(value, most, without)
                case _:
                    made[keyword] = value
        return made

    def _begun(self, schema: dict[str, Any] | bool, most: int) -> bool:
        first = None if isinstance(schema, bool) else next(iter(schema), None)
        return first is None or self._numbers[id(schema), first] < most
