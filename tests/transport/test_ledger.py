"""No two leases overlap, every byte is returned, and only messages with its own ticket release a region."""

import ctypes
from itertools import pairwise

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from redline.kernels.cpu.checksum import of_memory
from redline.messages.parcel import Ticket, seed_of
from redline.transport.ledger import ALIGNED, KvChunk, TransferBufferPool
from redline.transport.memory import host_memory
from tests.clocks import FakeClock

AREA = 40 * ALIGNED + 100


class Book(RuleBasedStateMachine):
    """Any order of lending, filling, reading, leaving and expiry; compared with a model that is a byte map."""

    filling = Bundle("filling")
    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lender = TransferBufferPool(AREA, lambda: self.now, first_epoch=100)
        self.owner: dict[int, KvChunk] = {}  # unit of ALIGNED bytes -> the chunk that holds it
        self.filled: set[int] = set()  # epochs of chunks that have been offered
        self.lost: set[int] = set()  # epochs of chunks that will not be read
        self.epochs: set[int] = set()

    def units(self, parcel: KvChunk) -> range:
        assert parcel.offset % ALIGNED == 0
        return range(parcel.offset // ALIGNED, -(-(parcel.offset + parcel.size) // ALIGNED))

    def returned(self, parcel: KvChunk) -> None:
        for unit in self.units(parcel):
            assert self.owner.pop(unit) == parcel

    @rule(
        target=filling,
        size=st.integers(1, 12 * ALIGNED),
        to=st.sampled_from("abc"),
        seconds=st.integers(1, 20),
    )
    def lend(self, size: int, to: str, seconds: int):
        parcel = self.lender.lend(size, to, seconds)
        if parcel is None:
            need, run = -(-size // ALIGNED), 0
            for unit in range(AREA // ALIGNED):
                run = 0 if unit in self.owner else run + 1
                assert run < need, "there was room for the chunk"
            return multiple()
        assert parcel.epoch not in self.epochs
        assert (parcel.size, parcel.to, parcel.deadline) == (size, to, self.now + seconds)
        self.epochs.add(parcel.epoch)
        for unit in self.units(parcel):
            assert unit not in self.owner
            assert unit < AREA // ALIGNED
            self.owner[unit] = parcel
        return parcel

    @rule(target=tickets, parcel=consumes(filling), checksum=st.integers(0, 2**64 - 1))
    def offer(self, parcel: KvChunk, checksum: int):
        ticket = self.lender.offer(parcel, checksum)
        if parcel.epoch in self.lost:
            assert ticket is None
            self.returned(parcel)
            return multiple()
        assert ticket is not None
        assert (ticket.id, ticket.epoch, ticket.offset) == (parcel.id, parcel.epoch, parcel.offset)
        assert (ticket.size, ticket.checksum, ticket.seed) == (parcel.size, checksum, parcel.seed)
        self.filled.add(parcel.epoch)
        with pytest.raises(KeyError):
            self.lender.offer(parcel, checksum)
        return parcel

    @rule(parcel=consumes(filling))
    def drop(self, parcel: KvChunk):
        self.lender.drop(parcel)
        self.returned(parcel)
        with pytest.raises(KeyError):
            self.lender.drop(parcel)

    @rule(parcel=tickets)
    def taken(self, parcel: KvChunk):
        lives = parcel.epoch in self.filled
        assert self.lender.taken(parcel.id, parcel.epoch) == lives
        if lives:
            self.filled.discard(parcel.epoch)
            self.returned(parcel)

    @rule(parcel=filling)
    def taken_before_it_is_offered(self, parcel: KvChunk):
        assert not self.lender.taken(parcel.id, parcel.epoch)

    @rule(parcel=tickets, off=st.integers(-3, 3).filter(bool))
    def taken_with_words_of_another(self, parcel: KvChunk, off: int):
        other = {one.epoch: one for one in self.owner.values()}.get(parcel.epoch + off)
        if other is None or other.id != parcel.id:
            assert not self.lender.taken(parcel.id, parcel.epoch + off)

    def lose(self, lost: list[KvChunk], expected: set[int]):
        assert {parcel.epoch for parcel in lost} == expected
        for parcel in lost:
            if parcel.epoch in self.filled:
                self.filled.discard(parcel.epoch)
                self.returned(parcel)
            self.lost.add(parcel.epoch)

    @rule(to=st.sampled_from("abc"))
    def give_up(self, to: str):
        expected = {one.epoch for one in self.owner.values() if one.to == to} - self.lost
        self.lose(self.lender.give_up(to), expected)

    @rule(later=st.integers(0, 10))
    def expire(self, later: int):
        self.now += later
        expected = {one.epoch for one in self.owner.values() if one.deadline <= self.now} - self.lost
        self.lose(self.lender.expire(self.now), expected)

    @invariant()
    def sound(self):
        self.lender.check()
        assert self.lender.free == (AREA // ALIGNED - len(self.owner)) * ALIGNED
        assert set(self.lender.lent) == set(self.owner.values())


Book.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestBook = Book.TestCase


def test_a_space_that_is_filled_comes_back_only_when_that_has_stopped():
    lender = TransferBufferPool(1024, lambda: 0.0)
    parcel = lender.lend(1024, "decode", 1.0)
    assert parcel is not None
    assert lender.expire(2.0) == [parcel]
    assert lender.lend(1, "decode", 1.0) is None
    assert lender.offer(parcel, 0) is None
    assert lender.free == 1024


def test_a_parcel_that_never_fits_is_an_error_and_one_that_does_not_fit_now_is_none():
    lender = TransferBufferPool(1000, lambda: 0.0)
    assert lender.size == 768
    for size in (0, -1, 769):
        with pytest.raises(ValueError, match="a parcel of"):
            lender.lend(size, "a", 1.0)
    assert lender.lend(700, "a", 1.0) is not None
    assert lender.lend(256, "a", 1.0) is None


def test_no_two_lenders_have_an_epoch_in_common_though_the_clock_stands_still():
    def some() -> range:
        lender = TransferBufferPool(256 * 1000)
        epochs = [parcel.epoch for _ in range(1000) if (parcel := lender.lend(1, "a", 1.0)) is not None]
        assert epochs == list(range(epochs[0], epochs[0] + 1000))
        assert epochs[-1] < 2**63, "epochs must fit into 64-bit message fields"
        return range(epochs[0], epochs[-1] + 1)

    with FakeClock().installed():
        lenders = sorted((some() for _ in range(20)), key=lambda epochs: epochs.start)
    assert all(one.stop <= other.start for one, other in pairwise(lenders))


def test_two_parcels_have_two_seeds():
    assert len({seed_of(id, epoch) for id in range(100) for epoch in range(2**60, 2**60 + 100)}) == 10_000


def test_the_proof_finds_a_book_that_is_wrong():
    def spoilt(spoil: str) -> TransferBufferPool:
        lender = TransferBufferPool(2048, lambda: 0.0)
        parcels = [lender.lend(512, "a", 1.0) for _ in range(3)]
        assert parcels[1] is not None
        lender.drop(parcels[1])
        lender.check()
        exec(spoil, {"lender": lender})
        return lender

    for spoil in (
        "lender._free.append((512, 1024))",
        "lender._free.pop()",
        "lender._free[1:] = [(1536, 1792), (1792, 2048)]",
        "lender._lent.pop(0)",
        "lender._ids.clear()",
        "lender._lent[2].filled = lender._lent[2].lost = True",
        "lender._epoch -= 1",
    ):
        with pytest.raises(AssertionError):
            spoilt(spoil).check()


def test_a_late_reader_is_told_by_its_checksum_or_has_what_it_was_promised():
    """A region is reused while an old ticket for it is still in use."""
    lender, memory = TransferBufferPool(1024, lambda: 0.0), host_memory(1024)

    def offered(data: bytes) -> Ticket:
        parcel = lender.lend(len(data), "a", 1.0)
        assert parcel is not None
        ctypes.memmove(memory.address + parcel.offset, data, len(data))
        ticket = lender.offer(parcel, of_memory(memory.address + parcel.offset, len(data), parcel.seed))
        assert ticket is not None
        return ticket

    def holds(ticket: Ticket) -> bool:
        return of_memory(memory.address + ticket.offset, ticket.size, ticket.seed) == ticket.checksum

    old = offered(bytes(1000))
    assert holds(old)
    lender.expire(2.0)
    new = offered(bytes(999) + b"x")
    assert (new.offset, new.id, new.size) == (old.offset, old.id, old.size)
    assert holds(new)
    assert not holds(old)
    lender.expire(2.0)
    again = offered(bytes(1000))
    assert holds(old), "the bytes are the ones that were offered"
    assert old.checksum != again.checksum
    assert not holds(msgspec.structs.replace(again, epoch=old.epoch)), "a ticket mixed from two must not match"
    assert not lender.taken(old.id, old.epoch)
    assert lender.taken(again.id, again.epoch)


def test_a_ticket_travels():
    ticket = Ticket(id=3, epoch=2**63, offset=512, size=77, checksum=2**64 - 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ticket), type=Ticket) == ticket
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"id": 3}), type=Ticket)
