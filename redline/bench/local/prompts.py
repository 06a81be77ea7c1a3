"""Evaluation sets on disk, and what comes back: one JSON line per prompt, OpenAI-shaped, with its check."""

import gzip
from pathlib import Path
from typing import Any

import msgspec

from redline.chat.lines import Chat
from redline.errors import ConfigError
from redline.wire.base import Record
from redline.wire.delta import Finish


class Prompt(Chat, frozen=True, kw_only=True):
    """One line of a set."""

    kind: str
    check: dict[str, Any]  # see checks.py


class Answer(Record, frozen=True):
    """What the model said, in full."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[tuple[str, str], ...] = ()  # name, arguments as JSON text
    finish: Finish = "stop"
    tokens: int = 0


def read_sets(folder: Path) -> dict[str, list[Prompt]]:
    """{set: prompts} of every SET.jsonl, SET.PART.jsonl and the same with .gz.

    Raises ConfigError, which names the file and the line.
    """
    sets: dict[str, list[Prompt]] = {}
    for file in sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")]):
        sets.setdefault(file.name.split(".")[0], []).extend(_read_set(file))
    if not sets:
        raise ConfigError(f"{folder}: no evaluation sets (*.jsonl) here")
    return sets


def _read_set(file: Path) -> list[Prompt]:
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    decoder = msgspec.json.Decoder(Prompt)
    prompts: list[Prompt] = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            prompts.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}, line {number}: {error}") from None
    return prompts
