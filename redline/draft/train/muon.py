"""Muon (Jordan et al., "Muon: An optimizer for hidden layers", 2024) for a drafter's matrices, AdamW for the rest.

The momentum of a matrix is replaced by the nearest matrix whose singular values are all near one.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from redline.draft.train.train_state import put, whole

TIMES = 20.0  # a matrix's learning rate over AdamW's
MOMENTUM = 0.95
DECAY = 0.02  # of a matrix, per unit of its rate


class Muon(torch.optim.AdamW):
    """Both optimisers in one, so that state, schedule and sharding are as with AdamW alone.

    A matrix has the state `exp_avg`, its momentum, and no `exp_avg_sq`. Sharded matrices (DTensor) are gathered for
    their update, which every rank computes.
    """

    def __init__(
        self, matrices: Sequence[tuple[Tensor, float]], others: Sequence[Tensor], lr: float, **adam: Any
    ) -> None:
        """matrices: with the scale of each, by which its steps are multiplied. lr: AdamW's; a matrix has 20 times it.

        adam: arguments of AdamW for the others.
        """
        scales = sorted({scale for _, scale in matrices})
        groups: list[dict[str, Any]] = [{"params": list(others), "scale": None}]
        groups += [{"params": [w for w, own in matrices if own == scale], "scale": scale} for scale in scales]
        super().__init__(groups, lr=lr, **adam)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Moves all parameters that have a gradient. closure: not used."""
        assert closure is None, "a step has its gradients already"
        moved: list[tuple[Tensor, Tensor]] = []  # AdamW skips a parameter without a gradient
        for group in self.param_groups:
            if group["scale"] is None:
                continue
            for matrices in _by_shape(w for w in group["params"] if w.grad is not None):
                self._move(matrices, TIMES * group["lr"], group["scale"])
                moved += [(w, w.grad) for w in matrices if w.grad is not None]
        for w, _ in moved:
            w.grad = None
        super().step()
        for w, grad in moved:
            w.grad = grad

    def _move(self, matrices: Sequence[Tensor], rate: float, scale: float) -> None:
        ahead: list[Tensor] = []
        for w in matrices:
            assert w.grad is not None, "chosen by it"
            entry = self.state[w]
            if not entry:
                entry["step"], entry["exp_avg"] = torch.tensor(0.0), torch.zeros_like(w)
            entry["step"] += 1
            entry["exp_avg"].lerp_(w.grad, 1 - MOMENTUM)
            ahead.append(whole(w.grad.lerp(entry["exp_avg"], MOMENTUM)))
        updates = orthogonalized(torch.stack(ahead)).to(torch.float32)
        rows, columns = updates.shape[1:]
        # A tall matrix turns a unit input into a longer output; this keeps the change of the output's size alike.
        updates = updates * (-rate * scale * max(1.0, rows / columns) ** 0.5)
        for w, update in zip(matrices, updates, strict=True):
            own = torch.empty_like(w)
            put(own, update)
            w.mul_(1 - rate * DECAY).add_(own)


def _by_shape(matrices: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    found: dict[torch.Size, list[Tensor]] = {}
    for w in matrices:
        found.setdefault(w.shape, []).append(w)
    return found.values()


def orthogonalized(stack: Tensor, steps: int = 5) -> Tensor:
    """[..., N, K] -> the same shape: each matrix with its own singular vectors, and singular values of 0.7 to 1.2."""
    # bf16 is precise enough for a direction; CPUs without bf16 units are far slower in it.
    x = stack.flatten(0, -3).to(torch.bfloat16 if stack.is_cuda else torch.float32)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        # Jordan's quintic, steep at zero so that small singular values rise fast.
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x if wide else x.mT).reshape(stack.shape)
