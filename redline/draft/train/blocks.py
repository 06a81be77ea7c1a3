"""Training of block drafters: random anchors in each sequence, all their blocks in one pass (DSpark, arXiv 2607.05147).

A block begins at an anchor p, a token of the sequence whose next token is part of an answer. It sees the target's
states of the tokens before p, and itself. Its j-th draft predicts token p + 1 + j; DSpark's bias reads the true token
p + j before it. The teacher of that draft is the target's distribution after token p + j.

    loss = 0.1 CE + 0.9 |p - q| + BCE(confidence, alpha)         each times exp(-j / decay)

with alpha = sum min(p, q) the probability that a sampled draft is accepted, and |p - q| = 2 (1 - alpha).

S sequences, T rows, A anchors of each, B positions of a block, J drafts, D hidden, V draft vocabulary, M drafts of a
batch whose token exists, R of them in a chunk.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from redline.draft.train.batches import TrainBatch
from redline.draft.train.losses import Stats, chunk_rows, target_logits
from redline.model.block.module import BlockDrafter

CROSS_ENTROPY, VARIATION = 0.1, 0.9  # weights of DSpark's loss


class Anchors(NamedTuple):
    """The anchors of a batch [S, A]; those of a sequence with fewer are not kept."""

    places: Tensor  # int64
    kept: Tensor  # bool


def anchors_of(batch: TrainBatch, number_BT: Tensor, most: int, *, random: bool) -> Anchors:
    """At most `most` anchors of each sequence. random: drawn anew, by torch's generator; else evenly spread.

    number_BT: as `numbers` returns it.
    """
    after = number_BT.roll(-1, 1)
    after[:, -1] = -1
    usable = (after >= 0).cpu()
    keys = torch.rand(usable.shape) if random else _spread(usable)
    order = keys.masked_fill(~usable, 2.0).sort(dim=1, stable=True).indices[:, :most]
    kept = torch.gather(usable, 1, order)
    return Anchors(order.to(batch.tokens.device), kept.to(batch.tokens.device))


def _spread(usable: Tensor) -> Tensor:
    """Keys by which the first n usable places of a row are spread evenly over it, for any n: the golden ratio's
    multiples, modulo 1."""
    rank = usable.long().cumsum(1)
    return rank.double().mul(0.6180339887498949).frac().float()


def numbers(batch: TrainBatch) -> Tensor:
    """int64 [S, T]: the index among the batch's targets of each token that is one, else -1."""
    targets = batch.targets
    found = torch.full(batch.tokens.shape, -1, device=batch.tokens.device).flatten()
    there = (targets.places_N >= 0).nonzero()[:, 0]
    found[targets.rows_N[there]] = there
    return found.view(batch.tokens.shape)


def block_states(drafter: BlockDrafter, batch: TrainBatch, anchors: Anchors) -> Tensor:
    """The head's inputs at the drafting positions of every block, [S, A, J, D]."""
    config, device = drafter.config, batch.tokens.device
    count, rows = batch.tokens.shape
    most, size = anchors.places.shape[1], config.block_size
    ids = torch.full((count, most, size), config.mask_token_id, device=device)
    ids[:, :, 0] = torch.gather(batch.tokens, 1, anchors.places)
    positions = (anchors.places[..., None] + torch.arange(size, device=device)).flatten(1)
    block = torch.arange(most * size, device=device) // size
    before = torch.arange(rows, device=device) < anchors.places.repeat_interleave(size, 1)[..., None]
    seen = torch.cat([before, (block[:, None] == block).expand(count, -1, -1)], -1)
    x = drafter.embed(ids.flatten(1))
    states = drafter(x, drafter.context(batch.features), positions, seen).unflatten(1, (most, size))
    return states[:, :, int(not config.sample_from_anchor) :]


def block_loss(
    drafter: BlockDrafter, batch: TrainBatch, head_VD: Tensor, anchors: int, decay: float, *, learning: bool
) -> tuple[Tensor, Stats]:
    """(sum over sequences of their mean loss, statistics of each draft).

    anchors  of each sequence, at most
    decay    of the weights: exp(-j / decay)
    """
    config, device = drafter.config, batch.tokens.device
    drafts = config.drafts
    number_BT = numbers(batch)
    chosen = anchors_of(batch, number_BT, anchors, random=learning)
    steps = torch.arange(drafts, device=device)
    places_SAJ = chosen.places[..., None] + 1 + steps
    inside = places_SAJ < batch.tokens.shape[1]
    places_SAJ = places_SAJ.clamp_max(batch.tokens.shape[1] - 1)

    def of_tokens(values_ST: Tensor, places: Tensor) -> Tensor:
        return torch.gather(values_ST, 1, places.flatten(1)).view(places.shape)

    number_SAJ = of_tokens(number_BT, places_SAJ)
    # A draft counts only behind drafts that count: the answer's end ends the block.
    valid = (inside & (number_SAJ >= 0) & chosen.kept[..., None]).long().cumprod(-1).bool()
    states = block_states(drafter, batch, chosen)[valid]
    before, label = of_tokens(batch.tokens, places_SAJ - 1)[valid], of_tokens(batch.tokens, places_SAJ)[valid]
    last = batch.targets.last_ND[number_SAJ[valid]]
    figures = _figures(drafter, states, before, label, last, head_VD)
    weight_SAJ = valid * (-steps / decay).exp()
    loss_SAJ, alpha, hit = (torch.zeros(valid.shape, device=device).masked_scatter(valid, each) for each in figures)
    total = (loss_SAJ * weight_SAJ).sum((1, 2)) / weight_SAJ.sum((1, 2)).clamp_min(1e-9)
    with torch.no_grad():
        there, loss, alpha, hit = (x.double().flatten(0, 1) for x in (valid, loss_SAJ, alpha, hit))
        counted = (there, loss, hit, alpha, there, hit.cumprod(1), (alpha * there).cumprod(1))
        stats = Stats(*(each.sum(0) for each in counted))
    return total.sum(), stats


def _figures(
    drafter: BlockDrafter, states: Tensor, before: Tensor, label: Tensor, last: Tensor, head_VD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, alpha, hit) float32 [M] each, a chunk at a time: no [M, V] exists, not even for the gradient."""
    ids_K = drafter.token_ids()
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in torch.arange(len(states), device=states.device).split(chunk_rows(head_VD.shape[0])):
        given = (drafter, states[rows], before[rows], label[rows], last[rows], head_VD, ids_K)
        learning = torch.is_grad_enabled()
        parts.append(checkpoint(_chunk, *given, use_reentrant=False) if learning else _chunk(*given))  # type: ignore[arg-type]
    if not parts:
        none = states.sum() * 0.0
        return none.expand(0), none.expand(0), none.expand(0)
    loss, alpha, hit = (torch.cat(found) for found in zip(*parts, strict=True))
    return loss, alpha, hit


def _chunk(
    drafter: BlockDrafter,
    states_RD: Tensor,
    before: Tensor,
    label: Tensor,
    last_RD: Tensor,
    head_VD: Tensor,
    ids_K: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        p = target_logits(last_RD, head_VD).softmax(-1)
        favourite = p.argmax(-1)
        p_K = p if ids_K is None else p[:, ids_K]
        if ids_K is None:
            known, own = torch.ones_like(label, dtype=torch.bool), label
        else:  # a token outside of the draft vocabulary has no cross-entropy
            place_V = torch.full((len(head_VD),), -1, device=label.device)
            place_V[ids_K] = torch.arange(len(ids_K), device=label.device)
            own, known = place_V[label].clamp_min(0), place_V[label] >= 0
    log_q = drafter.draft_logits(states_RD, before).float().log_softmax(-1)
    alpha = torch.minimum(p_K, log_q.exp()).sum(-1)
    loss = -CROSS_ENTROPY * log_q.gather(-1, own[:, None])[:, 0] * known + VARIATION * 2 * (1 - alpha)
    if drafter.config.confidence:
        given = drafter.confidence(states_RD, before)
        loss = loss + F.binary_cross_entropy_with_logits(given, alpha.detach().clamp(0, 1), reduction="none")
    chosen = log_q.detach().argmax(-1)
    return loss, alpha.detach(), ((chosen if ids_K is None else ids_K[chosen]) == favourite).float()
