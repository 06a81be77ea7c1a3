"""Configuration of the API.

Every size and count that a client can send is limited here or in the types of `openai/requests.py`.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from redline.messages.base import Record, setting
from redline.messages.job import Sampling

MIB = 1 << 20


class Limits(Record, frozen=True):
    """Limits that are checked before a request costs anything. Beyond them: 413, 431, 400 or 503."""

    body_bytes: int = (
        8 * MIB
    )  # of one request's body: a context of 262,144 tokens is 1.3 MB of English, 5 MB of escaped Cyrillic
    header_bytes: int = 64 << 10  # of one request, all header lines together; also of its trailers
    headers: int = 128  # lines of one request; each costs the event loop about a microsecond
    header_seconds: float = 10.0  # within which the headers have to arrive
    idle_seconds: float = 120.0  # idle time of a connection between requests: clients' pools keep theirs up to 90 s
    write_seconds: float = 30.0  # a client that reads nothing of its response for this time is disconnected
    connections: int = 4096  # concurrent connections; fewer if the process may not open enough files
    messages: int = 4096  # of one conversation
    calls: int = 8192  # tool calls in the messages of one conversation, in total
    tools: int = 1024  # declared by one request: agents with a few MCP servers have hundreds
    json_bytes: int = MIB // 2  # of tools' parameters and of calls' arguments given as objects, in total
    json_depth: int = 64  # nesting of each of them
    prompts: int = 64  # in one completions request
    waiting: int = 1024  # jobs without a first token, beyond which new ones are rejected with 503
    choices: int = 256  # of one request: prompts times n; a quarter of `waiting`
    tokens: int = 1 << 19  # of one request: prompts, each counted n times; a quarter of `queue_tokens`
    queue_tokens: int = 2 << 20  # of jobs without a first token, of all requests, beyond which new ones get 503
    prompt_logprobs: int = 1 << 18  # of one request: prompt tokens, each counted n times, times logprobs per token
    known_bytes: int = 64 * MIB  # cache of encoded parts of conversations, with their ids
    said_bytes: int = 16 * MIB  # cache of the arguments of earlier tool calls
    default_max_tokens: int | None = None  # max_tokens if a request sets none; None: the rest of the context
    most_max_tokens: int | None = None  # upper limit of max_tokens; None: the rest of the context
    timeout_s: float | None = None  # from a request's arrival to its last token, if it sets none; None: no limit
    bodies_bytes: int = 64 * MIB  # of all bodies that are being read or encoded, together
    grammar_bytes: int = MIB  # of one request's grammar: its schemas, and the grammar of its tool calls
    grammar_seconds: float = 1.0  # to compile it: a worker compiles it again, and other requests may be queued
    grammar_memory: int = 2048 * MIB  # address space of the process that compiles it
    grammars: int = 64  # queued for compilation
    images: int = 0  # and videos, in one request; 0: the model reads none
    image_bytes: int = 20 * MIB  # of one image file
    image_pixels: int = 64_000_000  # of one image or frame, width x height
    video_bytes: int = 20 * MIB  # of one video file
    video_frames: int = 56  # in the videos of one request, as sampled; 0: none is read
    body_seconds: float = 60.0  # within which the whole body has to arrive


Count = Annotated[int, Meta(ge=1, le=1 << 50)]


class KeyLimits(Record, frozen=True):
    """Rate limits of one key name; None: no limit. Beyond them: 429."""

    requests_per_s: Annotated[
        Annotated[float, Meta(ge=0.001, le=1_000_000)] | None,
        setting("POST requests per second; bursts of one second's worth, at least one", absent="no limit", example=10),
    ] = None
    concurrency: Annotated[
        Count | None, setting("POST requests that are read or answered at once", absent="no limit", example=16)
    ] = None
    tokens_per_minute: Annotated[
        Count | None,
        setting(
            "prompt tokens (times `n`, cached or not) and answer tokens; a burst of one minute's worth",
            absent="no limit",
            example=200_000,
        ),
    ] = None
    tokens_per_day: Annotated[Count | None, setting("the same, for a day", absent="no limit", example=50_000_000)] = (
        None
    )


Milliseconds = Annotated[float, Meta(ge=0.001, le=1_000_000_000)]


class Sla(Record, frozen=True):
    """SLO targets of a class of requests; None: no target. Each request meets or misses them
    (`redline.api.telemetry.sla`)."""

    ttft_ms: Annotated[
        Milliseconds | None,
        setting(
            "milliseconds from a request's arrival to its first token, at most", absent="no SLO target", example=2000.0
        ),
    ] = None
    itl_ms: Annotated[
        Milliseconds | None,
        setting(
            "mean inter-token latency in milliseconds, (last - first) / (tokens - 1), at most",
            absent="no SLO target",
            example=50.0,
        ),
    ] = None


DEFAULT_SLA = "default"  # the class of keys that name none, and of requests without a key


class Defaults(Record, frozen=True):
    """Defaults of request fields."""

    # of the checkpoint's generation_config, if it has one; max_tokens is not read
    sampling: Sampling = Sampling(max_tokens=1)
    thinking: bool = True
    reasoning_field: str = "reasoning_content"  # name of the reasoning field in chat answers and deltas


class ApiConfig(Record, frozen=True):
    """Configuration of the API server. Without `keys_file` everyone who can reach the port is served."""

    served_model_names: tuple[str, ...]  # the first is the default; requests may use any
    keys_file: str | None = None  # format: see `redline.api.auth.keys`
    per_key: KeyLimits = KeyLimits()  # default limits of key names
    sla: dict[str, Sla] = msgspec.field(
        default_factory=dict[str, Sla]
    )  # by class name, to which the keys file may refer
    cors_origins: tuple[str, ...] = ()  # origins of web pages that may use the API, such as https://chat.example
    responses_file: str | None = None  # SQLite file for stored /v1/responses; None: they are not stored
    json_lines: bool = False  # access log lines are JSON objects
    drain_s: float = 3.0  # seconds for running requests to complete at shutdown
    page: bool = True  # serve a web page at /; False: / returns the same as /version
    local: bool = False  # only this machine reaches the server: without keys, the Host header is then checked
    limits: Limits = Limits()
    defaults: Defaults = Defaults()
