"""The seam between HTTP and the languages that clients speak.

A generating route is a `Dialect`: it reads a body into an `Ask`, and writes what the gateway answers, whole or as a
stream. Everything between the two is the same for all of them (`redline.api.app`).
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from redline.api.answers import Choice
from redline.api.ask import Ask
from redline.api.config import Defaults, Limits
from redline.api.errors import Answer
from redline.api.gateway import Batch, Generation
from redline.chat.tokenizer import Tokenizer
from redline.wire.base import Record


class Streaming(Record, frozen=True):
    """The answer comes in pieces. `usage` adds a last chunk with the token counts; `continuous` puts them in each.

    `proposers`: each piece is of one proposer's tokens, and says whose.
    """

    usage: bool = False
    continuous: bool = False
    proposers: bool = False


class Asked(Record, frozen=True):
    """What a body asks for; each dialect has its own kind, with what only its answers need."""

    model: str | None  # None: the served one
    ask: Ask
    stream: Streaming | None = None  # None: the answer comes whole
    echo: bool = False  # the prompt opens the answer
    left_out: tuple[str, ...] = ()  # types of tools, and of items, that the client sent and the prompt does not have


A = TypeVar("A", bound=Asked)


@dataclass(frozen=True, slots=True)
class Reply(Generic[A]):
    """An answer that has begun. created: Unix seconds. model: the name that the answer carries."""

    asked: A
    model: str
    created: int
    generation: Generation
    tokenizer: Tokenizer
    max_model_len: int

    @property
    def openings(self) -> list[int]:
        """For each prompt the entries that open an answer to it: its log probabilities and its tokens, where told."""
        scored = self.asked.ask.sampling.prompt_logprobs
        each = (0 if scored is None else scored + 1) + self.asked.echo
        return [each * len(prompt) for prompt in self.generation.prompts]


class EventStream(Protocol):
    """Turns the batches of one answer into the bytes of its stream."""

    def open(self) -> bytes:
        """What comes before the first batch, as soon as the answer is admitted; empty where that is nothing."""
        ...

    def write(self, batches: Sequence[Batch]) -> bytes:
        """The events of these batches, in their order, as server-sent events; empty where they show nothing."""
        ...

    def keepalive(self) -> bytes:
        """What clients pass over, for a stream that has been silent for long."""
        ...

    async def close(self) -> bytes:
        """What follows the last choice's end."""
        ...

    def fail(self, error: Exception) -> bytes:
        """The end of a stream whose answer cannot be completed."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect(Generic[A]):
    """A generating route's language.

    - `read`: a body -> what it asks for. Raises RequestError, naming the field. It may run in a thread.
    - `stream`: the writer of a streamed answer. `answer`: the body of a whole one, which may be written in a thread.
    - `error`: an exception -> the answer that tells of it; the second argument is the request's id.
    - `recall`: what a request refers to is fetched, where a dialect has that.
    - `keep`: stores a whole answer, of which the last argument is the body, before it leaves; gives the body to send.
    """

    read: Callable[[bytes, Limits, Defaults], A]
    stream: Callable[[Reply[A]], EventStream]
    answer: Callable[[Reply[A], Sequence[Choice]], bytes]
    error: Callable[[Exception, str], Answer]
    recall: Callable[[A], Awaitable[A]] | None = None
    keep: Callable[[Reply[A], Sequence[Choice], bytes], Awaitable[bytes]] | None = None
