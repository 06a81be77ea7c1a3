"""Which ways a worker has to others, and which of them it takes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from redline.errors import ConfigError
from redline.kernels.hopper import peers
from redline.run.kv import KvPool
from redline.transport.base import TransferFailed
from redline.transport.memory import MemoryTransport
from redline.transport.peer import PeerTransport
from redline.worker import ways
from redline.worker.config import PEER_SHARE
from redline.worker.parcel_memory import GpuParcels, HostParcels, PinnedParcels, Sizes
from redline.worker.ways import Carrier, Way, aside, carriers, connect, open_ways, told_of
from tests.transport.books import Book, BookGpu

CPU = torch.device("cpu")


class Small(HostParcels):
    sizes = Sizes(parcel=1 << 16, area=1 << 18, landing=1 << 18)


class Huge(HostParcels):
    sizes = Sizes(parcel=1 << 16, area=1 << 50, landing=1 << 18)


def kv() -> KvPool:
    planes, nothing = torch.zeros(2, 4, 64, 16), torch.empty(4, 64, 0)
    return cast("KvPool", SimpleNamespace(planes=planes, draft=nothing, tails=torch.empty(4, 0)))


def ways_of(*found: Carrier, area_bytes: int | None = None) -> list[Way[Any, Any]]:
    return open_ways(found, kv(), 0.1, lambda: 0.0, area_bytes)


@pytest.mark.parametrize(("name", "warns"), [("auto", False), ("peer", True), ("shared", False)])
def test_on_a_cpu_memory_that_processes_share_is_the_only_way_within_a_host(
    name: Any, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert [carrier.name for carrier in carriers(name, tmp_path / "areas", CPU)] == ["shared"]
    assert ("`shared` stands in" in caplog.text) == warns


def test_a_way_whose_memory_cannot_be_had_is_left_out_and_the_last_is_not(caplog: pytest.LogCaptureFixture) -> None:
    peer = Carrier("peer", PeerTransport(Book().gpu()), Huge())
    assert [way.name for way in ways_of(peer, Carrier("memory", MemoryTransport(), Small()))] == ["memory"]
    assert "`peer` cannot be had here" in caplog.text
    assert "out of memory" in caplog.text
    with pytest.raises(ConfigError, match="no area of"):
        ways_of(peer)


def test_the_best_way_that_leads_there_is_taken_and_each_reason_is_told() -> None:
    book = Book()
    both = [Carrier("peer", PeerTransport(book.gpu()), Small()), Carrier("memory", MemoryTransport(), Small())]
    ours, theirs = ways_of(*both), ways_of(*both)
    assert connect(ours, told_of(theirs), "other")[0].name == "peer"
    book.refuse = "CUDA driver error 217"
    assert connect(ours, told_of(theirs), "other")[0].name == "memory"
    only = ways_of(both[0])
    with pytest.raises(TransferFailed, match=r"`peer`: .*217"):
        connect(only, told_of(theirs), "other")
    with pytest.raises(TransferFailed, match="`peer`: it has none"):
        connect(only, msgspec.msgpack.encode({"nixl": b""}), "other")
    with pytest.raises(TransferFailed, match="cannot be read"):
        connect(only, b"garbage", "other")


def test_who_computes_for_nobody_tells_of_no_area() -> None:
    (way,) = ways_of(Carrier("memory", MemoryTransport(), Small()), area_bytes=0)
    assert way.departures is None
    assert told_of([way]) == b""


GPU = torch.device("cuda")


def test_what_handoffs_take_of_a_gpu_is_what_its_ways_ask_for() -> None:
    sizes = GpuParcels.sizes
    assert aside("auto", GPU, 1) == aside("peer", GPU, 1) == sizes.area + sizes.landing == 512 << 20
    assert [aside(name, GPU, 1) for name in ("shared", "nixl", None)] == [0, 0, 0]
    staged = 2 * PinnedParcels.sizes.landing
    assert (aside("auto", GPU, 2), aside("shared", GPU, 2)) == (sizes.area + sizes.landing + staged, staged)
    assert aside("auto", CPU, 1) == aside("auto", CPU, 2) == 0


def test_several_ranks_have_the_way_from_gpu_to_gpu_that_one_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chip = Book().gpu()

    def small(_: torch.device) -> Small:
        return Small()

    def gpu(_: torch.device) -> BookGpu:
        return chip

    for name in ("PinnedParcels", "GpuParcels"):
        monkeypatch.setattr(ways, name, small)
    monkeypatch.setattr(peers, "PeerGpu", gpu)
    for name in ("auto", "peer"):
        best, behind = carriers(name, tmp_path / "areas", GPU, ranks=2)
        assert (best.name, best.share, best.chip) == ("peer", PEER_SHARE, chip)
        assert (behind.name, behind.share, behind.chip) == ("shared", PEER_SHARE, None)
    (only,) = carriers("shared", tmp_path / "areas", GPU, ranks=2)
    assert (only.name, only.chip) == ("shared", None)
