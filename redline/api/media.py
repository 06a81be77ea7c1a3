"""What stands in for content that this server cannot read: pictures, sound and files that are no text.

In a tool's result it becomes a short text, since an agent reads a picture by its own tool and sends the result again
with every turn: to refuse it would end the session. Elsewhere it is refused in words that Claude Code knows: it takes
the picture out and goes on.
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
    """The text for a part of this type in a tool's result; None: such a part holds no medium."""
    name = _NAMES.get(kind)
    return None if name is None else f"[{name} left out: this server reads text only]"


def refused(kind: str, param: str, otherwise: str) -> RequestError:
    """The error for a part of this type outside of a tool's result. otherwise: the message if it holds no medium."""
    name = _NAMES.get(kind)
    if name is None:
        return RequestError(otherwise, param)
    return RequestError(f"Could not process {name}: this server reads text only", param)
