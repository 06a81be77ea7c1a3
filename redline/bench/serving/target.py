"""Whom a load is put on, how hard, and how long an answer is waited for."""

import math
from typing import Any

import msgspec

from redline.wire.base import Record


class Patience(Record, frozen=True):
    """How long is waited, seconds, before a request counts as failed. Every wait of a run has an end."""

    connect: float = 10.0
    first: float = 600.0  # from sent to the first chunk: a queue may be long
    silence: float = 60.0  # between two reads of a stream that has begun
    whole: float = 6 * 3600.0  # of one request


class Target(Record, frozen=True):
    """A server and how it is spoken to.

    base_url: scheme, host, port and perhaps a path, such as http://127.0.0.1:8000. backend: a name of
    `dialects.BACKENDS`, openai-chat or openai among them. endpoint: the path; "" is the dialect's own. model: "" is the
    first that /v1/models lists. key: sent as a bearer token. body: fields of every request's body.
    """

    base_url: str
    backend: str = "openai-chat"
    endpoint: str = ""
    model: str = ""
    key: str | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    body: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    verify_tls: bool = True
    patience: Patience = Patience()


class Ramp(Record, frozen=True):
    """A request rate that changes over the run, from `start` to `end` requests/s. strategy: linear or exponential."""

    strategy: str
    start: float
    end: float


class Pace(Record, frozen=True):
    """When requests are sent.

    rate: requests/s on average; inf: as soon as a place is free. burstiness: shape of the gamma distribution of the
    times between two: 1 is a Poisson process, less is burstier, inf is a metronome. max_concurrency: streams at once;
    None: as many as come. ramp: in place of rate. warmups: so many of the first requests are sent before the run, and
    not counted. deadline: seconds after which no more is sent and what runs is waited for no longer; None: until all is
    answered.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp: Ramp | None = None
    warmups: int = 0
    deadline: float | None = None
    seed: int = 0
