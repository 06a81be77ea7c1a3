"""Host memory of the KV offload tier: slots in slabs that are allocated on demand, or in advance."""

import pytest
import torch

from redline.run.tiers.memory import SLAB_BYTES, HostSlots

HALF = SLAB_BYTES // 2  # bytes of a slot, half a slab


def slots(total: int, ahead: int | None = None) -> HostSlots:
    made = HostSlots(HALF, total * HALF, pinned=False)
    made.ahead = None if ahead is None else ahead * HALF
    return made


def test_what_is_not_pinned_is_made_when_it_is_needed() -> None:
    made = slots(5)
    assert not made.short(busy=False)
    taken = {made.take() for _ in range(5)}
    assert taken == {0, 1, 2, 3, 4}
    assert made.take() is None
    made.check({slot for slot in taken if slot is not None})


def test_some_is_made_ahead_of_who_takes_it() -> None:
    made = slots(5, ahead=3)
    while made.short(busy=True):
        made.add(made.slab())
    made.check(set())
    assert made.free == 5
    assert made.short(busy=False), "everything is allocated if no step waits for it"
    held = {slot for slot in (made.take(), made.take()) if slot is not None}
    made.check(held)
    assert made.short(busy=True), "two of four are free, three are required"
    made.add(made.slab())
    assert not made.short(busy=False), "everything permitted is allocated"
    assert made.slab() is None


def test_a_slab_that_was_made_beside_another_is_let_go() -> None:
    made = slots(3)
    made.add(made.slab())
    ours, theirs = made.slab(), made.slab()
    made.add(ours)
    made.add(theirs)
    made.check(set())
    assert made.free == 3


def test_where_the_system_gives_no_more_what_there_is_is_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = slots(6, ahead=6)
    made.add(made.slab())

    def refused(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", refused)
    made.add(made.slab())
    assert "the host has no more memory for pages" in caplog.text
    assert (made.total, made.free, made.short(busy=False)) == (2, 2, False)
