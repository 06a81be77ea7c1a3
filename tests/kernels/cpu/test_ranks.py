"""The CPU's group: sums in the order of ranks, and what becomes of it when a rank does not come."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from redline.errors import ConfigError, RankLost
from redline.kernels.cpu.ranks import SharedMemoryGroup

ONES = torch.ones(2, 4)


def opened(file: Path, ranks: int, seconds: float = 10.0) -> list[SharedMemoryGroup]:
    SharedMemoryGroup.create(file, ranks)
    return [SharedMemoryGroup(file, rank, ranks, seconds) for rank in range(ranks)]


def together(groups: list[SharedMemoryGroup], work: Callable[[SharedMemoryGroup], Tensor]) -> list[Tensor]:
    """What each rank gives, as threads."""
    results: dict[int, Tensor] = {}

    def rank(group: SharedMemoryGroup) -> None:
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
    for shape in ((1, 7), (3, 320), (90, 4096)):  # the last in two pieces
        parts = [torch.randn(*shape, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
        want = parts[0].clone()
        for part in parts[1:]:
            want += part
        for got in together(groups, lambda group, parts=parts: group.add(parts[group.rank])):
            assert torch.equal(got, want)
        for got in together(groups, lambda group, parts=parts: group.gather(parts[group.rank])):
            assert torch.equal(got, torch.cat(parts, 1))


def test_a_rank_waits_for_another_that_is_slow(tmp_path: Path):
    """Longer than one slice of the wait: the words that it sends again are the same."""

    def work(group: SharedMemoryGroup) -> Tensor:
        total = torch.zeros(2, 4)
        for turn in range(6):
            if turn % 2 == group.rank:
                time.sleep(0.25)
            total += group.add(ONES * (turn + 1))
        return total

    for got in together(opened(tmp_path / "meet", 2), work):
        assert torch.equal(got, ONES * 2 * 21)


def test_the_file_has_no_name_once_all_have_met(tmp_path: Path):
    file = tmp_path / "meet"
    groups = opened(file, 3)
    assert file.stat().st_mode & 0o777 == 0o600
    together(groups, lambda group: group.add(ONES))
    assert not file.exists(), "a worker that is killed would leave it in memory"
    assert torch.equal(together(groups, lambda group: group.add(ONES))[2], ONES * 3)


def test_a_rank_that_does_not_come_is_named_and_its_group_has_ended(tmp_path: Path):
    zero, one = opened(tmp_path / "meet", 2, seconds=0.3)
    together([zero, one], lambda group: group.add(ONES))
    with pytest.raises(RankLost, match=r"rank 1 has kept rank 0 waiting for 0\.3 s in sum 2"):
        zero.add(ONES)
    with pytest.raises(RankLost, match="in sum 2"):  # it would be taken for the third of rank 1
        zero.add(ONES * 7)
    assert torch.equal(one.add(ONES), ONES * 2), "the words that it did send"
    with pytest.raises(RankLost, match="rank 0 has kept rank 1 waiting"):
        one.add(ONES)


def test_who_waits_learns_soon_that_a_rank_has_ended(tmp_path: Path):
    zero, _ = opened(tmp_path / "meet", 2)
    threading.Timer(0.2, zero.lose, ["rank 1 is lost in step 5: it has ended with code -9"]).start()
    began = time.monotonic()
    with pytest.raises(RankLost, match="rank 1 is lost in step 5"):
        zero.add(ONES)
    assert time.monotonic() - began < 5


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C is an exception, whatever a command that ran in this process before has made of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_call_that_is_interrupted_ends_the_group(tmp_path: Path):
    zero, _ = opened(tmp_path / "meet", 2)
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        zero.add(ONES)
    with pytest.raises(RankLost, match="rank 0 was interrupted in sum 1"):
        zero.add(ONES)


def test_ranks_that_were_all_stopped_for_long_are_not_late():
    """A program of its own, with both ranks as threads, is stopped for longer than they wait for one another."""
    program = """
import pathlib, tempfile, threading, time, torch
from redline.kernels.cpu.ranks import SharedMemoryGroup
with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / "meet"
    SharedMemoryGroup.create(file, 2)
    zero, one = (SharedMemoryGroup(file, rank, 2, 1.5) for rank in range(2))
    def work():
        for _ in range(8):
            time.sleep(0.1)
        one.add(torch.ones(1, 1))
    threading.Thread(target=work).start()
    print("waits", flush=True)
    print(zero.add(torch.ones(1, 1)).item())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "waits\n"
        time.sleep(0.2)
        os.kill(waiting.pid, signal.SIGSTOP)
        time.sleep(2)
        os.kill(waiting.pid, signal.SIGCONT)
        assert waiting.stdout.read() == "2.0\n"


@pytest.fixture
def little_room() -> Iterator[None]:
    """No file of this process may have more than a megabyte."""
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
