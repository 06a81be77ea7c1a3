"""What it saves that ranks read a part of every context each, by rows and context, on the GPUs of one host.

    python -m redline.bench.runs.divided_contexts --ranks 2 --save benchmarks/results/divided-contexts-h100.json

Every rank is a process with a GPU of its own. A few layers of Kimi's sizes with random weights decode over pages of
random latents, in graphs as they are served: once with all latents read by every rank for its own heads, once with a
part of them read by each for all heads. The difference a layer stands beside what `divides` goes by. Before a time
counts, what ranks have exchanged is compared with what one GPU computes of all parts by itself. Of hidden states the
middle row's error is told: a random router makes much of a rounding here and there.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.bench.step.depth import captured
from redline.bench.step.ranks import own_rank, ranks_of_gpus
from redline.kernels.hopper.decode.attend import attend
from redline.kernels.hopper.decode.gather_ranks import gather_queries
from redline.kernels.hopper.decode.share_latents import gain, share_latents
from redline.kernels.hopper.group import GpuGroup
from redline.kernels.inputs import Inputs
from redline.model.k2.forced_routing import draw
from redline.model.k2.hopper import GpuK2
from redline.model.k2.random_hopper import random_gpu_k2
from redline.model.k2.shapes import KIMI_K26
from redline.wire.job import PAGE_TOKENS

LAYERS, EXPERTS = 5, 32  # one layer is dense; attention is all that differs
ROWS = 1, 2, 4, 8, 16, 32, 64
CONTEXTS = 2048, 8192, 16384, 32768, 65536, 131072
MOST = 32 * 131072  # tokens of all rows
REPEATS = 30  # replays, of which the median counts
NEAR = 1e-2  # of latents, bf16: an error over the largest number


def inputs_of(model: GpuK2, rows: int, context: int) -> Inputs:
    """One token of each row behind `context` others, its pages in random order; experts are given."""
    device, c = model.device, model.config
    pages = -(-(context + 1) // PAGE_TOKENS)
    tables = torch.randperm(rows * pages, device=device).to(torch.int32).view(rows, pages)
    positions = torch.full((rows,), context, device=device)
    cos, sin = model.angles(positions)
    slots = torch.arange(rows, device=device)
    sizes = c.num_hidden_layers, rows, 1, c.n_routed_experts, c.num_experts_per_tok
    return Inputs(
        ids_T=torch.randint(c.vocab_size, (rows,), device=device),
        cos_T=cos,
        sin_T=sin,
        rows_T=tables[slots, positions // PAGE_TOKENS].long() * PAGE_TOKENS + positions % PAGE_TOKENS,
        chunks=(),
        tokens_Q=slots.to(torch.int32),
        slots_Q=slots.to(torch.int32),
        lengths_Q=(positions + 1).to(torch.int32),
        tables=tables,
        longest=context + 1,
        routing=draw(torch.Generator(device).manual_seed(0), *sizes),
    )


def microseconds(replay: Callable[[], object]) -> float:
    """The median by the GPU's own clock, after three that warm."""
    times: list[float] = []
    for turn in range(REPEATS + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        end.synchronize()
        if turn >= 3:
            times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def check(model: GpuK2, group: GpuGroup, inputs: Inputs, plane: Tensor) -> None:
    """What is exchanged, against all parts computed here. Raises AssertionError where it differs."""
    links, c, device = group.links, model.config, model.device
    heads, rows = c.num_attention_heads // links.ranks, inputs.ids_T.shape[0]
    own = slice(heads * links.rank, heads * (links.rank + 1))
    generator = torch.Generator(device).manual_seed(rows)  # the same on all ranks
    q_THW = torch.randn(rows, c.num_attention_heads, c.kv_width, device=device, generator=generator).bfloat16()
    assert inputs.longest is not None
    given = inputs.tokens_Q, inputs.slots_Q, inputs.lengths_Q, inputs.tables, plane, c.kv_width**-0.5, inputs.longest
    whole = gather_queries(q_THW[:, own].contiguous(), links)
    latents, lse = share_latents(*attend(whole, *given, rank=links.rank, ranks=links.ranks), links)
    group.check()
    assert torch.equal(whole, q_THW), "queries are not those that were sent"
    for rank in range(links.ranks):
        part, part_lse = (x[:, own] for x in attend(q_THW, *given, rank=rank, ranks=links.ranks))
        shares = part_lse.softmax(-1).nan_to_num(0.0)
        want = torch.einsum("qhs,qhsr->qhr", shares, part.float().where(shares[..., None] > 0, 0.0))
        torch.testing.assert_close(lse[:, :, rank], part_lse.logsumexp(-1), atol=1e-4, rtol=1e-5)
        error = (latents[:, :, rank].float() - want).abs().max() / want.abs().max().clamp(min=1e-9)
        assert error < NEAR, f"{rows} rows, rank {rank}'s part: latents differ by {error.item():.1e}"


def measured(model: GpuK2, group: GpuGroup, rows: int, context: int, planes: Tensor) -> dict[str, Any]:
    """One case. Raises AssertionError where something arrives otherwise than it was sent."""
    inputs = inputs_of(model, rows, context)
    check(model, group, inputs, planes[-1])
    links, times, hidden = group.links, dict[str, float](), dict[str, Tensor]()
    out = torch.empty(rows, model.config.hidden_size, dtype=torch.bfloat16, device=model.device)
    for contexts in ("whole", "divided"):
        group.links = replace(links, contexts=contexts)
        replay = captured(lambda: out.copy_(model.forward(inputs, planes)[0]), model.device)
        out.fill_(torch.nan)
        times[contexts] = microseconds(replay)
        group.check()
        hidden[contexts] = out.float()
    group.links = links
    errors = (hidden["whole"] - hidden["divided"]).abs().amax(1) / hidden["whole"].abs().amax(1)
    layers = model.config.num_hidden_layers
    return {
        "rows": rows,
        "context": context,
        "whole_us": round(times["whole"] / layers, 2),
        "divided_us": round(times["divided"] / layers, 2),
        "saved_us": round((times["whole"] - times["divided"]) / layers, 2),
        "predicted_us": round(gain(rows, model.config.num_attention_heads // group.ranks, group.ranks, context + 1), 2),
        "middle_error": round(errors.median().item(), 5),
    }


def main() -> None:
    """Measures all cases, and prints and saves them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs of this host, one process for each: 2, 4 or 8")
    parser.add_argument("--rows", type=count, nargs="+", default=ROWS)
    parser.add_argument("--context", type=count, nargs="+", default=CONTEXTS)
    parser.add_argument("--save", type=output, help="a JSON file for the times")
    given = parser.parse_args()
    config = replace(KIMI_K26, num_hidden_layers=LAYERS, n_routed_experts=EXPERTS, vocab_size=1024)
    cases: list[dict[str, Any]] = []
    with ranks_of_gpus(config, given.ranks) as group, torch.inference_mode():
        assert isinstance(group, GpuGroup), "one rank has nothing to divide"
        device = torch.device("cuda", group.rank)
        model = random_gpu_k2(config, range(LAYERS), device, group=group)
        pages = 1 + max(row * (1 + context // PAGE_TOKENS) for row, context in sizes(given.rows, given.context))
        planes = torch.empty(LAYERS, pages, PAGE_TOKENS, config.kv_width, dtype=torch.bfloat16, device=device)
        for plane in planes:
            plane.normal_()
        for rows, context in sizes(given.rows, given.context):
            case = measured(model, group, rows, context, planes)
            cases.append(case)
            if group.rank == 0:
                print("  ".join(f"{name} {value:>9,}" for name, value in case.items()), flush=True)
        gpu = torch.cuda.get_device_name(device)
    if own_rank() or not given.save:
        return
    record = {**provenance("torch"), "gpu": gpu, "ranks": given.ranks, "layers": LAYERS, "cases": cases}
    given.save.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))


def sizes(rows: list[int], contexts: list[int]) -> list[tuple[int, int]]:
    """The cases that fit."""
    return [(row, context) for context in contexts for row in rows if row * context <= MOST]


if __name__ == "__main__":
    program(main)
