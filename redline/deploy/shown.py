"""A deployment as equivalent TOML: every key, its value, and where the value comes from."""

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from redline.deploy.config import ServeConfig, Workers
from redline.deploy.settings import settings, toml_value
from redline.worker.config import EngineConfig

# The effect of an absent key, for keys without a default value.
ABSENT = {key: each.absent for key, each in settings().items() if each.absent is not None}
PATHS = {
    "weights", "keys_file", "responses_file", "admin_keys_file", "unix_socket", "tls_cert", "tls_key",
    "cluster.key_file", "engine.speculation.drafter", "engine.speculation.trace",
}  # fmt: skip
_CLASS = re.compile(r"^sla\.[^.]+\.")  # prefix of a key that has one explanation for all classes
COLUMN = 48  # where the comments begin


def as_toml(config: ServeConfig, source: Path, flags: Mapping[str, Any]) -> str:
    """TOML that `read` reads as the same deployment, with a comment on each line.

    source, flags: the arguments that `config` was read from. Paths are absolute, so that the text can be saved
    anywhere.
    """
    file = {} if source.is_dir() else dict(_leaves(tomllib.loads(source.read_text(encoding="utf-8")), ""))

    def why(key: str) -> str:
        drafting = key.startswith("engine.speculation.") and "engine.speculation" in flags
        if key in flags or (drafting and key.rpartition(".")[2] in ("type", "drafter")):
            return "flag"
        if key == "weights" and source.is_dir():
            return "argument"
        return source.name if key in file else "default"

    lines = [f"# Effective values for {source}, with their origin. `redline doctor FOLDER` shows what fits in memory."]
    for table, record in [("", config), *_tables(config)]:
        if record is None:
            lines += ["", f"# [{table}]".ljust(COLUMN) + f"# {why(table)}: {ABSENT[table]}"]
            continue
        lines += ["", f"[{table}]"] if table else []
        lines += _table(record, table, why)
    for number, kind in enumerate(config.workers):
        lines += ["", "[[workers]]", *_worker(kind, config.engine, f"{source.name}, workers[{number}]")]
    return "\n".join(lines) + "\n"


def as_file(config: ServeConfig) -> str:
    """The shortest TOML that `read` reads as the same deployment: only values that differ from the defaults. Empty
    strings are left out, to be set by a flag."""
    lines: list[str] = []
    for table, record in [("", config), *_tables(config)]:
        own = [] if record is None else list(_own(record))
        if own or record is config.steer is not None:  # an empty [steer] still enables it
            lines += ["", f"[{table}]", *own] if table else own
    for kind in config.workers:
        lines += ["", "[[workers]]", *_own(kind), *filter(None, [_engine(kind, config.engine)])]
    return "\n".join(lines) + "\n"


def _tables(config: ServeConfig) -> list[tuple[str, msgspec.Struct | None]]:
    """All tables of a deployment except the top level and [[workers]], with their names."""
    return [
        *((name, getattr(config, name)) for name in ("per_key", "requests", "handoff")),
        *((f"sla.{name}", sla) for name, sla in config.sla.items()),
        *((name, getattr(config, name)) for name in ("steer", "cluster", "events", "engine")),
        ("engine.speculation", config.engine.speculation),
    ]


def _own(record: msgspec.Struct) -> Iterator[str]:
    """Lines for the values that differ from a record's defaults; nested tables are left out."""
    if record.__struct_config__.tag is not None:
        yield f"{record.__struct_config__.tag_field} = {toml_value(record.__struct_config__.tag)}"
    for field in msgspec.structs.fields(type(record)):
        value = getattr(record, field.name)
        inner = isinstance(value, msgspec.Struct) or field.name in ("workers", "sla")
        if not inner and value not in (None, "", field.default):
            yield f"{field.encode_name} = {toml_value(value)}"


def _table(record: msgspec.Struct, table: str, why: Callable[[str], str]) -> Iterator[str]:
    tag = record.__struct_config__.tag
    fields = [] if tag is None else [(record.__struct_config__.tag_field or "", tag)]
    for name, value in [*fields, *((name, getattr(record, name)) for name in record.__struct_fields__)]:
        key = f"{table}.{name}".lstrip(".")
        if isinstance(value, msgspec.Struct) or key in (
            "workers",
            "sla",
            "steer",
            "cluster",
            "events",
            "engine.speculation",
        ):
            continue  # has a table of its own
        if value is None or value == ():
            yield f"# {name} =".ljust(COLUMN) + f"# {why(key)}: {ABSENT[_CLASS.sub('sla.', key)]}"
            continue
        if key in PATHS:
            value = os.path.abspath(cast("str", value))
        yield f"{name} = {toml_value(value)}".ljust(COLUMN - 1) + f" # {why(key)}"


def _worker(kind: Workers, engine: EngineConfig, place: str) -> Iterator[str]:
    for name in kind.__struct_fields__:
        value = getattr(kind, name)
        if name == "engine":
            if own := _engine(kind, engine):
                yield own.ljust(COLUMN - 1) + f" # {place}"
        elif value is None or value == ():
            yield f"# {name} =".ljust(COLUMN) + f"# default: {ABSENT[f'workers.{name}']}"
        else:
            yield f"{name} = {toml_value(value)}".ljust(COLUMN - 1) + f" # {place}"


def _engine(kind: Workers, engine: EngineConfig) -> str:
    """The line with the keys that differ from [engine]; empty if none does."""
    own = {key: getattr(kind.engine, key) for key in EngineConfig.__struct_fields__}
    own = {key: of for key, of in own.items() if of != getattr(engine, key) and of is not None}
    if "disk" in own:
        own["disk"] = os.path.abspath(own["disk"])
    return f"engine = {{ {', '.join(f'{key} = {toml_value(of)}' for key, of in own.items())} }}" if own else ""


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
