"""Block drafters in the engine: which positions their tokens are for, sampled and broken drafts, and the config."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor

from redline.errors import CheckpointError, ConfigError
from redline.kernels.cuda.step.step_rows import ASKED, BEFORE, LIMIT, SLOT
from redline.model.block.config import BlockConfig, BlockKind
from redline.model.block.module import BlockDrafter
from redline.model.block.serve import BlockRows, ServedBlock
from redline.policy.costs import RoundTimes, StepCosts
from redline.policy.draft_count import least_survival
from redline.run.graphs import decode_step
from redline.run.graphs.block_round import RoundRows
from redline.run.runner import Runner
from redline.scheduler.active import ActiveJob
from redline.scheduler.speculation import Speculation
from redline.worker.config import EngineConfig, Learned
from redline.worker.engine import with_drafts
from tests.tiny_model import BLOCK, CPU, Answer, job, open_engine, prompt, run, run_alone, tiny_model

TARGET = tiny_model().config


def config_of(kind: BlockKind, block_size: int = 5, **sizes: Any) -> BlockConfig:
    given = {"layer_ids": (1, 3), "mask_token_id": 5, "num_hidden_layers": 1, "markov_rank": 64, **sizes}
    return BlockConfig.for_target(TARGET, kind=kind, block_size=block_size, **given)


@pytest.fixture(params=[False, True], ids=["eager", "captured"])
def captured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether decode steps are captured, as on a GPU."""
    if request.param:
        monkeypatch.setattr("redline.worker.engine.Runner", functools.partial(Runner, captured=True))
    return request.param


def knows_the_answers(later: int, texts: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """`ServedBlock.states` and `logits` of a drafter whose drafts are all right. later: 1 if the anchor drafts."""

    def states(self: ServedBlock, blocks: BlockRows, plane: Tensor) -> Tensor:
        found = torch.zeros(len(blocks.anchors_R), 5, TARGET.hidden_size)
        for row, (anchor, length) in enumerate(zip(blocks.anchors_R.tolist(), blocks.starts_R.tolist(), strict=True)):
            for text in texts:  # rows that pad a captured step are of no text
                if 0 < length < len(text) - 5 - later and text[length] == anchor:
                    found[row, :, 0] = torch.tensor(text[length + later : length + later + 5])
        return found

    def logits(self: ServedBlock, normed: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(normed[:, 0].long(), TARGET.vocab_size).float()

    return states, logits


def answered(drafter: BlockDrafter, *jobs: Any, **config: Any) -> dict[str, Answer]:
    tokens = drafter.config.drafts
    speculation = msgspec.structs.replace(BLOCK, tokens=tokens)
    engine = open_engine(tiny_model(), drafter=drafter, speculation=speculation, **config)
    try:
        return run(engine, list(jobs))
    finally:
        engine.runner.close()


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_drafts_are_for_the_positions_after_the_anchor(
    kind: BlockKind, captured: bool, monkeypatch: pytest.MonkeyPatch
):
    """A drafter that knows the answer, by position: all its drafts are accepted.

    DFlash's position k gives the k-th token after the anchor, DSpark's the one after that; so a block of five has four
    drafts, or five."""
    jobs = [job(f"{n}", prompt(seed=n, length=61 + n), max_tokens=41) for n in range(2)]
    answers = {one.id: run_alone(tiny_model(), one) for one in jobs}
    texts = [(*one.tokens, *answers[one.id].tokens, *[0] * 16) for one in jobs]
    drafter = BlockDrafter(config_of(kind, markov_rank=0) if kind == "dflash" else config_of(kind))
    drafter.prepare(tiny_model())
    later = int(kind == "dspark")

    states, logits = knows_the_answers(later, texts)
    monkeypatch.setattr(ServedBlock, "states", states)
    monkeypatch.setattr(ServedBlock, "logits", logits)
    found = answered(drafter, *jobs)
    for one in jobs:
        answer = found[one.id]
        assert answer.tokens == answers[one.id].tokens
        assert (answer.proposed, answer.accepted) == (40 - math.ceil(40 / (5 + later)),) * 2


def test_the_bias_by_the_token_before_follows_the_drafted_tokens(captured: bool):
    """A bias that knows the answer's pairs of neighbours, and nothing else, drafts it until a token comes again."""
    asked = prompt(seed=4, length=30)
    whole = run_alone(tiny_model(), job("whole", asked, max_tokens=60)).tokens
    most = next(n for n in range(2, 60) if len({*whole[:n]}) < n)  # tokens up to the first that came before
    assert most > 13
    drafter = BlockDrafter(config_of("dspark", draft_vocab_size=TARGET.vocab_size))
    with torch.no_grad():
        drafter.lm_head.weight.zero_()
        drafter.markov_head.markov_w1.weight.zero_()
        drafter.markov_head.markov_w2.weight.zero_()
        for place, (token, after) in enumerate(itertools.pairwise(whole[:most])):
            drafter.markov_head.markov_w1.weight[token, place] = 1
            drafter.markov_head.markov_w2.weight[after, place] = 100
    drafter.prepare(tiny_model())
    answer = answered(drafter, job("asked", asked, max_tokens=most - 1))["asked"]
    assert answer.tokens == whole[: most - 1]
    assert answer.accepted == answer.proposed > 0


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_every_place_that_a_captured_block_stores_has_a_page(kind: BlockKind, monkeypatch: pytest.MonkeyPatch):
    """Answers that fill the context, and end in its last page, with accepted drafts in flight: the scheduler launches
    rows of jobs that have ended, whose lengths are at their limits."""
    lengths = [(60, 30), (59, 30), (57, 30), *((98 - n, 30 + n) for n in range(4))]
    jobs = [job(f"{n}", prompt(seed=n, length=length), max_tokens=most) for n, (length, most) in enumerate(lengths)]
    answers = {one.id: run_alone(tiny_model(), one) for one in jobs}
    drafter = BlockDrafter(config_of(kind, markov_rank=0) if kind == "dflash" else config_of(kind))
    drafter.prepare(tiny_model())
    texts = [(*one.tokens, *answers[one.id].tokens, *[0] * 16) for one in jobs]
    states, logits = knows_the_answers(int(kind == "dspark"), texts)
    monkeypatch.setattr(ServedBlock, "states", states)
    monkeypatch.setattr(ServedBlock, "logits", logits)
    monkeypatch.setattr("redline.worker.engine.Runner", functools.partial(Runner, captured=True))
    speculation = msgspec.structs.replace(BLOCK, tokens=drafter.config.drafts)
    engine = open_engine(tiny_model(), drafter=drafter, speculation=speculation, max_model_len=128)
    slots, rows = engine.runner.slots, decode_step.round_rows
    ended, used = 0, 0

    def watched(config: BlockConfig, plan_BC: Tensor, at: Any, results: Tensor, *rest: Any) -> RoundRows:
        nonlocal ended, used
        found = rows(config, plan_BC, at, results, *rest)
        for row in (plan_BC[:, ASKED] > 0).nonzero().flatten().tolist():
            number, count = int(plan_BC[row, SLOT]), int(found.blocks.counts_R[row])
            start, limit = int(found.blocks.starts_R[row]), int(at.facts[number, LIMIT])
            ended += int(results[row, BEFORE]) == limit
            used += count > 0
            assert start < limit
            assert start + count <= 64 * slots.at[number].pages or not count
        return found

    monkeypatch.setattr(decode_step, "round_rows", watched)
    try:
        for one in jobs:
            assert run(engine, [one])[one.id].tokens == answers[one.id].tokens
        together = run(engine, jobs)
    finally:
        engine.runner.close()
    assert all(together[one.id].tokens == answers[one.id].tokens for one in jobs)
    assert ended > 0
    assert used > 20


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_a_drafter_that_gives_no_numbers_costs_nobody_an_answer(
    broken: float, sampling: dict[str, Any], captured: bool
):
    drafter = BlockDrafter(config_of("dspark", draft_vocab_size=96))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.fill_(broken)
    drafter.prepare(tiny_model())
    jobs = [job(f"{n}", prompt(seed=n, length=40 + 20 * n), max_tokens=30, **sampling) for n in range(3)]
    for one in jobs:
        answer = answered(drafter, *jobs)[one.id]
        assert len(answer.tokens) == 30
        assert answer.proposed > 0
        if not sampling:
            assert answer.tokens == run_alone(tiny_model(), one).tokens


def test_drafts_of_a_reduced_vocabulary_are_tokens_of_it():
    drafter = BlockDrafter(config_of("dspark", draft_vocab_size=96))
    drafter.keep(torch.arange(100, 196))
    drafter.prepare(tiny_model())
    engine = open_engine(tiny_model(), drafter=drafter, speculation=msgspec.structs.replace(BLOCK, tokens=5))
    seen: set[int] = set()
    follow = engine.runner.drafting.follow

    def watched(*given: Any) -> None:
        follow(*given)
        for slot in engine.runner.slots.at:
            seen.update(slot.proposal.tokens)

    engine.runner.drafting.follow = watched  # type: ignore[method-assign]
    try:
        run(engine, [job("greedy", prompt(1, 20)), job("sampled", prompt(2, 20), temperature=1.0, seed=1)])
    finally:
        engine.runner.close()
    assert seen
    assert seen <= set(range(100, 196))


def test_captured_rounds_draft_what_eager_ones_do(monkeypatch: pytest.MonkeyPatch):
    """Blocks that a captured step cuts to the wanted drafts are whole, if all drafts are wanted."""
    drafter = BlockDrafter(config_of("dspark"))
    torch.nn.init.normal_(drafter.markov_head.markov_w2.weight)
    drafter.prepare(tiny_model())
    asked = job("asked", prompt(seed=3, length=50), max_tokens=60)
    eager = open_engine(tiny_model(), drafter=drafter, speculation=msgspec.structs.replace(BLOCK, tokens=5))
    follow, proposed = eager.runner.drafting.follow, list[list[int]]()

    def followed(*given: Any) -> None:
        follow(*given)
        proposed.append(list(eager.runner.slots.at[0].proposal.tokens))

    eager.runner.drafting.follow = followed  # type: ignore[method-assign]
    monkeypatch.setattr("redline.worker.engine.Runner", functools.partial(Runner, captured=True))
    captured = open_engine(tiny_model(), drafter=drafter, speculation=msgspec.structs.replace(BLOCK, tokens=5))
    for engine in (eager, captured):
        engine.runner.kv.draft.fill_(torch.nan)
    keep, kept = decode_step.keep_drafts, list[int]()

    def keeping(token_B: Tensor, *rest: Any) -> None:
        kept.append(int(token_B[0]))
        keep(token_B, *rest)

    monkeypatch.setattr(decode_step, "keep_drafts", keeping)
    for engine in (eager, captured):
        try:
            run(engine, [asked])
        finally:
            engine.runner.close()
    whole = [tokens for tokens in proposed if len(tokens) == 5]
    assert len(whole) > 10
    rounds = [kept[first : first + 5] for first in range(len(kept))]
    assert all(tokens in rounds for tokens in whole)


def test_blocks_over_fp8_pages():
    drafter = BlockDrafter(config_of("dspark"))
    drafter.prepare(tiny_model())
    asked = job("asked", prompt(seed=1, length=130), max_tokens=30)
    fp8 = {"kv_dtype": torch.float8_e4m3fn}
    assert answered(drafter, asked, **fp8)["asked"].tokens == run_alone(tiny_model(), asked, **fp8).tokens


# The config.


def engine_config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(speculation=Learned(drafter=str(folder), **options))


def test_without_a_number_a_whole_block_is_drafted(tmp_path: Path):
    BlockDrafter(config_of("dflash", block_size=8)).save(tmp_path)
    assert with_drafts(engine_config(tmp_path), CPU).draft_tokens == 7
    assert with_drafts(engine_config(tmp_path, tokens=2), CPU).draft_tokens == 2
    BlockDrafter(config_of("dspark", block_size=20)).save(tmp_path)
    assert with_drafts(engine_config(tmp_path), CPU).draft_tokens == 15


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        ("cpu", {"tokens": 8}, r"tokens is 8; a block of .* has 7 draft tokens: set it to 7 or less, or remove it"),
        ("cpu", {"head_bits": 8}, "head_bits is 8; a block drafter supports 16"),
    ],
)
def test_what_a_block_drafter_cannot_do_is_refused(device: str, options: Any, message: str, tmp_path: Path):
    BlockDrafter(config_of("dflash", block_size=8)).save(tmp_path)
    with pytest.raises(ConfigError, match=message):
        with_drafts(engine_config(tmp_path, **options), torch.device(device))


# Verification by confidence.


@pytest.mark.parametrize("head", [True, False], ids=["confidence head", "own probabilities"])
@pytest.mark.parametrize(("least", "proposed"), [(0.0, 5), (0.05, 4), (0.2, 2), (0.9, 1)])
def test_a_row_drafts_until_the_rest_does_not_pay(
    head: bool, least: float, proposed: int, monkeypatch: pytest.MonkeyPatch
):
    """Each draft is accepted with probability 1 / 2: the n-th with 2^-n. The first one is always verified."""
    sizes = {"draft_vocab_size": TARGET.vocab_size}
    drafter = BlockDrafter(config_of("dspark", **sizes) if head else config_of("dspark", markov_rank=0, **sizes))
    if not head:
        drafter.config = dataclasses.replace(drafter.config, confidence="")
        logits = torch.full((TARGET.vocab_size,), -1e9)
        logits[:2] = 0  # two tokens, each with a half
        monkeypatch.setattr(ServedBlock, "logits", lambda self, normed: logits.expand(len(normed), -1))
    else:
        with torch.no_grad():
            drafter.confidence_head.proj.weight.zero_()
            drafter.confidence_head.proj.bias.zero_()
    drafter.prepare(tiny_model())
    engine = open_engine(tiny_model(), drafter=drafter, speculation=msgspec.structs.replace(BLOCK, tokens=5))
    monkeypatch.setattr(type(engine.planner._speculation), "least", least)
    counts: list[int] = []
    follow = engine.runner.drafting.follow

    def watched(spans: Sequence[Any], *given: Any) -> None:
        follow(spans, *given)
        counts.extend(len(engine.runner.slots.at[span.slot].proposal.tokens) for span in spans if span.row.propose == 5)

    engine.runner.drafting.follow = watched  # type: ignore[method-assign]
    asked = job("asked", prompt(1, 20), max_tokens=20)
    try:
        answer = run(engine, [asked])["asked"]
    finally:
        engine.runner.close()
    assert set(counts) == {proposed}
    assert answer.tokens == run_alone(tiny_model(), asked).tokens


def test_the_least_probability_is_the_time_of_a_position_over_that_of_a_token():
    """Steps of one row: 10 ms and 2 ms for each further position; drafting takes 1 ms. A round of 3 drafts that gives 3
    tokens takes 17 ms, so a token takes 5.67 ms."""
    grid = ((10.0, 12.0, 24.0),)
    times = RoundTimes(StepCosts((1,), (1, 2, 8), grid, (1.0,), draft_once=True))
    assert times.ms(1, 3, 1) == pytest.approx(17.0)
    assert least_survival(1, 3, 3.0, 1, times) == pytest.approx(2 / (17 / 3))
    assert least_survival(1, 7, 3.0, 1, times) == pytest.approx(2 / (25 / 3)), "at the end of the grid"
    for _ in range(100):  # rounds that verify fewer drafts than they may are faster: that is no reason to verify fewer
        times.observed(1, 3, 1, 1, 8.0)
    assert least_survival(1, 3, 3.0, 1, times) == pytest.approx(2 / (17 / 3))
    padded = RoundTimes(StepCosts((1,), (1, 2, 8), grid, (1.0,), padded=True, draft_once=True))
    assert least_survival(1, 3, 3.0, 1, padded) == 0.0
    assert least_survival(1, 3, 3.0, 1, RoundTimes(StepCosts())) == 0.0


@pytest.mark.parametrize("once", [True, False], ids=["block", "chain"])
def test_the_scheduler_bounds_the_drafts_of_blocks_alone(once: bool):
    costs = StepCosts((1,), (1, 2, 8), ((10.0, 12.0, 24.0),), (1.0,), draft_once=once)
    speculation = Speculation(5, learned=True, costs=costs)
    assert speculation.least == 0.0
    speculation.lengths([cast("ActiveJob", SimpleNamespace(room=100, drafting=True))])
    assert (0 < speculation.least < 0.5) if once else speculation.least == 0.0


def test_a_gpu_refuses_layers_that_slide(tmp_path: Path):
    sizes = {"intermediate_size": 64, "head_dim": 32, "num_attention_heads": 4}
    BlockDrafter(config_of("dflash", block_size=8, **sizes)).save(tmp_path)
    assert with_drafts(engine_config(tmp_path), torch.device("cuda")).draft_tokens == 7
    values = json.loads((tmp_path / "config.json").read_text())
    slides = {"layer_types": ["sliding_attention"], "use_sliding_window": True, "sliding_window": 64}
    (tmp_path / "config.json").write_text(json.dumps(values | slides))
    with pytest.raises(
        CheckpointError, match=r"sliding_window is \(64,\); the GPU's kernels take layers without a window"
    ):
        with_drafts(engine_config(tmp_path), torch.device("cuda"))


def test_synthetic_acceptance_needs_the_number_of_drafts(tmp_path: Path):
    BlockDrafter(config_of("dflash", block_size=8)).save(tmp_path)
    with pytest.raises(ConfigError, match="tokens is missing: with a block drafter, synthetic_acceptance needs it"):
        with_drafts(engine_config(tmp_path, synthetic_acceptance=2.0), CPU)
