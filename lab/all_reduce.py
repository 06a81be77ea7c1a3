"""The cost of all-reduces fused into the products of a decode step, on the GPUs of one host.

    python -m lab.all_reduce --ranks 2 --save benchmarks/results/sums-h200.json

Every rank is a process with its own GPU. At Kimi's sizes, divided over the ranks, it times CUDA graphs in which the two
products that end in an all-reduce follow one another as in a layer (attention's projection, then the experts' second
half), once over all ranks and once with each rank alone: the difference is the cost of the all-reduces. There are
several copies of the weights, so that none is in a cache. It also times `project_a`, multiplied whole by each rank or a
part by each with an all-reduce, as the product that begins such a layer; an all-reduce as a launch of its own, the
all-gather of logits, and torch's NCCL for comparison. From eight rows on, all-reduces are timed in one shot and in two
(blocks/all_reduce.cuh). Before a time counts, the sums are compared with NCCL's, and the divided product with the
whole one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.program import count, output, program
from redline.bench.record import provenance
from redline.errors import ConfigError
from redline.kernels.cuda.collectives.all_gather import all_gather
from redline.kernels.cuda.collectives.all_reduce import all_reduce
from redline.kernels.cuda.collectives.gpu_group import GpuGroup
from redline.kernels.cuda.collectives.rank_links import ATTENTION, EXPERTS, RankLinks, Shots, Site
from redline.kernels.cuda.decode.choose_experts import MOST_TOKENS, choose_experts
from redline.kernels.cuda.decode.dense import MOST_TOKENS as MOST_SHARED
from redline.kernels.cuda.decode.experts_down import experts_down
from redline.kernels.cuda.decode.project_a import project_a
from redline.kernels.cuda.decode.project_out import project_out
from redline.kernels.cuda.layouts.records import Records, Slabs, random_experts
from redline.kernels.cuda.layouts.tiled import Tiled
from redline.model.k2.shapes import KIMI_K26
from redline.model.k2.shard import rooms_of

ROWS = 1, 4, 8, 16, 32
BOTH = 8  # rows from which all-reduces are timed in one shot and in two
PLACES = 3  # copies of the weights in memory, used in rotation
LAYERS = 30  # layers of a graph, each a pair of products
REPEATS = 40  # replays; the median counts
LIMIT_S = 300


def main() -> int:
    """Starts the ranks, or runs as one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=count, default=2, help="GPUs, one process for each")
    parser.add_argument("--save", type=output, help="a JSON file for the times")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        result = measure(given.rank, given.ranks, given.meet)
        if given.rank == 0:
            print(json.dumps(result))
        return 0
    if torch.cuda.device_count() < given.ranks:
        raise ConfigError(f"ranks is {given.ranks}, and torch sees {torch.cuda.device_count()} GPUs")
    times = together("lab.all_reduce", given.ranks)
    record = {**provenance("torch"), "gpu": torch.cuda.get_device_name(0), "ranks": given.ranks, "times_us": times}
    show(times)
    if given.save:
        given.save.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def together(module: str, ranks: int) -> Any:
    """Runs a program's ranks, and returns the output of rank 0. Raises ConfigError with the output of a rank that
    failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module, "--ranks", str(ranks), "--meet", f"{folder}/meet", "--rank"]
        started = [
            subprocess.Popen(
                [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
            )
            for rank in range(ranks)
        ]
        try:
            said = [process.communicate(timeout=LIMIT_S) for process in started]
        finally:
            for process in started:
                process.kill()
    for rank, process in enumerate(started):
        if process.returncode:
            raise ConfigError(f"rank {rank} ended with code {process.returncode}:\n{said[rank][1][-3000:]}")
    return json.loads(said[0][0].splitlines()[-1])


def show(times: dict[str, dict[str, float]]) -> None:
    """A line for each number of rows."""
    names = list(next(iter(times.values())))
    print(f"{'rows':>5}  " + "  ".join(f"{name:>22}" for name in names))
    for rows, of in times.items():
        print(f"{rows:>5}  " + "  ".join(f"{of[name]:>22.2f}" if name in of else f"{'':>22}" for name in names))


def measure(rank: int, ranks: int, meet: str) -> dict[str, dict[str, float]]:
    """Microseconds by rows and by name of the timed operation: of a product, of a launch, of an all-gather."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    c = KIMI_K26
    group = GpuGroup(meet, rank, ranks, device, rooms_of(c, ranks))
    try:
        with torch.inference_mode():
            products = Products(rank, ranks, device)
            return {str(rows): times_of(rows, products, group) for rows in ROWS}
    finally:
        group.close()


class Products:
    """The two products of a layer that end in an all-reduce, a rank's part of each, with several copies in memory."""

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        c = KIMI_K26
        g = torch.Generator(device).manual_seed(rank)
        self.hidden, self.inputs = c.hidden_size, c.num_attention_heads * c.v_head_dim // ranks
        self.width, self.experts, self.chosen = c.moe_intermediate_size // ranks, 64, c.num_experts_per_tok
        self.out = [Tiled.prepare(self.normal(g, self.hidden, self.inputs)) for _ in range(PLACES)]
        self.down = [
            Records.prepare("down", random_experts(g, "INT4", "down", self.experts, self.hidden, self.width))
            for _ in range(PLACES)
        ]
        self.shared = [Slabs.prepare(self.normal(g, self.hidden, self.width)) for _ in range(PLACES)]
        same = torch.Generator(device).manual_seed(1)
        self.rank_q, kv = c.q_lora_rank, c.kv_width
        self.into = [Tiled.prepare(self.normal(same, self.rank_q + kv, self.hidden)) for _ in range(PLACES)]
        self.device, self.generator = device, g

    def normal(self, g: torch.Generator, *shape: int) -> Tensor:
        """A random bf16 weight that preserves the variance of its inputs."""
        return (torch.randn(*shape, generator=g, device=g.device) * shape[-1] ** -0.5).bfloat16()

    def layers(self, rows: int, *, begins: bool = False) -> Callable[[RankLinks | None], list[Tensor]]:
        """LAYERS pairs of products over random rows: the residual after each. begins: including `project_a`."""
        g, device = self.generator, self.device
        same = torch.Generator(device).manual_seed(rows)  # values that are equal on all ranks
        y = self.normal(g, rows, self.inputs)
        residual = torch.randn(rows, self.hidden, generator=same, device=device)
        gamma = torch.rand(self.hidden, generator=same, device=device) + 0.5
        logits = torch.randn(rows, self.experts, generator=same, device=device)
        pairs = choose_experts(logits, torch.zeros(self.experts, device=device), self.chosen, True, 1.0, None)
        form = self.down[0].form
        h = (torch.randn(rows * self.chosen, form.width, generator=g, device=device) * 0.1).half()
        shared_h = self.normal(g, rows, self.width)

        gamma_q = torch.rand(self.rank_q, generator=same, device=device) + 0.5
        x, squares = self.normal(same, rows, self.hidden), torch.ones(1, 8, device=device)

        def run(links: RankLinks | None) -> list[Tensor]:
            given, kept = residual, []
            for layer in range(LAYERS):
                place = layer % PLACES
                if begins:
                    project_a(x, squares, self.into[place], gamma_q, 1e-5, links)
                given = project_out(y, self.out[place], given, gamma, None, links, ATTENTION)[0]
                kept.append(given)
                given = experts_down(h, pairs, self.down[place], shared_h, self.shared[place], given, gamma, links)[0]
                kept.append(given)
            return kept

        return run

    def projected(self, rows: int) -> Callable[[RankLinks | None], tuple[Tensor, Tensor, Tensor]]:
        """`project_a` of random rows, equal on all ranks."""
        g = torch.Generator(self.device).manual_seed(rows)
        x, squares = self.normal(g, rows, self.hidden), torch.rand(3, 8, generator=g, device=self.device)
        gamma = torch.rand(self.rank_q, generator=g, device=self.device) + 0.5
        return lambda links: project_a(x, squares, self.into[rows % PLACES], gamma, 1e-5, links)


def times_of(rows: int, products: Products, group: GpuGroup) -> dict[str, float]:
    """Microseconds by name of the timed operation. Raises AssertionError if sums differ from those of NCCL, or among
    ranks.
    """
    links, device, hidden = group.links, products.device, products.hidden
    run = products.layers(rows)
    both_shots: tuple[Shots, Shots] = (1, 2)
    shots = {name: replace(links, shots=n) for name, n in zip(("one shot", "two shots"), both_shots, strict=True)}
    for given in shots.values() if rows >= BOTH else (links,):
        check(run, group, given)
    into: dict[str, float] = {}
    if rows <= MOST_SHARED:
        check_shared(products.projected(rows), group)
        whole, shared = (replace(links, projection=how) for how in ("whole", "divided"))
        begun = products.layers(rows, begins=True)
        into = {
            f"with project_a, {how}": timed(partial(begun, given), LAYERS, group)
            for how, given in (("whole", whole), ("shared", shared))
        }
    both, alone = (timed(partial(run, given), 2 * LAYERS, group) for given in (links, None))
    partials = torch.randn(rows, hidden, device=device)
    residual, gamma = torch.randn(rows, hidden, device=device), torch.rand(hidden, device=device)

    def sums(given: RankLinks | None) -> None:
        sites: tuple[Site, Site] = (ATTENTION, EXPERTS)
        for i in range(2 * LAYERS):
            all_reduce(partials, residual, gamma, None, given, sites[i % 2])

    part = torch.randn(rows, KIMI_K26.vocab_size // group.ranks, device=device)

    def gathers() -> None:
        for _ in range(LAYERS):
            all_gather(part, links)

    def nccl() -> None:
        for _ in range(LAYERS):
            dist.all_reduce(partials)

    by_shots = {
        f"{name}, {how}": timed(partial(work, given), 2 * LAYERS, group)
        for name, work in (("product with sum", run), ("sum_ranks", sums))
        for how, given in shots.items()
        if rows >= BOTH
    }
    result = {
        "product with sum": both,
        "product alone": alone,
        "added by a sum": both - alone,
        "sum_ranks": timed(partial(sums, links), 2 * LAYERS, group),
        **by_shots,
        "sum_ranks, one rank": timed(partial(sums, None), 2 * LAYERS, group),
        "gather_ranks": timed(gathers, LAYERS, group),
        "NCCL all-reduce": timed(nccl, LAYERS, group),
        **into,
    }
    group.check()
    return result


def check(run: Callable[[RankLinks | None], list[Tensor]], group: GpuGroup, links: RankLinks) -> None:
    """Checks that every residual is the previous one plus NCCL's sum of each rank's contribution, with equal bits on
    all ranks.
    """
    assert ROWS[-1] <= MOST_TOKENS, "a step with more rows is computed pair by pair"
    for _ in range(3):
        mine, together_ = run(None), run(links)
        torch.cuda.synchronize()
        group.check()
        # This rank's contribution is the difference of neighbouring residuals; the first residual has no predecessor.
        for i in range(1, len(mine)):
            added = (mine[i] - mine[i - 1]).double()
            dist.all_reduce(added)
            got = (together_[i] - together_[i - 1]).double()
            # Residuals are float32, so their differences have the rounding error of the residuals.
            error = (got - added).abs().max() / torch.maximum(mine[i].abs().max(), together_[i].abs().max())
            assert error < 2**-20, f"sum {i}: off by {error:.1e}"
        for residual in (together_[-1],):
            others = [torch.empty_like(residual) for _ in range(group.ranks)]
            dist.all_gather(others, residual)
            assert all(torch.equal(residual, other) for other in others), "the ranks' bits differ"


def check_shared(run: Callable[[RankLinks | None], tuple[Tensor, Tensor, Tensor]], group: GpuGroup) -> None:
    """Checks that the product divided over ranks equals the whole product, to rounding, with equal
    bits on all ranks.
    """
    links = replace(group.links, projection="divided")
    for _ in range(3):
        whole, shared = run(None), run(links)
        torch.cuda.synchronize()
        group.check()
        for name, one, of_all in zip(("queries", "squares", "latents"), whole, shared, strict=True):
            (a, b) = (
                (one.double().sum(0), of_all.double().sum(0)) if name == "squares" else (one.double(), of_all.double())
            )
            error = (a - b).abs().max() / a.abs().max()
            assert error < (1e-2 if name == "queries" else 1e-4), f"{name}: off by {error:.1e}"
            others = [torch.empty_like(of_all) for _ in range(group.ranks)]
            dist.all_gather(others, of_all)
            assert all(torch.equal(of_all, other) for other in others), f"{name}: the ranks' bits differ"
        # The buffers are used in rotation: each operation finishes before the next one of the layer.
        dist.barrier()


def timed(work: Callable[[], object], times: int, group: GpuGroup) -> float:
    """Microseconds of one of `times` equal operations in a graph: the median of replays that all ranks
    start together.
    """
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        work()
        graph.capture_end()
        taken: list[float] = []
        for _ in range(REPEATS):
            dist.barrier()
            begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()  # the ranks synchronise in it, even if they start at different times
            begun.record()
            graph.replay()
            ended.record()
            torch.cuda.synchronize()
            taken.append(begun.elapsed_time(ended) * 1000 / times)
    group.check()
    return sorted(taken)[len(taken) // 2]


if __name__ == "__main__":
    program(main)
