"""The CPU's tensor parallel group: all-reduce in rank order, and the behaviour when a rank does not arrive."""

import resource
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.errors import ConfigError, RankLost
from redline.kernels.cpu.all_reduce import SharedMemoryGroup
from tests.clocks import FakeClock
from tests.waiting import LIMIT_S, until

ONES = torch.ones(2, 4)


class Sliced(SharedMemoryGroup):
    """A group that counts the slices of each wait in `slices`, by call, and runs `in_slice` with the call's number in
    each.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.slices: Counter[int] = Counter()
        self.in_slice: Callable[[int], object] = lambda _: None

    def _exchange(self, *given: Any) -> int | None:
        self.slices[self._calls] += 1
        self.in_slice(self.slices[self._calls])
        return super()._exchange(*given)


def opened(file: Path, ranks: int, seconds: float = LIMIT_S) -> list[Sliced]:
    SharedMemoryGroup.create(file, ranks)
    return [Sliced(file, rank, ranks, seconds) for rank in range(ranks)]


def together(groups: list[Sliced], work: Callable[[Sliced], Tensor]) -> list[Tensor]:
    """The results of all ranks, run as threads."""
    results: dict[int, Tensor] = {}

    def rank(group: Sliced) -> None:
        results[group.rank] = work(group)

    threads = [threading.Thread(target=rank, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(len(groups))]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_sums_are_added_in_the_order_of_ranks_whatever_their_size(ranks: int, tmp_path: Path):
    groups = opened(tmp_path / "meet", ranks)
    for shape in ((1, 7), (3, 320), (90, 4096)):  # the last shape is sent in two pieces
        parts = [torch.randn(*shape, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
        want = parts[0].clone()
        for part in parts[1:]:
            want += part
        for got in together(groups, lambda group, parts=parts: group.all_reduce(parts[group.rank])):
            assert torch.equal(got, want)
        for got in together(groups, lambda group, parts=parts: group.all_gather(parts[group.rank])):
            assert torch.equal(got, torch.cat(parts, 1))


def test_a_rank_waits_for_another_that_is_slow(tmp_path: Path):
    """The wait is longer than one slice; the words that are sent again are the same."""

    groups = opened(tmp_path / "meet", 2)

    def work(group: Sliced) -> Tensor:
        total = torch.zeros(2, 4)
        other = groups[1 - group.rank]
        for turn in range(6):
            if turn % 2 == group.rank:
                until(lambda turn=turn: other.slices[turn + 1] >= 3)
            total += group.all_reduce(ONES * (turn + 1))
        return total

    for got in together(groups, work):
        assert torch.equal(got, ONES * 2 * 21)


def test_the_file_has_no_name_once_all_have_met(tmp_path: Path):
    file = tmp_path / "meet"
    groups = opened(file, 3)
    assert file.stat().st_mode & 0o777 == 0o600
    together(groups, lambda group: group.all_reduce(ONES))
    assert not file.exists(), "a killed worker would leave the file in shared memory"
    assert torch.equal(together(groups, lambda group: group.all_reduce(ONES))[2], ONES * 3)


def test_a_rank_that_does_not_come_is_named_and_its_group_has_ended(tmp_path: Path):
    zero, one = opened(tmp_path / "meet", 2)
    together([zero, one], lambda group: group.all_reduce(ONES))
    zero.set_timeout(0.3)
    with pytest.raises(RankLost, match=r"rank 1 has kept rank 0 waiting for 0\.3 s in sum 2"):
        zero.all_reduce(ONES)
    with pytest.raises(RankLost, match="in sum 2"):  # it would be taken for the third sum of rank 1
        zero.all_reduce(ONES * 7)
    assert torch.equal(one.all_reduce(ONES), ONES * 2), "the words that rank 1 did send"
    one.set_timeout(0.3)
    with pytest.raises(RankLost, match="rank 0 has kept rank 1 waiting"):
        one.all_reduce(ONES)


def test_who_waits_learns_soon_that_a_rank_has_ended(tmp_path: Path):
    zero, _ = opened(tmp_path / "meet", 2)
    reason = "rank 1 is lost in step 5: it has ended with code -9"
    zero.in_slice = lambda number: zero.abort(reason) if number == 2 else None
    with pytest.raises(RankLost, match="rank 1 is lost in step 5"):
        zero.all_reduce(ONES)
    assert zero.slices == {1: 2}, "the rank waited for another slice"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Make SIGINT raise KeyboardInterrupt, even if an earlier command in this process changed its handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_call_that_is_interrupted_ends_the_group(tmp_path: Path):
    zero, _ = opened(tmp_path / "meet", 2)
    interrupt = threading.Thread(target=signal.raise_signal, args=[signal.SIGINT])
    zero.in_slice = lambda number: interrupt.start() if number == 2 else None
    with pytest.raises(KeyboardInterrupt):
        zero.all_reduce(ONES)
    with pytest.raises(RankLost, match="rank 0 was interrupted in sum 1"):
        zero.all_reduce(ONES)


def test_ranks_that_were_all_stopped_for_long_are_not_late(tmp_path: Path):
    """A wait of 1.5 s has 15 slices, independent of the wall time of each. Rank 1 arrives in the last slice."""
    zero, one = opened(tmp_path / "meet", 2, seconds=1.5)
    clock = FakeClock()

    def stopped(number: int) -> None:
        clock.advance(1000)
        if number == 15:
            assert torch.equal(one.all_reduce(ONES), ONES * 2), "the words that rank 0 sent"

    zero.in_slice = stopped
    with clock.installed():
        assert torch.equal(zero.all_reduce(ONES), ONES * 2)
    assert zero.slices == {1: 15}


@pytest.fixture
def little_room() -> Iterator[None]:
    """Limit the size of files written by this process to one megabyte."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("little_room")
def test_memory_that_is_not_there_is_told_at_the_start(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"engine\.ranks is 4: they share 8 MB at .*meet \(File too large\)"):
        SharedMemoryGroup.create(tmp_path / "meet", 4)
    assert not (tmp_path / "meet").exists()


def test_a_file_that_is_there_is_not_taken(tmp_path: Path):
    (tmp_path / "meet").write_text("somebody's")
    with pytest.raises(FileExistsError):
        SharedMemoryGroup.create(tmp_path / "meet", 2)
    assert (tmp_path / "meet").read_text() == "somebody's"
