"""What rank 0 tells the others of the memory that they share (`worker/rank_memory.py`), between two steps."""

from redline.wire.base import Message
from redline.wire.handoff import Piece
from redline.wire.job import PageId


class Grow(Message, frozen=True):
    """The memory that ranks share has so many bytes from now on."""

    bytes: int


class Export(Message, frozen=True):
    """Rank 0's GPU has memory that the others map and copy from: the next by number, from 0 on."""

    handle: bytes
    size: int


class Scatter(Message, frozen=True):
    """Every rank puts a parcel, which lies in memory that they share, into these pages: rank 0 has verified it."""

    piece: Piece  # of the pages: they are the job's that it touches, and its positions are counted from the first on
    pages: tuple[PageId, ...]
    offset: int  # bytes
    size: int  # likewise
    exported: int | None = None  # which `Export` it lies in; None: in the host's memory
