"""Decodes images in a separate process (`redline.media.child`) that is started at the first image, and is killed if an
image takes too long. Everything here runs in one event loop, which is never blocked.
"""

import asyncio
import logging
import struct
import sys

import msgspec

from redline.errors import Overloaded, RequestError
from redline.media.child import Decoded
from redline.media.rules import ImageRules

START_S = 60.0  # for the process to import its modules, on a machine that is busy loading a model
DECODE_S = 10.0  # for one image
WAITING = 64  # images that may wait for their turn; a request with more is rejected as an overload
_LENGTH = struct.Struct(">I")

log = logging.getLogger("redline.media")


class ImageDecoder:
    """The decoding process, which decodes one image at a time."""

    def __init__(self, rules: ImageRules, most_pixels: int, decode_s: float = DECODE_S) -> None:
        """most_pixels: limit on width x height of a file. decode_s: time limit of one image."""
        self._arguments = msgspec.json.encode(rules).decode(), str(most_pixels)
        self._decode_s = decode_s
        self._process: asyncio.subprocess.Process | None = None
        self._killed: list[asyncio.subprocess.Process] = []
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
                found = await self._decoded(data, field) or await self._decoded(data, field, last=True)
        finally:
            self._waiting -= 1
        assert found is not None, "the last try has a reply or raises"
        if found.refused:
            raise RequestError(found.refused, field)
        return found

    async def close(self) -> None:
        """Kills the process, and waits until it and all earlier ones have exited."""
        self._kill()
        while self._killed:
            await self._killed[0].wait()  # a caller that is cancelled here leaves the process to the next one
            self._killed = [one for one in self._killed if one.returncode is None]

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._killed.append(process)
            if process.returncode is None:
                process.kill()

    async def _decoded(self, data: bytes, field: str, *, last: bool = False) -> Decoded | None:
        """The reply of the process; None if it has ended, which may have been for another reason than this image."""
        try:
            process = await self._started()
        except (OSError, asyncio.IncompleteReadError) as error:
            log.error("the process that decodes images cannot be started: %r", error)
            raise Overloaded("images cannot be decoded now; try again later") from None
        try:
            async with asyncio.timeout(self._decode_s):
                return await _asked(process, data)
        except TimeoutError:
            self._kill()
            raise RequestError(
                f"Could not process image: decoding it takes more than {self._decode_s:g} s", field
            ) from None
        except (OSError, asyncio.IncompleteReadError):
            self._kill()
            if not last:
                return None
            raise RequestError("Could not process image: its decoder ended", field) from None
        except BaseException:  # the client has left: the pending reply would go to the next request
            self._kill()
            raise

    async def _started(self) -> asyncio.subprocess.Process:
        """The process, once it has replied. Raises OSError (TimeoutError too) and IncompleteReadError."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self.close()  # the previous one, which has exited or was killed
        pipe = asyncio.subprocess.PIPE
        command = sys.executable, "-m", "redline.media.child", *self._arguments
        process = self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        try:
            async with asyncio.timeout(START_S):
                await _asked(process, b"")
        except BaseException:
            self._kill()
            raise
        return process


async def _asked(process: asyncio.subprocess.Process, data: bytes) -> Decoded:
    """Sends an image and returns the reply. Raises IncompleteReadError if the process has exited."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(_LENGTH.pack(len(data)) + data)
    await process.stdin.drain()
    (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=Decoded)
