"""What the API is told by whoever starts it.

Every size and count that a client sends has its bound here or in the types of `openai.py`.
"""

from redline.wire.base import Record

MIB = 1 << 20


class Limits(Record, frozen=True):
    """Bounds that are checked before a request costs anything. Beyond them: 413, 431, 400 or 503."""

    body_bytes: int = (
        8 * MIB
    )  # of one request's body: a context of 262,144 tokens is 1.3 MB of English, 5 MB of escaped Cyrillic
    header_bytes: int = 64 << 10  # of one request, all header lines together; and of its trailers
    headers: int = 128  # lines of one request; each costs the event loop about a microsecond
    header_seconds: float = 10.0  # in which they have to arrive; so long may a connection idle between requests
    write_seconds: float = 30.0  # a client that takes nothing of what it has asked for in so long is given up
    connections: int = 4096  # at once; fewer where the process may not open as many files
    messages: int = 4096  # of one conversation
    calls: int = 8192  # tool calls that a conversation's messages hold, together
    tools: int = 128  # that a request declares
    json_bytes: int = MIB // 2  # of tools' parameters, and of calls' arguments where they are objects, together
    json_depth: int = 64  # nesting of each of them
    prompts: int = 64  # in one completions request
    waiting: int = 1024  # jobs without a first token, before new ones are refused with 503
    tokens: int = 2 << 20  # of jobs without a first token, and so of one request: prompts, each counted n times
    prompt_logprobs: int = 1 << 18  # of one request: prompt tokens, each n times, times the log probabilities of each
    known_bytes: int = 64 * MIB  # of parts of conversations that were encoded before, with their ids
    bodies_bytes: int = 64 * MIB  # of all bodies that are being read or encoded, together
    body_seconds: float = 60.0  # in which the whole body has to arrive


class Defaults(Record, frozen=True):
    """Sampling where a request is silent (what a checkpoint's generation_config states, if it has one)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    thinking: bool = True


class ApiConfig(Record, frozen=True):
    """How the API presents itself. Without `keys_file` everyone who can reach the port is served."""

    served_model_names: tuple[str, ...]  # the first is what answers carry; requests may use any
    keys_file: str | None = None  # one key per line; blank lines and lines that start with # do not count
    local: bool = False  # only this machine reaches the server: without keys, the header Host is then checked
    limits: Limits = Limits()
    defaults: Defaults = Defaults()
