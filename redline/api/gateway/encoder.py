"""Prompts to token ids: renders conversations, encodes text, keeps what was encoded before.

Invariant: cached encodings and recorded tool calls are shared only between requests of the same caller and salt, and no
piece of work occupies the event loop for longer than encoding INLINE_CHARS characters takes.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from redline import clock
from redline.api.ask import Prompt
from redline.api.auth.quota import CALLER, Caller
from redline.api.config import Limits
from redline.api.telemetry.request_span import RequestSpan
from redline.chat.conversation import Conversation, ToolCall
from redline.chat.known import KnownTexts
from redline.chat.said_calls import SaidCalls
from redline.chat.template import Style, render
from redline.chat.tokenizer import Tokenizer
from redline.errors import ContextTooLong, RequestError
from redline.messages.job import MediaSpan

INLINE_CHARS = 4096  # encoding more characters takes over a millisecond, during which the event loop serves no stream

P = ParamSpec("P")
T = TypeVar("T")


class EncodedPrompt(NamedTuple):
    """Token ids of a prompt, and the positions of its images."""

    tokens: tuple[int, ...]
    media: tuple[MediaSpan, ...] = ()


class Encoder:
    """Encodes prompts, in threads if they are long."""

    def __init__(self, tokenizer: Tokenizer, style: Style, limits: Limits) -> None:
        self.tokenizer = tokenizer
        self.style = style
        self.known = KnownTexts(limits.known_bytes)
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="encode")
        self._said = SaidCalls(limits.said_bytes)
        self._longest_token = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))

    async def encode(self, prompt: Prompt, param: str, most: int, salt: str = "") -> EncodedPrompt:
        """Token ids of a prompt, whose images have been decoded (`Pictures.decoded`). Encoding stops soon after `most`
        tokens, so there may be slightly more.

        param: the request field of the prompt, for errors. salt: of the request. Raises RequestError for ids outside
        the vocabulary, ContextTooLong for a list of more than `most` ids and for a text that was not encoded to its
        end.
        """
        caller = CALLER.get()
        chars = most * self._longest_token
        match prompt:
            case str():
                size = len(prompt)
                if size > chars:
                    raise ContextTooLong(f"{param} is {size} characters; this model reads at most {chars}", param)
            case Conversation():
                if prompt.tools and not self.style.declares_tools:
                    raise RequestError("this model's chat template declares no tools; leave `tools` out", "tools")
                size = _size(prompt)
            case _:
                if len(prompt) > most:
                    raise ContextTooLong(f"{param} is {len(prompt)} tokens; at most {most} are read", param)
                await self.in_thread(len(prompt), self.check_ids, prompt, param)
                return EncodedPrompt(prompt)
        left = threading.Event()
        salt = cache_salt(caller, salt)
        try:
            return await self.in_thread(size, self._encode, prompt, most, chars, left, salt, caller.passage)
        except ContextTooLong as error:
            raise ContextTooLong(f"{param} is {error}; at most {most} tokens are read", param) from None
        except asyncio.CancelledError:
            left.set()
            raise

    async def in_thread(self, chars: int, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """The result of `work`, which runs in a thread if it costs more than encoding INLINE_CHARS characters, else
        inline.

        chars: its cost, as the number of characters that take as long to encode. Raises what `work` raises.
        """
        if chars <= INLINE_CHARS:
            return work(*arguments, **named)
        call = functools.partial(work, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self.threads, call)

    def check_ids(self, tokens: Sequence[int], param: str) -> None:
        """Raises RequestError for ids outside the vocabulary. param: the request field, for the error."""
        if tokens and max(tokens) >= self.tokenizer.vocab_size:
            raise RequestError(f"token ids range from 0 to {self.tokenizer.vocab_size - 1}; got {max(tokens)}", param)

    def thinks(self, prompt: Prompt) -> bool:
        """Whether the answer begins with reasoning."""
        return isinstance(prompt, Conversation) and self.style.thinks(prompt)

    def record_call(self, salt: str, name: str, arguments: str) -> None:
        """Record a complete tool call of the model: later requests may spell its arguments differently."""
        if len(arguments) <= INLINE_CHARS:
            self._said.note(salt, name, arguments)
        else:
            self.threads.submit(self._said.note, salt, name, arguments)

    def close(self) -> None:
        """Stop the threads once their current work is done; idempotent."""
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _encode(
        self,
        prompt: Conversation | str,
        most: int,
        chars: int,
        left: threading.Event,
        salt: str,
        passage: RequestSpan | None,
    ) -> EncodedPrompt:
        def check() -> None:
            if left.is_set():
                raise asyncio.CancelledError  # no request waits for the result any more

        began, media = clock.perf_counter(), list[MediaSpan]()
        if isinstance(prompt, str):  # a raw prompt was rendered by the client
            tokens = tuple(self.tokenizer.encode_with_specials(prompt, most, check))
        else:
            pieces = render(self._said.restored(salt, prompt), self.style, chars)
            if passage is not None:
                passage.did("template", began)
                began = clock.perf_counter()
            tokens = tuple(self.tokenizer.encode_pieces(pieces, most, check, self.known, salt, media))
        if passage is not None:
            passage.did("tokenise", began)
        return EncodedPrompt(tokens, tuple(media))


def cache_salt(caller: Caller, salt: str) -> str:
    """The cache salt, which separates the cached pages of one key name from others'; a name contains no newline."""
    return salt if caller.account is None else f"{caller.account.name}\n{salt}"


def _size(conversation: Conversation) -> int:
    """Approximate number of characters to render; counting stops above INLINE_CHARS."""
    size = 0
    values: list[Any] = [tool.parameters for tool in conversation.tools]
    values += [tool.description for tool in conversation.tools]
    for message in conversation.messages:
        size += len(message.content) + len(message.reasoning)
        values += message.tool_calls
        if size + len(values) > INLINE_CHARS:
            break
    while values and size <= INLINE_CHARS:
        match values.pop():
            case str() as text:
                size += len(text)
            case ToolCall(id=id, arguments=text):
                size += len(id) + len(text)
            case dict() as fields:  # pyright: ignore[reportUnknownVariableType]
                values += cast("dict[str, Any]", fields)
                values += cast("dict[str, Any]", fields).values()
            case list() as items:  # pyright: ignore[reportUnknownVariableType]
                values += cast("list[Any]", items)
            case _:
                pass
        size += 1
    return size
