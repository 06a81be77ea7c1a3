"""What is asked of a server and what came back: the facts from which every figure of this room is made.

Times of an `Answer` are seconds on one monotonic clock, from the beginning of its run. Nothing here is computed: what
is not a fact (TTFT, TPOT, ...) is a function in `metrics.py`, so that a saved result can be looked at in other ways.
"""

from typing import Any, Literal

import msgspec

from redline.wire.base import Record

Kind = Literal["answer", "thinking", "tool"]
Failure = Literal["refused", "http", "stalled", "dropped", "malformed", "server", "deadline", "skipped"]


class Ask(Record, frozen=True):
    """One request, before a dialect gives it its body.

    Exactly one of messages, text and ids is given. prompt_tokens: as the named tokenizer counts them; None: nobody has
    counted. name: the domain, category or session that the request belongs to, by which tables may group. tools and
    extra: fields of the body, which win over the run's.
    """

    max_tokens: int
    messages: tuple[dict[str, Any], ...] | None = None
    text: str | None = None
    ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    name: str = ""
    tools: tuple[dict[str, Any], ...] | None = None
    extra: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


class Usage(Record, frozen=True):
    """What the server says it has counted; None where it does not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # prompt_tokens_details
    reasoning_tokens: int | None = None  # completion_tokens_details
    accepted_tokens: int | None = None  # completion_tokens_details.accepted_prediction_tokens, where drafts are counted


class Chunk(Record, frozen=True):
    """One event of a stream that carried text or part of a tool call.

    at: when the bytes that completed it were read from the socket. characters: of its text. tokens: where the server
    says so (token ids or log probabilities in the event); None: unknown. Several chunks may have come in one read: then
    they have the same time.
    """

    at: float
    kind: Kind
    characters: int
    tokens: int | None = None


class Answer(Record, frozen=True):
    """What became of one `Ask`. A failed one keeps what had come until then.

    planned: when the schedule wanted it sent. taken: when the client took it up, its planned time and a free place
    having come; where no connection was ready, one is opened then. connected: when it had its connection; as taken
    where one was ready. sent: when its first byte was handed to the socket; None: it never was. head: when the
    response's head had been read. end: when the last byte, or the failure, came. error: one line with what happened;
    failure: which kind; both are None where the server answered as it should. finish: the last choice's finish_reason.
    """

    index: int
    ask: Ask
    planned: float
    taken: float | None = None
    connected: float | None = None
    sent: float | None = None
    head: float | None = None
    end: float = 0.0
    chunks: tuple[Chunk, ...] = ()
    text: str = ""
    thinking: str = ""
    calls: tuple[dict[str, Any], ...] = ()  # tool calls: id, name, arguments (joined)
    usage: Usage | None = None
    finish: str | None = None
    status: int | None = None  # of HTTP
    failure: Failure | None = None
    error: str | None = None


class GeneratorLoad(Record, frozen=True):
    """How busy the load generator itself was: whether it is the limit of what was measured.

    cpu_share: processor seconds of this process over the run's seconds. lag: how late the event loop woke for a timer,
    seconds, at its median, 99th percentile and worst. late_sends: requests that were sent more than 10 ms after a free
    place and their planned time allowed it.
    """

    cpu_share: float
    lag_p50: float
    lag_p99: float
    lag_most: float
    late_sends: int


class Run(Record, frozen=True):
    """One load, ended: its answers in the order of their asks, warm-ups left out.

    began: Unix time. seconds: from the first planned send to the last answer's end. stopped: True where Ctrl-C or the
    deadline ended it before all was asked.
    """

    began: float
    seconds: float
    answers: tuple[Answer, ...]
    generator: GeneratorLoad
    stopped: bool = False
