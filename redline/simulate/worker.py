"""A simulated worker: chunked prefill and one decode token per step, by the scheduler's rules and a step time model.

Steps are not simulated one by one. Between two events (a prefill completes, an answer ends, a job arrives) all steps
have the same batch, and each takes longer than the one before by a constant: m steps take
m x first + growth x m (m - 1) / 2.  A job that arrives waits for the step in flight, as in the worker's loop.

As in `scheduler/planner.py` every step has a decode row of each running answer. Of the rest of its token budget, half
goes to prompts with less left to compute than the oldest, which together may overtake it by at most its own work; the
other half goes to the oldest first. If a step's time is bounded (`step_ms`), `policy/chunk_budget.py` chooses the
prefill budget of mixed steps. A job begins when a slot and KV memory are free. Not simulated: preemption because pages
run out (memory for a whole answer is reserved at once), and draft tokens except through `tokens_per_step`.
"""

import itertools
import math
from collections import Counter, deque
from heapq import heappop, heappush

from redline.messages.news import Role
from redline.policy.chunk_budget import LOOKED_AT, Answers, PrefillLeft, chunk_tokens
from redline.policy.expected import WorkerModel
from redline.policy.pairs import Work

ALIKE = 4  # maximum of steps that are treated as equal if their time is bounded
GAPS = 50  # histogram bins of inter-token gaps per factor of e: 2 % wide


class Played:
    """One request in the simulation. Times are in simulated seconds; -1: not yet."""

    __slots__ = (
        "answerer", "cached", "came", "computer", "first", "index", "of", "output", "passed", "placed", "prompt",
        "remaining", "slow", "ttft_s", "work",
    )  # fmt: skip

    def __init__(self, index: int, came: float, prompt: int, output: int, of: str, ttft_s: float = math.inf) -> None:
        """ttft_s: its target for the time to the first token."""
        self.index = index
        self.came = came
        self.prompt = prompt
        self.output = output
        self.of = of
        self.cached = 0  # prompt tokens cached at the worker that computes the prompt
        self.work = prompt  # prompt tokens to compute
        self.remaining = prompt  # prompt tokens that are still to be computed
        self.passed = 0  # tokens of later prompts that overtook it
        self.placed = False  # it has a slot and KV memory
        self.computer: Worker | None = None  # its prefill worker
        self.answerer: Worker | None = None  # its decode worker
        self.first = -1.0  # time of its first token
        self.ttft_s = ttft_s
        self.slow = 0  # number of its decode steps that took longer than the worker's `slow_s`

    @property
    def travels(self) -> bool:
        """Whether prefill and decode are on different workers, with a KV transfer between them."""
        return self.computer is not self.answerer


class Worker:
    """One worker. wake: time of its next event; infinite: it is idle until a job arrives. version: changes with
    `wake`."""

    __slots__ = (
        "_began", "_context", "_ends", "_first_ms", "_growth_ms", "_held", "_landed", "_parts", "_prompts",
        "_quick", "_saved_ms", "_short", "_slots", "_slow_done", "_slow_s", "_steps", "_steps_done", "awaited",
        "busy_s", "computed", "gaps", "given", "index", "jobs", "model", "name", "outputs", "queue", "role", "rows",
        "version", "wake",
    )  # fmt: skip

    def __init__(
        self, index: int, model: WorkerModel, role: Role, gaps: Counter[int], slow_s: float = math.inf
    ) -> None:
        """gaps: histogram of inter-token gaps, by bin (`gap_ms`), shared by all workers. slow_s: steps that take longer
        are counted for each answer."""
        self.index = index
        self.name = f"worker-{index}"
        self.role: Role = role
        self.wake: float = math.inf
        self.version = 0
        # State that the router sees.
        self.queue = 0  # prompt tokens that were sent to it and are not computed yet
        self.jobs = 0  # jobs that it decodes, or will decode
        self.awaited = 0  # those of `jobs` with a prefill on another worker that is not done yet
        self.given = 0  # sequence number of the last job that it was sent
        self.outputs = 0  # total tokens of the answers of its jobs
        # For figures.
        self.busy_s: float = 0.0
        self.computed = 0  # prompt tokens
        self.gaps = gaps
        self.rows = 0  # decode rows
        self.model = model
        self._slots = 0  # in use
        self._held = 0  # tokens reserved for jobs with a slot, including their answers
        self._context = 0.0  # tokens that all rows attend to
        self._steps_done = self._slow_done = 0
        self._slow_s = slow_s
        self._ends: list[tuple[int, int, Played, int]] = []  # (its last step, index, the job, its first step)
        self._landed: deque[Played] = deque()  # jobs that arrived by KV transfer and wait for a slot
        self._prompts: deque[Played] = deque()  # in the order of arrival; completed ones are skipped
        self._short: list[tuple[int, int, Played]] = []  # the same prompts as a heap, by tokens left to compute
        # The current run: `_steps` equal steps from `_began` on.
        self._began = 0.0
        self._steps = 0
        self._first_ms = self._growth_ms = self._saved_ms = 0.0
        self._parts: list[tuple[Played, int]] = []  # prompts, and tokens of each in every step
        self._quick: list[Played] = []  # prompts of `_parts` that were taken out of `_short`

    def compute(self, job: Played, now: float) -> None:
        """A prompt has arrived for prefill."""
        self._prompts.append(job)
        heappush(self._short, (job.work, job.index, job))
        self._interrupt(now)

    def land(self, job: Played, now: float) -> None:
        """The KV transfer of a prompt that another worker computed has arrived, with its first token."""
        self._landed.append(job)
        self._interrupt(now)

    def advance(self) -> tuple[list[Played], list[Played]]:
        """Complete the steps that ran until `wake`, and begin the next ones. Returns (jobs with a completed prefill,
        jobs with a completed answer)."""
        now, steps, rows = self.wake, self._steps, self.rows
        took_s = now - self._began
        self.busy_s += took_s
        self._steps_done += steps
        self._slow_done += steps * (took_s > steps * self._slow_s)
        if rows:
            self._context += rows * steps * self.model.tokens_per_step
            self.gaps[int(math.log(1e3 * took_s / steps) * GAPS)] += rows * steps
        whole: list[Played] = []
        for job, chunk in self._parts:
            took = min(job.remaining, chunk * steps)
            job.remaining -= took
            self.computed += took
            if not job.remaining:
                whole.append(job)
        for job in self._quick:
            if job.remaining:
                heappush(self._short, (job.remaining, job.index, job))
        ended: list[Played] = []
        ends, done = self._ends, self._steps_done
        while ends and ends[0][0] <= done:
            last, _, job, begun = heappop(ends)
            self._context -= job.prompt + 1 + (last - begun) * self.model.tokens_per_step
            self.rows -= 1
            job.slow += self._slow_done
            self._leave(job, job.prompt + job.output)
            ended.append(job)
        for job in whole:
            if job.travels:
                self._leave(job, job.prompt)
            elif job.output == 1:
                self._leave(job, job.prompt + job.output)
                ended.append(job)
            else:
                self._decode(job)
        self._plan(now)
        return whole, ended

    @property
    def plain(self) -> tuple[Work, float, float] | None:
        """For a run of decode-only steps: the work, the seconds and the tokens of a step; else None."""
        if self._parts or not self.rows:
            return None
        seconds, tokens = (self.wake - self._began) / self._steps, self.rows * self.model.tokens_per_step
        return Work(rows=self.rows, context=self._context), seconds, tokens

    def check(self) -> None:
        """Raises AssertionError unless slots and reserved tokens match the jobs, and are all free when it is idle."""
        assert 0 <= self._slots <= self.model.slots, f"{self._slots} of {self.model.slots} slots are in use"
        assert len(self._ends) == self.rows, "answers and rows differ"
        waiting = any(job.remaining for job in self._prompts)
        if self.wake == math.inf and not self._landed and not waiting:
            left = self._slots, self._held, self.rows
            assert left == (0, 0, 0), f"slots, tokens and rows are left: {left}"
            assert abs(self._context) < 1, f"{self._context} tokens of context are left"

    def _decode(self, job: Played) -> None:
        last = self._steps_done + math.ceil((job.output - 1) / self.model.tokens_per_step)
        heappush(self._ends, (last, job.index, job, self._steps_done))
        self.rows += 1
        job.slow -= self._slow_done
        self._context += job.prompt + 1

    def _place(self, job: Played, tokens: int) -> bool:
        if self._slots >= self.model.slots or (self._held + tokens > self.model.kv_tokens and self._slots):
            return False
        self._slots += 1
        self._held += tokens
        job.placed = True
        return True

    def _leave(self, job: Played, tokens: int) -> None:
        self._slots -= 1
        self._held -= tokens
        job.placed = False

    def _interrupt(self, now: float) -> None:
        """A job has arrived: end the current run of steps after the step in flight."""
        if self.wake == math.inf:
            self._plan(now)
            return
        passed_ms = 1e3 * (now - self._began)
        half = self._first_ms - self._growth_ms / 2
        if self._growth_ms > 1e-9 * self._first_ms:
            steps = (math.sqrt(half * half + 2 * self._growth_ms * passed_ms) - half) / self._growth_ms
        else:
            steps = passed_ms / self._first_ms
        steps = max(1, math.ceil(steps - 1e-9))
        if steps < self._steps:
            self._steps, self._saved_ms = steps, 0.0
            self._wake()

    def _plan(self, now: float) -> None:
        """Plan the next run of equal steps."""
        model, steps = self.model, self.model.steps
        landed = self._landed
        while landed and self._place(landed[0], landed[0].prompt + landed[0].output):
            self._decode(landed.popleft())
        rows, chunk_ms, growth = self.rows, 0.0, 0.0
        count = self._ends[0][0] - self._steps_done if self._ends else 1 << 60
        self._parts, self._quick = [], []
        tokens = 0
        if self._prompts:
            whole = max(1, model.step_tokens - rows)
            budget = self._bounded(whole, now)
            if budget < whole:
                count = min(count, ALIKE)
            self._share(budget)
            for job, chunk in self._parts:
                count = min(count, -(-job.remaining // chunk))
            for job, chunk in self._parts:
                tokens += chunk
                before = job.prompt - job.remaining
                chunk_ms += steps.pair * chunk * (before + (chunk + 1) / 2) + steps.expand * (before + chunk)
                growth += steps.pair * chunk * chunk + steps.expand * chunk
        if not rows and not self._parts:
            self.wake = math.inf
            self.version += 1
            return
        self._saved_ms = 0.0
        for job, chunk in self._parts:
            missing = chunk * count - job.remaining  # tokens by which its last chunk is shorter
            if missing > 0:
                self._saved_ms += missing * (steps.prompt + steps.pair * job.prompt + steps.expand)
        self._first_ms = (
            steps.base
            + steps.experts * steps.share(rows + tokens)
            + steps.row * rows
            + steps.context * self._context
            + steps.prompt * tokens
            + chunk_ms
        )
        self._growth_ms = growth + steps.context * rows * model.tokens_per_step
        self._began, self._steps = now, count
        self._wake()

    def _bounded(self, most: int, now: float) -> int:
        """Prefill token budget of a step, chosen as in `scheduler/prefill_budget.py`."""
        step_ms = self.model.step_ms
        prompts = list(itertools.islice((job for job in self._prompts if job.remaining), LOOKED_AT))
        if step_ms is None or not self.rows or not prompts:
            return most
        prompts.sort(key=lambda job: not job.placed)
        told = [PrefillLeft(job.remaining, job.prompt - job.remaining, job.came + job.ttft_s - now) for job in prompts]
        sharing = None if self._slots < self.model.slots else sum(job.placed for job in prompts)
        answers = Answers(self.rows, self._context)
        return chunk_tokens(self.model.steps.step_ms, most, step_ms, answers, told, sharing)

    def _wake(self) -> None:
        steps = self._steps
        took_ms = steps * self._first_ms + self._growth_ms * steps * (steps - 1) / 2 - self._saved_ms
        self.wake = self._began + took_ms / 1e3
        self.version += 1

    def _share(self, budget: int) -> None:
        """Divide the prefill budget of each step among the prompts."""
        prompts, short, parts = self._prompts, self._short, self._parts
        while prompts and not prompts[0].remaining:
            prompts.popleft()
        if not prompts:
            return
        oldest = prompts[0]
        half, left = budget // 2, budget
        while half:
            while short and (not short[0][2].remaining or short[0][0] != short[0][2].remaining):
                heappop(short)  # a stale entry: its prefill is complete, or it was pushed again
            if not short or short[0][2] is oldest:
                break
            job = short[0][2]
            if job.remaining >= oldest.remaining or oldest.passed + job.remaining > oldest.work:
                break
            if not job.placed:
                if not self._place(job, job.prompt if job.travels else job.prompt + job.output):
                    break
                oldest.passed += job.work
            heappop(short)
            self._quick.append(job)
            chunk = min(half, job.remaining)
            parts.append((job, chunk))
            half -= chunk
            left -= chunk
        for job in prompts:
            if not left:
                break
            if not job.remaining or job in self._quick:
                continue
            if not job.placed and not self._place(job, job.prompt if job.travels else job.prompt + job.output):
                break
            chunk = min(left, job.remaining)
            parts.append((job, chunk))
            left -= chunk


def gap_ms(kind: int) -> float:
    """The milliseconds at the middle of a histogram bin of gaps."""
    return math.exp((kind + 0.5) / GAPS)
