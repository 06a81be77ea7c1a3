"""Bodies that clients have compressed: unpacked piece by piece, within the bound of a body."""

import asyncio
import zlib
from collections.abc import AsyncIterator

from redline.api.errors import Refusal

PIECE_BYTES = 256 << 10  # unpacked in one turn of the event loop, in less than a millisecond
_GZIP = 16 + zlib.MAX_WBITS


def check_encoding(encoding: bytes) -> bool:
    """Whether a body with this Content-Encoding is packed. Raises Refusal (415) for any other one."""
    name = encoding.strip().lower()
    if name in (b"gzip", b"x-gzip"):
        return True
    if name not in (b"", b"identity"):
        raise Refusal(415, "the body's Content-Encoding is not supported: send gzip, or the body as it is", "encoding")
    return False


async def unpacked(data: bytes) -> AsyncIterator[bytes]:
    """The pieces of a gzip body; whoever reads them stops when there are too many. Raises Refusal (400)."""
    stream = zlib.decompressobj(_GZIP)
    while not stream.eof:
        try:
            piece = stream.decompress(data, PIECE_BYTES)
        except zlib.error:
            raise Refusal(400, "the body is not valid gzip, as its Content-Encoding says", "invalid_gzip") from None
        data = stream.unconsumed_tail
        if not piece and not data and not stream.eof:
            raise Refusal(400, "the gzip body ends before its end", "invalid_gzip")
        yield piece
        await asyncio.sleep(0)
    if stream.unused_data:
        raise Refusal(400, "something stands behind the end of the gzip body", "invalid_gzip")
