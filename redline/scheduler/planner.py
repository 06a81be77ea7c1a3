"""The scheduler of a worker: continuous batching with chunked prefill and speculative decoding. Holds no tensor.

`Planner` is what the worker's loop calls; it joins the parts, each with a file of its own: which jobs are taken in and
when they start (`admission`, `queue`), what the next step contains (`step_builder`, `prefill_budget`, `speculation`),
what its result means (`settler`), jobs whose pages come from elsewhere (`transfers`), and the books of jobs and pages
(`job_table`, `job_pages`).

No job starves. The queue admits jobs round-robin between tenants, every step gives one decode row to each running job
that generates, and the oldest prompt always gets a part of the step (`step_builder`).
"""

from collections.abc import Callable, Iterator

from redline.messages.delta import Delta
from redline.messages.job import Job, JobId
from redline.messages.news import Cached, Load, TimedStep
from redline.messages.step import CapturedShapes, Step, StepResult
from redline.policy.costs import StepCosts
from redline.policy.floor import StepFloor
from redline.scheduler.admission import Admission, Hold, error_delta
from redline.scheduler.config import PlanConfig
from redline.scheduler.counters import PlanCounters
from redline.scheduler.features import FeatureCache
from redline.scheduler.job_pages import HashPage, JobPages
from redline.scheduler.job_table import JobTable
from redline.scheduler.prefill_budget import Forecast, PrefillBudget
from redline.scheduler.prefix_cache import Changed
from redline.scheduler.recorded import RecordedShapes
from redline.scheduler.settler import StepSettler
from redline.scheduler.speculation import Speculation
from redline.scheduler.step_builder import StepBuilder
from redline.scheduler.timed import TimedSteps
from redline.scheduler.transfers import JobTransfers


class Planner:
    """The scheduler of one worker. transfers: jobs whose pages come from elsewhere, and pages that are lent.

    Steps are settled in the order in which they were scheduled. `submit`, `abort` and `settle` return deltas for the
    clients; a job's last delta, and no other, has a finish.
    """

    def __init__(
        self,
        pages: int,
        config: PlanConfig,
        max_model_len: int,
        hash_page: HashPage,
        costs: StepCosts | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """pages: number of pages. max_model_len: maximum tokens of one job, prompt and answer.

        costs: measured step costs of this machine; None: not measured, and rows get the maximum number of draft tokens.
        clock: returns seconds; used only to report how long jobs waited; None: waiting times are not reported.
        """
        self._config = config
        self._counters = counters = PlanCounters()
        self._recorded = RecordedShapes()
        self._speculation = speculation = Speculation(config.draft_tokens, config.learned, costs or StepCosts())
        self._timed = TimedSteps(clock)
        self._beside = PrefillBudget(config.step_ms)
        self._pages = JobPages(pages, hash_page, speculation, config.step_tokens)
        self._table = JobTable(config.max_running, self._pages, clock)
        books = self._table, self._pages
        self._admission = Admission(config, max_model_len, *books, speculation, counters, clock)
        self.transfers = JobTransfers(*books, self._admission, speculation, counters, self._beside)
        self._builder = StepBuilder(
            config, *books, self._admission, speculation, self._recorded, self._beside, counters, clock
        )
        self._settler = StepSettler(*books, speculation, counters)
        self._cached_told = 0  # number of `Cached` messages

    def stand_beside(self, floor: StepFloor) -> None:
        """From now on add up the times of timed steps and their floors (minimum times on this machine)."""
        self._timed.floor = floor

    def watch_steps(self, watch: Callable[[TimedStep, float, int], object]) -> None:
        """From now on time every step, and call `watch` as described in `TimedSteps`, in the loop's thread."""
        self._timed.watch = watch

    def foresee(self, forecast: Forecast) -> None:
        """From now on limit the prefill budget of mixed steps by `step_ms` of the config, using this forecast. The
        forecast is updated with every timed step."""
        self._beside.forecast = forecast
        self._timed.hears = forecast.took

    def compile_with(self, hold: Hold) -> None:
        """From now on a job is scheduled only when its grammar is compiled. It keeps the grammar until it ends."""
        self._admission.hold = hold

    def encode_with(self, features: FeatureCache) -> None:
        """From now on jobs may have images, which are encoded between the rows of steps."""
        self._table.features = features

    @property
    def compiling(self) -> bool:
        """Whether jobs may be waiting for their grammars."""
        return bool(self._table.compiling or self._table.landed)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to schedule and nothing to settle until another message arrives."""
        return len(self._table.arriving) == len(self._table.jobs) and not self._table.flights

    @property
    def done(self) -> tuple[int, int]:
        """Number of scheduled steps, and number of settled steps."""
        return self._counters.planned, self._counters.replayed + self._counters.led

    @property
    def ahead(self) -> bool:
        """Whether a step may be scheduled while another is not settled."""
        return self._config.ahead > 0

    def submit(self, job: Job, *, lends: bool = False) -> list[Delta]:
        """Queue a job. If the job can never run, or the queue is full, it ends at once with an error delta.

        lends: prefill for another worker: the job's pages are kept after its end, until `JobTransfers.give_back`.
        Raises AssertionError for a job with a known id.
        """
        active = self._admission.take_in(job, self._beside.spent_s)
        if isinstance(active, Delta):
            return [active]
        active.lends = lends
        if not self.transfers.awaits(active):
            self._admission.wait(active)
        return []

    def abort(self, id: JobId) -> list[Delta]:
        """End a job now, with one delta. A job that has already ended gives none: the abort crossed its last delta."""
        job = self._table.jobs.get(id)
        if job is None:
            return []
        self._table.end(job, "aborted")
        return [Delta(job=id, finish="aborted", cached_tokens=job.cached_tokens)]

    def lose_all(self, reason: str) -> list[Delta]:
        """End every job because the worker is shutting down; each gets an error delta with `reason` and the fault
        "lost"."""
        ended: list[Delta] = []
        for job in list(self._table.jobs.values()):
            self._table.end(job, "error")
            ended.append(error_delta(job.job.id, reason, "lost", job.cached_tokens))
        return ended

    def abort_all(self) -> list[Delta]:
        """End every job that has not ended; each gets one delta with the finish "aborted"."""
        return [delta for id in list(self._table.jobs) for delta in self.abort(id)]

    def report(self, recorded: CapturedShapes) -> None:
        """Set the CUDA graphs that a rank has captured, so that decode steps can replay them."""
        self._recorded.report(recorded)

    def next_step(self) -> Step | None:
        """The next step to launch; None if nothing can be scheduled before another step is settled.

        A step never has two rows of one slot, and a Begin always comes with a row. Decode rows come before all others.
        """
        step, table = self._builder.build(), self._table
        if step is None:
            # These may hold the missing pages, or wait for their grammars.
            elsewhere = table.arriving or table.lent or self.transfers.fetches or table.compiling or table.landed
            encoding = table.features is not None and table.features.busy
            assert table.flights or elsewhere or encoding or not table.jobs, (
                f"{len(table.jobs)} jobs, none of which can be scheduled"
            )
        return step

    def settle(self, step: Step, result: StepResult, seconds: float | None = None) -> list[Delta]:
        """Apply the result of a step; returns the deltas of its jobs. Rows of jobs that have ended in between are
        dropped.

        seconds: duration of the step on the machine; None: unknown. Raises AssertionError if another step is next.
        """
        flight = self._table.flights.popleft()
        assert step.number == flight.step.number == result.number, (
            f"step {step.number} is settled with the result of {result.number}; {flight.step.number} is next"
        )
        self._counters.settled(step, result)
        preempted = self._builder.notes()
        deltas, delivered = self._settler.settle(flight, result, seconds)
        if step.encodes and self._table.features is not None:
            self._table.features.settle(step, result, failed=result.failed)
        if seconds is not None and not step.encodes:  # the time of the encoder would spoil the model of step times
            self._beside.spent_s += seconds
            self._speculation.took(step, result, seconds)
            self._timed.took(step, flight.jobs, result, seconds, delivered)
            if self.transfers.tier is not None:
                self.transfers.tier.took(step, seconds)
        return preempted + deltas

    def forget_idle(self) -> None:
        """Evict every page that no job holds."""
        self._pages.cache.evict(self._pages.pool.idle)

    def cached(self, *, whole: bool = False) -> Cached | None:
        """The next `Cached` message: changes of the prefix cache since the last call; its complete content on the
        first call and with `whole`. None if nothing has changed."""
        whole = whole or not self._cached_told
        stored, removed = self._pages.cache.changes(whole=whole)
        if not (stored or removed or whole):
            return None
        self._cached_told += 1
        return Cached(number=self._cached_told, stored=tuple(stored), removed=tuple(removed), whole=whole)

    def log_pages(self) -> None:
        """From now on record insertions into the prefix cache and evictions, for `page_changes`."""
        self._pages.cache.log = []

    def page_changes(self) -> list[Changed]:
        """Insertions and evictions since the last call, in order, with the content of the pages. Pages of prompts
        with images are omitted. Empty if `log_pages` was not called."""
        changes = self._pages.cache.log
        if not changes:
            return []
        self._pages.cache.log = []
        return changes

    def load(self) -> Load:
        """Counters and gauges. Used, cached (held only by the prefix cache) and free pages add up to the total."""
        counters, table, pool, speculation = self._counters, self._table, self._pages.pool, self._speculation
        features = table.features
        return Load(
            running=len(table.running),
            waiting=len(table.waiting) + len(table.compiling),
            pages_used=pool.used,
            pages_cached=pool.idle,
            pages_total=pool.total,
            steps=counters.planned,
            replayed=counters.replayed,
            led=counters.led,
            preemptions=counters.preemptions,
            prompt_tokens=counters.prompt_tokens,
            prompt_tokens_cached=counters.prompt_tokens_cached,
            generation_tokens=counters.generation_tokens,
            drafts=speculation.drafts,
            draft_tokens=speculation.draft_tokens,
            accepted_tokens=speculation.accepted_tokens,
            suffix_draft_tokens=speculation.suffix_draft_tokens,
            suffix_accepted_tokens=speculation.suffix_accepted_tokens,
            grammar_draft_tokens=speculation.grammar_draft_tokens,
            grammar_accepted_tokens=speculation.grammar_accepted_tokens,
            accepted_per_pos=tuple(speculation.accepted_per_pos),
            step_sizes=tuple(counters.step_sizes),
            step_positions=counters.step_positions,
            bounded=self._beside.bounded,
            timed=self._timed.newest,
            images_encoded=0 if features is None else features.encoded,
            images_reused=0 if features is None else features.reused,
            encode_s=0.0 if features is None else features.encode_s,
            step_times=self._timed.sums,
        )

    def check(self) -> None:
        """Raises AssertionError unless every page and slot is accounted for, and the scheduling order is kept."""
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[None]:
        """Like `check`, a slice of pages between two yields, for a caller with other work to do. Nothing may change
        until it is exhausted; after a change, start again."""
        return self._table.checks(self.transfers.fetches.held())
