"""Restores the model's own spelling of tool-call arguments in a conversation's history.

Most agents parse the arguments of a call and send them back re-serialized: `{"path": "a"}` comes back as
`{"path":"a"}`. The prompt would then miss the prefix cache from the first argument of the last turn on. If the JSON is
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

READ_CHARS = 8192  # maximum length of parsed arguments: parsing these holds the GIL for half a millisecond
MOST_CHARS = 1 << 20  # maximum characters of arguments examined per conversation; known spellings are free
_ENTRY_BYTES = 200  # memory of an entry in addition to its text
_AS_IT_IS = ""


class SaidCalls:
    """An LRU cache of argument texts by salt, function and value. Thread-safe.

    The replacement chosen for a client's spelling stays valid until its entry is evicted: otherwise two prompts of one
    conversation could differ.
    """

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: capacity for texts; 0 disables the cache."""
        self._most_bytes = most_bytes
        self._bytes = 0
        # Maps a value to the model's text, and a client's spelling to its replacement.
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self._lock = Lock()

    def note(self, salt: str, name: str, arguments: str) -> None:
        """Record arguments (JSON) that the model has written."""
        if len(arguments) <= MOST_CHARS:
            for value in _values(arguments):
                self._keep(_key("value", salt, name, value), arguments)
                self._keep(_key("text", salt, name, arguments), _AS_IT_IS)

    def restored(self, salt: str, conversation: Conversation) -> Conversation:
        """The conversation with the arguments in the model's spelling, as far as it is known."""
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
    """Canonical spellings, equal for equal JSON values: without white space, and, for short texts, as Python writes it;
    none if the text is not JSON."""
    try:
        yield msgspec.json.format(text, indent=-1)
        if len(text) <= READ_CHARS:
            yield json.dumps(json.loads(text, parse_float=_number), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError, msgspec.DecodeError):
        return


def _number(text: str) -> Any:
    """Parse 1.0 as 1, since clients in JavaScript send 1.0 back as 1."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 1 << 53 else number
