"""`POST /page/render`: renders Markdown blocks to inert HTML (`api/page/render_child.py`).

A separate process renders, started at the first block and killed if a block takes too long: a regular expression of a
highlighter holds the GIL, and in this process it would stall token streaming.
"""

import asyncio
from typing import Annotated

import msgspec
from msgspec import Meta

from redline.api.errors import Refusal
from redline.api.openai.requests import read
from redline.child_process import ChildProcess
from redline.errors import Overloaded
from redline.frames import framed

PATH = "/page/render"
BLOCKS_BYTES = 256 << 10  # of the texts of one request
RENDER_S = 2.0  # seconds for one request
WAITING = 16  # queued requests, beyond which new ones are rejected


class RenderRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Markdown texts."""

    blocks: Annotated[list[str], Meta(min_length=1, max_length=256)]


class Renderer:
    """The rendering process, which serves one request at a time. Everything runs in one event loop."""

    def __init__(self, render_s: float = RENDER_S) -> None:
        self.render_s = render_s
        self._child = ChildProcess(
            "redline.api.page.render_child", unable="blocks cannot be rendered now", first=lambda: framed(b"[]")
        )
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
                return b'{"blocks":' + await self._rendered(msgspec.json.encode(blocks)) + b"}"
        finally:
            self._waiting -= 1

    async def ended(self) -> None:
        """Kill the process, and wait until it and all earlier ones have exited."""
        self._child.kill()
        await self._child.ended()

    async def _rendered(self, blocks: bytes) -> bytes:
        try:
            return await self._child.ask(blocks, self.render_s)
        except TimeoutError:
            raise Refusal(400, f"rendering the blocks takes more than {self.render_s:g} s", "blocks_too_slow") from None
        except ConnectionError:
            raise Refusal(400, "rendering the blocks takes more memory than allowed", "blocks_too_large") from None
