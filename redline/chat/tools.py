"""Writes the declarations of callable functions into the prompt.

Kimi K2.5 and later were trained on TypeScript declarations; K2 and K2-Thinking on the OpenAI array as compact JSON.
Both are written with every key sorted, as in Moonshot's tokenizer, so that equal tools give equal prompts.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from redline.chat.conversation import Tool
from redline.errors import ContextTooLong

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


class _Paper:
    """An output buffer limited to `most` characters: a schema of a thousand lines nested 60 deep has 60 indents before
    each line, so the length has to be checked while writing."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._pieces: list[str] = []

    def write(self, *pieces: str) -> None:
        for piece in pieces:
            self._left -= len(piece)
            if self._left < 0:
                raise ContextTooLong(f"more than {self._most} characters")
            self._pieces.append(piece)

    def text(self) -> str:
        return "".join(self._pieces)


def declare_json(tools: Sequence[Tool], most: int = sys.maxsize) -> str:
    """The OpenAI tools array as compact JSON, keys sorted. Raises ContextTooLong beyond `most` characters."""
    array = [{"function": _function(tool), "type": "function"} for tool in tools]
    paper = _Paper(most)
    for piece in json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).iterencode(array):
        paper.write(piece)
    return paper.text()


def declare_typescript(tools: Sequence[Tool], most: int = sys.maxsize) -> str:
    """A TypeScript namespace of the tools; compact JSON if a schema has no TypeScript form, as upstream does. Raises
    ContextTooLong beyond `most` characters."""
    paper = _Paper(most)
    paper.write("# Tools\n\n## functions\nnamespace functions {\n")
    try:
        for tool in tools:
            _declare(_function(tool), paper)
            paper.write("\n")
    except (ValueError, TypeError, KeyError, AttributeError):  # raised for a malformed schema
        return declare_json(tools, most)
    paper.write("}\n")
    return paper.text()


def _function(tool: Tool) -> dict[str, Any]:
    """The tool as its client wrote it: omitted fields stay omitted."""
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
    """A type that can be written at any depth."""

    write: Callable[[_Paper, str], None]  # writes to the buffer, with an indent
    comments: tuple[str, ...] = ()  # lines, without indent

    def write_comments(self, paper: _Paper, indent: str) -> None:
        for line in self.comments:
            if line:
                paper.write(indent, "// ", line)
            paper.write("\n")


class _Property(NamedTuple):
    name: str
    optional: bool
    type: _Type
    default: Any

    def write(self, paper: _Paper, indent: str) -> None:
        self.type.write_comments(paper, indent)
        if self.default is not None:
            python = isinstance(self.default, int | float)  # upstream prints these as Python does: True, not true
            default = repr(self.default) if python else json.dumps(self.default, ensure_ascii=False)
            paper.write(indent, "// Default: ", default, "\n")
        paper.write(indent, self.name, "?: " if self.optional else ": ")
        self.type.write(paper, indent)


def _declare(function: dict[str, Any], paper: _Paper) -> None:
    reader = _Reader()
    schema: dict[str, Any] = function.get("parameters", {})
    properties = reader.properties(schema)
    named = reader.refers_to_root  # by a property; a reference from a definition is read too late, as upstream
    if named:
        paper.write("interface parameters ")
        _Properties(properties.fields, None).write(paper, "", required_first=False)
        paper.write("\n")
    for name, definition in list(reader.definitions.items()):
        _Type(_nothing, _lines(definition)).write_comments(paper, "")
        paper.write("interface ", name, " ")
        reader.read(definition).write(paper, "")
        paper.write("\n")
    _Type(_nothing, _lines(function)).write_comments(paper, "")
    paper.write("type ", function["name"], " = (_: ")
    if named:
        paper.write("parameters")
    else:
        properties.write(paper, "")
    paper.write(") => any;")


def _nothing(paper: _Paper, indent: str) -> None:
    pass


def _lines(schema: dict[str, Any], constraints: Sequence[str] = ()) -> tuple[str, ...]:
    """The comment above a type: its description, then its constraints on one line."""
    description: str = schema.get("description") or ""
    lines = description.split("\n") if description else []
    limits = ", ".join(f"{key}: {schema[key]}" for key in constraints if key in schema)
    return (*lines, limits) if limits else tuple(lines)


class _Properties(NamedTuple):
    """An object type: named fields, and perhaps additional ones."""

    fields: tuple[_Property, ...]  # by name
    others: _Type | None

    def write(self, paper: _Paper, indent: str, required_first: bool = True) -> None:
        inner = indent + _INDENT
        fields = sorted(self.fields, key=lambda field: field.optional) if required_first else self.fields
        before = "{\n"
        for field in fields:
            paper.write(before)
            field.write(paper, inner)
            before = ",\n"
        if self.others is not None:
            paper.write(before, inner, "[k: string]: ")
            self.others.write(paper, inner)
            before = ",\n"
        paper.write("{}" if before == "{\n" else f"\n{indent}}}")


class _Reader:
    """Reads the JSON schemas of one function, and collects the definitions that they refer to."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.refers_to_root = False

    def read(self, schema: Any, of_union: bool = False) -> _Type:
        """of_union: upstream joins a union's types as strings, and fails at a type that is not one, such as null."""
        if isinstance(schema, bool):
            return _named("any" if schema else "null")
        if "$ref" in schema:
            return _named(self._reference(schema["$ref"]), _lines(schema))
        if "anyOf" in schema:
            return _Type(
                partial(_write_union, [self.read(one, of_union=True) for one in schema["anyOf"]]), _lines(schema)
            )
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
            return _Type(self.properties(schema).write, _lines(schema))
        comments = _lines(schema, _CONSTRAINTS.get(kind, ()))
        if of_union and not isinstance(kind, str):
            return _Type(_fail, comments)
        if kind == "array":
            item = self.read(schema["items"]) if schema.get("items") else _named("any")
            return _Type(partial(_write_array, item), comments)
        return _named("number" if kind == "integer" else str(kind), comments)

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
    return _Type(lambda paper, indent: paper.write(text), comments)


def _fail(paper: _Paper, indent: str) -> None:
    raise TypeError("a union's type is no string")


def _write_union(types: Sequence[_Type], paper: _Paper, indent: str) -> None:
    for index, one in enumerate(types):
        paper.write(" | " if index else "")
        one.write(paper, indent)


def _write_array(item: _Type, paper: _Paper, indent: str) -> None:
    if not item.comments:
        paper.write("Array<")
        item.write(paper, indent)
        paper.write(">")
        return
    inner = indent + _INDENT
    paper.write("Array<\n")
    item.write_comments(paper, inner)
    paper.write(inner)
    item.write(paper, inner)
    paper.write("\n", indent, ">")


def _check_enum(schema: dict[str, Any]) -> None:
    """Raise ValueError if a value is not of the declared type: such an enum has no TypeScript form upstream."""
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
