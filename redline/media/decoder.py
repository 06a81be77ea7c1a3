"""Decodes images in a separate process (`redline.media.child`) that is started at the first image, and is killed if an
image takes too long. Everything here runs in one event loop, which is never blocked.
"""

import asyncio

import msgspec

from redline.child_process import ChildProcess
from redline.errors import Overloaded, RequestError
from redline.media.child import Decoded
from redline.media.rules import ImageRules

DECODE_S = 10.0  # for one image
WAITING = 64  # images that may wait for their turn; a request with more is rejected as an overload


class ImageDecoder:
    """The decoding process, which decodes one image at a time."""

    def __init__(self, rules: ImageRules, most_pixels: int, decode_s: float = DECODE_S) -> None:
        """most_pixels: limit on width x height of a file. decode_s: time limit of one image."""
        arguments = msgspec.json.encode(rules).decode(), str(most_pixels)
        self.child = ChildProcess("redline.media.child", *arguments, unable="images cannot be decoded now")
        self.decode_s = decode_s
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def decode(self, data: bytes, field: str) -> Decoded:
        """The patches of an image file. field: the name of the request's field, for errors.

        Raises RequestError if the image cannot be processed, and Overloaded.
        """
        if self._waiting >= WAITING:
            raise Overloaded(f"{self._waiting} images wait to be decoded; try again later")
        self._waiting += 1
        try:
            async with self._turn:
                reply = await self._reply(data)
        except TimeoutError:
            raise RequestError(
                f"Could not process image: decoding it takes more than {self.decode_s:g} s", field
            ) from None
        except ConnectionError:
            raise RequestError("Could not process image: its decoder ended", field) from None
        finally:
            self._waiting -= 1
        found = msgspec.msgpack.decode(reply, type=Decoded)
        if found.refused:
            raise RequestError(found.refused, field)
        return found

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
