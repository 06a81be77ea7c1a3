"""How fast one GPU turns Kimi's INT4 experts into NVFP4, beside the floor and compressed-tensors.

    python -m redline.bench.runs.quantize_gpu --save benchmarks/results/quantize-gpu.json

A weight is a gate projection, 2,048 x 7,168, random. Ways: each level's rounding as `redline quantize` runs it
(dequantise, largest magnitude, round, the error's sums read back); the search by operations of torch, as it runs
where inputs do not weigh the same; compressed-tensors' scales and compressor, from the dequantised weight. All are
timed in turns over different weights, more than the GPU's cache holds, from INT4 in the GPU's memory, two weights
after two others, as gate and up are; the search also by the workers that `redline quantize` has for one GPU, side by
side, from the GPU's memory and from host memory and back. Rates count bytes of INT4, scales included. The floor is
INT4 read and NVFP4 written once, at the rate of a copy on this GPU. Stages are the kernels alone, by the GPU's clock.
"""

import argparse
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch
from torch import Tensor

from redline import clock
from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.bench.runs.quantizers import SHAPE, theirs
from redline.kernels.hopper.triton.nvfp4 import dequantize_int4, round_nvfp4
from redline.ops.formats import Int4, Nvfp4
from redline.quant import nvfp4
from redline.quant.nvfp4 import MAX_SCALING, SEARCHED, exact_scale, largest, max_scale
from redline.quant.quantize import UNITS_A_GPU
from redline.wire.base import Record

WEIGHTS = 12  # 99 MB of INT4, 704 MB dequantised: more than the L2 of an H200
COPIED = 1 << 30

Made = list[tuple[Nvfp4, nvfp4.Error]]


class Way(Record, frozen=True):
    """seconds: of one weight, the median over turns. int4_gb_s: INT4 that goes in. error: over max scaling's, RMS."""

    seconds: float
    int4_gb_s: float
    error: float | None = None


class Stage(Record, frozen=True):
    """A kernel alone, by the GPU's clock, and the bytes that it must move at the rate of a copy."""

    us: float
    floor_us: float


def drawn(number: int) -> Int4:
    """Random codes, and scales of one size."""
    rows, columns = SHAPE
    generator = torch.Generator("cuda").manual_seed(number)
    low, high = -(2**31), 2**31
    packed = torch.randint(low, high, (rows, columns // 8), generator=generator, device="cuda").int()
    scale = torch.rand(rows, columns // 32, generator=generator, device="cuda") * 0.01 + 0.005
    return Int4(packed, scale.bfloat16())


def _levels(weights: Sequence[Int4], scale: Callable[[float], float], tried: Sequence[int]) -> Made:
    values = [dequantize_int4(weight) for weight in weights]
    return nvfp4.round_all(values, scale(max(largest(values))), tried)


def fast(weights: Sequence[Int4]) -> Made:
    """The level `fast`."""
    return _levels(weights, max_scale, MAX_SCALING)


def search(weights: Sequence[Int4]) -> Made:
    """The level `search`."""
    return _levels(weights, exact_scale, SEARCHED)


def by_torch(weights: Sequence[Int4]) -> Made:
    """The search by operations of torch: every input weighs 1."""
    values = [weight.dequantize() for weight in weights]
    scale = exact_scale(max(float(value.abs().max()) for value in values))
    ones = torch.ones(values[0].shape[1], device=values[0].device)
    return [nvfp4.round_nvfp4(value, scale, SEARCHED, ones) for value in values]


def compressed_tensors(weights: Sequence[Int4]) -> Made:
    """Max scaling by compressed-tensors, each by itself; the error is not summed."""
    for weight in weights:
        theirs(weight.dequantize(torch.bfloat16))
    return []


def ways(weights: list[Int4], turns: int) -> dict[str, Way]:
    """Each way over all weights in each turn, after one turn that does not count."""
    named: dict[str, Callable[[Sequence[Int4]], Made]] = {
        "fast": fast,
        "search": search,
        "search by torch": by_torch,
        "compressed-tensors": compressed_tensors,
    }
    pairs = list(zip(weights[::2], weights[1::2], strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in named}
    errors: dict[str, float] = {}
    for turn in range(turns + 1):
        for name, way in named.items():
            torch.cuda.synchronize()
            began = clock.perf_counter()
            made = [one for pair in pairs for one in way(pair)]
            torch.cuda.synchronize()
            if turn:
                seconds[name].append((clock.perf_counter() - began) / len(weights))
            if made:
                squared, plain = (
                    sum(getattr(error, field) for _, error in made) for field in ("squared", "max_scaling")
                )
                errors[name] = (squared / plain) ** 0.5
    size = weights[0].nbytes
    return {
        name: Way(
            seconds=round(statistics.median(every), 7),
            int4_gb_s=round(size / statistics.median(every) / 1e9, 2),
            error=round(errors[name], 4) if name in errors else None,
        )
        for name, every in seconds.items()
    }


def side_by_side(weights: list[Int4], turns: int, *, host: bool) -> Way:
    """The search by as many workers as `redline quantize` has for one GPU; host: from host memory and back."""
    held = [Int4(weight.packed.cpu(), weight.scale.cpu()) for weight in weights] if host else weights

    def one(pair: Sequence[Int4]) -> None:
        for packed, _ in search([Int4(weight.packed.cuda(), weight.scale.cuda()) for weight in pair]):
            for made in (packed.codes, packed.scales) if host else ():
                made.cpu()

    pairs = list(zip(held[::2], held[1::2], strict=True))
    seconds: list[float] = []
    with ThreadPoolExecutor(UNITS_A_GPU) as pool:
        for _ in range(turns + 1):
            began = clock.perf_counter()
            list(pool.map(one, pairs))
            torch.cuda.synchronize()
            seconds.append((clock.perf_counter() - began) / len(held))
    middle = statistics.median(seconds[1:])
    return Way(seconds=round(middle, 7), int4_gb_s=round(weights[0].nbytes / middle / 1e9, 2))


def _gpu_us(calls: list[Callable[[], object]], turns: int) -> float:
    found: list[float] = []
    for _ in range(turns + 1):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for call in calls:
            call()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) * 1e3 / len(calls))
    return statistics.median(found[1:])


def largest_on_gpu(value: Tensor) -> Tensor:
    """`quant.nvfp4.largest`, without waiting."""
    return torch.linalg.vector_norm(value, math.inf)


def stages(weights: list[Int4], turns: int, copy_gb_s: float) -> dict[str, Stage]:
    """The three kernels of the search, and the rounding of max scaling, each over all weights."""
    values = [dequantize_int4(weight) for weight in weights]
    scale = exact_scale(max(largest(values)))
    wide, narrow = values[0].nbytes, weights[0].nbytes

    def stage(bytes_: int, calls: list[Callable[[], object]]) -> Stage:
        return Stage(us=round(_gpu_us(calls, turns), 2), floor_us=round(bytes_ / copy_gb_s / 1e3, 2))

    return {
        "dequantise": stage(narrow + wide, [functools.partial(dequantize_int4, one) for one in weights]),
        "largest": stage(wide, [functools.partial(largest_on_gpu, one) for one in values]),
        "round, max scaling": stage(
            narrow + wide, [functools.partial(round_nvfp4, one, scale, MAX_SCALING) for one in values]
        ),
        "round, search": stage(narrow + wide, [functools.partial(round_nvfp4, one, scale, SEARCHED) for one in values]),
    }


def copy_rate() -> float:
    """GB/s that a copy of 1 GiB within the GPU's memory reads and writes together."""
    here = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    there = torch.empty_like(here)
    return 2 * COPIED / _gpu_us([lambda: there.copy_(here)] * 5, 5) / 1e3


def main() -> None:
    """Measures, prints, saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=count, default=9)
    parser.add_argument("--save", type=output)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU; on a CPU: python -m redline.bench.runs.quantizers")
    weights = [drawn(number) for number in range(WEIGHTS)]
    rate = copy_rate()
    found = ways(weights, given.turns)
    found["search, workers"] = side_by_side(weights, given.turns, host=False)
    found["search, workers, from host memory"] = side_by_side(weights, given.turns, host=True)
    floor = 2 * weights[0].nbytes / rate / 1e9
    record: dict[str, Any] = {
        **provenance("torch", "triton", "compressed-tensors"),
        "gpu": torch.cuda.get_device_name(),
        "shape": SHAPE,
        "weights": WEIGHTS,
        "workers": UNITS_A_GPU,
        "copy_gb_s": round(rate, 1),
        "floor": Way(seconds=round(floor, 7), int4_gb_s=round(weights[0].nbytes / floor / 1e9, 1)),
        "ways": found,
        "stages": stages(weights, given.turns, rate),
    }
    text = msgspec.json.format(msgspec.json.encode(record), indent=1)
    print(text.decode(), flush=True)
    if given.save:
        given.save.write_bytes(text)


if __name__ == "__main__":
    program(main)
