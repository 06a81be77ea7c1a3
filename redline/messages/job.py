"""Generation requests: token ids and how to continue them. No text, no HTTP."""

from typing import NewType

from redline.messages.base import Record, WireMessage

JobId = NewType("JobId", str)
PageId = NewType("PageId", int)
PageHash = NewType("PageHash", bytes)

PAGE_TOKENS = 64  # tokens of one page (KV cache block), in every plane


class Thinking(Record, frozen=True):
    """Limit on the reasoning at the beginning of an answer."""

    most: int  # number of tokens after which `end` is forced
    end: int
    ends: tuple[int, ...]  # the tokens that end the reasoning: `end`, and the start of a tool call


class Grammar(Record, frozen=True):
    """A constraint on the tokens of an answer. The api package has checked that it compiles."""

    # In llguidance's format: Lark, or JSON of several grammars; control tokens by id; empty: any token is allowed.
    text: str
    # The grammar starts at the first of these tokens to be generated; empty: at the answer's first token.
    after: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()  # tokens that are not allowed before the grammar starts
    thinking: Thinking | None = None  # None: no reasoning, or no limit on it


class Sampling(Record, frozen=True):
    """Sampling parameters. The api package checks their bounds when it reads a request."""

    max_tokens: int  # maximum length of the answer
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: no top-p filtering
    top_k: int = 0  # 0: no top-k filtering
    min_p: float = 0.0  # keeps tokens with p >= min_p * max p
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0  # over generated tokens
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    seed: int = 0  # the random numbers are a function of (seed, position) alone
    seeded: bool = False  # the client gave the seed: the answer must not depend on speculative decoding
    stop_ids: tuple[int, ...] = ()  # generation ends with one of these (the id is reported)
    min_tokens: int = 0  # stop_ids are masked for the first `min_tokens` tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit)
    logprobs: int | None = None  # None: none; n: of the chosen token and the n most likely ones
    prompt_logprobs: int | None = None  # the same for each prompt token but the first
    grammar: Grammar | None = None  # None: any token is allowed


class MediaSpan(Record, frozen=True):
    """Prompt positions [start, start + tokens) of an image; its hash is part of the page hashes."""

    start: int
    tokens: int
    hash: bytes


class PagesFrom(Record, frozen=True):
    """The other worker of a KV transfer."""

    worker: str
    epoch: int  # of its current start
    inbox: str  # the address at which it receives messages
    area: bytes = b""  # location of its parcels, encoded by its transports; only of a prefill worker
    format: str = ""  # name of its parcels' format


class Job(WireMessage, frozen=True):
    """A request for the engine: a prompt to continue."""

    id: JobId
    tokens: tuple[int, ...]  # the prompt
    pages: tuple[PageHash, ...]  # hash i covers tokens [0, (i + 1) * PAGE_TOKENS); full pages only
    sampling: Sampling
    tenant: str = ""  # waiting jobs are scheduled round-robin between tenants
    salt: str = ""  # tenants with different salts never share pages
    media: tuple[MediaSpan, ...] = ()
    # Tokens of the answer that another worker has generated; generation continues after them.
    answer: tuple[int, ...] = ()
    scored: int = 0  # prompt tokens for which another worker has sent log probabilities
    pages_from: PagesFrom | None = None  # the prefill worker; None: the worker that decodes computes the prompt too
    ttft_ms: float | None = None  # what is left of the TTFT target when the job arrives; None: no target
    replica: str = ""  # the API replica that sent the job and receives its deltas; empty: there is only one


class Abort(WireMessage, frozen=True):
    """The client disconnected, or a stop string was found: end the job and release its pages."""

    job: JobId
