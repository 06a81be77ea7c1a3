"""The program that records one layer: what it reads again and keeps, what it replays, and where it refuses."""

import contextlib
import gzip
import os
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from redline.bench.runs import layer_trace as the_program
from redline.bench.runs.layer_trace import REPLAYS, ends_after, gathered, main, replayed
from redline.bench.step.depth import WARM_UP, Depth, Progress, measure_step
from redline.bench.step.layer_kernels import LayerTrace
from redline.errors import ConfigError
from redline.kernels.group import ALONE, Alone, Group
from tests.bench.step.test_depth import H200, FakeStep, depth
from tests.bench.step.test_layer_kernels import laid, recording, replay
from tests.tiny_model import CPU
from tests.waiting import LIMIT_S


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["layer_trace", *map(str, arguments)])
    main()


def test_what_was_recorded_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("matplotlib")
    events, to, picture = tmp_path / "events.json.gz", tmp_path / "layer.json", tmp_path / "layer.png"
    events.write_bytes(gzip.compress(msgspec.json.encode(recording([replay()], [replay(), replay()[:-1]]))))
    run(monkeypatch, "--read", events, "--save", to, "--picture", picture)
    kept = msgspec.json.decode(to.read_bytes(), type=LayerTrace)
    assert [lane.layer_us for lane in kept.cases[0].lanes] == [90.0, 90.0]
    assert kept.origin == {"machine": "made up"}
    assert picture.stat().st_size > 10_000
    out = capsys.readouterr().out
    assert "1 row, rank 1: a layer 90.00 us" in out
    assert "left out: replays with no best at its end: 1" in out
    last = next(line for line in out.splitlines() if line.startswith("experts_down"))
    assert last.split()[1:] == ["80.00", "92.00", "12.00", "-2.00", "10.00", "120.00", "80.00"]


def test_all_cases_are_timed_before_one_session_records_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The whole program on steps that do nothing, and a profiler that tells of made-up kernels."""
    did: list[str] = []
    built: list[FakeStep] = []

    def step(
        case: Depth, progress: Progress, device: torch.device, group: Group, like: FakeStep | None = None
    ) -> FakeStep:
        assert like is (built[0] if built else None), "all cases are of one model"
        did.append(f"{case.rows} built")
        built.append(FakeStep(case))
        return built[-1]

    def traced(work: Callable[[], object]) -> dict[str, Any]:
        did.append("recorded")
        before = [len(each.turns) for each in built]
        work()
        assert [len(each.turns) - n for each, n in zip(built, before, strict=True)] == [WARM_UP + REPLAYS] * 2
        kernels = [kernel for apart in (10_000, 20_000) for kernel in laid([replay(apart=apart)] * REPLAYS)]
        at, events = 0, list[dict[str, Any]]()
        for kernel in kernels:
            if "spin" in kernel.name:
                at += 10**9
            times = {"ts": (at + kernel.start_ns) / 1e3, "dur": (kernel.end_ns - kernel.start_ns) / 1e3}
            events.append({"ph": "X", "cat": "kernel", "name": kernel.name, **times})
        return {"traceEvents": events}

    @contextlib.contextmanager
    def alone(config: object, ranks: int) -> Generator[Group]:
        yield ALONE

    stand_ins: dict[str, Any] = {"GpuStep": step, "traced": traced, "ranks_of_gpus": alone}
    stand_ins |= {"has_kernels": lambda device: True, "measure": lambda device, size: H200}
    for name, value in {**stand_ins, "free_memory": lambda device: 1 << 40}.items():
        monkeypatch.setattr(the_program, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    ended: list[float] = []
    monkeypatch.setattr(the_program, "ends_after", ended.append)
    events, kept, again = (tmp_path / name for name in ("events.json.gz", "kept.json", "again.json"))
    sizes = "--layers", 8, "--alias", 3, "--rows", 1, 8, "--limit", 50
    run(monkeypatch, *sizes, "--events", events, "--save", kept)
    assert did == ["1 built", "8 built", "recorded"]
    assert ended == [50.0]
    found = msgspec.json.decode(kept.read_bytes(), type=LayerTrace)
    assert [(case.rows, case.step.rows, case.lanes[0].layer_us) for case in found.cases] == [
        (1, 1, 90.0),
        (8, 8, 180.0),
    ]
    assert {case.lanes[0].replays for case in found.cases} == {REPLAYS}
    assert found.origin["commit"]
    assert found.origin["date"]
    run(monkeypatch, "--read", events, "--save", again)
    assert again.read_bytes() == kept.read_bytes()


CUT = gzip.compress(b"[" * 100)
OTHERS = {"plain": b"{}", "nothing": gzip.compress(b"{}"), "cut": CUT[:-4], "wrong": CUT[:10] + b"\xff" * 9 + CUT[19:]}


@pytest.mark.parametrize("data", OTHERS.values(), ids=OTHERS)  # their bytes have the time in them
def test_anything_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes):
    (tmp_path / "other").write_bytes(data)
    with pytest.raises(ConfigError, match="other: expected what --events keeps"):
        run(monkeypatch, "--read", tmp_path / "other")


def test_without_a_gpu_nothing_is_built(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(the_program, "has_kernels", lambda device: False)
    with pytest.raises(ConfigError, match=r"nothing can be recorded here: .*; --read takes what was recorded"):
        run(monkeypatch, "--ranks", 4, "--alias", 16)


def test_a_step_without_a_middle_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="layers is 4; a trace takes the middle ones: at least 8"):
        run(monkeypatch, "--layers", 4)
    with pytest.raises(ConfigError, match="alias is 70"):
        run(monkeypatch, "--alias", 70)


def test_the_replays_are_those_that_were_timed(monkeypatch: pytest.MonkeyPatch):
    """Same graphs in the same turn, same experts: only the recording is new. A mark lies in front."""
    marks: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", marks.append)
    case = depth(layers=4, rows=2)
    timed, again = FakeStep(case), FakeStep(case)
    measure_step(timed, case, REPLAYS)
    spans = replayed(again, case)
    assert len(marks) == 1
    assert len(spans) == WARM_UP + REPLAYS
    assert again.turns == timed.turns[: len(spans)]
    assert all(torch.equal(a, b) for a, b in zip(again.seen, timed.seen[: len(spans)], strict=True))
    assert not torch.equal(again.seen[0], again.seen[1])


def test_every_rank_hears_what_all_give(monkeypatch: pytest.MonkeyPatch):
    class Three(Alone):
        ranks = 3

    given = [b"a", b"two", b""]
    calls: list[torch.Tensor] = []

    def all_gather(into: list[torch.Tensor], mine: torch.Tensor) -> None:
        calls.append(mine)
        for tensor, data in zip(into, given, strict=True):
            if len(calls) == 1:
                tensor.fill_(len(data))
            else:
                tensor.copy_(torch.tensor(list(data.ljust(3)), dtype=torch.uint8))

    monkeypatch.setattr(the_program.dist, "all_gather", all_gather)
    assert gathered(b"a", Three(), CPU) == given
    assert [call.tolist() for call in calls] == [[1], [*b"a  "]]
    assert gathered(b"alone", ALONE, CPU) == [b"alone"]


def test_it_ends_by_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    codes, ended = list[int](), threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
    ends_after(0.01)
    assert ended.wait(LIMIT_S)
    assert codes == [1]
    assert "error: not done after 0 s" in capsys.readouterr().err
