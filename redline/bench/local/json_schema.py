"""A JSON Schema validator for the keywords that evaluation sets use, with nothing but the standard library.

It refuses a schema with a keyword that it does not know: a constraint that is silently skipped would grade wrong
answers as right. https://json-schema.org/draft/2020-12/json-schema-validation
"""

import re
from collections.abc import Callable
from decimal import Decimal
from itertools import combinations
from typing import Any, cast

_ANNOTATIONS = {"$schema", "title", "description", "default", "examples"}


def violation(value: Any, schema: dict[str, Any] | bool, path: str = "$") -> str | None:
    """The first way in which a JSON value breaks the schema, as one line that names the place; None: it is valid.

    Raises ValueError for a keyword outside the subset.
    """
    if isinstance(schema, bool):
        return None if schema else f"{path} is not allowed"
    for keyword, argument in schema.items():
        if keyword in _ANNOTATIONS:
            continue
        if keyword not in _KEYWORDS:
            raise ValueError(f"the schema at {path} uses {keyword!r}, which this validator does not know")
        if found := _KEYWORDS[keyword](value, argument, schema, path):
            return found
    return None


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values: 1 equals 1.0, true equals only true, and objects have no order."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        one, other = cast(list[Any], a), cast(list[Any], b)
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(a, dict) and isinstance(b, dict):
        left, right = cast(dict[str, Any], a), cast(dict[str, Any], b)
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return a == b


Keyword = Callable[[Any, Any, dict[str, Any], str], str | None]  # value, argument, whole schema, path


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and value == value // 1,
    "number": _is_number,
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def _type(value: Any, names: str | list[str], _: dict[str, Any], path: str) -> str | None:
    wanted = [names] if isinstance(names, str) else names
    return None if any(_TYPES[name](value) for name in wanted) else f"{path} is not {' or '.join(wanted)}"


def _enum(value: Any, choices: list[Any], _: dict[str, Any], path: str) -> str | None:
    return None if any(same(value, choice) for choice in choices) else f"{path} is not one of {choices}"


def _const(value: Any, only: Any, _: dict[str, Any], path: str) -> str | None:
    return None if same(value, only) else f"{path} is not {only!r}"


def _any_of(value: Any, options: list[dict[str, Any]], _: dict[str, Any], path: str) -> str | None:
    return None if any(violation(value, option, path) is None for option in options) else f"{path} fits no alternative"


def _required(value: Any, names: list[str], _: dict[str, Any], path: str) -> str | None:
    if not isinstance(value, dict):
        return None
    missing = [name for name in names if name not in value]
    return f"{path} lacks {missing[0]!r}" if missing else None


def _properties(value: Any, members: dict[str, dict[str, Any]], _: dict[str, Any], path: str) -> str | None:
    if not isinstance(value, dict):
        return None
    fields = cast(dict[str, Any], value)
    found = (violation(fields[name], schema, f"{path}.{name}") for name, schema in members.items() if name in fields)
    return next(filter(None, found), None)


def _additional(value: Any, rest: dict[str, Any] | bool, schema: dict[str, Any], path: str) -> str | None:
    if not isinstance(value, dict):
        return None
    fields, known = cast(dict[str, Any], value), schema.get("properties", {})
    found = (violation(fields[name], rest, f"{path}.{name}") for name in fields if name not in known)
    return next(filter(None, found), None)


def _items(value: Any, schema: dict[str, Any] | bool, _: dict[str, Any], path: str) -> str | None:
    if not isinstance(value, list):
        return None
    found = (violation(item, schema, f"{path}[{i}]") for i, item in enumerate(cast(list[Any], value)))
    return next(filter(None, found), None)


def _unique(value: Any, wanted: bool, _: dict[str, Any], path: str) -> str | None:
    if not (wanted and isinstance(value, list)):
        return None
    repeated = any(same(a, b) for a, b in combinations(cast(list[Any], value), 2))
    return f"{path} repeats an item" if repeated else None


def _pattern(value: Any, pattern: str, _: dict[str, Any], path: str) -> str | None:
    return f"{path} does not match {pattern}" if isinstance(value, str) and not re.search(pattern, value) else None


def _bound(applies: Callable[[Any], bool], fits: Callable[[Any, Any], bool], words: str) -> Keyword:
    def check(value: Any, limit: Any, _: dict[str, Any], path: str) -> str | None:
        return f"{path} {words} {limit}" if applies(value) and not fits(value, limit) else None

    return check


_KEYWORDS: dict[str, Keyword] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "anyOf": _any_of,
    "required": _required,
    "properties": _properties,
    "additionalProperties": _additional,
    "items": _items,
    "uniqueItems": _unique,
    "pattern": _pattern,
    "minimum": _bound(_is_number, lambda value, limit: value >= limit, "is less than"),
    "maximum": _bound(_is_number, lambda value, limit: value <= limit, "is more than"),
    "exclusiveMinimum": _bound(_is_number, lambda value, limit: value > limit, "is not above"),
    "exclusiveMaximum": _bound(_is_number, lambda value, limit: value < limit, "is not below"),
    "multipleOf": _bound(
        _is_number, lambda value, limit: Decimal(str(value)) % Decimal(str(limit)) == 0, "is not a multiple of"
    ),
    "minLength": _bound(_TYPES["string"], lambda value, limit: len(value) >= limit, "is shorter than"),
    "maxLength": _bound(_TYPES["string"], lambda value, limit: len(value) <= limit, "is longer than"),
    "minItems": _bound(_TYPES["array"], lambda value, limit: len(value) >= limit, "has fewer items than"),
    "maxItems": _bound(_TYPES["array"], lambda value, limit: len(value) <= limit, "has more items than"),
}
