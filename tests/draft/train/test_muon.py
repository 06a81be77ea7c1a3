"""Muon: the size and the direction of a matrix's step; the other parameters move as with AdamW."""

import torch
from torch import nn

from redline.draft.train.muon import DECAY, MOMENTUM, TIMES, Muon, orthogonalized


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_orthogonalized_matrices_have_singular_values_near_one():
    for shape in ((3, 2, 40, 24), (2, 24, 40)):
        values = torch.linalg.svdvals(orthogonalized(random(*shape)).float())
        assert values.min() > 0.4
        assert values.max() < 1.4


def test_a_matrix_moves_by_its_rate_and_scale_whatever_its_gradients_size():
    rate, scale = 1e-2, 3.0
    small, large, wide = (nn.Parameter(random(*shape, seed=n)) for n, shape in enumerate([(8, 4), (8, 4), (4, 8)]))
    before = [w.detach().clone() for w in (small, large, wide)]
    gradient = random(8, 4, seed=9)
    small.grad, large.grad, wide.grad = gradient * 1e-3, gradient * 1e3, gradient.T.clone()
    Muon([(small, 1.0), (large, scale), (wide, 1.0)], [nn.Parameter(torch.zeros(2))], rate).step()
    u, _, v = torch.linalg.svd(gradient, full_matrices=False)
    for w, old, own, tall in zip((small, large, wide), before, (1.0, scale, 1.0), (2**0.5, 2**0.5, 1.0), strict=True):
        moved = (old * (1 - TIMES * rate * DECAY) - w.detach()) / (TIMES * rate * own * tall)
        values = torch.linalg.svdvals(moved)
        assert values.min() > 0.4
        assert values.max() < 1.4
        along = (u @ v if w is not wide else (u @ v).T) * moved
        assert along.sum() > 0.9 * 4, "in the direction of the nearest orthogonal matrix"


def test_momentum_keeps_the_direction_of_earlier_gradients():
    w = nn.Parameter(torch.zeros(4, 4))
    optimizer = Muon([(w, 1.0)], [nn.Parameter(torch.zeros(2))], 1e-3)
    first, second = torch.eye(4), -0.05 * torch.eye(4)
    for gradient in (first, second):
        w.grad = gradient
        before = w.detach().clone()
        optimizer.step()
    held = (first * (1 - MOMENTUM)).lerp(second, 1 - MOMENTUM)
    torch.testing.assert_close(optimizer.state[w]["exp_avg"], held)
    assert (w.detach() - before).trace() < 0, "the step still follows the first gradient"


def test_the_others_move_as_with_adamw():
    others = [nn.Parameter(random(5, seed=n)) for n in range(2)]
    alone = [nn.Parameter(w.detach().clone()) for w in others]
    matrix = nn.Parameter(random(4, 4))
    given = {"betas": (0.8, 0.9), "weight_decay": 0.1}
    both = Muon([(matrix, 1.0)], others, 1e-2, **given), torch.optim.AdamW(alone, lr=1e-2, **given)
    for seed in range(3):
        matrix.grad = random(4, 4, seed=seed)
        for w, copy in zip(others, alone, strict=True):
            w.grad = random(5, seed=seed + 10)
            copy.grad = w.grad.clone()
        for optimizer in both:
            optimizer.step()
        assert matrix.grad is not None, "dropped by zero_grad and not before"
    for w, copy in zip(others, alone, strict=True):
        assert torch.equal(w, copy)
