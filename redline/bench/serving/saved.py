"""The file format of results: figures under vLLM's keys, and their raw data under the key `redline`.

Scripts for files of `vllm bench serve --save-result` can read ours: the top level has the same keys. The key `redline`
contains what vLLM's files lack: provenance, the configuration of the load, the load of the load generator, and a row
per request, from which all figures can be recomputed. Rows are compact: times are milliseconds from the start of the
run, rounded to a microsecond; those of chunks are relative to the previous chunk.
"""

import math
import re
from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import msgspec

from redline.bench.serving.metrics import LISTS
from redline.bench.serving.records import Failure, GeneratorLoad, Kind, LoadRequest, StreamChunk, TimedAnswer, Usage
from redline.bench.serving.target import LoadPace, ServerTarget
from redline.disk import save as save_bytes
from redline.errors import ConfigError
from redline.messages.base import Record

FORMAT = 1
SECRETS = ("key", "token", "auth", "secret", "cookie", "password", "credential", "signature")
_LETTERS: dict[Kind, str] = {"answer": "a", "thinking": "t", "tool": "c"}
_KINDS: dict[str, Kind] = {letter: kind for kind, letter in _LETTERS.items()}


class BenchResult(Record, frozen=True):
    """The result of a `redline bench` command that measured over HTTP.

    kind: the command, such as serve; `vllm` for a file of vLLM's client. figures: by key; for kind serve they are
    `metrics.figures` and the description of the run, under vLLM's names. target, dataset: as configured, without
    secrets. began: Unix time. details: further data of a command, such as the points of a sweep.
    """

    kind: str
    figures: dict[str, Any]
    command: tuple[str, ...] = ()
    provenance: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    target: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    dataset: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    pace: LoadPace | None = None
    generator: GeneratorLoad | None = None
    began: float = 0.0
    stopped: bool = False
    notes: tuple[str, ...] = ()
    details: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    answers: tuple[TimedAnswer, ...] = ()


class SavedRow(Record, frozen=True, omit_defaults=True):
    """One request in a file. kinds: run lengths of chunk kinds, such as t12a30: 12 of thinking, 30 of the answer; c is
    a tool call. Texts are saved only if requested."""

    index: int
    max_tokens: int
    planned: float
    end: float
    prompt_tokens: int | None = None
    name: str = ""
    taken: float | None = None
    connected: float | None = None
    sent: float | None = None
    head: float | None = None
    chunks: tuple[float, ...] = ()
    kinds: str = ""
    characters: tuple[int, ...] = ()
    tokens: tuple[int | None, ...] = ()  # (): no event reported them
    usage: Usage | None = None
    finish: str | None = None
    status: int | None = None
    failure: Failure | None = None
    error: str | None = None
    text: str = ""
    thinking: str = ""
    calls: tuple[dict[str, Any], ...] = ()


def save(path: Path, result: BenchResult, *, detailed: bool = False) -> None:
    """Writes a result as JSON, atomically. Raises ConfigError if the file cannot be written.

    detailed: includes vLLM's per-request lists at the top level, and texts.
    """
    save_bytes(path, encode(result, detailed=detailed))


def encode(result: BenchResult, *, detailed: bool = False) -> bytes:
    """The JSON of a result, with one line per key and per row."""
    ours: dict[str, Any] = {"format": FORMAT}
    ours |= msgspec.to_builtins(msgspec.structs.replace(result, figures={}, pace=None, answers=()))
    ours["pace"] = None if result.pace is None else _finite(msgspec.to_builtins(result.pace))
    del ours["figures"], ours["answers"]
    rows = b",\n  ".join(msgspec.json.encode(row_of(answer, texts=detailed)) for answer in result.answers)
    left_out = () if detailed else LISTS
    figures = {key: value for key, value in result.figures.items() if key not in left_out}
    top = [_member(key, value) for key, value in _finite(figures).items()]
    members = [_member(key, value) for key, value in ours.items()]
    members.append(b'"rows": [\n  ' + rows + b"\n ]")
    top.append(b'"redline": {\n ' + b",\n ".join(members) + b"}")
    return b"{" + b",\n".join(top) + b"}\n"


def read(path: Path) -> BenchResult:
    """Reads the result in a file of Redline or of vLLM's client.

    The latter has kind `vllm`. It contains answers if it was saved with --save-detailed; all their events count as
    answer, since the file does not mark thinking.

    Raises ConfigError if the file cannot be read, or has neither format.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not a benchmark result: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: is not a benchmark result: expected one JSON object")
    figures: dict[str, Any] = dict(found)  # pyright: ignore[reportUnknownArgumentType]
    ours = figures.pop("redline", None)
    if ours is None:
        if not {"duration", "completed", "model_id"} <= set(figures):
            raise ConfigError(f"{path}: is neither a result of `redline bench` nor one of `vllm bench serve`")
        return BenchResult(kind="vllm", figures=figures, answers=_answers_of_vllm(path, figures))
    try:
        kept = msgspec.convert(ours, dict[str, Any])
        if (version := kept.pop("format", FORMAT)) != FORMAT:
            raise ConfigError(f"{path}: has format {version}, but this version of Redline reads format {FORMAT}")
        kept["pace"] = kept.get("pace") and _infinite(kept["pace"])
        answers = tuple(map(answer_of, msgspec.convert(kept.pop("rows", None), list[SavedRow])))
        result = msgspec.convert({**kept, "figures": {}}, BenchResult)
    except (AttributeError, msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{path}: its key `redline` is invalid: {error}") from None
    return msgspec.structs.replace(result, figures=figures, answers=answers)


class _Detailed(msgspec.Struct):
    """The per-request lists of vLLM's --save-detailed."""

    start_times: list[float]
    ttfts: list[float]
    itls: list[list[float]]
    input_lens: list[int]
    output_lens: list[int]
    errors: list[str]


def _answers_of_vllm(path: Path, figures: dict[str, Any]) -> tuple[TimedAnswer, ...]:
    if not set(_Detailed.__struct_fields__) <= set(figures):
        return ()
    try:
        lists = msgspec.convert(figures, _Detailed)
        ends = list(zip(lists.input_lens, lists.output_lens, lists.errors, strict=True))
        rows = list(zip(lists.start_times, lists.ttfts, lists.itls, ends, strict=True))
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{path}: its per-request lists are invalid: {error}") from None
    began = min(lists.start_times, default=0.0)
    made: list[TimedAnswer] = []
    for index, (start, first, gaps, (prompt, tokens, error)) in enumerate(rows):
        sent = start - began
        times = [] if error else list(accumulate(gaps, initial=sent + first))
        made.append(
            TimedAnswer(
                index=index,
                ask=LoadRequest(max_tokens=max(1, tokens), text="", prompt_tokens=prompt),
                planned=sent,
                sent=sent,
                end=times[-1] if times else sent,
                chunks=tuple(StreamChunk(at=at, kind="answer", characters=0) for at in times),
                usage=Usage(prompt_tokens=prompt, completion_tokens=tokens),
                failure="server" if error else None,
                error=error.strip().splitlines()[-1] if error.strip() else None,
            )
        )
    return tuple(made)


# ------------------------------------------------------------------------------------------------------------ secrets


def without_secrets(target: ServerTarget) -> dict[str, Any]:
    """A target for saving: without key, header values, and body fields with names that suggest secrets."""
    kept: dict[str, Any] = msgspec.to_builtins(target)
    kept["key"] = None if target.key is None else "given"
    kept["headers"] = dict.fromkeys(target.headers, "given")
    kept["body"] = _without(kept["body"])
    scheme, separator, rest = target.base_url.partition("://")
    host, slash, path = rest.partition("/")
    kept["base_url"] = f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"
    return kept


def _without(value: Any) -> Any:
    """A JSON value in which fields with names that suggest secrets are replaced, at any depth."""
    if isinstance(value, dict):
        fields: dict[str, Any] = dict(value)  # pyright: ignore[reportUnknownArgumentType]
        return {name: "given" if _secret(name) else _without(inner) for name, inner in fields.items()}
    if isinstance(value, list | tuple):
        return [_without(inner) for inner in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def command_without_secrets(words: Sequence[str]) -> tuple[str, ...]:
    """A command line for saving: values of --header, --key and of --extra-body with a secret are removed.

    So are the user and password of any address.
    """
    kept: list[str] = []
    option = ""
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            kept.append(option + equals + (_hidden(option, value) if equals else ""))
        else:
            kept.append(_hidden(option, word))
    return tuple(kept)


def _hidden(option: str, value: str) -> str:
    match option.replace("_", "-"):
        case "--header":
            return value.partition("=")[0] + "=..."
        case "--key":
            return "..."
        case "--extra-body" if _secret(value):
            return "..."
        case _:
            # An address may also occur without a flag, and without its scheme.
            return re.sub(r'^(?:(https?://)[^/]*|[^/\s:{"]+:[^/\s]*)@', r"\1...@", value)


def _secret(name: str) -> bool:
    known = re.sub(r"\b(?:max_|min_|max_completion_|stop_token_|return_token_)(?:tokens|ids)\b", "", name.lower())
    return any(word in known for word in SECRETS)


# ---------------------------------------------------------------------------------------------------------------- rows


def row_of(answer: TimedAnswer, *, texts: bool = False) -> SavedRow:
    """The row of an answer; its prompt and its own fields of the body are not saved."""
    instants = [round(chunk.at * 1e6) for chunk in answer.chunks]
    known = any(chunk.tokens is not None for chunk in answer.chunks)
    kinds: list[Kind] = [chunk.kind for chunk in answer.chunks]
    return SavedRow(
        index=answer.index,
        max_tokens=answer.ask.max_tokens,
        planned=round(answer.planned * 1000, 3),
        end=round(answer.end * 1000, 3),
        prompt_tokens=answer.ask.prompt_tokens,
        name=answer.ask.name,
        taken=_ms(answer.taken),
        connected=_ms(answer.connected),
        sent=_ms(answer.sent),
        head=_ms(answer.head),
        chunks=tuple((at - before) / 1000 for before, at in zip([0, *instants], instants, strict=False)),
        kinds="".join(f"{_LETTERS[kind]}{len(list(run))}" for kind, run in groupby(kinds)),
        characters=tuple(chunk.characters for chunk in answer.chunks),
        tokens=tuple(chunk.tokens for chunk in answer.chunks) if known else (),
        usage=answer.usage,
        finish=answer.finish,
        status=answer.status,
        failure=answer.failure,
        error=answer.error,
        text=answer.text if texts else "",
        thinking=answer.thinking if texts else "",
        calls=answer.calls if texts else (),
    )


def answer_of(row: SavedRow) -> TimedAnswer:
    """The answer of a row; its prompt is empty text. Raises ValueError if the row is inconsistent."""
    kinds = _kinds(row.kinds, len(row.chunks))
    tokens = row.tokens or (None,) * len(row.chunks)
    if not len(row.chunks) == len(row.characters) == len(tokens):
        raise ValueError(f"request {row.index}: its chunks, characters and tokens differ in number")
    instants = accumulate(round(delta * 1000) for delta in row.chunks)
    chunks = zip(instants, kinds, row.characters, tokens, strict=True)
    return TimedAnswer(
        index=row.index,
        ask=LoadRequest(max_tokens=row.max_tokens, text="", prompt_tokens=row.prompt_tokens, name=row.name),
        planned=row.planned / 1000,
        taken=_seconds(row.taken),
        connected=_seconds(row.connected),
        sent=_seconds(row.sent),
        head=_seconds(row.head),
        end=row.end / 1000,
        chunks=tuple(StreamChunk(at=at / 1e6, kind=kind, characters=many, tokens=n) for at, kind, many, n in chunks),
        text=row.text,
        thinking=row.thinking,
        calls=row.calls,
        usage=row.usage,
        finish=row.finish,
        status=row.status,
        failure=row.failure,
        error=row.error,
    )


def _kinds(runs: str, chunks: int) -> list[Kind]:
    found: list[Kind] = []
    parts = re.findall(r"([a-z])([0-9]+)", runs)
    if "".join(letter + count for letter, count in parts) != runs or any(letter not in _KINDS for letter, _ in parts):
        raise ValueError(f"expected kinds such as t12a30, found {runs!r}")
    if sum(int(count) for _, count in parts) != chunks:
        raise ValueError(f"the kinds {runs!r} do not match {chunks} chunks")
    for letter, count in parts:
        found.extend(_KINDS[letter] for _ in range(int(count)))
    return found


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


# JSON has no infinity. Infinite numbers are written as "inf", as in vLLM's files.


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {key: "inf" if isinstance(value, float) and math.isinf(value) else value for key, value in values.items()}


def _infinite(values: dict[str, Any]) -> dict[str, Any]:
    return {key: math.inf if value == "inf" else value for key, value in values.items()}


def _member(key: str, value: Any) -> bytes:
    return msgspec.json.encode(key) + b": " + msgspec.json.encode(value)
