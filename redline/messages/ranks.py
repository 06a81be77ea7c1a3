"""Messages from rank 0 to the other ranks about the memory that they share (`worker/rank_memory.py`), between two
steps."""

from redline.messages.base import WireMessage
from redline.messages.handoff import Piece
from redline.messages.job import PageId


class Grow(WireMessage, frozen=True):
    """The memory that the ranks share now has this size in bytes."""

    bytes: int


class Export(WireMessage, frozen=True):
    """Rank 0's GPU exports a buffer that the other ranks map and copy from. Buffers are numbered from 0 in order."""

    handle: bytes
    size: int


class Scatter(WireMessage, frozen=True):
    """Every rank copies a parcel from the shared memory into these pages; rank 0 has verified it."""

    piece: Piece  # its positions are relative to the first of `pages`, which are the job's pages that the parcel covers
    pages: tuple[PageId, ...]
    offset: int  # bytes
    size: int  # bytes
    exported: int | None = None  # number of the `Export` buffer that contains it; None: host memory
