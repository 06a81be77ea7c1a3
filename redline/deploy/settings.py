"""The keys of a deployment file as its records declare them: for `redline config`, flags, and tables of the docs."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NamedTuple, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from redline.deploy.config import SIZES, ServeConfig, Workers
from redline.messages.base import bounds_of, parts


class ConfigKey(NamedTuple):
    """A key of the file, or a table."""

    key: str  # dotted; those of a class of [sla] begin with sla.
    hint: Any  # its type, with annotations
    default: Any  # None or empty: see `absent`; msgspec.NODEFAULT: required
    meaning: str  # empty: a table that always exists
    absent: str | None  # the effect of leaving it out, if there is no default value
    example: Any

    @property
    def help(self) -> str:
        """For a flag."""
        return f"{self.meaning} Default: {self.absent or self.default}."

    @property
    def type(self) -> str:
        """For people."""
        if self.key.rpartition(".")[2] in SIZES:
            return "size"
        kinds = {int: "integer", float: "number", bool: "boolean", str: "text"}
        if isinstance(self.example, dict):
            return "table"
        names = [kinds[each] for each in parts(self.hint) if isinstance(each, type) and each in kinds]
        if any(get_origin(each) is tuple for each in parts(self.hint)):
            return f"list of {names[-1]}s".replace("texts", "text")
        return names[0] if names else "text"

    @property
    def range(self) -> str:
        """The values that are accepted; empty: any of its type."""
        choices = [get_args(each) for each in parts(self.hint) if get_origin(each) is Literal]
        if choices:
            return ", ".join(f"`{each}`" for each in choices[0])
        bounds = bounds_of(self.hint)
        return "" if bounds is None else " to ".join(f"{int(each):,}" if each.isdigit() else each for each in bounds)


@cache
def settings() -> dict[str, ConfigKey]:
    """All settings by key, in the order of their declarations."""
    return {each.key: each for each in _settings(ServeConfig, "")}


def _settings(record: type[msgspec.Struct], table: str) -> Iterator[ConfigKey]:
    hints = get_type_hints(record, include_extras=True)
    for field in msgspec.structs.fields(record):
        hint = hints[field.name]
        meta = next((each for each in parts(hint) if isinstance(each, Meta) and each.extra is not None), Meta(extra={}))
        extra, examples = meta.extra or {}, meta.examples or [None]
        key = f"{table}{field.name}"
        yield ConfigKey(key, hint, field.default, meta.description or "", extra.get("absent"), examples[0])
        for inner in dict.fromkeys(each for each in parts(hint) if isinstance(each, type)):
            if issubclass(inner, msgspec.Struct) and record is not Workers:
                yield from _settings(inner, f"{key}.")


def reference(table: str) -> str:
    """The keys of a table in Markdown. table: its dotted name; empty: the top level."""
    lines = ["| Key and example | Type | Default | Range | Meaning |", "|---|---|---|---|---|"]
    for each in settings().values():
        if each.key.rpartition(".")[0] != table or not each.meaning:
            continue
        if each.absent is not None and each.example is None:
            continue  # a table
        required = each.default is msgspec.NODEFAULT
        example = each.default if each.example is None else each.example
        default = "required" if required else each.absent or f"`{toml_value(each.default)}`"
        shown = f"`{each.key.rpartition('.')[2]} = {toml_value(example)}`"
        meaning = each.meaning[0].upper() + each.meaning[1:].rstrip(".")
        lines.append(f"| {shown} | {each.type} | {default} | {each.range} | {meaning} |")
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    """The value in TOML. TOML strings are JSON strings, except that DEL must be escaped."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, cast('tuple[Any, ...]', value)))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {toml_value(of)}' for key, of in cast('dict[str, Any]', value).items())} }}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
