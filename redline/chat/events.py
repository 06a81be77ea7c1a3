"""The events of an answer, in the order in which a client receives them."""

from redline.messages.base import Record
from redline.messages.delta import Finish
from redline.messages.step import TokenLogprobs


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
    """Log probabilities of the tokens of the surrounding events, with each token's bytes."""

    items: tuple[tuple[TokenLogprobs, bytes], ...]


class End(Record, frozen=True):
    """The answer is over. `completion_tokens` counts all tokens, the stop token included."""

    finish: Finish
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    image_tokens: int = 0  # prompt tokens of images
    reasoning_tokens: int = 0  # included in completion_tokens
    accepted_tokens: int = 0  # draft tokens that were accepted
    rejected_tokens: int = 0  # draft tokens that were rejected
    tool_calls: int = 0  # > 0: the API's finish reason is "tool_calls"
    stop: str | int | None = None  # the request's stop string or stop token that ended the answer, if any
    error: str | None = None  # one line if finish is "error", else None


Event = Text | Thought | CallBegin | CallArguments | Logprobs | End
