"""Generation requests: token ids and how to continue them. No text, no HTTP."""

from typing import Annotated, NewType

from redline.messages.base import Record, WireMessage
from redline.messages.sampling_option import Api, Option, Own, options_of
from redline.messages.sampling_option import SamplingStage as Stage

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


_OPENAI, _ANY = Api.OPENAI, Api.OPENAI | Api.RESPONSES | Api.ANTHROPIC
_BUT_RESPONSES = Api.OPENAI | Api.ANTHROPIC
_BIASES = tuple[tuple[int, float], ...]  # (token id, value added to its logit)


class Sampling(Record, frozen=True):
    """Sampling parameters. A field with an `Option` is a sampling option, and its line the option's only declaration.

    The api package checks the ranges when it reads a request.
    """

    max_tokens: int  # maximum length of the answer
    # fmt: off
    temperature: Annotated[float, Option(Stage.TEMPERATURE, 0, 2, _ANY, 0.7, "O", file=True, note="0: greedy")] = 1.0
    top_p: Annotated[float, Option(Stage.FILTER, 0, 1, _ANY, 0.5, "O", file=True, note="0: greedy")] = 1.0
    top_k: Annotated[int, Option(Stage.FILTER, -1, 1 << 20, _BUT_RESPONSES, 3, file=True, off=-1, note="0: off")] = 0
    # keeps tokens with p >= min_p * max p
    min_p: Annotated[float, Option(Stage.FILTER, 0, 1, _OPENAI, 0.2, file=True, note="of the largest p")] = 0.0
    presence_penalty: Annotated[float, Option(Stage.PENALTY, -2, 2, _OPENAI, 0.5, "O", note="of the answer")] = 0.0
    frequency_penalty: Annotated[float, Option(Stage.PENALTY, -2, 2, _OPENAI, 0.5, "O", note="of the answer")] = 0.0
    # It divides and multiplies float32 logits: at 1e-40 they would overflow, and the argmax be undefined.
    repetition_penalty: Annotated[float, Option(Stage.PENALTY, 0.01, 10, _OPENAI, 1.5, note="of prompt, answer")] = 1.0
    # the random numbers are a function of (seed, position) alone
    seed: Annotated[int, Own(Stage.DRAW, -(1 << 63), (1 << 63) - 1, _OPENAI, 7, "O")] = 0
    seeded: bool = False  # the client gave the seed: the answer must not depend on speculative decoding
    stop_ids: tuple[int, ...] = ()  # generation ends with one of these (the id is reported)
    # stop_ids are masked for the first `min_tokens` tokens
    min_tokens: Annotated[int, Own(Stage.LENGTH, 0, (1 << 31) - 2, _OPENAI, 4, note="no stop before")] = 0
    logit_bias: Annotated[_BIASES, Own(Stage.BIAS, -100, 100, _OPENAI, ((3, 1.0),), "O", note="up to 300 ids")] = ()
    # None: none; n: of the chosen token and the n most likely ones; prompt_logprobs: of each prompt token but the first
    logprobs: Annotated[int | None, Own(Stage.REPORT, 0, 20, _OPENAI, 4, "O", note="chat: a bool")] = None
    prompt_logprobs: Annotated[int | None, Own(Stage.REPORT, 0, 20, _OPENAI, 1, note="of the prompt")] = None
    # fmt: on
    grammar: Grammar | None = None  # None: any token is allowed


OPTIONS = options_of(Sampling)


def options_at(stage: Stage) -> tuple[Option, ...]:
    """The sampling options that this stage reads, in the order of `Sampling`."""
    return tuple(option for option in OPTIONS.values() if option.stage is stage)


class MediaSpan(Record, frozen=True):
    """Prompt positions [start, start + tokens) of an image; its hash is part of the page hashes."""

    start: int
    tokens: int
    hash: bytes  # of the image's patches and their grid
    frames: int = 1
    rows: int = 0  # of patches
    columns: int = 0


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
