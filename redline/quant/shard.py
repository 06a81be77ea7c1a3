"""One safetensors file, written as it is computed: its header is known before its data is.

So no shard is ever in memory as a whole, and what passes through goes from a view of the source to the file. A file
appears under its name when it is whole and on the disk; before, it is `.NAME.writing`, which nobody takes for a shard.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from redline.disk import sync

ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4, "I64": 8, "U8": 1}
_NAMES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
}
CHUNK = 1 << 24


class Entry(NamedTuple):
    """A tensor that a shard will hold, with its size in bytes."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    bytes: int


class Written(NamedTuple):
    """A finished file: its size and the SHA-256 of all of it, as `sha256sum` prints it."""

    bytes: int
    sha256: str


def entry_of(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Entry:
    """The entry of a tensor that we make."""
    return Entry(name, _NAMES[dtype], tuple(shape), math.prod(shape) * dtype.itemsize)


def header_of(entries: Sequence[Entry]) -> bytes:
    """What stands before the data: its own length in 8 bytes, then JSON, padded to a multiple of 8."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.bytes
        described[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (start, end)}
    text = msgspec.json.encode(described)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_bytes(entries: Sequence[Entry]) -> int:
    """The size of a shard that holds these."""
    return len(header_of(entries)) + sum(entry.bytes for entry in entries)


def write_shard(path: Path, entries: Sequence[Entry], data: Iterable[Tensor]) -> Written:
    """Writes `path`. data: the tensors of `entries`, one for each, in their order, on the CPU; or their bytes.

    Raises OSError where the disk is full; what was written so far then stays as `.NAME.writing`, and `path` as it was.
    """
    building = path.with_name(f".{path.name}.writing")
    digest, size = hashlib.sha256(), 0
    with building.open("wb") as file:

        def write(part: bytes | memoryview) -> None:
            nonlocal size
            file.write(part)
            digest.update(part)
            size += len(part)

        write(header_of(entries))
        for entry, tensor in zip(entries, data, strict=True):
            assert tensor.nbytes == entry.bytes, f"{entry.name}: {tensor.nbytes} bytes for {entry.bytes}"
            raw = tensor.contiguous().reshape(-1).view(torch.uint8)
            for part in raw.split(CHUNK):
                write(part.numpy().data)
        file.flush()
        os.fsync(file.fileno())
    building.replace(path)
    sync(path.parent)
    return Written(size, digest.hexdigest())


def measured(path: Path) -> Written:
    """What `write_shard` gave for a file that is there. Raises OSError where it cannot be read."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return Written(file.tell(), digest.hexdigest())
