"""How fast weights are rounded to NVFP4, and what that loses, beside max scaling and the best that there is.

    python -m redline.bench.runs.quantizers --save benchmarks/results/quantizers-cpu.json
    python -m redline.bench.runs.quantizers --model models/kimi-nano --corpus corpus.jsonl --save ...

Speed: one thread each, the same bf16 weights of Kimi's gate projection, in turns; compressed-tensors' way is its own
scales and its own compressor. The ratio of each turn counts, and their median is told, since others use the machine.

Errors: roots of squared errors over those of max scaling (ModelOpt's rule). Best is what trying all 126 scales of each
block gives under the same tensor scale. Outputs are those over inputs that were not calibrated with, whose covariance
has the eigenvalues 1 / i along random axes.

Model: a checkpoint at each level, audited on the half of the corpus that no level calibrates with.
"""

import argparse
import io
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from torch import Tensor

from redline import clock
from redline.bench.program import count, output, program
from redline.bench.quality.texts import read_texts
from redline.bench.record import provenance
from redline.model.k2.checkpoint import Checkpoint
from redline.ops.formats import NVFP4_GROUP, Nvfp4, quantize_int4
from redline.quant.audit import Bounds, audit
from redline.quant.gptq import damping_of, output_error, round_gptq, second_moments
from redline.quant.nvfp4 import MAX_SCALING, SEARCHED, exact_scale, max_scale, round_nvfp4
from redline.quant.quantize import run
from redline.quant.settings import Level, QuantizeConfig
from redline.quant.texts import Text, chosen, halves
from redline.wire.base import Record

SHAPE = 2048, 7168  # of Kimi's gate projection
CPU = torch.device("cpu")
LEVELS: tuple[Level, ...] = ("fast", "search", "calibrated")


class Speed(Record, frozen=True):
    """Rounding one weight in each way: seconds of the fastest turn; the median of the turns' ratios to theirs."""

    theirs_s: float
    fast_s: float
    search_s: float
    fast_times: float
    search_times: float
    turns: int
    error_to_theirs: float  # of the search


class Errors(Record, frozen=True):
    """Of one kind of weight. All but max_scaling are ratios to its error.

    fractions: the search under tensor scales that are no powers of two, by the factor. outputs: of the search, and by
    the rows that were calibrated with, of 512 inputs; with our damping, and with others.
    """

    weights: str
    max_scaling: float
    best: float
    search: float
    fractions: dict[str, float]
    outputs: dict[str, float]


class OfModel(Record, frozen=True):
    """A checkpoint at a level, over held-out text. to_fast: the KL's ratio."""

    level: str
    weight_error: float
    output_error: float
    kl: float
    agreement: float
    perplexity: float
    perplexity_before: float
    to_fast: float
    domains: dict[str, float]  # KL


def theirs(weight: Tensor) -> Nvfp4:
    """compressed-tensors: its tensor scale, its block scales, its compressor."""
    from compressed_tensors.compressors.nvfp4 import (  # pyright: ignore[reportMissingTypeStubs]
        NVFP4PackedCompressor,
    )
    from compressed_tensors.quantization import QuantizationScheme  # pyright: ignore[reportMissingTypeStubs]
    from compressed_tensors.quantization.quant_scheme import NVFP4A16  # pyright: ignore[reportMissingTypeStubs]
    from compressed_tensors.quantization.utils import (  # pyright: ignore[reportMissingTypeStubs]
        calculate_qparams,
        generate_gparam,
    )

    scheme = QuantizationScheme(targets=["Linear"], weights=NVFP4A16["weights"])
    assert scheme.weights is not None
    whole = generate_gparam(*torch.aminmax(weight))
    blocks = weight.unflatten(-1, (-1, NVFP4_GROUP))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=whole)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
    made = NVFP4PackedCompressor.compress(state, scheme)
    return Nvfp4(made["weight_packed"], made["weight_scale"], 1 / whole.reshape(1))


def searched(weight: Tensor) -> Nvfp4:
    """The level `search`, its tensor scale included."""
    return round_nvfp4(weight, exact_scale(float(weight.abs().max())), SEARCHED)[0]


def fast(weight: Tensor) -> Nvfp4:
    """The level `fast`, its tensor scale included."""
    return round_nvfp4(weight, max_scale(float(weight.abs().max())), MAX_SCALING)[0]


def speed(turns: int) -> Speed:
    """Each way in turn, so many times, after one that does not count."""
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    ways: tuple[Callable[[Tensor], Nvfp4], ...] = (theirs, fast, searched)
    seconds: list[list[float]] = []
    for _ in range(turns + 1):
        row: list[float] = []
        for way in ways:
            began = clock.perf_counter()
            way(weight)
            row.append(clock.perf_counter() - began)
        seconds.append(row)
    counted = seconds[1:]
    best = [min(column) for column in zip(*counted, strict=True)]
    return Speed(
        theirs_s=round(best[0], 4),
        fast_s=round(best[1], 4),
        search_s=round(best[2], 4),
        fast_times=round(statistics.median(row[0] / row[1] for row in counted), 2),
        search_times=round(statistics.median(row[0] / row[2] for row in counted), 2),
        turns=turns,
        error_to_theirs=round(_error(searched(weight), weight) / _error(theirs(weight), weight), 4),
    )


def _error(rounded: Nvfp4, weight: Tensor) -> float:
    return float((rounded.dequantize() - weight.float()).norm() / weight.float().norm())


def drawn(kind: str, rows: int, columns: int) -> Tensor:
    """Random weights: bf16 Gaussian, heavy tails (Student's t with 4 degrees of freedom), INT4 of Gaussian."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(rows, columns, generator=generator)
    if kind == "heavy tails":
        chi = torch.randn(4, rows, columns, generator=generator).square().mean(0)
        return (normal / chi.sqrt()).bfloat16()
    return quantize_int4(normal).dequantize() if kind == "INT4" else normal.bfloat16()


def best_of_all(weight: Tensor, scale: float) -> float:
    """The least error of any choice of block scales, over the weight's norm: each of the 126 is tried."""
    blocks = (weight.float() / scale).reshape(-1, NVFP4_GROUP).abs()
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    best = torch.full((len(blocks),), torch.inf)
    for byte in range(1, 127):
        unit = torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        y = blocks / unit
        near = grid[torch.bucketize(y, (grid[1:] + grid[:-1]) / 2)]
        best = torch.minimum(best, ((near - y) * unit).square().sum(-1))
    return float(best.double().sum().sqrt() * scale / weight.double().norm())


def errors(kind: str) -> Errors:
    """The figures of one kind of weight, [512, 1024]."""
    weight = drawn(kind, 512, 1024)
    largest = float(weight.abs().max())
    plain = _error(fast(weight), weight)
    scale = exact_scale(largest)
    fractions = {
        f"{factor:g}": round(_error(round_nvfp4(weight, scale * factor, SEARCHED)[0], weight) / plain, 4)
        for factor in (1.0625, 1.125, 1.25, 1.375, 1.5, 1.75)
    }
    return Errors(
        weights=kind,
        max_scaling=round(plain, 4),
        best=round(best_of_all(weight, scale) / plain, 4),
        search=round(_error(searched(weight), weight) / plain, 4),
        fractions=fractions,
        outputs=_outputs(weight[:, :512]),
    )


def _outputs(weight: Tensor) -> dict[str, float]:
    """Output errors on rows that were not calibrated with, [N, 512]."""
    K = weight.shape[1]
    axes, _ = torch.linalg.qr(torch.randn(K, K, generator=torch.Generator().manual_seed(2)))

    def rows(seed: int, number: int) -> Tensor:
        drawn_ = torch.randn(number, K, generator=torch.Generator().manual_seed(seed))
        return drawn_ * torch.arange(1, K + 1).rsqrt() @ axes.T

    unseen = second_moments(rows(3, 8192))
    value, scale = weight.float(), exact_scale(float(weight.abs().max()))

    def of(rounded: Nvfp4) -> float:
        return output_error(rounded.dequantize() - value, unseen) ** 0.5

    plain = of(fast(weight))
    found = {"search": of(searched(weight))}
    for number in (32, 128, 512, 2048, 8192):
        moments = second_moments(rows(4, number))
        found[f"{number} rows"] = of(round_gptq(value, moments, scale, damping_of(number, K)))
        for damping in (0.01, 0.1, 1.0):
            found[f"{number} rows, damping {damping:g}"] = of(round_gptq(value, moments, scale, damping))
    return {name: round(error / plain, 4) for name, error in found.items()}


def of_model(folder: Path, corpus: list[Path], tokens: int) -> list[OfModel]:
    """Each level in turn, in a folder that is gone afterwards."""
    before = Checkpoint.open(folder)
    vocabulary, texts_ = before.config.vocab_size, read_texts(folder, corpus)
    calibrate, held_out = (chosen(half, tokens, vocabulary) for half in halves(texts_))
    found: list[OfModel] = []
    for level in LEVELS:
        with tempfile.TemporaryDirectory() as place:
            config = QuantizeConfig(source=str(folder), out=f"{place}/out", level=level, device="cpu")
            texts: list[Text] = calibrate if level == "calibrated" else []
            assert run(config, Console(file=io.StringIO()), texts) == 0
            made = audit(before, Checkpoint.open(f"{place}/out"), held_out, Bounds(), CPU)
        whole = made.domains[-1]
        row = OfModel(
            level=level,
            weight_error=_root_mean([one.error for one in made.weights]),
            output_error=_root_mean([one.output for one in made.experts]),
            kl=round(whole.kl, 6),
            agreement=round(whole.agreement, 5),
            perplexity=round(whole.perplexity_b, 4),
            perplexity_before=round(whole.perplexity_a, 4),
            to_fast=round(whole.kl / (found[0].kl if found else whole.kl), 4),
            domains={one.domain: round(one.kl, 6) for one in made.domains[:-1]},
        )
        print(row, flush=True)
        found.append(row)
    return found


def _root_mean(errors_: list[float]) -> float:
    return round((sum(error**2 for error in errors_) / len(errors_)) ** 0.5, 5)


def main() -> None:
    """Measures, prints, saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=count, default=5)
    parser.add_argument("--model", type=Path, help="a checkpoint that is quantised at each level")
    parser.add_argument("--corpus", type=Path, action="append", help="of `redline draft synth`; absent: our templates")
    parser.add_argument("--tokens", type=count, default=32768, help="to calibrate with, and of held-out text, at most")
    parser.add_argument("--save", type=output)
    given = parser.parse_args()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    measured = speed(given.turns)
    print(measured, flush=True)
    kinds = [errors(kind) for kind in ("Gaussian", "heavy tails", "INT4")]
    for one in kinds:
        print(one, flush=True)
    torch.set_num_threads(threads)
    levels = of_model(given.model, given.corpus or [], given.tokens) if given.model else []
    record: dict[str, Any] = {
        **provenance("torch", "compressed-tensors"),
        "shape": SHAPE,
        "speed": measured,
        "errors": kinds,
        "model": given.model and given.model.name,
        "tokens": given.tokens,
        "levels": levels,
    }
    if given.save:
        given.save.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))


if __name__ == "__main__":
    program(main)
