"""Pages that are copied in batches, as on a GPU, here in a CPU's memory: the result equals copying them one by one."""

import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from redline.disk import hold
from redline.messages.job import PAGE_TOKENS, PageHash, PageId
from redline.run.fit import Layout
from redline.run.kv import KvPool
from redline.run.tiers import copies, memory
from redline.run.tiers.copies import Copies, Leaving
from redline.run.tiers.disk import DiskPages
from redline.run.tiers.pages import WholePages, seal, seed_of
from redline.run.tiers.store import Saved, Store
from redline.run.tiers.tables import TierRead

PAGES, WAIT_S = 24, 60.0


def pool(width: int = 16, *, drafter: bool = False) -> KvPool:
    """A pool of pages with random bytes."""
    sizes = SimpleNamespace(num_hidden_layers=3, kv_width=width)
    model: Any = SimpleNamespace(config=sizes, device=torch.device("cpu"), dtype=torch.bfloat16)
    draft: Any = SimpleNamespace(config=SimpleNamespace(kv_width=12, tail_width=20)) if drafter else None
    kv = KvPool(model, Layout(PAGES, PAGES * PAGE_TOKENS, torch.bfloat16, 1), draft)
    for part in (kv.planes, kv.draft, kv.tails):
        part.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(1))
    return kv


def name(number: int) -> PageHash:
    return PageHash(number.to_bytes(16, "big"))


def saved(*pages: int) -> list[Saved]:
    return [Saved(name(page), PageId(page), True, False) for page in pages]


def read(store: Store, pages: list[int], into: list[int]) -> TierRead:
    reading = store.hold([name(page) for page in pages])
    assert reading is not None
    store.read(reading, [PageId(page) for page in into], WAIT_S)
    assert reading.ended.wait(WAIT_S)
    return reading


@pytest.mark.parametrize(("width", "drafter"), [(16, False), (16, True), (9, True)], ids=["plain", "drafter", "odd"])
def test_pages_that_go_together_are_those_that_go_one_by_one(width: int, drafter: bool) -> None:
    kv, other = pool(width, drafter=drafter), pool(width, drafter=drafter)
    alone, together = WholePages(kv), WholePages(kv, 4)
    pages, seeds = [PageId(page) for page in (7, 0, 3)], (1, 2, 2**64 - 1)
    one_by_one, at_once = torch.zeros(2, 3, alone.size, dtype=torch.uint8)
    assert alone.take(pages, list(one_by_one), seeds).sums is None
    sums = together.take(pages, list(at_once), seeds).sums
    assert torch.equal(one_by_one, at_once)
    assert sums is not None
    assert [each % 2**64 for each in sums.tolist()] == [seal(*each) for each in zip(at_once, seeds, strict=True)]
    into = [PageId(page) for page in (1, 8, 2)]
    assert WholePages(other, 3).put(into, list(at_once), seeds).tolist() == sums.tolist()
    for page, at in zip(pages, into, strict=True):
        for ours, theirs in ((other.planes[:, at], kv.planes[:, page]), (other.draft[at], kv.draft[page])):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        assert torch.equal(other.tails[at].view(torch.uint8), kv.tails[page].view(torch.uint8))


def test_what_was_saved_together_comes_back_and_has_the_seal_of_its_bytes() -> None:
    kv = pool()
    store = Store(WholePages(kv, 4), 1 << 20)
    try:
        were = kv.planes[:, :10].clone()
        assert store.save(saved(*range(10))) == 10
        assert store.save(saved(*range(10))) == 0, "these pages are stored already"
        kv.planes[:, :10] = 0
        assert store.settle(WAIT_S)
        for page in range(10):
            entry = store._tables.host.find(name(page))
            assert entry is not None
            assert entry.checksum == seal(
                store._tables.host.slots.bytes_of(entry.slot), seed_of(name(page), entry.flags)
            )
        reading = read(store, list(range(10)), list(range(10, 20)))
        assert len(reading.kept) == 10
        assert torch.equal(kv.planes[:, 10:20].view(torch.uint8), were.view(torch.uint8))
        store.check()
    finally:
        store.close()


@pytest.mark.parametrize("wrong", [0, 3, 4, 9])
def test_a_reading_ends_before_the_page_whose_bytes_are_wrong(wrong: int) -> None:
    store = Store(WholePages(pool(), 4), 1 << 20)
    try:
        store.save(saved(*range(10)))
        assert store.settle(WAIT_S)
        entry = store._tables.host.find(name(wrong))
        assert entry is not None
        store._tables.host.slots.bytes_of(entry.slot)[0] ^= 1
        assert len(read(store, list(range(10)), list(range(10, 20))).kept) == wrong
        assert store.settle(WAIT_S)
        assert store.find([name(wrong)]) == []
        assert store.counts["host", "spoilt"] == 1
        store.check()
    finally:
        store.close()


def test_pages_of_a_disk_come_together_where_memory_has_room_for_few(tmp_path: Path) -> None:
    """There are more pages than fit into host memory at once, so slots are reused while other copies are in flight."""
    kv = pool()
    pages = WholePages(kv, 3)
    disk = DiskPages(tmp_path, "theirs", pages.size, 1 << 24, lambda folder, lock, _: hold(folder, lock, WAIT_S))
    store = Store(pages, pages.size, disk)
    try:
        were = kv.planes[:, :12].clone()
        for page in range(12):
            store.save(saved(page))
            store.flush(WAIT_S)
        kv.planes[:, :12] = 0
        found = store.find([name(page) for page in range(12)])
        assert [one.tier for one in found] == ["disk"] * 11 + ["host"]
        reading = read(store, list(range(12)), list(range(12, 24)))
        assert len(reading.kept) == 12
        assert torch.equal(kv.planes[:, 12:24].view(torch.uint8), were.view(torch.uint8))
        assert store.settle(WAIT_S)
        store.check()
    finally:
        store.close()


class Ending:
    """The completion event of a copy: the store's thread sees it only when the test sets it, and allocations wait for
    it.
    """

    def __init__(self) -> None:
        self.told, self.waited = threading.Event(), 0

    def query(self) -> bool:
        return self.told.is_set()

    def synchronize(self) -> None:
        self.waited += 1


def test_a_page_that_is_still_coming_gives_up_its_place_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, ending = WholePages(pool(), 2), Ending()
    store = Store(pages, 2 * pages.size)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(store._copies, "mark", lambda: cast(torch.cuda.Event, ending))
            store.save(saved(0, 1))
        entry = store._tables.host.find(name(0))
        assert entry is not None
        assert entry.stays
        store.save(saved(2))
        assert ending.waited == 2, "the store waits for both copies, and may then evict their pages"
        assert store.find([name(0)]) == []
        assert [len(store.find([name(page)])) for page in (1, 2)] == [1, 1]
        assert store.counts["host", "lost"] == 0
        ending.told.set()
        assert store.settle(WAIT_S)
        store.check()
    finally:
        ending.told.set()
        store.close()


def test_a_reading_does_not_wait_for_pages_that_are_still_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, ending = WholePages(pool(), 2), Ending()
    store = Store(pages, 1 << 20)
    try:
        store.save(saved(0, 1, 2))
        assert store.settle(WAIT_S)
        with monkeypatch.context() as patched, torch.inference_mode():  # as the loop's thread is
            patched.setattr(store._copies, "mark", lambda: cast(torch.cuda.Event, ending))
            store.save(saved(3, 4))
        assert len(read(store, [0, 1, 2], [10, 11, 12]).kept) == 3
        assert not store.settle(0.0), "the pages are not sealed yet"
        ending.told.set()
        assert store.settle(WAIT_S)
        entry = store._tables.host.find(name(4))
        assert entry is not None
        assert not entry.stays
        assert entry.checksum is not None
        store.check()
    finally:
        ending.told.set()
        store.close()


def test_a_page_that_is_not_sealed_yet_is_verified_as_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, ending = WholePages(pool(), 2), Ending()
    store = Store(pages, 1 << 20)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(store._copies, "mark", lambda: cast(torch.cuda.Event, ending))
            store.save(saved(0, 1, 2))
        entries = [store._tables.host.find(name(page)) for page in range(3)]
        assert [entry and entry.checksum for entry in entries] == [None] * 3
        assert entries[1] is not None
        store._tables.host.slots.bytes_of(entries[1].slot)[0] ^= 1
        assert len(read(store, [0, 1, 2], [10, 11, 12]).kept) == 1
        ending.told.set()
        assert store.settle(WAIT_S)
        store.check()
    finally:
        ending.told.set()
        store.close()


def test_a_page_that_is_saved_anew_behind_a_reading_of_the_disk_stays_until_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory has room for one page, and another page is saved while the first is copied from there."""
    kv = pool()
    pages = WholePages(kv)
    disk = DiskPages(tmp_path, "theirs", pages.size, 1 << 24, lambda folder, lock, _: hold(folder, lock, WAIT_S))
    store = Store(pages, pages.size, disk)
    try:
        were = kv.planes[:, 0].clone()
        for page in (0, 1):
            store.save([Saved(name(page), PageId(page), False, False)])
            store.flush(WAIT_S)
        reading = store.hold([name(0)])
        assert reading is not None
        assert [one.tier for one in reading.found] == ["disk"]
        store.save(saved(0))  # exact now, so it is stored in memory again
        assert store.settle(WAIT_S)
        bring = store._copies.bring

        def bring_beside_a_save(*args: Any) -> Any:
            store.save(saved(2))
            return bring(*args)

        monkeypatch.setattr(store._copies, "bring", bring_beside_a_save)
        store.read(reading, [PageId(20)], WAIT_S)
        assert reading.ended.wait(WAIT_S)
        assert [one.tier for one in reading.kept] == ["host"]
        assert torch.equal(kv.planes[:, 20].view(torch.uint8), were.view(torch.uint8))
        assert store.counts["host", "spoilt"] == 0
        assert store.settle(WAIT_S)
        store.check()
        store.save(saved(3))
        assert len(store.find([name(3)])) == 1, "its slot can be reused once it is read"
    finally:
        store.close()


class Stream:
    """A stream that only records the events it waits for."""

    def __init__(self) -> None:
        self.waits = list[Any]()

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)


def test_what_is_brought_waits_for_what_leaves_its_own_places_and_steps_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages, steps, brings, ends = WholePages(pool(), 2), Stream(), Stream(), list[Ending]()
    host_PB = torch.zeros(6, pages.size, dtype=torch.uint8)
    under_way = Copies(pages)

    def marked() -> torch.cuda.Event:
        ends.append(Ending())
        return cast(torch.cuda.Event, ends[-1])

    monkeypatch.setattr(pages, "_mark", marked)
    monkeypatch.setattr(copies, "_on", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: steps)
    monkeypatch.setattr(under_way, "_in", brings)
    under_way.save([Leaving(PageId(page), host_PB[page], 0) for page in range(5)])
    assert len(ends) == 3, "two pages are copied per batch"
    assert steps.waits == [ends[2]], "the last event follows the others"
    under_way.bring([PageId(2), PageId(9)], list(host_PB[:2]), [0, 0])
    assert brings.waits == [ends[1]]
    under_way.bring([PageId(3), PageId(4)], list(host_PB[:2]), [0, 0])
    assert brings.waits[1:] == [ends[1], ends[2]]
    under_way.bring([PageId(2), PageId(3)], list(host_PB[:2]), [0, 0])
    assert len(brings.waits) == 3, "the stream has waited for these events already"
    parcel, saves = Ending(), Stream()
    monkeypatch.setattr(under_way, "_out", saves)
    pages._kv.placed = cast(torch.cuda.Event, parcel)
    under_way.bring([PageId(7)], [host_PB[0]], [0])
    under_way.save([Leaving(PageId(8), host_PB[1], 0)])
    assert brings.waits[3:] == saves.waits == [parcel], "a KV transfer may still be writing into pages that were freed"
    parcel.told.set()
    under_way.bring([PageId(7)], [host_PB[0]], [0])
    assert len(brings.waits) == 4


def test_memory_is_made_while_no_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = WholePages(pool(), 2)
    monkeypatch.setattr(memory, "SLAB_BYTES", 2 * pages.size)
    store = Store(pages, 8 * pages.size)
    slots = store._tables.host.slots
    try:
        store.busy = True
        with store._tables.lock:
            slots.ahead = 0  # as for a copy read by a GPU: no slab remains for which steps would have to wait
        store.save(saved(0))
        assert store.settle(WAIT_S)
        assert slots._made == 2, "only the needed slabs are allocated"
        store.busy = False
        assert store.settle(WAIT_S)
        assert slots._made == slots.total == 8
        store.check()
    finally:
        store.close()
