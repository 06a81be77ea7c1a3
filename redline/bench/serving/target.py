"""The target of a load, its request rate and concurrency, and the timeouts."""

import math
from typing import Any

import msgspec

from redline.messages.base import Record


class Patience(Record, frozen=True):
    """Timeouts in seconds, after which a request counts as failed."""

    connect: float = 10.0
    first: float = 600.0  # from sending to the first chunk; long, since the server may queue requests
    silence: float = 60.0  # between two reads of a stream that has started
    whole: float = 6 * 3600.0  # of a whole request


class ServerTarget(Record, frozen=True):
    """A server and its API.

    base_url: scheme, host, port and optionally a path, such as http://127.0.0.1:8000. backend: a name of
    `dialects.BACKENDS`, such as openai-chat or openai. endpoint: the path; "": the dialect's default. model: "": the
    first in /v1/models. key: sent as a bearer token. body: fields for the body of every request.
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


class LoadPace(Record, frozen=True):
    """When requests are sent.

    rate: mean requests/s; inf: as soon as max_concurrency allows. burstiness: shape of the gamma distribution of the
    times between requests: 1 is a Poisson process, less is burstier, inf gives equal times. max_concurrency: maximum
    concurrent requests; None: no limit. ramp: replaces rate. warmups: number of first requests that are sent before the
    run and not counted. deadline: seconds after which no request is sent and running ones are cut off; None: wait for
    all answers.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp: Ramp | None = None
    warmups: int = 0
    deadline: float | None = None
    seed: int = 0
