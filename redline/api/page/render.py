"""`POST /page/render`: renders Markdown blocks to inert HTML (`api/page/render_child.py`).

A separate process renders, started at the first block and killed if a block takes too long: a regular expression of a
highlighter holds the GIL, and in this process it would stall token streaming.
"""

import asyncio
import logging
import sys
from typing import Annotated

import msgspec
from msgspec import Meta

from redline.api.errors import Refusal
from redline.api.openai.requests import read
from redline.errors import Overloaded

PATH = "/page/render"
BLOCKS_BYTES = 256 << 10  # of the texts of one request
START_S = 60.0  # seconds for the process to import its modules, on a machine that is busy loading a model
RENDER_S = 2.0  # seconds for one request
WAITING = 16  # queued requests, beyond which new ones are rejected
LINE_BYTES = 16 << 20  # of a reply: highlighted code takes some 20 times its text

log = logging.getLogger("redline.api")


class RenderRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Markdown texts."""

    blocks: Annotated[list[str], Meta(min_length=1, max_length=256)]


class Renderer:
    """The rendering process, which serves one request at a time. Everything runs in one event loop."""

    def __init__(self, render_s: float = RENDER_S) -> None:
        self.render_s = render_s
        self._process: asyncio.subprocess.Process | None = None
        self._killed: list[asyncio.subprocess.Process] = []
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def answer(self, body: bytes) -> bytes:
        """The JSON response to a body. Raises RequestError, Refusal (413, 400) and Overloaded."""
        if len(body) > 2 * BLOCKS_BYTES:
            raise Refusal(413, f"the body is {len(body)} bytes; at most {2 * BLOCKS_BYTES} are read", "body_too_large")
        blocks = read(body, RenderRequest).blocks
        size = sum(map(len, blocks))
        if size > BLOCKS_BYTES:
            raise Refusal(413, f"blocks are {size} characters; at most {BLOCKS_BYTES} are rendered", "blocks_too_large")
        if self._waiting >= WAITING:
            raise Overloaded(f"{self._waiting} requests are queued for rendering; try again later")
        self._waiting += 1
        try:
            async with self._turn:
                return b'{"blocks":' + await self._rendered(msgspec.json.encode(blocks) + b"\n") + b"}"
        finally:
            self._waiting -= 1

    async def ended(self) -> None:
        """Kill the process, and wait until it and all earlier ones have exited."""
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

    async def _rendered(self, line: bytes) -> bytes:
        try:
            process = await self._started()
        except (OSError, asyncio.IncompleteReadError) as error:
            log.error("the process that renders the page's Markdown cannot be started: %r", error)
            raise Overloaded("blocks cannot be rendered now; try again later") from None
        try:
            async with asyncio.timeout(self.render_s):
                return await _asked(process, line)
        except TimeoutError:
            self._kill()
            raise Refusal(400, f"rendering the blocks takes more than {self.render_s:g} s", "blocks_too_slow") from None
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            self._kill()
            raise Refusal(400, "rendering the blocks takes more memory than allowed", "blocks_too_large") from None
        except BaseException:  # the client has left: the pending reply would go to the next request
            self._kill()
            raise

    async def _started(self) -> asyncio.subprocess.Process:
        """The process, once it has replied. Raises OSError (TimeoutError too) and IncompleteReadError."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self.ended()  # the previous one, which has exited or was killed
        pipe = asyncio.subprocess.PIPE
        command = sys.executable, "-m", "redline.api.page.render_child"
        process = self._process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, limit=LINE_BYTES
        )
        try:
            async with asyncio.timeout(START_S):
                await _asked(process, b"[]\n")
        except BaseException:
            self._kill()
            raise
        return process


async def _asked(process: asyncio.subprocess.Process, line: bytes) -> bytes:
    """Send a line and return the reply. Raises IncompleteReadError if the process has exited."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line)
    await process.stdin.drain()
    answer = await process.stdout.readuntil(b"\n")
    return answer.removesuffix(b"\n")
