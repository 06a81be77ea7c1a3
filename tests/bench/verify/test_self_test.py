"""`redline doctor --self-test`: its comparison and its report, with the kernels emulated on the CPU."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from redline.bench.step.depth_record import DepthRecord, OpRecord
from redline.bench.verify import self_test
from redline.bench.verify.law_1 import OutputDistance
from redline.bench.verify.self_test import Failure, SelfTest, all_cases, compare
from redline.cli import app, doctor_self_test
from redline.cli.doctor_self_test import show
from redline.cli.terminal import Terminal
from redline.kernels.all import CUDA
from redline.kernels.kernel import Kernel
from redline.ops.op import PeakRates
from redline.progress import Working
from tests.emulator.emulator import emulation
from tests.seeds import fresh_seed

CPU = torch.device("cpu")
OPS = "embed", "gates", "attend", "sort_pairs", "keep_drafts"
SMALLEST = [
    (kernel, next(case for case in kernel.op.cases() if case.small)) for kernel in CUDA if kernel.op.name in OPS
]
QUIET = Working("", shown=False)


def report(**changed: Any) -> SelfTest:
    nearest = OutputDistance(op="embed", case="one token", output=0, dtype="bfloat16", error=1e-4, limit=1e-3)
    sound = SelfTest(
        gpu="a GPU", capability=(10, 0), multiprocessors=148, memory_bytes=1 << 37, was_run=False, bytes_per_s=7e12,
        flops_per_s=1.5e15, seed=1, kernels=1, cases=2, failures=(), nearest=(nearest,), steps=(), untimed=None,
        seconds=60.0, machine="a CPU", cores=2, versions={}, commit="abc1234", date="2026-11-30 04:00",
    )  # fmt: skip
    return SelfTest(**{name: getattr(sound, name) for name in sound.__struct_fields__} | changed)


def step() -> DepthRecord:
    ops = (OpRecord(name="gates", us=30.0, floor_us=20.0, launches=4),)
    return DepthRecord(
        shape="kimi-k2.6", gpu="a GPU", ranks=1, layers=5, physical_layers=5, experts=384, rows=8, tokens_per_row=1,
        context=1024, kv_dtype="bf16", routing="uniform", ms=2.0, p10_ms=2.0, p90_ms=2.0, floor_ms=1.6, expert_bytes=1,
        bytes_per_s=7e12, flops_per_s=1.5e15, ops=ops, commit="abc1234", date="2026-11-30 04:00", versions={},
    )  # fmt: skip


def shown(of: SelfTest) -> str:
    written = io.StringIO()
    show(of, Terminal(file=written, width=160))
    return written.getvalue()


def test_correct_kernels_are_sound_and_each_op_has_its_nearest_error() -> None:
    with emulation():
        failures, nearest = compare(SMALLEST, fresh_seed(), CPU, QUIET)
    assert not failures
    assert {one.op for one in nearest} == set(OPS)
    assert all(one.fits for one in nearest)


def test_a_wrong_output_and_an_unwritten_one_are_failures() -> None:
    kernel, case = next(pair for pair in SMALLEST if pair[0].op.name == "embed")

    def changed(how: Any) -> Kernel[Any, Any, Any]:
        def run(args: Any) -> Any:
            residual, *others = kernel.run(args)
            return how(residual), *others

        return dataclasses.replace(kernel, run=run)

    def broken(_: object) -> Any:
        raise RuntimeError("no such launch")

    cases = [
        (changed(lambda residual: residual * 1.5), case),
        (changed(lambda residual: torch.empty_like(residual)), case),  # poisoned
        (changed(broken), case),
        (kernel, case),
    ]
    with emulation():
        failures, _ = compare(cases, fresh_seed(), CPU, QUIET)
    assert [failure.op for failure in failures] == ["embed"] * 3
    assert "relative error" in failures[0].why
    assert "not a number" in failures[1].why
    assert failures[2].why == "RuntimeError: no such launch"


def test_no_case_runs_after_the_device_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, case = SMALLEST[0]

    def fails(_: object) -> Any:
        raise RuntimeError("illegal address")

    monkeypatch.setattr(self_test, "_usable", lambda _: False)
    failures, _ = compare([(dataclasses.replace(kernel, run=fails), case), (kernel, case)], 1, CPU, QUIET)
    assert [failure.why.split(":")[0] for failure in failures] == ["RuntimeError", "not run"]


def test_little_memory_is_no_failure_of_a_kernel() -> None:
    kernel, case = SMALLEST[0]

    def full(_: object) -> Any:
        raise torch.OutOfMemoryError("no memory")

    (failure,), _ = compare([(dataclasses.replace(kernel, run=full), case)], 1, CPU, QUIET)
    assert not failure.ran


def test_a_broken_device_still_has_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels that cannot be compiled, cases that fail, and a device that refuses to be timed."""

    def fails(*_: object) -> Any:
        raise RuntimeError("illegal address")

    class Properties:
        major, minor, multi_processor_count, total_memory = 10, 0, 148, 1 << 37

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    monkeypatch.setattr(self_test, "measure", lambda *_: PeakRates("a GPU", 7e12, 1e15))
    monkeypatch.setattr(self_test, "compile_for", fails)
    monkeypatch.setattr(
        self_test, "all_cases", lambda: [(dataclasses.replace(SMALLEST[0][0], run=fails), SMALLEST[0][1])]
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", fails)
    found = self_test.self_test(CPU, QUIET)
    assert [failure.why for failure in found.failures] == ["RuntimeError: illegal address"]
    assert found.untimed == "RuntimeError: illegal address"
    assert (found.gpu, found.steps) == ("a GPU", ())


def test_every_kernel_is_tested_at_small_sizes_and_every_large_one_at_kimis() -> None:
    cases = all_cases()
    assert {kernel.op.name for kernel, _ in cases} == {kernel.op.name for kernel in CUDA}
    assert {"attend", "experts_up", "grouped_experts"} <= {kernel.op.name for kernel, case in cases if not case.small}


def test_the_verdict_comes_first_then_failures_rates_and_times() -> None:
    said = shown(report(steps=(step(),))).splitlines()
    assert said[0] == "a GPU (compute capability 10.0): sound: 2 cases of 1 kernels agree with their references"
    assert said[1] == "measured: 7.00 TB/s, 1,500 TFLOP/s in bf16; the test took 60 s"
    assert any("gates" in line and "30.0 (1.50)" in line for line in said)
    assert "steps were not timed: too small" in shown(report(untimed="too small"))
    assert "no failure in 2 cases of 1 kernels; 1 were not run" in shown(
        report(failures=(Failure(op="embed", case="one token", why="not run", ran=False),))
    )
    said = shown(report(failures=(Failure(op="embed", case="one token", why="differs"),))).splitlines()
    assert "BROKEN: 1 of 2 cases" in said[0]
    assert said[1].strip() == "embed, one token: differs"


def test_the_command_writes_the_report_and_its_exit_code_is_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_self_test, "why_not", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    save = tmp_path / "report.json"
    for found, code in (report(), 0), (report(failures=(Failure(op="embed", case="one", why="differs"),)), 1):
        monkeypatch.setattr(doctor_self_test, "self_test", lambda *_, found=found: found)
        done = CliRunner().invoke(app, ["doctor", "--self-test", "--save", str(save)], env={"COLUMNS": "200"})
        assert done.exit_code == code, done.output
        assert '"gpu": "a GPU"' in save.read_text()
        assert f"please attach {save}" in done.output


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--self-test", "--on", "8 x H200"], "--self-test tests this machine's GPU"),
        (["--save", "report.json"], "--save is for --self-test only"),
    ],
)
def test_wrong_flags_are_refused(words: list[str], why: str) -> None:
    assert why in str(CliRunner().invoke(app, ["doctor", *words]).exception)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_with_the_reason() -> None:
    done = CliRunner().invoke(app, ["doctor", "--self-test"])
    assert "--self-test tests the GPU kernels, which cannot run here: torch sees no GPU" in str(done.exception)
