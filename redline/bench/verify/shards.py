"""Reads the tensors of a shard, and finds damage that headers do not show: holes, zeros, NaN, lost scales, bad codes.

Data is read by `preadv` instead of a memory map: a block that the disk cannot read is then a fault of one tensor, and
does not kill the process. Holes are found by SEEK_DATA and are not read.
"""

import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from redline import clock
from redline.bench.verify.report import Problem, VerifiedShard
from redline.model.k2.checkpoint import NVFP4_NAMES, Stored, Survey
from redline.model.k2.config import Int4Experts, Nvfp4Experts
from redline.ops.formats import INT4_GROUP, NVFP4_GROUP

CHUNK = 16 << 20  # bytes per read
BLOCK = 4096  # bytes per file block: file data is lost in whole blocks
LEAST_CODES = 1024  # codes of a weight, at least, for its distribution to be checked
LEAST_PEAK = 1.5  # codes 7 to 9 must be more frequent than 1, 2 and 14 by this factor

Kind = Literal["empty", "hole", "zeros", "blocks", "numbers", "scales", "codes", "unread"]
# dtype -> (integer type of its bits, mask without the sign, least masked value that is NaN or infinite)
_BITS = {
    "BF16": (torch.int16, 0x7FFF, 0x7F80),
    "F16": (torch.int16, 0x7FFF, 0x7C00),
    "F32": (torch.int32, 0x7FFFFFFF, 0x7F800000),
    "F8_E4M3": (torch.uint8, 0x7F, 0x7F),
}


class ShardFault(NamedTuple):
    """A fault of the tensor with this stored name."""

    kind: Kind
    tensor: str
    what: str


class Wanted(NamedTuple):
    """Facts of the survey on tensors, by stored name.

    needed  tensors that the model reads
    packed  tensors of INT4 codes
    codes   maps a tensor of 4-bit scales to the tensor of its codes
    """

    needed: frozenset[str]
    packed: frozenset[str]
    codes: dict[str, Stored]


def wanted(survey: Survey) -> Wanted:
    """The facts on the tensors of all shards."""
    quantization, tensors = survey.config.quantization, survey.tensors
    suffix = "_packed" if isinstance(quantization, Int4Experts) else None
    if isinstance(quantization, Nvfp4Experts):
        suffix = NVFP4_NAMES[quantization.maker][0]
    codes: dict[str, Stored] = {}
    for name, stored in tensors.items():
        if suffix is not None and name.endswith("weight_scale"):
            of = tensors.get(name.removesuffix("_scale") + suffix)
            if of is not None and of.dtype in ("I32", "U8"):
                codes[stored.name] = of
    packed = frozenset(of.name for of in codes.values() if of.dtype == "I32")
    return Wanted(frozenset(stored.name for stored in tensors.values()), packed, codes)


def read_shard(
    job: str,
    file: Path,
    tensors: Sequence[Stored],
    of: Wanted,
    fix: str,
    progress: Callable[[int, int], object],
) -> VerifiedShard:
    """Reads every tensor of a shard. fix: advice to the user if it is damaged.

    progress: called with (bytes done, bytes of them that were read); it may raise to stop reading. Raises OSError if
    the file cannot be opened.
    """
    began, state = clock.monotonic(), file.stat()
    reader = _Reader(of, progress)
    with file.open("rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for stored in sorted(tensors, key=lambda stored: stored.start):
            reader.read(stored, opened.fileno())
    by_kind: dict[Kind, list[ShardFault]] = {}
    for fault in reader.faults:
        by_kind.setdefault(fault.kind, []).append(fault)
    return VerifiedShard(
        job=job,
        file=file.name,
        bytes=state.st_size,
        mtime_ns=state.st_mtime_ns,
        tensors=len(tensors),
        read_bytes=reader.read_bytes,
        seconds=round(clock.monotonic() - began, 3),
        codes=tuple(_list(reader.codes)) if reader.codes.any() else (),
        problems=tuple(
            Problem(file=file.name, tensor=faults[0].tensor, tensors=len(faults), what=faults[0].what, fix=fix)
            for faults in by_kind.values()
        ),
        damaged=tuple(sorted({layer_of(fault.tensor) for fault in reader.faults})),
    )


def layer_of(name: str) -> int:
    """The layer of a stored or logical name; -1 if it belongs to no layer."""
    found = re.search(r"(?:^|\.)layers\.(\d{1,6})\.", name)
    return int(found[1]) if found else -1


class _Reader:
    """Reads tensors one by one."""

    def __init__(self, of: Wanted, progress: Callable[[int, int], object]) -> None:
        self.faults: list[ShardFault] = []
        self.codes = torch.zeros(16, dtype=torch.int64)
        self.read_bytes = 0
        self._of = of
        self._progress = progress
        self._buffer = bytearray(CHUNK)

    def read(self, stored: Stored, file: int) -> None:
        """Reads a tensor, and adds its faults to `faults`."""
        look = _Look(stored, self._of)
        size, done = stored.stop - stored.start, 0
        try:
            for start, stop in data_of(file, stored.start, stored.stop):
                for at in range(start, stop, CHUNK):
                    count = min(CHUNK, stop - at)
                    _fill(file, memoryview(self._buffer)[:count], at)
                    look.see(torch.frombuffer(self._buffer, dtype=torch.uint8, count=count), at)
                    done += count
                    self.read_bytes += count
                    self._progress(count, count)
            self.faults += look.faults(size - done)
        except OSError as error:
            self.faults.append(ShardFault("unread", stored.name, f"cannot be read: {error.strerror or error}"))
        self.codes += look.codes
        self._progress(size - done, 0)


def data_of(file: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The parts of [start, stop) of an open file that are not holes, each at a multiple of 8 bytes after `start`."""
    at = start
    while at < stop:
        try:
            first = os.lseek(file, at, os.SEEK_DATA)
            end = os.lseek(file, first, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole to the end of the file
                return
            first, end = at, stop  # a file system without SEEK_DATA
        if first >= stop:
            return
        first = max(at, first - (first - start) % 8)
        end = min(stop, end + -(end - start) % 8)
        yield first, end
        at = end


def _fill(file: int, into: memoryview, at: int) -> None:
    """Reads until `into` is full. Raises OSError, also if the file ends early."""
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], at + done)
        if not count:
            raise OSError(errno.EIO, "the file has become shorter")
        done += count


class _Look:
    """Checks one tensor, chunk by chunk."""

    def __init__(self, stored: Stored, of: Wanted) -> None:
        self.codes = torch.zeros(16, dtype=torch.int64)
        self._stored = stored
        self._needed = stored.name in of.needed
        self._packed = stored.name in of.packed
        self._codes_of = of.codes.get(stored.name)
        # A vocabulary has rows of unused tokens, which may be zero; zero scales are found number by number.
        self._solid = self._needed and self._codes_of is None and not re.search(r"embed_tokens|lm_head", stored.name)
        self._any = False
        self._blocks = 0
        self._first_block = 0
        self._wrong: list[Tensor] = []  # indices of numbers that are not finite
        self._zeros: list[Tensor] = []  # indices of scales that are zero

    def see(self, chunk: Tensor, at: int) -> None:
        """chunk: uint8, the bytes of the file from `at` on."""
        if not self._any:
            self._any = bool(chunk.any())
        if self._solid:
            self._see_blocks(chunk, at)
        if self._packed:
            counts = torch.bincount(chunk, minlength=256).view(16, 16)
            self.codes += counts.sum(0) + counts.sum(1)
        if self._stored.dtype in _BITS:
            self._see_numbers(chunk, at)

    def _see_blocks(self, chunk: Tensor, at: int) -> None:
        head = -at % BLOCK
        whole = (len(chunk) - head) // BLOCK
        if whole <= 0:
            return
        part = chunk[head : head + whole * BLOCK]
        words = (part if head % 8 == 0 else part.clone()).view(torch.int64).view(whole, -1)
        empty = ~words.any(1)
        if (found := int(empty.sum())) and not self._blocks:
            self._first_block = at + head + BLOCK * int(empty.int().argmax())
        self._blocks += found

    def _see_numbers(self, chunk: Tensor, at: int) -> None:
        integers, bits, least = _BITS[self._stored.dtype]
        numbers = chunk.view(integers) & bits
        first = (at - self._stored.start) // integers.itemsize
        if int(numbers.amax()) >= least:
            self._wrong.append((numbers >= least).nonzero()[:, 0] + first)
        if self._codes_of is not None and self._codes_of.dtype == "I32" and int(numbers.amin()) == 0:
            self._zeros.append((numbers == 0).nonzero()[:, 0] + first)

    def faults(self, hole: int) -> Iterator[ShardFault]:
        """The faults of the tensor. hole: number of its bytes in holes. Raises the OSError of `_effective`."""
        size = self._stored.stop - self._stored.start
        if hole and self._any:
            yield self._fault("hole", f"{hole:,} of its {size:,} bytes are a hole in the file: they were never written")
        elif hole:
            yield self._fault("empty", f"empty: its {size:,} bytes are a hole in the file and were never written")
        elif not self._any and size and self._needed:
            yield self._fault("zeros", f"all its {size:,} bytes are zero")
        elif self._blocks:
            where = f"the first at byte {self._first_block:,} of the file"
            yield self._fault("blocks", f"{self._blocks:,} blocks of {BLOCK:,} bytes are zero, {where}")
        if wrong := self._effective(self._wrong):
            count = "1 number is" if len(wrong) == 1 else f"{len(wrong):,} numbers are"
            yield self._fault("numbers", f"{count} NaN or infinite, the first at {self._place(wrong[0])}")
        if self._any and (zeros := self._effective(self._zeros)):
            count = "1 scale is" if len(zeros) == 1 else f"{len(zeros):,} scales are"
            where = f"the first at {self._place(zeros[0])}"
            yield self._fault("scales", f"{count} zero although the codes that it scales are not, {where}")
        if self._any and not hole and int(self.codes.sum()) >= LEAST_CODES and not peaked(self.codes):
            yield self._fault(
                "codes", f"its INT4 codes are not distributed like those of weights: {_shares(self.codes)}"
            )

    def _effective(self, places: list[Tensor]) -> list[int]:
        """The indices, without those of 4-bit scales with all codes zero, since these scales have no effect.

        Raises OSError if the codes cannot be read.
        """
        if not places:
            return []
        every, codes = torch.cat(places), self._codes_of
        if codes is None:
            return _list(every)
        buffer = bytearray(codes.stop - codes.start)
        with codes.file.open("rb", buffering=0) as file:
            _fill(file.fileno(), memoryview(buffer), codes.start)
        data = torch.frombuffer(buffer, dtype=torch.uint8)
        if codes.dtype == "I32":
            used = data.view(-1, INT4_GROUP // 2)[every] != 0x88
        else:
            used = (data.view(-1, NVFP4_GROUP // 2)[every] & 0x77) != 0
        return _list(every[used.any(1)])

    def _place(self, number: int) -> list[int]:
        """The position of a number in the tensor: one index per axis."""
        return [int(index) for index in np.unravel_index(number, self._stored.shape or (1,))]

    def _fault(self, kind: Kind, what: str) -> ShardFault:
        return ShardFault(kind, self._stored.name, what)


def peaked(codes: Tensor) -> bool:
    """Whether codes peak in the middle, as those of rounded weights do. codes: counts of the 16 codes."""
    middle, ends = int(codes[[7, 8, 9]].sum()), int(codes[[1, 2, 14]].sum())
    return middle >= LEAST_PEAK * ends


def _list(integers: Tensor) -> list[int]:
    return [int(number) for number in integers]


def _shares(codes: Tensor) -> str:
    middle, ends = (float(codes[places].sum() / codes.sum()) for places in ([7, 8, 9], [1, 2, 14]))
    return f"{middle:.0%} are 7 to 9, and {ends:.0%} are 1, 2 and 14"
