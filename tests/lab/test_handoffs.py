"""A few KV transfers with every fault; and the harness detects a checksum that is never checked."""

import random
from io import StringIO

import pytest

from lab import handoff_receiver, handoffs
from lab.handoff_receiver import HARMS, LINKS, Content, Tally
from redline.progress import Working
from redline.transport.memory import host_memory

SILENT = Working("handoffs", shown=False, stream=StringIO())


def test_within_one_process_no_wrong_byte_is_accepted_and_every_byte_comes_back():
    tally, book = handoffs.within_one_process(6000, 1, SILENT)
    assert not tally.problems()
    assert book["bytes that came back"] == book["bytes of the area"]
    assert set(tally.injected) == {*HARMS, *LINKS}
    assert all(book.values()), "a possible event did not occur"
    harmed = sum(tally.caught[kind] for kind in HARMS)
    assert tally.refused_by_checksum > harmed, "no buffer was reused during a read"


def test_between_two_processes_too():
    tally, book = handoffs.between_two("shared", 400, 1, 1, SILENT)
    assert not tally.problems()
    assert book["bytes that came back"] == book["bytes of the area"]
    assert book["lent"] == 400
    assert tally.accepted > 200


def test_a_checksum_that_tells_nothing_is_found(monkeypatch: pytest.MonkeyPatch):
    for module in (handoffs, handoff_receiver):
        monkeypatch.setattr(module, "of_memory", lambda address, count, seed: 5)
    tally, _ = handoffs.within_one_process(2000, 1, SILENT)
    assert tally.wrong_bytes_accepted > 0
    assert len(tally.problems()) == 1 + len(HARMS)


def test_a_checksum_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handoff_receiver, "of_memory", lambda address, count, seed: 5)
    tally, _ = handoffs.within_one_process(200, 1, SILENT)
    assert tally.right_bytes_refused > 0
    assert tally.problems()


def test_each_parcels_bytes_are_its_own_and_each_harm_changes_them():
    content, memory, draw = Content(3), host_memory(4096), random.Random(1)
    for number in range(50):
        content.write(memory.address, number, 1000)
        assert content.is_at(memory.address, number, 1000)
        assert not content.is_at(memory.address, number + 1, 1000)
        for kind in HARMS:
            changed = content.harm(kind, memory.address, 1000, draw)
            assert changed != content.is_at(memory.address, number, 1000), kind
            content.write(memory.address, number, 1000)


def test_a_tally_says_what_must_not_be():
    assert not Tally().problems()
    assert Tally(wrong_bytes_accepted=1).problems() == ["1 parcels with wrong bytes were accepted"]
