"""Checks the tool calls of a server by the rules of Moonshot's vendor verifier, on requests from the user's file.

The file has one request per line: `messages`, `tools`, and other fields (`temperature`, `max_tokens`). An answer that
ends with `tool_calls` is right if each of its calls names a declared tool, and if the arguments are JSON that fits the
declared schema. The role `_input` of the suite's files is sent as `system`.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from redline.bench.quality.json_value import argument_violation
from redline.bench.serving.client import LoadClient
from redline.bench.serving.records import LoadRequest, TimedAnswer
from redline.bench.serving.target import ServerTarget
from redline.errors import ConfigError
from redline.messages.base import Record

MAX_TOKENS = 64_000  # the suite's default for Kimi K2 Thinking
MOST_SHOWN = 300  # maximum characters of a value in a report
_OURS = {"messages", "tools", "model", "stream", "stream_options", "max_tokens"}

Kind = Literal[
    "the request failed",
    "ended with tool_calls without a call",
    "calls, but ended otherwise",
    "name is not declared",
    "arguments are no JSON",
    "arguments do not fit the schema",
    "the declared schema cannot be used",
]


class ToolCallRequest(NamedTuple):
    """One line of the file."""

    line: int
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    max_tokens: int
    extra: dict[str, Any]


class Wrong(Record, frozen=True):
    """A fault of an answer. line: of the request in the file. call: as sent by the server, if any."""

    line: int
    kind: Kind
    why: str
    call: dict[str, Any] | None = None


class CallCounts(Record, frozen=True):
    """Counts over all answers.

    calls, valid  calls of answers that ended with tool_calls or stop; calls without a fault
    with_calls    answers that ended with tool_calls; accurate: those among them with valid calls only
    """

    requests: int
    failed: int
    finish_reasons: dict[str, int]
    calls: int
    valid: int
    with_calls: int
    accurate: int
    wrong: dict[str, int]


class ToolCallReport(Record, frozen=True):
    """The report on a server's tool calls."""

    server: str
    model: str
    counts: CallCounts
    wrong: tuple[Wrong, ...]


class _Line(msgspec.Struct):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    max_tokens: int = MAX_TOKENS


def read_requests(path: Path) -> list[ToolCallRequest]:
    """The requests of a file. Raises ConfigError, with the line, for an invalid request, and OSError."""
    found: list[ToolCallRequest] = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if not text.strip():
            continue
        try:
            line, body = msgspec.json.decode(text, type=_Line), msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{path}, line {number}: expected a request with `messages` and `tools`: {error}"
            ) from None
        messages = [{**m, "role": "system"} if m.get("role") == "_input" else m for m in line.messages]
        extra = {name: value for name, value in body.items() if name not in _OURS}
        found.append(ToolCallRequest(number, tuple(messages), tuple(line.tools), line.max_tokens, extra))
    if not found:
        raise ConfigError(f"{path}: contains no request; expected JSON lines with `messages` and `tools`")
    return found


def judge(request: ToolCallRequest, answer: TimedAnswer) -> list[Wrong]:
    """The faults of an answer."""

    def wrong(kind: Kind, why: str, call: dict[str, Any] | None = None) -> Wrong:
        return Wrong(line=request.line, kind=kind, why=why[:MOST_SHOWN], call=call)

    if answer.failure is not None:
        return [wrong("the request failed", answer.error or answer.failure)]
    if answer.finish == "tool_calls" and not answer.calls:
        return [wrong("ended with tool_calls without a call", "the answer contains no call")]
    if not _is_judged(answer):
        return []
    found: list[Wrong] = []
    if answer.calls and answer.finish != "tool_calls":
        found.append(wrong("calls, but ended otherwise", f"finish_reason is {answer.finish}"))
    schemas = _schemas(request.tools)
    for call in answer.calls:
        name, arguments = str(call.get("name")), str(call.get("arguments"))
        if name not in schemas:
            found.append(wrong("name is not declared", f"{name!r}; declared: {', '.join(schemas)}", call))
            continue
        try:
            why = argument_violation(json.loads(arguments), schemas[name])
        except (json.JSONDecodeError, RecursionError) as error:
            found.append(wrong("arguments are no JSON", f"{name}: {error}: {arguments!r}", call))
            continue
        except ValueError as error:
            found.append(wrong("the declared schema cannot be used", f"{name}: {error}", call))
            continue
        if why is not None:
            found.append(wrong("arguments do not fit the schema", f"{name}: {why}", call))
    return found


def _is_judged(answer: TimedAnswer) -> bool:
    """Whether the answer is complete: a call cut off by max_tokens is not the server's fault."""
    return answer.failure is None and answer.finish in ("tool_calls", "stop")


def _schemas(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The schema of each declared function's arguments. A function without one takes an object."""
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), dict)]
    return {str(one.get("name")): one.get("parameters") or {"type": "object"} for one in functions}


def ask_all(
    requests: Sequence[ToolCallRequest], target: ServerTarget, at_once: int, progress: Callable[[int], object]
) -> ToolCallReport:
    """Sends all requests, at most `at_once` concurrently. progress: called with the number of answers so far.

    Raises ConfigError if the address is invalid, or if the server does not list a model.
    """
    return asyncio.run(_ask_all(requests, target, at_once, progress))


async def _ask_all(
    requests: Sequence[ToolCallRequest], target: ServerTarget, at_once: int, progress: Callable[[int], object]
) -> ToolCallReport:
    places, done = asyncio.Semaphore(at_once), 0
    async with LoadClient(target) as client:
        await client.models()  # fails once here, instead of once per request

        async def one(place: int, request: ToolCallRequest) -> TimedAnswer:
            nonlocal done
            ask = LoadRequest(
                max_tokens=request.max_tokens, messages=request.messages, tools=request.tools or None,
                extra=request.extra,
            )  # fmt: skip
            async with places:
                answer = await client.ask(ask, place)
            done += 1
            progress(done)
            return answer

        answers = await asyncio.gather(*(one(place, request) for place, request in enumerate(requests)))
        model = client.target.model
    return ToolCallReport(
        server=target.base_url,
        model=model,
        counts=_counts(answers, found := [judge(*pair) for pair in zip(requests, answers, strict=True)]),
        wrong=tuple(wrong for each in found for wrong in each),
    )


def _counts(answers: Sequence[TimedAnswer], found: Sequence[Sequence[Wrong]]) -> CallCounts:
    judged = [(answer, wrong) for answer, wrong in zip(answers, found, strict=True) if _is_judged(answer)]
    with_calls = [(answer, wrong) for answer, wrong in judged if answer.finish == "tool_calls"]
    calls = sum(len(answer.calls) for answer, _ in judged)
    return CallCounts(
        requests=len(answers),
        failed=sum(answer.failure is not None for answer in answers),
        finish_reasons=dict(Counter(answer.finish or "none" for answer in answers if answer.failure is None)),
        calls=calls,
        valid=calls - sum(one.call is not None for _, wrong in judged for one in wrong),
        with_calls=len(with_calls),
        accurate=sum(not wrong for _, wrong in with_calls),
        wrong=dict(Counter(one.kind for wrong in found for one in wrong)),
    )
