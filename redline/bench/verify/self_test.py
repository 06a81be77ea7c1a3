"""`redline doctor --self-test`: what the kernels compute on this GPU, and how fast, as a file to attach to a report.

Each kernel is compared with its reference at every size of law 1, the rates of reading memory and of matrix products
are measured, and a decode step of Kimi K2.6's layers is timed op by op.
"""

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from redline import clock
from redline.bench.machine import measure
from redline.bench.record import provenance
from redline.bench.step.depth_record import DepthRecord
from redline.bench.step.op_times import LAYERS, StepTimer
from redline.bench.verify.law_1 import NOT_A_NUMBER, OutputDistance, arguments, errors_of
from redline.kernels.all import CUDA
from redline.kernels.cuda.chips import chip
from redline.kernels.cuda.compile_ahead import compile_for
from redline.kernels.kernel import Kernel
from redline.messages.base import Record
from redline.ops.op import Case, PeakRates
from redline.progress import Working

ROWS = 1, 8, 64  # of the timed steps
WORKING_SET_BYTES = 1 << 30  # more than the L2 cache of any GPU
STEPS_BYTES = 60 << 30  # of device memory, for the weights and pages of the timed steps

_log = logging.getLogger(__name__)
Cases = Sequence[tuple[Kernel[Any, Any, Any], Case]]


class Failure(Record, frozen=True):
    """A case whose kernel failed, or whose outputs differ from the reference's by more than allowed; or, if `ran` is
    false, a case that could not be run. The same seed creates the same inputs."""

    op: str
    case: str
    why: str
    ran: bool = True


class SelfTest(Record, frozen=True):
    """A GPU's report. bytes_per_s, flops_per_s: measured. nearest: of each output of each op, the error nearest to its
    limit, over all cases. steps: empty if they could not be timed: `untimed` is the reason. was_run: whether Redline's
    authors have run the kernels on this kind of chip. seconds: of the whole test."""

    gpu: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    was_run: bool
    bytes_per_s: float
    flops_per_s: float
    seed: int
    kernels: int
    cases: int
    failures: tuple[Failure, ...]
    nearest: tuple[OutputDistance, ...]
    steps: tuple[DepthRecord, ...]
    untimed: str | None
    seconds: float
    machine: str
    cores: int
    versions: dict[str, str]
    commit: str
    date: str


def self_test(device: torch.device, working: Working) -> SelfTest:
    """Tests the GPU. What fails is in the report."""
    began, seed = clock.monotonic(), secrets.randbits(31)
    working.show(what="measuring rates")
    rates = measure(device, WORKING_SET_BYTES)  # first: after an error of CUDA the device refuses all work
    has = cast(Any, torch.cuda.get_device_properties(device))
    cases = all_cases()
    compile_cases(cases, seed, device, working)
    failures, nearest = compare(cases, seed, device, working)
    steps, untimed = _times(device, rates, working)
    return SelfTest(
        gpu=rates.name,
        capability=(has.major, has.minor),
        multiprocessors=has.multi_processor_count,
        memory_bytes=has.total_memory,
        was_run=chip().was_run,
        bytes_per_s=rates.bytes_per_s,
        flops_per_s=rates.flops_per_s,
        seed=seed,
        kernels=len({kernel.op.name for kernel, _ in cases}),
        cases=len(cases),
        failures=tuple(failures),
        nearest=tuple(nearest),
        steps=tuple(steps),
        untimed=untimed,
        seconds=clock.monotonic() - began,
        **provenance("torch", "triton"),
    )


def _times(device: torch.device, rates: PeakRates, working: Working) -> tuple[list[DepthRecord], str | None]:
    """The timed steps; and why there are none, or fewer than ROWS."""
    steps: list[DepthRecord] = []
    try:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        if free < STEPS_BYTES:
            return steps, f"{free / 1e9:.0f} GB of GPU memory are free, and the layers need {STEPS_BYTES / 1e9:.0f} GB"
        working.show(0, len(ROWS), what="timing a step")
        timed = StepTimer(LAYERS, device, rates)
        for number, rows in enumerate(ROWS, 1):
            steps.append(timed.time(rows))
            working.show(number, len(ROWS))
    except Exception as error:
        return steps, _named(error)
    return steps, None


def all_cases() -> Cases:
    """Law 1's cases of all GPU kernels, those with Kimi's sizes among them."""
    return [(kernel, case) for kernel in CUDA for case in kernel.op.cases()]


def compile_cases(cases: Cases, seed: int, device: torch.device, working: Working) -> None:
    """Compiles the kernels that the cases launch, several at a time, into the cache. Those that cannot be compiled are
    left to the comparison, which reports them."""

    def pieces() -> Iterator[Callable[[], object]]:
        for number, (kernel, case) in enumerate(cases, 1):

            def piece(kernel: Kernel[Any, Any, Any] = kernel, case: Case = case) -> None:
                try:
                    kernel.run(arguments(case, seed, device))
                except Exception as error:  # the results of a launch are missing: the comparison will compile the rest
                    _log.debug("%s: %s", kernel.op.name, error)

            yield piece
            working.show(number, len(cases), what="preparing kernels")

    try:
        with torch.inference_mode():
            compile_for(chip(), pieces(), lambda made, whole: working.show(made, whole, what="compiling kernels"))
    except Exception as error:
        _log.warning("a kernel does not compile: %s", error)


def compare(
    cases: Cases, seed: int, device: torch.device, working: Working
) -> tuple[list[Failure], list[OutputDistance]]:
    """Compares each case's outputs with the reference's: the failures, and the error of each op's outputs that is
    nearest to its limit. After an error of CUDA no further case is run: the device refuses all work of this process."""
    failures: list[Failure] = []
    nearest: dict[tuple[str, int, str], OutputDistance] = {}
    for number, (kernel, case) in enumerate(cases, 1):
        op = kernel.op.name
        working.show(number - 1, len(cases), what="comparing with references", note=f"{op}: {case.name}")
        try:
            found = errors_of(kernel, case, seed, device)
        except torch.OutOfMemoryError:
            failures.append(Failure(op=op, case=case.name, why="not run: too little free GPU memory", ran=False))
            continue
        except Exception as error:
            failures.append(Failure(op=op, case=case.name, why=_named(error)))
            if not _usable(device):
                why = "not run: the device refuses all work after an earlier case"
                failures += [
                    Failure(op=kernel.op.name, case=case.name, why=why, ran=False) for kernel, case in cases[number:]
                ]
                break
            continue
        for one in found:
            if not one.fits:
                error = "not a number" if one.error == NOT_A_NUMBER else f"relative error {one.error:.2e}"
                why = f"output {one.output} ({one.dtype}): {error}, allowed {one.limit:.2e}"
                failures.append(Failure(op=op, case=case.name, why=why))
            key = op, one.output, one.dtype
            nearest[key] = max(nearest.get(key, one), one, key=_share)
    return failures, list(nearest.values())


def _share(one: OutputDistance) -> float:
    """An error's share of its limit."""
    return one.error / one.limit if one.limit else one.error


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _usable(device: torch.device) -> bool:
    try:
        torch.zeros(1, device=device).cpu()
    except RuntimeError:
        return False
    return True
