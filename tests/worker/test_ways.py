"""Which ways a worker has to others, and which of them it takes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from redline.errors import ConfigError
from redline.run.kv import KvPool
from redline.transport.base import TransferFailed
from redline.transport.memory import MemoryTransport
from redline.transport.peer import PeerTransport
from redline.worker.parcel_memory import HostParcels, Sizes
from redline.worker.ways import Carrier, Way, carriers, connect, open_ways, told_of
from tests.transport.books import Book

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
