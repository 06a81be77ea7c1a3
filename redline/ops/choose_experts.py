"""Which experts, how much of each, and who goes where.        T tokens, E experts, K chosen.

s = sigmoid(logits); the K largest of s + bias are chosen, ties to the lower id; a weight is s without the bias, over
their sum + 1e-20, times the scale (as `route_experts`, from logits).

The expert kernels work on (expert, token) pairs, sorted by expert and then by token. A slot is one expert with 1 to 8
of its pairs: what one pass over the expert's weights can serve.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SLOT_PAIRS = 8
MOST_TOKENS, MOST_PAIRS, MOST_EXPERTS = 64, 512, 512  # of one kernel: two words of tokens, a thread to a pair or expert


@dataclass(frozen=True)
class Choice:
    """forced_TK int32: the ids to use instead of the best, each at most once for a token (benchmarks)."""

    logits_TE: Tensor  # float32
    bias_E: Tensor | None  # float32
    chosen: int
    normalise: bool
    scale: float
    forced_TK: Tensor | None = None


@dataclass(frozen=True)
class Pairs:
    """Slot s is expert slot_expert[s] with pairs [slot_first[s], slot_first[s + 1]). Pair p is token token[p].

    Beyond `count` slots, expert 0 without pairs. Sizes are of the worst case, so that a graph can be captured.
    """

    token: Tensor  # int32 [T K]
    weight: Tensor  # float32 [T K]
    slot_expert: Tensor  # int32 [slots]
    slot_first: Tensor  # int32 [slots + 1]
    count: Tensor  # int32 [1]: slots that exist
    ids: Tensor  # int32 [T, K], best first
    weights: Tensor  # float32 [T, K]

    @property
    def most(self) -> int:
        """Slots in the worst case."""
        return self.slot_expert.shape[0]

    def __len__(self) -> int:
        return self.token.shape[0]


def most_slots(tokens: int, chosen: int, experts: int) -> int:
    return min(tokens * chosen, experts + tokens * chosen // SLOT_PAIRS)


def choose_experts(choice: Choice) -> Pairs:
    """By torch: what `experts_up` does on a GPU in front of its products (cuda/choose.cuh)."""
    scores = torch.sigmoid(choice.logits_TE)
    ids = choice.forced_TK
    if ids is None:
        biased = scores if choice.bias_E is None else scores + choice.bias_E
        ids = torch.sort(biased, dim=-1, descending=True, stable=True).indices[:, : choice.chosen].to(torch.int32)
    weights = scores.gather(1, ids.long())
    if choice.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return list_pairs(ids, weights * choice.scale, scores.shape[1])


def empty_pairs(tokens: int, chosen: int, experts: int, device: torch.device) -> Pairs:
    """For a kernel to fill."""
    slots = most_slots(tokens, chosen, experts)

    def ints(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=device)

    return Pairs(
        token=ints(tokens * chosen),
        weight=torch.empty(tokens * chosen, device=device),
        slot_expert=ints(slots),
        slot_first=ints(slots + 1),
        count=ints(1),
        ids=ints(tokens, chosen),
        weights=torch.empty(tokens, chosen, device=device),
    )


def list_pairs(ids_TK: Tensor, weights_TK: Tensor, experts: int) -> Pairs:
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
    )
