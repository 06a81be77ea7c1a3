"""Fakes that are stricter than the objects they replace.

`FakeRunner` keeps slots, proposals, page tables and page contents as the device would, and refuses any row that would
read data that is not there. `World` drives a planner against it and compares every answer with a pure function of the
job.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from redline.messages.channel import MemoryChannel
from redline.messages.codec import Wire
from redline.messages.delta import Delta
from redline.messages.job import PAGE_TOKENS, Grammar, Job, JobId, PageHash, PageId, Sampling
from redline.messages.news import Stop
from redline.messages.step import Begin, CapturedShapes, Drafter, Row, RowResult, Shape, Step, StepResult, TokenLogprobs
from redline.policy.costs import StepCosts
from redline.run.layer_marks import Meanwhile
from redline.scheduler.config import PlanConfig
from redline.scheduler.planner import Planner
from redline.scheduler.prefill_budget import Forecast
from redline.scheduler.speculation import MOST_FORCED
from tests.clocks import FakeClock

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
    """A job with the right hashes."""
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


LONGEST_RUN = 20  # the most tokens that a fake grammar forces together
A_GRAMMAR = Grammar(text="a fake one, that allows every token of the fake model")


def forced_from(fingerprint: int) -> int:
    """The fake grammar of a job with a grammar: how many tokens it forces after these; now and then it begins a forced
    run.
    """
    return 1 + chain(fingerprint, 4) % LONGEST_RUN if chain(fingerprint, 3) % 12 == 0 else 0


def whole_answer(job: Job, max_model_len: int) -> tuple[int, ...]:
    """The expected answer of the job, computed alone, at once, and without a planner."""
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
    proposals: list[int] = field(default_factory=list)
    asked: int = 0  # proposals requested by the last row
    forced: int = 0  # number of tokens that the slot will certainly reach, from all results sent so far
    drafting: bool = False  # the drafter follows the slot
    read: int = 1  # drafter rows at positions [1, read) exist; position 0 of a job has none

    @property
    def limit(self) -> int:
        return self.begin.limit

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.fingerprints.append(chain(self.fingerprints[-1] if self.fingerprints else 0, token))


@dataclass
class _Page:
    """Per position: the tokens it represents, and the bits that were written, which depend on the form of attention;
    and the tokens that the drafter's row at this position represents.
    """

    fingerprints: list[int] = field(default_factory=lambda: [0] * PAGE_TOKENS)
    drafter: list[int] = field(default_factory=lambda: [0] * PAGE_TOKENS)
    bits: list[int] = field(default_factory=lambda: [0] * PAGE_TOKENS)


@dataclass(frozen=True)
class FakePending:
    result: StepResult

    def watch(self, meanwhile: Meanwhile) -> None:
        """The step has already ended."""

    def wait(self) -> StepResult:
        return self.result


class FakeRunner:
    """Runs steps as a device would, on contents that can be verified. `fails(seed, position)` returns true for a row
    with an error.
    """

    def __init__(
        self,
        pages: int,
        config: PlanConfig,
        fails: Callable[[int, int], bool] = lambda *_: False,
        shapes: Sequence[Shape] = (),
        more: Sequence[Shape] = (),
    ) -> None:
        """shapes: captured at start. more: captured one by one while nothing runs."""
        self.recorded = CapturedShapes(shapes=tuple(shapes))
        self.more = list(more)
        self.replays = 0  # steps that have named a shape
        self.pages = [_Page() for _ in range(pages)]
        self.config = config
        self.fails = fails
        self.slots: dict[int, _Slot] = {}
        self.steps = 0
        self.computed_positions = 0
        self.drafts = 0
        self.accepted = 0
        self.drafter_rows_from_cache = 0
        self.lapses = 0  # jobs that the drafter has stopped following
        self.resumed = 0
        self.resumed_bits_compared = 0
        # By seed (one job each): the bits of each position at first computation; None: the job began from pages with
        # other bits than a prefill gives, and whether it finds these again is not guaranteed.
        self.first_bits: dict[int, list[int] | None] = {}

    def launch(self, step: Step) -> FakePending:
        assert step.number == self.steps + 1, "steps must be launched in order"
        self.steps = step.number
        slots = [row.slot for row in step.rows]
        assert step.rows or step.encodes, "an empty step was launched"
        assert len(set(slots)) == len(slots), "two rows of one slot in one step"
        assert sum(row.count for row in step.rows) <= self.config.step_tokens, "the step is over its budget"
        assert {begin.slot for begin in step.begins} <= set(slots), "a job begins without a row"
        for begin in step.begins:
            self._begin(begin)
        most = None if step.shape is None else step.shape.positions - 1
        rows = tuple(self._run(row, most) for row in step.rows)
        self._verify_shape(step)
        return FakePending(StepResult(number=step.number, rows=rows))

    def record_more(self) -> bool:
        if not self.more:
            return False
        self.recorded = CapturedShapes(shapes=(*self.recorded.shapes, self.more.pop(0)))
        return True

    def _verify_shape(self, step: Step) -> None:
        """Verify that the shape is captured and holds the decode rows; and that it is the cheapest of those with the
        rows' number of positions, or with the largest number available.
        """
        rows = [row for row in step.rows if row.start is None]
        longest = PAGE_TOKENS * max((len(self.slots[row.slot].table) for row in rows), default=0)
        holding = [shape for shape in self.recorded.shapes if shape.rows >= len(rows) and shape.longest >= longest]
        if step.shape is None:
            assert not rows or not holding, f"{holding[0]} holds the step, but the step names no shape"
            return
        self.replays += 1
        assert step.shape in holding, f"{step.shape} does not hold the step that names it, or is not captured"
        positions = min(max(row.count for row in rows), max(shape.positions for shape in holding))
        least = min(shape.rows * shape.positions for shape in holding if shape.positions >= positions)
        assert step.shape.positions >= positions
        assert step.shape.rows * step.shape.positions == least

    def _begin(self, begin: Begin) -> None:
        assert 0 <= begin.slot < self.config.max_running
        slot = _Slot(begin, [], [], list(begin.pages), len(begin.pages) * PAGE_TOKENS)
        for token in begin.tokens:
            slot.append(token)
        assert slot.computed < len(slot.tokens), "no position is left to sample from"
        self.slots[begin.slot] = slot
        self._verify_pages(slot, slot.computed)
        if begin.drafting:
            assert self.config.learned, "there is no drafter to follow the job"
            slot.drafting, slot.read = True, max(1, slot.computed)
            self._verify_drafter(slot)
            self.drafter_rows_from_cache += slot.computed
        seed, bits = begin.sampling.seed, self._bits(slot, slot.computed)
        if seed not in self.first_bits or len(begin.tokens) == begin.prompt:
            prefill = self._prefill_bits(begin.tokens[: slot.computed])
            assert bits == prefill or len(begin.tokens) == begin.prompt, f"job {seed} continues with other bits"
            self.first_bits[seed] = bits if bits == prefill else None
            return
        self.resumed += 1
        first = self.first_bits[seed]
        if first is not None:
            assert bits == first[: slot.computed], f"job {seed} resumes from pages with other bits"

    def _run(self, row: Row, most: int | None) -> RowResult:
        slot = self.slots[row.slot]
        slot.table += row.new_pages
        assert row.count > 0
        assert 0 <= row.propose <= self.config.draft_tokens
        assert row.samples or not row.propose, "drafts are requested after an unknown token"
        result = self._known(slot, row, row.start) if row.start is not None else self._decode(slot, row, most)
        slot.asked = row.propose
        return result

    def _known(self, slot: _Slot, row: Row, start: int) -> RowResult:
        prompt, sampling = slot.begin.prompt, slot.begin.sampling
        end = start + row.count
        assert not row.drafts, "only a decode row verifies drafts"
        assert start == slot.computed, f"row starts at {start}, {slot.computed} positions are computed"
        assert end <= len(slot.tokens), f"row ends at {end}, the slot holds {len(slot.tokens)} tokens"
        assert start >= prompt or end <= prompt, f"row [{start}, {end}) straddles the prompt's end {prompt}"
        assert not row.samples or end == len(slot.tokens), "a row samples before its last position"
        self._verify_table(slot, row, end)
        self._verify_pages(slot, start)
        self._write(slot, start, end)
        slot.computed = end
        self.computed_positions += row.count
        failed = self.fails(sampling.seed, start)
        if row.samples:
            # 0 is garbage, for rows that are launched before the error is read.
            slot.append(0 if failed else next_token(slot.fingerprints[-1], sampling.seed))
        self._draft(slot, row, start)
        if failed:
            return RowResult(error="a fake fault")
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if sampling.prompt_logprobs is not None:
            prompt_logprobs = tuple(_logprobs(slot.tokens, at) for at in range(start + 1, min(end + 1, prompt)))
        if not row.samples:
            return RowResult(prompt_logprobs=prompt_logprobs)
        logprobs = (_logprobs(slot.tokens, len(slot.tokens) - 1),) if sampling.logprobs is not None else ()
        return RowResult(
            tokens=(slot.tokens[-1],),
            forced=self._tell_forced(slot),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _decode(self, slot: _Slot, row: Row, most: int | None) -> RowResult:
        """most: the most drafts that are verified."""
        assert row.samples
        assert row.count == 1 + row.drafts
        told = row.drafts <= slot.asked or len(slot.tokens) + row.drafts <= slot.forced
        assert told, "more drafts than were requested or forced"
        start, sampling = len(slot.tokens) - 1, slot.begin.sampling
        assert start == slot.computed, f"a decode row at {start}, {slot.computed} positions are computed"
        assert start >= slot.begin.prompt, "a decode row in the prompt"
        if len(slot.tokens) >= slot.limit:
            return RowResult()
        forced = self._forced(slot)
        drafts = (forced or slot.proposals)[: min(row.drafts, slot.limit - len(slot.tokens) - 1)][:most]
        end = start + 1 + len(drafts)
        self._verify_table(slot, row, end)
        self._verify_pages(slot, start)
        accepted = 0
        for draft in drafts:
            if draft != next_token(slot.fingerprints[-1], sampling.seed):
                break
            slot.append(draft)
            accepted += 1
        self._write(slot, start, start + 1 + accepted)
        for position in range(start + 1 + accepted, end):  # rejected drafts leave garbage
            self.pages[slot.table[position // PAGE_TOKENS]].fingerprints[position % PAGE_TOKENS] = -1
        failed = self.fails(sampling.seed, start)
        slot.append(0 if failed else next_token(slot.fingerprints[-1], sampling.seed))
        slot.computed = start + 1 + accepted
        self.computed_positions += 1 + accepted
        self.drafts += len(drafts)
        self.accepted += accepted
        self._draft(slot, row, start)
        if failed:
            return RowResult(error="a fake fault")
        first = start + 1
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sampling.logprobs is not None:
            logprobs = tuple(_logprobs(slot.tokens, at) for at in range(first, len(slot.tokens)))
        by: Drafter = "grammar" if forced else "learned" if row.drafting else "suffix"
        return RowResult(
            tokens=tuple(slot.tokens[first:]),
            proposed=len(drafts),
            accepted=accepted,
            by=by if drafts else None,
            forced=self._tell_forced(slot),
            logprobs=logprobs,
        )

    def _forced(self, slot: _Slot) -> list[int]:
        """The next tokens forced by the grammar of the slot's job: the rest of the longest run that has begun."""
        if slot.begin.sampling.grammar is None:
            return []
        latest = slot.fingerprints[: -LONGEST_RUN - 1 : -1]
        left = max(forced_from(fingerprint) - age for age, fingerprint in enumerate(latest))
        fingerprint, run = slot.fingerprints[-1], list[int]()
        while len(run) < left:
            run.append(next_token(fingerprint, slot.begin.sampling.seed))
            fingerprint = chain(fingerprint, run[-1])
        return run

    def _tell_forced(self, slot: _Slot) -> int:
        count = len(self._forced(slot))
        slot.forced = max(slot.forced, len(slot.tokens) + count)
        return count

    def _draft(self, slot: _Slot, row: Row, start: int) -> None:
        """The drafter reads the certain tokens, and stores the slot's next drafts for its next row.

        The drafter's row at position p represents token p, and needs the feature of position p - 1: of this row, or of
        a page's last token, which is stored with the page. A position that has no page yet waits for the next row.
        """
        paged = len(slot.table) * PAGE_TOKENS
        if not row.drafting:
            self.lapses += slot.drafting
            slot.drafting = False
        else:
            assert slot.drafting, "the drafter does not follow this job"
            assert slot.read == start + 1 or (slot.read == max(1, start) and start % PAGE_TOKENS == 0), (
                f"the drafter has read {slot.read} tokens and cannot go on at {start}"
            )
            self._verify_drafter(slot)
            end = min(slot.computed + 1, len(slot.tokens), paged)
            for place in range(slot.read, end):
                page = self.pages[slot.table[place // PAGE_TOKENS]]
                page.drafter[place % PAGE_TOKENS] = slot.fingerprints[place]
            slot.read = end
        slot.proposals = []
        length = len(slot.tokens)
        room = slot.limit - length - 1
        if not row.samples or room <= 0 or not row.propose:
            return
        assert length - 2 + row.propose < paged or slot.limit - 1 <= paged, "no page for the drafts"
        assert not row.drafting or slot.read == length, "the drafter drafts from a token that it has not read"
        fingerprint, seed = slot.fingerprints[-1], slot.begin.sampling.seed
        asked = min(row.propose, room)
        count = asked if row.drafting else min(asked, chain(fingerprint, 1) % 6)  # the suffix drafter may find no match
        for number in range(count):
            token = next_token(fingerprint, seed)
            if chain(fingerprint, 2) % 4 == 0:
                token = (token + 1) % VOCABULARY
            slot.proposals.append(token)
            fingerprint = chain(fingerprint, token)
            place = length - 1 + number
            if row.drafting and number:  # rows of its own drafts, which are not final
                self.pages[slot.table[place // PAGE_TOKENS]].drafter[place % PAGE_TOKENS] = -1

    def _verify_table(self, slot: _Slot, row: Row, end: int) -> None:
        assert end <= len(slot.table) * PAGE_TOKENS, "row writes past its last page"
        if not self.config.draft_tokens:
            asked = end if row.start is not None else len(slot.tokens) - 1 + row.count
            assert len(slot.table) == -(-asked // PAGE_TOKENS), "a page was sent before it was needed"
        assert len(slot.table) <= -(-max(slot.limit - 1, slot.begin.prompt) // PAGE_TOKENS), "a page beyond the limit"

    def _verify_drafter(self, slot: _Slot) -> None:
        """Verify that for every position in [1, read) the slot's pages hold the drafter's row of those tokens."""
        pages = slot.table[: -(-slot.read // PAGE_TOKENS)]
        held = [fingerprint for page in pages for fingerprint in self.pages[page].drafter]
        assert held[1 : slot.read] == slot.fingerprints[1 : slot.read], (
            f"the drafter's rows of slot {slot.begin.slot} below {slot.read} are not those of its tokens"
        )

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
        """Verify that for every position below `stop` the slot's pages hold the data of those tokens."""
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


class Steady(FakeRunner):
    """A runner with steps that take `step_s` of a clock."""

    def __init__(self, pages: int, config: PlanConfig, clock: FakeClock, step_s: float) -> None:
        super().__init__(pages, config)
        self._clock, self._step_s = clock, step_s

    def launch(self, step: Step) -> FakePending:
        self._clock.advance(self._step_s)
        return super().launch(step)


class Rests(MemoryChannel):
    """The inbox of a loop with waits that take no time: they advance the clock. When the loop would wait for ever, it
    receives the next of `then`, and after these a Stop.
    """

    def __init__(self, clock: FakeClock, said: Sequence[Wire], then: Sequence[Wire] = ()) -> None:
        super().__init__()
        for message in said:
            self.put(message)
        self._clock, self._then = clock, [*then, Stop()]

    def drain(self, *, wait: bool, timeout: float | None = None) -> list[Wire]:
        if wait and not self._messages:
            if timeout is None:
                return [self._then.pop(0)]
            self._clock.advance(timeout)
        return super().drain(wait=False)


@dataclass
class Story:
    """What the world has recorded about one job."""

    job: Job
    expected: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    scored: list[float] = field(default_factory=list)  # log probabilities of the prompt's tokens
    planned: int = 0  # positions in launched rows, since the last Begin

    @property
    def finish(self) -> str | None:
        return self.deltas[-1].finish if self.deltas else None


class World:
    """A planner, a fake runner, the steps in flight between them, and a record of the deltas of every job."""

    def __init__(
        self,
        *,
        pages: int = 16,
        max_model_len: int = 400,
        fails: Callable[[int, int], bool] = lambda *_: False,
        costs: StepCosts | None = None,
        seconds: Callable[[Step, StepResult], float] | None = None,
        shapes: Sequence[Shape] = (),
        forecast: Forecast | None = None,
        **config: float,
    ) -> None:
        """seconds: the time of a step that is reported to the planner. shapes: captured by the runner. forecast: bounds
        steps.
        """
        self.config = PlanConfig(**config)  # type: ignore[arg-type]
        self.max_model_len = max_model_len
        self.pages = pages
        self.planner = Planner(pages, self.config, max_model_len, hash_page, costs)
        if forecast is not None:
            self.planner.foresee(forecast)
        self._seconds = seconds
        self.runner = FakeRunner(pages, self.config, fails, shapes)
        self.planner.report(self.runner.recorded)
        self.stories: dict[JobId, Story] = {}  # in the order of submission
        self.flights: deque[tuple[Step, FakePending]] = deque()
        self._of_slot: dict[int, Story] = {}
        self._begun: dict[JobId, Story] = {}  # in the order in which they first began
        self._passed_over = 0

    def submit(
        self,
        tokens: tuple[int, ...],
        *,
        max_tokens: int = 8,
        salt: str = "",
        tenant: str = "",
        given: int = 0,
        ttft_ms: float | None = None,
        **sampling: object,
    ) -> Story:
        """given: tokens of the answer already produced by another worker; if it has fewer, all but the last."""
        seed = len(self.stories)
        job = make_job(f"job-{seed}", tokens, max_tokens=max_tokens, salt=salt, seed=seed, **sampling)
        expected = whole_answer(job, self.max_model_len)
        given = max(0, min(given, len(expected) - 1))
        scored = len(tokens) - 1 if given and job.sampling.prompt_logprobs is not None else 0
        job = msgspec.structs.replace(job, tenant=tenant, answer=expected[:given], scored=scored, ttft_ms=ttft_ms)
        story = self.stories[job.id] = Story(job, expected, list(job.answer))
        story.scored = [-float(at) for at in range(1, scored + 1)]
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
        result = pending.wait()
        self._tell(self.planner.settle(step, result, self._seconds(step, result) if self._seconds else None))

    def turn(self) -> None:
        """As the loop does: launch a step, settle the previous one."""
        before = len(self.flights)
        self.plan()
        if before:
            self.settle()

    def finish(self, most_turns: int = 20_000) -> None:
        """Runs to the end, then checks that nothing is left."""
        for _ in range(most_turns):
            if self.planner.idle:
                break
            self.turn()
        self.check_end()

    def check_end(self) -> None:
        assert self.planner.idle, "some jobs did not end"
        self.planner.check()
        load = self.planner.load()
        assert (load.running, load.waiting, load.pages_used) == (0, 0, 0), load
        for story in self.stories.values():
            assert story.finish is not None, f"{story.job.id} got no final delta"
            if story.finish in ("stop", "length"):
                assert tuple(story.tokens) == story.expected
                stopped = bool(story.expected) and story.expected[-1] in story.job.sampling.stop_ids
                assert story.finish == ("stop" if stopped else "length")

    def _tell(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            story = self.stories[delta.job]
            assert story.finish is None, f"{delta.job} got a delta after its end"
            assert delta.tokens or delta.finish or delta.prompt_logprobs or delta.notes_only, "an empty delta"
            assert not story.deltas or delta.cached_tokens == story.deltas[0].cached_tokens or not story.tokens
            sampling = story.job.sampling
            if sampling.prompt_logprobs is not None and delta.finish not in ("error", "aborted"):
                story.scored += [item.logprob for item in delta.prompt_logprobs]
                whole = [-float(at) for at in range(1, len(story.job.tokens))]
                assert story.scored == whole[: len(story.scored)], "prompt logprobs come in order, each once"
                if delta.tokens or delta.finish:
                    assert story.scored == whole, "prompt logprobs come before the first token, or with it"
            if sampling.logprobs is not None:
                assert tuple(item.token for item in delta.logprobs) == delta.tokens
            most = MOST_FORCED if delta.by == "grammar" else self.config.draft_tokens
            assert 0 <= delta.accepted <= delta.proposed <= most
            assert delta.finish or not delta.tokens or len(delta.tokens) == delta.accepted + 1
            story.deltas.append(delta)
            story.tokens += delta.tokens
            assert tuple(story.tokens) == story.expected[: len(story.tokens)], (
                f"{delta.job} got other tokens than expected"
            )

    def _watch_the_oldest(self, step: Step) -> None:
        """While older steps settle, the oldest of the jobs that have begun and have rows left is passed over by a few
        steps at most.
        """
        oldest = next((story for story in self._begun.values() if story.finish is None and self._has_rows(story)), None)
        for begin in step.begins:
            story = self._of_slot[begin.slot] = self.stories[JobId(f"job-{begin.sampling.seed}")]
            self._begun.setdefault(story.job.id, story)
            story.planned = len(begin.pages) * PAGE_TOKENS
        advanced: list[Story] = []
        for row in step.rows:
            story = self._of_slot[row.slot]
            story.planned = self.runner.slots[row.slot].computed
            advanced.append(story)
        passed_over = oldest is not None and not any(story is oldest for story in advanced)
        self._passed_over = self._passed_over + 1 if passed_over else 0
        assert self._passed_over <= 2 * (self.config.ahead + 1), "the oldest job is starved"

    def _has_rows(self, story: Story) -> bool:
        length = min(len(story.job.tokens) + story.job.sampling.max_tokens, self.max_model_len)
        return story.planned < max(length - 1, len(story.job.tokens))
