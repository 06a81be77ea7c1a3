"""Errors that a checksum of bytes must detect: all that a link or a late reader may cause."""

import numpy as np
import pytest
import torch

from redline.kernels.by_chip import checksum as kernel
from redline.kernels.cpu.checksum import of_memory
from redline.ops.checksum import FIRST, GAMMA, SECOND, checksum, mix, number, signed
from tests.seeds import fresh_generator

BLOCK = 64 * 1024


def of(data: torch.Tensor, seed: int = 7) -> int:
    found = number(kernel(data, seed))
    assert 0 <= found < 2**64
    return found


def drawn(count: int) -> torch.Tensor:
    return torch.randint(256, (count,), generator=fresh_generator(), dtype=torch.uint8)


@pytest.mark.parametrize("count", [0, 3, 8, 1001])
@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_it_is_the_formula_in_pythons_numbers(count: int, seed: int):
    data = bytes(drawn(count).tolist())
    words = [count] + [int.from_bytes(data[i : i + 8], "little") for i in range(0, count, 8)]
    total = sum(mix(w ^ (mix(seed) + i * GAMMA) % 2**64) for i, w in enumerate(words)) % 2**64
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    assert number(checksum(tensor, seed)) == of(tensor, seed) == total


def test_the_mixer_can_be_undone_so_no_two_words_are_one():
    def undo(word: int, by: int) -> int:
        found = word
        for _ in range(64 // by):
            found = word ^ found >> by
        return found

    for word in torch.randint(2**62, (1000,), generator=fresh_generator()).tolist():
        back = undo(mix(word), 31) * pow(SECOND, -1, 2**64) % 2**64
        back = undo(back, 27) * pow(FIRST, -1, 2**64) % 2**64
        assert undo(back, 30) == word
    assert signed(2**64 - 1) == -1
    assert signed(5) == 5


@pytest.mark.parametrize("data", [drawn(1003), torch.zeros(1003, dtype=torch.uint8)], ids=["drawn", "zeros"])
def test_any_bit_that_flips_changes_it_and_no_two_flips_alike(data: torch.Tensor):
    found = {of(data)}
    for byte in range(len(data)):
        for bit in range(8):
            data[byte] ^= 1 << bit
            found.add(of(data))
            data[byte] ^= 1 << bit
    assert len(found) == 1 + 8 * len(data)


def test_words_and_blocks_that_change_places_change_it():
    data = drawn(8 * BLOCK)
    before = of(data)
    words, blocks = data.view(-1, 8), data.view(-1, BLOCK)
    for parts in (words, blocks):
        for i in range(1, len(parts), max(1, len(parts) // 50)):
            parts[[0, i]] = parts[[i, 0]]
            assert of(data) != before
            parts[[0, i]] = parts[[i, 0]]
    assert of(data) == before
    for shift in (1, 8, BLOCK):
        assert of(data.roll(shift)) != before


def test_bytes_that_are_missing_or_added_or_not_there_yet_change_it():
    for data in (drawn(4099), torch.zeros(4099, dtype=torch.uint8)):
        counts = (*range(64), *range(4000, 4100))
        assert len({of(data[:count]) for count in counts}) == len(counts), (
            "zeros at the end must change the checksum too"
        )
    data = drawn(4 * 4096)
    before = of(data)
    for page in data.view(-1, 4096):
        kept = page.clone()
        page.zero_()
        assert of(data) != before
        page.copy_(kept)


def test_another_seed_is_another_checksum_of_the_same_bytes():
    data = drawn(512)
    seeds = [*range(1000), *(2**48 * id for id in range(1, 1000)), *(2**64 - 1 - n for n in range(1000))]
    assert len({of(data, seed) for seed in seeds}) == len(seeds)


def test_it_takes_bytes_at_any_address():
    data = drawn(5000)
    for first in range(9):
        part = data[first : first + 4003]
        assert of(part) == number(checksum(part, 7)) == of_memory(part.data_ptr(), 4003, 7)


def test_changes_spread_over_all_of_its_bits():
    """Each bit of the sum flips for half of all single-bit changes of the data."""
    data = drawn(4096)
    before, flips = of(data), []
    for byte in range(0, 4096, 2):
        data[byte] ^= 1
        flips.append(of(data) ^ before)
        data[byte] ^= 1
    bits = np.unpackbits(np.array(flips, np.uint64).view(np.uint8)).reshape(len(flips), 64)
    assert (abs(bits.mean(0) - 0.5) < 0.08).all()
