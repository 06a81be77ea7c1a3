"""Law 5: where an answer is computed does not matter.

An answer begun by one worker and continued by another equals the answer of a single worker: greedy and seeded to the
token, and on a CPU its log probabilities to the bit.
"""

import functools
import itertools
from typing import Any

import msgspec
import pytest
from torch import Tensor

from redline.messages.job import PAGE_TOKENS, Job, JobId
from redline.run.runner import Runner
from redline.scheduler.active import Computed
from redline.worker.config import DraftConfig
from redline.worker.engine import EngineCore
from redline.worker.parcel_memory import HostParcels
from tests import tiers
from tests.handoff import Pair
from tests.laws.test_law_4_drafts_change_nothing import SAMPLINGS, plain
from tests.run.drafting.test_drafting import FEW, few_words
from tests.tiny_model import (
    BLOCK,
    BOTH,
    LEARNED,
    Answer,
    drafter_rows,
    job,
    open_engine,
    prompt,
    run,
    run_alone,
    tiny_model,
)


def moved(asked: Job, whole: Answer, given: int) -> Job:
    """The job that a gateway sends to the next worker after `given` tokens of the answer."""
    scored = len(whole.prompt_logprobs) if given else 0
    return msgspec.structs.replace(asked, answer=whole.tokens[:given], scored=scored)


def rest(whole: Answer, given: int) -> Answer:
    scored = () if given else whole.prompt_logprobs
    return whole._replace(tokens=whole.tokens[given:], logprobs=whole.logprobs[given:], prompt_logprobs=scored)


@pytest.mark.parametrize("speculation", [None, BOTH, BLOCK], ids=["plain", "drafter and suffix", "block"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_an_answer_goes_on_elsewhere(sampling: str, speculation: DraftConfig | None) -> None:
    asked = job("asked", prompt(seed=1, length=90), max_tokens=80, prompt_logprobs=1, **SAMPLINGS[sampling])
    whole = run_alone(tiny_model(), asked)
    for given in (1, 2, 38, 79):
        answer = run_alone(tiny_model(), moved(asked, whole, given), speculation=speculation)
        assert plain(answer) == plain(rest(whole, given)), given


@pytest.mark.parametrize("given", [0, 5, 40])
def test_it_may_begin_from_pages_that_are_cached_there(given: int) -> None:
    """Pages of its prompt, as a prefill computes them, but none that was filled by an answer."""
    asked = job("asked", prompt(seed=2, length=150), max_tokens=60)
    whole = run_alone(tiny_model(), asked)
    engine = open_engine(tiny_model(), speculation=BOTH)
    try:
        run(engine, [job("before", (*asked.tokens, *whole.tokens[:58]), max_tokens=40)])
        run(engine, [job("after", asked.tokens, max_tokens=60)])
        answer = run(engine, [moved(asked, whole, given)])["asked"]
    finally:
        engine.runner.close()
    assert answer.cached_tokens == 128
    assert plain(answer) == plain(rest(whole, given))


def test_many_come_at_once_and_are_pre_empted() -> None:
    engine = open_engine(tiny_model(), pages=9, max_model_len=400, step_tokens=90, speculation=BOTH)
    asked: list[Job] = []
    wholes: dict[str, Answer] = {}
    for n, sampling in enumerate((*SAMPLINGS.values(), *SAMPLINGS.values())):
        one: dict[str, Any] = {"max_tokens": 150 + 5 * n, **sampling}
        fresh = job(f"{n}", prompt(seed=n % 3, length=30 + 15 * n), **one)
        whole = wholes[fresh.id] = run_alone(tiny_model(), fresh)
        asked.append(moved(fresh, whole, min(9 * n, len(whole.tokens) - 1)))  # a stop token may end it early
    try:
        answers = run(engine, asked, every=2)
        assert engine.planner.load().preemptions > 0
    finally:
        engine.runner.close()
    for one in asked:
        assert answers[one.id].tokens == wholes[one.id].tokens[len(one.answer) :], one.id


def test_an_answer_that_is_complete_already_is_refused() -> None:
    asked = job("asked", prompt(seed=1, length=20), max_tokens=5)
    answer = run_alone(tiny_model(), msgspec.structs.replace(asked, answer=(1, 2, 3, 4, 5)))
    assert answer.finish == "error"
    assert "5 tokens of the answer were already generated" in str(answer.error)


# ---------------------------------------------------------------------------------------- prefill here, decode there


def pair(speculation: DraftConfig | None = None, **engine: Any) -> Pair:
    computes, answers = (open_engine(tiny_model(), speculation=speculation, **engine) for _ in range(2))
    return Pair(computes, answers)


@pytest.mark.parametrize("speculation", [None, BOTH, BLOCK], ids=["plain", "drafter and suffix", "block"])
@pytest.mark.parametrize("length", [65, 127, 128, 129, 300])
def test_a_prompt_is_computed_here_and_its_answer_there(length: int, speculation: DraftConfig | None) -> None:
    asked = [
        job(name, prompt(seed=length, length=length), max_tokens=40, prompt_logprobs=1, **how)
        for name, how in SAMPLINGS.items()
    ]
    both = pair(speculation, step_tokens=100)
    try:
        answers = both.run(asked)
        assert both.answers.exchange.counts == {"taken over": len(asked)}
        assert both.answers.engine.planner.load().prompt_tokens == 0, "the decode worker must not compute a prompt"
        assert both.computes.engine.planner.load().pages_used == both.answers.engine.planner.load().pages_used == 0
    finally:
        both.close()
    for one in asked:
        assert plain(answers[one.id]) == plain(run_alone(tiny_model(), one)), one.id


def test_layers_leave_while_the_next_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that a step has not computed yet hold other bytes, none of which may be transferred."""
    engines = [open_engine(tiny_model(), speculation=BOTH, step_tokens=100) for _ in range(2)]
    page_B = engines[0].runner.kv.planes[0, 0].numel() * engines[0].runner.kv.planes.element_size()
    monkeypatch.setattr(HostParcels, "sizes", HostParcels.sizes._replace(parcel=2 * page_B, area=9 * page_B))
    both = Pair(*engines, layered=True)
    asked = [
        job(name, prompt(seed=length, length=length), max_tokens=12, prompt_logprobs=1, **how)
        for (name, how), length in zip(SAMPLINGS.items(), itertools.cycle((300, 128, 230)))
    ]
    early = 0
    departs = both.computes.exchange.depart

    def counted(layers: int) -> None:
        nonlocal early
        departs(layers)
        early += any(out.leaving is not None for out in both.computes.exchange._outgoing.prompts.values())

    monkeypatch.setattr(both.computes.exchange, "depart", counted)
    try:
        answers = both.run(asked)
        assert both.answers.exchange.counts == {"taken over": len(asked)}
        assert early > len(asked), "layers must be sent before the step's end"
        assert all(side.engine.planner.load().pages_used == 0 for side in (both.computes, both.answers))
    finally:
        both.close()
    for one in asked:
        assert plain(answers[one.id]) == plain(run_alone(tiny_model(), one)), one.id


def test_pages_that_are_there_already_do_not_travel_and_those_that_came_are_cached() -> None:
    both = pair(BOTH)
    first = job("first", prompt(seed=1, length=200), max_tokens=30)
    longer = job("longer", (*first.tokens, *prompt(seed=2, length=150)), max_tokens=30)
    try:
        answers = both.run([first])
        handed = both.computes.exchange.counts["handed over"]
        answers = both.run([longer])
        again = both.run([msgspec.structs.replace(first, id=JobId("again"))])["again"]
        assert handed == 1
        assert (answers["longer"].cached_tokens, again.cached_tokens) == (192, 192)
        assert both.answers.exchange.counts == {"taken over": 2, "short": 1}, (
            "the decode worker must compute 8 positions"
        )
    finally:
        both.close()
    for one, answer in ((first, answers["first"]), (longer, answers["longer"]), (first, again)):
        assert plain(answer) == plain(run_alone(tiny_model(), one)), one.id


def test_the_drafter_accepts_as_much_behind_a_handoff_as_without() -> None:
    asked = [job(f"{n}", prompt(seed=n, length=60 + 40 * n), max_tokens=60) for n in range(4)]
    both = pair(BOTH)
    alone = open_engine(tiny_model(), speculation=BOTH)
    try:
        answers, expected = both.run(asked), run(alone, asked)
        places = [drafted(one) for one in (both.answers.engine, alone)]
    finally:
        both.close()
        alone.runner.close()
    assert sum(answer.accepted for answer in answers.values()) == sum(answer.accepted for answer in expected.values())
    assert places[0] == places[1]


def drafted(engine: EngineCore) -> bool:
    return engine.planner._speculation.follows


POISON = 7.0  # contents of unwritten drafter rows


def opened(monkeypatch: pytest.MonkeyPatch, *, recorded: bool, kind: str = "chain", **below: Any) -> EngineCore:
    """An engine with a drafter that is often right; its steps are captured as CUDA graphs like a GPU's, or eager."""
    monkeypatch.setattr("redline.worker.engine.Runner", functools.partial(Runner, captured=recorded))
    model, drafters = few_words()
    engine = open_engine(model, speculation=LEARNED, drafter=drafters[kind], step_tokens=100, **below)
    engine.runner.kv.draft.fill_(POISON)
    engine.runner.kv.tails.fill_(POISON)
    return engine


def few(seed: int, length: int) -> tuple[int, ...]:
    return tuple(token % FEW for token in prompt(seed, length))


def rows_of(engine: EngineCore, asked: Job, answer: Answer) -> Tensor:
    """The drafter's rows in the full pages of an ended answer, from position 1 on."""
    text, slots = [*asked.tokens, *answer.tokens], engine.runner.slots
    (number,) = [n for n in range(len(slots.at)) if slots.tokens[n, : len(text)].tolist() == text]
    return drafter_rows(engine, number, (len(text) - 1) // PAGE_TOKENS * PAGE_TOKENS).float()


def unwritten(engine: EngineCore) -> list[tuple[int, int]]:
    """(page, position) of unwritten rows in pages that the prefix cache marks as read by the drafter. The first
    position of a job's first page holds no row.
    """
    cache = engine.planner._pages.cache
    drafted = [node for node in cache._nodes.values() if node.drafted]
    assert drafted
    missing = [
        (node.page, place)
        for node in drafted
        for place in (engine.runner.kv.draft[node.page] == POISON).all(-1).nonzero().flatten().tolist()
    ]
    first = {node.page for node in drafted if node.previous is None}
    return [(page, place) for page, place in missing if page not in first or place]


@pytest.mark.parametrize("kind", ["chain", "block"])
@pytest.mark.parametrize("recorded", [False, True], ids=["led", "recorded"])
def test_the_drafter_misses_no_row_behind_a_handoff(recorded: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all positions of the prompt's end within its page. So answers that hit its pages accept the same number of
    drafts as elsewhere.
    """
    asked = [
        job(f"{length}", few(length, length), max_tokens=70, logprobs=None)
        for length in (100, 127, 128, 129, 191, 192, 193, 256, 320)
    ]
    both = Pair(*(opened(monkeypatch, recorded=recorded, kind=kind) for _ in range(2)))
    alone = opened(monkeypatch, recorded=recorded, kind=kind)
    try:
        both.run(asked)
        expected = run(alone, asked)
        assert both.answers.exchange.counts == {"taken over": len(asked)}
        here = both.answers.engine
        for one in asked:
            mine, theirs = (rows_of(engine, one, expected[one.id]) for engine in (here, alone))
            differ = (mine - theirs).abs().amax(-1) > 0.02
            assert not differ.any(), (one.id, 1 + differ.nonzero().flatten())
        assert not unwritten(here)
        again = [
            job(f"again {one.id}", (*one.tokens, *expected[one.id].tokens), max_tokens=20, logprobs=None)
            for one in asked
        ]
        hits, hits_alone = run(here, again), run(alone, again)
    finally:
        both.close()
        alone.runner.close()
    assert all(
        hit.cached_tokens >= len(one.tokens) // PAGE_TOKENS * PAGE_TOKENS
        for one, hit in zip(asked, hits.values(), strict=True)
    )
    accepted, accepted_alone = (sum(hit.accepted for hit in one.values()) for one in (hits, hits_alone))
    assert accepted == accepted_alone > 0


@pytest.mark.parametrize("lacks", ["drafting", "exact", None])
def test_what_a_handoff_says_of_its_pages_holds_for_every_parcel(
    lacks: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was pre-empted continues with other pages than those already sent."""
    both = Pair(*(opened(monkeypatch, recorded=False) for _ in range(2)))
    planner, left = both.computes.engine.planner, iter(range(4))
    computed = planner.transfers.computed

    def first_otherwise(id: JobId) -> Computed | None:
        now = computed(id)
        return now if now is None or lacks is None or next(left, None) is None else now._replace(**{lacks: False})

    monkeypatch.setattr(planner.transfers, "computed", first_otherwise)
    asked = job("asked", few(1, 320), max_tokens=20, logprobs=None)
    try:
        both.run([asked])
        assert both.answers.exchange.counts == {"taken over": 1}
        nodes = both.answers.engine.planner._pages.cache._nodes.values()
        assert len(nodes) == 5
        for of in ("drafting", "exact"):
            assert {node.drafted if of == "drafting" else node.exact for node in nodes} == {of != lacks}
    finally:
        both.close()


@pytest.mark.parametrize("recorded", [False, True], ids=["led", "recorded"])
def test_the_drafter_misses_no_row_in_pages_that_come_back_from_host_memory(
    recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [job(f"{length}", few(length, length), max_tokens=70, logprobs=None) for length in (127, 128, 129, 256)]
    both = Pair(opened(monkeypatch, recorded=recorded), opened(monkeypatch, recorded=recorded, host_memory=64 << 20))
    try:
        answers, here = both.run(asked), both.answers.engine
        below = tiers.tiers_of(here)
        below.prefills.observed = lambda *_: None  # type: ignore[method-assign]  # always fetch all pages
        here.planner.forget_idle()
        below.store.flush(tiers.WAIT_S)
        here.runner.kv.draft.fill_(POISON)
        here.runner.kv.tails.fill_(POISON)
        again = [
            job(f"again {one.id}", (*one.tokens, *answers[one.id].tokens), max_tokens=20, logprobs=None)
            for one in asked
        ]
        tiers.run(here, again)
        assert tiers.tier(here, "host").hit_tokens >= sum(len(one.tokens) // PAGE_TOKENS * PAGE_TOKENS for one in asked)
        assert not unwritten(here)
    finally:
        both.close_exchanges()
        both.computes.engine.runner.close()
        tiers.close(both.answers.engine)


def test_many_at_once_with_few_pages_on_both_sides() -> None:
    engines = [
        open_engine(tiny_model(), pages=pages, max_model_len=400, step_tokens=90, speculation=BOTH) for pages in (9, 12)
    ]
    both = Pair(*engines, area_bytes=1 << 17)
    waves = [
        [
            job(f"{wave}.{n}", prompt(seed=n % 3, length=20 + 40 * n), max_tokens=60 + 15 * n, **sampling)
            for n, sampling in enumerate(SAMPLINGS.values())
        ]
        for wave in range(3)
    ]
    try:
        answers = both.run(*waves, every=9)
        assert both.answers.exchange.counts["taken over"] > 0
        assert all(side.engine.planner.load().pages_used == 0 for side in (both.computes, both.answers))
    finally:
        both.close()
    for one in itertools.chain(*waves):
        assert plain(answers[one.id]).tokens == run_alone(tiny_model(), one).tokens, one.id
