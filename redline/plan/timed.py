"""What some of the newest steps computed and how long they took, for whoever wants to know what steps cost; and how
long steps took, all together, beside the least that they can take on this machine.

Of steps with prompts every one, of others one in EVERY: a load goes out five times a second at most, and says what the
newest of each kind were. What is told of a step is the time from the end of the one before, where somebody waited from
there on: between two tokens of an answer lies what the host does too, half as long again as a CPU's step of a small
model. Beside its floor a step counts for itself.
"""

from collections import deque
from collections.abc import Callable, Sequence

from redline.plan.active import ActiveJob
from redline.tune.floor import Counted, StepFloor
from redline.tune.pairs import Work, expanded_of, pairs_of
from redline.wire.news import StepKind, StepTimes, TimedStep
from redline.wire.step import Step, StepResult

EVERY = 8  # steps without a prompt: counting the contexts of 64 rows takes 20 us
KEPT = 2  # of each kind


class TimedSteps:
    """The newest steps of each kind, and the sums of all that were timed.

    floor: what steps take at least; None: the machine was not measured, and there are no sums. hears: is told of each
    step that was timed, and its milliseconds; None: nobody. watch: called with every step, its floor in seconds (0: not
    known) and the tokens that its decode rows gave to jobs; None: one step in EVERY is timed.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """clock: tells seconds; None: a step is told as it took itself."""
        self.floor: StepFloor | None = None
        self.hears: Callable[[Work, float], object] | None = None
        self.watch: Callable[[TimedStep, float, int], object] | None = None
        self._clock = clock
        self._before: tuple[float, Sequence[ActiveJob]] = 0.0, ()  # when the last step had settled, and its jobs
        self._with_prompts: deque[TimedStep] = deque(maxlen=KEPT)
        self._without: deque[TimedStep] = deque(maxlen=KEPT)
        self._sums: dict[StepKind, StepTimes] = {}

    @property
    def newest(self) -> tuple[TimedStep, ...]:
        """In the order of their numbers."""
        return tuple(sorted([*self._with_prompts, *self._without], key=lambda step: step.number))

    @property
    def sums(self) -> tuple[StepTimes, ...]:
        """Of each kind that there was."""
        return tuple(self._sums.values())

    def took(
        self, step: Step, jobs: Sequence[ActiveJob], result: StepResult, seconds: float, delivered: int = 0
    ) -> None:
        """A step has settled, just now. jobs: one for each of its rows. seconds: that it took itself. delivered: tokens
        that its decode rows gave to jobs, without those behind a job's end."""
        (last, waited), now = self._before, 0.0 if self._clock is None else self._clock()
        self._before = now, jobs
        with_prompts = step.rows[-1].start is not None  # decode rows stand before all others
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
        counted = Counted(
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
