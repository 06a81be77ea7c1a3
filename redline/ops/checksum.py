"""The checksum of transferred bytes: 64 bits, seeded, a sum over words that may be added in any order.

    checksum = sum over i of mix(w[i] ^ (mix(seed) + i * GAMMA))  mod 2^64

w[0] is the byte count; w[1], w[2], ... are the bytes in groups of eight, little-endian, padded with zeros. mix is one
to one, so a change of a single word always changes the sum; a change of several words, or of the order of words or
blocks, goes undetected with probability 2^-64. It detects accidents, not attacks: an attacker can compute it too.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.ops.op import Case, Cost, Op

# Constants of splitmix64 (Steele, Lea and Flood 2014), with Stafford's mixer 13.
GAMMA = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


class ChecksumArgs(NamedTuple):
    """Adds up the words of a buffer, each mixed with its position and the seed."""

    data_N: Tensor  # uint8 [N], contiguous
    seed: int  # [0, 2^64)


class ChecksumsArgs(NamedTuple):
    """The checksum of each row of a buffer, with a seed per row."""

    data_RN: Tensor  # uint8 [R, N], contiguous
    seeds: tuple[int, ...]  # R, [0, 2^64)


def mix(word: int) -> int:
    """64 bits to 64 bits, one to one."""
    word = (word ^ word >> 30) * FIRST % 2**64
    word = (word ^ word >> 27) * SECOND % 2**64
    return word ^ word >> 31


def signed(word: int) -> int:
    """The int64 that has these 64 bits."""
    return word - (word >> 63 << 64)


def number(checksum: Tensor) -> int:
    """The checksum as a number in [0, 2^64); on a GPU this synchronizes."""
    return int(checksum) % 2**64


def _shifted(x: Tensor, by: int) -> Tensor:
    return x >> by & (1 << 64 - by) - 1


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * signed(FIRST)
    x = (x ^ _shifted(x, 27)) * signed(SECOND)
    return x ^ _shifted(x, 31)


def reference(args: ChecksumArgs) -> Tensor:
    """-> int64 []: the bits of the checksum."""
    data_N = args.data_N
    count = data_N.numel()
    words = torch.zeros(1 + -(-count // 8), dtype=torch.int64, device=data_N.device)
    words[0] = count
    words[1:].view(torch.uint8)[:count] = data_N
    places = torch.arange(len(words), dtype=torch.int64, device=data_N.device)
    return _mixed(words ^ (signed(mix(args.seed)) + places * signed(GAMMA))).sum()


def reference_rows(args: ChecksumsArgs) -> Tensor:
    """-> int64 [R]: the bits of the checksums."""
    sums = [reference(ChecksumArgs(row, seed)) for row, seed in zip(args.data_RN, args.seeds, strict=True)]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=args.data_RN.device)


def cost(args: ChecksumArgs) -> Cost:
    """The bytes are read once, and 8 are written."""
    return Cost(args.data_N.nbytes + 8)


def cases() -> Iterator[Case]:
    """No bytes, less than a word, words and a remainder, more than one block of a GPU kernel, a KV chunk."""

    def make(count: int, seed: int | None = None):
        def inputs(g: torch.Generator) -> ChecksumArgs:
            drawn = int(torch.randint(2**63 - 1, (1,), generator=g)) * 2 + 1
            data = torch.randint(256, (count,), generator=g, dtype=torch.uint8)
            return ChecksumArgs(data, drawn if seed is None else seed)

        return inputs

    yield Case("N=0", make(0))
    yield Case("N=5", make(5))
    yield Case("N=8, seed 0", make(8, 0))
    yield Case("N=1,003", make(1003))
    yield Case("N=73,728, greatest seed", make(73_728, 2**64 - 1))
    yield Case("N=300,007", make(300_007))
    yield Case("N=4.5 MB", make(61 * 73_728), small=False)


def cost_rows(args: ChecksumsArgs) -> Cost:
    """The cost of `checksum`, for each row."""
    return Cost(args.data_RN.nbytes + 8 * len(args.seeds))


def cases_rows() -> Iterator[Case]:
    """One row, rows below and above one block of a GPU kernel, pages."""

    def make(rows: int, count: int):
        def inputs(g: torch.Generator) -> ChecksumsArgs:
            seeds = [int(each) * 2 + 1 for each in torch.randint(2**63 - 1, (rows,), generator=g)]
            return ChecksumsArgs(torch.randint(256, (rows, count), generator=g, dtype=torch.uint8), tuple(seeds))

        return inputs

    yield Case("R=1 N=8", make(1, 8))
    yield Case("R=3 N=1,000", make(3, 1000))
    yield Case("R=2 N=200,008", make(2, 200_008))
    yield Case("R=16 N=4.5 MB", make(16, 61 * 73_728), small=False)


checksums = Op("checksums", ChecksumsArgs, reference_rows, cost_rows, cases_rows, rtol=0)
checksum = Op("checksum", ChecksumArgs, reference, cost, cases, rtol=0)
