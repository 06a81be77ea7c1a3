"""Chooses each token's experts and their weights, and lists the pairs.        T tokens, E experts, K chosen.

s = sigmoid(logits); the K largest of s + bias are chosen, ties to the lower id. A weight is s without the bias, divided
by (their sum + 1e-20), times the scale (as `route_experts`, from logits).

Up to 8 decode tokens it is not a separate launch: the last block of `gates` does it (`blocks/choose.cuh` has both).

The expert kernels process (expert, token) pairs, sorted by expert and then by token. A slot is one expert with 1 to 8
of its pairs: the number that one pass over the expert's weights can serve.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from redline.kernels.cuda.kernel import CudaKernel, launch_record
from redline.kernels.cuda.layouts.tiled import TILE_N, padded
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op
from redline.ops.route_experts import choose

SLOT_PAIRS = 8
THREADS = 512  # of a block: first a warp per token, then a thread per expert
AT_ONCE = THREADS // 32  # tokens of a block. A single block would process them in turns, 9 us each on an NVIDIA H200
MOST_TOKENS, MOST_PAIRS, MOST_EXPERTS = 256, 2048, 512  # of one block: a thread per expert, pairs in shared memory
MOST_SLOTS = MOST_EXPERTS + MOST_PAIRS // SLOT_PAIRS  # `most_slots` of the largest step
SUMMED_TOKENS, SUMMED_PAIRS = 64, 512  # maximum for which a kernel may sum each token's pairs in shared memory
READY, _NOTES = 1, 4  # of `notes_of`: index of a note, and number of notes
_GATED_TOKENS, _K_GROUPS = 8, 4  # maximum tokens of one launch of `gates`, and maximum parts of K


@dataclass(frozen=True)
class RouterChoice:
    """The parameters of the expert choice, apart from the logits; for `gates`, which computes those."""

    bias_E: Tensor | None  # float32: added for the choice, not to the weights
    chosen: int  # K
    normalise: bool  # whether a token's weights are divided by their sum
    scale: float  # factor of the weights after normalisation
    notes: Tensor  # from `notes_of`, kept between calls: how the blocks of `gates` communicate
    forced_TK: Tensor | None = None  # int32 [T, K]: ids to use instead, distinct for each token (benchmarks)


def notes_of(experts: int, device: torch.device) -> Tensor:
    """int32, in the state that `gates` expects and restores: _NOTES zeros, then minus zeros in place of partial logits.

    Note READY is `Pairs.ready`. Also allocates the device's counter, which a graph's capture must not do.
    """
    _done(device)
    parts = torch.full((_K_GROUPS * _GATED_TOKENS * padded(experts, TILE_N),), -0.0)
    return torch.cat([torch.zeros(_NOTES, dtype=torch.int32), parts.view(torch.int32)]).to(device)


@dataclass(frozen=True)
class Pairs:
    """The pairs of a step in the order of experts, and their slots.

    Pair p is token token[p]. Slot s is expert slot_expert[s] with pairs [slot_first[s], slot_first[s + 1]). Slots
    beyond `count` are expert 0 without pairs. Tensors have worst-case sizes, so that a CUDA graph can be captured.
    """

    token: Tensor  # int32 [T K]
    weight: Tensor  # float32 [T K]: the router weight of each pair
    slot_expert: Tensor  # int32 [slots]
    slot_first: Tensor  # int32 [slots + 1]
    count: Tensor  # int32 [1]: number of used slots
    ids: Tensor  # int32 [T, K], best first
    weights: Tensor  # float32 [T, K]: the router weights, in the order of ids
    origin: Tensor  # int32 [T K]: the index of each pair in ids
    # int32 [1]: `gates`, the launch before `experts_up`, sets it to 0 before `experts_up` can begin, and to 1 when the
    # lists are complete, before `gates` ends. None: the lists are complete when the preceding launch has ended.
    ready: Tensor | None = None

    @classmethod
    def empty(cls, tokens: int, chosen: int, experts: int, device: torch.device, ready: Tensor | None = None) -> Self:
        """Uninitialised tensors of worst-case size, for a kernel to fill."""
        slots = most_slots(tokens, chosen, experts)

        def ints(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.int32, device=device)

        return cls(
            token=ints(tokens * chosen),
            weight=torch.empty(tokens * chosen, device=device),
            slot_expert=ints(slots),
            slot_first=ints(slots + 1),
            count=ints(1),
            ids=ints(tokens, chosen),
            weights=torch.empty(tokens, chosen, device=device),
            origin=ints(tokens * chosen),
            ready=ready,
        )

    @property
    def lists(self) -> dict[str, Tensor]:
        """The tensors by the field names of the kernels that write them (`blocks/choose.cuh`)."""
        return {
            "pair_token": self.token,
            "pair_weight": self.weight,
            "slot_expert": self.slot_expert,
            "slot_first": self.slot_first,
            "count": self.count,
            "ids": self.ids,
            "shares": self.weights,
            "origin": self.origin,
        }

    @property
    def most(self) -> int:
        """Maximum number of slots."""
        return self.slot_expert.shape[0]

    def __len__(self) -> int:
        return self.token.shape[0]


def most_slots(tokens: int, chosen: int, experts: int) -> int:
    """Maximum number of slots: every pair alone, or every expert with one slot that is not full."""
    return min(tokens * chosen, experts + tokens * chosen // SLOT_PAIRS)


class ChooseExpertsArgs(NamedTuple):
    """Chooses each token's experts from the router's logits, and lists the pairs by expert."""

    logits_TE: Tensor  # float32 [T, E]
    bias_E: Tensor | None  # float32 [E]: added for the choice, not to the weights; None: zeros
    chosen: int  # K
    normalise: bool  # whether a token's weights are divided by their sum + 1e-20
    scale: float  # factor of the final weights
    forced_TK: Tensor | None = None  # int32 [T, K]: ids to use instead, distinct for each token (benchmarks)


def reference(args: ChooseExpertsArgs) -> Pairs:
    """-> pairs that are complete (`ready` is None). It reads the ids on the host, so no CUDA graph can capture it."""
    ids, weights = choose(*args)
    return list_pairs(ids, weights, args.logits_TE.shape[1])


def list_pairs(ids_TK: Tensor, weights_TK: Tensor, experts: int) -> Pairs:
    """The pairs of ids int32 [T, K] and weights float32 [T, K]; ids of a token are distinct. Reads them on the host."""
    tokens, chosen = ids_TK.shape
    order = torch.argsort(ids_TK.flatten().long() * tokens + torch.arange(tokens).to(ids_TK).repeat_interleave(chosen))
    sorted_ids = ids_TK.flatten()[order].tolist()
    firsts = [p for p in range(len(sorted_ids)) if (p - sorted_ids.index(sorted_ids[p])) % SLOT_PAIRS == 0]
    spare = most_slots(tokens, chosen, experts) - len(firsts)

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=ids_TK.device)

    return Pairs(
        token=(order // chosen).to(torch.int32),
        weight=weights_TK.flatten()[order],
        slot_expert=column([sorted_ids[p] for p in firsts] + [0] * spare),
        slot_first=column(firsts + [len(sorted_ids)] * (spare + 1)),
        count=column([len(firsts)]),
        ids=ids_TK,
        weights=weights_TK,
        origin=order.to(torch.int32),
    )


_Launch = launch_record("decode/choose_experts.cu", "ChooseExpertsLaunch")


@functools.cache
def kernel_of(experts: int, chosen: int, room: int) -> CudaKernel:
    """The kernel for this number of experts and chosen experts, and for at most `room` tokens."""
    defines = {"EXPERTS": experts, "CHOSEN": chosen, "MOST_TOKENS": room}
    shared = 4 * (experts * (-(-room // 32) + 1) + 2 * room * chosen + THREADS // 32)  # blocks/choose.cuh
    return CudaKernel("decode/choose_experts.cu", "choose_experts", _Launch, defines, shared, THREADS)


def room_of(tokens: int) -> int:
    """The `room` of the kernel for this number of tokens; rounded up, so that there are few kernels."""
    return next(room for room in (64, 128, MOST_TOKENS) if tokens <= room)


@functools.cache
def _done(device: torch.device) -> Tensor:
    """The counter of blocks, int32 [1], zero between launches; only one launch may run on a device at a time."""
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "`notes_of` comes before captures"
    return torch.zeros(1, dtype=torch.int32, device=device)


def cuda(args: ChooseExpertsArgs) -> Pairs:
    """The reference's result, without the host."""
    logits_TE = args.logits_TE
    tokens, experts = logits_TE.shape
    pairs = Pairs.empty(tokens, args.chosen, experts, logits_TE.device)
    arguments = _Launch(
        logits=logits_TE,
        bias=args.bias_E,
        forced=args.forced_TK,
        **pairs.lists,
        done=_done(logits_TE.device),
        tokens=tokens,
        slots=pairs.most,
        normalise=int(args.normalise),
        scale=args.scale,
    )
    kernel_of(experts, args.chosen, room_of(tokens)).launch(arguments, -(-tokens // AT_ONCE))
    return pairs


def cuda_fits(args: ChooseExpertsArgs) -> bool:
    """Whether the lists fit into a block: at most 256 tokens, 2,048 pairs, 512 experts, 32 chosen."""
    tokens, experts = args.logits_TE.shape
    fits_one_block = tokens <= MOST_TOKENS and tokens * args.chosen <= MOST_PAIRS and experts <= MOST_EXPERTS
    return fits_one_block and args.chosen <= min(32, experts)


def cost(args: ChooseExpertsArgs) -> Cost:
    """The logits once, and 28 bytes per pair in the lists."""
    return Cost(args.logits_TE.nbytes + args.logits_TE.shape[0] * args.chosen * 28)


def cases() -> Iterator[Case]:
    """Sizes of nano and of Kimi up to 256 tokens, and forced experts."""

    def make(tokens: int, experts: int, chosen: int, forced: bool = False):
        def inputs(g: torch.Generator) -> ChooseExpertsArgs:
            logits = torch.randn(tokens, experts, generator=g)
            bias = torch.randn(experts, generator=g) * 0.1
            ids = torch.stack([torch.randperm(experts, generator=g)[:chosen] for _ in range(tokens)]).to(torch.int32)
            return ChooseExpertsArgs(logits, bias, chosen, True, 2.827, ids if forced else None)

        return inputs

    yield Case("T=1 nano", make(1, 16, 4))
    for tokens in (40, 100, 256):
        yield Case(f"T={tokens} nano", make(tokens, 16, 4))
    yield Case("T=5 forced", make(5, 70, 3, forced=True))
    for tokens in (1, 8, 64, 256):
        yield Case(f"T={tokens} Kimi", make(tokens, 384, 8))


choose_experts = Kernel(Op("choose_experts", ChooseExpertsArgs, reference, cost, cases), cuda, "cuda", cuda_fits)
