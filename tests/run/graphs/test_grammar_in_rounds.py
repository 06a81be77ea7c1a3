"""Rows with a grammar: CUDA graph rounds give the same tokens as eager steps, and do not change the other rows."""

import functools
import json
import tempfile
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from lab.attack.schemas import schemas
from redline.messages.delta import Delta
from redline.messages.job import PAGE_TOKENS, Grammar, Job
from redline.messages.news import Load
from redline.messages.step import RowResult, Step, StepResult
from redline.model.eagle3.module import Eagle3, Eagle3Config
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.cpu import K2, load
from redline.model.k2.write import random_checkpoint
from redline.run.fit import Layout
from redline.run.grammar.matcher import Matcher
from redline.run.runner import Runner
from redline.scheduler.planner import Planner
from redline.worker.config import DraftConfig, EngineConfig, Learned
from redline.worker.engine import EngineCore, Loaded
from tests.clocks import FakeClock
from tests.tiny_model import BOTH, CPU, LEARNED, SUFFIX, Answer, job, kernel_config, run
from tests.tiny_tokenizer import TINY_VOCAB, tokenizer

TOKENIZER = tokenizer()
THOUGHT, END = TOKENIZER.special("</think>"), TOKENIZER.special("<|im_end|>")
WHITE = {"x-guidance": {"whitespace_pattern": "[ ]{1,2}"}}
CLOSING = tuple((TOKENIZER.encode(text)[0], 4.0) for text in ('"', "}", "]", ","))
DRAWN = {"temperature": 1.0, "seed": 5, "seeded": True}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": DRAWN,
    "narrowed": {**DRAWN, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "penalties": {**DRAWN, "presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "no log probabilities": {"logprobs": None},
}


@pytest.fixture(autouse=True)
def masks_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks take no measured time, so a busy machine does not change the tests."""
    monkeypatch.setattr("redline.clock.thread_time", FakeClock())


@functools.cache
def model() -> K2:
    with tempfile.TemporaryDirectory() as folder:
        random_checkpoint(folder, kernel_config(vocab_size=TINY_VOCAB))
        return load(Checkpoint.open(folder), CPU)


@functools.cache
def drafter() -> Eagle3:
    torch.manual_seed(0)
    made = Eagle3(Eagle3Config.for_target(model().config))
    made.prepare(model())
    return made


def opened(
    speculation: DraftConfig | None = None, *, captured: bool = False, pages: int = 128, step_tokens: int = 512
) -> EngineCore:
    layout = Layout(pages, 1024, model().dtype, model().config.kv_bytes_per_token(model().dtype) * PAGE_TOKENS)
    config = EngineConfig(max_running=16, step_tokens=step_tokens, speculation=speculation)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redline.worker.engine.Runner", functools.partial(Runner, captured=captured))
        own = drafter() if isinstance(speculation, Learned) else None
        return EngineCore(Loaded(model(), layout, "tiny", own, lambda: TOKENIZER), config)


def answers(engine: EngineCore, jobs: list[Job]) -> dict[str, Answer]:
    try:
        return {name: told(answer) for name, answer in run(engine, jobs).items()}
    finally:
        engine.runner.close()


def told(answer: Answer) -> Answer:
    return answer._replace(proposed=0, accepted=0, cached_tokens=0)


def grammar(schema: dict[str, Any], *, thinks: bool = False) -> Grammar:
    text = f"%json {json.dumps({**schema, **WHITE})}"
    if not thinks:
        return Grammar(text=f"start: {text}")
    return Grammar(text=f"start: <[{THOUGHT}]> {text}", after=(THOUGHT,), banned=TOKENIZER.stop_ids)


def asked(name: str, n: int, schema: dict[str, Any], *, thinks: bool = False, **how: Any) -> Job:
    bias = (*CLOSING, (THOUGHT, 5.0)) if thinks else CLOSING
    form = grammar(schema, thinks=thinks)
    given = {"max_tokens": 120, "logit_bias": bias, "stop_ids": TOKENIZER.stop_ids, "grammar": form, **how}
    return job(name, range(20 + n, 60 + 3 * n), **given)


SCHEMAS = [schema for schema in schemas(12) if "odd" not in schema["properties"]]
JOBS = [
    asked(f"{name}, {'thinks' if thinks else 'at once'}", n, SCHEMAS[n], thinks=thinks, **how)
    for thinks in (False, True)
    for n, (name, how) in enumerate(ASKED.items())
]
JOBS += [
    asked(
        "idle at first",
        7,
        SCHEMAS[7],
        thinks=True,
        grammar=msgspec.structs.replace(grammar(SCHEMAS[7], thinks=True), banned=()),
        **DRAWN,
    )
]
PLAIN = [job(f"plain {n}", range(70 + n, 120), max_tokens=60 - n) for n in range(3)]


@functools.cache
def led() -> dict[str, Answer]:
    """The answers of an eager engine without drafts."""
    return answers(opened(), [*JOBS, *PLAIN])


def test_led_by_the_host_the_answers_fit():
    for one, schema in zip(JOBS, [*SCHEMAS[: len(ASKED)] * 2, SCHEMAS[7]], strict=True):
        answer = led()[one.id]
        assert answer.error is None
        assert answer.finish in ("stop", "length")
        if answer.finish == "stop":
            text = answer.tokens[answer.tokens.index(THOUGHT) + 1 :] if THOUGHT in answer.tokens else answer.tokens
            value = json.loads(TOKENIZER.decode_bytes(text[:-1]))
            assert set(schema.get("required", ())) <= set(value)
    assert sum(answer.finish == "stop" for answer in led().values()) >= 7


KINDS = pytest.mark.parametrize(
    "speculation", [None, SUFFIX, LEARNED, BOTH], ids=["no drafts", "suffix", "drafter", "both"]
)


@KINDS
def test_replayed_rounds_give_what_the_host_gives(speculation: DraftConfig | None):
    engine = opened(speculation, captured=True)
    assert answers(engine, [*JOBS, *PLAIN]) == led()
    assert engine.runner.led == {}
    assert engine.runner.replays > 20


@KINDS
def test_drafts_do_not_change_what_the_host_gives(speculation: DraftConfig | None):
    assert answers(opened(speculation), [*JOBS, *PLAIN]) == led()


@pytest.mark.parametrize("captured", [False, True], ids=["led", "replayed"])
@pytest.mark.parametrize("how", [{}, DRAWN], ids=["greedy", "drawn"])
def test_a_grammar_that_never_begins_changes_nothing(how: dict[str, Any], captured: bool):
    [expected] = answers(opened(SUFFIX), [job("plain", range(50), max_tokens=50, **how)]).values()
    never = Grammar(text='start: "x"', after=tuple(set(range(TINY_VOCAB)) - set(expected.tokens)))
    given = job("plain", range(50), max_tokens=50, grammar=never, **how)
    assert answers(opened(SUFFIX, captured=captured), [given]) == {"plain": expected}


KEYS = {"the functions": {"type": "boolean"}, "the ions and the functions": {"type": "integer"}, "in the end": {}}
FIXED = {"type": "object", "properties": KEYS, "required": list(KEYS), "additionalProperties": False}
UNSEEDED = {"temperature": 1.0}


@pytest.mark.parametrize(
    ("speculation", "captured"),
    [(None, False), (SUFFIX, False), (BOTH, False), (SUFFIX, True), (LEARNED, True), (BOTH, True)],
    ids=["led", "led, suffix", "led, both", "replayed, suffix", "replayed, drafter", "replayed, both"],
)
def test_what_a_grammar_forces_is_drafted_and_always_holds(
    speculation: DraftConfig | None, captured: bool, monkeypatch: pytest.MonkeyPatch
):
    """Greedy, drawn with and without a seed, and after thinking: the same answers in fewer steps. Answers drawn without
    a seed are the same if no drafter draws drafts.
    """
    jobs = [asked("greedy", 3, FIXED), asked("drawn", 4, FIXED, **DRAWN), asked("thinks", 5, FIXED, thinks=True)]
    if captured or not isinstance(speculation, Learned):
        jobs.append(asked("unseeded", 6, FIXED, **UNSEEDED))

    def given() -> tuple[dict[str, Answer], Load]:
        engine = opened(speculation, captured=captured)
        answered = answers(engine, jobs)
        return answered, engine.planner.load()

    told, load = given()
    monkeypatch.setattr("redline.scheduler.speculation.MOST_FORCED", 0)
    monkeypatch.setattr(Matcher, "forced_behind", lambda *_: [])
    expected, without = given()
    assert told == expected == answers(opened(), jobs)
    assert sum(answer.finish == "stop" for answer in told.values()) >= 2
    assert load.grammar_draft_tokens == load.grammar_accepted_tokens > 30
    assert load.grammar_draft_tokens > without.grammar_draft_tokens
    assert load.steps < (0.9 if speculation else 0.6) * without.steps


def test_replayed_rounds_go_through_a_forced_run_in_as_few_steps_as_their_shape_has_positions_for():
    """The step in flight at the beginning of the forced run takes one of its tokens, each later step three drafts and
    one.
    """
    run_of = ", ".join(["the ions and the functions"] * 3)
    form = Grammar(text=f'start: /[ab]/ "{run_of}"')
    one = job("run", range(30), max_tokens=60, stop_ids=TOKENIZER.stop_ids, grammar=form)
    engine = opened(SUFFIX, captured=True)
    matchers = engine.runner.slots._matchers
    assert matchers is not None
    forced = len(matchers.begin(form, TOKENIZER.encode("a")).forced())
    assert forced > 20
    answer = answers(engine, [one])[one.id]
    assert TOKENIZER.decode_bytes(answer.tokens[1:-1]) == run_of.encode()
    load = engine.planner.load()
    steps_of_the_run = 1 + -(-(forced - 1) // 4)
    assert load.steps <= 1 + steps_of_the_run + 2
    assert load.grammar_accepted_tokens >= 3 * ((forced - 1) // 4)


@pytest.mark.parametrize("captured", [False, True], ids=["led", "replayed"])
def test_a_job_that_is_thrown_out_goes_on_in_its_grammar(captured: bool):
    """With fewer pages than the running jobs need, pre-empted jobs restart from their tokens, and so
    does the matcher.
    """
    engine = opened(captured=captured, pages=5)
    assert answers(engine, JOBS) == {one.id: led()[one.id] for one in JOBS}
    assert engine.planner.load().preemptions > 0


@pytest.mark.parametrize("captured", [False, True], ids=["led", "replayed"])
def test_an_interrupted_answer_is_followed_a_steps_tokens_at_a_time(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer continues after 400 tokens of it; no step advances the matcher by more tokens than it computes."""
    text = "ab" * 200
    form = Grammar(text=f'start: "{text}" "cd"')
    answer = tuple(TOKENIZER.encode(text)[:-1])
    goes_on = job("goes on", range(30), grammar=form, max_tokens=len(answer) + 20, stop_ids=TOKENIZER.stop_ids)
    engine = opened(captured=captured, step_tokens=16)
    followed: list[int] = []
    follow = Matcher.follow

    def follows(matcher: Matcher, tokens: Sequence[int]) -> None:
        followed.append(len(tokens))
        follow(matcher, tokens)

    monkeypatch.setattr(Matcher, "follow", follows)
    given = answers(engine, [msgspec.structs.replace(goes_on, answer=answer)])["goes on"]
    assert (given.error, given.finish) == (None, "stop")
    assert TOKENIZER.decode_bytes([*answer, *given.tokens[:-1]]) == (text + "cd").encode()
    assert len(answer) > 64
    assert max(followed) <= 16
    assert sum(followed) >= len(answer) + len(given.tokens)


@pytest.mark.parametrize("captured", [False, True], ids=["led", "replayed"])
def test_a_grammar_that_is_lost_ends_its_own_job_alone(captured: bool):
    broken = job("broken", range(30), grammar=Grammar(text="start: nobody"))
    given = answers(opened(captured=captured), [broken, *PLAIN])
    assert given["broken"].finish == "error"
    assert (
        given["broken"].error == 'the grammar cannot be followed: at 1(8): unknown name: "nobody" 1 | start: nobody ^'
    )
    assert {one.id: given[one.id] for one in PLAIN} == {one.id: led()[one.id] for one in PLAIN}


@pytest.mark.parametrize("speculation", [None, BOTH], ids=["no drafts", "both"])
@pytest.mark.parametrize("captured", [False, True], ids=["led", "replayed"])
def test_a_grammar_that_takes_too_long_ends_its_own_job_alone(captured: bool, speculation: DraftConfig | None):
    """Its row gives the tokens that it gives on a rank on which the mask was fast enough, and the error in addition."""
    engine, slow = opened(speculation, captured=captured), JOBS[0]
    clock, write = FakeClock(), Matcher._write

    def writes(matcher: Matcher, mask_W: Tensor) -> None:
        write(matcher, mask_W)
        clock.advance(0.3 if matcher._grammar == slow.sampling.grammar else 0.0)

    def settle(self: Planner, step: Step, result: StepResult, seconds: float | None = None) -> list[Delta]:
        results.extend(row for row in result.rows if row.error)
        return settles(self, step, result, seconds)

    results: list[RowResult] = []
    settles = Planner.settle
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redline.clock.thread_time", clock)
        patch.setattr(Matcher, "_write", writes)
        patch.setattr(Planner, "settle", settle)
        given = answers(engine, [slow, *PLAIN])
    assert "one token took 300 ms" in str(given[slow.id].error)
    assert {one.id: given[one.id] for one in PLAIN} == {one.id: led()[one.id] for one in PLAIN}
    assert all(row.refused for row in results)
    assert results[0].tokens == led()[slow.id].tokens[: len(results[0].tokens)] != ()


@pytest.mark.parametrize("captured", [False, True], ids=["led", "replayed"])
def test_a_grammar_that_meets_a_bound_ends_its_own_job_alone(captured: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("redline.policy.grammar.STEP_ITEMS", 300)
    text = "start: a+\na: A | a a | a A a\nA: /[a-z ]/"
    ambiguous = job("ambiguous", range(30), grammar=Grammar(text=text), max_tokens=200)
    given = answers(opened(captured=captured), [ambiguous, *PLAIN])
    assert "Too many items" in str(given["ambiguous"].error)
    assert {one.id: given[one.id] for one in PLAIN} == {one.id: led()[one.id] for one in PLAIN}


@pytest.mark.parametrize("speculation", [None, BOTH], ids=["no drafts", "both"])
@pytest.mark.parametrize("captured", [False, True], ids=["led", "replayed"])
def test_a_call_may_end_before_the_least_that_an_answer_owes(captured: bool, speculation: DraftConfig | None):
    """As tools in auto mode: an answer has at least 40 tokens, unless a call begins, which may end earlier."""
    call = Grammar(text=f'start: <[{THOUGHT}]> "red"', after=(THOUGHT,))
    owes = {"min_tokens": 40, "max_tokens": 60, "stop_ids": TOKENIZER.stop_ids, "grammar": call}
    never, begins = ((END, 50.0), (THOUGHT, -100.0)), ((THOUGHT, 50.0),)
    jobs = [job("text", range(30), logit_bias=never, **owes), job("call", range(30), logit_bias=begins, **owes)]
    given = answers(opened(speculation, captured=captured), jobs)
    assert (given["text"].error, given["text"].finish, len(given["text"].tokens)) == (None, "stop", 41)
    assert (given["call"].error, given["call"].finish) == (None, "stop")
    assert given["call"].tokens[0] == THOUGHT
    assert TOKENIZER.decode_bytes(given["call"].tokens[1:-1]) == b"red"


def test_an_engine_without_a_vocabulary_says_so():
    engine = opened()
    engine.runner.slots._matchers = None
    given = answers(engine, [JOBS[0], PLAIN[0]])
    assert "no tokenizer vocabulary" in str(given[JOBS[0].id].error)
    assert given[PLAIN[0].id] == led()[PLAIN[0].id]
