"""Losses equal their formulas for any chunk size; sequences have equal weights; expected acceptance is counted."""

import pytest
import torch
from torch import Tensor

from redline.draft.train import losses
from redline.draft.train.batches import collate, groups
from redline.draft.train.losses import PredictionRows, TrainTargets
from redline.model.eagle3.module import Eagle3, Eagle3Config
from tests.draft.train.captured import VOCABULARY, Given, sequences, target_config

STEPS = 3
HEAD = torch.randn(VOCABULARY, 32, generator=torch.Generator().manual_seed(7))


def drafter_of(vocabulary: int | None = -1) -> Eagle3:
    torch.manual_seed(1)
    drafter = Eagle3(Eagle3Config.for_target(target_config(), draft_vocab_size=vocabulary))
    if vocabulary not in (None, -1):
        drafter.keep(torch.randperm(VOCABULARY)[:vocabulary])
    drafter.initialise(torch.randn(VOCABULARY, 32), HEAD)
    return drafter


def batch_of(*lengths: int, answer: int = 4) -> tuple[list[Tensor], TrainTargets, int]:
    """(normed of each step [B, T, D], targets, sequences)"""
    batch = collate(sequences(HEAD, lengths, answer=answer), 4096, 1)
    torch.manual_seed(3)
    return [torch.randn(*batch.tokens.shape, 32) * 0.4 for _ in range(STEPS)], batch.targets, batch.sequences


def by_hand(drafter: Eagle3, hidden: Tensor, last: Tensor) -> dict[str, float]:
    """The figures of one row, in float64."""
    p = (last.double() @ HEAD.double().T).softmax(-1)
    z = drafter.draft_logits(hidden).double().detach()
    ids = drafter.token_ids()
    ids = torch.arange(VOCABULARY) if ids is None else ids
    q = z.softmax(-1)
    kept = p[ids] / p[ids].sum()
    alpha = float(torch.minimum(p[ids], q).sum())
    kl = float((kept * (kept / q).log()).sum())
    mix = float(torch.exp(torch.tensor(-3.0 * alpha)))
    chosen = int(ids[z.argmax()])
    return {
        "kl": kl,
        "lk": mix * kl + (1 - mix) * (1 - alpha),
        "alpha": alpha,
        "hit": float(chosen == int(p.argmax())),
        "gap": float(p.max() - p[chosen]),
        "inside": float(int(p.argmax()) in ids.tolist()),
    }


@pytest.mark.parametrize("vocabulary", [-1, None, 40])
@pytest.mark.parametrize("kind", ["kl", "lk"])
def test_each_figure_is_its_formula(kind: losses.Kind, vocabulary: int | None):
    drafter = drafter_of(vocabulary)
    normed, targets, _ = batch_of(9, 12)
    with torch.no_grad():
        rows = losses.compare(drafter, normed, HEAD, targets, kind)
    for step in range(STEPS):
        for n in range(targets.rows_N.shape[0]):
            if not rows.valid[step, n]:
                continue
            row = int(targets.rows_N[n]) - 2 - step
            wanted = by_hand(drafter, normed[step].flatten(0, 1)[row], targets.last_ND[n])
            found = rows.loss[step, n], rows.alpha[step, n], rows.hit[step, n], rows.gap[step, n]
            for value, key in zip(found, (kind, "alpha", "hit", "gap"), strict=True):
                assert float(value) == pytest.approx(wanted[key], rel=1e-4, abs=1e-5)
            assert bool(rows.kept[step, n]) == bool(wanted["inside"])


def test_a_row_counts_where_the_token_it_predicts_is_of_the_answer_and_the_sequence():
    normed, targets, _ = batch_of(10, answer=4)
    rows = losses.compare(drafter_of(), normed, HEAD, targets)
    predicted = [targets.places_N[valid].tolist() for valid in rows.valid]
    assert predicted == [list(range(4, 10))] * STEPS
    _, targets, _ = batch_of(6, answer=0)
    rows = losses.compare(drafter_of(), normed, HEAD, targets)
    predicted = [targets.places_N[valid].tolist() for valid in rows.valid]
    assert predicted == [[2, 3, 4, 5], [3, 4, 5], [4, 5]], "row t of step j predicts t + 2 + j"


@pytest.mark.parametrize("kind", ["kl", "lk"])
def test_chunks_change_neither_figures_nor_gradients(kind: losses.Kind):
    drafter = drafter_of()
    normed, targets, _ = batch_of(17, 30, 8)
    found: list[tuple[Tensor, ...]] = []
    for chunk in (7, 1000):
        leaves = [x.clone().requires_grad_() for x in normed]
        rows = losses.compare(drafter, leaves, HEAD, targets, kind, chunk=chunk)
        loss = torch.where(rows.kept, rows.loss, 0.0).sum()
        found.append((loss, rows.gap, *torch.autograd.grad(loss, [*leaves, drafter.lm_head.weight])))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_the_gradient_of_kl_is_the_softmax_minus_the_target():
    drafter = drafter_of()
    normed, targets, _ = batch_of(9)
    leaves = [x.clone().requires_grad_() for x in normed]
    rows = losses.compare(drafter, leaves, HEAD, targets)
    rows.loss[0, 2].backward()
    row = int(targets.rows_N[2]) - 2
    p = (targets.last_ND[2].float() @ HEAD.T).softmax(-1)
    q = drafter.draft_logits(normed[0][0, row]).softmax(-1)
    torch.testing.assert_close(leaves[0].grad[0, row], (q - p) @ drafter.lm_head.weight, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_lk_leaves_its_weight_alone():
    """The gradient of w kl + (1 - w)(1 - alpha), where w = exp(-decay alpha) counts as a constant; otherwise a
    lower acceptance would reduce the loss."""
    drafter, decay = drafter_of(), 30.0
    normed, targets, _ = batch_of(9)
    leaves = [x.clone().requires_grad_() for x in normed]
    losses.compare(drafter, leaves, HEAD, targets, "lk", decay).loss[1, 2].backward()
    row = int(targets.rows_N[2]) - 3
    p = (targets.last_ND[2].float() @ HEAD.T).softmax(-1)
    hidden = normed[1][0, row].clone().requires_grad_()
    log_q = drafter.draft_logits(hidden).log_softmax(-1)
    alpha = torch.minimum(p, log_q.exp()).sum()
    weight = float(torch.exp(-decay * alpha.detach()))
    (weight * (p * (p.log() - log_q)).sum() + (1 - weight) * (1 - alpha)).backward()
    assert 0.05 < weight < 0.95
    torch.testing.assert_close(leaves[1].grad[0, row], hidden.grad, rtol=1e-4, atol=1e-6)


def figures(loss: Tensor, gap: Tensor, kept: Tensor) -> PredictionRows:
    return PredictionRows(kept, kept, loss, loss, kept, gap)


def test_every_sequence_weighs_the_same_however_long():
    sequence = torch.tensor([0, 1, 1, 1, 1])
    targets = TrainTargets(sequence, sequence, sequence, HEAD[:5])
    loss = torch.tensor([[5.0, 1, 1, 1, 1]])
    kept = torch.ones(1, 5, dtype=torch.bool)
    found = losses.per_sequence(figures(loss, torch.zeros(1, 5), kept), targets, 2, [1.0], 0.0)
    assert found.tolist() == [5.0, 1.0]


def test_focus_moves_weight_to_gaps_within_a_sequence():
    sequence = torch.tensor([0, 0, 1])
    targets = TrainTargets(sequence, sequence, sequence, HEAD[:3])
    loss, gap = torch.tensor([[1.0, 4.0, 2.0]]), torch.tensor([[0.0, 0.5, 0.9]])
    kept = torch.ones(1, 3, dtype=torch.bool)
    found = losses.per_sequence(figures(loss, gap, kept), targets, 2, [1.0], 2.0)
    assert found.tolist() == pytest.approx([(1 + 2 * 4) / 3, 2.0])


def test_later_steps_weigh_less_and_what_is_not_kept_nothing():
    sequence = torch.tensor([0, 0])
    targets = TrainTargets(sequence, sequence, sequence, HEAD[:2])
    loss = torch.tensor([[1.0, 9.0], [4.0, torch.nan]])
    kept = torch.tensor([[True, False], [True, False]])
    found = losses.per_sequence(figures(loss, torch.zeros(2, 2), kept), targets, 1, [1.0, 0.5], 0.0)
    assert found.tolist() == pytest.approx([(1 + 0.5 * 4) / 1.5])


def test_the_length_is_of_rows_whose_drafts_all_hold_not_a_product_of_means():
    """Two rows: one always right, one never. The product of means is 1 + 1/2 + 1/4; half of the rows give 2 more."""
    targets = TrainTargets(
        torch.tensor([2, 3, 12, 13]), torch.tensor([2, 3, 2, 3]), torch.tensor([0, 0, 1, 1]), HEAD[:4]
    )
    valid = targets.places_N >= torch.tensor([[2], [3]])
    hit = torch.tensor([[True, True, False, False]] * 2) & valid
    rows = PredictionRows(valid, valid, torch.zeros(2, 4), hit.float(), hit, torch.zeros(2, 4))
    found = losses.measured(losses.count(rows, targets, 20))
    assert found.agreement == [0.5, 0.5]
    assert (found.length(), found.length(1), found.length_sampled()) == (2.0, 1.5, 2.0)


def test_a_drafter_that_knows_the_target_is_always_accepted():
    """Its hidden states equal the target's."""
    drafter = drafter_of()
    batch = collate(sequences(HEAD, [20, 30]), 4096, 1)
    last = torch.zeros(batch.tokens.numel() + 4, 32)
    last[batch.targets.rows_N] = batch.targets.last_ND.float()
    normed = [last[2 + step :][: batch.tokens.numel()].view(*batch.tokens.shape, 32) for step in range(STEPS)]
    rows = losses.compare(drafter, normed, HEAD, batch.targets)
    found = losses.measured(losses.count(rows, batch.targets, batch.tokens.numel()))
    assert found.length() == 1 + STEPS
    assert found.length_sampled() == pytest.approx(1 + STEPS, abs=1e-4)
    assert max(found.loss) < 1e-5


def test_batches_cost_no_more_rows_than_they_were_given_and_little_filling():
    lengths = torch.randint(5, 400, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    drawn = groups(Given(sequences(HEAD, lengths)), tokens=2048, max_length=256, pool=8, share=0.1, seed=1)
    rows = real = 0
    for _, group in zip(range(30), drawn, strict=False):
        batch = collate(group, 256, 1)
        assert batch.tokens.numel() <= 2048
        rows, real = rows + batch.tokens.numel(), real + batch.positions
    assert real / rows > 0.85
