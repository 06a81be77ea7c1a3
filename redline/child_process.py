"""A child process for work that would stall the event loop, or that a hostile input can make slow, large or crash:
grammars, Markdown, images. It is killed if a reply is late, and started again for the next request.
"""

import asyncio
import logging
import sys
from collections.abc import Callable

from redline.errors import Overloaded
from redline.frames import LENGTH, framed

START_S = 60.0  # seconds for a process to import its modules, on a machine that is busy loading a model
REPLY_BYTES = 64 << 20  # by default a larger reply counts as the end of the process

log = logging.getLogger("redline.child")


class ChildProcess:
    """`python -m MODULE`, which answers each frame on its standard input by a frame on its standard output, one after
    the other: callers take turns. `process` is the one that runs."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        unable: str,
        first: Callable[[], bytes] = lambda: framed(b""),
        reply_bytes: int = REPLY_BYTES,
    ) -> None:
        """unable: the error if no process can be started, such as "images cannot be decoded now". first: makes, in a
        thread, the frames that a new process is sent, the last of which it answers. reply_bytes: of a reply, at most.
        """
        self._command = "-m", module, *arguments
        self._unable = unable
        self._first = first
        self._reply_bytes = reply_bytes
        self.process: asyncio.subprocess.Process | None = None
        self._killed: list[asyncio.subprocess.Process] = []
        self._ending = asyncio.Lock()

    async def ask(self, request: bytes, timeout_s: float) -> bytes:
        """The reply to a request. Raises TimeoutError if it is late, ConnectionError if the process ends, and
        Overloaded if none can be started. After an error, and if the caller is cancelled, the process is killed."""
        if self.process is not None and self.process.returncode is not None:
            self.kill()  # it has ended since its last reply
        if self.process is None:
            try:
                async with asyncio.timeout(START_S):
                    await self._start()
            except (OSError, asyncio.IncompleteReadError) as error:  # TimeoutError is an OSError
                log.error("%s: %s cannot be started: %r", self._unable, self._command[1], error)
                raise Overloaded(f"{self._unable}; try again later") from None
        assert self.process is not None
        try:
            async with asyncio.timeout(timeout_s):
                return await exchange(self.process, framed(request), self._reply_bytes)
        except asyncio.IncompleteReadError as error:
            self.kill()
            raise ConnectionError("the process has ended") from error
        except BaseException:  # the pending reply would go to the next request
            self.kill()
            raise

    def kill(self) -> None:
        """Kills the process; `ended` waits for its end."""
        process, self.process = self.process, None
        if process is not None:
            self._killed.append(process)
            if process.returncode is None:
                process.kill()

    async def ended(self) -> None:
        """Waits until all killed processes have ended."""
        while self._killed:
            async with self._ending:  # a caller that is cancelled here leaves the process to the next one
                for process in self._killed[:1]:
                    # it counts as ended when its output has been read, so the rest of a reply must be
                    await asyncio.gather(process.wait(), _read_to_the_end(process))
                self._killed = [one for one in self._killed if one.returncode is None]

    async def _start(self) -> None:
        await self.ended()  # the process before
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(sys.executable, *self._command, stdin=pipe, stdout=pipe)
        try:
            await exchange(self.process, await asyncio.to_thread(self._first))
        except BaseException:
            self.kill()
            raise


async def _read_to_the_end(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    while await process.stdout.read(1 << 20):
        pass


async def exchange(process: asyncio.subprocess.Process, frames: bytes, most: int = REPLY_BYTES) -> bytes:
    """Sends frames, and returns the reply. Raises IncompleteReadError if the process has ended, ConnectionError if it
    no longer reads or if the reply is too large."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(frames)
    await process.stdin.drain()
    (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    if size > most:
        raise ConnectionError(f"a reply of {size} bytes")
    return await process.stdout.readexactly(size)
