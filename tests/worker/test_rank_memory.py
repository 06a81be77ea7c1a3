"""Memory shared by ranks: a rank copies what rank 0 wrote there into its own pages, and counts it."""

import os
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from redline import limits
from redline.errors import ConfigError
from redline.messages.codec import decode, encode
from redline.messages.handoff import Piece
from redline.messages.job import PageId
from redline.messages.ranks import Export, Grow, Scatter
from redline.run.kv import KvPool
from redline.run.kv_chunks import KvChunkLayout
from redline.worker import parcel_memory, rank_memory
from redline.worker.parcel_memory import HostParcels, pin
from redline.worker.rank_memory import FollowedMemory, RankMemory
from tests.transport.books import Book

PAGES = [PageId(page) for page in (5, 0, 3, 7, 2)]  # pages of a job, holding its positions 0 to 319
PIECES = [
    Piece(layers=(0, 2), positions=(64, 192), draft=(64, 192)),
    Piece(layers=(1, 2), positions=(192, 310), draft=(192, 311)),
    Piece(layers=(0, 1), positions=(256, 310)),
]


def kv(seed: int) -> KvPool:
    """A pool of eight pages with contents that no other seed gives."""
    generator = torch.Generator().manual_seed(seed)
    planes, draft = torch.rand(2, 8, 64, 16, generator=generator), torch.rand(8, 64, 4, generator=generator)
    tails = torch.rand(8, 6, generator=generator)
    return cast("KvPool", SimpleNamespace(planes=planes, draft=draft, tails=tails))


def test_pieces_reach_another_rank_from_every_part_of_the_memory() -> None:
    memory, ours, theirs = RankMemory(2), kv(1), kv(2)
    expected, parcels = kv(2), KvChunkLayout(ours)
    other = FollowedMemory(os.dup(memory.file), 1, theirs)
    for number, piece in enumerate(PIECES):
        part, grown = memory.grow(100_000)
        told = decode(encode([grown]))[0]
        assert isinstance(told, Grow)
        other.grow(told)
        size = parcels.size(piece)
        parcel_B = HostParcels().tensor(part)[64 * number : 64 * number + size]
        parcels.gather(piece, PAGES, parcel_B)
        KvChunkLayout(expected).scatter(piece, PAGES, parcel_B)
        command = decode(encode([memory.scatter(piece, PAGES, parcel_B)]))[0]
        assert isinstance(command, Scatter)
        assert len(command.pages) == -(-(max(piece.positions[1], piece.draft[1])) // 64) - piece.positions[0] // 64
        assert not memory.all_have(number + 1)
        other.scatter(command)
        assert memory.all_have(number + 1)
        assert memory.taken(1) == memory.told == number + 1
        for name in ("planes", "draft", "tails"):
            assert torch.equal(getattr(theirs, name), getattr(expected, name)), name
    memory.close()


def test_a_parcel_of_rank_0s_gpu_is_copied_by_the_others_and_counted_once_it_is_there() -> None:
    book, memory, ours, theirs = Book(polls=2), RankMemory(2), kv(1), kv(2)
    expected, parcels, chip = kv(2), KvChunkLayout(ours), book.gpu()
    other = FollowedMemory(os.dup(memory.file), 1, theirs, lambda _: book.gpu())
    for number, piece in enumerate(PIECES):  # an area for each piece, and then several pieces in one host area
        landing, exported = memory.export(chip, 100_000)
        told = decode(encode([exported]))[0]
        assert isinstance(told, Export)
        other.map(told)
        parcel_B = HostParcels().tensor(landing)[64 * number : 64 * number + parcels.size(piece)]
        parcels.gather(piece, PAGES, parcel_B)
        KvChunkLayout(expected).scatter(piece, PAGES, parcel_B)
        command = decode(encode([memory.scatter(piece, PAGES, parcel_B)]))[0]
        assert isinstance(command, Scatter)
        assert command.exported == number
        other.scatter(command)
        parcel_B.zero_()  # the source may be overwritten
        assert memory.all_have(number + 1)
        for name in ("planes", "draft", "tails"):
            assert torch.equal(getattr(theirs, name), getattr(expected, name)), name
    part, grown = memory.grow(100_000)
    other.grow(grown)
    parcel_B = HostParcels().tensor(part)[: parcels.size(PIECES[0])]
    assert memory.scatter(PIECES[0], PAGES, parcel_B).exported is None
    memory.close()


def test_a_gpu_that_does_not_copy_ends_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    book, memory = Book(polls=1 << 30), RankMemory(2)
    monkeypatch.setattr(rank_memory, "HANG_S", 0.05)
    other = FollowedMemory(os.dup(memory.file), 1, kv(2), lambda _: book.gpu())
    landing, exported = memory.export(book.gpu(), 100_000)
    other.map(exported)
    command = memory.scatter(PIECES[0], PAGES, HostParcels().tensor(landing)[: KvChunkLayout(kv(1)).size(PIECES[0])])
    with pytest.raises(RuntimeError, match=r"has not completed a copy from rank 0's GPU within 0\.05 s"):
        other.scatter(command)
    assert memory.taken(1) == 0
    with pytest.raises(
        ConfigError, match=r"engine\.ranks: rank 0's GPU has no room .*out of memory\); lower engine\.kv_memory"
    ):
        memory.export(book.gpu(), 1 << 41)
    memory.close()


def test_a_grammar_is_compiled_once_every_rank_has_counted_it() -> None:
    memory = RankMemory(3)
    others = [FollowedMemory(os.dup(memory.file), rank, kv(1)) for rank in (1, 2)]
    assert (memory.compiled(0), memory.compiled(1)) == (True, False)
    others[0].has_compiled()
    others[0].has_compiled()
    assert not memory.compiled(1)
    others[1].has_compiled()
    assert (memory.compiled(1), memory.compiled(2)) == (True, False)
    assert memory.taken(1) == memory.taken(2) == 0
    memory.close()


def test_more_than_is_free_is_one_line_and_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = RankMemory(2)
    monkeypatch.setattr(limits, "free_memory", lambda: 99_999)
    before = os.fstat(memory.file).st_size
    with pytest.raises(ConfigError, match=r"engine\.ranks: the ranks share 100 kB for pages, but only 100 kB are free"):
        memory.grow(100_000)
    assert os.fstat(memory.file).st_size == before
    memory.close()


class Pinned:
    """Memory that a library has already pinned."""

    def is_pinned(self) -> bool:
        return True


def test_memory_that_is_pinned_is_not_pinned_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL pins its areas; pinning them again is an error in CUDA, and the next launch reports it."""

    def refused() -> None:
        raise AssertionError("the driver was called")

    monkeypatch.setattr(torch.cuda, "cudart", refused)
    pin(cast("torch.Tensor", Pinned()))


def test_that_memory_cannot_be_pinned_is_told_once_and_to_no_later_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reports the error of a refusal at the next launch: so an empty launch is made to clear it."""
    launched: list[str] = []

    def refuse(*_: int) -> int:
        return 801

    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error {code}: operation not supported")

    def zeros(_: int, *, device: str) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: what was refused, again")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=refuse))
    monkeypatch.setattr(torch.cuda, "check_error", check)
    memory_B = torch.empty(64, dtype=torch.uint8)
    monkeypatch.setattr(torch, "zeros", zeros)
    held = len(parcel_memory._pinned)
    with pytest.raises(RuntimeError, match="CUDA error 801"):
        pin(memory_B)
    assert launched == ["cuda"]
    assert len(parcel_memory._pinned) == held
