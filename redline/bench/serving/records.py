"""Requests and their answers: the raw data from which all figures are computed.

Times of a `TimedAnswer` are seconds on one monotonic clock, from the start of its run. These records contain raw data
only: derived figures (TTFT, TPOT, ...) are functions in `metrics.py`, so that a saved result can be evaluated in other
ways.
"""

from typing import Any, Literal

import msgspec

from redline.messages.base import Record

Kind = Literal["answer", "thinking", "tool"]
Failure = Literal["refused", "http", "stalled", "dropped", "malformed", "server", "deadline", "skipped"]


class LoadRequest(Record, frozen=True):
    """One request, before a dialect encodes its body.

    Exactly one of messages, text and ids is given. prompt_tokens: counted by the configured tokenizer; None: not
    counted. name: the domain, category or session of the request, for grouping in tables. tools and extra: fields of
    the body, which override the run's.
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
    """The token counts reported by the server; None if not reported."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # prompt_tokens_details
    reasoning_tokens: int | None = None  # completion_tokens_details
    accepted_tokens: int | None = None  # completion_tokens_details.accepted_prediction_tokens, of draft tokens


class StreamChunk(Record, frozen=True):
    """One event of a stream with text or part of a tool call.

    at: when the bytes that completed it were read from the socket. characters: of its text. tokens: if the server
    reports them (token ids or log probabilities in the event); None: unknown. Chunks of one read have the same time.
    """

    at: float
    kind: Kind
    characters: int
    tokens: int | None = None


class TimedAnswer(Record, frozen=True):
    """The answer to one `LoadRequest`. A failed one contains the data received before the failure.

    planned: the scheduled time. taken: when the client started the request, after its planned time and the wait for
    max_concurrency; if no connection is ready, one is opened then. connected: when it had a connection; equal to taken
    if one was ready. sent: when its first byte was written to the socket; None: never. head: when the response's head
    was read. end: time of the last byte, or of the failure. error: one line of description; failure: its kind; both are
    None if the request succeeded. finish: the last choice's finish_reason.
    """

    index: int
    ask: LoadRequest
    planned: float
    taken: float | None = None
    connected: float | None = None
    sent: float | None = None
    head: float | None = None
    end: float = 0.0
    chunks: tuple[StreamChunk, ...] = ()
    text: str = ""
    thinking: str = ""
    calls: tuple[dict[str, Any], ...] = ()  # tool calls: id, name, arguments (joined)
    usage: Usage | None = None
    finish: str | None = None
    status: int | None = None  # HTTP status
    failure: Failure | None = None
    error: str | None = None


class GeneratorLoad(Record, frozen=True):
    """The load of the load generator itself, to detect that it limits the measurement.

    cpu_share: CPU seconds of this process per second of the run. lag: seconds by which the event loop woke late for a
    timer, at the median, the 99th percentile and the worst. late_sends: requests sent more than 10 ms after their
    planned time and max_concurrency allowed.
    """

    cpu_share: float
    lag_p50: float
    lag_p99: float
    lag_most: float
    late_sends: int


class LoadRun(Record, frozen=True):
    """A finished load: its answers in the order of their asks, without warm-ups.

    began: Unix time. seconds: from the first planned send to the last answer's end. stopped: Ctrl-C or the deadline
    ended it before all requests were sent.
    """

    began: float
    seconds: float
    answers: tuple[TimedAnswer, ...]
    generator: GeneratorLoad
    stopped: bool = False
