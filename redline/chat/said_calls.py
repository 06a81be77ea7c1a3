"""What the model wrote as the arguments of its calls, so that a history has the very text again.

Most agents parse the arguments of a call and send them back serialised anew: `{"path": "a"}` comes back as
`{"path":"a"}`. The prompt would then part from what is cached at the first argument of the last turn. Where the JSON is
equal, the model's own text is put back.
"""

import json
from collections import OrderedDict
from hashlib import blake2b
from threading import Lock
from typing import Any

import msgspec

from redline.chat.conversation import Conversation, Message, ToolCall

MOST_CHARS = 1 << 20  # of arguments that are read
_ENTRY_BYTES = 250  # of an entry but for its text


class SaidCalls:
    """Texts of arguments by salt, function and value, those that were used last. Safe to share between threads.

    What a client's spelling was taken for once, it is taken for as long as that is kept: else two prompts of one
    conversation could differ.
    """

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: of texts; 0 keeps none."""
        self._most_bytes = most_bytes
        self._bytes = 0
        self._texts: OrderedDict[bytes, str] = OrderedDict()  # of a value the model's text, of a spelling what it means
        self._lock = Lock()

    def note(self, salt: str, name: str, arguments: str) -> None:
        """The model has written these arguments, JSON."""
        if (value := _value(arguments)) is not None:
            self._keep(_key("value", salt, name, value), arguments)
            self._keep(_key("text", salt, name, arguments), arguments)

    def restored(self, salt: str, conversation: Conversation) -> Conversation:
        """The conversation with the arguments as the model wrote them, where it did."""
        if not self._texts or not any(message.tool_calls for message in conversation.messages):
            return conversation
        return msgspec.structs.replace(
            conversation, messages=tuple(self._message(salt, message) for message in conversation.messages)
        )

    def _message(self, salt: str, message: Message) -> Message:
        if not message.tool_calls:
            return message
        return msgspec.structs.replace(message, tool_calls=tuple(self._call(salt, one) for one in message.tool_calls))

    def _call(self, salt: str, call: ToolCall) -> ToolCall:
        spelling = _key("text", salt, call.name, call.arguments)
        if (text := self._find(spelling)) is None:
            value = _value(call.arguments)
            own = None if value is None else self._find(_key("value", salt, call.name, value))
            text = call.arguments if own is None else own
            self._keep(spelling, text)
        return call if text == call.arguments else msgspec.structs.replace(call, arguments=text)

    def _find(self, key: bytes) -> str | None:
        with self._lock:
            if (text := self._texts.get(key)) is not None:
                self._texts.move_to_end(key)
            return text

    def _keep(self, key: bytes, text: str) -> None:
        size = len(text) + _ENTRY_BYTES
        if size > self._most_bytes:
            return
        with self._lock:
            if (before := self._texts.pop(key, None)) is not None:
                self._bytes -= len(before) + _ENTRY_BYTES
            self._texts[key] = text
            self._bytes += size
            while self._bytes > self._most_bytes:
                _, oldest = self._texts.popitem(last=False)
                self._bytes -= len(oldest) + _ENTRY_BYTES


def _key(*parts: str) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode(errors="surrogatepass")
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.digest()


def _value(text: str) -> str | None:
    """JSON spelled in one way, equal for equal values; None: the text is none, or too long."""
    if len(text) > MOST_CHARS:
        return None
    try:
        return json.dumps(json.loads(text, parse_float=_number), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return None


def _number(text: str) -> Any:
    """A client in JavaScript sends 1.0 back as 1."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 1 << 53 else number
