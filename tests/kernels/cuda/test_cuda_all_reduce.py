"""Kernels of several ranks: on the CPU, thread by thread, one process per rank, each at its own pace."""

import os
import sys
from pathlib import Path

import pytest
import torch

from redline.kernels.cuda.collectives.all_reduce import all_reduce
from redline.kernels.cuda.collectives.rank_links import ATTENTION, UNSENT
from tests import forked
from tests.emulator.emulator import emulation
from tests.kernels.cuda import ranks_program
from tests.waiting import LIMIT_S

HERE = Path(__file__).parent


def inboxes(folder: Path, ranks: int) -> Path:
    """A file of inboxes to which no rank has sent anything."""
    words = ranks * ranks * ranks_program.ROOMS.words
    (folder / "inboxes").write_bytes(UNSENT.to_bytes(4, "little") * words)
    return folder / "inboxes"


def say(file: Path, ranks: int, what: str) -> list[str]:
    """The output of the program's ranks, one line each."""
    command = [sys.executable, "-m", "tests.kernels.cuda.ranks_program", str(file), str(ranks), what]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run(command, env=environment, capture_output=True, text=True, timeout=2 * LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("ranks", "rounds"), [pytest.param(2, 12, marks=pytest.mark.slow), (4, 5)])
def test_every_rank_has_the_sum_of_all_in_the_same_bits(ranks: int, rounds: int, tmp_path: Path) -> None:
    file = inboxes(tmp_path, ranks)
    said = say(file, ranks, str(rounds))
    assert len(said) == ranks
    assert len(set(said)) == 1, "the ranks' bits differ"
    assert said[0].split()[1] == "0", "a rank gave up waiting"
    left = torch.from_file(str(file), size=file.stat().st_size // 4, dtype=torch.int32)
    assert (left == torch.tensor(UNSENT - 2**32, dtype=torch.int32)).all(), (
        "a word that was read is not reset to unsent"
    )


def test_who_never_comes_is_named_and_not_who_waits_for_it_with_a_sum(tmp_path: Path) -> None:
    assert say(inboxes(tmp_path, 3), 3, "absent") == ["2 True", "2 True"]


def test_a_rank_that_never_comes_is_named_in_time(tmp_path: Path) -> None:
    """The results are NaN, and the next launch does not wait again."""
    links = ranks_program.links_of(inboxes(tmp_path, 2), 0, 2, seconds=0.03)
    x = torch.randn(1, ranks_program.HIDDEN)
    with emulation():
        first, *_ = all_reduce(x, x, x[0], None, links, ATTENTION)
        assert links.control[1] == 2, "the missing rank plus one"
        links.control[0] = 10**15  # a launch that waited again would exceed the test's time limit
        second, *_ = all_reduce(x, x, x[0], None, links, ATTENTION)
    assert first.isnan().all()
    assert second.isnan().all()
