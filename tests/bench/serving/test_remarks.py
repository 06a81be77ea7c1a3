"""Remarks next to the figures: whether the load generator was the limit, and what latencies leave out."""

import math

import msgspec
import pytest

from redline.bench.serving.metrics import figures
from redline.bench.serving.records import GeneratorLoad, TimedAnswer, Usage
from redline.bench.serving.remarks import generator_remark, remarks, schedule_remark
from redline.bench.serving.saved import BenchResult
from redline.bench.serving.sections import Plot, Table, Words
from redline.bench.serving.serve_page import heading, serve_sections
from redline.bench.serving.target import LoadPace
from tests.bench.serving.answers import IDLE, answer, run

BUSY = {"cpu_share": 0.1, "lag_p50": 0.0001, "lag_p99": 0.0004, "lag_most": 0.002, "late_sends": 0}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cpu_share": 0.95}, "it used a whole core"),
        ({"lag_p99": 0.02}, "its timers were late"),
        ({"late_sends": 3}, "it sent requests late"),
    ],
)
def test_a_load_generator_that_is_the_limit_says_so(change: dict[str, float], reason: str):
    answers = [answer(index) for index in range(100)]
    calm = generator_remark(IDLE, answers)
    assert not calm.warning
    assert "was not the limit" in calm.text
    assert "0.1% of the median ITL" in calm.text
    warned = generator_remark(GeneratorLoad(**{**BUSY, **change}), answers)  # pyright: ignore[reportArgumentType]
    assert warned.warning
    assert reason in warned.text


def test_a_wait_that_latencies_leave_out_is_said():
    pace = LoadPace(rate=10.0, max_concurrency=1)
    on_time = schedule_remark(pace, [answer(sent=0.0001), answer(planned=0.1)])
    assert not on_time.warning
    assert "include all waiting" in on_time.text
    late = schedule_remark(pace, [answer(), answer(planned=0.1, sent=1.0)])
    assert late.warning
    assert "coordinated omission" in late.text
    closed = schedule_remark(LoadPace(rate=math.inf, max_concurrency=4), [answer(sent=9.0)])
    assert not closed.warning
    assert "no schedule (at most 4 concurrent)" in closed.text


def served(*answers: TimedAnswer, stopped: bool = False, **more: object) -> BenchResult:
    measured = run(*answers, stopped=stopped)
    return BenchResult(
        kind="serve",
        figures={"model_id": "nano", "num_prompts": len(answers), **figures(measured, names=("ttft", "tpot", "itl"))},
        target={"base_url": "http://h:1"},
        dataset={"dataset_name": "random", "random_input_len": 9, "random_output_len": 5, "ignore_eos": True},
        pace=LoadPace(),
        generator=IDLE,
        stopped=stopped,
        answers=measured.answers,
        **more,  # pyright: ignore[reportArgumentType]
    )


def test_what_puts_figures_in_doubt_is_a_warning():
    uncounted = answer(0, usage=Usage(prompt_tokens=3))
    skipped = answer(1, at=(), failure="skipped", text="")
    warned = " ".join(words.text for words in remarks(served(uncounted, skipped, stopped=True)) if words.warning)
    assert "1 of 2 requests were sent, and 0 of them were cut off" in warned
    assert "each event was counted as one token" in warned
    assert "ended before max_tokens" in warned
    calm = remarks(served(answer(0, max_tokens=5)))
    assert not [words for words in calm if words.warning]


def test_events_of_several_tokens_and_events_that_come_together_are_told():
    text = " ".join(words.text for words in remarks(served(answer(usage=Usage(completion_tokens=15), max_tokens=15))))
    assert "3.00 tokens on average" in text
    together = answer(at=(0.5, 0.5, 0.5, 0.6, 0.6), max_tokens=5)
    assert "75% of events arrived in the same read" in " ".join(words.text for words in remarks(served(together)))


def test_the_sections_of_a_result():
    thinks = answer(2, at=(0.1, 0.2, 0.3), kinds="tta", thinking="hm", max_tokens=3)
    failed = answer(3, at=(0.1,), failure="dropped", error="the server closed the connection")
    mismatch = {"index": 2, "check": "text", "said": 9, "seen": 3, "text": "usage reports 9"}
    result = served(answer(0), answer(1, sent=0.3), thinks, failed, details={"mismatches": [mismatch] * 25})
    sections = serve_sections(result)
    tables = {section.title: section for section in sections if isinstance(section, Table)}
    assert list(tables) == ["Throughput", "Latency, ms", "Failures: dropped 1", "Inconsistent usage: text 25"]
    assert ("requests completed", "3") in tables["Throughput"].rows
    latency = {row[0]: row[1:] for row in tables["Latency, ms"].rows}
    assert latency["TTFT, to the first token"][0] == "366.67"
    assert ("dropped", "1", "3", "0.150", "the server closed the connection") in tables["Failures: dropped 1"].rows
    assert tables["Inconsistent usage: text 25"].note.startswith("5 more")
    assert any(isinstance(section, Words) for section in sections)
    plots = {section.title: section for section in sections if isinstance(section, Plot)}
    assert len(plots) == 6
    for plot in plots.values():
        for series in plot.series:
            assert len(series.x) == len(series.y) > 0
            assert all(map(math.isfinite, (*series.x, *series.y)))
    assert [series.name for series in plots["Requests over time"].series][1] == "failed"
    assert len(plots["Time to first token"].series) == 2
    assert heading(result).startswith("nano at http://h:1, random, 9 in, 5 out, 4 requests")


def test_a_result_of_vllms_client_has_tables_alone():
    found = serve_sections(
        BenchResult(
            kind="vllm", figures={"completed": 3, "failed": 0, "duration": 1.0, "mean_itl_ms": 2.0, "p99_itl_ms": 5}
        )
    )
    assert [section.title for section in found if isinstance(section, Table)] == ["Throughput", "Latency, ms"]
    assert found[2].rows == (("ITL, between events", "2.00", "", "5.00"),)  # type: ignore[union-attr]
    assert len(found) == 3


def test_a_run_in_which_all_failed_has_no_plots_and_no_latencies():
    found = serve_sections(served(answer(at=(), failure="refused", error="nobody listens", text="")))
    assert [section.title for section in found if isinstance(section, Table)] == ["Throughput", "Failures: refused 1"]
    assert not [section for section in found if isinstance(section, Plot)]


class Letters:
    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))


def test_what_a_vocabulary_has_counted_is_not_called_uncounted():
    measured = run(answer(0, usage=Usage(prompt_tokens=3)))
    for counts, warned in ((None, True), (Letters(), False)):
        result = BenchResult(kind="serve", figures=figures(measured, counts=counts), answers=measured.answers)
        assert any("no token count" in words.text for words in remarks(result)) == warned


def test_a_run_too_short_to_time_the_generator_does_not_clear_it():
    still = GeneratorLoad(cpu_share=0.1, lag_p50=0.0, lag_p99=0.0, lag_most=0.0, late_sends=0)
    said = generator_remark(still, [answer()])
    assert "was not the limit" not in said.text
    assert "The run was too short" in said.text
    assert generator_remark(msgspec.structs.replace(still, cpu_share=0.95), [answer()]).warning
