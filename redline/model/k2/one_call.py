"""K2's forward pass in one call on a CPU, with its test cases; bit-identical to `forward`, op by op."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from redline.kernels.cpu.blocks import transformer as one_call
from redline.kernels.cpu.blocks.block import Block, Moe
from redline.kernels.cpu.blocks.transformer import Transformer, TransformerArgs
from redline.kernels.cpu.panels import Experts, Matrix, panels_of, prepare_experts
from redline.kernels.inputs import Chunk, Inputs
from redline.kernels.kernel import Kernel
from redline.messages.job import PAGE_TOKENS
from redline.model.k2.forward import forward
from redline.ops.formats import quantize_int4
from redline.ops.linear import LinearArgs, linear
from redline.ops.mla import FP8, NANO, TINY, random_weights
from redline.ops.op import Case, Cost, Op


def cost(step: TransformerArgs) -> Cost:
    """Bytes moved and operations of a step; only the routed experts of one token are counted."""
    planes, weights, inputs, layers, asked = step
    tokens, d = inputs.count, weights.width
    residual_TD = torch.empty(tokens, d, dtype=weights.dtype, device="meta")
    row_bytes = d * weights.embedding_VD.element_size()
    total = Cost(tokens * row_bytes + residual_TD.nbytes * (2 + len(layers)) + weights.norm.nbytes)
    for block_, plane in zip(weights.blocks, planes.unbind(0), strict=True):
        total += _block_cost(residual_TD, block_, inputs, plane)
    if asked:
        total += linear.cost(LinearArgs(residual_TD[: len(asked)], weights.head))
    return total


def _block_cost(residual_TD: Tensor, weights: Block, inputs: Inputs, plane: Tensor) -> Cost:
    """The weights (counting only the routed experts of one token) and each query's and chunk's context."""
    tokens = residual_TD.shape[0]
    w, moe_ = weights.attention, weights.experts
    dense = (weights.o_proj, weights.shared_gate_up, weights.shared_down)
    read = w.nbytes + sum(matrix.nbytes for matrix in dense)
    inner = w.w_a.shape[0] * w.w_a.shape[1] + w.w_q.shape[0] * w.w_q.shape[1] + w.heads * w.rank * (w.nope + w.value)
    inner += sum(matrix.shape[0] * matrix.shape[1] for matrix in dense)
    if moe_ is not None:
        experts, d, width = moe_.down.shape
        read += moe_.router.nbytes + (moe_.gate_up.nbytes + moe_.down.nbytes) // experts * moe_.chosen
        inner += moe_.chosen * 3 * d * width + experts * d
    context = int(inputs.lengths_Q.sum()) + sum(chunk.start + chunk.count for chunk in inputs.chunks)
    moved = read + context * plane.shape[-1] * plane.element_size() + 4 * residual_TD.nbytes
    return Cost(moved, 2 * tokens * inner)


def _example(
    g: torch.Generator, dims: tuple[int, ...], experts: int, chunk: int, lengths: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Block, Inputs, Tensor]:
    """Random arguments. Slot 0: a chunk of a prompt that begins at 64; slots from 1: queries."""
    d, width, count = dims[0], 64, chunk + len(lengths)
    w = panels_of(random_weights(g, *dims))

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g) * shape[-1] ** -0.5).to(torch.bfloat16)

    def routed(*shape: int) -> Experts:
        return prepare_experts(weight(*shape) if dtype == torch.float32 else quantize_int4(weight(*shape)))

    moe_ = None
    if experts:
        router, bias = Matrix.prepare(weight(experts, d)), torch.randn(experts, generator=g) * 0.1
        up, down = routed(experts, 2 * width, d), routed(experts, d, width)
        moe_ = Moe(router, bias, up, down, 4, True, 2.5)
    norms = torch.rand(2, d, generator=g) + 0.5
    block_ = Block(
        *(norms[0], w, Matrix.prepare(weight(d, w.heads * w.value)), norms[1]),
        *(Matrix.prepare(weight(2 * width, d)), Matrix.prepare(weight(d, width)), moe_, 1e-5, 0.1),
    )
    contexts = (64 + chunk, *lengths)
    pages = -(-max(contexts) // PAGE_TOKENS)
    tables = torch.randperm(len(contexts) * pages, generator=g).to(torch.int32).view(-1, pages)
    plane = torch.randn(tables.numel(), PAGE_TOKENS, w.rank + w.rope, generator=g).to(dtype)
    places = [(0, 64 + i) for i in range(chunk)] + [(1 + i, length - 1) for i, length in enumerate(lengths)]
    rows = [int(tables[slot, at // PAGE_TOKENS]) * PAGE_TOKENS + at % PAGE_TOKENS for slot, at in places]
    angle = torch.rand(count, w.rope // 2, generator=g) * 6.28
    step = Inputs(
        ids_T=torch.zeros(count, dtype=torch.int64),
        cos_T=angle.cos(),
        sin_T=angle.sin(),
        rows_T=torch.tensor(rows),
        chunks=(Chunk(0, chunk, 64, 0),) if chunk else (),
        tokens_Q=torch.arange(chunk, count, dtype=torch.int32),
        slots_Q=torch.arange(1, 1 + len(lengths), dtype=torch.int32),
        lengths_Q=torch.tensor(lengths, dtype=torch.int32),
        tables=tables,
    )
    return torch.randn(count, d, generator=g), torch.randn(count, d, generator=g), block_, step, plane


def cases() -> Iterator[Case]:
    """Test cases: sizes of nano and smaller, chunks and queries, three dtypes of pages."""

    def make(dims: tuple[int, ...], chunk: int, lengths: tuple[int, ...], dtype: torch.dtype, layers: tuple[int, ...]):
        def inputs(g: torch.Generator) -> TransformerArgs:
            _, _, first, step, plane = _example(g, dims, 0, chunk, lengths, dtype)
            rest = [_example(g, dims, 8, chunk, lengths, dtype)[2] for _ in range(2)]
            planes = torch.stack([plane, *(torch.randn(plane.shape, generator=g).to(dtype) for _ in rest)])
            d, vocabulary, tokens = dims[0], 500, chunk + len(lengths)
            table, head = torch.randn(2, vocabulary, d, generator=g).to(torch.bfloat16)
            norm = torch.rand(d, generator=g) + 0.5
            weights = Transformer(table, (first, *rest), norm, Matrix.prepare(head), 1e-5)
            step = replace(step, ids_T=torch.randint(vocabulary, (tokens,), generator=g))
            asked = list(range(max(0, chunk - 1), tokens)) if lengths else []
            return TransformerArgs(planes, weights, step, layers, asked)

        return inputs

    yield Case("T=1 nano", make(NANO, 0, (70,), torch.bfloat16, ()))
    yield Case("a chunk and queries, states kept, nano", make(NANO, 20, (1, 65), torch.bfloat16, (3, 0, 2)))
    yield Case("a chunk and queries, nano fp8 pages", make(NANO, 20, (1, 65), FP8, ()))
    yield Case("queries, the last state kept, tiny float32 pages", make(TINY, 0, (5, 130), torch.float32, (3,)))
    yield Case("nothing is asked for, tiny", make(TINY, 20, (), torch.bfloat16, (1,)))


transformer = Kernel(
    Op("transformer", TransformerArgs, forward, cost, cases, rtol=0.0, writes=("planes",)),
    one_call.run,
    "cpu",
    one_call.fits,
)
