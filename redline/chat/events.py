"""What an answer is made of, in the order in which a client should see it."""

from redline.wire.base import Record
from redline.wire.delta import Finish
from redline.wire.step import TokenLogprobs


class Text(Record, frozen=True):
    """A piece of the visible answer."""

    text: str


class Thought(Record, frozen=True):
    """A piece of the reasoning."""

    text: str


class CallBegin(Record, frozen=True):
    """A tool call opens. `index` counts calls within this answer; `id` is the model's own `functions.NAME:IDX`."""

    index: int
    id: str
    name: str


class CallArguments(Record, frozen=True):
    """A piece of the arguments (JSON text) of call `index`."""

    index: int
    text: str


class Logprobs(Record, frozen=True):
    """Log probabilities of the tokens that the surrounding events came from, with each token's bytes."""

    items: tuple[tuple[TokenLogprobs, bytes], ...]


class End(Record, frozen=True):
    """The answer is over. `completion_tokens` counts every token up to its end, the stop id included."""

    finish: Finish
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    reasoning_tokens: int = 0  # of the completion tokens
    accepted_tokens: int = 0  # drafts that became part of the answer
    rejected_tokens: int = 0  # drafts that the model would not have said
    tool_calls: int = 0  # > 0: the API's finish reason is "tool_calls"
    stop: str | int | None = None  # the stop string or id of the request that ended it, where one did
    error: str | None = None  # one line, where finish is "error"


Event = Text | Thought | CallBegin | CallArguments | Logprobs | End
