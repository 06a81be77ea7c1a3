"""Prompts that arrive while decode rows are replayed: the rows stay in CUDA graphs, and no step waits for the prompts.

On a CPU a launched chunk is computed at its launch; these tests check which results the host asks for, and when.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from redline.messages.job import PAGE_TOKENS, Job, PageId, Sampling
from redline.messages.step import Begin, Row, Step
from redline.run.graphs.graph_recorder import Recorder
from redline.run.layer_marks import LayerMarks
from redline.run.pending import LaunchedStep
from redline.run.runner import Runner
from redline.scheduler.recorded import RecordedShapes
from redline.worker.config import DraftConfig
from redline.worker.engine import EngineCore
from tests.run.graphs.conftest import Open
from tests.tiny_model import (
    BLOCK,
    BOTH,
    LEARNED,
    SUFFIX,
    Answer,
    drafter_rows,
    job,
    open_engine,
    prompt,
    run,
    run_alone,
    tiny_model,
)


@functools.cache
def alone(asked: Job) -> Answer:
    """The answer of an eager engine without drafts."""
    return run_alone(tiny_model(), asked)


def answers_of(engine: EngineCore, *waves: list[Job], every: int) -> tuple[dict[str, Answer], Counter[str]]:
    """All answers; and how many launched steps had decode rows, prompts, and both."""
    launch, steps = engine.runner.launch, Counter[str]()

    def counting(step: Step) -> object:
        decoding, prompts = (any((row.start is None) == decodes for row in step.rows) for decodes in (True, False))
        steps.update({"decoding": decoding, "prompts": prompts, "both": decoding and prompts})
        return launch(step)

    engine.runner.launch = counting  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return run(engine, *waves, every=every), steps
    finally:
        engine.runner.close()


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 5},
    {},
    {"temperature": 0.7, "top_p": 0.9, "seed": 3, "seeded": True},
)


def waves_of(count: int, most: int = 40) -> list[list[Job]]:
    """Prompts of one token to some hundred, three with a common prefix; answers drawn and greedy."""
    return [
        [
            job(
                f"{wave}.{n}", prompt(seed=n % 3, length=length), max_tokens=most + 5 * n, logprobs=None, **KINDS[n % 4]
            )
            for n, length in enumerate((1, 64 + wave, 63 + 100 * (wave % 2), 128))
        ]
        for wave in range(count)
    ]


@pytest.mark.parametrize(
    "speculation", [None, SUFFIX, BOTH, LEARNED, BLOCK], ids=["plain", "suffix", "both", "drafter", "block"]
)
def test_no_row_leaves_the_recorded_steps_because_prompts_arrive(captured: Open, speculation: DraftConfig | None):
    """Prompts in chunks, uncached and with a cached prefix."""
    waves = waves_of(6)
    engine = captured(speculation=speculation, step_tokens=90, pages=256)
    answers, steps = answers_of(engine, *waves, every=9)
    runner = engine.runner
    assert steps["both"] >= 15
    assert (runner.replays, runner.chunks) == (steps["decoding"], steps["prompts"])
    assert not runner.led
    assert engine.planner.load().prompt_tokens_cached > 0
    assert [asked.id for wave in waves for asked in wave if answers[asked.id].tokens != alone(asked).tokens] == []


@pytest.mark.parametrize("speculation", [None, LEARNED], ids=["plain", "drafter"])
def test_jobs_that_are_pre_empted_read_their_answers_again_beside_others(
    captured: Open, speculation: DraftConfig | None
):
    waves = waves_of(4, most=110)
    engine = captured(speculation=speculation, step_tokens=90, pages=9, max_model_len=512)
    answers, steps = answers_of(engine, *waves, every=30)
    runner, load = engine.runner, engine.planner.load()
    assert load.preemptions > 0
    assert steps["both"] >= 15
    assert set(runner.led) <= {"a page's first row"}  # eager if no page was free for the drafter's next row
    assert runner.replays == steps["decoding"] - runner.led.total()
    assert [asked.id for wave in waves for asked in wave if answers[asked.id].tokens != alone(asked).tokens] == []


def test_a_prompt_that_needs_the_host_takes_no_decode_row_with_it(captured: Open):
    waves = [
        [job("decodes", prompt(seed=1, length=20), max_tokens=60, logprobs=None)],
        *([job(f"{n}", prompt(seed=n, length=70), max_tokens=30, logprobs=None, prompt_logprobs=2)] for n in range(4)),
    ]
    engine = captured()
    answers, steps = answers_of(engine, *waves, every=6)
    assert steps["both"] == 4
    assert engine.runner.led == {"prompt": 4}
    assert (engine.runner.replays, engine.runner.chunks) == (steps["decoding"], 1)
    for (asked,) in waves:
        assert answers[asked.id] == alone(asked)


def test_a_prompt_whose_first_token_needs_the_host_is_led(captured: Open):
    """Only the last chunk is eager; those before it sample no token."""
    waves = [
        [job("decodes", prompt(seed=1, length=20), max_tokens=60, logprobs=None)],
        [job("scored", prompt(seed=2, length=150), max_tokens=9, logprobs=2)],
        [job("penalized", prompt(seed=4, length=70), max_tokens=9, logprobs=1, repetition_penalty=1.5)],
        [job("biased", prompt(seed=3, length=120), max_tokens=1, logprobs=None, logit_bias=((7, 9.0), (7, 91.0)))],
    ]
    engine = captured(step_tokens=64)
    answers, steps = answers_of(engine, *waves, every=6)
    assert engine.runner.led == {"prompt": 1}
    assert (engine.runner.replays, engine.runner.chunks) == (steps["decoding"], 7)
    for (asked,) in waves:
        assert answers[asked.id] == alone(asked)


def test_a_prompt_that_gives_no_finite_logit_ends_its_own_job_only(captured: Open, monkeypatch: pytest.MonkeyPatch):
    waves = [[job(f"{n}", prompt(seed=n, length=30 + n), max_tokens=30, logprobs=None)] for n in range(3)]
    model, whole, thrown = tiny_model(), tiny_model().logits, 0
    expected = {one.id: alone(one) for (one,) in waves}
    engine = captured()
    read = engine.runner._chunks
    assert read is not None
    launch = read.launch

    def broken(step: Step, marks: LayerMarks | None) -> Any:
        nonlocal thrown
        thrown += 1

        def no_number(hidden: torch.Tensor) -> torch.Tensor:
            logits = whole(hidden)
            logits[0, 7] = torch.nan
            return logits

        with monkeypatch.context() as patch:
            if thrown == 2:
                patch.setattr(model, "logits", no_number)
            return launch(step, marks)

    monkeypatch.setattr(read, "launch", broken)
    answers, _ = answers_of(engine, *waves, every=6)
    assert answers["1"].error == "the model returned a non-finite logit at position 30"
    assert answers["1"].tokens == ()
    assert answers["0"] == expected["0"]
    assert answers["2"] == expected["2"]


def test_a_prompt_that_cannot_begin_ends_its_own_job_only(captured: Open):
    engine = captured()
    waves = [
        [job("decodes", prompt(seed=1, length=20), max_tokens=40, logprobs=None)],
        [
            job("wrong", (3, 512, 4), max_tokens=40, logprobs=None),
            job("right", prompt(seed=2, length=30), max_tokens=9, logprobs=None),
        ],
    ]
    answers, _ = answers_of(engine, *waves, every=6)
    assert answers["wrong"].error == "token ids must be between 0 and 511; the prompt contains 512"
    for asked in (waves[0][0], waves[1][1]):
        assert answers[asked.id] == alone(asked)


class Runs:
    """A runner of 16 slots with 4 pages each, and methods that launch steps on it."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def read(
        self, slot: int, tokens: tuple[int, ...], *beside: int, pages: int | None = None, **row: Any
    ) -> LaunchedStep:
        """Launch a job's prompt together with the next decode row of other slots."""
        begin = Begin(
            slot=slot,
            tokens=tokens,
            prompt=len(tokens),
            pages=(),
            sampling=Sampling(max_tokens=64, temperature=0.0),
            limit=len(tokens) + 64,
            drafting=row.get("drafting", False),
        )
        own = tuple(PageId(4 * slot + n) for n in range(4))[:pages]
        prompts = Row(slot=slot, start=0, count=len(tokens), new_pages=own, **row)
        return self._launch(Step(number=0, begins=(begin,), rows=(*map(_decodes, beside), prompts)))

    def decode(self, *slots: int) -> LaunchedStep:
        return self._launch(Step(number=0, rows=tuple(map(_decodes, slots))))

    def _launch(self, step: Step) -> LaunchedStep:
        decoding = sum(row.start is None for row in step.rows)
        shape = RecordedShapes(self.runner.recorded).choose(decoding, 1, 4 * PAGE_TOKENS) if decoding else None
        launched = self.runner.launch(msgspec.structs.replace(step, shape=shape))
        assert isinstance(launched, LaunchedStep)
        return launched


def _decodes(slot: int) -> Row:
    return Row(slot=slot, start=None, count=1)


def test_steps_are_launched_before_a_prompt_beside_them_is_read(captured: Open, monkeypatch: pytest.MonkeyPatch):
    """The host records events on the device, and waits for none of them until a result is asked for."""
    waits = 0

    def mark(_: Recorder) -> Callable[[], None]:
        def wait() -> None:
            nonlocal waits
            waits += 1

        return wait

    monkeypatch.setattr(Recorder, "mark", mark)
    first, second = (prompt(seed=n, length=40 + n) for n in (1, 2))
    expected = [alone(job("a", tokens, max_tokens=9, logprobs=None)).tokens for tokens in (first, second)]
    runs = Runs(captured().runner)
    try:
        steps = [runs.read(0, first), runs.decode(0), runs.read(1, second, 0), runs.decode(0, 1), runs.decode(0, 1)]
        steps[-1]._future.result()  # returns once the thread has launched the step
        assert waits == 0
        results = [step.wait() for step in steps]
        assert waits > 0
        assert [result.replayed for result in results] == [False, True, True, True, True]
        rows = [[row.tokens for row in result.rows] for result in results]
        assert sum((step[0] for step in rows), ()) == expected[0][:5]
        assert sum((step[1] for step in rows[2:]), ()) == expected[1][:3]
    finally:
        runs.runner.close()


def test_a_slot_may_go_to_another_job_before_the_rows_of_the_last_one_are_read(captured: Open):
    """Late results of those rows are not credited to the new job."""
    first, second = prompt(seed=1, length=40), prompt(seed=2, length=90)
    answer = alone(job("a", second, max_tokens=9, logprobs=None)).tokens
    runs = Runs(captured().runner)
    try:
        steps = [runs.read(0, first), *(runs.decode(0) for _ in range(3)), runs.read(0, second)]
        for step in steps:
            step.wait()
        given = [runs.decode(0).wait().rows[0].tokens for _ in range(4)]
        assert sum(given, steps[-1].wait().rows[0].tokens) == answer[:5]
        captures = runs.runner._captured
        assert captures is not None
        captures.catch_up()
        assert runs.runner.slots.at[0].length == 95
    finally:
        runs.runner.close()


@pytest.mark.parametrize("length", [2, 30, 63, 64, 65, 127, 150])
@pytest.mark.parametrize("propose", [0, 1, 3])
def test_a_drafter_reads_a_prompt_as_where_the_host_leads(captured: Open, length: int, propose: int):
    """The drafter's rows, the features stored with pages, and the drafts that the first decode row verifies."""
    config = {"speculation": LEARNED}
    engines = [captured(**config), open_engine(tiny_model(), **config)]
    tokens = prompt(seed=4, length=length)
    begin = Begin(
        slot=0,
        tokens=tokens,
        prompt=length,
        pages=(),
        sampling=Sampling(max_tokens=64, temperature=0.0),
        limit=length + 64,
        drafting=True,
    )
    row = Row(slot=0, start=0, count=length, new_pages=(PageId(7), PageId(2), PageId(5)), drafting=True)
    row = msgspec.structs.replace(row, propose=propose)
    found = []
    for engine in engines:
        runner = engine.runner
        try:
            runner.kv.draft.zero_()
            runner.kv.tails.zero_()
            given = runner.launch(Step(number=1, begins=(begin,), rows=(row,))).wait().rows[0]
            if runner._captured is not None:
                runner._captured.catch_up()
            slot = runner.slots.at[0]
            given = msgspec.structs.replace(given, waiting=None)  # in eager steps the field is not set
            found.append((given, slot.length, slot.proposal.tokens, slot.behind))
        finally:
            runner.close()
    assert found[0] == found[1]
    assert len(found[0][2]) == propose
    torch.testing.assert_close(*(drafter_rows(engine, 0, length + 1) for engine in engines))
    torch.testing.assert_close(*(engine.runner.kv.tails[: engine.layout.pages] for engine in engines))


def test_a_drafters_row_without_a_page_comes_with_the_slots_next_row(captured: Open):
    """The prompt ends at a page boundary; the position of the next token belongs to a page that is not allocated yet,
    and the stale entry of the table names another slot's page.
    """
    engine = captured(speculation=LEARNED)
    runner, runs = engine.runner, Runs(engine.runner)
    tokens = prompt(seed=4, length=64)
    runner.kv.draft.zero_()
    try:
        runs.read(0, prompt(seed=1, length=70)).wait()  # so that the slot's table names its second page
        before = runner.kv.draft[1].clone()
        first = runs.read(0, tokens, pages=1, drafting=True).wait().rows[0].tokens
        assert torch.equal(runner.kv.draft[1], before)
        assert runner.slots.at[0].behind
        row = Row(slot=0, start=None, count=1, drafting=True, propose=1, new_pages=(PageId(1),))
        given = runner.launch(Step(number=1, rows=(row,))).wait().rows[0].tokens
        assert first + given == alone(job("a", tokens, max_tokens=2, logprobs=None)).tokens
        assert runner.led == {"a page's first row": 1}
        assert (runner.kv.draft[1, :2] != before[:2]).any(-1).all()
    finally:
        runner.close()
