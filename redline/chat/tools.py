"""How the functions that a model may call are written into its prompt.

Kimi K2.5 and later were trained on TypeScript declarations; K2 and K2-Thinking on the OpenAI array as compact JSON.
Both are written with every key sorted, as Moonshot's tokenizer does, so that equal tools give equal prompts.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from redline.chat.conversation import Tool

_INDENT = "  "
_UNION = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_PYTHON = {"string": str, "number": (int, float), "integer": int, "boolean": bool}


def declare_json(tools: Sequence[Tool]) -> str:
    """The OpenAI tools array as compact JSON."""
    array = [{"function": _function(tool), "type": "function"} for tool in tools]
    return json.dumps(array, ensure_ascii=False, separators=(",", ":"))


def declare_typescript(tools: Sequence[Tool]) -> str:
    """A TypeScript namespace of the tools; compact JSON where a schema has no TypeScript form, as upstream."""
    try:
        functions = [_declaration(_function(tool)) for tool in tools]
    except (ValueError, TypeError, KeyError, AttributeError):  # what a schema out of shape raises below
        return declare_json(tools)
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(functions) + "\n}\n"


def _function(tool: Tool) -> dict[str, Any]:
    """The tool as its client wrote it: what was left out stays out."""
    fields = {"description": tool.description, "name": tool.name, "parameters": tool.parameters}
    return _sorted({key: value for key, value in fields.items() if value})


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list):
        return [_sorted(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value


@dataclass(frozen=True, slots=True)
class _Type:
    """A type that can be printed at any depth."""

    text: Callable[[str], str]  # indent -> TypeScript
    comments: tuple[str, ...] = ()  # lines, without indent

    def comment(self, indent: str) -> str:
        return "".join((f"{indent}// {line}" if line else "") + "\n" for line in self.comments)


class _Property(NamedTuple):
    name: str
    optional: bool
    type: _Type
    default: Any

    def text(self, indent: str) -> str:
        comment = self.type.comment(indent)
        if self.default is not None:
            python = isinstance(self.default, int | float)  # upstream prints these as Python does: True, not true
            default = repr(self.default) if python else json.dumps(self.default, ensure_ascii=False)
            comment += f"{indent}// Default: {default}\n"
        return f"{comment}{indent}{self.name}{'?' if self.optional else ''}: {self.type.text(indent)}"


def _declaration(function: dict[str, Any]) -> str:
    reader = _Reader()
    schema: dict[str, Any] = function.get("parameters", {})
    properties = reader.properties(schema)
    interfaces: list[str] = []
    argument: str | None = None
    if reader.refers_to_root:
        argument = "parameters"
        fields = ",\n".join(field.text(_INDENT) for field in properties.fields)
        interfaces.append(f"interface parameters {{\n{fields}\n}}" if fields else "interface parameters {}")
    for name, definition in list(reader.definitions.items()):
        comment = _Type(str, _lines(definition)).comment("")
        interfaces.append(f"{comment}interface {name} {reader.read(definition).text('')}")
    if argument is None:
        argument = properties.text("")
    description = "\n".join(f"// {line}" if line else "" for line in _lines(function))
    declaration = f"type {function['name']} = (_: {argument}) => any;"
    return "\n".join(part for part in ("\n".join(interfaces), description, declaration) if part)


def _lines(schema: dict[str, Any], constraints: Sequence[str] = ()) -> tuple[str, ...]:
    """The comment above a type: its description, then its constraints on one line."""
    description: str = schema.get("description") or ""
    lines = description.split("\n") if description else []
    limits = ", ".join(f"{key}: {schema[key]}" for key in constraints if key in schema)
    return (*lines, limits) if limits else tuple(lines)


class _Properties(NamedTuple):
    """An object type: named fields, and perhaps others."""

    fields: tuple[_Property, ...]  # by name
    others: _Type | None

    def text(self, indent: str) -> str:
        inner = indent + _INDENT
        required_first = sorted(self.fields, key=lambda field: field.optional)
        texts = [field.text(inner) for field in required_first]
        if self.others is not None:
            texts.append(f"{inner}[k: string]: {self.others.text(inner)}")
        return "{\n" + ",\n".join(texts) + f"\n{indent}}}" if texts else "{}"


class _Reader:
    """Reads the JSON schemas of one function, and remembers what they refer to."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.refers_to_root = False

    def read(self, schema: Any) -> _Type:
        if isinstance(schema, bool):
            return _named("any" if schema else "null")
        if "$ref" in schema:
            return _named(self._reference(schema["$ref"]), _lines(schema))
        if "anyOf" in schema:
            types = [self.read(one) for one in schema["anyOf"]]
            return _Type(lambda indent: " | ".join(one.text(indent) for one in types), _lines(schema))
        if "enum" in schema:
            _check_enum(schema)
            values = " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])
            return _named(values, _lines(schema))
        if "type" not in schema:
            if schema != {}:
                raise ValueError("a schema without a type")
            return _named("any")
        kind: Any = schema["type"]
        if isinstance(kind, list):
            return _named(" | ".join(_UNION[one] for one in schema["type"]), _lines(schema))
        if kind == "object":
            return _Type(self.properties(schema).text, _lines(schema))
        comments = _lines(schema, _CONSTRAINTS.get(kind, ()))
        if kind == "array":
            item = self.read(schema["items"]) if schema.get("items") else _named("any")
            return _Type(lambda indent: _array(item, indent), comments)
        return _named("number" if kind == "integer" else kind, comments)

    def properties(self, schema: dict[str, Any]) -> _Properties:
        self.definitions.update(schema.get("$defs") or {})
        others: Any = schema.get("additionalProperties")
        if others is not None:
            others = _named("never") if others is False else self.read(others)
        required: set[str] = set(schema.get("required", ()))
        fields: dict[str, Any] = schema.get("properties", {})
        return _Properties(tuple(self._property(name, one, required) for name, one in fields.items()), others)

    def _property(self, name: str, schema: Any, required: set[str]) -> _Property:
        default = None if isinstance(schema, bool) else schema.get("default")
        return _Property(name, name not in required, self.read(schema), default)

    def _reference(self, target: str) -> str:
        if target == "#":
            self.refers_to_root = True
            return "parameters"
        name = target.rpartition("/")[2]
        if not target.startswith("#/$defs/") or not isinstance(self.definitions[name], dict):
            raise ValueError(f"a reference to {target}")
        return name


def _named(text: str, comments: tuple[str, ...] = ()) -> _Type:
    return _Type(lambda indent: text, comments)


def _array(item: _Type, indent: str) -> str:
    inner = indent + _INDENT
    if not item.comments:
        return f"Array<{item.text(indent)}>"
    return f"Array<\n{item.comment(inner)}{inner}{item.text(inner)}\n{indent}>"


def _check_enum(schema: dict[str, Any]) -> None:
    """Raise ValueError where a value is not of the declared type: such an enum has no TypeScript form upstream."""
    kind: Any = schema.get("type")
    if isinstance(kind, list):
        match [one for one in schema["type"] if one != "null"]:
            case [kind] if len(schema["type"]) <= 2:
                pass
            case [] if 0 < len(schema["type"]) <= 2:
                return
            case _:
                raise ValueError("an enum of several types")
    python = _PYTHON.get(kind)
    if python and not all(value is None or isinstance(value, python) for value in schema["enum"]):
        raise ValueError("an enum value of another type")
