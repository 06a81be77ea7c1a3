"""Drafts through the real planner and runner: the distribution of drawn tokens, a broken drafter, and jobs that end
while drafts are in flight.
"""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.kernels.cpu.blocks.transformer import TransformerOutput
from redline.messages.delta import Delta
from redline.messages.job import Job, PageId, Sampling
from redline.messages.step import Begin, Row, Step
from redline.model.block.config import BlockConfig
from redline.model.block.module import BlockDrafter
from redline.model.drafter import Drafter
from redline.model.eagle3.module import Eagle3, Eagle3Config
from redline.model.k2.cpu import K2
from redline.model.k2.forward import predicted
from redline.model.k2.write import random_checkpoint
from redline.policy.draft_count import Worth
from redline.run.runner import Runner
from redline.worker.config import Learned
from redline.worker.engine import EngineCore
from redline.worker.turn import turn
from tests.tiny_model import (
    BOTH,
    LEARNED,
    VOCABULARY,
    Answer,
    job,
    kernel_config,
    load_folder,
    open_engine,
    prompt,
    run,
    run_alone,
    tiny_model,
)

FEW = 16  # size of a vocabulary small enough that every pair of tokens occurs often
DRAWS = 3600
TEMPERATURE = 0.8


@functools.cache
def few_words() -> tuple[K2, dict[str, Drafter]]:
    """A model with few tokens, and drafters with other distributions than the model."""
    with tempfile.TemporaryDirectory() as folder:
        random_checkpoint(folder, kernel_config(vocab_size=FEW))
        model = load_folder(Path(folder))
    torch.manual_seed(3)
    block = BlockDrafter(BlockConfig.for_target(model.config, layer_ids=(1, 2), mask_token_id=3, num_hidden_layers=1))
    torch.nn.init.normal_(block.markov_head.markov_w2.weight)
    drafters = {"chain": Eagle3(Eagle3Config.for_target(model.config)), "block": block}
    for drafter in drafters.values():
        drafter.prepare(model)
    return model, drafters


def answers_of(engine: EngineCore, *waves: list[Job], every: int = 3) -> dict[str, Answer]:
    try:
        return run(engine, *waves, every=every)
    finally:
        engine.runner.close()


def asked_of(start: tuple[int, ...], *prefixes: tuple[int, ...]) -> list[Tensor]:
    """The model's distribution of the token after each of the prefixes, float64 [V]."""
    jobs = [
        job(",".join(map(str, prefix)), (*start, *prefix), max_tokens=1, temperature=0.0, logprobs=FEW)
        for prefix in prefixes
    ]
    answers = answers_of(open_engine(few_words()[0], max_running=64), jobs)
    found: list[Tensor] = []
    for asked in jobs:
        p_V = torch.zeros(FEW, dtype=torch.float64)
        for token, logprob in answers[asked.id].logprobs[0].top:
            p_V[token] = logprob
        found.append((p_V / TEMPERATURE).softmax(-1))
    return found


def chi_square_z(counts: Tensor, expected: Tensor) -> float:
    """Standard deviations of the statistic above its mean; cells with an expected count below 5 are pooled."""
    large = expected >= 5
    cells = torch.cat([expected[large], expected[~large].sum()[None]])
    seen = torch.cat([counts[large], counts[~large].sum()[None]])
    cells, seen = cells[cells > 0], seen[cells > 0]
    freedom = len(cells) - 1
    return (float(((seen - cells) ** 2 / cells).sum()) - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("kind", ["chain", "block"])
def test_what_an_engine_with_a_drafter_draws_is_distributed_as_the_model_says(kind: str):
    """Counts the second and third token of many answers against the model's own probability of every pair."""
    model, drafters = few_words()
    start = (5, 9, 2)
    (first_V,) = asked_of(start, ())
    second = torch.stack(asked_of(start, *((a,) for a in range(FEW))))
    third = torch.stack(asked_of(start, *((a, b) for a in range(FEW) for b in range(FEW)))).view(FEW, FEW, FEW)
    pairs = torch.einsum("a,ab,abc->bc", first_V, second, third).flatten()
    engine = open_engine(model, drafter=drafters[kind], speculation=LEARNED, max_running=64)
    answers: list[Answer] = []
    try:
        for first in range(0, DRAWS, 900):
            drawn = {"max_tokens": 4, "temperature": TEMPERATURE, "logprobs": None}
            wave = [job(f"{n}", start, seed=7919 * n + 1, **drawn) for n in range(first, first + 900)]
            answers += run(engine, wave).values()
    finally:
        engine.runner.close()
    counts = torch.zeros(FEW, FEW, dtype=torch.float64)
    for answer in answers:
        counts[answer.tokens[1], answer.tokens[2]] += 1
    accepted, proposed = sum(answer.accepted for answer in answers), sum(answer.proposed for answer in answers)
    assert 0.2 < accepted / proposed < 0.95
    assert chi_square_z(counts.flatten(), pairs * DRAWS) < 4


def _all(drafter: Eagle3) -> None:
    for parameter in drafter.parameters():
        parameter.fill_(torch.nan)


BROKEN: dict[str, tuple[dict[str, Any], Callable[[Eagle3], object]]] = {
    "everything": ({}, _all),
    "everything, reduced": ({"draft_vocab_size": 96}, _all),
    "everything, Llama": ({"architecture": "llama"}, _all),
    "a weight of the fusion": ({}, lambda drafter: drafter.fc.weight[3, 5].fill_(torch.nan)),
    "infinite states": ({"architecture": "llama"}, lambda drafter: drafter.fc.weight.fill_(torch.inf)),
    "the last norm": ({}, lambda drafter: drafter.norm.weight.fill_(torch.nan)),
    "rows of the head": ({}, lambda drafter: drafter.lm_head.weight[5:9].fill_(torch.nan)),
    "an infinite column of the head": ({}, lambda drafter: drafter.lm_head.weight[:, 0].fill_(torch.inf)),
    "the same, reduced": ({"draft_vocab_size": 96}, lambda drafter: drafter.lm_head.weight[:, 0].fill_(-torch.inf)),
}
# Faults of the head itself, and faults in its input; the format of the head does not matter for the others.
IN_8_BITS = ("everything", "the last norm", "rows of the head", "an infinite column of the head", "the same, reduced")


@pytest.mark.parametrize("captured", [False, True], ids=["led", "replayed"])
@pytest.mark.parametrize(
    ("name", "head_bits"), [*((name, 16) for name in BROKEN), *((name, 8) for name in BROKEN if name in IN_8_BITS)]
)
def test_a_drafter_that_gives_no_numbers_costs_nobody_an_answer(
    monkeypatch: pytest.MonkeyPatch, name: str, head_bits: int, captured: bool
):
    sizes, broken = BROKEN[name]
    torch.manual_seed(4)
    drafter = Eagle3(Eagle3Config.for_target(tiny_model().config, **sizes))
    with torch.no_grad():
        broken(drafter)
    drafter.prepare(tiny_model(), head_bits)
    monkeypatch.setattr("redline.worker.engine.Runner", functools.partial(Runner, captured=captured))
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "seeded": {"temperature": 1.0, "seed": 5, "seeded": True},
        "drawn": {"temperature": 1.0, "seed": 4},
        "lukewarm": {"temperature": 0.3, "top_p": 0.9},
    }
    asked = [
        job(kind, prompt(n, 70 - 9 * n), max_tokens=20, logprobs=None, **how)
        for n, (kind, how) in enumerate(kinds.items())
    ]
    engine = open_engine(tiny_model(), drafter=drafter, speculation=BOTH)
    answers = answers_of(engine, asked)
    assert [(answer.finish, answer.error) for answer in answers.values()] == [("length", None)] * 4
    assert all(0 <= token < VOCABULARY for answer in answers.values() for token in answer.tokens)
    assert answers["drawn"].proposed > 0
    assert engine.runner.replays > 10 or not captured
    for one in asked[: 4 if captured else 2]:  # in eager steps, drawn drafts go through block verification
        assert answers[one.id].tokens == run_alone(tiny_model(), one).tokens, one.id


def test_a_draft_behind_which_the_model_gives_no_number_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch):
    """Without a drafter the row after that token would never have been computed."""
    asked = job("asked", prompt(1, 70), max_tokens=20)
    expected = run_alone(tiny_model(), asked)
    model, sound = tiny_model(), tiny_model().predict

    def broken(*of: Any) -> TransformerOutput:
        out = sound(*of)
        logits = out.logits().clone()
        logits[1:] = torch.nan  # all rows after the first draft
        return predicted(out.hidden(), out.features, logits)

    monkeypatch.setattr(model, "predict", broken)
    for change in ({}, {"frequency_penalty": 1e-9}):
        answers = answers_of(
            open_engine(model, speculation=BOTH),
            [job("asked", prompt(1, 70), max_tokens=20, **change)],
        )
        assert answers["asked"].error is None
        assert answers["asked"].tokens == expected.tokens


def test_a_job_that_is_aborted_in_the_middle_of_its_drafts_leaves_no_trace():
    """Its slot and pages go to other jobs, which get the answers that they would get without it."""
    engine = open_engine(tiny_model(), speculation=BOTH, max_running=2, pages=12)
    leaving = job("leaving", prompt(1, 100), max_tokens=300, temperature=1.0)
    stays, comes = job("stays", prompt(2, 90), max_tokens=60), job("comes", prompt(1, 100), max_tokens=60)
    told: dict[str, list[Delta]] = {asked.id: [] for asked in (leaving, stays, comes)}
    try:
        for asked in (leaving, stays, comes):
            engine.planner.submit(asked)
        flight, turns = None, 0
        while flight or not engine.planner.idle:
            deltas = engine.planner.abort(leaving.id) if turns == 8 else []
            flight, settled = turn(engine.planner, engine.runner, flight)
            for delta in deltas + settled:
                told[delta.job].append(delta)
            engine.planner.check()
            turns += 1
    finally:
        engine.runner.close()
    assert sum(delta.proposed for delta in told["leaving"]) > 0
    assert [delta.finish for delta in told["leaving"]][-1] == "aborted"
    assert engine.planner.load().pages_used == 0
    for asked in (stays, comes):
        tokens = tuple(token for delta in told[asked.id] for token in delta.tokens)
        assert tokens == run_alone(tiny_model(), asked).tokens


def test_rows_that_the_drafter_follows_and_rows_that_it_has_lost_share_a_step():
    engine = open_engine(tiny_model(), speculation=BOTH)
    lost = [job(f"lost {n}", prompt(n, 40 + n), max_tokens=60) for n in range(3)]
    followed = [job(f"followed {n}", prompt(n, 70 + n), max_tokens=50) for n in range(3)]
    kinds: set[frozenset[bool]] = set()
    launch = engine.runner.launch

    def watched(step):
        kinds.add(frozenset(row.drafting for row in step.rows))
        return launch(step)

    engine.runner.launch = watched
    engine.planner._speculation._worth = Worth(pays=False)
    answers: dict[str, Answer] = {}
    settle = engine.planner.settle

    def settled(*args):
        engine.planner._speculation._worth = Worth()  # reset, which takes effect for jobs that begin from now on
        return settle(*args)

    engine.planner.settle = settled
    answers = answers_of(engine, lost, followed, every=4)
    assert frozenset((True, False)) in kinds
    assert all(answers[asked.id].proposed > 0 for asked in followed)
    for asked in lost + followed:
        alone = run_alone(tiny_model(), asked)
        assert (answers[asked.id].tokens, answers[asked.id].logprobs) == (alone.tokens, alone.logprobs)


@pytest.mark.parametrize("shared", [64, 128])
def test_as_many_drafts_hold_after_a_cache_hit_as_without(shared: int):
    """Drawn at random, so that some drafts are accepted; the last row of the cached page is the first one that the
    cache must restore. The pages come from a prompt with max_tokens 0, which ended at a page boundary.
    """
    asked = job("asked", prompt(1, shared) + prompt(4, 50), max_tokens=60, temperature=2.0, seed=11)
    found: list[Answer] = []
    for before in ([], [job("before", prompt(1, shared), max_tokens=0)]):
        engine = open_engine(tiny_model(), speculation=LEARNED)
        engine.runner.kv.tails.fill_(torch.nan)  # so that a read of an unwritten feature shows
        found.append(answers_of(engine, before, [asked], every=8)["asked"])
    cold, warm = found
    assert (cold.cached_tokens, warm.cached_tokens) == (0, shared)
    assert 0 < cold.accepted < cold.proposed
    assert warm._replace(cached_tokens=0) == cold


@pytest.mark.parametrize(
    "kind",
    [
        {"architecture": "llama", "draft_vocab_size": 100},
        {"architecture": "llama", "draft_vocab_size": None},
        {"architecture": "mla", "draft_vocab_size": 100},
    ],
)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float32])
def test_other_peoples_drafters_change_nothing_either(kind: dict[str, Any], kv_dtype: torch.dtype):
    """Drafters with Llama's layers and with a reduced vocabulary of every fifth token: prompts in chunks, across page
    boundaries, drawn and greedy jobs in one batch.
    """
    torch.manual_seed(1)
    drafter = Eagle3(Eagle3Config.for_target(tiny_model().config, **kind))
    if kind["draft_vocab_size"] is not None:
        drafter.keep(torch.arange(0, 500, 5))
    drafter.prepare(tiny_model())
    greedy = [job(f"{n}", prompt(n, 50 + 30 * n), max_tokens=70) for n in range(3)]
    drawn = job("drawn", prompt(9, 60), max_tokens=70, temperature=2.0, seed=2)
    engine = open_engine(tiny_model(), drafter=drafter, speculation=LEARNED, kv_dtype=kv_dtype, step_tokens=90, pages=9)
    answers = answers_of(engine, [*greedy, drawn], [job("again", prompt(1, 80), max_tokens=70)], every=30)
    assert answers["drawn"].accepted > 0
    assert len(answers["drawn"].tokens) == 70
    assert answers["again"].tokens == answers["1"].tokens
    for asked in greedy:
        assert answers[asked.id].tokens == run_alone(tiny_model(), asked, kv_dtype=kv_dtype).tokens


@pytest.mark.parametrize("suffix", [False, True])
def test_every_kind_of_end_is_the_same(suffix: bool):
    """At max_tokens 0 and 1, at the maximum context length, below and at min_tokens: tokens, finish reason and log
    probabilities.
    """
    words = (5, 6, 7, 8) * 12
    asked = [
        job("nothing", words[:30], max_tokens=0, prompt_logprobs=2),
        job("one", words, max_tokens=1, prompt_logprobs=2),
        job("two", words, max_tokens=2),
        job("longest", prompt(2, 120), max_tokens=500),
        job("full", prompt(3, 127), max_tokens=500),
        job("least", prompt(4, 40), max_tokens=60, min_tokens=25, stop_ids=tuple(range(0, VOCABULARY, 2))),
        job(
            "punished", words, max_tokens=50, frequency_penalty=0.6, repetition_penalty=1.2, min_tokens=9, stop_ids=(3,)
        ),
    ]
    sizes = {"max_model_len": 128, "step_tokens": 50}
    speculation = Learned(drafter="tiny", tokens=5, adaptive=False, suffix=suffix)
    engine = open_engine(tiny_model(), speculation=speculation, **sizes)
    answers = answers_of(engine, asked)
    for one in asked:
        alone = run_alone(tiny_model(), one, **sizes)
        assert answers[one.id]._replace(proposed=0, accepted=0) == alone, one.id
    assert (len(answers["longest"].tokens), len(answers["full"].tokens)) == (8, 1)
    assert len(answers["least"].tokens) >= 25


def test_a_drafter_that_may_draft_nothing_reads_nothing():
    engine = open_engine(tiny_model(), speculation=Learned(drafter="tiny", tokens=0))
    passes: list[object] = []
    engine.runner.drafting.follow = lambda *spans: passes.append(spans)
    asked = job("asked", prompt(1, 70), max_tokens=5)
    assert answers_of(engine, [asked])["asked"] == run_alone(tiny_model(), asked)
    assert not passes


def test_a_followed_row_is_answered_with_as_many_drafts_as_it_asks_for():
    runner = open_engine(tiny_model(), speculation=Learned(drafter="tiny", suffix=False)).runner
    try:
        begin = Begin(slot=0, tokens=prompt(1, 20), prompt=20, pages=(), sampling=Sampling(max_tokens=4), limit=64)
        row = Row(slot=0, start=0, count=20, new_pages=(PageId(3),), drafting=True)
        runner.run(Step(number=1, begins=(begin,), rows=(row,)))
        assert not runner.slots.at[0].proposal.tokens
        runner.run(Step(number=2, rows=(Row(slot=0, start=None, count=1, drafting=True, propose=2),)))
        assert len(runner.slots.at[0].proposal.tokens) == 2
    finally:
        runner.close()
