"""Stand-ins that are stricter than what they stand in for.

`FakeRunner` keeps slots, page tables and page contents as the device would, and refuses any row that would read what
is not there. `World` drives a planner against it and compares every answer with a pure function of the job.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from redline.plan.planner import PlanConfig, Planner
from redline.wire.delta import Delta
from redline.wire.job import PAGE_TOKENS, Job, JobId, PageHash, PageId, Sampling
from redline.wire.step import Begin, Row, RowResult, Step, StepResult, TokenLogprobs

VOCABULARY = 97


def chain(previous: int, *facts: object) -> int:
    """A fingerprint of everything up to here."""
    return hash((previous, *facts))


def hash_page(previous: PageHash | None, tokens: tuple[int, ...], salt: str = "") -> PageHash:
    root = salt.encode() if previous is None else previous
    return PageHash(hashlib.blake2b(root + repr(tuple(tokens)).encode(), digest_size=16).digest())


def page_hashes(tokens: tuple[int, ...], salt: str = "") -> tuple[PageHash, ...]:
    hashes: list[PageHash] = []
    for start in range(0, len(tokens) // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
        hashes.append(hash_page(hashes[-1] if hashes else None, tokens[start : start + PAGE_TOKENS], salt))
    return tuple(hashes)


def make_job(id: str, tokens: tuple[int, ...], *, max_tokens: int = 8, salt: str = "", **sampling: object) -> Job:
    """A job whose hashes are right."""
    return Job(
        id=JobId(id),
        tokens=tokens,
        pages=page_hashes(tokens, salt),
        sampling=Sampling(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        salt=salt,
    )


def next_token(fingerprint: int, seed: int) -> int:
    """The fake model: a pure function of all tokens so far (their fingerprint) and of the seed."""
    return chain(fingerprint, seed) % VOCABULARY


def whole_answer(job: Job, max_model_len: int) -> tuple[int, ...]:
    """What the job must give, computed alone, at once, and without a planner."""
    fingerprint = 0
    for token in job.tokens:
        fingerprint = chain(fingerprint, token)
    answer: list[int] = []
    for _ in range(min(job.sampling.max_tokens, max_model_len - len(job.tokens))):
        answer.append(next_token(fingerprint, job.sampling.seed))
        if answer[-1] in job.sampling.stop_ids:
            break
        fingerprint = chain(fingerprint, answer[-1])
    return tuple(answer)


@dataclass
class _Slot:
    begin: Begin
    tokens: list[int]
    fingerprints: list[int]  # i: of tokens[: i + 1]
    table: list[PageId]
    computed: int

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.fingerprints.append(chain(self.fingerprints[-1] if self.fingerprints else 0, token))


@dataclass
class _Page:
    """Per position: which tokens it stands for, and the bits that were written, which depend on the form used."""

    fingerprints: list[int] = field(default_factory=lambda: [0] * PAGE_TOKENS)
    bits: list[int] = field(default_factory=lambda: [0] * PAGE_TOKENS)


@dataclass(frozen=True)
class FakePending:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class FakeRunner:
    """Runs steps as a device would, on contents that can be verified. `fails(seed, position)` gives a row an error."""

    def __init__(self, pages: int, config: PlanConfig, fails: Callable[[int, int], bool] = lambda *_: False) -> None:
        self.pages = [_Page() for _ in range(pages)]
        self.config = config
        self.fails = fails
        self.slots: dict[int, _Slot] = {}
        self.steps = 0
        self.computed_positions = 0
        self.resumed = 0
        self.resumed_bits_compared = 0
        # By seed (one job each): the bits of each position the first time; None: it began from pages with other bits
        # than a prefill gives, which nobody can promise to find again.
        self.first_bits: dict[int, list[int] | None] = {}

    def launch(self, step: Step) -> FakePending:
        assert step.number == self.steps + 1, "steps are launched in order"
        self.steps = step.number
        slots = [row.slot for row in step.rows]
        assert step.rows, "an empty step was launched"
        assert len(set(slots)) == len(slots), "two rows of one slot in one step"
        assert sum(row.count for row in step.rows) <= self.config.step_tokens, "the step is over its budget"
        assert {begin.slot for begin in step.begins} <= set(slots), "a job begins without a row"
        for begin in step.begins:
            self._begin(begin)
        return FakePending(StepResult(number=step.number, rows=tuple(self._run(row) for row in step.rows)))

    def _begin(self, begin: Begin) -> None:
        assert 0 <= begin.slot < self.config.max_running
        slot = _Slot(begin, [], [], list(begin.pages), len(begin.pages) * PAGE_TOKENS)
        for token in begin.tokens:
            slot.append(token)
        assert slot.computed < len(slot.tokens), "nothing is left to sample from"
        self.slots[begin.slot] = slot
        self._verify_pages(slot, slot.computed)
        seed, bits = begin.sampling.seed, self._bits(slot, slot.computed)
        if len(begin.tokens) == begin.prompt:
            prefill = self._prefill_bits(begin.tokens[: slot.computed])
            self.first_bits[seed] = bits if bits == prefill else None
            return
        self.resumed += 1
        first = self.first_bits[seed]
        if first is not None:
            assert bits == first[: slot.computed], f"job {seed} resumes from pages with other bits"

    def _run(self, row: Row) -> RowResult:
        slot = self.slots[row.slot]
        prompt, sampling = slot.begin.prompt, slot.begin.sampling
        slot.table += row.new_pages
        end = row.start + row.count
        assert row.count > 0
        assert row.start == slot.computed, f"row starts at {row.start}, {slot.computed} positions are computed"
        assert end <= len(slot.tokens), f"row ends at {end}, the slot holds {len(slot.tokens)} tokens"
        assert row.start >= prompt or end <= prompt, f"row [{row.start}, {end}) straddles the prompt's end {prompt}"
        assert end <= len(slot.table) * PAGE_TOKENS, "row writes behind its last page"
        assert len(slot.table) == -(-end // PAGE_TOKENS), "a page was sent before it was needed"
        assert not row.samples or end == len(slot.tokens), "a row samples before its last position"
        self._verify_pages(slot, row.start)
        self._write(slot, row.start, end)
        slot.computed = end
        self.computed_positions += row.count
        if self.fails(sampling.seed, row.start):
            if row.samples:
                slot.append(0)  # garbage, for the rows that are launched before the error is known
            return RowResult(error="a fake fault")
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if sampling.prompt_logprobs is not None:
            prompt_logprobs = tuple(_logprobs(slot.tokens, at) for at in range(row.start + 1, min(end + 1, prompt)))
        if not row.samples:
            return RowResult(prompt_logprobs=prompt_logprobs)
        slot.append(next_token(slot.fingerprints[-1], sampling.seed))
        logprobs = (_logprobs(slot.tokens, len(slot.tokens) - 1),) if sampling.logprobs is not None else ()
        return RowResult(tokens=(slot.tokens[-1],), logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _write(self, slot: _Slot, start: int, end: int) -> None:
        first = self.first_bits[slot.begin.sampling.seed]
        bits = self._bits(slot, start)[-1] if start else 0
        for position in range(start, end):
            bits = chain(bits, slot.tokens[position], position >= slot.begin.prompt)
            page = self.pages[slot.table[position // PAGE_TOKENS]]
            page.fingerprints[position % PAGE_TOKENS] = slot.fingerprints[position]
            page.bits[position % PAGE_TOKENS] = bits
            if first is not None:
                if position < len(first):
                    assert first[position] == bits, f"position {position} has other bits than before the pre-emption"
                    self.resumed_bits_compared += 1
                else:
                    first.append(bits)

    def _verify_pages(self, slot: _Slot, stop: int) -> None:
        """For every position below `stop`, the slot's pages hold what those tokens wrote."""
        for index in range(-(-stop // PAGE_TOKENS)):
            start = index * PAGE_TOKENS
            count = min(PAGE_TOKENS, stop - start)
            held = self.pages[slot.table[index]].fingerprints[:count]
            assert held == slot.fingerprints[start : start + count], (
                f"page {slot.table[index]} does not hold positions [{start}, {start + count}) of slot {slot.begin.slot}"
            )

    def _bits(self, slot: _Slot, stop: int) -> list[int]:
        pages = slot.table[: -(-stop // PAGE_TOKENS)]
        return [bits for page in pages for bits in self.pages[page].bits][:stop]

    def _prefill_bits(self, tokens: tuple[int, ...]) -> list[int]:
        all_bits: list[int] = []
        for token in tokens:
            all_bits.append(chain(all_bits[-1] if all_bits else 0, token, False))
        return all_bits


def _logprobs(tokens: list[int], position: int) -> TokenLogprobs:
    return TokenLogprobs(token=tokens[position], logprob=-float(position), rank=1)


@dataclass
class Story:
    """What the world has seen of one job."""

    job: Job
    expected: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    planned: int = 0  # positions in launched rows, since the last Begin

    @property
    def finish(self) -> str | None:
        return self.deltas[-1].finish if self.deltas else None


class World:
    """A planner, a fake runner, steps in flight between them, and the books of what every job was told."""

    def __init__(
        self,
        *,
        pages: int = 16,
        max_model_len: int = 400,
        fails: Callable[[int, int], bool] = lambda *_: False,
        **config: int,
    ) -> None:
        self.config = PlanConfig(**config)
        self.max_model_len = max_model_len
        self.pages = pages
        self.planner = Planner(pages, self.config, max_model_len, hash_page)
        self.runner = FakeRunner(pages, self.config, fails)
        self.stories: dict[JobId, Story] = {}  # in the order of submission
        self.flights: deque[tuple[Step, FakePending]] = deque()
        self._of_slot: dict[int, Story] = {}
        self._passed_over = 0

    def submit(self, tokens: tuple[int, ...], *, max_tokens: int = 8, salt: str = "", **sampling: object) -> Story:
        seed = len(self.stories)
        job = make_job(f"job-{seed}", tokens, max_tokens=max_tokens, salt=salt, seed=seed, **sampling)
        story = self.stories[job.id] = Story(job, whole_answer(job, self.max_model_len))
        self._tell(self.planner.submit(job))
        return story

    def abort(self, story: Story) -> None:
        self._tell(self.planner.abort(story.job.id))

    def plan(self) -> Step | None:
        step = self.planner.next_step()
        if step is not None:
            self.flights.append((step, self.runner.launch(step)))
            self._watch_the_oldest(step)
        return step

    def settle(self) -> None:
        step, pending = self.flights.popleft()
        self._tell(self.planner.settle(step, pending.wait()))

    def turn(self) -> None:
        """As the loop does: launch one, settle the one before."""
        before = len(self.flights)
        self.plan()
        if before:
            self.settle()

    def finish(self, most_turns: int = 20_000) -> None:
        """Runs to the end, then proves that nothing is left behind."""
        for _ in range(most_turns):
            if self.planner.idle:
                break
            self.turn()
        self.check_end()

    def check_end(self) -> None:
        assert self.planner.idle, "jobs did not come to an end"
        self.planner.check()
        load = self.planner.load()
        assert (load.running, load.waiting, load.pages_used) == (0, 0, 0), load
        for story in self.stories.values():
            assert story.finish is not None, f"{story.job.id} was never told its end"
            if story.finish in ("stop", "length"):
                assert tuple(story.tokens) == story.expected
                stopped = bool(story.expected) and story.expected[-1] in story.job.sampling.stop_ids
                assert story.finish == ("stop" if stopped else "length")

    def _tell(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            story = self.stories[delta.job]
            assert story.finish is None, f"{delta.job} is told something after its end"
            assert delta.tokens or delta.finish, "a delta says nothing"
            assert not story.deltas or delta.cached_tokens == story.deltas[0].cached_tokens or not story.tokens
            sampling = story.job.sampling
            if sampling.prompt_logprobs is not None and delta.finish not in ("error", "aborted"):
                told = [item.logprob for item in delta.prompt_logprobs]
                complete = [-float(at) for at in range(1, len(story.job.tokens))]
                assert told == ([] if story.deltas else complete), "prompt logprobs come whole, in the first delta"
            if sampling.logprobs is not None:
                assert tuple(item.token for item in delta.logprobs) == delta.tokens
            story.deltas.append(delta)
            story.tokens += delta.tokens
            assert tuple(story.tokens) == story.expected[: len(story.tokens)], f"{delta.job} went astray"

    def _watch_the_oldest(self, step: Step) -> None:
        """The oldest job that has rows left is passed over by a few steps at most, while older steps settle."""
        oldest = next(
            (story for story in self.stories.values() if story.finish is None and self._has_rows(story)), None
        )
        for begin in step.begins:
            story = self._of_slot[begin.slot] = self.stories[JobId(f"job-{begin.sampling.seed}")]
            story.planned = len(begin.pages) * PAGE_TOKENS
        advanced: list[Story] = []
        for row in step.rows:
            story = self._of_slot[row.slot]
            story.planned = row.start + row.count
            advanced.append(story)
        passed_over = oldest is not None and not any(story is oldest for story in advanced)
        self._passed_over = self._passed_over + 1 if passed_over else 0
        assert self._passed_over <= 2 * (self.config.ahead + 1), "the oldest job is starved"

    def _has_rows(self, story: Story) -> bool:
        length = min(len(story.job.tokens) + story.job.sampling.max_tokens, self.max_model_len)
        return story.planned < max(length - 1, len(story.job.tokens))
