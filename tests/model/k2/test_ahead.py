"""Read-ahead: pieces of files near the tensors being read, and no part that other code reads."""

import os
import threading
from pathlib import Path

import pytest

from redline.model.k2 import ahead
from redline.model.k2.ahead import Ahead
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.write import random_checkpoint, tiny_config

WAIT_S = 60


class Advice:
    """Records the read-ahead requests instead of passing them to the system."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pieces: list[tuple[int, int]] = []
        self._told = threading.Condition()
        monkeypatch.setattr(os, "posix_fadvise", self._take)

    def _take(self, _: int, first: int, count: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        with self._told:
            self.pieces.append((first, count))
            self._told.notify()

    def of(self, count: int) -> list[tuple[int, int]]:
        with self._told:
            assert self._told.wait_for(lambda: len(self.pieces) >= count, WAIT_S)
        return self.pieces


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> Advice:
    monkeypatch.setattr(ahead, "AHEAD_BYTES", 1000)
    monkeypatch.setattr(ahead, "PIECE_BYTES", 400)
    return Advice(monkeypatch)


def test_what_is_far_from_what_is_handed_out_waits(advice: Advice, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    reading = Ahead([(tmp_path / "file", first, first + 900) for first in range(100, 3700, 900)])
    near = [(100, 400), (500, 400), (900, 100), (1000, 400), (1400, 400), (1800, 100)]
    assert advice.of(6) == near, "two tensors, the second beginning within 1,000 bytes"
    reading.handed_out(800)
    assert advice.of(6) == near
    reading.handed_out(100)
    assert advice.of(9)[6:] == [(1900, 400), (2300, 400), (2700, 100)]
    reading.close()
    assert len(advice.pieces) == 9


def test_parts_of_all_are_the_whole(advice: Advice, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for part in range(3):
        reading = Ahead([(tmp_path / "file", 10, 1000)], part, 3)
        advice.of(part + 1)
        reading.close()
    assert advice.pieces == [(10, 330), (340, 330), (670, 330)]


def test_a_file_that_has_gone_is_left_to_whoever_reads_it(advice: Advice, tmp_path: Path) -> None:
    reading = Ahead([(tmp_path / "gone", 0, 100)])
    reading.close()
    assert not advice.pieces


def test_a_load_is_read_ahead_as_far_as_the_model_needs_the_files(advice: Advice, tmp_path: Path) -> None:
    random_checkpoint(tmp_path, tiny_config())
    checkpoint = Checkpoint.open(tmp_path)
    with checkpoint.read_ahead():
        for name in list(checkpoint._tensors):
            checkpoint._view(name)
        checkpoint._ahead._thread.join(WAIT_S)  # type: ignore[union-attr]
    assert sum(count for _, count in advice.pieces) == checkpoint.bytes
    assert checkpoint._ahead is None
