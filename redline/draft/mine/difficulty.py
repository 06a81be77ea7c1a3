"""How difficult each position of an answer is for a drafter, and how much of the difficulty it could learn to remove.

A row is a position at which a speculation round could begin. Row r of an answer drafts the tokens at positions
s, s + 1, ... s + k - 1 (s = `position_R[r]`, counted from the start of the prompt), each conditioned on the target's
own tokens: teacher forcing, as in training. The token at s - 1 is the last one known to the round, so the first row of
an answer has s = prompt + 1: the answer's first token follows from the prompt alone, and is never drafted.

For each draft, p is the target's distribution as served (with temperature and top_p) and q the drafter's:

    proposals   acceptance a       ceiling c   gap r = c - a
    onehot      p(argmax q)        max p       max p - p(argmax q)
    sampled     sum min(p, q)      1           1 - sum min(p, q)

The ceiling is reached by a drafter that extracts all information from the text so far. So a flat target distribution
that the drafter matches has no gap, however often its drafts are rejected: irreducible entropy is not difficulty. With
either kind of proposals q = p gives gap 0 (docs/drafters.md).

R rows, k drafts, N tokens, M teachers, D hidden, V vocabulary, C rows of one chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Proposals = Literal["onehot", "sampled"]
PIECE_BYTES = 64 << 20  # size of one float32 [C, V] chunk

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Logits = Callable[[Tensor], Tensor]
"""Maps hidden states [C, D] to float32 logits [C, V]."""


@dataclass(frozen=True)
class Serving:
    """How the target samples and how drafts are proposed."""

    proposals: Proposals = "onehot"
    temperature: float = 1.0  # 0: p is one-hot too
    top_p: float = 1.0
    own: bool = False  # the answer was decoded greedily: p is one-hot at its next token


@dataclass(frozen=True)
class Scores:
    """The scores of one sequence. For drafts beyond the end of the answer: 0, and False in `there_Rk`."""

    position_R: Ints
    accept_Rk: Floats
    ceiling_Rk: Floats
    hit_Rk: npt.NDArray[np.bool_]  # argmax q = argmax p
    there_Rk: npt.NDArray[np.bool_]

    @property
    def gap_R(self) -> Floats:
        """The gap of each row's first draft: probabilities [R]."""
        return self.ceiling_Rk[:, 0] - self.accept_Rk[:, 0]

    @property
    def length_R(self) -> Floats:
        """Expected tokens of a round that begins at each row [R]: 1 plus the cumulative products of the acceptances."""
        return 1 + self.accept_Rk.cumprod(1).sum(1)

    @property
    def longest_R(self) -> Floats:
        """The expected tokens at the ceiling, [R]."""
        return 1 + self.ceiling_Rk.cumprod(1).sum(1)


def score(
    tokens_N: Tensor,
    loss_N: Tensor,
    last_ND: Tensor,
    steps: Sequence[Tensor],
    lengths: Sequence[int],
    *,
    target: Logits,
    drafter: Logits,
    vocabulary: int,
    serving: Serving,
) -> list[Scores]:
    """The scores of concatenated sequences, each on the CPU; the device is not synchronised until the last one is done.

    tokens_N: int64 [N]. loss_N: True for tokens of the target's answer. last_ND: the target's normed states; row t
    predicts token t + 1. steps: for each draft the drafter's normed states [N, D]; row t of step j predicts token t + 2
    + j. lengths: of the sequences, N in total. target, drafter: map such states to logits. vocabulary: V.
    """
    device, k = last_ND.device, len(steps)
    answer = loss_N.bool().cpu()
    position_N = torch.cat([torch.arange(length) for length in lengths])
    left_N = torch.cat([torch.arange(length, 0, -1) for length in lengths])  # tokens from here to the sequence's end
    follows_N = (left_N > 1) & answer.roll(-1)  # the next token belongs to the answer
    rows = ((left_N > 2) & follows_N & answer.roll(-2)).nonzero()[:, 0]
    place_N = torch.full((len(answer),), -1, dtype=torch.int64)
    place_N[rows] = torch.arange(len(rows))  # index of row t among the rows
    accept, ceiling = (torch.zeros(len(rows), k, device=device) for _ in range(2))
    hit = torch.zeros(len(rows), k, dtype=torch.bool, device=device)
    there = torch.zeros(len(rows), k, dtype=torch.bool)
    # Rows of the target; each predicts the next token. The row before an answer predicts a token that is never drafted.
    teachers_M = (follows_N & answer & (position_N > 0)).nonzero()[:, 0]
    for teachers in teachers_M.split(max(1, PIECE_BYTES // (4 * vocabulary))):
        p = distribution(target(last_ND[teachers.to(device)]), serving)
        if serving.own:
            p = torch.nn.functional.one_hot(tokens_N.to(device)[(teachers + 1).to(device)], p.shape[-1]).float()
        for j in range(k):
            at = teachers - 1 - j
            known = (position_N[teachers] > j) & (place_N[at.clamp(min=0)] >= 0)
            if not bool(known.any()):
                continue
            at = at[known]
            found = compare(p[known.nonzero()[:, 0].to(device)], drafter(steps[j][at.to(device)]), serving)
            place = place_N[at].to(device)
            accept[place, j], ceiling[place, j], hit[place, j] = found
            there[place_N[at], j] = True
    counts = [int(part.sum()) for part in (place_N >= 0).split(list(lengths))]
    whole = (position_N[rows] + 2, accept.cpu(), ceiling.cpu(), hit.cpu(), there)
    return [
        Scores(*(part.numpy() for part in parts)) for parts in zip(*(one.split(counts) for one in whole), strict=True)
    ]


def compare(p_CV: Tensor, logits_CV: Tensor, serving: Serving) -> tuple[Tensor, Tensor, Tensor]:
    """acceptance, ceiling [C] float32 and whether the argmax of both is the same [C]."""
    best_C = logits_CV.argmax(-1)
    hit_C = best_C == p_CV.argmax(-1)
    if serving.proposals == "onehot":
        accept_C, ceiling_C = p_CV.gather(-1, best_C[:, None])[:, 0], p_CV.amax(-1)
    else:
        q_CV = distribution(logits_CV, Serving(temperature=serving.temperature))
        accept_C = torch.minimum(p_CV, q_CV).sum(-1).clamp(max=1)
        ceiling_C = torch.ones_like(accept_C)
    return accept_C, ceiling_C, hit_C


def distribution(logits_CV: Tensor, serving: Serving) -> Tensor:
    """The sampling distribution, float32 [C, V]: temperature, then top-p filtering."""
    if serving.temperature == 0:
        return torch.nn.functional.one_hot(logits_CV.argmax(-1), logits_CV.shape[-1]).float()
    p_CV = (logits_CV.float() / serving.temperature).softmax(-1)
    if serving.top_p >= 1:
        return p_CV
    sorted_CV, _ = p_CV.sort(-1, descending=True)
    before_CV = sorted_CV.cumsum(-1, dtype=torch.float64) - sorted_CV  # total probability of more likely tokens
    last_C = (before_CV < serving.top_p).sum(-1) - 1
    kept_CV = p_CV >= sorted_CV.gather(-1, last_C[:, None])
    p_CV = torch.where(kept_CV, p_CV, 0.0)
    return p_CV / p_CV.sum(-1, keepdim=True)


def walk(scores: Scores, k: int) -> list[tuple[int, int, int]]:
    """The rounds (position, proposed, accepted) of greedy serving with k drafts, as predicted by the hits.

    A round begins after the accepted drafts of the previous round and the target's own token.
    """
    rounds: list[tuple[int, int, int]] = []
    hits = scores.hit_Rk[:, :k] & scores.there_Rk[:, :k]
    row = 0
    while row < len(hits):
        proposed = int(scores.there_Rk[row, :k].sum())
        accepted = int(hits[row].cumprod().sum())
        rounds.append((int(scores.position_R[row]), proposed, accepted))
        row += accepted + 1
    return rounds
