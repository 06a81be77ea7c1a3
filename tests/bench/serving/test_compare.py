"""Comparison of servers with a known ratio, noise and drift."""

import math
import random
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from redline.bench.serving import compare
from redline.bench.serving.compare import ComparePlan, LoadFigures, Same, Side, enough, log_ratios, outcomes
from redline.bench.serving.records import LoadRequest, LoadRun, TimedAnswer, Usage
from redline.bench.serving.saved import BenchResult
from redline.bench.serving.sections import Plot, Table, Words
from redline.bench.serving.target import LoadPace, ServerTarget
from tests.bench.serving.answers import answer, run


def load(side: Side, seconds: float) -> LoadFigures:
    return LoadFigures(side=side, figures={"ttft": seconds}, completed=4, failed=0, output_tokens=40, events=40)


def blocks(
    many: int, draw: np.random.Generator, ratio: float = 1.0, noise: float = 0.05, drift: float = 0.0
) -> list[list[LoadFigures]]:
    """Loads in the order of a run, each with its own noise, all with a steady drift."""
    found: list[list[LoadFigures]] = []
    for block in range(many):
        order: str = "ABBA" if draw.random() < 0.5 else "BAAB"
        times = [
            0.1 * math.exp(drift * (4 * block + at) + draw.normal(0, noise)) * (ratio if side == "B" else 1.0)
            for at, side in enumerate(order)
        ]
        found.append([load("A" if side == "A" else "B", time) for side, time in zip(order, times, strict=True)])
    return found


@pytest.mark.parametrize(("many", "drift"), [(4, 0.0), (8, 0.03), (24, -0.01)])
def test_the_interval_holds_the_true_ratio_in_about_95_of_100_runs(many: int, drift: float):
    draw = np.random.default_rng(many)
    held = 0
    for seed in range(300):
        (found,) = outcomes(blocks(many, draw, 1.12, drift=drift), seed)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 1.12 <= found.high
    assert 0.92 <= held / 300 <= 0.98


def test_a_server_against_itself_shows_no_difference():
    draw = np.random.default_rng(1)
    verdicts = [outcomes(blocks(8, draw, noise=0.1, drift=0.02), seed)[0].verdict for seed in range(300)]
    assert sum(verdict.startswith("no significant difference") for verdict in verdicts) / 300 >= 0.93


def test_stopping_when_the_interval_is_narrow_does_not_make_it_a_lie():
    draw = np.random.default_rng(2)
    plan = ComparePlan(blocks=5, until=0.03, most=30, figure="ttft")
    held, lengths = 0, set[int]()
    for _ in range(300):
        whole = blocks(plan.most, draw, 1.12, noise=0.06)
        many = next(many for many in range(1, plan.most + 1) if enough(plan, whole[:many]))
        (found,) = outcomes(whole[:many])
        held += (found.low or 0.0) <= 1.12 <= (found.high or 0.0)
        lengths.add(many)
    assert held / 300 >= 0.91
    assert 5 <= min(lengths) < max(lengths)


def test_a_steady_drift_cancels():
    without_noise = blocks(5, np.random.default_rng(0), 0.8, noise=0.0, drift=0.1)
    assert log_ratios(without_noise, "ttft") == pytest.approx([math.log(0.8)] * 5)


@pytest.mark.parametrize(
    ("ratio", "name", "said"),
    [
        (0.8, "ttft", "B is faster by 20.0% ("),
        (1.25, "ttft", "A is faster by 20.0% ("),
        (1.25, "output_throughput", "B is faster by 25.0% ("),
        (0.8, "output_throughput", "A is faster by 25.0% ("),
    ],
)
def test_who_is_faster_and_by_how_much(ratio: float, name: str, said: str):
    found = blocks(6, np.random.default_rng(0), ratio, noise=1e-5)
    renamed = [[msgspec.structs.replace(one, figures={name: one.figures["ttft"]}) for one in block] for block in found]
    (outcome,) = outcomes(renamed)
    assert outcome.verdict.startswith(said)
    assert outcome.ratio == pytest.approx(ratio, rel=1e-3)


def test_too_few_blocks_are_said_to_be():
    assert outcomes(blocks(2, np.random.default_rng(0)))[0].verdict == "too few blocks (2, at least 3 are needed)"


def test_gaps_between_events_of_unlike_size_are_not_compared():
    def with_events(one: LoadFigures) -> LoadFigures:
        figures = {"itl_p50": one.figures["ttft"], "tpot": one.figures["ttft"]}
        return msgspec.structs.replace(one, figures=figures, events=40 if one.side == "A" else 16)

    made = [[with_events(one) for one in block] for block in blocks(5, np.random.default_rng(0), 3.0)]
    tpot, itl = outcomes(made)
    assert itl.verdict == "not comparable: A sends 1.00 tokens per event, B 2.50; see TPOT"
    assert tpot.verdict.startswith("A is faster")


# ------------------------------------------------------------------------------------------------- blocks of loads


class Servers:
    """Two servers that answer at once; B's tokens come in half the time."""

    def __init__(
        self, text: Callable[[Side, LoadRequest], str] = lambda side, ask: ask.text or "", stop_at: int = -1
    ) -> None:
        self.asked: list[tuple[Side, tuple[str, ...]]] = []
        self._text, self._stop_at = text, stop_at
        self._draw = random.Random(0)

    def put(self, side: Side, asks: Sequence[LoadRequest]) -> LoadRun:
        self.asked.append((side, tuple(ask.text or "" for ask in asks)))
        gap = (0.01 if side == "B" else 0.02) * self._draw.uniform(0.99, 1.01)
        answers = [self._answer(side, at, ask, gap) for at, ask in enumerate(asks)]
        return run(*answers, seconds=5 * gap, stopped=len(self.asked) == self._stop_at)

    def _answer(self, side: Side, at: int, ask: LoadRequest, gap: float) -> TimedAnswer:
        text = self._text(side, ask)
        usage = Usage(prompt_tokens=3, completion_tokens=len(text))
        made = answer(at, at=tuple(gap * (1 + place) for place in range(len(text))), text=text, usage=usage)
        return msgspec.structs.replace(made, ask=ask)


def asks(pair: int) -> list[LoadRequest]:
    return [LoadRequest(max_tokens=8, text=f"p{pair}.{at}") for at in range(3)]


def compared(servers: Servers, plan: ComparePlan) -> compare.Compared:
    return compare.compare(plan, servers.put, asks, lambda blocks: None)


def test_blocks_alternate_with_the_same_requests_for_both():
    servers = Servers()
    found = compared(servers, ComparePlan(blocks=12))
    orders = ["".join(side for side, _ in servers.asked[at : at + 4]) for at in range(0, 48, 4)]
    assert set(orders) == {"ABBA", "BAAB"}
    halves = [(servers.asked[at][1], servers.asked[at + 1][1]) for at in range(0, 48, 2)]
    assert all(one == other for one, other in halves)
    assert len({one for one, _ in halves}) == 24
    assert [len(block) for block in found.blocks] == [4] * 12
    assert [one.index for one in found.answers] == list(range(12 * 4 * 3))
    by = {one.name: one for one in outcomes(found.blocks)}
    assert by["ttft"].ratio == pytest.approx(0.5, rel=0.02)
    assert by["output_throughput"].ratio == pytest.approx(2.0, rel=0.02)
    assert by["tpot"].verdict.startswith("B is faster by ")


def test_another_seed_draws_another_order():
    orders = set[str]()
    for seed in range(4):
        servers = Servers()
        compared(servers, ComparePlan(blocks=6, seed=seed))
        orders.add("".join(side for side, _ in servers.asked))
    assert len(orders) > 1


def test_blocks_are_added_until_the_interval_is_narrow():
    wide, tight = Servers(), Servers()
    assert len(compared(wide, ComparePlan(blocks=3, until=0.5, most=20)).blocks) == 3
    most = len(compared(tight, ComparePlan(blocks=3, until=0.0001, most=7)).blocks)
    assert most == 7


def test_a_block_that_was_stopped_is_not_counted():
    found = compared(Servers(stop_at=7), ComparePlan(blocks=3))
    assert found.stopped
    assert len(found.blocks) == 1
    assert len(found.answers) == 12
    assert found.same.pairs == 6


def test_answers_that_differ_are_counted_and_the_first_is_shown():
    servers = Servers(lambda side, ask: "ab1d" if side == "B" and ask.text == "p1.2" else "abcd")
    same = compared(servers, ComparePlan(blocks=2)).same
    assert (same.pairs, same.equal, same.equal_counts) == (12, 11, 12)
    assert same.first == "pair 6 differs from character 3: A has 'abcd', B has 'ab1d'"


def sections(servers: Servers, plan: ComparePlan | None = None, **more: object) -> list[object]:
    plan = plan or ComparePlan(blocks=4)
    found = compared(servers, plan)
    details = {"plan": plan, "blocks": found.blocks, "same": found.same, "servers": {"A": "one", "B": "other"}, **more}
    figures = compare.figures_of(found.blocks, found.same, 0)
    result = BenchResult(kind="compare", figures=figures, details=msgspec.to_builtins(details), answers=found.answers)
    return list(compare.compare_sections(result))


def test_a_server_that_answers_shorter_is_not_called_faster_without_a_word():
    shown = sections(Servers(lambda side, ask: "ab" if side == "B" else "abcd"), greedy=True)
    warnings = [one.text for one in shown if isinstance(one, Words) and one.warning]
    assert any("Answers of B are shorter, which favours it in E2EL" in text for text in warnings)
    assert any("0 of 24 answers have the same text" in text and "B has ended" not in text for text in warnings)


def test_the_table_has_every_figure_and_the_plots_every_load():
    shown = sections(Servers(), ComparePlan(blocks=4, until=0.0001, most=5), greedy=True)
    (table,) = [one for one in shown if isinstance(one, Table)]
    assert [row[0] for row in table.rows] == [figure.words for figure in compare.FIGURES.values()]
    assert table.note.endswith("output tokens/s: not reached.")
    assert not [one for one in shown if isinstance(one, Words) and one.warning]
    ratios, loads = [one for one in shown if isinstance(one, Plot)]
    assert len(ratios.series[0].x) == len(table.rows)
    assert [len(one.x) for one in loads.series] == [10, 10]


def test_with_a_rate_latencies_count_from_the_schedule():
    late = run(answer(planned=1.0, sent=1.5), answer(1, planned=2.0, sent=2.5))
    sent, planned = (compare.measured("A", late, scheduled=scheduled).figures for scheduled in (False, True))
    for name in ("ttft", "answer_ttft", "e2el"):
        assert planned[name] - sent[name] == pytest.approx(0.5)
    assert planned["tpot"] == sent["tpot"]


def test_a_load_generator_that_was_the_limit_in_one_load_is_named():
    busy = Servers()

    def put(side: Side, requests: Sequence[LoadRequest]) -> LoadRun:
        found = busy.put(side, requests)
        share = 0.99 if len(busy.asked) == 5 else 0.1
        return msgspec.structs.replace(found, generator=msgspec.structs.replace(found.generator, cpu_share=share))

    found = compare.compare(ComparePlan(blocks=3), put, asks, lambda blocks: None)
    assert found.generator is not None
    assert found.generator.cpu_share == 0.99


def test_a_failed_request_is_named_and_a_load_without_answers_has_no_figures():
    def put(side: Side, requests: Sequence[LoadRequest]) -> LoadRun:
        if side == "A":
            return Servers().put(side, requests)
        refused = [
            TimedAnswer(index=at, ask=ask, planned=0.0, failure="refused", error="no connection")
            for at, ask in enumerate(requests)
        ]
        return run(*refused)  # fmt: skip

    found = compare.compare(ComparePlan(blocks=3), put, asks, lambda blocks: None)
    assert outcomes(found.blocks) == []
    assert found.same == Same()
    details = {
        "plan": ComparePlan(blocks=3),
        "blocks": found.blocks,
        "same": found.same,
        "servers": {"A": "a", "B": "b"},
    }
    figures = compare.figures_of(found.blocks, found.same, 0)
    result = BenchResult(kind="compare", figures=figures, details=msgspec.to_builtins(details), answers=found.answers)
    said = [one.text for one in compare.compare_sections(result) if isinstance(one, Words) and one.warning]
    assert any("18 of B" in text and "no connection" in text for text in said)


def test_a_server_is_described_with_its_load():
    target = ServerTarget(base_url="http://a", model="m")
    assert compare.describe(target, LoadPace(max_concurrency=4)) == "m at http://a (openai-chat), 4 streams"
    assert compare.describe(target, LoadPace(rate=2.5)) == "m at http://a (openai-chat), 2.5 requests/s"


class Letters:
    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))


def test_answers_without_a_count_are_counted_by_their_text_or_warned_of():
    bare = [answer(at, at=(0.1, 0.2), text="abcdef", usage=Usage()) for at in range(2)]
    put = {"A": run(answer(0), answer(1)), "B": run(*bare)}
    for counts, tokens, warned in ((None, 2 * 2, True), (Letters(), 2 * 6, False)):
        found = compare.compare(ComparePlan(blocks=1), lambda side, _: put[side], asks, lambda blocks: None, counts)
        assert {load.output_tokens for load in found.blocks[0] if load.side == "B"} == {tokens}
        details = {
            "plan": ComparePlan(blocks=1),
            "blocks": found.blocks,
            "same": found.same,
            "servers": {"A": "", "B": ""},
        }
        result = BenchResult(kind="compare", figures={}, details=msgspec.to_builtins(details))
        texts = [one.text for one in compare.compare_sections(result) if isinstance(one, Words) and one.warning]
        assert any("4 answers of B have no token count" in text for text in texts) == warned
        assert not any("of A have no token count" in text for text in texts)
