"""Random JSON schemas as clients write them, for constrained output: a function of a seed.

Most are plain: objects of bounded strings, numbers, enums and lists. Some have references, unions, recursion, patterns
and formats; and one in forty has a keyword that constrained output does not support, which must be refused by its name.
"""

import random
from typing import Any, cast

NAMES = ("name", "city", "unit", "count", "tags", "when", "price", "ok", "note-2", "größe", "$ref_id", "a b", "")
WORDS = ("red", "green", "Zürich", 'a "quote"', "back\\slash", "日本", "x" * 12, "")
PATTERNS = ("^[a-z]{2,5}$", "^[A-Z][a-z]+-[0-9]{3}$", "[0-9]+", "^(yes|no)$", r"^\d{4}-\d{2}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
UNKNOWN: tuple[dict[str, Any], ...] = (
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    {"not": {"type": "string"}},
    {"type": "object", "propertyNames": {"maxLength": 3}},
    {"if": {"type": "string"}, "then": {"maxLength": 3}},
)
ONE_IN = 40  # share of schemas with an unknown keyword


def schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` schemas; the same for the same seed, and a longer list continues a shorter one."""
    return [schema(random.Random(f"{seed} {n}")) for n in range(count)]


def schema(draw: random.Random) -> dict[str, Any]:
    """One schema, of an object."""
    own = _object(draw, draw.choice((1, 2, 2, 3)))
    match draw.randrange(8):
        case 0:
            node = {
                "type": "object",
                "properties": {"value": _leaf(draw), "next": {"$ref": "#/$defs/node"}},
                "required": ["value"],
                "additionalProperties": False,
            }
            own["$defs"] = {"node": node}
            own["properties"]["list"] = {"$ref": "#/$defs/node"}
        case 1:
            own["$defs"] = {"leaf": _leaf(draw)}
            own["properties"]["leaf"] = {"$ref": "#/$defs/leaf"}
            own.setdefault("required", []).append("leaf")
        case _:
            pass
    if draw.randrange(ONE_IN) == 0:
        own["properties"]["odd"] = draw.choice(UNKNOWN)
    return own


def unbounded(value: Any) -> Any:
    """The schema with strings of any length and any characters, as most clients write them."""
    if isinstance(value, list):
        return [unbounded(one) for one in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    return {key: unbounded(one) for key, one in fields.items() if key not in ("minLength", "maxLength", "pattern")}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(NAMES, draw.randint(1, 4))
    made: dict[str, Any] = {"type": "object", "properties": {name: _any(draw, depth - 1) for name in names}}
    required = [name for name in names if draw.random() < 0.7]
    if required:
        made["required"] = required
    if draw.random() < 0.8:
        made["additionalProperties"] = False
    elif draw.random() < 0.5:
        made["additionalProperties"] = _leaf(draw)
    if draw.random() < 0.3:
        made["description"] = "What this is: {braces} and <|im_end|>"
    return made


def _any(draw: random.Random, depth: int) -> dict[str, Any]:
    if depth <= 0 or draw.random() < 0.5:
        return _leaf(draw)
    match draw.randrange(5):
        case 0 | 1:
            return _object(draw, depth)
        case 2:
            return _array(draw, depth)
        case 3:
            return {"anyOf": [_any(draw, depth - 1), {"type": "null"}]}
        case _:
            kinds = [{"const": word} for word in draw.sample(WORDS[:5], 2)]
            return {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {"kind": kind, "value": _leaf(draw)},
                        "required": ["kind", "value"],
                        "additionalProperties": False,
                    }
                    for kind in kinds
                ]
            }


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "array", "items": _any(draw, depth - 1), "maxItems": draw.randint(1, 3)}
    if draw.random() < 0.5:
        made["minItems"] = draw.randint(0, made["maxItems"])
    if draw.random() < 0.2:
        made["prefixItems"] = [_leaf(draw)]
    return made


def _leaf(draw: random.Random) -> dict[str, Any]:
    match draw.randrange(12):
        case 0 | 1:
            return {"type": "string", "maxLength": draw.randint(1, 12)}
        case 2:
            least = draw.randint(0, 4)
            return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 6)}
        case 3:
            return {"type": "string", "pattern": draw.choice(PATTERNS)}
        case 4:
            return {"type": "string", "format": draw.choice(FORMATS)}
        case 5:
            return {"enum": draw.sample([*WORDS, 1, -2.5, True, None, [1], {"a": 1}], draw.randint(1, 4))}
        case 6:
            return {"type": "string", "enum": draw.sample(WORDS, draw.randint(1, 3))}
        case 7:
            least = draw.randint(-50, 50)
            return {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 500)}
        case 8:
            least = draw.randint(-5, 5)
            return {"type": "number", "minimum": least, "exclusiveMaximum": least + draw.randint(1, 50)}
        case 9:
            return {"type": "integer", "multipleOf": draw.choice((2, 5, 10)), "minimum": 0, "maximum": 1000}
        case 10:
            return {"type": ["boolean", "null"]}
        case _:
            return {"const": draw.choice([*WORDS, 7, False, [1, "a"]])}
