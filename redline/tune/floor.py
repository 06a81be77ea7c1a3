"""The least time of a step on this machine: what it must read over how fast memory is, or what it must compute over how
fast that goes, whichever takes longer.

    bytes       weights + head + experts x share of them that are chosen + context x a position's latents
                + passes of the drafter x its weights
    operations  positions x all weights that one meets + heads x the head + pairs x attention
                + rows drafted x the drafter's weights

Weights are read once a step, whatever its size; of the experts as many as are chosen where each position chooses on its
own, on the mean.
"""

from typing import NamedTuple

from redline.tune.pairs import chosen_share
from redline.wire.base import Record


class Counted(NamedTuple):
    """What a step has, counted by whoever planned it."""

    positions: int = 0  # that go through the layers: of prompts, of answers, and drafts that were verified
    heads: int = 0  # of these, whose next token is asked for
    context: int = 0  # positions whose latents are read, each row's own
    pairs: float = 0.0  # positions of answers and drafts, times the positions that each attends to
    prompt_pairs: float = 0.0  # the same of prompts, whose attention has another form
    passes: int = 0  # of the learned drafter
    drafted: int = 0  # rows of all its passes


class StepWork(Record, frozen=True):
    """What a model's steps must move and compute, of one rank. Bytes of weights, operations of one position."""

    weight_bytes: (
        float  # of all that every position meets but the head; of the embedding a row is read, which is left out
    )
    head_bytes: float
    expert_bytes: float  # of all experts of all layers
    experts_of: int  # of a layer
    experts_chosen: int  # by a position
    latent_bytes: float  # of a position in all layers
    position_ops: float  # in all layers, chosen experts among it, attention to others left out
    head_ops: float
    pair_ops: float  # attention of an answer's position to one other, in all layers
    prompt_pair_ops: float
    draft_bytes: float = 0.0  # of the drafter's weights, that each pass reads
    draft_ops: float = 0.0  # of one row in a pass

    def bytes(self, step: Counted) -> float:
        """What the step must read."""
        experts = self.expert_bytes * chosen_share(self.experts_of, self.experts_chosen, step.positions)
        read = self.weight_bytes + experts + self.latent_bytes * step.context + self.draft_bytes * step.passes
        return read + (self.head_bytes if step.heads else 0.0)

    def operations(self, step: Counted) -> float:
        """What the step must compute; a multiplication and an addition are two."""
        return (
            self.position_ops * step.positions
            + self.head_ops * step.heads
            + self.pair_ops * step.pairs
            + self.prompt_pair_ops * step.prompt_pairs
            + self.draft_ops * step.drafted
        )


class StepFloor(Record, frozen=True):
    """A model's work, and how fast this machine does it, as measured."""

    work: StepWork
    bytes_per_s: float
    ops_per_s: float

    def seconds(self, step: Counted) -> float:
        """The least that the step can take: reading and computing overlap, so the slower of the two decides."""
        return max(self.work.bytes(step) / self.bytes_per_s, self.work.operations(step) / self.ops_per_s)
