"""How a scripted server behaves: when each event of an answer leaves, what it says, and what goes wrong.

A `Script` is the behaviour of one answer, `Play` says which request gets which script, and `Logged` is what really
happened. The bytes of events are built once and kept: a server that measures a client must cost little itself.
"""

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal

import msgspec

from redline.wire.base import Record

Fault = Literal[
    "status",  # an HTTP error (`Script.status`) with a JSON body
    "stall",  # says nothing more, and keeps the connection open
    "drop",  # closes the connection
    "reset",  # resets the connection
    "cut",  # closes the connection in the middle of the next event
    "not_json",  # an event that is no JSON, then goes on
    "not_http",  # a response that is no HTTP
    "error",  # an event with an error, and the end of the response
    "short",  # ends the response in order, without finish_reason, usage and [DONE]
    "no_done",  # all but [DONE]
    "plain",  # one JSON body in the place of a stream
]
AT_THE_START: tuple[Fault, ...] = ("status", "not_http", "plain")
Part = Literal["role", "thinking", "answer"]

WORD = " the"  # each token of an answer
MODEL = "scripted"


class Script(Record, frozen=True):
    """How one request is answered. Times are seconds; of them a server here holds the plan within about 0.1 ms.

    name: under which the request is logged. tokens: of the answer; None: the body's max_tokens (or 16) less those of
    thinking. thinking: tokens before the answer. head_s: from the request to the response's head. first_s: from the
    request to the first event. gaps_s: from an event's planned time to the next one's, used in turn, over and over; 0:
    as soon as the socket takes it. spread_s: each gap grows by a random time up to this, drawn by `seed`. in_step: the
    first event waits for the next multiple of the first gap on the clock, so that all such answers move together, as an
    engine's do. burst: tokens of each event, in turn. events_at_once: events of one write. halves_s: where not 0, each
    write comes in two halves that are so far apart. newline: what ends a line of the stream. comments: a comment before
    each event. token_ids: events carry them. usage: is sent where the request asks for it. usage_off: tokens by which
    usage's completion_tokens lies. finish: the finish_reason; None: "stop" where `tokens` is given, else "length".
    after: events before the fault; -1: not even the head is sent. logged: when each event left is kept.
    """

    name: str = ""
    tokens: int | None = None
    thinking: int = 0
    head_s: float = 0.0
    first_s: float = 0.0
    gaps_s: tuple[float, ...] = (0.0,)
    spread_s: float = 0.0
    seed: int = 0
    in_step: bool = False
    burst: tuple[int, ...] = (1,)
    events_at_once: int = 1
    halves_s: float = 0.0
    newline: Literal["\n", "\r\n"] = "\n"
    comments: bool = False
    token_ids: bool = False
    usage: bool = True
    usage_off: int = 0
    finish: str | None = None
    fault: Fault | None = None
    after: int = 0
    status: int = 500
    logged: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError for a script that could never end, such as one whose events carry no token."""
        times = (self.head_s, self.first_s, self.spread_s, self.halves_s, *self.gaps_s)
        if not self.gaps_s or not all(0 <= time <= 3600 for time in times):
            raise ValueError("gaps_s needs at least one time, and every time lies between 0 and 3600 seconds")
        if not self.burst or min(self.burst) < 1 or self.events_at_once < 1:
            raise ValueError("burst needs at least one number; burst and events_at_once count from 1")
        if (self.tokens or 0) < 0 or self.thinking < 0:
            raise ValueError("tokens and thinking count from 0")


class Play(Record, frozen=True):
    """Which request gets which script: its body's field `script` (fields of a `Script`, or a name of `named`), else
    the first name of `named` that occurs in its prompt, else `in_order`, in turn by arrival, over and over.

    places: answers at once; further requests wait their turn before anything is sent. None: all at once.
    """

    named: dict[str, Script] = msgspec.field(default_factory=dict[str, Script])
    in_order: tuple[Script, ...] = (Script(),)
    places: int | None = None

    def choose(self, field: Any, prompt: str, number: int) -> Script:
        """The script of the request that arrived as `number`, from 0 on. Raises ValueError for a wrong `script`."""
        if isinstance(field, str):
            if field not in self.named:
                raise ValueError(f"no script is called {field!r}")
            return self.named[field]
        if field is not None:
            return msgspec.convert(field, Script)
        for name, script in self.named.items():
            if name in prompt:
                return script
        return self.in_order[number % len(self.in_order)]


class Logged(Record, frozen=True):
    """What the server did with one request: times of CLOCK_MONOTONIC, seconds, as `time.perf_counter` has it.

    received: when the request had been read whole. head: when the response's head was handed to the socket, events:
    when the last byte of each event with tokens was; tokens: of each of them. end: when the response's last byte was,
    or the fault's. left: the client closed the connection before that.
    """

    name: str
    path: str
    received: float
    head: float | None = None
    events: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    end: float | None = None
    left: bool = False


class Log(Record, frozen=True):
    """What a scripted server says of itself. cpu_s: processor seconds of its process. events: ever sent."""

    cpu_s: float
    events: int
    requests: tuple[Logged, ...]


class Form(Record, frozen=True):
    """How an answer's bytes look, apart from its tokens. chat: chat/completions or completions."""

    chat: bool
    newline: str = "\n"
    comments: bool = False
    token_ids: bool = False


def moments(script: Script, max_tokens: int | None) -> Iterator[tuple[Part, int, float]]:
    """Part and tokens of each event of an answer, and the seconds from its planned time to the next one's."""
    draw = random.Random(script.seed).uniform if script.spread_s else None
    count = 0
    parts: tuple[tuple[Part, int], ...] = (
        ("thinking", script.thinking),
        ("answer", answer_tokens(script, max_tokens)),
    )
    for part, left in parts:
        while left > 0:
            tokens = min(left, script.burst[count % len(script.burst)])
            gap = script.gaps_s[count % len(script.gaps_s)] + (draw(0, script.spread_s) if draw else 0.0)
            yield part, tokens, gap
            count += 1
            left -= tokens


def answer_tokens(script: Script, max_tokens: int | None) -> int:
    """Tokens of the answer behind the thinking. max_tokens: of the request's body."""
    if script.tokens is not None:
        return script.tokens
    return max(0, (16 if max_tokens is None else max_tokens) - script.thinking)


@lru_cache(4096)
def event(form: Form, part: Part, tokens: int, finish: str | None = None) -> bytes:
    """One event that carries so many tokens, as a chunk of HTTP; role: the event before a chat's first token."""
    text = WORD * tokens
    match part:
        case "role":
            said: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}}
        case "thinking" if form.chat:
            said = {"delta": {"reasoning": text, "reasoning_content": text}}
        case "answer" if form.chat:
            said = {"delta": {"content": text}}
        case _:
            said = {"text": text}
    if form.token_ids and tokens:
        said["token_ids"] = [20] * tokens
    return framed(_line(form, {"choices": [{"index": 0, **said, "finish_reason": finish}]}))


def finish_of(script: Script) -> str:
    """The finish_reason of an answer that ends in order."""
    return script.finish or ("length" if script.tokens is None else "stop")


def ending(form: Form, script: Script, usage: dict[str, Any] | None, *, finished: bool) -> bytes:
    """The events behind the last token, as a chunk of HTTP, without the response's last chunk.

    finished: the last token's event had the finish_reason, so that no event of its own has it.
    """
    last: dict[str, Any] = {"delta": {}} if form.chat else {"text": ""}
    choice = {"index": 0, **last, "finish_reason": finish_of(script)}
    lines = b"" if finished else _line(form, {"choices": [choice]})
    if usage is not None:
        lines += _line(form, {"choices": [], "usage": usage})
    if script.fault != "no_done":
        lines += f"data: [DONE]{form.newline * 2}".encode()
    return framed(lines) if lines else b""


def whole(form: Form, script: Script, text: str, thinking: str, usage: dict[str, Any]) -> bytes:
    """The body of an answer that is not streamed."""
    message = {"role": "assistant", "content": text} | ({"reasoning": thinking} if thinking else {})
    said: dict[str, Any] = {"message": message} if form.chat else {"text": text}
    choices = [{"index": 0, **said, "finish_reason": finish_of(script)}]
    kind = "chat.completion" if form.chat else "text_completion"
    return msgspec.json.encode({"id": MODEL, "object": kind, "model": MODEL, "choices": choices, "usage": usage})


def framed(data: bytes) -> bytes:
    """The data as one chunk of HTTP."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _line(form: Form, more: dict[str, Any]) -> bytes:
    kind = "chat.completion.chunk" if form.chat else "text_completion"
    said = msgspec.json.encode({"id": MODEL, "object": kind, "created": 0, "model": MODEL, **more}).decode()
    comment = f": comment{form.newline * 2}" if form.comments else ""
    return f"{comment}data: {said}{form.newline * 2}".encode()
