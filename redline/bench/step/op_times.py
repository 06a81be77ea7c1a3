"""Op times of a decode step of Kimi K2.6's shapes on this GPU: a few layers in memory, random weights, forced uniform
routing, a context of 1,024 tokens in bf16."""

import torch

from redline.bench.machine import measure
from redline.bench.step.depth import DepthCase, Timing, depth_of, measure_step
from redline.bench.step.depth_gpu import GpuStep
from redline.bench.step.depth_record import DepthRecord, record_of
from redline.model.k2.shapes import shape
from redline.ops.op import PeakRates

SHAPE, CONTEXT = "kimi-k2.6", 1024
LAYERS = 5  # in memory, the dense one among them: 45 GB
REPEATS = 30


class StepTimer:
    """Measures cases with one model, which is created once. machine: the rates that floors are computed from."""

    def __init__(self, layers: int, device: torch.device, machine: PeakRates | None = None) -> None:
        self.machine: PeakRates = machine or measure(device)
        self._layers, self._device = layers, device
        self._config = shape(SHAPE)
        self._first: GpuStep | None = None

    def time(self, rows: int) -> DepthRecord:
        """One case, measured now."""
        case: DepthCase = depth_of(
            SHAPE, self._config, layers=self._layers, physical=self._layers, experts=None, rows=rows, tokens=1,
            context=CONTEXT, kv_dtype=torch.bfloat16, overlap=0.0,
        )  # fmt: skip
        step = GpuStep(case, lambda done, whole: None, self._device, like=self._first)
        self._first = self._first or step
        timing: Timing = measure_step(step, case, REPEATS)
        return record_of(case, timing, self.machine)
