"""Logit adjustments by request: bias, penalties, stop ids banned up to a minimum length, masks of allowed tokens.

Equivalent to `run/sampling/on_host.adjusted`, in the same order and in float32, but with inputs that only the device
knows: a slot's length, its tokens, and the drafts before a position. Rows without adjustments keep their logits bit for
bit.

B rows of a step, K positions of each, T = B K; V vocabulary, W = ceil(V / 32) words of a mask.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cuda.kernel import CudaKernel, launch_record
from redline.kernels.cuda.step.step_rows import (
    ADJUSTED,
    ALTERED,
    BEFORE,
    DEFINES,
    MASKED,
    MOST_POSITIONS,
    MOST_ROWS,
    NEW,
    RESULT_COLUMNS,
    SLOT,
    TOKENS,
    random_plan,
    random_slots,
)
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op
from redline.ops.penalties import PENALTIES, penalized

MOST_BIASES = 300  # maximum tokens with a bias per slot, the limit of the API
MOST_STOPS = 96  # maximum stop ids per slot: the API allows 64, and a model has a few of its own
IN_PROMPT = 1 << 30  # added to the count of a token that occurs in the prompt

# Columns of `LogitAdjustments.tokens`: the slot length up to which stop ids are banned; then ids, padded with -1.
STOPS_FROM = 0
BIASED = slice(1, 1 + MOST_BIASES)
STOPS = slice(BIASED.stop, BIASED.stop + MOST_STOPS)
# Columns of `LogitAdjustments.numbers`: PENALTIES, and the biases of the tokens BIASED.
BIASES = slice(len(PENALTIES), len(PENALTIES) + MOST_BIASES)

PART = 2048  # tokens per block
THREADS = 256


@dataclass(frozen=True)
class LogitAdjustments:
    """The logit adjustments of each slot. Read only for rows with ADJUSTED in their plan."""

    counts: Tensor  # int32 [slots, V]: occurrences of a token in the answer, plus IN_PROMPT if it is in the prompt
    tokens: Tensor  # int32 [slots, STOPS.stop]
    numbers: Tensor  # float32 [slots, BIASES.stop]

    @classmethod
    def empty(cls, slots: int, vocabulary: int, device: torch.device) -> "LogitAdjustments":
        """For slots without adjustments."""
        return cls(
            counts=torch.zeros(slots, vocabulary, dtype=torch.int32, device=device),
            tokens=torch.full((slots, STOPS.stop), -1, dtype=torch.int32, device=device),
            numbers=torch.zeros(slots, BIASES.stop, device=device),
        )

    @staticmethod
    def bytes_of(slots: int, vocabulary: int) -> int:
        """Bytes of the tensors of `empty`."""
        return slots * 4 * (vocabulary + STOPS.stop + BIASES.stop)


class AdjustArgs(NamedTuple):
    """Adjusts the logits of the positions of rows with adjustments."""

    logits_TV: Tensor  # float32; rows may be strided
    ids_T: Tensor  # int64 [T]: the input token of each position; a position counts its row's ids up to its own
    plan_BC: Tensor  # int64 [B, C]: SLOT and ALTERED are read
    results: Tensor  # int64 [B or more, RESULT_COLUMNS]: BEFORE is read
    wishes: LogitAdjustments
    masks_TW: Tensor  # int32 [T or more, W]: one bit per token, 1 if it is allowed; read for rows that are MASKED


def reference(args: AdjustArgs) -> Tensor:
    """-> float32 [T, V], with -inf for banned tokens. No data-dependent shapes, so a CUDA graph can capture it."""
    logits_TV, plan_BC, wishes = args.logits_TV, args.plan_BC, args.wishes
    (tokens, vocabulary), rows = logits_TV.shape, plan_BC.shape[0]
    positions = tokens // rows
    slot_T = plan_BC[:, SLOT].repeat_interleave(positions)
    altered_T1 = plan_BC[:, ALTERED].repeat_interleave(positions)[:, None]
    own_TC, numbers_TC = wishes.tokens[slot_T].long(), wishes.numbers[slot_T]
    penalties = dict(zip(PENALTIES, numbers_TC[:, : len(PENALTIES)].split(1, 1), strict=True))
    of_row_T1 = torch.arange(positions, device=plan_BC.device).repeat(rows)[:, None]

    biased_TM = own_TC[:, BIASED]
    given_TM = numbers_TC[:, BIASES] * (biased_TM >= 0)
    x_TV = logits_TV.scatter_add(1, biased_TM.clamp(min=0), given_TM)

    ids_TK = args.ids_T.view(rows, positions).repeat_interleave(positions, 0)
    of_row_K = torch.arange(positions, device=plan_BC.device)
    before_TK = (of_row_K > 0) & (of_row_K <= of_row_T1)
    count_TV = wishes.counts[slot_T].scatter_add(1, ids_TK, before_TK.int())
    x_TV = torch.where(count_TV > 0, penalized(x_TV, count_TV & (IN_PROMPT - 1), **penalties), x_TV)

    stops_TS = own_TC[:, STOPS]
    length_T1 = args.results[:rows, BEFORE].repeat_interleave(positions)[:, None] + of_row_T1
    banned_TS = (stops_TS >= 0) & (length_T1 < own_TC[:, STOPS_FROM, None])
    x_TV = x_TV.scatter_add(1, stops_TS.clamp(min=0), torch.where(banned_TS, -torch.inf, 0.0))

    x_TV = torch.where(altered_T1 & ADJUSTED > 0, x_TV, logits_TV)
    of_word = torch.arange(32, dtype=torch.int32, device=plan_BC.device)
    allowed_TV = (args.masks_TW[:tokens, :, None] >> of_word & 1).flatten(1)[:, :vocabulary] > 0
    return torch.where(allowed_TV | (altered_T1 & MASKED == 0), x_TV, -torch.inf)


def count_tokens(plan_BC: Tensor, results: Tensor, counts: Tensor) -> None:
    """Counts the tokens that a settled step has added to rows that are ADJUSTED. CUDA graphs can capture it.

    counts: int32 [slots, V], as in `LogitAdjustments`.
    """
    rows, of_row_K = plan_BC.shape[0], torch.arange(MOST_POSITIONS, device=plan_BC.device)
    asked_B1 = plan_BC[:, ALTERED, None] & ADJUSTED > 0
    new_BK = asked_B1 & (of_row_K < results[:rows, NEW, None])
    token_BK = results[:rows, TOKENS : TOKENS + MOST_POSITIONS] * new_BK
    place_BK = plan_BC[:, SLOT, None] * counts.shape[1] + token_BK
    counts.view(-1).scatter_add_(0, place_BK.flatten(), new_BK.flatten().int())


_Launch = launch_record("step/adjust.cu", "AdjustLaunch")


@functools.cache
def _kernel(width: int) -> CudaKernel:
    columns = {
        "TOKEN_STOPS_FROM": STOPS_FROM,
        "TOKEN_BIASED": BIASED.start,
        "TOKEN_STOPS": STOPS.start,
        "TOKEN_COLUMNS": STOPS.stop,
        **{f"NUMBER_{name.upper()}": place for place, name in enumerate(PENALTIES)},
        "NUMBER_BIASES": BIASES.start,
        "NUMBER_COLUMNS": BIASES.stop,
        "MOST_BIASES": MOST_BIASES,
        "MOST_STOPS": MOST_STOPS,
        "IN_PROMPT": IN_PROMPT,
    }
    defines = {**DEFINES, **columns, "PART": PART, "WIDTH": width}
    return CudaKernel("step/adjust.cu", "adjust", _Launch, defines, shared=0, threads=THREADS)


def cuda(args: AdjustArgs) -> Tensor:
    """The reference's result."""
    logits_TV, wishes = args.logits_TV, args.wishes
    (tokens, vocabulary), step = logits_TV.shape, logits_TV.stride(0)
    adjusted_TV = torch.empty(tokens, vocabulary, dtype=torch.float32, device=logits_TV.device)
    width = 4 if vocabulary % 4 == step % 4 == logits_TV.data_ptr() % 16 == 0 else 1
    given = _Launch(
        logits=logits_TV.data_ptr(),  # rows may be strided
        ids=args.ids_T,
        plan=args.plan_BC,
        results=args.results,
        counts=wishes.counts,
        tokens=wishes.tokens,
        numbers=wishes.numbers,
        masks=args.masks_TW,
        adjusted=adjusted_TV,
        positions=tokens // max(args.plan_BC.shape[0], 1),
        vocabulary=vocabulary,
        step=step,
        words=args.masks_TW.shape[1],
    )
    _kernel(width).launch(given, -(-vocabulary // PART), tokens)
    return adjusted_TV


def fits(args: AdjustArgs) -> bool:
    """Whether the logits are float32 and each row is contiguous."""
    return args.logits_TV.dtype == torch.float32 and args.logits_TV.stride(1) == 1


def cost(args: AdjustArgs) -> Cost:
    """The logits are read and written once. Counts, and the lists of a slot, are read once per row, not per position;
    masks once per position. Rows without adjustments read neither, which is not taken into account."""
    rows, wishes = args.plan_BC.shape[0], args.wishes
    words = args.masks_TW[: args.logits_TV.shape[0]].nbytes
    return Cost(2 * args.logits_TV.nbytes + words + LogitAdjustments.bytes_of(rows, wishes.counts.shape[1]))


def cases() -> Iterator[Case]:
    """Rows with all, some and no adjustments, before and after the minimum length of their answers."""

    def make(rows: int, real: int, positions: int, vocabulary: int):
        def inputs(g: torch.Generator) -> AdjustArgs:
            def drawn(most: int, *shape: int) -> Tensor:
                return torch.randint(most, shape, generator=g)

            slots = random_slots(g, real + 3, 4)
            plan = random_plan(g, slots, rows, real, positions)
            plan[:real, ALTERED], plan[real:, ALTERED] = drawn(4, real), 0
            results = torch.full((MOST_ROWS, RESULT_COLUMNS), -7)
            results[:rows, BEFORE] = slots.lengths[plan[:, SLOT]]
            wishes = LogitAdjustments.empty(real + 4, vocabulary, plan.device)
            few = drawn(4, *wishes.counts.shape)
            wishes.counts[:] = (few - 1).clamp(min=0) + IN_PROMPT * drawn(2, *wishes.counts.shape) * (few > 1)
            wishes.numbers[:, : len(PENALTIES)] = torch.randn(real + 4, len(PENALTIES), generator=g)
            wishes.numbers[:, PENALTIES.index("repetition_penalty")] = torch.rand(real + 4, generator=g) + 0.5
            for slot in range(0, real + 4, 2):
                biased, stops = min(MOST_BIASES, vocabulary) - 5 * slot, 1 + slot
                wishes.tokens[slot, STOPS_FROM] = slots.lengths[slot] + drawn(positions + 1, 1)
                wishes.tokens[slot, BIASED][: max(biased, 0)] = torch.randperm(vocabulary, generator=g)[
                    : max(biased, 0)
                ]
                wishes.numbers[slot, BIASES] = 5 * torch.randn(MOST_BIASES, generator=g)
                wishes.tokens[slot, STOPS][:stops] = drawn(vocabulary, stops)[:MOST_STOPS]
            words = -(-vocabulary // 32)
            masks = drawn(1 << 32, rows * positions, words).to(torch.int32)
            logits = 3 * torch.randn(rows * positions, vocabulary, generator=g)
            return AdjustArgs(logits, drawn(vocabulary, rows * positions), plan, results, wishes, masks)

        return inputs

    yield Case("B=1 K=1", make(1, 1, 1, 512))
    yield Case("B=4 K=3, one to fill the shape, V no multiple of 4", make(4, 3, 3, 2051))
    yield Case("B=16 K=8", make(16, 12, 8, 300))
    yield Case("B=4 K=16", make(4, 3, 16, 300))
    yield Case("B=256 K=2", make(256, 250, 2, 64))
    yield Case("B=2 K=4 Kimi", make(2, 2, 4, 163840), small=False)


adjust = Kernel(Op("adjust", AdjustArgs, reference, cost, cases, rtol=1e-7), cuda, "cuda", fits)
