"""Work and duration of recent steps, for fitting step costs; and sums of step durations and of their floors (minimum
times on this machine).

Steps with prompts are all timed, of the others one in EVERY: `Load` is sent at most five times a second, and contains
the newest steps of each kind. The time of a step is measured from the end of the previous step, if a job was waiting
since then: the time between two tokens of an answer includes the host's work, and is 1.5 times the step itself for a
small model on a CPU. For the comparison with its floor, a step counts with its own duration only.
"""

from collections import deque
from collections.abc import Callable, Sequence

from redline.messages.news import StepKind, StepTimes, TimedStep
from redline.messages.step import Step, StepResult
from redline.policy.floor import StepContents, StepFloor
from redline.policy.pairs import Work, expanded_of, pairs_of
from redline.scheduler.active import ActiveJob

EVERY = 8  # one step without a prompt in EVERY is timed: counting the contexts of 64 rows takes 20 us
KEPT = 2  # steps of each kind


class TimedSteps:
    """The newest steps of each kind, and sums over all timed steps.

    floor: computes the minimum time of a step; None: the machine was not measured, and there are no sums. `hears`:
    called with the work and the milliseconds of each timed step; None disables it. watch: called with every step, its
    floor in seconds (0: unknown) and the number of tokens that its decode rows gave to jobs; None: one step in EVERY is
    timed.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """clock: returns seconds; None: the time of a step is its own duration."""
        self.floor: StepFloor | None = None
        self.hears: Callable[[Work, float], object] | None = None
        self.watch: Callable[[TimedStep, float, int], object] | None = None
        self._clock = clock
        self._before: tuple[float, Sequence[ActiveJob]] = 0.0, ()  # when the previous step settled, and its jobs
        self._with_prompts: deque[TimedStep] = deque(maxlen=KEPT)
        self._without: deque[TimedStep] = deque(maxlen=KEPT)
        self._sums: dict[StepKind, StepTimes] = {}

    @property
    def newest(self) -> tuple[TimedStep, ...]:
        """Ordered by their numbers."""
        return tuple(sorted([*self._with_prompts, *self._without], key=lambda step: step.number))

    @property
    def sums(self) -> tuple[StepTimes, ...]:
        """One for each kind that occurred."""
        return tuple(self._sums.values())

    def took(
        self, step: Step, jobs: Sequence[ActiveJob], result: StepResult, seconds: float, delivered: int = 0
    ) -> None:
        """Add a step that has just settled. jobs: one for each of its rows. seconds: its own duration. delivered:
        number of tokens that its decode rows gave to jobs, without those after a job's end."""
        (last, waited), now = self._before, 0.0 if self._clock is None else self._clock()
        self._before = now, jobs
        with_prompts = step.rows[-1].start is not None  # decode rows come before all others
        if not with_prompts and step.number % EVERY and self.watch is None:
            return
        prompt, prompt_pairs, expanded, rows, context, tokens = 0, 0.0, 0, 0, 0, 0
        verified, read, pairs, sampled, drafted = 0, 0, 0.0, 0, list[int]()
        for row, job, outcome in zip(step.rows, jobs, result.rows, strict=True):
            if row.drafting and row.propose:
                drafted.append(row.propose)
            if row.start is None:
                given, positions = len(outcome.tokens), 1 + outcome.proposed
                rows += 1
                context += job.computed
                tokens += given
                verified += positions
                read += job.computed - given + positions
                pairs += pairs_of(job.computed - given, positions)
            else:
                prompt += row.count
                prompt_pairs += pairs_of(row.start, row.count)
                expanded += expanded_of(row.start, row.count)
                read += row.start + row.count
                sampled += row.samples
        since_s = now - last if any(jobs[0] is other for other in waited) else seconds
        timed = TimedStep(
            number=step.number,
            prompt=prompt,
            pairs=prompt_pairs,
            expanded=expanded,
            rows=rows,
            context=context,
            tokens=tokens,
            ms=1e3 * max(seconds, since_s),
        )
        (self._with_prompts if with_prompts else self._without).append(timed)
        if self.hears is not None:
            self.hears(Work(prompt, prompt_pairs, rows, context, expanded), timed.ms)
        if self.floor is None:
            if self.watch is not None:
                self.watch(timed, 0.0, delivered)
            return
        by_row = result.drafted if result.drafted is not None else drafted
        counted = StepContents(
            positions=prompt + verified,
            heads=verified + sampled,
            context=read,
            pairs=pairs,
            prompt_pairs=prompt_pairs,
            passes=max(by_row, default=0),
            drafted=sum(by_row),
        )
        floor_s = self.floor.seconds(counted)
        if self.watch is not None:
            self.watch(timed, floor_s, delivered)
        kind: StepKind = "prompts" if with_prompts else "decode"
        before = self._sums.get(kind, StepTimes(kind=kind))
        self._sums[kind] = StepTimes(
            kind=kind,
            steps=before.steps + 1,
            seconds=before.seconds + seconds,
            floor_s=before.floor_s + floor_s,
        )
