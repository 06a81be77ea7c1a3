"""The distance between drafter and target: training losses, and predicted acceptance.

Every value is per predicted token u and step j: row t = u - 2 - j predicts token u, and its teacher is the target's
distribution at u - 1, the same for every step. So the target's logits are computed once per chunk of tokens, from its
last hidden states, and discarded; the drafter's are recomputed in the backward pass.

N predicted tokens, R of them in a chunk, J steps, V vocabulary, D hidden.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from redline.model.eagle3.module import Eagle3

CHUNK_BYTES = 64 << 20  # size of one float32 [R, V]; a chunk has about 4 J of them while its gradient is computed

Kind = Literal["kl", "lk"]


class TrainTargets(NamedTuple):
    """The N answer tokens of a batch, padded with tokens at place -1, which no row predicts."""

    rows_N: Tensor  # int64: index of the token in the flattened batch [B * T]
    places_N: Tensor  # int64: position in its sequence
    sequences_N: Tensor  # int64: index of its sequence in the batch
    last_ND: Tensor  # the target's last hidden state, normed, at the previous token


class PredictionRows(NamedTuple):
    """Values [J, N] for each step's prediction of each token; meaningless if not `valid`."""

    valid: Tensor  # bool: some row predicts the token
    kept: Tensor  # bool: valid, and the target's argmax is in the draft vocabulary
    loss: Tensor  # differentiable; the others are not
    alpha: Tensor  # sum_v min(p, q): the probability that a sampled draft is accepted
    hit: Tensor  # bool: drafter and target have the same argmax
    gap: Tensor  # max p - p(drafter's argmax): what a better drafter could gain; 0 if the argmax is the same


def compare(
    drafter: Eagle3,
    normed: Sequence[Tensor],
    head_VD: Tensor,
    targets: TrainTargets,
    kind: Kind = "kl",
    decay: float = 3.0,
    chunk: int | None = None,
    compiled: Any = None,
) -> PredictionRows:
    """Compares the J steps of `ttt.unroll` with the target.

    kind "kl": KL(p || q), with p renormalised over the draft vocabulary. "lk": l KL + (1 - l)(1 - alpha) with
    l = exp(-decay alpha), held constant in the gradient: KL while the drafter is poor, total variation when it is good
    (arXiv 2602.23881). `compiled`: a compiled `figures`.
    """
    ids_K = drafter.token_ids()
    steps = torch.arange(len(normed), device=targets.rows_N.device)
    valid = targets.places_N >= steps[:, None] + 2
    rows_JN = (targets.rows_N - 2 - steps[:, None]).clamp_min(0)
    flat = [hidden.flatten(0, 1) for hidden in normed]
    count = targets.rows_N.shape[0]
    size = chunk or chunk_rows(head_VD.shape[0])
    parts: list[tuple[Tensor, ...]] = []
    for first in range(0, count, size):
        part = slice(first, first + size)
        hidden = torch.stack([x[rows] for x, rows in zip(flat, rows_JN[:, part], strict=True)])
        arguments = (drafter, hidden, targets.last_ND[part], head_VD, ids_K, kind, decay)
        if torch.is_grad_enabled():
            found = checkpoint(compiled or figures, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            found = (compiled or figures)(*arguments)
        parts.append(cast("tuple[Tensor, ...]", found))
    loss, alpha, hit, gap, inside = (torch.cat(found, -1) for found in zip(*parts, strict=True))
    return PredictionRows(valid, valid & inside, loss, alpha, hit, gap)


def chunk_rows(vocabulary: int) -> int:
    """Rows R of a chunk: a power of two from 512, below which matmuls are slow, to 16,384.

    Not more, since batches are padded to whole chunks.
    """
    return min(max(512, 1 << (CHUNK_BYTES // (4 * vocabulary)).bit_length() - 1), 16384)


def figures(
    drafter: Eagle3,
    normed_JRD: Tensor,
    last_RD: Tensor,
    head_VD: Tensor,
    ids_K: Tensor | None,
    kind: Kind,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, alpha, hit, gap) [J, R] and whether the target's argmax is in the draft vocabulary [R].

    ids_K: the tokens of the draft vocabulary; None: the whole vocabulary.
    """
    with torch.no_grad():
        log_p = target_logits(last_RD, head_VD).log_softmax(-1)
        top, favourite = log_p.max(-1)
        if ids_K is None:
            log_p_K, log_p_draft, inside = log_p, log_p, torch.ones_like(favourite, dtype=torch.bool)
        else:
            log_p_K = log_p[:, ids_K]
            log_p_draft = log_p_K.log_softmax(-1)
            inside = (ids_K == favourite[:, None]).any(-1)
        p_K, p_draft = log_p_K.exp(), log_p_draft.exp()
    losses: list[Tensor] = []
    others: list[tuple[Tensor, Tensor, Tensor]] = []
    for normed_RD in normed_JRD:
        log_q = drafter.draft_logits(normed_RD).float().log_softmax(-1)
        kl = (p_draft * (log_p_draft - log_q)).sum(-1)
        if kind == "lk":
            alpha = torch.minimum(p_K, log_q.exp()).sum(-1)  # differentiable
            weight = (-decay * alpha.detach()).exp()
            losses.append(weight * kl + (1 - weight) * (1 - alpha))
        else:
            losses.append(kl)
        with torch.no_grad():
            chosen = log_q.argmax(-1)
            p_chosen = log_p_K.gather(-1, chosen[:, None])[:, 0]
            hit = (chosen if ids_K is None else ids_K[chosen]) == favourite
            others.append((torch.minimum(p_K, log_q.exp()).sum(-1), hit, top.exp() - p_chosen.exp()))
    alpha, hit, gap = (torch.stack(found) for found in zip(*others, strict=True))
    return torch.stack(losses), alpha, hit, gap, inside


def target_logits(last_RD: Tensor, head_VD: Tensor) -> Tensor:
    """float32 [R, V], from bf16 matmuls with float32 accumulation if the machine has them."""
    with torch.autocast(last_RD.device.type, enabled=False):
        if last_RD.is_cuda and last_RD.dtype == head_VD.dtype == torch.bfloat16:
            return torch.mm(last_RD, head_VD.T, out_dtype=torch.float32)
        return last_RD.float() @ head_VD.float().T


def per_sequence(
    rows: PredictionRows, targets: TrainTargets, sequences: int, step_weights: Sequence[float], focus: float
) -> Tensor:
    """The loss of each sequence [S], nats per token: the mean over its tokens, weighted over steps.

    So all sequences have the same weight, regardless of length (DeepSpec: with a mean over tokens, acceptance falls as
    training continues). step_weights: one for each of the J steps. focus c > 0: tokens are weighted by 1 + c gap,
    normalised to mean 1 within their sequence.
    """
    weight = rows.kept.float() * (1 + focus * rows.gap)
    total, norm = (
        torch.zeros(x.shape[0], sequences, device=x.device).index_add_(1, targets.sequences_N, x)
        for x in (torch.where(rows.kept, weight * rows.loss, 0.0), weight)
    )
    steps = torch.tensor(step_weights, device=total.device)
    return ((steps / steps.sum())[:, None] * total / norm.clamp_min(1e-9)).sum(0)


class Stats(NamedTuple):
    """Sums over tokens, [J] each, float64, of a batch or a rank; they add up. `DrafterMetrics` holds their means."""

    tokens: Tensor
    loss: Tensor
    hits: Tensor
    alpha: Tensor
    runs: Tensor  # number of rows for which all tokens of steps 0..j exist
    run_hits: Tensor  # number of those rows that hit in all of steps 0..j
    run_alpha: Tensor  # sum over those rows of the product of alpha over steps 0..j


@torch.no_grad()
def count(rows: PredictionRows, targets: TrainTargets, positions: int) -> Stats:
    """The sums of a batch of `positions` = B * T rows."""
    valid = rows.valid.double()
    found = [valid, torch.where(rows.kept, rows.loss, 0.0), rows.hit * valid, rows.alpha * valid]
    sums = [x.double().sum(-1) for x in found]
    alive, hits, alpha = (torch.ones(positions, dtype=torch.float64, device=valid.device) for _ in range(3))
    runs: list[tuple[Tensor, Tensor, Tensor]] = []
    for step in range(valid.shape[0]):
        # Row t = u - 2 - step; tokens that no row predicts go to one extra row, which is cut off.
        row = torch.where(rows.valid[step], targets.rows_N - 2 - step, positions)
        there, hit, accepted = (
            x.new_zeros(positions + 1).index_copy_(0, row, x)[:-1]
            for x in (valid[step], found[2][step], found[3][step].double())
        )
        alive, hits, alpha = alive * there, hits * there * hit, alpha * there * accepted
        runs.append((alive.sum(), hits.sum(), alpha.sum()))
    return Stats(*sums, *(torch.stack(one) for one in zip(*runs, strict=True)))


class DrafterMetrics(NamedTuple):
    """A drafter's results on some sequences: per step, and the predicted length with J drafts."""

    tokens: int
    loss: list[float]
    agreement: list[float]  # share of tokens at which both have the same argmax
    alpha: list[float]
    accepted: list[float]  # share of rows that hit in all of steps 0..j (greedy)
    accepted_sampled: list[float]

    def length(self, drafts: int | None = None) -> float:
        """Simulated greedy acceptance length, including the bonus token: 1 + sum_j P(steps 0..j all hit).

        drafts: drafts per round; None: the number of steps.
        """
        return 1 + sum(self.accepted[:drafts])

    def length_sampled(self, drafts: int | None = None) -> float:
        """The same at temperature 1: with the product of alpha per row instead of hits."""
        return 1 + sum(self.accepted_sampled[:drafts])


def measured(stats: Stats) -> DrafterMetrics:
    """The means of the sums; 0 if nothing was counted."""
    tokens, loss, hits, alpha, runs, run_hits, run_alpha = (x.tolist() for x in stats)

    def mean(sums: list[float], counts: list[float]) -> list[float]:
        return [total / max(number, 1.0) for total, number in zip(sums, counts, strict=True)]

    return DrafterMetrics(
        round(tokens[0]), mean(loss, tokens), mean(hits, tokens), mean(alpha, tokens), mean(run_hits, runs),
        mean(run_alpha, runs),
    )  # fmt: skip
