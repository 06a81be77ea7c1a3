"""For every sampling option, CUDA graph rounds give the same results as eager steps, to the bit."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.kernels.cuda.step.adjust import ADJUSTED, IN_PROMPT, STOPS, STOPS_FROM, AdjustArgs, adjust, count_tokens
from redline.kernels.cuda.step.step_rows import ALTERED, BEFORE, NEW, SLOT, TOKENS
from redline.messages.job import PAGE_TOKENS, Job, PageId, Sampling, options_at
from redline.messages.sampling_option import SamplingStage
from redline.messages.step import Begin, Row, Step
from redline.run.graphs.cuda_graph_runner import CudaGraphRunner, _way
from redline.run.runner import Runner
from redline.run.sampling.on_device import TOP_LOGPROBS, logprobs_of_row, score_rows
from redline.run.sampling.on_host import adjusted, likeliest, logprobs_of
from redline.run.slots import Slot
from redline.scheduler.recorded import RecordedShapes
from redline.worker.config import DraftConfig, Suffix
from redline.worker.engine import EngineCore
from tests.run.graphs.conftest import Open
from tests.seeds import fresh_generator
from tests.tiny_model import (
    BOTH,
    LEARNED,
    SUFFIX,
    VOCABULARY,
    Answer,
    job,
    open_engine,
    prompt,
    run,
    run_alone,
    tiny_model,
)

DRAWN = {"temperature": 1.0, "seed": 5, "seeded": True}
LOOSE = {"temperature": 1.5, "top_p": 0.95, "top_k": 100, "min_p": 0.02, "seed": 1 << 63}
ASKED: dict[str, dict[str, Any]] = {
    "log probabilities": {"logprobs": 20},
    "none of the best": {**DRAWN, "logprobs": 0},
    "frequency": {"frequency_penalty": 0.4, "logprobs": 2},
    "presence": {**DRAWN, "presence_penalty": -0.7},
    "repetition": {**LOOSE, "repetition_penalty": 1.3},
    "all": {
        **DRAWN,
        "top_p": 0.9,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 0.9,
        "logit_bias": ((1, 4.0), (0, -100.0), (77, 3.5)),
        "min_tokens": 45,
        "stop_ids": (*range(60), 60, 3),
    },
    "every filter": {
        **DRAWN,
        **{option.name: option.example for option in options_at(SamplingStage.FILTER)},
        "top_k": 50,
    },
    "bias": {"logit_bias": tuple((token, (token % 7 - 3) / 2) for token in range(300)), "logprobs": None},
    "least length": {"min_tokens": 12, "stop_ids": tuple(range(0, VOCABULARY, 8)), "logprobs": None},
    "nothing": {"logprobs": None},
}


def answers_of(engine: EngineCore, jobs: list[Job]) -> dict[str, Answer]:
    try:
        return {name: told(answer) for name, answer in run(engine, jobs).items()}
    finally:
        engine.runner.close()


def told(answer: Answer) -> Answer:
    return answer._replace(proposed=0, accepted=0, cached_tokens=0)


@functools.cache
def alone(asked: Job) -> Answer:
    """The answer of an eager engine without drafts."""
    return told(run_alone(tiny_model(), asked))


JOBS = [
    job(name, prompt(seed=n, length=40 + 25 * n), max_tokens=60 - n, **asked)
    for n, (name, asked) in enumerate(ASKED.items())
]


@pytest.mark.parametrize("asked", JOBS, ids=ASKED)
def test_a_row_alone(captured: Open, asked: Job):
    engine = captured()
    assert answers_of(engine, [asked]) == {asked.id: alone(asked)}
    assert engine.runner.led == {}


@pytest.mark.parametrize("speculation", [None, SUFFIX, LEARNED, BOTH], ids=["no drafts", "suffix", "drafter", "both"])
def test_rows_of_every_kind_together(captured: Open, speculation: DraftConfig | None):
    engine = captured(speculation=speculation)
    assert answers_of(engine, JOBS) == {asked.id: alone(asked) for asked in JOBS}
    assert engine.runner.led == {}
    assert engine.runner.replays > 20


@pytest.mark.parametrize("asked", [job for job in JOBS if job.id != "least length"], ids=lambda asked: asked.id)
def test_a_position_sees_the_drafts_before_it(captured: Open, asked: Job):
    """Drafts of the job's own answer are all accepted, and their log probabilities equal those of one
    token at a time.
    """
    answer = alone(asked)
    runner = captured(speculation=Suffix(tokens=7, adaptive=False)).runner
    try:
        length = _begin(runner, asked)
        for first in (1, 13, 25):
            wrong = (*answer.tokens[first : first + 3], (answer.tokens[first + 3] + 1) % VOCABULARY)
            runner.place(0, length + first, wrong)
            given = _decode(runner, Row(slot=0, start=None, count=8, drafts=7))
            assert (given.tokens, given.accepted) == (answer.tokens[first : first + 4], 3)
            runner.place(0, length + first + 4, answer.tokens[first + 4 : first + 11])
            given = _decode(runner, Row(slot=0, start=None, count=8, drafts=7))
            assert (given.tokens, given.accepted) == (answer.tokens[first + 4 : first + 12], 7)
            if asked.sampling.logprobs is not None:
                assert given.logprobs == answer.logprobs[first + 4 : first + 12]
        assert runner.replays == 6
    finally:
        runner.close()


def _begin(runner: Runner, asked: Job, slot: int = 0) -> int:
    """Compute the prompt; -> its number of tokens."""
    tokens, length = asked.tokens, len(asked.tokens)
    begin = Begin(slot=slot, tokens=tokens, prompt=length, pages=(), sampling=asked.sampling, limit=length + 60)
    pages = tuple(PageId(8 * slot + page) for page in range(-(-(length + 60) // PAGE_TOKENS)))
    row = Row(slot=slot, start=0, count=length, new_pages=pages)
    runner.launch(Step(number=0, begins=(begin,), rows=(row,))).wait()
    return length


def _step(runner: Runner, *rows: Row) -> Step:
    shape = RecordedShapes(runner.recorded).choose(len(rows), max(row.count for row in rows), 1024)
    return Step(number=1, rows=rows, shape=shape)


def _decode(runner: Runner, row: Row) -> Any:
    (given,) = runner.launch(_step(runner, row)).wait().rows
    assert given.error is None
    return given


@pytest.mark.parametrize("recorded", [True, False], ids=["captured", "eager"])
def test_a_result_says_who_made_the_drafts(recorded: bool):
    """The prompt repeats itself, so the suffix matches until the answer differs; then the drafter drafts."""
    asked = job("asked", prompt(seed=2, length=20) * 3, max_tokens=60, logprobs=None, logit_bias=((9, 1.0),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redline.worker.engine.Runner", functools.partial(Runner, captured=recorded))
        engine = open_engine(tiny_model(), speculation=BOTH)
    try:
        answer = run(engine, [asked])["asked"]
        load = engine.planner.load()
    finally:
        engine.runner.close()
    assert told(answer) == alone(asked)
    assert 0 < load.suffix_draft_tokens < load.draft_tokens == answer.proposed
    assert load.suffix_accepted_tokens <= load.accepted_tokens == answer.accepted


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a bias of no token": ({"logit_bias": ((VOCABULARY, 1.0),)}, "a token id outside the vocabulary"),
    "a ban of no token": ({"min_tokens": 5, "stop_ids": (-1,)}, "a token id outside the vocabulary"),
    "two biases of one token": ({"logit_bias": ((3, 1.0), (3, 1.0))}, "too many logit biases, or two"),
    "many biases": ({"logit_bias": tuple((n, 1.0) for n in range(301))}, "too many logit biases"),
    "many bans": ({"min_tokens": 5, "stop_ids": tuple(range(97))}, "too many stop ids"),
    "many log probabilities": ({"logprobs": 21}, "too many log probabilities"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_led_by_the_host_and_counted_by_name(captured: Open, name: str):
    options, why = REFUSED[name]
    asked = job("asked", prompt(seed=1, length=20), **{"logprobs": None, "max_tokens": 6, **options})
    engine = captured()
    assert answers_of(engine, [asked]) == {asked.id: alone(asked)}
    assert engine.runner.replays == 0
    refusal = _way(Slot(sampling=asked.sampling), VOCABULARY).refusal
    assert refusal is not None
    assert why in refusal
    assert set(engine.runner.led) == {"prompt", refusal}


def test_stop_ids_that_are_not_banned_may_be_many(captured: Open):
    asked = job("asked", prompt(seed=1, length=20), logit_bias=((3, 1.0),), stop_ids=tuple(range(200)), max_tokens=9)
    engine = captured()
    assert answers_of(engine, [asked]) == {asked.id: alone(asked)}
    assert engine.runner.led == {}


def _words(*allowed: Sequence[int]) -> Tensor:
    """A mask for each position."""
    bits = torch.zeros(len(allowed), VOCABULARY, dtype=torch.int64)
    for row, tokens in zip(bits, allowed, strict=True):
        row[list(tokens)] = 1
    return (bits.view(len(allowed), -1, 32) << torch.arange(32)).sum(-1).to(torch.int32)


@pytest.mark.parametrize("options", [{}, DRAWN, {**DRAWN, "frequency_penalty": 0.5, "top_p": 0.9}], ids=repr)
def test_masks_that_the_host_writes_between_the_pieces_decide_what_is_chosen(captured: Open, options: dict[str, Any]):
    """Position i follows i drafts. The other row has no mask, and must not keep a mask of an earlier step."""
    masked, free = (job(name, prompt(seed=3, length=30), max_tokens=60, logprobs=None, **options) for name in "ab")
    answer = alone(masked).tokens
    runner = captured(speculation=Suffix(tokens=3, adaptive=False)).runner
    captures = runner._captured
    assert captures is not None
    try:
        for slot, asked in enumerate((masked, free)):
            _begin(runner, asked, slot)
        drafts = [token | 1 for token in answer[1:4]]
        tens = range(200, 210) if drafts[1] in range(100, 110) else range(100, 110)
        calls: list[int] = []

        def only(*allowed: Sequence[int]) -> Callable[[], Tensor]:
            def masks() -> Tensor:
                calls.append(1)
                return _words(*allowed)

            return masks

        def launched(masks: dict[int, Callable[[], Tensor]]) -> list[tuple[int, ...]]:
            for slot, given in enumerate((drafts, answer[1:4])):
                runner.place(slot, 31, given)
            rows = (Row(slot=slot, start=None, count=4, drafts=3) for slot in range(2))
            return [row.tokens for row in _by_thread(runner, captures, _step(runner, *rows), masks)]

        held, others = launched({0: only([drafts[0]], [drafts[1]], [drafts[2]], [4, 5])})
        assert held[:3] == tuple(drafts)
        assert len(held) == 4
        assert held[3] in (4, 5)
        assert others == answer[1:5]
        held, others = launched({0: only([drafts[0]], tens, [drafts[2]], [4])})
        assert (held[0], held[1] in tens, len(held)) == (drafts[0], True, 2)
        assert others == answer[1:5]
        behind, _ = launched({0: only([drafts[0]])})
        every, _ = launched({0: only([drafts[0]], *[range(VOCABULARY)] * 3)})
        assert len(behind) >= 2
        assert behind == every, "a position without a mask must not use one of an earlier step"
        rejected, others = launched({})
        assert rejected == answer[1 : 1 + len(rejected)]
        assert others == answer[1:5]
        assert len(calls) == 4
    finally:
        runner.close()


def _by_thread(runner: Runner, captures: CudaGraphRunner, step: Step, masks: dict[int, Callable[[], Tensor]]) -> Any:
    wants = captures.wants(step)
    assert wants.refusal is None
    return runner._by_thread(lambda: captures.launch(step, wants, masks).result()).result().rows


@pytest.mark.parametrize("case", [case for case in adjust.op.cases() if case.small], ids=lambda case: case.name)
def test_logits_are_adjusted_as_the_host_does_it(case: Any):
    """Equal to the bit, from token counts kept on the device."""
    g = fresh_generator()
    args: AdjustArgs = case.make(g)
    plan, wishes, vocabulary = args.plan_BC, args.wishes, args.logits_TV.shape[1]
    plan[:, ALTERED] = ADJUSTED
    plan[:, SLOT] = torch.arange(len(plan))
    rows, positions = len(plan), len(args.ids_T) // len(plan)
    wishes = type(wishes).empty(rows + 1, vocabulary, torch.device("cpu"))
    args.masks_TW[:] = -1
    texts, asked = [], []
    for slot in range(rows):
        prompt_tokens, generated = (torch.randint(vocabulary, (n,), generator=g) for n in (40, 30 + slot))
        biased = torch.randperm(vocabulary, generator=g)[:20].tolist()
        numbers = torch.randn(22, generator=g).double().tolist()
        sampling = Sampling(
            max_tokens=1,
            presence_penalty=numbers[0],
            frequency_penalty=numbers[1],
            repetition_penalty=0.7 + slot / 10,
            logit_bias=tuple(zip(biased, numbers[2:], strict=True)),
            stop_ids=(1, 5, 1),
            min_tokens=32,
        )
        wishes.counts[slot, prompt_tokens] = IN_PROMPT
        texts.append((prompt_tokens, generated))
        asked.append(sampling)
        wishes.tokens[slot, 1:21] = torch.tensor(biased)
        wishes.tokens[slot, STOPS][:3] = torch.tensor(sampling.stop_ids)
        wishes.tokens[slot, STOPS_FROM] = 40 + 32
        wishes.numbers[slot, :3] = torch.tensor([*numbers[:2], sampling.repetition_penalty])
        wishes.numbers[slot, 3:23] = torch.tensor(numbers[2:])
    for step in range(-(-(30 + rows) // 8)):  # counted in rounds of eight tokens
        for slot, (_, generated) in enumerate(texts):
            new = generated[8 * step : 8 * step + 8]
            args.results[slot, NEW] = len(new)
            args.results[slot, TOKENS : TOKENS + len(new)] = new
        count_tokens(plan, args.results, wishes.counts)
    args.results[:rows, BEFORE] = 70 + torch.arange(rows)
    got = adjust.op.reference(args._replace(wishes=wishes))
    ids = args.ids_T.view(rows, positions)
    for slot, ((prompt_tokens, generated), sampling) in enumerate(zip(texts, asked, strict=True)):
        for k in range(positions):
            t = slot * positions + k
            seen = torch.cat([generated, ids[slot, 1 : k + 1]])
            assert torch.equal(got[t], adjusted(args.logits_TV[t], sampling, prompt_tokens, seen))


def test_scores_are_the_hosts_log_probabilities_and_equal_ones_come_in_the_order_of_ids():
    logits = (4 * torch.randn(70, VOCABULARY, generator=fresh_generator())).round()
    tokens = torch.randint(VOCABULARY, (70,), generator=fresh_generator())
    scores = torch.full((70, TOP_LOGPROBS.stop), -7.0, dtype=torch.float64)
    score_rows(logits, tokens, scores)
    for logits_V, row, token in zip(logits, scores.tolist(), tokens.tolist(), strict=True):
        for count in (0, 1, 7, 20):
            assert logprobs_of_row(row, token, count) == logprobs_of(logits_V, token, count)
        order = sorted(range(VOCABULARY), key=lambda token: (-float(logits_V[token]), token))
        assert likeliest(logits_V, 40).tolist() == order[:40]
