"""Images and videos in requests, and substitutes for content that this server cannot read: audio, and files other than
text.

If the model reads no images, an image in a tool result becomes a short text: an agent reads an image by its own tool
and resends the result with every request, so an error would end its session. Elsewhere it is rejected with a message
that Claude Code recognises: it removes the image and continues.
"""

import base64
import binascii
import re
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from redline.api.config import Limits
from redline.chat.conversation import Message, Picture
from redline.errors import RequestError

_NAMES = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "document": "document",
    "file": "file",
    "input_file": "file",
    "audio": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
}
_DATA_URL = {kind: re.compile(rf"data:{kind}/[\w.+-]{{1,40}};base64,", re.IGNORECASE) for kind in ("image", "video")}
_EXAMPLE = {"image": "data:image/png;base64,...", "video": "data:video/mp4;base64,..."}


def in_result(kind: str) -> str | None:
    """The text for a part of this type in a tool result; None if the type is not a media type."""
    name = _NAMES.get(kind)
    return None if name is None else f"[{name} left out: this server reads text only]"


def refused(kind: str, param: str, otherwise: str) -> RequestError:
    """The error for a part of this type outside of a tool result. otherwise: the message if it is not a media type."""
    name = _NAMES.get(kind)
    if name is None:
        return RequestError(otherwise, param)
    return RequestError(f"Could not process {name}: this server reads text only", param)


class Images:
    """The images and videos of one request, in the order in which they are read. A parser puts a mark into the text in
    place of each; `placed` takes the marks out again. A mark has 128 random bits, so that no client can write one."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._mark = f"\0{secrets.token_hex(16)}:"
        self._found: list[Picture] = []

    @property
    def read(self) -> bool:
        """Whether the model reads images."""
        return self._limits.images > 0

    def of_url(self, url: Any, param: str, *, video: bool = False) -> str:
        """The mark of an image or a video that is given as a data URL. Raises RequestError."""
        kind = "video" if video else "image"
        if video and not self._limits.video_frames:
            raise RequestError("Could not process video: this server reads none (`pip install redline[video]`)", param)
        if not isinstance(url, str):
            raise RequestError(f"expected a data URL: {_EXAMPLE[kind]}", param)
        head = _DATA_URL[kind].match(url[:80])
        if head is None:
            if url.startswith(("http://", "https://")):
                raise RequestError(f"remote {kind} URLs are not fetched; send the {kind} as a data URL", param)
            raise RequestError(f"expected a data URL: {_EXAMPLE[kind]}", param)
        return self.of_base64(url[head.end() :], param, video=video)

    def of_base64(self, data: Any, param: str, *, video: bool = False) -> str:
        """The mark of an image or a video that is given as base64. Raises RequestError."""
        kind, most_bytes = ("video", self._limits.video_bytes) if video else ("image", self._limits.image_bytes)
        if len(self._found) == self._limits.images:
            raise RequestError(f"more than {self._limits.images} images and videos in one request", param)
        if not isinstance(data, str):
            raise RequestError(f"expected the {kind} as base64", param)
        if len(data) > most_bytes * 4 // 3 + 4:
            raise RequestError(f"Could not process {kind}: larger than {most_bytes} bytes", param)
        try:
            file = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise RequestError(f"Could not process {kind}: its base64 is not valid", param) from None
        self._found.append(Picture(at=0, data=file, param=param, video=video))
        return f"{self._mark}{len(self._found) - 1}\0"

    def placed(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages with pictures in place of the marks."""
        return tuple(map(self._placed, messages)) if self._found else tuple(messages)

    def _placed(self, message: Message) -> Message:
        if self._mark not in message.content:
            return message
        first, *rest = message.content.split(self._mark)
        texts, pictures, length = [first], list[Picture](), len(first)
        for piece in rest:
            number, _, text = piece.partition("\0")
            pictures.append(msgspec.structs.replace(self._found[int(number)], at=length))
            texts.append(text)
            length += len(text)
        return msgspec.structs.replace(message, content="".join(texts), pictures=tuple(pictures))
