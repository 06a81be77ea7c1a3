"""The second half of the experts, and the end of a layer.      T tokens, D hidden, E experts, I and Is widths.

residual += sum over a token's pairs of down[expert] h + shared down(shared h); then the inputs of the next norm:
x = residual * gamma in bf16, and the sums of squares of each block's outputs.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.cuda.collectives.rank_links import EXPERTS, RankLinks, all_reduce_fields, ranks_of, shots_of
from redline.kernels.cuda.decode.choose_experts import SLOT_PAIRS, SUMMED_PAIRS, SUMMED_TOKENS, Pairs
from redline.kernels.cuda.decode.experts_up import MOST_MEMORY, decode_h, encode_h, some_pairs
from redline.kernels.cuda.kernel import CudaKernel, launch_record
from redline.kernels.cuda.layouts.records import KINDS, SLAB_ROWS, Kind, RecordForm, Records, Slabs, random_experts
from redline.kernels.cuda.layouts.tiled import PAD_K, padded
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

PIECE_BYTES = 16384  # of the shared expert, per copy
FEW = 8  # maximum tokens with sums in registers
PAIRS = 4  # pairs of an expert served by one copy of its weights, if their h fits into shared memory too

Result = tuple[Tensor, Tensor, Tensor]


class ExpertsDownArgs(NamedTuple):
    """Multiplies the pairs' hidden rows down, adds them and the shared expert to the residual, and computes x."""

    h: Tensor  # [pairs, I padded], from `experts_up` in its format: f16, or bf16 for BF16 experts
    pairs: Pairs  # the expert and the token of each row
    weights: Records  # "down" [E, D, I]
    # bf16 [T, Is padded to 128]: the shared expert's hidden rows; None, as shared_w: no shared expert
    shared_h: Tensor | None
    shared_w: Slabs | None  # [D, Is]
    residual_TD: Tensor  # float32 [T, D]; read
    gamma_next: Tensor  # float32 [D]: weight of the next norm
    links: RankLinks | None = None  # the products are partial sums, all-reduced over the ranks; None: one rank


def reference(args: ExpertsDownArgs) -> Result:
    """-> (residual float32 [T, D], x bf16 [T, D padded to 128], squares float32 [D padded / 64, T padded to 8])."""
    assert args.links is None, "a reference supports one rank"
    pairs, weights, shared_w = args.pairs, args.weights, args.shared_w
    residual = args.residual_TD.clone()
    width, firsts = decode_h(args.h, weights.inputs, weights.kind), pairs.slot_first.tolist()
    for slot, expert in enumerate(pairs.slot_expert[: int(pairs.count)].tolist()):
        mine = slice(firsts[slot], firsts[slot + 1])
        part = width[mine] @ weights.dense(expert).T
        residual.index_add_(0, pairs.token[mine].long(), part)
    if args.shared_h is not None and shared_w is not None:
        residual += args.shared_h[:, : shared_w.inputs].float() @ shared_w.dense().float().T
    tokens, d = residual.shape
    full = F.pad(residual, (0, padded(d, PAD_K) - d))
    squares = full.square().unflatten(1, (-1, SLAB_ROWS)).sum(-1).T
    x = F.pad(residual * args.gamma_next, (0, full.shape[1] - d)).to(torch.bfloat16)
    return residual, x, F.pad(squares, (0, padded(tokens, 8) - tokens)).contiguous()


_Launch = launch_record("decode/experts_down.cu", "ExpertsDownLaunch")


@functools.cache
def kernel_of(form: RecordForm, shared: int, hidden: int, room: int, ranks: int = 1, shots: int = 1) -> CudaKernel:
    """The kernel for at most `room` tokens. shared: Is padded, or 0.

    With more than eight tokens the sums of each token use 1 KB of shared memory.
    """
    few = form.kind != "BF16" and room <= FEW
    chunk = min(room, 8 if room < SUMMED_TOKENS else 4)
    fixed = (room * (2 * shared + 64) if shared else 0) if few else 1024 * room
    fixed += 16 + 8 * room + 64 + 2 * SUMMED_PAIRS * 4

    def memory(pairs: int) -> int:
        x_bytes = max(pairs * 2 * form.inputs, 0 if few or not shared else chunk * 256)
        return fixed + 4 * 2 * (max(4 * form.record_bytes, PIECE_BYTES if shared else 0) + x_bytes + 16)

    most_pairs = 1 if room == 1 else PAIRS
    pairs = next(n for n in range(most_pairs, 0, -1) if n == 1 or memory(n) <= MOST_MEMORY)
    if form.kind == "BF16":
        pairs = SLOT_PAIRS  # for small slices; they are the columns of one mma
    sizes = {"SLICES": form.slices, "SLICE": form.inputs, "SHARED": shared, "HIDDEN": hidden}
    sizes |= {"X": padded(hidden, PAD_K), "ROOM": room, "CHUNK": chunk, "PAIRS": pairs, "KEPT": int(few)}
    defines = {"FORMAT": form.kind, "RANKS": ranks, "SHOTS": shots, **sizes}
    return CudaKernel("decode/experts_down.cu", "experts_down", _Launch, defines, memory(pairs))


def cuda(args: ExpertsDownArgs) -> Result:
    """The reference's result; a block has 64 outputs.

    The preceding launch must be `experts_up`: its blocks have read all of `pairs` before this grid may begin.
    """
    pairs, shared_h, residual_TD = args.pairs, args.shared_h, args.residual_TD
    (tokens, d), device = residual_TD.shape, residual_TD.device
    x_width = padded(d, PAD_K)
    residual = torch.empty_like(residual_TD)
    x = torch.empty(tokens, x_width, dtype=torch.bfloat16, device=device)
    squares = torch.empty(x_width // SLAB_ROWS, padded(tokens, 8), device=device)
    arguments = _Launch(
        weights=args.weights.data,
        shared=None if args.shared_w is None else args.shared_w.data,
        h=args.h,
        shared_h=shared_h,
        pair_token=pairs.token,
        slot_expert=pairs.slot_expert,
        slot_first=pairs.slot_first,
        residual=residual_TD,
        gamma=args.gamma_next,
        residual_out=residual,
        x=x,
        squares=squares,
        tokens=tokens,
        pairs=len(pairs),
        slots=pairs.most,
        **all_reduce_fields(args.links, EXPERTS),
    )
    shared = 0 if shared_h is None else shared_h.shape[1]
    ranks, shots = ranks_of(args.links), shots_of(args.links, tokens)
    kernel_of(args.weights.form, shared, d, _room(tokens), ranks, shots).launch(arguments, x_width // SLAB_ROWS)
    return residual, x, squares


def _room(tokens: int) -> int:
    return next(room for room in (1, 4, FEW) if tokens <= room) if tokens <= FEW else padded(tokens, 8)


def cuda_fits(args: ExpertsDownArgs) -> bool:
    """Whether h and shared_h are padded like the weights, and sums and lists fit: 64 tokens, 512 pairs."""
    whole = args.h.shape[1] == args.weights.form.width
    shared_fits = args.shared_h is None or (
        args.shared_w is not None and args.shared_h.shape[1] == padded(args.shared_w.inputs, PAD_K)
    )
    tokens, pairs = args.residual_TD.shape[0], args.pairs
    lists_fit = tokens <= SUMMED_TOKENS and len(pairs) <= SUMMED_PAIRS and pairs.most < SUMMED_PAIRS
    return whole and shared_fits and lists_fit


def cost(args: ExpertsDownArgs) -> Cost:
    """Bytes of the experts that are actually chosen, once each; of the shared expert, and of the tokens' rows."""
    weights, shared_w = args.weights, args.shared_w
    tokens, d = args.residual_TD.shape
    moved = weights.nbytes // weights.experts * args.pairs.ids.unique().numel() + args.h.nbytes + 10 * tokens * d
    total = Cost(moved, 2 * len(args.pairs) * d * weights.inputs)
    if args.shared_h is not None and shared_w is not None:
        total += Cost(shared_w.nbytes + args.shared_h.nbytes, 2 * tokens * d * shared_w.inputs)
    return total


def cases() -> Iterator[Case]:
    """Each format: few and many tokens, more pairs of an expert than a stage holds, no shared expert."""

    def make(kind: Kind, tokens: int, hidden: int, width: int, shared: int, experts: int, chosen: int):
        def inputs(g: torch.Generator) -> ExpertsDownArgs:
            records = Records.prepare("down", random_experts(g, kind, "down", experts, hidden, width))
            pairs = some_pairs(g, tokens, experts, chosen)
            h = encode_h(torch.randn(len(pairs), width, generator=g), records.form.width, kind)
            shared_h = shared_w = None
            if shared:
                shared_h = torch.randn(tokens, shared, generator=g).to(torch.bfloat16)
                shared_h = F.pad(shared_h, (0, padded(shared, PAD_K) - shared))
                shared_w = Slabs.prepare((torch.randn(hidden, shared, generator=g) * shared**-0.5).to(torch.bfloat16))
            residual = torch.randn(tokens, hidden, generator=g)
            return ExpertsDownArgs(
                h, pairs, records, shared_h, shared_w, residual, torch.rand(hidden, generator=g) + 0.5
            )

        return inputs

    for kind in KINDS:
        for tokens in (1, 4, 9):
            yield Case(f"{kind} T={tokens} nano", make(kind, tokens, 320, 128, 128, 16, 4))
        yield Case(f"{kind} T=1 nano, 12 chosen", make(kind, 1, 320, 128, 128, 16, 12))
        for tokens in (1, 8, 9):
            yield Case(f"{kind} T={tokens} cut from Kimi", make(kind, tokens, 128, 2048, 2048, 3, 2))
        yield Case(f"{kind} T=40 cut from Kimi", make(kind, 40, 64, 2048, 256, 12, 8))
        yield Case(f"{kind} T=3 no shared expert", make(kind, 3, 200, 352, 0, 8, 4))
        for tokens in (1, 8, 64):
            experts = 16 if kind == "BF16" else 64
            yield Case(f"{kind} T={tokens} Kimi", make(kind, tokens, 7168, 2048, 2048, experts, 8), small=False)


experts_down = Kernel(Op("experts_down", ExpertsDownArgs, reference, cost, cases), cuda, "cuda", cuda_fits)
