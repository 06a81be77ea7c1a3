"""Muon for matrices, AdamW for the rest, over stacks of float32 masters. A stack of matrices moves together."""

import torch
from torch import Tensor

from nano.model import Weights
from redline.draft.train.muon import orthogonalized

# Rates at the plateau of the schedule, for about 131 thousand tokens a step.
MATRIX_RATE = 0.02
RATES = {"embed": 0.15, "head": 0.004, "router": 0.003, "norm": 0.004}
MATRIX_DECAY = 0.05  # of a matrix, per unit of rate: bounds its norm, and so the attention logits
MOMENTUM = 0.95
BETAS = (0.9, 0.97)
CLIP = 1.0  # norm of all gradients; Muon does not notice, Adam does


class Optimizer:
    """Muon and AdamW over float32 masters, which `step` moves in place."""

    def __init__(self, masters: Weights) -> None:
        self._masters = masters
        self._matrices = [name for name, w in masters.items() if w.ndim >= 3 and name != "router"]
        self._others = [name for name in masters if name not in self._matrices]
        self._momentum = {name: torch.zeros_like(masters[name]) for name in self._matrices}
        self._first = [torch.zeros_like(masters[name]) for name in self._others]
        self._second = [torch.zeros_like(masters[name]) for name in self._others]
        self._steps = 0

    @torch.no_grad()
    def step(self, scale: float) -> Tensor:
        """One update from the masters' gradients, which are then dropped. scale: the schedule's factor, 0 to 1.

        Gives the norm of all gradients before clipping, a scalar on the device.
        """
        self._steps += 1
        grads = [w.grad for w in self._masters.values() if w.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        self._adam(scale, (CLIP / (norm + 1e-6)).clamp_max(1.0))
        for name in self._matrices:
            self._muon(name, scale * MATRIX_RATE)
        for w in self._masters.values():
            w.grad = None
        return norm

    def _muon(self, name: str, rate: float) -> None:
        w, momentum = self._masters[name], self._momentum[name]
        assert w.grad is not None, name
        # The first steps' gradients say little about later ones.
        beta = min(MOMENTUM, 0.85 + 0.1 * self._steps / 300)
        momentum.lerp_(w.grad, 1 - beta)
        update = orthogonalized(w.grad.lerp(momentum, beta))
        # A tall matrix turns a unit input into a longer output; this keeps the change of the output's size alike.
        tall = max(1.0, w.shape[-2] / w.shape[-1]) ** 0.5
        w.mul_(1 - rate * MATRIX_DECAY).add_(update.to(w.dtype), alpha=-rate * tall)

    def _adam(self, scale: float, clip: Tensor) -> None:
        weights = [self._masters[name] for name in self._others]
        grads = [w.grad for w in weights if w.grad is not None]
        torch._foreach_mul_(grads, clip)
        torch._foreach_lerp_(self._first, grads, 1 - BETAS[0])
        torch._foreach_mul_(self._second, BETAS[1])
        torch._foreach_addcmul_(self._second, grads, grads, 1 - BETAS[1])
        roots = torch._foreach_sqrt(torch._foreach_div(self._second, 1 - BETAS[1] ** self._steps))
        torch._foreach_add_(roots, 1e-10)
        updates = torch._foreach_div(torch._foreach_div(self._first, 1 - BETAS[0] ** self._steps), roots)
        torch._foreach_mul_(updates, [-scale * _rate(name) for name in self._others])
        torch._foreach_add_(weights, updates)


def _rate(name: str) -> float:
    return RATES["norm" if name.endswith("norm") else name]


def schedule(progress: float, warmup: float = 0.01, decay: float = 0.5) -> float:
    """The learning rate's factor, 0 to 1, at `progress` (0 to 1) of the run.

    It rises over the first `warmup` of the run, stays level, and falls over the last `decay` to zero along a line.
    """
    return min(progress / warmup, 1.0, max(1.0 - progress, 0.0) / decay)


def balance(bias: Tensor, load: Tensor, rate: float) -> None:
    """DeepSeek-V3's balancing without a loss: the bias of an overloaded expert sinks, of an idle one rises.

    bias, load float32 [M, E]; moves the bias in place and keeps its mean at zero, since only differences choose.
    """
    bias += rate * torch.sign(load.mean(-1, keepdim=True) - load)
    bias -= bias.mean(-1, keepdim=True)
