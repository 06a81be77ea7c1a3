"""Roofline bound of a step on this machine: bytes to read over memory bandwidth, or operations over peak compute,
whichever takes longer.

    bytes       weights + head + experts x share of them that are chosen + context x a position's latents
                + passes of the drafter x its weights
    operations  positions x weights used by one + heads x the head + pairs x attention
                + rows drafted x the drafter's weights

Weights are read once per step, whatever its size. The share of experts is the expected one if each position chooses its
experts independently.
"""

from typing import NamedTuple

from redline.messages.base import Record
from redline.policy.pairs import chosen_share


class StepContents(NamedTuple):
    """The contents of a step, counted by the scheduler."""

    positions: int = 0  # positions that go through the layers: prompt tokens, decode tokens and verified drafts
    heads: int = 0  # positions for which logits are computed
    context: int = 0  # context positions read from the KV cache, summed over rows
    pairs: float = 0.0  # decode and draft positions x the positions that each attends to
    prompt_pairs: float = 0.0  # the same for prompt positions: their attention has another form
    passes: int = 0  # passes of the learned drafter
    drafted: int = 0  # rows, summed over the drafter's passes


class StepWork(Record, frozen=True):
    """Bytes and operations of one rank's steps. Bytes are of weights; operations are per position."""

    weight_bytes: (
        # all weights that every position uses except the head; the embedding is left out, since one row of it is read
        float
    )
    head_bytes: float
    expert_bytes: float  # all experts of all layers
    experts_of: int  # experts per layer
    experts_chosen: int  # experts per token
    latent_bytes: float  # one position in all layers
    position_ops: float  # one position in all layers, with its chosen experts, without attention to other positions
    head_ops: float
    pair_ops: float  # attention of a decode position to one other position, in all layers
    prompt_pair_ops: float
    draft_bytes: float = 0.0  # the drafter's weights, read in each pass
    draft_ops: float = 0.0  # one row in a pass
    draft_once: bool = False  # one pass drafts all tokens of a step

    def bytes(self, step: StepContents) -> float:
        """Bytes that the step must read."""
        experts = self.expert_bytes * chosen_share(self.experts_of, self.experts_chosen, step.positions)
        passes = min(step.passes, 1) if self.draft_once else step.passes
        read = self.weight_bytes + experts + self.latent_bytes * step.context + self.draft_bytes * passes
        return read + (self.head_bytes if step.heads else 0.0)

    def operations(self, step: StepContents) -> float:
        """Operations of the step; a multiplication and an addition are two."""
        return (
            self.position_ops * step.positions
            + self.head_ops * step.heads
            + self.pair_ops * step.pairs
            + self.prompt_pair_ops * step.prompt_pairs
            + self.draft_ops * step.drafted
        )


class StepFloor(Record, frozen=True):
    """A model's work, and the measured bandwidth and compute rate of this machine."""

    work: StepWork
    bytes_per_s: float
    ops_per_s: float

    def seconds(self, step: StepContents) -> float:
        """Lower bound of the step's time in seconds: reads and compute overlap, so the slower of the two decides."""
        return max(self.work.bytes(step) / self.bytes_per_s, self.work.operations(step) / self.ops_per_s)
