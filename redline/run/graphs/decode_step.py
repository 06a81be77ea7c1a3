"""A decode step as a device runs it alone: forward, then settle, from a small plan of integers and its own slots.

Where a row stands only the device knows: each slot's tokens and length are there, and settle moves them on. So the next
step can be given to it before this one has ended, and nothing on the host waits in between. Only what can be recorded
(`graph.py`), and only rows whose logits are taken as they are. What a plan and a result hold:
`kernels.hopper.step.step_rows`.

B rows of a shape, K positions of each, T = B K, V vocabulary.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from redline.kernels.by_chip import best
from redline.kernels.hopper.step.settle_rows import settle_rows
from redline.kernels.hopper.step.step_rows import (
    BEFORE,
    COLUMNS,
    FACTS,
    MIN_P,
    MOST_ROWS,
    RESULT_COLUMNS,
    SEED,
    SLOT,
    TEMPERATURE,
    TOP_K,
    SlotTensors,
    step_rows,
)
from redline.kernels.inputs import Inputs
from redline.model.k2.cpu import K2
from redline.run.graphs.shapes import Shape
from redline.run.kv import KvPool
from redline.run.sampling.on_device import Odds, sample_rows
from redline.run.slots import Slots


class SamplingKind(IntEnum):
    """What a step's rows need at most: all likeliest tokens, draws from the whole vocabulary, or from a part of it."""

    LIKELIEST = 0
    WHOLE = 1
    NARROWED = 2


class SharedState:
    """What recorded steps of all shapes share, on the device. Step after step, each reads it and leaves it changed.

    plan      int64 [MOST_ROWS, COLUMNS], filled before a step
    results   int64 [MOST_ROWS, RESULT_COLUMNS], read after it
    standing  where each slot stands

    The last slot and the last page are nobody's: what is not to be kept goes there.
    """

    def __init__(self, model: K2, slots: Slots, kv: KvPool, layers: Sequence[int] = ()) -> None:
        self.model = model
        self.slots = slots
        self.kv = kv
        self.layers = layers

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=model.device)

        self.plan = zeros(MOST_ROWS, COLUMNS)
        self.results = zeros(MOST_ROWS, RESULT_COLUMNS)
        count = slots.tokens.shape[0]
        self.standing = SlotTensors(slots.tokens, slots.tables, lengths=zeros(count), facts=zeros(count, FACTS))
        self.frequencies = model.config.inv_freq().to(model.device)
        self.nobody = count - 1
        self.spare_page = kv.pages
        slots.tables[self.nobody].fill_(self.spare_page)


class DecodeStep:
    """The step of one shape.

    A position of the shape that no row needs repeats what a row of the step computes, and its latent goes to the page
    that is nobody's. Such a position reads no expert that the step does not read anyway.
    """

    def __init__(self, shared: SharedState, shape: Shape) -> None:
        self.shape = shape
        self.features: Tensor | None = None  # of the last step, [T, layers * D]
        self._shared = shared
        self._plan_BC = shared.plan[: shape.rows]
        positions = shape.rows * shape.positions
        self._tokens_Q = torch.arange(positions, dtype=torch.int32, device=shared.plan.device)
        self._logits_TV: Tensor | None = None

    def forward(self) -> None:
        """Computes the logits of every position from the plan."""
        shared, shape = self._shared, self.shape
        step = step_rows(
            *(self._plan_BC, shared.standing, shared.results),
            *(shared.frequencies, shape.positions, shared.spare_page),
        )
        inputs = Inputs(
            **step._asdict(), chunks=(), tokens_Q=self._tokens_Q, tables=shared.slots.tables, longest=shape.longest
        )
        hidden, self.features = shared.model.forward(inputs, shared.kv.planes, shared.layers)
        self._logits_TV = shared.model.logits(hidden)

    def settle(self, kind: SamplingKind) -> None:
        """Chooses tokens from the logits, and writes those that are certain into the slots and the results.

        It must follow `forward`.
        """
        shared, logits_TV = self._shared, self._logits_TV
        assert logits_TV is not None, "a step is settled behind its forward"
        token_T, finite_T = best(logits_TV)
        if kind != SamplingKind.LIKELIEST:
            token_T = self._drawn(logits_TV, token_T, narrowed=kind == SamplingKind.NARROWED)
            finite_T = finite_T & (token_T >= 0)  # what cannot be drawn is no token
        settle_rows(token_T, finite_T, self._plan_BC, shared.standing, shared.results)

    def _drawn(self, logits_TV: Tensor, likeliest_T: Tensor, *, narrowed: bool) -> Tensor:
        shared, (rows, positions, _) = self._shared, self.shape
        facts_TC = shared.standing.facts[self._plan_BC[:, SLOT]].repeat_interleave(positions, 0)
        temperature_T, top_p_T, min_p_T = facts_TC[:, TEMPERATURE : MIN_P + 1].view(torch.float64).unbind(1)
        cold_T = temperature_T == 0
        position_T = (
            shared.results[:rows, BEFORE, None] + torch.arange(positions, device=shared.plan.device)
        ).flatten()
        odds = Odds(temperature_T + cold_T, top_p_T, min_p_T, facts_TC[:, TOP_K], facts_TC[:, SEED], position_T)
        return torch.where(cold_T, likeliest_T, sample_rows(logits_TV, odds, narrowed=narrowed))

    def forget(self) -> None:
        """Lets the next recording have the memory that lies between the pieces: each step writes it anew."""
        self._logits_TV = None
