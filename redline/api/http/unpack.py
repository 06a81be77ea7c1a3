"""Decompresses request bodies piece by piece, within the size limit of a body."""

import asyncio
import zlib
from collections.abc import AsyncIterator

from redline.api.errors import Refusal

PIECE_BYTES = 256 << 10  # decompressed per event loop iteration, in less than a millisecond
_GZIP = 16 + zlib.MAX_WBITS


def check_encoding(encoding: bytes) -> bool:
    """Whether a body with this Content-Encoding is compressed. Raises Refusal (415) for unsupported encodings."""
    name = encoding.strip().lower()
    if name in (b"gzip", b"x-gzip"):
        return True
    if name not in (b"", b"identity"):
        raise Refusal(415, "the body's Content-Encoding is not supported: send gzip or no encoding", "encoding")
    return False


async def unpacked(data: bytes) -> AsyncIterator[bytes]:
    """The pieces of a gzip body; the caller stops if it gets too much. Raises Refusal (400)."""
    stream = zlib.decompressobj(_GZIP)
    while not stream.eof:
        try:
            piece = stream.decompress(data, PIECE_BYTES)
        except zlib.error:
            raise Refusal(400, "the Content-Encoding is gzip, but the body is not valid gzip", "invalid_gzip") from None
        data = stream.unconsumed_tail
        if not piece and not data and not stream.eof:
            raise Refusal(400, "the gzip body is truncated", "invalid_gzip")
        yield piece
        await asyncio.sleep(0)
    if stream.unused_data:
        raise Refusal(400, "there is data after the end of the gzip body", "invalid_gzip")
