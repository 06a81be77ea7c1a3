"""What the API is told by whoever starts it.

Every size and count that a client sends has its bound here or in the types of `openai.py`.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from redline.wire.base import Record

MIB = 1 << 20


class Limits(Record, frozen=True):
    """Bounds that are checked before a request costs anything. Beyond them: 413, 431, 400 or 503."""

    body_bytes: int = (
        8 * MIB
    )  # of one request's body: a context of 262,144 tokens is 1.3 MB of English, 5 MB of escaped Cyrillic
    header_bytes: int = 64 << 10  # of one request, all header lines together; and of its trailers
    headers: int = 128  # lines of one request; each costs the event loop about a microsecond
    header_seconds: float = 10.0  # in which they have to arrive
    idle_seconds: float = 120.0  # that a connection may idle between requests: clients' pools keep theirs up to 90 s
    write_seconds: float = 30.0  # a client that takes nothing of what it has asked for in so long is given up
    connections: int = 4096  # at once; fewer where the process may not open as many files
    messages: int = 4096  # of one conversation
    calls: int = 8192  # tool calls that a conversation's messages hold, together
    tools: int = 1024  # that a request declares: agents with a few MCP servers have hundreds
    json_bytes: int = MIB // 2  # of tools' parameters, and of calls' arguments where they are objects, together
    json_depth: int = 64  # nesting of each of them
    prompts: int = 64  # in one completions request
    waiting: int = 1024  # jobs without a first token, before new ones are refused with 503
    choices: int = 256  # of one request: prompts times n; a quarter of those that may wait
    tokens: int = 1 << 19  # of one request: prompts, each counted n times; a quarter of those that may wait
    queue_tokens: int = 2 << 20  # of jobs without a first token, of all requests, before new ones are refused with 503
    prompt_logprobs: int = 1 << 18  # of one request: prompt tokens, each n times, times the log probabilities of each
    known_bytes: int = 64 * MIB  # of parts of conversations that were encoded before, with their ids
    said_bytes: int = 16 * MIB  # of the arguments of calls that were answered before
    default_max_tokens: int | None = None  # of an answer where the request is silent; None: what the context holds
    most_max_tokens: int | None = None  # that a request may ask for; None: what the context holds
    timeout_s: float | None = None  # from a request's arrival to its last token, where it says nothing; None: for ever
    bodies_bytes: int = 64 * MIB  # of all bodies that are being read or encoded, together
    grammar_bytes: int = MIB  # of one request's grammar: its schemas, and what calls of its tools look like
    grammar_seconds: float = 1.0  # in which it has to be compiled: a worker compiles it again, and others may wait
    grammar_memory: int = 2048 * MIB  # of addresses, that the process takes which compiles it
    grammars: int = 64  # that wait to be compiled
    body_seconds: float = 60.0  # in which the whole body has to arrive


Count = Annotated[int, Meta(ge=1, le=1 << 50)]


class KeyLimits(Record, frozen=True):
    """What the requests under one name may use together; None: as much as there is. Beyond it: 429."""

    requests_per_s: Annotated[float, Meta(ge=0.001, le=1e6)] | None = None  # a second's worth at once, one at least
    concurrency: Count | None = None  # requests that are read or answered at once
    tokens_per_minute: Count | None = None  # of prompts and answers; a minute's worth at once
    tokens_per_day: Count | None = None


class Sla(Record, frozen=True):
    """What the requests of a class are promised; None: nothing. A request keeps it, or does not (`redline.api.sla`)."""

    ttft_ms: Annotated[float, Meta(ge=0.001, le=1e9)] | None = None  # from its arrival to its first token
    itl_ms: Annotated[float, Meta(ge=0.001, le=1e9)] | None = None  # between two tokens of its answer, on the mean


DEFAULT_SLA = "default"  # the class of keys that name none, and of whoever needs no key


class Defaults(Record, frozen=True):
    """What holds where a request is silent. Sampling is as a checkpoint's generation_config has it, if there is one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    thinking: bool = True
    reasoning_field: str = "reasoning_content"  # the name that a chat's answers and deltas have for the thinking


class ApiConfig(Record, frozen=True):
    """How the API presents itself. Without `keys_file` everyone who can reach the port is served."""

    served_model_names: tuple[str, ...]  # the first is what answers carry; requests may use any
    keys_file: str | None = None  # `redline.api.keys` says what it looks like
    per_key: KeyLimits = KeyLimits()  # of a name whose line says nothing of it
    sla: dict[str, Sla] = msgspec.field(
        default_factory=dict[str, Sla]
    )  # by the name of the class, which keys of the file may name
    cors_origins: tuple[str, ...] = ()  # of pages elsewhere that may ask here, as https://chat.example
    responses_file: str | None = None  # where /v1/responses keeps them (SQLite); None: nowhere
    json_lines: bool = False  # access lines are JSON objects
    drain_s: float = 3.0  # for running answers to come to their ends once the server stops
    page: bool = True  # a page at / for people; else / says what /version does
    local: bool = False  # only this machine reaches the server: without keys, the header Host is then checked
    limits: Limits = Limits()
    defaults: Defaults = Defaults()
