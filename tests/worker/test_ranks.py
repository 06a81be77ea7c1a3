"""Ranks that end, stop, lag, or sample other tokens: all ranks end within seconds, and one line names the rank,
the step and the reason.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.errors import RankLost
from redline.kernels.cpu import all_reduce as cpu_ranks
from redline.kernels.cpu.all_reduce import SharedMemoryGroup
from redline.kernels.group import ALONE
from redline.messages.job import Job
from redline.messages.step import Drawn, RowResult, StepResult
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.shard import rooms_of
from redline.model.k2.write import random_checkpoint
from redline.policy.costs import StepCosts
from redline.run import runner
from redline.run.fit import MemorySizes
from redline.worker import engine, ranks
from redline.worker.config import EngineConfig, RankConfig, Suffix
from redline.worker.drawn import DigestComparison, TokenDigest
from redline.worker.engine import EngineCore, load_model
from redline.worker.ranks import Ranks
from tests import forked
from tests.clocks import FakeClock
from tests.lost_ranks import at_step
from tests.tiny_model import CPU, job, kernel_config, prompt, run
from tests.waiting import LIMIT_S, until

FOLLOWER = """
import signal, sys
from redline.kernels.cpu.all_reduce import SharedMemoryGroup
from redline.run import runner
from redline.run.eager_step import EagerSteps
from redline.run.runner import Runner
from redline.worker import engine, rank
{changes}
sys.exit(rank.main())
"""


@pytest.fixture(autouse=True)
def ranks_are_forked() -> Iterator[None]:
    with forked.all_processes():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    random_checkpoint(folder, kernel_config(moe_intermediate_size=64, intermediate_size=64))
    return folder


@pytest.fixture
def few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the timeout of ranks that are asked to end."""
    monkeypatch.setattr(ranks, "END_S", 1.0)


def config(**changes: Any) -> EngineConfig:
    asked = {"ranks": 2, "kv_memory": 10_000_000, "max_model_len": 1024, "max_running": 2, "device": "cpu"}
    return EngineConfig(**{**asked, **changes})


def follow(monkeypatch: pytest.MonkeyPatch, changes: str) -> None:
    """Make the other ranks run the product's program with these changes."""
    monkeypatch.setattr(ranks, "FOLLOW", (sys.executable, "-c", FOLLOWER.format(changes=changes)))


def long_job() -> Job:
    return job("long", prompt(seed=1, length=20), max_tokens=900, stop_ids=(), logprobs=None)


def loses(core: EngineCore, said: str) -> None:
    """Run a long job, which fails with RankLost and this message."""
    with torch.inference_mode(), pytest.raises(RankLost, match=said):
        run(core, [long_job()])


# ---------------------------------------------------------------------------------------- ranks that end, and that stop


def test_a_stopped_process_is_named_where_sums_would_wait_for_minutes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a prompt's all-reduce does on a GPU. Once a rank is lost, the others are not waited for either."""
    monkeypatch.setattr(runner, "STEP_S", 3600.0)
    # of rank 0, which counts its polls; the other rank sends heartbeats at the usual interval
    monkeypatch.setattr(ranks, "BEAT_S", 0.1)
    core = EngineCore.load(folder, config())
    (process,) = core.runner._ranks._processes  # type: ignore[attr-defined]
    wait, waited = process.wait, list[float]()

    def waits(timeout: float | None = None) -> int:
        waited.append(0.0 if timeout is None else timeout)
        return wait(timeout)

    monkeypatch.setattr(process, "wait", waits)
    at_step(monkeypatch, 1, lambda: process.send_signal(signal.SIGSTOP))
    try:
        loses(core, r"rank 1 has kept rank 0 waiting for 1 s in step 1: its process sends no heartbeats")
    finally:
        core.runner.close()
    assert max(waited) <= ranks.LOST_END_S < ranks.END_S
    assert process.returncode == -signal.SIGKILL


def test_a_rank_that_dies_ends_all_though_sums_would_wait_for_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's wait in its all-reduce is interrupted; the others are in theirs, and receive nothing."""
    random_checkpoint(tmp_path, kernel_config(moe_intermediate_size=128, intermediate_size=128))
    monkeypatch.setattr(runner, "STEP_S", 3600.0)
    follow(monkeypatch, "runner.STEP_S = 3600.0")
    core = EngineCore.load(tmp_path, config(ranks=4))
    processes = core.runner._ranks._processes  # type: ignore[attr-defined]
    at_step(monkeypatch, 5, processes[1].kill)
    try:
        loses(core, r"rank 2 failed in step \d+: it exited with code -9")
    finally:
        core.runner.close()
    assert all(process.returncode is not None for process in processes)


@pytest.mark.usefixtures("few_seconds")
def test_a_rank_that_fails_speaks_before_it_tidies_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the failed rank does not exit by itself."""
    monkeypatch.setattr(runner, "STEP_S", 3600.0)
    follow(
        monkeypatch,
        "def fails(self, spans): raise ValueError('odd')\nEagerSteps._compute = fails\n"
        "Runner.close = lambda self: signal.pause()",
    )
    core = EngineCore.load(folder, config())
    try:
        loses(core, r"rank 1 failed in step \d+: rank 1 has failed in step \d+: ValueError: odd")
    finally:
        core.runner.close()


def test_ranks_that_do_not_end_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "FOLLOW", ("sleep", "infinity"))
    clock, waited = FakeClock(), list[float]()
    others = Ranks("", config(ranks=4), CPU, kernel_config())
    processes = list(others._processes)
    for process in processes:

        def wait(timeout: float | None = None, wait: Callable[[], int] = process.wait) -> int:
            if timeout is None:
                return wait()
            waited.append(timeout)
            clock.advance(timeout)
            raise subprocess.TimeoutExpired("sleep", timeout)

        monkeypatch.setattr(process, "wait", wait)
    with clock.installed():
        others.close()
    assert waited == [ranks.END_S, 0.0, 0.0]
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 3


def test_followers_are_told_what_of_their_gpus_is_for_the_workers_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks use the number of pages of the rank with the least memory."""

    class Enough(Exception):
        pass

    told: list[RankConfig] = []

    def start(_: Ranks, config: RankConfig) -> None:
        told.append(config)
        if len(told) == 3:
            raise Enough

    monkeypatch.setattr(Ranks, "_start", start)
    with pytest.raises(Enough):
        Ranks("", config(ranks=4), CPU, kernel_config(), alone=True, aside=7)
    assert [(each.alone, each.aside) for each in told] == [(True, 7)] * 3


ENDS = sys.executable, "-c", "print('there is no room')"


def until_it_is_said() -> None:
    """Wait until the watcher threads have seen their ranks end."""
    until(lambda: not any(thread.name.startswith("rank ") for thread in threading.enumerate()))


def test_a_rank_that_ends_before_there_is_a_group_is_told_to_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "FOLLOW", ENDS)

    def opened_late(folder: Path, rank: int, count: int, *_: object) -> SharedMemoryGroup:
        until_it_is_said()
        return SharedMemoryGroup(folder / ranks.MEET, rank, count)

    monkeypatch.setattr(ranks, "open_group", opened_late)
    others = Ranks("", config(), CPU, kernel_config())
    try:
        with pytest.raises(RankLost, match="rank 1 failed while it was loading: there is no room"):
            others.group.all_reduce(torch.ones(1, 4))
    finally:
        others.close()


def test_a_group_that_cannot_be_opened_as_a_rank_has_ended_says_why_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "FOLLOW", ENDS)

    def never(*_: object) -> None:
        until_it_is_said()
        raise RuntimeError("wait timeout after 120000ms")

    monkeypatch.setattr(ranks, "open_group", never)
    with pytest.raises(RankLost, match="rank 1 failed while it was loading: there is no room"):
        Ranks("", config(), CPU, kernel_config())


def test_of_several_ranks_that_end_the_first_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "FOLLOW", ENDS)
    told: list[str] = []
    try:
        others = Ranks("", config(ranks=4), CPU, kernel_config(), told.append)
    except RankLost as error:  # a rank ended before the others' group was open
        reason = str(error)
    else:
        until_it_is_said()
        others.close()
        (reason,) = told
    assert reason.endswith("failed while it was loading: there is no room")


def test_a_process_that_is_ended_by_a_lost_rank_leaves_no_folder_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback ends the worker's process immediately, without any cleanup."""
    monkeypatch.setattr(ranks, "FOLLOW", ENDS)
    there: list[bool] = []
    opened = threading.Event()

    def told(_: str) -> None:
        opened.wait(LIMIT_S)  # the rank may end before `others` is assigned
        there.append(Path(others._folder.name).exists())

    others = Ranks("", config(), CPU, kernel_config(), told)
    opened.set()
    until_it_is_said()
    others.close()
    assert there == [False]


# ------------------------------------------------------------------------------------------------- timeouts and waits


@pytest.mark.usefixtures("few_seconds")
def test_loads_may_end_far_apart(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank loads for more slices of rank 0's wait than the timeout of any other operation has."""
    gate, slices = tmp_path / "gate", 0
    os.mkfifo(gate)
    follow(
        monkeypatch, "from redline.model.k2 import load as opened\nload = opened.load\n"
        f"def slow(*given): open({str(gate)!r}).close(); return load(*given)\n"
        "opened.load = slow",
    )  # fmt: skip
    meet = SharedMemoryGroup._exchange

    def in_short_slices(self: SharedMemoryGroup, part: Any, whole: Any, width: int, seconds: float) -> int | None:
        nonlocal slices
        if self.seconds <= runner.START_S:  # not the wait for loads: a busy machine may need all of its time
            return meet(self, part, whole, width, seconds)
        slices += 1
        if slices == MORE_SLICES:
            gate.open("w").close()  # returns once the other rank has opened it
        return meet(self, part, whole, width, seconds if slices > MORE_SLICES else 0.0001)

    monkeypatch.setattr(SharedMemoryGroup, "_exchange", in_short_slices)
    core = EngineCore.load(folder, config())
    core.runner.close()
    assert slices > MORE_SLICES


MORE_SLICES = 2 * round(runner.START_S / cpu_ranks._LOOK_S)


@pytest.mark.usefixtures("few_seconds")
def test_nobody_is_hurried_before_rank_0_has_measured_its_steps(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After that, rank 1 waits for at most five slices in a step. Before, it waits for 20 of them, and is not lost."""
    counted = tmp_path / "counted"
    counted.touch()
    follow(
        monkeypatch,
        "runner.STEP_S = 0.5\nmeet, counted = SharedMemoryGroup._exchange, "
        f"open({str(counted)!r}, 'ab', buffering=0)\n"
        "def counts(self, *given): counted.write(b'.'); return meet(self, *given)\n"
        "SharedMemoryGroup._exchange = counts",
    )
    measure = engine.calibrate

    def in_twenty_slices() -> None:
        size = counted.stat().st_size
        until(lambda: counted.stat().st_size > size + 20)

    def slowly(given: Any, drafts: int) -> StepCosts:
        with monkeypatch.context() as patch:
            before_a_step(given, patch, in_twenty_slices)
            return measure(given, drafts)

    monkeypatch.setattr(engine, "calibrate", slowly)
    core = EngineCore.load(folder, config(speculation=Suffix()))
    try:
        others = core.runner._ranks  # type: ignore[attr-defined]
        before_a_step(core.runner, monkeypatch, lambda: until(lambda: others.reason))
        loses(core, r"rank 1 failed in step \d+: .*rank 0 has kept rank 1 waiting for 0\.5 s")
    finally:
        core.runner.close()


def before_a_step(given: Any, patch: pytest.MonkeyPatch, wait: Callable[[], object]) -> None:
    """Make the runner call `wait` in its next step, before it computes anything."""
    predict = given.model.predict

    def slow(*arguments: Any) -> Any:
        given.model.predict = predict
        wait()
        return predict(*arguments)

    patch.setattr(given.model, "predict", slow)


# -------------------------------------------------------------------------------------------------- sampled tokens


@pytest.mark.usefixtures("few_seconds")
def test_a_rank_that_draws_another_token_ends_all_with_its_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(
        monkeypatch,
        "chosen, steps = EagerSteps._chosen, []\n"
        "def other(self, spans, out):\n"
        "    steps.append(1)\n"
        "    return [token ^ (len(steps) == 5) for token in chosen(self, spans, out)]\n"
        "EagerSteps._chosen = other",
    )
    core = EngineCore.load(folder, config())
    try:
        loses(core, r"rank 1 failed in step \d+: rank 1 has sampled other tokens in step 5$")
    finally:
        core.runner.close()


def step_of(number: int, *rows: tuple[int, ...]) -> StepResult:
    return StepResult(number=number, rows=tuple(RowResult(tokens=tokens) for tokens in rows))


STEPS = [step_of(10 + n, (n, 2 * n), (), (3,)) for n in range(8)]


@pytest.mark.parametrize("ahead", [-2, -1, 0, 1, 2])
def test_what_ranks_draw_is_compared_whoever_is_ahead(ahead: int) -> None:
    """The seventh step differs: it must be the one that is named, although later steps may be known already."""

    def compare(steps: list[StepResult]) -> None:
        zero, comparison = TokenDigest(), DigestComparison(1)
        for n in range(-2, len(steps) + 2):
            if 0 <= n + ahead < len(steps):
                zero.note(STEPS[n + ahead])
                comparison.hear(zero.drawn)
                comparison.hear(zero.drawn)
            if 0 <= n < len(steps):
                comparison.note(steps[n])
        assert (comparison._mine, comparison._told) == ({}, {})

    compare(STEPS)
    for other in (step_of(16, (6, 12), (), (4,)), step_of(16, (6,), (12,), (3,)), step_of(16, (6, 12), (3,), ())):
        with pytest.raises(RankLost, match="rank 1 has sampled other tokens in step 16"):
            compare([*STEPS[:6], other, STEPS[7]])


def test_to_compare_costs_a_few_calls_however_many_rows_a_step_has() -> None:
    def calls(rows: int) -> int:
        """Calls of Python and C functions by both ranks together, in the second step that they compare."""
        steps = [step_of(number, *[(1000 + row, 5, 6) for row in range(rows)]) for number in (1, 2)]
        zero, comparison, count = TokenDigest(), DigestComparison(1), 0

        def seen(_: object, event: str, __: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        for step in steps:
            count = 0
            sys.setprofile(seen)
            try:
                zero.note(step)
                comparison.hear(zero.drawn)
                comparison.note(step)
            finally:
                sys.setprofile(None)
        return count

    assert 0 < calls(64) == calls(1) < 40


def test_a_difference_that_rank_0_does_not_speak_of_at_once_is_found_later() -> None:
    zero, comparison = TokenDigest(), DigestComparison(3)
    comparison.hear(Drawn())
    comparison.note(step_of(10, (5,)))
    zero.note(STEPS[0])
    for step in STEPS[1:4]:
        zero.note(step)
        comparison.note(step)
    with pytest.raises(RankLost, match="rank 3 has sampled other tokens in step 13"):
        comparison.hear(zero.drawn)


# ------------------------------------------------------------------------------------------------------ memory of ranks


def test_an_inbox_is_counted_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is open when free memory is read, and its inbox is part of what `MemorySizes` counts."""
    words = 2 * rooms_of(Checkpoint.open(folder).config, 2).words
    seen: list[int] = []

    def fitted(_: MemorySizes, free: int, *__: object, **___: object) -> None:
        seen.append(free)
        raise EOFError

    monkeypatch.setattr(engine, "fit", fitted)

    def free(_: torch.device) -> int:
        return 10**9 - 4 * words

    monkeypatch.setattr(engine, "free_memory", free)
    with pytest.raises(EOFError):
        load_model(folder, config(), torch.device("cuda"), ALONE)
    with pytest.raises(EOFError):
        load_model(folder, config(), torch.device("cuda"), ALONE, aside=10**8)
    assert seen == [10**9, 9 * 10**8], "the memory for KV transfers must be subtracted"
