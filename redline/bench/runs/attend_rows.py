"""What decode attention takes where rows verify drafts: their tokens' heads in blocks together, and each token apart.

    python -m redline.bench.runs.attend_rows --save benchmarks/results/attend-rows-h100.json

One row of 1 to 4 tokens behind a context, with the heads that a GPU has where 4, 2 or 1 share Kimi's. `attend` alone,
and with `unabsorb` behind it, in graphs of several layers whose pages and weights lie apart: none is in a cache.
Each time stands beside the model's that `plan` goes by, and beside the floor: the context read once at the memory's
measured rate. Ways: `apart` and `together` are the best of their kind by the model, whichever `plan` takes; `wide` is
one token in blocks of 64, half empty or more. Before a time counts, what comes out, over poisoned memory, is compared
with attention in float32. It needs one GPU and a minute; cases for which there is no time left are left out, and said.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from redline import clock
from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.bench.runs.divided_contexts import microseconds
from redline.bench.step.depth import captured
from redline.errors import ConfigError
from redline.kernels.hopper.decode.attend import (
    LATENT,
    ROPE,
    AttendArgs,
    Plan,
    attend_as,
    modelled,
    plan,
    splits_of,
)
from redline.kernels.hopper.decode.attend import microseconds as attend_model
from redline.kernels.hopper.decode.unabsorb import unabsorb
from redline.kernels.hopper.layouts.tiled import Tiled
from redline.kernels.rates import WORKING_SET_BYTES, read_rate
from redline.wire.job import PAGE_TOKENS

HEADS = 16, 32, 64
TOKENS = 1, 2, 3, 4
CONTEXTS = 10240, 32768, 1024, 131072  # the first are measured first
BLOCKS = 16, 32, 64  # rows of a block
VALUE = 128  # of a head of Kimi's
LAYERS = 64  # of a graph, at most
POOL = 8448  # pages: four contexts of 131,072 tokens, 620 MB
SCALE = (LATENT + ROPE) ** -0.5
LIMIT_S = 50  # after which no case begins
NEAR = 2e-2  # of outputs, bf16: an error over the largest number


class Case(NamedTuple):
    """One row."""

    heads: int
    tokens: int
    context: int  # tokens before them

    @property
    def longest(self) -> int:
        """Tokens that the last one sees."""
        return self.context + self.tokens

    @property
    def pages(self) -> int:
        """Of its context."""
        return -(-self.longest // PAGE_TOKENS)


class Memory:
    """What all cases read: pages in random order, and some layers' W_UV for each number of heads."""

    def __init__(self, device: torch.device, pages: int, heads: Sequence[int], layers: int) -> None:
        self.device, self.layers = device, layers
        self.plane = self._random(pages, PAGE_TOKENS).to(torch.bfloat16)
        self.order = torch.randperm(pages, device=device).to(torch.int32)
        self.w_uv = {each: [self._weight(each) for _ in range(max(1, layers // 3))] for each in heads}
        self.newest = torch.nn.functional.normalize(torch.randn(LATENT + ROPE, device=device), dim=0)

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, LATENT + ROPE, device=self.device)

    def _weight(self, heads: int) -> Tiled:
        weight = torch.randn(heads, VALUE, LATENT, device=self.device) * LATENT**-0.5
        return Tiled.prepare(weight.to(torch.bfloat16))

    def steps(self, case: Case) -> list[tuple[AttendArgs, Tiled]]:
        """A row for each layer, of pages that no other has.

        Queries look for one direction, which the row's own tokens have: each weighs about as much as all others, so a
        query that sees one token too many, or too few, gives something else.
        """
        count, device = case.tokens, self.device
        layers, weights = min(self.layers, len(self.order) // case.pages), self.w_uv[case.heads]
        tables = self.order[: layers * case.pages].view(layers, case.pages)
        own = torch.arange(case.context, case.longest, device=device)
        q_THW = self._random(count, case.heads) + SCALE**-1 * self.newest
        rows_LTW = self._random(layers, count) + math.log(case.longest) * self.newest
        self.plane[tables[:, own // PAGE_TOKENS].long(), own % PAGE_TOKENS] = rows_LTW.to(torch.bfloat16)
        steps: list[tuple[AttendArgs, Tiled]] = []
        for layer in range(layers):
            args = AttendArgs(
                q_THW=q_THW.to(torch.bfloat16),
                tokens_Q=torch.arange(count, dtype=torch.int32, device=device),
                slots_Q=torch.full((count,), layer, dtype=torch.int32, device=device),
                lengths_Q=(own + 1).to(torch.int32),
                tables=tables,
                plane=self.plane,
                scale=SCALE,
                max_length=case.longest,
                positions=count,
            )
            steps.append((args, weights[layer % len(weights)]))
        return steps


def ways(case: Case) -> dict[str, Plan]:
    """The best of each kind by the model. `together` is there where a row takes fewer blocks so."""
    kinds = {"apart": plan(case.tokens, case.heads, case.longest)}
    if together := list(_of_blocks(case, case.tokens)):
        kinds["together"] = _best(case, together)
    if case.tokens == 1 and case.heads <= 32:
        kinds["wide"] = _best(case, [Plan(64, splits) for splits in splits_of(1, case.pages)])
    return kinds


def _of_blocks(case: Case, together: int) -> Iterator[Plan]:
    for rows in BLOCKS:
        blocks = -(-together * case.heads // rows)
        if blocks < together * -(-case.heads // rows):
            for splits in splits_of(blocks, case.pages):
                yield Plan(rows, splits, together)


def _best(case: Case, plans: Sequence[Plan]) -> Plan:
    return min(plans, key=lambda way: modelled(way, case.tokens, case.heads, case.pages))


def check(args: AttendArgs, way: Plan, w_uv: Tiled) -> float:
    """The largest error of a row's outputs over their largest number. Raises AssertionError where that is not near."""
    got = unabsorb(*attend_as(args, way), w_uv)[:, : args.q_THW.shape[1] * VALUE]
    want = plain_attention(args, w_uv)
    error = (got.float() - want).abs().max() / want.abs().max()
    assert error < NEAR, f"{way} of {args.lengths_Q.tolist()}: outputs differ by {error.item():.1e}"
    return error.item()


def plain_attention(args: AttendArgs, w_uv: Tiled) -> Tensor:
    """float32 [Q, H V]: softmax over all rows at once, of a step whose queries are of one slot."""
    rows_SW = args.plane[args.tables[int(args.slots_Q[0])].long()].flatten(0, 1)[: args.max_length].float()
    outputs: list[Tensor] = []
    for q_HW, length in zip(args.q_THW.float(), args.lengths_Q.tolist(), strict=True):
        chances_HS = (q_HW @ rows_SW[:length].T * args.scale).softmax(-1)
        latents_HR = chances_HS @ rows_SW[:length, : rows_SW.shape[1] - ROPE]
        outputs.append(torch.einsum("hr,hvr->hv", latents_HR, w_uv.dense().float()).flatten())
    return torch.stack(outputs)


def poison(args: AttendArgs, way: Plan) -> None:
    """Leaves NaN in the memory that torch gives out next for partial latents."""
    queries, heads, width = args.q_THW.shape
    torch.full((queries, heads, way.splits, width - ROPE), torch.nan, dtype=torch.bfloat16, device=args.q_THW.device)


def measured(memory: Memory, case: Case, bytes_per_s: float) -> Iterator[dict[str, Any]]:
    """A record for each way. Raises AssertionError where what comes out is not attention."""
    steps = memory.steps(case)
    last, last_w_uv = steps[-1]
    chosen = plan(case.tokens, case.heads, case.longest, case.tokens)
    for name, way in ways(case).items():
        poison(last, way)
        error = check(last, way, last_w_uv)

        def attention(way: Plan = way) -> None:
            for args, _ in steps:
                attend_as(args, way)

        def both(way: Plan = way) -> None:
            for args, w_uv in steps:
                unabsorb(*attend_as(args, way), w_uv)

        alone_us, both_us = (microseconds(captured(work, memory.device)) / len(steps) for work in (attention, both))
        sizes = case.tokens, case.heads, case.pages
        yield {
            **case._asdict(),
            "way": name,
            "chosen": way == chosen,
            "block_rows": way.rows,
            "splits": way.splits,
            "attend_us": round(alone_us, 2),
            "attend_model_us": round(attend_model(way, *sizes), 2),
            "attend_unabsorb_us": round(both_us, 2),
            "model_us": round(modelled(way, *sizes), 2),
            "floor_us": round(case.longest * (LATENT + ROPE) * 2 / bytes_per_s * 1e6, 2),
            "error": round(error, 5),
        }


def main() -> None:
    """Measures all cases, and prints and saves them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=count, nargs="+", default=HEADS)
    parser.add_argument("--tokens", type=count, nargs="+", default=TOKENS, help="of the row")
    parser.add_argument("--context", type=count, nargs="+", default=CONTEXTS)
    parser.add_argument("--save", type=output, help="a JSON file for the times")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise ConfigError("attention is timed on a GPU, and torch sees none")
    began, device = clock.monotonic(), torch.device("cuda")
    bytes_per_s = read_rate(device, 8 * WORKING_SET_BYTES, 3)
    cases = [
        Case(heads, tokens, context) for context in given.context for heads in given.heads for tokens in given.tokens
    ]
    pages = max(POOL, max(case.pages for case in cases))
    memory, records, left_out = Memory(device, pages, given.heads, LAYERS), list[dict[str, Any]](), list[Case]()
    with torch.inference_mode():
        for case in cases:
            if clock.monotonic() - began > LIMIT_S:
                left_out.append(case)
                continue
            for record in measured(memory, case, bytes_per_s):
                records.append(record)
                print("  ".join(f"{name} {value!s:>9}" for name, value in record.items()), flush=True)
    for case in left_out:
        print(f"left out, for want of time: {case}")
    if given.save:
        saved = {
            **provenance("torch"),
            "gpu": torch.cuda.get_device_name(device),
            "read_tb_s": round(bytes_per_s / 1e12, 3),
            "seconds": round(clock.monotonic() - began, 1),
            "left_out": left_out,
            "cases": records,
        }
        given.save.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=1))


if __name__ == "__main__":
    program(main)
