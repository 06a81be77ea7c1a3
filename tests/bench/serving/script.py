"""The behaviour of a scripted server: when each event of an answer is sent, its content, and its faults.

A `Script` is the behaviour of one answer, `Play` chooses the script of a request, and `Logged` is the record of the
actual times. The bytes of events are built once and cached: a server that measures a client must use little CPU.
"""

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal

import msgspec

from redline.messages.base import Record

Fault = Literal[
    "status",  # an HTTP error (`Script.status`) with a JSON body
    "stall",  # sends nothing more, and keeps the connection open
    "drop",  # closes the connection
    "reset",  # resets the connection
    "cut",  # closes the connection in the middle of the next event
    "not_json",  # one event that is not JSON, then continues
    "not_http",  # a response that is not HTTP
    "error",  # an event with an error, and the end of the response
    "short",  # ends the response in order, without finish_reason, usage and [DONE]
    "no_done",  # everything except [DONE]
    "plain",  # one JSON body instead of a stream
]
AT_THE_START: tuple[Fault, ...] = ("status", "not_http", "plain")
Part = Literal["role", "thinking", "answer"]

WORD = " the"  # each token of an answer
MODEL = "scripted"


class Script(Record, frozen=True):
    """The answer to one request. Times are in seconds; a server on loopback keeps the plan to about 0.1 ms.

    name: key in the log. tokens: length of the answer; None: the body's max_tokens (or 16) less `thinking`.
    thinking: tokens before the answer. head_s: from the request to the response's head. first_s: from the request
    to the first event. gaps_s: from an event's planned time to the next one's, used in turn, over and over; 0: as
    soon as the socket accepts it. spread_s: each gap grows by a random time up to this, drawn by `seed`. in_step:
    the first event waits for the next multiple of the first gap on the clock, so that all such answers advance
    together, like a batch of an engine. burst: tokens of each event, in turn. events_at_once: events per write.
    halves_s: if not 0, each write is split into two halves, this many seconds apart. newline: ends a line of the
    stream. comments: a comment before each event. token_ids: events carry them. usage: send it if the request asks
    for it. usage_off: error of usage's completion_tokens. finish: the finish_reason; None: "stop" if `tokens` is
    given, else "length". after: events before the fault; -1: not even the head is sent. logged: record the events'
    times.
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
        """Raises ValueError for a script that could never end, such as one with events that carry no token."""
        times = (self.head_s, self.first_s, self.spread_s, self.halves_s, *self.gaps_s)
        if not self.gaps_s or not all(0 <= time <= 3600 for time in times):
            raise ValueError("gaps_s needs at least one time, and every time lies between 0 and 3600 seconds")
        if not self.burst or min(self.burst) < 1 or self.events_at_once < 1:
            raise ValueError("burst needs at least one number; burst and events_at_once count from 1")
        if (self.tokens or 0) < 0 or self.thinking < 0:
            raise ValueError("tokens and thinking count from 0")


class Play(Record, frozen=True):
    """The script of each request: its body's field `script` (fields of a `Script`, or a name of `named`), else the
    first name of `named` that occurs in its prompt, else `in_order`, in turn by arrival, over and over.

    places: concurrent answers; further requests wait before anything is sent. None: unlimited. tokenizes: it serves
    /tokenize, and a token of a prompt has three letters at most.
    """

    named: dict[str, Script] = msgspec.field(default_factory=dict[str, Script])
    in_order: tuple[Script, ...] = (Script(),)
    places: int | None = None
    tokenizes: bool = False

    def choose(self, field: Any, prompt: str, number: int) -> Script:
        """The script of the request with this arrival number, from 0 on. Raises ValueError for a wrong `script`."""
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


def tokens_of(prompt: str) -> int:
    """Tokens of a prompt of a server that tokenizes: one that starts each text, and one per three letters of a word."""
    return 1 + sum(-(-len(word) // 3) for word in prompt.split())


class Logged(Record, frozen=True):
    """The server's record of one request: times of CLOCK_MONOTONIC, in seconds, like those of `time.perf_counter`.

    received: when the request had been read whole. head: when the response's head was passed to the socket. events:
    when the last byte of each event with tokens was. tokens: number in each of these events. end: when the
    response's last byte, or the fault, was. left: the client closed the connection before that.
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
    """The log of a scripted server. cpu_s: CPU seconds of its process. events: total number sent."""

    cpu_s: float
    events: int
    requests: tuple[Logged, ...]


class Form(Record, frozen=True):
    """The format of an answer's bytes, apart from its tokens. chat: chat/completions or completions."""

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
    """Tokens of the answer after the thinking. max_tokens: from the request's body."""
    if script.tokens is not None:
        return script.tokens
    return max(0, (16 if max_tokens is None else max_tokens) - script.thinking)


@lru_cache(4096)
def event(form: Form, part: Part, tokens: int, finish: str | None = None) -> bytes:
    """One event with `tokens` tokens, as an HTTP chunk; role: the event before a chat's first token."""
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
    """The events after the last token, as an HTTP chunk, without the response's last chunk.

    finished: the last token's event had the finish_reason, so it gets no event of its own.
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
    """The data as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _line(form: Form, more: dict[str, Any]) -> bytes:
    kind = "chat.completion.chunk" if form.chat else "text_completion"
    said = msgspec.json.encode({"id": MODEL, "object": kind, "created": 0, "model": MODEL, **more}).decode()
    comment = f": comment{form.newline * 2}" if form.comments else ""
    return f"{comment}data: {said}{form.newline * 2}".encode()
