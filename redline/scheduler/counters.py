"""The scheduler's counters since the start, which `Load` reports. They only grow."""

from bisect import bisect_left

from redline.messages.news import STEP_SIZES
from redline.messages.step import Step, StepResult


class PlanCounters:
    """planned: scheduled steps. replayed, led: settled steps with and without a CUDA graph. step_sizes: settled steps
    by their number of positions, in the intervals of STEP_SIZES. The prompt of a job counts when it first starts, its
    generated tokens when they are settled."""

    def __init__(self) -> None:
        self.planned = 0
        self.replayed = 0
        self.led = 0
        self.step_sizes = [0] * (len(STEP_SIZES) + 1)
        self.step_positions = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0

    def settled(self, step: Step, result: StepResult) -> None:
        """Count a settled step."""
        self.replayed += result.replayed
        self.led += not result.replayed
        positions = sum(row.count for row in step.rows)
        self.step_sizes[bisect_left(STEP_SIZES, positions)] += 1
        self.step_positions += positions
