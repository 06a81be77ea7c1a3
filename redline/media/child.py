"""The process that decodes images: a hostile file can make only this process slow, large or crash; it can be killed.

Requests and replies are frames: four bytes of length, big-endian, then the payload. A request is an image file; the
reply is a msgpack `Decoded`. The arguments are JSON of the `ImageRules` and the limit on pixels.
"""

import resource
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

from redline.media.image import BadImage, read_image
from redline.media.rules import ImageLayout, ImageRules

MEMORY_BYTES = 3 << 30  # address space: a decoded image of 100 million pixels, twice, with transparency
_LENGTH = struct.Struct(">I")


class Decoded(msgspec.Struct, array_like=True):
    """An image for the vision tower, or why it is none."""

    refused: str = ""
    layout: ImageLayout | None = None
    patches: bytes = b""  # uint8 [rows x columns, 3, patch, patch]


def main() -> None:
    """Answers requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # SIGINT reaches the whole group; the end of stdin ends this process
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    rules, most_pixels = msgspec.json.decode(sys.argv[1], type=ImageRules), int(sys.argv[2])
    while (data := _frame(sys.stdin.buffer)) is not None:
        reply = msgspec.msgpack.encode(decoded(data, rules, most_pixels))
        sys.stdout.buffer.write(_LENGTH.pack(len(reply)) + reply)
        sys.stdout.buffer.flush()


def decoded(data: bytes, rules: ImageRules, most_pixels: int) -> Decoded:
    """The reply to a request. An empty file is answered like any other that is no image."""
    try:
        pixels = read_image(data, rules, most_pixels)
    except BadImage as error:
        return Decoded(refused=str(error))
    except MemoryError:
        return Decoded(refused="Could not process image: decoding it takes more memory than allowed")
    return Decoded(layout=pixels.layout, patches=pixels.patches.tobytes())


def _frame(source: BinaryIO) -> bytes | None:
    head = source.read(_LENGTH.size)
    return source.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else None


if __name__ == "__main__":
    main()
