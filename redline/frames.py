"""Messages over a pipe: frames of four bytes of length, little-endian, and the payload."""

import struct
from typing import BinaryIO

LENGTH = struct.Struct("<I")


def framed(data: bytes) -> bytes:
    """A payload as a frame."""
    return LENGTH.pack(len(data)) + data


def read_frame(source: BinaryIO) -> bytes | None:
    """The next payload; None at the end of the pipe."""
    head = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def write_frame(target: BinaryIO, data: bytes) -> None:
    """Sends a payload at once."""
    target.write(framed(data))
    target.flush()
