"""CUDA graphs with tensor parallel ranks: the same plans on all ranks, and time for each to capture its shapes."""

import functools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redline.kernels.cpu.all_reduce import SharedMemoryGroup
from redline.kernels.group import Alone
from redline.messages.job import PAGE_TOKENS, PageId, Sampling
from redline.messages.step import Begin, Row, Shape, Step, StepResult
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.cpu import load
from redline.model.k2.write import random_checkpoint
from redline.run.graphs.cuda_graph_runner import CudaGraphRunner
from redline.run.graphs.graph_recorder import Recorder
from redline.run.runner import Runner
from tests.run.graphs.conftest import Open
from tests.tiny_model import CPU, Answer, job, kernel_config, open_engine, prompt, run, tiny_model
from tests.waiting import LIMIT_S, until

LENGTHS = 40, 43  # lengths of the prompts, in tokens


class Two(Alone):
    ranks = 2


@pytest.mark.parametrize(("group", "same"), [(Two(), True), (Alone(), False)], ids=["two ranks", "one"])
def test_ranks_plan_the_same_though_their_hosts_learn_of_tokens_at_other_times(
    group: Alone, same: bool, captured: Open, monkeypatch: pytest.MonkeyPatch
):
    """The row that a shape's padding rows repeat is the step's first row, which all ranks know.

    A single rank would repeat the shortest row, which depends on the results that its host has read.
    """
    plans: list[np.ndarray[Any, Any]] = []
    write = CudaGraphRunner._plan

    def kept(self: CudaGraphRunner, shape: Shape, rows: Any, masks: Any, plan: Any) -> None:
        write(self, shape, rows, masks, plan)
        plans.append(plan.numpy()[: shape.rows].copy())

    monkeypatch.setattr(tiny_model(), "group", group)
    monkeypatch.setattr(CudaGraphRunner, "_plan", kept)
    shape = Shape(4, 1, 1024)
    first, both = (Row(slot=0, start=None, count=1),), tuple(Row(slot=slot, start=None, count=1) for slot in range(2))
    steps = [Step(number=n, rows=first, shape=shape) for n in range(2, 7)] + [Step(number=7, rows=both, shape=shape)]
    of_each: list[tuple[list[np.ndarray[Any, Any]], list[StepResult]]] = []
    for late in (False, True):
        runner = captured(max_running=4).runner
        try:
            runner.launch(begin()).wait()
            plans.clear()
            if late:
                launched = [runner.launch(step) for step in steps]
                runner._by_thread(lambda: None).result()  # all steps are planned before the first one's tokens are read
                results = [pending.wait() for pending in launched]
            else:
                results = [runner.launch(step).wait() for step in steps]
            of_each.append((list(plans), results))
        finally:
            runner.close()
    (soon, want), (late_plans, got) = of_each
    assert len(soon) == len(late_plans) == len(steps)
    assert got == want
    assert all(result.replayed for result in got)
    assert all(np.array_equal(a, b) for a, b in zip(soon, late_plans, strict=True)) == same


def begin() -> Step:
    """The step in which two jobs compute their prompts."""
    begins = [
        Begin(
            slot=slot,
            tokens=prompt(seed=slot, length=length),
            prompt=length,
            pages=(),
            sampling=Sampling(max_tokens=20, temperature=0),
            limit=PAGE_TOKENS,
        )
        for slot, length in enumerate(LENGTHS)
    ]
    rows = [Row(slot=n, start=0, count=length, new_pages=(PageId(n),)) for n, length in enumerate(LENGTHS)]
    return Step(number=1, begins=tuple(begins), rows=tuple(rows))


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_rank_may_take_its_time_to_record_a_shape(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rank 1 compiles for longer than the timeout of a wait in a step: before its first all-reduce, or after."""
    step_s = 10.0
    monkeypatch.setattr("redline.run.runner.STEP_S", step_s)
    monkeypatch.setattr("redline.run.graphs.cuda_graph_runner.FIRST_SHAPES", 1)
    monkeypatch.setattr("redline.worker.engine.Runner", functools.partial(Runner, captured=True))
    random_checkpoint(tmp_path / "model", kernel_config(moe_intermediate_size=64, intermediate_size=64))
    checkpoint = Checkpoint.open(tmp_path / "model")
    SharedMemoryGroup.create(tmp_path / "meet", 2)
    record, meet, slow, compiling, slices = Recorder.record, SharedMemoryGroup._exchange, False, False, 0

    def counted(group: SharedMemoryGroup, part: Any, whole: Any, width: int, seconds: float) -> int | None:
        nonlocal slices
        slices += compiling
        return meet(group, part, whole, width, 0.0001 if compiling else seconds)

    def compiles() -> None:
        """Lasts for the number of slices of rank 0's wait that make 25 s."""
        nonlocal compiling
        before, compiling = slices, True
        until(lambda: slices > before + 250)
        compiling = False

    def slowly(recorder: Recorder, *pieces: Any) -> Any:
        late = slow and pieces[0].__self__._shared.model.group.rank == 1
        if late and when == "before":
            compiles()
        pieces[0]()  # the forward with its all-reduces, as a warm-up, as on a GPU
        if late and when == "behind":
            compiles()
        return record(recorder, *pieces)

    monkeypatch.setattr(SharedMemoryGroup, "_exchange", counted)

    monkeypatch.setattr(Recorder, "record", slowly)
    answers: dict[int, Answer] = {}
    waited: dict[int, float] = {}
    started = threading.Barrier(2)

    def rank(number: int) -> None:
        nonlocal slow
        group = SharedMemoryGroup(tmp_path / "meet", number, 2)
        engine = open_engine(load(checkpoint, CPU, group=group), max_running=2)
        try:
            assert group.seconds == step_s
            started.wait(LIMIT_S)
            slow = True
            assert engine.runner.record_more()
            waited[number] = group.seconds
            answers[number] = run(engine, [job("asked", prompt(seed=1, length=30), max_tokens=10)])["asked"]
        finally:
            engine.runner.close()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert waited == {0: step_s, 1: step_s}
    assert answers[0] == answers[1]
    assert answers[0].error is None
