"""The process that decodes images and videos: a hostile file can make only this process slow, large or crash, and it
can be killed.

Requests and replies are frames (`redline.frames`). A request is a byte, IMAGE or VIDEO, and the file; the reply is a
msgpack `Decoded`. The arguments are JSON of the `ImageRules`, the limit on pixels, and that on a video's frames.
"""

import resource
import signal
import sys

import msgspec

from redline.frames import read_frame, write_frame
from redline.media.hashing import image_hash
from redline.media.image import BadImage, read_image
from redline.media.rules import ImageLayout, ImageRules
from redline.media.video import read_video

MEMORY_BYTES = 3 << 30  # address space: a decoded image of 100 million pixels, twice, with transparency


IMAGE, VIDEO = b"i", b"v"


class DecodedItem(msgspec.Struct, array_like=True):
    """An image, or a chunk of a video, for the vision tower."""

    layout: ImageLayout
    patches: bytes  # uint8 [frames x rows x columns, 3, patch, patch]
    hash: bytes  # of the patches and their grid
    frames: int = 1
    time: str = ""  # of a chunk: of its first frame


class Decoded(msgspec.Struct, array_like=True):
    """What a file holds, an image or the chunks of a video; or why it is refused."""

    refused: str = ""
    items: tuple[DecodedItem, ...] = ()


def main() -> None:
    """Answers requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # SIGINT reaches the whole group; the end of stdin ends this process
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    rules, (most_pixels, most_frames) = msgspec.json.decode(sys.argv[1], type=ImageRules), map(int, sys.argv[2:4])
    while (data := read_frame(sys.stdin.buffer)) is not None:
        write_frame(sys.stdout.buffer, msgspec.msgpack.encode(decoded(data, rules, most_pixels, most_frames)))


def decoded(data: bytes, rules: ImageRules, most_pixels: int, most_frames: int) -> Decoded:
    """The reply to a request. An empty file is answered like any other that is no image."""
    kind, file = data[:1], data[1:]
    try:
        if kind == VIDEO:
            chunks = read_video(file, rules, most_pixels, most_frames)
            items = [_item(one.layout, one.patches.tobytes(), one.frames, one.time) for one in chunks]
        else:
            pixels = read_image(file, rules, most_pixels)
            items = [_item(pixels.layout, pixels.patches.tobytes())]
    except BadImage as error:
        return Decoded(refused=str(error))
    except MemoryError:
        return Decoded(refused="Could not process image: decoding it takes more memory than allowed")
    return Decoded(items=tuple(items))


def _item(layout: ImageLayout, patches: bytes, frames: int = 1, time: str = "") -> DecodedItem:
    return DecodedItem(layout, patches, image_hash(patches, frames, layout.rows, layout.columns), frames, time)


if __name__ == "__main__":
    main()
