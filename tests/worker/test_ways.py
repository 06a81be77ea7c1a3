"""Which transfer paths a worker has to other workers, and which of them it takes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from redline.errors import ConfigError
from redline.kernels.cuda import peers
from redline.run.kv import KvPool
from redline.transport import nixl
from redline.transport.base import MemoryRange, TransferFailed
from redline.transport.memory import MemoryTransport
from redline.transport.peer import PeerTransport
from redline.worker import transfer_paths
from redline.worker.config import PEER_SHARE
from redline.worker.exported_parcels import ExportedParcels
from redline.worker.parcel_memory import BufferSizes, GpuParcels, HostParcels, PinnedParcels
from redline.worker.transfer_paths import Carrier, TransferPath, aside, carriers, connect, open_ways, told_of
from tests.transport.books import Book, BookGpu

CPU = torch.device("cpu")


class Small(HostParcels):
    sizes = BufferSizes(parcel=1 << 16, area=1 << 18, landing=1 << 18)


class Huge(HostParcels):
    sizes = BufferSizes(parcel=1 << 16, area=1 << 50, landing=1 << 18)


def kv() -> KvPool:
    planes, nothing = torch.zeros(2, 4, 64, 16), torch.empty(4, 64, 0)
    return cast("KvPool", SimpleNamespace(planes=planes, draft=nothing, tails=torch.empty(4, 0)))


def ways_of(*found: Carrier, area_bytes: int | None = None) -> list[TransferPath[Any, Any]]:
    return open_ways(found, kv(), 0.1, lambda: 0.0, area_bytes)


@pytest.mark.parametrize(("name", "warns"), [("auto", False), ("peer", True), ("shared", False)])
def test_on_a_cpu_memory_that_processes_share_is_the_only_way_within_a_host(
    name: Any, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert [carrier.name for carrier in carriers(name, tmp_path / "areas", CPU)] == ["shared"]
    assert ("falling back to `shared`" in caplog.text) == warns


def test_a_way_whose_memory_cannot_be_had_is_left_out_and_the_last_is_not(caplog: pytest.LogCaptureFixture) -> None:
    peer = Carrier("peer", PeerTransport(Book().gpu()), Huge())
    assert [way.name for way in ways_of(peer, Carrier("memory", MemoryTransport(), Small()))] == ["memory"]
    assert "`peer` is unavailable" in caplog.text
    assert "out of memory" in caplog.text
    with pytest.raises(ConfigError, match="cannot allocate"):
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
    with pytest.raises(TransferFailed, match="`peer`: not offered by the other worker"):
        connect(only, msgspec.msgpack.encode({"nixl": b""}), "other")
    with pytest.raises(TransferFailed, match="cannot be decoded"):
        connect(only, b"garbage", "other")


def test_who_computes_for_nobody_tells_of_no_area() -> None:
    (way,) = ways_of(Carrier("memory", MemoryTransport(), Small()), area_bytes=0)
    assert way.departures is None
    assert told_of([way]) == b""


GPU = torch.device("cuda")


def test_what_handoffs_take_of_a_gpu_is_what_its_ways_ask_for() -> None:
    sizes = GpuParcels.sizes
    assert aside("auto", GPU, 1) == aside("peer", GPU, 1) == sizes.area + sizes.landing == 512 << 20
    assert [aside(name, GPU, 1) for name in ("shared", None)] == [0, 0]
    staged = 2 * PinnedParcels.sizes.landing
    assert (aside("auto", GPU, 2), aside("shared", GPU, 2)) == (sizes.area + sizes.landing + staged, staged)
    assert (aside("nixl", GPU, 1), aside("nixl", GPU, 2)) == (sizes.area + sizes.landing + staged, staged)
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
        monkeypatch.setattr(transfer_paths, name, small)
    monkeypatch.setattr(peers, "PeerGpu", gpu)
    for name in ("auto", "peer"):
        best, behind = carriers(name, tmp_path / "areas", GPU, ranks=2)
        assert (best.name, best.share, best.chip) == ("peer", PEER_SHARE, chip)
        assert (behind.name, behind.share, behind.chip) == ("shared", PEER_SHARE, None)
    (only,) = carriers("shared", tmp_path / "areas", GPU, ranks=2)
    assert (only.name, only.chip) == ("shared", None)


class Registers(MemoryTransport):
    """Replaces NIXL: areas are in memory that the worker allocates, and registering a GPU's memory may fail."""

    refuses = False

    def __init__(self, make: Any = None, settle: Any = None) -> None:
        super().__init__()
        self.make, self.settle = make, settle

    def area(self, memory: MemoryRange | int) -> Any:
        assert isinstance(memory, int)
        return super().area(memory if self.make is None else self.make(memory))

    def landing(self, memory: MemoryRange) -> Any:
        if self.make is not None and self.refuses:
            raise ConfigError("transport: NIXL cannot register 262,144 bytes of GPU 0 (NIXL_ERR_BACKEND)")
        return super().landing(memory)


class OfBook(Small):
    """Replaces a GPU: memory that the driver exports."""

    def __init__(self, _: torch.device, chip: Any) -> None:
        self.chip = chip

    def make(self, size: int) -> MemoryRange:
        exported = self.chip.export(size)
        return MemoryRange(exported.address, size, self.chip.device, owner=exported)

    def settle(self) -> None:
        """No operation is in flight."""


@pytest.fixture
def over_nixl(monkeypatch: pytest.MonkeyPatch) -> Book:
    book = Book()
    monkeypatch.setattr(nixl, "NixlTransport", Registers)
    monkeypatch.setattr(peers, "PeerGpu", lambda _: book.gpu())
    monkeypatch.setattr(transfer_paths, "ExportedParcels", OfBook)
    monkeypatch.setattr(transfer_paths, "PinnedParcels", lambda _: Small())
    return book


def test_over_nixl_parcels_of_a_gpu_lie_in_memory_that_its_driver_exports(over_nixl: Book) -> None:
    found = carriers("nixl", None, GPU)
    assert [(one.name, one.share) for one in found] == [("nixl-gpu", PEER_SHARE), ("nixl", PEER_SHARE)]
    ours, theirs = ways_of(*found), ways_of(*carriers("nixl", None, GPU))
    assert connect(ours, told_of(theirs), "other")[0].name == "nixl-gpu"
    sizes = sorted(memory.size for memory in over_nixl.exported.values())
    assert sizes == 2 * [Small.sizes.landing] + 2 * [Small.sizes.area]
    assert theirs[0].departures is not None
    assert theirs[0].departures.area.memory.address in {one.address for one in over_nixl.exported.values()}


def test_where_nixl_does_not_take_a_gpus_memory_the_hosts_stands_in_and_the_reason_is_told(
    over_nixl: Book, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = ways_of(*carriers("nixl", None, GPU))
    monkeypatch.setattr(Registers, "refuses", True)
    lacking = ways_of(*carriers("nixl", None, GPU))
    assert [way.name for way in lacking] == ["nixl"]
    assert "`nixl-gpu` is unavailable (transport: NIXL cannot register 262,144 bytes of GPU 0 (NIXL_E" in caplog.text
    caplog.clear()
    assert connect(whole, told_of(lacking), "lacking")[0].name == "nixl"
    assert "KV chunks of worker lacking are read over `nixl`: `nixl-gpu`: not offered" in caplog.text
    assert connect(lacking, told_of(whole), "whole")[0].name == "nixl"


def test_a_gpu_whose_driver_exports_nothing_has_the_hosts_memory_over_nixl(
    over_nixl: Book, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: torch.device) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(peers, "PeerGpu", refuse)
    assert [one.name for one in carriers("nixl", None, GPU)] == ["nixl"]
    assert "`nixl` cannot use GPU memory (libcuda.so.1" in caplog.text


def test_what_a_driver_exports_is_given_back_with_the_last_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    book = Book()
    monkeypatch.setattr(GpuParcels, "__init__", lambda *_: None)
    parcels = ExportedParcels(GPU, book.gpu())
    memory = parcels.make(100)
    held_B = HostParcels().tensor(memory)
    assert (memory.size, len(book.exported), book.gone) == (100, 1, set())
    area = MemoryTransport().area(memory)
    del memory, held_B
    assert not book.gone
    area.close()
    del area
    assert book.gone == set(book.exported)


def test_several_ranks_have_the_hosts_memory_over_nixl(over_nixl: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_paths, "open_transport", lambda *_: Registers())
    assert [one.name for one in carriers("nixl", None, GPU, ranks=2)] == ["nixl"]
    assert not over_nixl.exported
