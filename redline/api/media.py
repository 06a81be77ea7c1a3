"""Substitutes for content that this server cannot read: images, audio and files other than text.

In a tool result, such content becomes a short text: an agent reads an image by its own tool and resends the result with
every request, so an error would end its session. Elsewhere it is rejected with a message that Claude Code recognises:
it removes the image and continues.
"""

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
