"""A deployment: one TOML file, or one checkpoint folder and flags. What is absent is off, or derived.

weights = "weights/kimi-k2.6"          # the one key that must be there

host = "127.0.0.1"
port = 8000
served_model_name = ["kimi-k2.6"]      # absent: the folder's name
keys_file = "keys.txt"                 # API keys, one per line; absent: everyone who reaches the port is served

[engine]
kv_memory = "8GB"
max_model_len = 65536
"""

import re
import tomllib
from pathlib import Path
from typing import Any, cast

import msgspec

from redline.errors import ConfigError
from redline.wire.base import Record
from redline.worker.config import EngineConfig

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class ServeConfig(Record, frozen=True):
    weights: str
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    keys_file: str | None = None
    engine: EngineConfig = EngineConfig()

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_model_name or (Path(self.weights).resolve().name,)


def read(source: Path, flags: dict[str, Any]) -> ServeConfig:
    """A deployment file, or a checkpoint folder; then the flags that were given, spelled as the file's keys are.

    `engine.kv_memory` names a key of a table. Raises ConfigError naming file and key.
    """
    if source.is_dir():
        values: dict[str, Any] = {"weights": str(source)}
    elif source.is_file():
        try:
            values = tomllib.loads(source.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: not a TOML file: {error}") from None
        for key in ("weights", "keys_file"):
            if isinstance(values.get(key), str):
                values[key] = str(source.parent / values[key])  # paths are relative to the file
    else:
        raise ConfigError(f"{source}: no such folder or file; expected a checkpoint's folder or a deployment.toml")
    for key, value in flags.items():
        table, _, last = key.rpartition(".")
        place = values.setdefault(table, {}) if table else values
        if isinstance(place, dict):  # else the conversion below says so
            cast("dict[str, Any]", place)[last] = value
    if isinstance(values.get("engine"), dict):
        engine: dict[str, Any] = values["engine"]
        if isinstance(engine.get("kv_memory"), str):
            engine["kv_memory"] = size(engine["kv_memory"], f"{source}: engine.kv_memory")
    try:
        config = msgspec.convert(values, ServeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from None
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"{source}: port is {config.port}; expected 0 to 65535 (0: any free one)")
    return config


def size(text: str, place: str) -> int:
    """Bytes: 4096, 500MB, 2GB, 1.5GiB. ConfigError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None:
        raise ConfigError(f"{place} is {text!r}; expected a size such as 500MB, 2GB or 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])
