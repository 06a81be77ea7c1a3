"""The second half of the routed experts, pair by pair, for up to 256 tokens.     T tokens, K chosen, D hidden, I width.

routed = sum over a token's pairs of down[expert] h. `experts_down` sums in shared memory, which is full at 64 tokens;
this kernel writes each pair's row, and a second launch adds the K rows of a token in the order of its choices.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cuda.decode.choose_experts import SLOT_PAIRS, Pairs
from redline.kernels.cuda.decode.experts_up import blocks, decode_h, encode_h, lists_fit, rooms, some_pairs
from redline.kernels.cuda.kernel import CudaKernel, launch_record
from redline.kernels.cuda.layouts.records import Kind, RecordForm, Records, random_experts
from redline.kernels.cuda.prefill.grouped import add_pairs
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

_GROUPS, _STAGES = 4, 2  # groups of four warps; stages of the ring buffer of each


class PairsDownArgs(NamedTuple):
    """Multiplies the pairs' hidden rows down and sums those of each token."""

    h: Tensor  # f16 [pairs, I padded], from `experts_up` in its format
    pairs: Pairs  # the expert and the token of each row
    weights: Records  # "down" [E, D, I], INT4 or NVFP4


def reference(args: PairsDownArgs) -> Tensor:
    """-> routed float32 [T, D]; each pair's row is rounded to bf16 before the sum."""
    pairs, weights = args.pairs, args.weights
    width, firsts = decode_h(args.h, weights.inputs, weights.kind), pairs.slot_first.tolist()
    routed = width.new_zeros(pairs.ids.shape[0], weights.outputs)
    for slot, expert in enumerate(pairs.slot_expert[: int(pairs.count)].tolist()):
        mine = slice(firsts[slot], firsts[slot + 1])
        rows = (width[mine] @ weights.dense(expert).T).to(torch.bfloat16).float()
        routed.index_add_(0, pairs.token[mine].long(), rows)
    return routed


_Launch = launch_record("decode/pairs_down.cu", "PairsDownLaunch")


@functools.cache
def kernel_of(form: RecordForm, pairs: int, slots: int) -> CudaKernel:
    """The kernel for records of this form, and at most `pairs` pairs and `slots` slots."""
    defines = {"FORMAT": form.kind, "SLICES": form.slices, "SLICE": form.inputs, "SLABS": form.tiles // 4}
    defines |= {"STAGES": _STAGES, "ROOM_PAIRS": pairs, "ROOM_SLOTS": slots}
    stage = max(4 * form.record_bytes, SLOT_PAIRS * 2 * form.inputs)
    shared = _GROUPS * _STAGES * (stage + 16) + 16 * 2 * 512 + 4 * (pairs + slots + 1)
    return CudaKernel("decode/pairs_down.cu", "pairs_down", _Launch, defines, shared)


def cuda(args: PairsDownArgs) -> Tensor:
    """The reference's result. The preceding launch must be `experts_up`: its blocks have read all of `pairs` before
    this grid may begin."""
    pairs, form = args.pairs, args.weights.form
    y = torch.empty(len(pairs), form.tiles * 16, dtype=torch.bfloat16, device=args.h.device)
    _, most_pairs, most_slots = rooms(pairs.ids.shape[0], pairs)
    arguments = _Launch(
        weights=args.weights.data,
        h=args.h,
        origin=pairs.origin,
        slot_expert=pairs.slot_expert,
        slot_first=pairs.slot_first,
        count=pairs.count,
        y=y,
        pairs=len(pairs),
        slots=pairs.most,
    )
    teams = _GROUPS // form.slices
    grid = min(blocks(args.h.device), -(-pairs.most * (form.tiles // 4) // teams))
    kernel_of(form, most_pairs, most_slots).launch(arguments, grid)
    return add_pairs(y, pairs.ids, args.weights)


def reads(form: RecordForm) -> bool:
    """Whether the kernel supports records of this form: INT4 or NVFP4, an expert's width in 1, 2 or 4 slices."""
    return form.kind != "BF16" and form.slices in (1, 2, 4)


def cuda_fits(args: PairsDownArgs) -> bool:
    """Whether the form is supported, h is padded like the weights, and the lists fit into shared memory."""
    form = args.weights.form
    return reads(form) and args.h.shape[1] == form.width and lists_fit(args.pairs.ids.shape[0], args.pairs)


def cost(args: PairsDownArgs) -> Cost:
    """Bytes of the experts that are actually chosen, once each; h, and the tokens' rows."""
    weights, tokens = args.weights, args.pairs.ids.shape[0]
    moved = weights.nbytes // weights.experts * args.pairs.ids.unique().numel()
    moved += args.h.nbytes + 4 * tokens * weights.outputs
    return Cost(moved, 2 * len(args.pairs) * weights.outputs * weights.inputs)


def cases() -> Iterator[Case]:
    """INT4 and NVFP4, K in 1, 2 and 4 slices, up to 256 tokens."""

    def make(kind: Kind, tokens: int, hidden: int, width: int, experts: int, chosen: int):
        def inputs(g: torch.Generator) -> PairsDownArgs:
            records = Records.prepare("down", random_experts(g, kind, "down", experts, hidden, width))
            pairs = some_pairs(g, tokens, experts, chosen)
            h = encode_h(torch.randn(len(pairs), width, generator=g), records.form.width, kind)
            return PairsDownArgs(h, pairs, records)

        return inputs

    kinds: tuple[Kind, ...] = "INT4", "NVFP4"
    for kind in kinds:
        for tokens in (1, 9, 100):
            yield Case(f"{kind} T={tokens} nano", make(kind, tokens, 320, 128, 16, 4))
        for tokens in (1, 9, 40):
            yield Case(f"{kind} T={tokens} cut from Kimi", make(kind, tokens, 128, 2048, 12, 8))
        yield Case(f"{kind} T=9 two slices", make(kind, 9, 192, 1024, 4, 2))
        for tokens in (1, 8, 64, 256):
            yield Case(f"{kind} T={tokens} Kimi", make(kind, tokens, 7168, 2048, 64, 8), small=False)


# A sum close to the midpoint of two bf16 numbers may be rounded either way if the order of addition differs: an error
# of at most 3e-4 on an H200.
pairs_down = Kernel(Op("pairs_down", PairsDownArgs, reference, cost, cases, rtol=2**-10), cuda, "cuda", cuda_fits)
