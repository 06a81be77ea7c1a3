"""Evaluation sets on disk, and answers: one JSON line per prompt, in OpenAI's format, with its check."""

import gzip
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from redline.bench.quality.checks import check_check
from redline.chat.lines import NOT_JSON, Chat
from redline.errors import ConfigError
from redline.messages.base import Record
from redline.messages.delta import Finish


class EvalPrompt(Chat, frozen=True, kw_only=True):
    """One line of a set: a conversation, its kind, and the check that grades the answer."""

    kind: str
    check: dict[str, Any]  # see checks.py


class ModelAnswer(Record, frozen=True):
    """A complete answer of the model. tokens: number of generated tokens, thinking included."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[tuple[str, str], ...] = ()  # name, arguments as JSON text
    finish: Finish = "stop"
    tokens: int = 0


def read_sets(folder: Path) -> dict[str, list[EvalPrompt]]:
    """{set: prompts} of every SET.jsonl, SET.PART.jsonl and the same with .gz. Every check is validated.

    Raises ConfigError, which names the file and the line.
    """
    sets: dict[str, list[EvalPrompt]] = {}
    for file in sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")]):
        sets.setdefault(file.name.split(".")[0], []).extend(_read_set(file))
    if not sets:
        raise ConfigError(f"{folder}: contains no evaluation sets (*.jsonl)")
    if not any(sets.values()):
        raise ConfigError(f"{folder}: its sets (*.jsonl) contain no prompt")
    return sets


def limited(sets: Mapping[str, Sequence[EvalPrompt]], limit: int) -> dict[str, list[EvalPrompt]]:
    """At most `limit` prompts per kind and set, evenly spread over the set: the same ones in every call."""
    chosen: dict[str, list[EvalPrompt]] = {}
    for name, prompts in sets.items():
        of_kind: dict[str, list[int]] = defaultdict(list)
        for place, prompt in enumerate(prompts):
            of_kind[prompt.kind].append(place)
        taken = [
            places[number * len(places) // most]
            for places in of_kind.values()
            for most in [min(limit, len(places))]
            for number in range(most)
        ]
        chosen[name] = [prompts[place] for place in sorted(taken)]
    return chosen


def _read_set(file: Path) -> list[EvalPrompt]:
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    decoder = msgspec.json.Decoder(EvalPrompt)
    prompts: list[EvalPrompt] = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            prompt = decoder.decode(line)
            check_check(prompt.check)
        except (*NOT_JSON, ValueError) as error:
            raise ConfigError(f"{file}, line {number}: {error}") from None
        prompts.append(prompt)
    return prompts
