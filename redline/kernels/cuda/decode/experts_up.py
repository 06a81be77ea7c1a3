"""The first half of the routed experts, for the pairs of a decode step.     T tokens, D hidden, E experts, I width.

h = router weight * silu(gate x) * (up x). x is normed in this kernel: `x` times `rstd` of its token.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.cuda.decode.choose_experts import (
    MOST_PAIRS,
    MOST_SLOTS,
    MOST_TOKENS,
    SUMMED_PAIRS,
    SUMMED_TOKENS,
    Pairs,
    list_pairs,
)
from redline.kernels.cuda.kernel import CudaKernel, launch_record
from redline.kernels.cuda.layouts.records import (
    KINDS,
    MOST_INPUTS,
    MOST_KEPT,
    Kind,
    RecordForm,
    Records,
    random_experts,
)
from redline.kernels.cuda.layouts.tiled import PAD_K, padded
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

MOST_MEMORY = 227 * 1024  # maximum shared memory of a block, in bytes
EMULATED_BLOCKS = 5  # used instead of a GPU's number of multiprocessors
_HIGH = 0.0625  # factor of elements 2, 3, 6 and 7 of each eight; the reason is in blocks/int4_chains.cuh


def encode_h(h: Tensor, width: int, kind: Kind) -> Tensor:
    """h float32 [pairs, I] -> [pairs, width], padded with zeros, in the format that `experts_down` reads.

    f16 for INT4, elements 2 and 3 of each four divided by 16; f16 for NVFP4; bf16 for BF16.
    """
    full = F.pad(h, (0, width - h.shape[1]))
    if kind == "INT4":
        full = (full.unflatten(-1, (-1, 2, 2)) * torch.tensor([[1.0], [_HIGH]], device=h.device)).flatten(1)
    return full.to(torch.bfloat16 if kind == "BF16" else torch.float16)


def decode_h(h: Tensor, width: int, kind: Kind) -> Tensor:
    """The inverse of `encode_h`: h float32 [pairs, width]."""
    full = h.float()
    if kind == "INT4":
        full = (full.unflatten(-1, (-1, 2, 2)) / torch.tensor([[1.0], [_HIGH]], device=h.device)).flatten(1)
    return full[:, :width]


def padded_width(weights: Records) -> int:
    """The padded I of "up" records in h: a multiple of the rows of their tiles."""
    return 8 * weights.form.tiles


class ExpertsUpArgs(NamedTuple):
    """Multiplies each pair's normed token up, applies SwiGLU and the router weight."""

    x: Tensor  # bf16 [T, D padded to 128], not yet normed
    rstd: Tensor  # float32 [T or more]: 1 / rms of each token, the factor of x
    weights: Records  # "up" [E, 2 I, D], gate first
    pairs: Pairs  # the expert and the token of each row


def reference(args: ExpertsUpArgs) -> Tensor:
    """-> h [pairs, I padded], in the format of `encode_h`.

    INT4 and NVFP4 weights are multiplied by the normed x in float16, BF16 weights by x in float32.
    """
    x, weights, pairs = args.x, args.weights, args.pairs
    normed = x[:, : weights.inputs].float() * args.rstd[: x.shape[0], None]
    if weights.kind != "BF16":
        normed = normed.to(torch.float16).float()
    h = x.new_zeros(len(pairs), weights.outputs // 2, dtype=torch.float32)
    firsts = pairs.slot_first.tolist()
    for slot, expert in enumerate(pairs.slot_expert[: int(pairs.count)].tolist()):
        mine = slice(firsts[slot], firsts[slot + 1])
        gate, up = (normed[pairs.token[mine].long()] @ weights.dense(expert).T).chunk(2, -1)
        h[mine] = F.silu(gate) * up * pairs.weight[mine, None]
    return encode_h(h, padded_width(weights), weights.kind)


_Launch = launch_record("decode/experts_up.cu", "ExpertsUpLaunch")


@functools.cache
def kernel_of(form: RecordForm, x_inputs: int, tokens: int, pairs: int, slots: int) -> CudaKernel:
    """The kernel for records of this form, this width of x, and at most this number of tokens, pairs and slots."""
    stages = 3 if form.inputs <= MOST_KEPT else 2  # 16 KB per group of four warps, at Kimi's sizes
    defines = {"FORMAT": form.kind, "SLICES": form.slices, "SLICE": form.inputs, "PART": form.part}
    defines |= {"X": x_inputs, "TILES": form.tiles, "STAGES": stages}
    defines |= {"ROOM_TOKENS": tokens, "ROOM_PAIRS": pairs, "ROOM_SLOTS": slots}
    ring = (
        4 * stages * (max(4 * form.record_bytes, 4 * 8 * form.inputs) + 16)
    )  # a stage contains weights, or x of four tokens
    sums, lists = 16 * 2 * 512, 4 * (tokens + 2 * pairs + slots + 1)
    return CudaKernel("decode/experts_up.cu", "experts_up", _Launch, defines, ring + sums + lists)


def rooms(tokens: int, pairs: Pairs) -> tuple[int, int, int]:
    """The limits (tokens, pairs, slots) of the kernel for these sizes: rounded up, so that there are few kernels, and
    small kernels start sooner."""
    few = tokens <= SUMMED_TOKENS and len(pairs) <= SUMMED_PAIRS and pairs.most < SUMMED_PAIRS
    return (SUMMED_TOKENS, SUMMED_PAIRS, SUMMED_PAIRS) if few else (MOST_TOKENS, MOST_PAIRS, MOST_SLOTS)


def blocks(device: torch.device) -> int:
    """Number of blocks of a launch: one per multiprocessor; a few under emulation."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else EMULATED_BLOCKS


def cuda(args: ExpertsUpArgs) -> Tensor:
    """The reference's result; waits on the device for `pairs.ready` if `gates` makes the lists."""
    x, weights, pairs = args.x, args.weights, args.pairs
    form = weights.form
    dtype = torch.bfloat16 if weights.kind == "BF16" else torch.float16
    h = torch.empty(len(pairs), padded_width(weights), dtype=dtype, device=x.device)
    arguments = _Launch(
        weights=weights.data,
        x=x,
        rstd=args.rstd,
        pair_token=pairs.token,
        pair_weight=pairs.weight,
        slot_expert=pairs.slot_expert,
        slot_first=pairs.slot_first,
        count=pairs.count,
        ready=pairs.ready,
        h=h,
        tokens=x.shape[0],
        pairs=len(pairs),
        slots=pairs.most,
    )
    grid = min(blocks(x.device), -(-pairs.most * form.tiles * form.slices // 16))
    kernel_of(form, x.shape[1], *rooms(x.shape[0], pairs)).launch(arguments, grid)
    return h


def cuda_fits(args: ExpertsUpArgs) -> bool:
    """Whether the lists fit into shared memory (256 tokens; BF16: 64) and a slice of x into registers."""
    form, tokens, pairs = args.weights.form, args.x.shape[0], args.pairs
    return (
        lists_fit(tokens, pairs)
        and form.inputs <= MOST_INPUTS
        and args.x.shape[1] == padded(args.weights.inputs, PAD_K)
        and kernel_of(form, args.x.shape[1], *rooms(tokens, pairs)).shared <= MOST_MEMORY
    )


def lists_fit(tokens: int, pairs: Pairs) -> bool:
    """Whether the lists of a step fit into a block."""
    return tokens <= MOST_TOKENS and len(pairs) <= MOST_PAIRS and pairs.most <= MOST_SLOTS


def cost(args: ExpertsUpArgs) -> Cost:
    """Bytes of the experts that are actually chosen, once each, of x and of h; operations of each pair's matmul."""
    weights, pairs = args.weights, args.pairs
    chosen, width = pairs.ids.unique().numel(), weights.outputs // 2
    moved = weights.nbytes // weights.experts * chosen + args.x.nbytes + 2 * len(pairs) * width
    return Cost(moved, 2 * len(pairs) * weights.outputs * weights.inputs)


def some_pairs(g: torch.Generator, tokens: int, experts: int, chosen: int) -> Pairs:
    """Pairs with random experts and weights; the experts of a token are distinct."""
    ids = torch.stack([torch.randperm(experts, generator=g)[:chosen] for _ in range(tokens)]).to(torch.int32)
    return list_pairs(ids, torch.rand(tokens, chosen, generator=g), experts)


def random_x(g: torch.Generator, tokens: int, hidden: int) -> Tensor:
    """x bf16 [T, D padded to 128] of normal numbers."""
    x = torch.randn(tokens, hidden, generator=g).to(torch.bfloat16)
    return F.pad(x, (0, padded(hidden, PAD_K) - hidden))


def cases() -> Iterator[Case]:
    """Each format, K in 4, 8 and 16 slices, up to 256 tokens."""

    def make(kind: Kind, tokens: int, hidden: int, width: int, experts: int, chosen: int):
        def inputs(g: torch.Generator) -> ExpertsUpArgs:
            weight = random_experts(g, kind, "up", experts, 2 * width, hidden)
            rstd = torch.rand(padded(tokens, 8), generator=g) + 0.5
            pairs = some_pairs(g, tokens, experts, chosen)
            return ExpertsUpArgs(random_x(g, tokens, hidden), rstd, Records.prepare("up", weight), pairs)

        return inputs

    for kind in KINDS:
        for tokens in (1, 4, 9):
            yield Case(f"{kind} T={tokens} nano", make(kind, tokens, 320, 128, 16, 4))
        if kind != "BF16":
            yield Case(f"{kind} T=100 nano", make(kind, 100, 320, 128, 16, 4))
        for tokens in (1, 9):
            yield Case(f"{kind} T={tokens} cut from Kimi", make(kind, tokens, 7168, 32, 3, 2))
        yield Case(f"{kind} T=5 eight slices", make(kind, 5, 2112, 96, 4, 2))
        for tokens in (1, 8, 64) if kind == "BF16" else (1, 8, 64, 256):
            experts = 16 if kind == "BF16" else 64
            yield Case(f"{kind} T={tokens} Kimi", make(kind, tokens, 7168, 2048, experts, 8), small=False)


# INT4 codes are multiplied as 1024 + u, and 1032 times the sum of x is subtracted. The root mean square of codes is
# 4.6, so an error of the float32 sums counts 224 times. The tolerance is four roundings of them.
_RTOL = 4 * 224 * 2**-24
experts_up = Kernel(Op("experts_up", ExpertsUpArgs, reference, cost, cases, rtol=_RTOL), cuda, "cuda", cuda_fits)
