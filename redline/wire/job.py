"""What is asked of the engine: token ids and how to continue them. No text, no HTTP."""

from typing import NewType

from redline.wire.base import Message, Record

JobId = NewType("JobId", str)
PageId = NewType("PageId", int)
PageHash = NewType("PageHash", bytes)

PAGE_TOKENS = 64  # one page id addresses this many tokens, in every plane


class Thinking(Record, frozen=True):
    """A bound on the reasoning that an answer begins with."""

    most: int  # tokens of the answer before `end`, which is the only one that may follow them
    end: int
    ends: tuple[int, ...]  # the tokens that end it: `end`, and where a tool call begins


class Grammar(Record, frozen=True):
    """What the tokens of an answer have to be. Whoever makes one has checked that it compiles (api)."""

    text: str  # as llguidance reads it: Lark, or JSON of several grammars; control tokens by id; empty: any may come
    after: tuple[int, ...] = ()  # the first of these that comes is the grammar's first token; none: the answer's first
    banned: tuple[int, ...] = ()  # none of these comes before it
    thinking: Thinking | None = None  # None: there is none, or it is not bounded


class Sampling(Record, frozen=True):
    """How the next token is chosen. Bounds are checked where requests are read (api)."""

    max_tokens: int  # of the answer
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: all
    top_k: int = 0  # 0: all
    min_p: float = 0.0  # keeps tokens with p >= min_p * max p
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0  # over generated tokens
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    seed: int = 0  # randomness is a function of (seed, position) alone
    seeded: bool = False  # the client gave the seed: whatever was drafted, the answer is the one that it draws
    stop_ids: tuple[int, ...] = ()  # generation ends with one of these (the id is reported)
    min_tokens: int = 0  # stop_ids are masked before so many tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    logprobs: int | None = None  # None: none; n: the chosen token's and the n best
    prompt_logprobs: int | None = None  # the same for each prompt token but the first
    grammar: Grammar | None = None  # None: any token may come


class MediaSpan(Record, frozen=True):
    """Prompt positions [start, start + tokens) that an image fills; its hash enters the page hashes."""

    start: int
    tokens: int
    hash: bytes


class PagesFrom(Record, frozen=True):
    """The other worker of a handoff."""

    worker: str
    epoch: int  # of its start
    inbox: str  # the address that it reads
    area: bytes = b""  # where its parcels lie, in its transports' words; of one that computes
    format: str = ""  # of its parcels


class Job(Message, frozen=True):
    """A prompt to continue."""

    id: JobId
    tokens: tuple[int, ...]  # the prompt
    pages: tuple[PageHash, ...]  # hash i covers tokens [0, (i + 1) * PAGE_TOKENS); full pages only
    sampling: Sampling
    tenant: str = ""  # whose turn it takes among waiting jobs
    salt: str = ""  # tenants with different salts never share pages
    media: tuple[MediaSpan, ...] = ()
    answer: tuple[int, ...] = ()  # what another worker has given of the answer: this one goes on behind it
    scored: int = 0  # prompt tokens whose log probabilities another worker has given
    pages_from: PagesFrom | None = None  # who computes its prompt; None: whoever answers
    ttft_ms: float | None = None  # left of what was promised of its first token, when it comes; None: nothing was
    replica: str = ""  # of the API, which sent it and is told what comes of it; empty: there is but one


class Abort(Message, frozen=True):
    """The client has left, or a stop string was found: forget the job, give back its pages."""

    job: JobId
