"""What the model wrote as the arguments of its calls, so that a history has the very text again.

Most agents parse the arguments of a call and send them back serialised anew: `{"path": "a"}` comes back as
`{"path":"a"}`. The prompt would then part from what is cached at the first argument of the last turn. Where the JSON is
equal, the model's own text is put back.
"""

import json
import sys
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from threading import Lock
from typing import Any

import msgspec

from redline.chat.conversation import Conversation, Message, ToolCall

READ_CHARS = 8192  # of arguments that are parsed, which holds the interpreter's lock for half a millisecond
MOST_CHARS = 1 << 20  # of a conversation's arguments that are looked at, those apart whose spelling is known
_ENTRY_BYTES = 200  # of an entry but for its text
_AS_IT_IS = ""


class SaidCalls:
    """Texts of arguments by salt, function and value, those that were used last. Safe to share between threads.

    What a client's spelling was taken for once, it is taken for as long as that is kept: else two prompts of one
    conversation could differ.
    """

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: of texts; 0 keeps none."""
        self._most_bytes = most_bytes
        self._bytes = 0
        # Of a value the model's text, of a spelling what takes its place.
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self._lock = Lock()

    def note(self, salt: str, name: str, arguments: str) -> None:
        """The model has written these arguments, JSON."""
        if len(arguments) <= MOST_CHARS:
            for value in _values(arguments):
                self._keep(_key("value", salt, name, value), arguments)
                self._keep(_key("text", salt, name, arguments), _AS_IT_IS)

    def restored(self, salt: str, conversation: Conversation) -> Conversation:
        """The conversation with the arguments as the model wrote them, where it did."""
        if not self._texts or not any(message.tool_calls for message in conversation.messages):
            return conversation
        left = MOST_CHARS
        messages: list[Message] = []
        for message in conversation.messages:
            calls: list[ToolCall] = []
            for call in message.tool_calls:
                spelling = _key("text", salt, call.name, call.arguments)
                text = self._find(spelling)
                if text is None and (left := left - len(call.arguments)) >= 0:
                    values = (_key("value", salt, call.name, value) for value in _values(call.arguments))
                    text = next((own for value in values if (own := self._find(value)) is not None), _AS_IT_IS)
                    self._keep(spelling, text)
                calls.append(msgspec.structs.replace(call, arguments=text) if text else call)
            messages.append(msgspec.structs.replace(message, tool_calls=tuple(calls)) if calls else message)
        return msgspec.structs.replace(conversation, messages=tuple(messages))

    def _find(self, key: bytes) -> str | None:
        with self._lock:
            if (text := self._texts.get(key)) is not None:
                self._texts.move_to_end(key)
            return text

    def _keep(self, key: bytes, text: str) -> None:
        size = sys.getsizeof(text) + _ENTRY_BYTES
        if size > self._most_bytes:
            return
        with self._lock:
            if (before := self._texts.pop(key, None)) is not None:
                self._bytes -= sys.getsizeof(before) + _ENTRY_BYTES
            self._texts[key] = text
            self._bytes += size
            while self._bytes > self._most_bytes:
                _, oldest = self._texts.popitem(last=False)
                self._bytes -= sys.getsizeof(oldest) + _ENTRY_BYTES


def _key(*parts: str) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode(errors="surrogatepass")
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.digest()


def _values(text: str) -> Iterator[str]:
    """Spellings that are equal for texts of one value: without white space, and, if it is short, as Python writes it;
    none if it is no JSON."""
    try:
        yield msgspec.json.format(text, indent=-1)
        if len(text) <= READ_CHARS:
            yield json.dumps(json.loads(text, parse_float=_number), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError, msgspec.DecodeError):
        return


def _number(text: str) -> Any:
    """A client in JavaScript sends 1.0 back as 1."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 1 << 53 else number
