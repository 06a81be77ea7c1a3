"""Sweeps over servers that behave according to a formula."""

import msgspec
import pytest

from redline.bench.serving import sweep
from redline.bench.serving.saved import BenchResult
from redline.bench.serving.sections import Plot, Table
from redline.bench.serving.sweep import Point, SweepPlan, next_load, point
from tests.bench.serving.hand_made import answer, run, steady


def made(load: float, throughput: float, e2el: float, kept: float | None = None, **others: float) -> Point:
    """A point; each stream gets its share of the throughput."""
    fields = {
        "interactivity": throughput / load,
        "interactivity_e2e_p90": throughput / load,
        "ttft_p50": 0.1,
        "ttft_p99": 0.2,
        "tpot_p50": load / throughput,
        "tpot_p99": load / throughput,
        "e2el_p99": e2el,
        "cpu_share": 0.1,
        "lag_p99": 0.0,
        **others,
    }
    return Point(
        load=load,
        by="streams",
        seconds=10.0,
        completed=10,
        failed=0,
        output_throughput=throughput,
        input_throughput=0.0,
        request_throughput=1.0,
        e2el_p50=e2el,
        kept=kept,
        goodput=None if kept is None else kept,
        **fields,  # type: ignore[arg-type]
    )


def server(load: float, limit: float = 8.0) -> Point:
    """100 tokens/s a stream up to a limit; beyond it throughput is constant, and every stream waits longer."""
    throughput = 100.0 * min(load, limit)
    share = 1.0 if load <= 6 else 0.5
    return made(load, throughput, 1.0 if load <= limit else load / limit, share)


def test_the_figures_of_a_point():
    """Two answers of 11 tokens, 10 and 20 tokens/s after their first; one that failed."""
    of = point(
        2, "streams", run(steady(1.0, 0.1, 11), steady(1.0, 0.05, 11, index=1), answer(index=2, failure="http")),
        {"ttft": 1500, "tpot": 60},
    )  # fmt: skip
    assert (of.completed, of.failed) == (2, 1)
    assert of.output_throughput == pytest.approx(2.2)
    assert of.tpot_p50 == pytest.approx(0.075)
    assert of.interactivity == pytest.approx(1 / 0.075)
    whole = (2.0 / 11, 1.5 / 11)
    assert of.interactivity_e2e_p90 == pytest.approx(1 / (whole[1] + 0.9 * (whole[0] - whole[1])))
    assert of.kept == pytest.approx(1 / 3)  # the first misses the TPOT target, the last failed
    assert of.goodput == pytest.approx(0.1)
    assert [row.error for row in of.rows] == ["", "", "it http"]
    assert of.name == "2 streams"


def test_a_rates_latency_counts_from_the_schedule():
    late = msgspec.structs.replace(steady(1.0, 0.1, 11, sent=4.0), planned=1.0)
    assert point(3, "requests/s", run(late), {}).ttft_p50 == pytest.approx(4.0)
    assert point(3, "streams", run(late), {}).ttft_p50 == pytest.approx(1.0)


def test_a_point_without_an_answer_has_no_figures():
    of = point(1, "streams", run(answer(failure="refused")), {"ttft": 100})
    assert (of.ttft_p50, of.interactivity, of.kept) == (None, None, 0.0)


def test_the_frontier_has_no_point_that_another_beats():
    points = [made(1, 100, 1), made(2, 180, 1), made(4, 150, 2), made(8, 400, 2), made(16, 400, 4)]
    assert [one.load for one in sweep.frontier(points)] == [1, 2, 8]


def test_a_sweep_stops_where_load_only_costs():
    plan = SweepPlan(by="streams", loads=tuple(sweep.doubling(256)))
    points: list[Point] = []
    assert sweep.sweep(plan, points, server, lambda: None)
    # one point without gain may be chance, the second is not
    assert [one.load for one in points] == [1, 2, 4, 8, 16, 32]
    assert "Not measured: 64, 128, 256" in " ".join(sweep.verdict(plan, points))


def test_one_point_that_falls_far_is_enough():
    assert sweep.saturated([made(1, 100, 1), made(2, 60, 3)])
    # latency did not rise, so the fall has another reason
    assert not sweep.saturated([made(1, 100, 1), made(2, 60, 1)])
    assert not sweep.saturated([made(1, 100, 1), made(2, 101, 2)])


def test_to_the_end_measures_every_load():
    plan = SweepPlan(by="streams", loads=(1.0, 16.0, 32.0, 64.0, 128.0), to_the_end=True)
    points: list[Point] = []
    sweep.sweep(plan, points, server, lambda: None)
    assert len(points) == 5


def test_a_search_halves_the_gap_around_the_slos_point():
    plan = SweepPlan(by="streams", loads=(1.0, 4.0, 16.0), slos={"ttft": 100.0}, search=True)
    points: list[Point] = []
    sweep.sweep(plan, points, server, lambda: None)
    assert [one.load for one in points] == [1, 4, 16, 10, 7, 5, 6]
    good, bad = sweep.around_slo(points, plan.attainment)
    assert good is not None
    assert bad is not None
    assert (good.load, bad.load) == (6, 7)


def test_a_search_over_rates_ends_close_to_the_point():
    plan = SweepPlan(by="requests/s", loads=(1.0, 4.0, 16.0), slos={"ttft": 100.0}, search=True)
    points: list[Point] = []
    sweep.sweep(plan, points, lambda load: msgspec.structs.replace(server(load), by="requests/s"), lambda: None)
    good, bad = sweep.around_slo(points, plan.attainment)
    assert good is not None
    assert bad is not None
    assert good.load <= 6 < bad.load <= good.load * sweep.CLOSE


def test_where_the_lowest_load_breaks_the_slos_the_search_goes_below_it():
    plan = SweepPlan(by="streams", loads=(8.0, 16.0), slos={"ttft": 100.0}, search=True)
    points: list[Point] = []
    sweep.sweep(plan, points, server, lambda: None)
    assert [one.load for one in points] == [8, 16, 4, 6, 7]
    nothing = SweepPlan(by="streams", loads=(8.0,), slos={"ttft": 100.0})
    assert "no measured load meets them: at 8 streams 50.0%" in " ".join(sweep.verdict(nothing, [server(8)]))


def test_a_search_for_what_is_not_there_ends():
    plan = SweepPlan(by="requests/s", loads=(4.0,), slos={"ttft": 100.0}, search=True)
    points: list[Point] = []
    sweep.sweep(plan, points, lambda load: made(load, 100 * load, 1.0, 0.0), lambda: None)
    assert [one.load for one in points] == [4, 2, 1, 0.5]


def test_what_was_measured_is_not_measured_again():
    plan = SweepPlan(by="streams", loads=(1.0, 2.0, 4.0))
    points, asked, saved = [server(1), server(2)], list[float](), list[int]()

    def measure(load: float) -> Point:
        asked.append(load)
        return server(load)

    assert sweep.sweep(plan, points, measure, lambda: saved.append(len(points)))
    assert (asked, saved) == ([4], [3])
    assert next_load(plan, points) is None


def test_ctrl_c_keeps_the_points_before_it():
    plan = SweepPlan(by="streams", loads=(1.0, 2.0, 4.0))
    points: list[Point] = []
    assert not sweep.sweep(plan, points, lambda load: server(load) if load < 2 else None, lambda: None)
    assert [one.load for one in points] == [1]


def test_the_verdict_names_the_slos_point_and_where_a_line_crosses():
    plan = SweepPlan(by="streams", loads=(4.0, 8.0), slos={"ttft": 100.0}, attainment=0.9)
    said = " ".join(sweep.verdict(plan, [server(4), server(8)], gpus=2))
    assert "800 output tokens/s" in said
    assert "(400 per GPU)" in said
    assert "met up to 4 streams" in said
    assert "8 streams violates them (50.0% met them)" in said
    assert sweep.crossing(server(4), server(8), 0.9) == pytest.approx(4.8)


def test_a_busy_load_generator_is_said():
    plan = SweepPlan(by="streams", loads=(1.0,))
    assert "was the limit at 1 stream" in " ".join(sweep.verdict(plan, [made(1, 100, 1, cpu_share=0.97)]))


def test_a_page_is_made_of_what_a_file_holds():
    plan = SweepPlan(by="streams", loads=(1.0, 4.0, 8.0, 16.0), slos={"ttft": 100.0})
    points = [made(1, 100, 1, 1.0), made(4, 360, 1, 1.0), made(8, 640, 1, 0.5), made(16, 600, 2, 0.5)]
    details = msgspec.json.decode(msgspec.json.encode({"plan": plan, "points": points, "gpus": 2}))
    sections = sweep.sweep_sections(BenchResult(kind="sweep", figures={}, details=details))
    plots = [section for section in sections if isinstance(section, Plot)]
    assert plots[0].series[0].y == (50, 180, 320)  # a GPU, from the fastest user's: 1, 4 and 8 streams
    assert plots[0].marks[0].y == 180
    table = next(section for section in sections if isinstance(section, Table))
    assert [row[:3] for row in table.rows] == [
        ("*", "1", "100"), ("*", "4", "360"), ("*", "8", "640"), ("", "16", "600"),
    ]  # fmt: skip
    assert sweep.text_plot(plan, points)[1].endswith("<- SLOs")


def test_doubling_ends_where_it_is_told():
    assert sweep.doubling(6) == [1, 2, 4, 6]
    assert sweep.doubling(1) == [1]


def test_a_point_whose_tokens_nobody_counted_is_told():
    bare = msgspec.structs.replace(steady(1.0, 0.1, 11), usage=None)
    of = point(1, "streams", run(bare), {})
    assert of.uncounted == 1
    assert any(
        "1 answers have no token count" in text for text in sweep.verdict(SweepPlan(by="streams", loads=(1,)), [of])
    )
    known = point(1, "streams", run(steady(1.0, 0.1, 11)), {})
    assert not any("no count" in text for text in sweep.verdict(SweepPlan(by="streams", loads=(1,)), [known]))
