"""The process that decodes images: a hostile file can make only this process slow, large or crash; it can be killed.

Requests and replies are frames (`redline.frames`). A request is an image file; the reply is a msgpack `Decoded`. The
arguments are JSON of the `ImageRules` and the limit on pixels.
"""

import resource
import signal
import sys

import msgspec

from redline.frames import read_frame, write_frame
from redline.media.image import BadImage, read_image
from redline.media.rules import ImageLayout, ImageRules

MEMORY_BYTES = 3 << 30  # address space: a decoded image of 100 million pixels, twice, with transparency


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
    while (data := read_frame(sys.stdin.buffer)) is not None:
        write_frame(sys.stdout.buffer, msgspec.msgpack.encode(decoded(data, rules, most_pixels)))


def decoded(data: bytes, rules: ImageRules, most_pixels: int) -> Decoded:
    """The reply to a request. An empty file is answered like any other that is no image."""
    try:
        pixels = read_image(data, rules, most_pixels)
    except BadImage as error:
        return Decoded(refused=str(error))
    except MemoryError:
        return Decoded(refused="Could not process image: decoding it takes more memory than allowed")
    return Decoded(layout=pixels.layout, patches=pixels.patches.tobytes())


if __name__ == "__main__":
    main()
