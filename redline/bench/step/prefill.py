"""Milliseconds of one Kimi MoE layer over a prefill chunk on a GPU, and of its parts.

Weights and activations are random, so that the router spreads tokens independently. The floor is the operations divided
by the rate that this GPU's library reaches on a large bf16 matrix product. With tensor parallelism it counts one rank's
operations; the layer is then timed in several ways, and the NCCL communication is timed on its own: `scatters` (the
reduce-scatter of a rank's own rows) and `gathers` (all-gather), and `sums`, the all-reduces used if rows are not
divided among ranks.
"""

import contextlib
import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from redline.bench.step.depth import times_of
from redline.errors import RedlineError
from redline.kernels.cuda.block import LISTED, GpuBlock, prefill_block
from redline.kernels.cuda.layouts.tiled import TILE_N, Tiled, padded
from redline.kernels.cuda.linear import product
from redline.kernels.cuda.prefill import stream as streams
from redline.kernels.cuda.prefill.chunk_attention import attend_chunks
from redline.kernels.cuda.prefill.grouped import grouped_experts
from redline.kernels.cuda.prefill.rowwise import norm_rows, rotate_heads, split_a, swiglu
from redline.kernels.cuda.prefill.stream import PromptStream
from redline.kernels.group import ALONE, Group, all_reduce_min
from redline.kernels.inputs import Chunk, Inputs
from redline.messages.base import Record
from redline.messages.job import PAGE_TOKENS
from redline.model.k2.random_gpu import random_gpu_k2
from redline.model.k2.shapes import KIMI_K26
from redline.model.k2.shard import part_of

MODEL = replace(KIMI_K26, num_hidden_layers=2, vocab_size=1024)  # the second layer is measured
LAYERS = 4  # layers run in sequence per timing: over ranks a layer overlaps the previous one's communication
PEER_MS = {8192: 18.1}  # ms by tokens: vLLM 0.33 on an NVIDIA H200, 2026-11-28, per MoE layer, prompt from its start
COMPARED = 2  # layers before rows are compared: random weights amplify rounding from layer to layer
FAR = 0.05  # relative error of a row: bf16 partial sums cause up to 0.01, a wrong token's row more than 0.5
FLOAT_EXACT = 1 << 24  # integers up to this are exact in float32, the type that `least` compares in


def flops(tokens: int, start: int, ranks: int = 1) -> dict[str, int]:
    """Operations of one rank in one MoE layer over tokens [start, start + tokens) of a prompt, by part."""
    c = part_of(KIMI_K26, ranks)
    heads, d, width = c.num_attention_heads, c.hidden_size, c.moe_intermediate_size
    seen = tokens * start + tokens * (tokens + 1) // 2
    qk, v = c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
    a, q, o = c.q_lora_rank + c.kv_width, heads * qk * c.q_lora_rank, heads * v * d
    unfold = (start + tokens) * heads * (c.qk_nope_head_dim + v) * c.kv_lora_rank
    return {
        "products": 2 * tokens * (d * a + q + o + d * (c.n_routed_experts + 3 * width)),
        "attention": 2 * heads * seen * (qk + v) + 2 * unfold,
        "experts": 6 * tokens * c.num_experts_per_tok * d * width,
    }


class PrefillCase(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A measurement of one layer over tokens [start, start + tokens) of a prompt. Milliseconds are medians.

    parts, part_tflops: of each part on its own; parts without counted operations have no rate. With several ranks
    only: ms_by_parts is the time with rows divided among ranks, in 1, 2 or 4 parts; ms_whole with all rows on every
    rank; apart is the relative error of divided rows against whole ones (the bound for half of the rows, for 99 %, for
    all); same_bits: whether all ranks have the same bits.
    """

    tokens: int
    start: int
    ms: float
    ms_by_parts: dict[str, float] | None = None
    ms_whole: float | None = None
    apart: list[float] | None = None
    same_bits: bool | None = None
    floor_ms: float
    tflops: float
    parts: dict[str, float]
    part_tflops: dict[str, float]

    def part_floors(self, ranks: int, flops_per_s: float) -> dict[str, float]:
        """Milliseconds of one rank's operations in each part at the rate of the floor."""
        return {name: count / flops_per_s * 1e3 for name, count in flops(self.tokens, self.start, ranks).items()}


@contextlib.contextmanager
def streams_of(**constants: int) -> Generator[None]:
    """Replaces constants of `prefill/stream.py` by name within the context."""
    kept = {name: getattr(streams, name) for name in constants}
    try:
        for name, value in constants.items():
            setattr(streams, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(streams, name, value)


class PrefillLayer:
    """An MoE block with `count` input tokens of one prompt.

    plane: the layer's KV pages [pages, 64, kv width]. group: the ranks, if the block is one rank's part.
    """

    def __init__(self, w: GpuBlock, inputs: Inputs, plane: Tensor, count: int, group: Group = ALONE) -> None:
        self.w, self.inputs, self.plane, self.group = w, inputs, plane, group
        self.residual = torch.randn(count, w.mlp_norm.shape[0], device="cuda")

    def whole(self, layers: int = LAYERS, forced_TK: Tensor | None = None) -> PromptStream:
        """Enqueues the layer over all tokens `layers` times in sequence, as the model runs its layers.

        forced_TK: see `prefill_block`.
        """
        stream = PromptStream.begin(len(self.residual), lambda rows: self.residual[rows].clone(), self.group)
        for _ in range(layers):
            stream = prefill_block(stream, self.w, self.inputs, self.plane, forced_TK)
        return stream.added()

    def compared(self) -> tuple[list[float], bool]:
        """The relative error of divided rows against rows that are whole on every rank, after COMPARED layers: the
        bounds for half of the rows, for 99 of 100, and for all. And whether all ranks have the same bits in the
        residual and in their KV pages.

        Experts are forced, since rounding decides between two experts with close scores.
        """
        assert self.w.experts is not None
        count, chosen = self.w.experts.bias_E.shape[0], self.w.experts.chosen
        forced_TK = torch.rand(len(self.residual), count, device="cuda").topk(chosen).indices.to(torch.int32)

        def residual() -> Tensor:
            stream = self.whole(COMPARED, forced_TK)
            return stream.whole(part.residual for part in stream.parts)

        divided = residual()
        same = all(_same_on_all(self.group, tensor) for tensor in (divided, self.plane))
        with streams_of(DIVIDED=len(self.residual) + 1):
            whole = residual()
        apart = ((divided - whole).square().sum(1) / whole.square().sum(1)).sqrt()
        return [float(torch.quantile(apart, share)) for share in (0.5, 0.99, 1.0)], same

    def parts(self) -> dict[str, Callable[[], object]]:
        """Name -> a callable that enqueues this part on its own, on activations computed here.

        Raises AssertionError for a dense block.
        """
        w, i = self.w, self.inputs
        assert w.experts is not None
        assert not isinstance(w.down, Tiled)
        attention, down, e = w.attention, w.down, w.experts
        _, x = norm_rows(self.residual, None, w.attention_norm, w.eps)
        a = product(x, attention.w_a, torch.float32)
        norms = attention.q_norm, attention.kv_norm

        def split() -> Tensor:
            return split_a(a, *norms, i.cos_T, i.sin_T, i.rows_T, self.plane, attention.eps)

        q_a = split()
        q = product(q_a, attention.w_q, torch.bfloat16).view(x.shape[0], attention.heads, attention.width)
        o = torch.empty(x.shape[0], attention.heads, attention.w_uv.shape[1], dtype=torch.bfloat16, device="cuda")
        both = product(x, w.gates, torch.float32)
        count = e.bias_E.shape[0]
        first = padded(count, TILE_N)
        h = swiglu(both, first, w.width)
        scores = both[:, :count].sigmoid()
        ids = (scores + e.bias_E).topk(e.chosen).indices
        weights, ids = scores.gather(1, ids), ids.to(torch.int32)

        ranks, group = self.group.ranks, self.group
        divided = ranks > 1 and x.shape[0] >= streams.DIVIDED * ranks
        own = -(-x.shape[0] // ranks) if divided else x.shape[0]

        def rows() -> None:
            norm_rows(self.residual[:own], None, w.attention_norm, w.eps)
            split()
            rotate_heads(q, i.cos_T, i.sin_T)
            norm_rows(self.residual[:own], None, w.mlp_norm, w.eps)
            swiglu(both, first, w.width)
            (both[:, :count].sigmoid() + e.bias_E).topk(e.chosen)

        def products() -> None:
            product(x[:own], attention.w_a, torch.float32)
            product(q_a, attention.w_q, torch.bfloat16)
            product(o.flatten(1), w.o_proj, torch.bfloat16)
            product(x, w.gates, torch.float32)
            h[:, : w.width] @ down.dense().T  # pyright: ignore[reportUnusedExpression]

        parts: dict[str, Callable[[], object]] = {
            "products": products,
            "rows": rows,
            "attention": lambda: attend_chunks(
                q, attention, w.softmax_scale, i.chunks, i.rows_T, i.tables, self.plane, o
            ),
            "experts": lambda: grouped_experts(x, ids, weights, e.up, e.down),
        }
        if ranks == 1:
            return parts
        partial = torch.zeros(own * ranks if divided else own, w.mlp_norm.shape[0], dtype=torch.bfloat16, device="cuda")
        wider = partial.float()

        def sums() -> None:
            group.all_reduce(partial)
            group.all_reduce(wider)

        parts["sums"] = sums
        if not divided:
            return parts
        gathered = [(each[:own], each.new_empty(own * ranks, each.shape[1])) for each in (a, x)]

        def scatters() -> None:
            group.begin_reduce_scatter(partial)()
            group.begin_reduce_scatter(partial)()

        def gathers() -> None:
            for mine, whole in gathered:
                group.begin_all_gather_rows(mine, whole)()

        return {**parts, "scatters": scatters, "gathers": gathers}


def _same_on_all(group: Group, tensor: Tensor) -> bool:
    number = int(tensor.view(torch.int16).long().sum()) % FLOAT_EXACT
    lowest, beyond_highest = (all_reduce_min(group, each, tensor.device) for each in (number, FLOAT_EXACT - number))
    return lowest == FLOAT_EXACT - beyond_highest


def inputs_of(tokens: int, start: int, angles: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Inputs:
    """The inputs of a block in a step over tokens [start, start + tokens) of one prompt, with pages in random order.

    angles: maps positions to cos and sin, as in the model.
    """
    pages = -(-(start + tokens) // PAGE_TOKENS)
    tables = torch.randperm(pages, device="cuda").to(torch.int32)[None]
    positions = torch.arange(start, start + tokens, device="cuda")
    cos, sin = angles(positions)
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    return Inputs(
        ids_T=torch.zeros(tokens, dtype=torch.int64, device="cuda"),
        cos_T=cos,
        sin_T=sin,
        rows_T=tables[0, positions // PAGE_TOKENS].long() * PAGE_TOKENS + positions % PAGE_TOKENS,
        chunks=(Chunk(0, tokens, start, 0),),
        tokens_Q=none,
        slots_Q=none,
        lengths_Q=none,
        tables=tables,
    )


def prefill_cases(
    group: Group, device: torch.device, tokens: Sequence[int], start: Sequence[int], repeats: int, flops_per_s: float
) -> Iterator[PrefillCase]:
    """Builds the layer, or this rank's part of it in `group`, and measures each of tokens x start, in this order.

    Use it in torch's inference mode.
    """
    model = random_gpu_k2(MODEL, (0, 1), device, group=group)
    for count in tokens:
        for first in start:
            inputs = inputs_of(count, first, model.angles)
            plane = torch.randn(inputs.tables.shape[1], PAGE_TOKENS, MODEL.kv_width, device=device).bfloat16()
            layer = PrefillLayer(model.gpu_blocks[1], inputs, plane, count, group)
            yield measured(layer, count, first, repeats, flops_per_s)


def _ms(work: Callable[[], object], repeats: int) -> float:
    return statistics.median(times_of(work, repeats, torch.device("cuda")))


def measured(layer: PrefillLayer, tokens: int, start: int, repeats: int, flops_per_s: float) -> PrefillCase:
    """Measures one case: the whole layer, with several ranks in each way, then each part on its own."""
    counted = flops(tokens, start, layer.group.ranks)
    ms = _ms(layer.whole, repeats) / LAYERS
    by_parts: dict[str, float] | None = None
    whole_ms = apart = same = None
    if layer.group.ranks > 1:
        by_parts = {}
        for count in (1, 2, 4):
            with streams_of(PARTS=count, PART_ROWS=LISTED, DIVIDED=LISTED + 1):
                by_parts[str(count)] = round(_ms(layer.whole, repeats) / LAYERS, 3)
        with streams_of(DIVIDED=tokens + 1):
            whole_ms = round(_ms(layer.whole, repeats) / LAYERS, 3)
        found, same = layer.compared()
        apart = [round(each, 4) for each in found]
    parts = {name: _ms(work, repeats) for name, work in layer.parts().items()}
    total = sum(counted.values())
    return PrefillCase(
        tokens=tokens,
        start=start,
        ms=round(ms, 3),
        ms_by_parts=by_parts,
        ms_whole=whole_ms,
        apart=apart,
        same_bits=same,
        floor_ms=round(total / flops_per_s * 1e3, 3),
        tflops=round(total / ms / 1e9, 1),
        parts={name: round(part, 3) for name, part in parts.items()},
        part_tflops={name: round(counted[name] / part / 1e9, 1) for name, part in parts.items() if name in counted},
    )


def check(case: PrefillCase) -> None:
    """Raises RedlineError if ranks have different bits, or if a row differs by more than rounding explains."""
    if case.same_bits is False:
        raise RedlineError(f"{case.tokens} tokens: the ranks computed different bits")
    if case.apart is not None and not case.apart[-1] < FAR:
        raise RedlineError(
            f"{case.tokens} tokens: a row has a relative error of {case.apart[-1]} against undivided rows"
        )
