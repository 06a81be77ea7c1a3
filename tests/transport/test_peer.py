"""Reads between GPUs of one host, with a record in place of the driver."""

from collections.abc import Callable

import msgspec
import pytest

from redline.errors import ConfigError, WorkerLost
from redline.transport import peer as peers
from redline.transport.base import MemoryRange, TransferFailed
from redline.transport.memory import host_memory
from redline.transport.peer import PeerTransport
from tests.transport.books import Book
from tests.transport.promises import Promises, fill, pattern, wait

SIZE = 100_000


class TestPromises(Promises):
    @pytest.fixture(autouse=True)
    def book(self) -> Book:
        self.driver = Book(polls=3)
        return self.driver

    def transport(self) -> PeerTransport:
        return PeerTransport(self.driver.gpu())


class Two:
    """An owner and a reader, and the record of the driver between them."""

    def __init__(self, polls: int = 2) -> None:
        self.book = Book(polls)
        self.ours, self.theirs = (PeerTransport(self.book.gpu()) for _ in range(2))
        self.area = self.ours.area(SIZE)
        self.into = host_memory(SIZE)
        self.landing = self.theirs.landing(self.into)


def test_memory_is_mapped_once_and_let_go_before_its_owner_frees_it():
    two = Two()
    fill(two.area.memory, pattern(SIZE))
    peer = two.theirs.connect(two.area.told)
    for _ in range(3):
        wait(peer.read(0, two.into.address, SIZE, 20.0))
    assert two.book.mapped.total() == 1
    two.theirs.close()
    two.theirs.close()
    two.ours.close()
    two.ours.close()
    assert two.book.mapped.total() == 0
    assert len(two.book.gone) == 1
    assert not two.book.freed_while_mapped


def test_a_cancelled_copy_is_waited_for_and_its_space_is_free_afterwards():
    two = Two(polls=50)
    fill(two.area.memory, pattern(SIZE))
    reading = two.theirs.connect(two.area.told).read(0, two.into.address, SIZE, 20.0)
    with pytest.raises(ValueError, match="a reading into it is in progress"):
        two.landing.close()
    reading.cancel()
    with pytest.raises(TransferFailed, match="cancelled"):
        reading.done()
    two.landing.close()


def test_a_copy_that_never_ends_is_the_end_of_the_worker(monkeypatch: pytest.MonkeyPatch):
    """Its destination can never be reused safely, so the worker must end."""
    monkeypatch.setattr(peers, "HANG_S", 0.05)
    two = Two(polls=1 << 60)
    reading = two.theirs.connect(two.area.told).read(0, two.into.address, SIZE, 0.0)
    with pytest.raises(WorkerLost, match="has not completed a copy"):
        reading.done()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_gpu_that_cannot_copy_fails_the_read_and_says_why(when: str):
    two = Two()
    peer = two.theirs.connect(two.area.told)
    why = "CUDA driver error 719: unspecified launch failure"
    if when == "before":
        two.book.fail = why
    reading = peer.read(0, two.into.address, SIZE, 20.0)
    two.book.fail = why
    for _ in range(2):
        with pytest.raises(TransferFailed, match=r"could not copy .*719"):
            reading.done()
    reading.cancel()
    peer.close()


def test_two_gpus_without_a_way_to_each_other_say_so():
    two = Two()
    two.book.refuse = "CUDA driver error 217: peer access is not supported between these two devices"
    with pytest.raises(TransferFailed, match=r"cannot map the peer's memory .*217"):
        two.theirs.connect(two.area.told)


def test_a_gpu_of_another_host_is_not_tried():
    two = Two()
    kind, _, handle, size = msgspec.msgpack.decode(two.area.told)
    with pytest.raises(TransferFailed, match="another host"):
        two.theirs.connect(msgspec.msgpack.encode([kind, "elsewhere", handle, size]))


def test_only_memory_of_its_own_gpu_takes_part():
    two = Two()
    refused: list[Callable[[], object]] = [
        lambda: two.ours.area(two.into),
        lambda: two.theirs.landing(MemoryRange(4096, 10, device=1)),
        lambda: two.ours.area(1 << 50),
    ]
    for call, why in zip(refused, ("pass its size", "this is other memory", "cannot allocate"), strict=True):
        with pytest.raises(ConfigError, match=why):
            call()
    other = host_memory(SIZE)
    with pytest.raises(ValueError, match="not registered with"):
        two.theirs.connect(two.area.told).read(0, other.address, SIZE, 1.0)
