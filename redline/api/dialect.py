"""The interface between HTTP and the API formats that clients use.

A generating route is a `Dialect`: it parses a body into an `Ask`, and formats the gateway's output, as a whole response
or as a stream. Everything between the two is shared (`redline.api.handlers`).
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from redline.api.ask import Ask
from redline.api.config import Defaults, Limits
from redline.api.errors import WholeResponse
from redline.api.gateway.generation import ChoiceDelta, Generation
from redline.api.openai.answers import ChoiceOutput
from redline.chat.tokenizer import Tokenizer
from redline.messages.base import Record


class Streaming(Record, frozen=True):
    """A streamed response. `usage` adds a last chunk with the token counts; `continuous` puts them into each chunk.

    `proposers`: each chunk contains tokens of one proposer, and names it.
    """

    usage: bool = False
    continuous: bool = False
    proposers: bool = False


class ParsedRequest(Record, frozen=True):
    """A parsed body; each dialect has its own subclass, with the fields that only its responses need."""

    model: str | None  # None: the served model
    ask: Ask
    stream: Streaming | None = None  # None: a whole response
    echo: bool = False  # the answer begins with the prompt
    left_out: tuple[str, ...] = ()  # types of tools and items that the client sent and that the prompt does not contain


A = TypeVar("A", bound=ParsedRequest)


@dataclass(frozen=True, slots=True)
class Reply(Generic[A]):
    """A response that has begun. created: Unix seconds. model: the name in the response."""

    asked: A
    model: str
    created: int
    generation: Generation
    tokenizer: Tokenizer
    max_model_len: int

    @property
    def openings(self) -> list[int]:
        """Entries before each prompt's first output token: its logprobs and, with echo, its tokens."""
        scored = self.asked.ask.sampling.prompt_logprobs
        each = (0 if scored is None else scored + 1) + self.asked.echo
        return [each * len(prompt) for prompt in self.generation.prompts]


class EventStream(Protocol):
    """Formats the batches of one response as a stream."""

    def open(self) -> bytes:
        """Bytes before the first batch, sent on admission; may be empty."""
        ...

    def write(self, batches: Sequence[ChoiceDelta]) -> bytes:
        """The events of these batches, in order, as server-sent events; empty if they contain no visible output."""
        ...

    def keepalive(self) -> bytes:
        """Bytes that clients ignore, for a stream without output for a while."""
        ...

    async def close(self) -> bytes:
        """Bytes after the end of the last choice."""
        ...

    def fail(self, error: Exception) -> bytes:
        """The last event of a stream that failed."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect(Generic[A]):
    """The format of a generating route.

    - `read`: parses a body. Raises RequestError, naming the field. It may run in a thread.
    - `stream`: the writer of a streamed response. `answer`: the body of a whole one, which may be built in a thread.
    - `error`: converts an exception to a response; the second argument is the request's id.
    - `recall`: fetches what a request refers to, if the dialect has such references.
    - `keep`: stores a whole response, the last argument being its body, before it is sent; returns the body to send.
    """

    read: Callable[[bytes, Limits, Defaults], A]
    stream: Callable[[Reply[A]], EventStream]
    answer: Callable[[Reply[A], Sequence[ChoiceOutput]], bytes]
    error: Callable[[Exception, str], WholeResponse]
    recall: Callable[[A], Awaitable[A]] | None = None
    keep: Callable[[Reply[A], Sequence[ChoiceOutput], bytes], Awaitable[bytes]] | None = None
