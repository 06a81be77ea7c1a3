"""Writes one safetensors file while its tensors are computed: the header is known before the data.

So no shard is ever in memory as a whole, and copied tensors go from a view of the source to the file. A file gets its
name when it is complete and on the disk; before, it is `.NAME.writing`, which is not taken for a shard.
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


class TensorEntry(NamedTuple):
    """A tensor of a shard to be written, with its size in bytes."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    bytes: int


class WrittenShard(NamedTuple):
    """A finished file: its size and its SHA-256, as printed by `sha256sum`."""

    bytes: int
    sha256: str


def entry_of(name: str, dtype: torch.dtype, shape: Sequence[int]) -> TensorEntry:
    """The entry of a newly computed tensor."""
    return TensorEntry(name, _NAMES[dtype], tuple(shape), math.prod(shape) * dtype.itemsize)


def header_of(entries: Sequence[TensorEntry]) -> bytes:
    """The file's header: its own length in 8 bytes, then JSON, padded to a multiple of 8."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.bytes
        described[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (start, end)}
    text = msgspec.json.encode(described)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_bytes(entries: Sequence[TensorEntry]) -> int:
    """The size of a shard with these entries, in bytes."""
    return len(header_of(entries)) + sum(entry.bytes for entry in entries)


def write_shard(path: Path, entries: Sequence[TensorEntry], data: Iterable[Tensor]) -> WrittenShard:
    """Write `path`. data: the tensors of `entries`, one for each, in their order, on the CPU; or their bytes.

    Raises OSError if the disk is full; the partial data then stays as `.NAME.writing`, and `path` is unchanged.
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
    return WrittenShard(size, digest.hexdigest())


def measured(path: Path) -> WrittenShard:
    """The result of `write_shard` for an existing file. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return WrittenShard(file.tell(), digest.hexdigest())
