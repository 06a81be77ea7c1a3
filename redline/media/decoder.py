"""Decodes images and videos in a separate process (`redline.media.child`) that is started at the first one, and is
killed if a file takes too long. Everything here runs in one event loop, which reading the largest reply, 150 MB of a
video's patches, keeps for 0.09 s.
"""

import asyncio

import msgspec

from redline.child_process import REPLY_BYTES, ChildProcess
from redline.errors import Overloaded, RequestError
from redline.media.child import IMAGE, VIDEO, Decoded, DecodedItem
from redline.media.rules import ImageRules

DECODE_S = 10.0  # for one image
WAITING = 64  # images that may wait for their turn; a request with more is rejected as an overload


class ImageDecoder:
    """The decoding process, which decodes one image at a time."""

    def __init__(self, rules: ImageRules, most_pixels: int, most_frames: int, decode_s: float = DECODE_S) -> None:
        """most_pixels: limit on width x height of a file. most_frames: limit on the sampled frames of a video.
        decode_s: time limit of one file."""
        arguments = msgspec.json.encode(rules).decode(), str(most_pixels), str(most_frames)
        frames = most_frames * rules.most_patches(rules.in_patch_limit_each_frame)
        values = 3 * rules.patch_size**2 * max(frames, rules.most_patches(rules.in_patch_limit))
        self.child = ChildProcess(
            "redline.media.child",
            *arguments,
            unable="images and videos cannot be decoded now",
            reply_bytes=max(REPLY_BYTES, values + (1 << 20)),
        )
        self.decode_s = decode_s
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def decode(self, data: bytes, field: str, *, video: bool = False) -> tuple[DecodedItem, ...]:
        """The image of an image file, or the chunks of a video. field: the name of the request's field, for errors.

        Raises RequestError if the file cannot be processed, and Overloaded.
        """
        what = "video" if video else "image"
        if self._waiting >= WAITING:
            raise Overloaded(f"{self._waiting} images and videos wait to be decoded; try again later")
        self._waiting += 1
        try:
            async with self._turn:
                reply = await self._reply((VIDEO if video else IMAGE) + data)
        except TimeoutError:
            raise RequestError(
                f"Could not process {what}: decoding it takes more than {self.decode_s:g} s", field
            ) from None
        except ConnectionError:
            raise RequestError(f"Could not process {what}: its decoder ended", field) from None
        finally:
            self._waiting -= 1
        found = msgspec.msgpack.decode(reply, type=Decoded)
        if found.refused:
            raise RequestError(found.refused, field)
        return found.items

    async def close(self) -> None:
        """Kills the process, and waits until it and all earlier ones have ended."""
        self.child.kill()
        await self.child.ended()

    async def _reply(self, data: bytes) -> bytes:
        """The reply to an image, from a new process if the first one ends: that may have had another reason."""
        try:
            return await self.child.ask(data, self.decode_s)
        except ConnectionError:
            return await self.child.ask(data, self.decode_s)
