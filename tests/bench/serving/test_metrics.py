"""Figures of answers made by hand: each number here can be worked out on paper."""

import msgspec
import numpy as np
import pytest

from redline.bench.serving import metrics
from redline.bench.serving.metrics import figures
from redline.bench.serving.records import Usage
from tests.bench.serving.answers import answer, run


class Letters:
    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))


def test_the_times_of_one_answer():
    one = answer(planned=1.0, sent=1.25)
    assert metrics.ttft(one) == pytest.approx(0.5)
    assert metrics.e2el(one) == pytest.approx(0.9)
    assert metrics.tpot(one) == pytest.approx(0.1)
    assert metrics.itls(one) == pytest.approx([0.1] * 4)
    assert metrics.queue_time(one) == pytest.approx(0.25)
    assert metrics.ttft_from_schedule(one) == pytest.approx(0.75)
    assert metrics.e2el_from_schedule(one) == pytest.approx(1.15)


def test_thinking_and_answer_are_apart():
    one = answer(at=(0.2, 0.3, 0.7, 0.8), kinds="ttaa", thinking="hm", text="ok")
    assert metrics.ttft(one) == pytest.approx(0.2)
    assert metrics.answer_ttft(one) == pytest.approx(0.7)
    assert metrics.thinking(one) == pytest.approx(0.5)


def test_an_answer_that_only_thought_has_no_first_answer_token_and_a_tool_call_is_one():
    thought = answer(at=(0.2, 0.3), kinds="tt", thinking="hm", text="")
    assert (metrics.answer_ttft(thought), metrics.thinking(thought)) == (None, pytest.approx(0.1))
    closed = answer(at=(0.2, 0.3, 0.4), kinds="tta", thinking="hm", text="")
    empty = msgspec.structs.replace(closed.chunks[2], characters=0)
    closed = msgspec.structs.replace(closed, chunks=(*closed.chunks[:2], empty))
    assert metrics.answer_ttft(closed) is None, "an event with a finish_reason and no text is not an answer token"
    called = answer(at=(0.2, 0.4), kinds="tc", thinking="hm", text="")
    assert metrics.answer_ttft(called) == pytest.approx(0.4)
    assert metrics.thinking(answer()) is None


def test_tokens_per_second_are_of_tokens_and_not_of_chunks():
    """Three draft tokens accepted per step: five chunks carry 17 tokens."""
    one = answer(usage=Usage(completion_tokens=17))
    assert metrics.tpot(one) == pytest.approx(0.4 / 16)
    assert metrics.itls(one) == pytest.approx([0.1] * 4)
    assert metrics.tokens_by_second([one]) == pytest.approx([17.0])
    assert metrics.tpot(answer(at=(0.5,))) is None


@pytest.mark.parametrize(
    ("usage", "tokens", "counts", "expected"),
    [
        (Usage(completion_tokens=7), (1, 1, 1, 1, 1), Letters(), (7, "usage")),
        (Usage(prompt_tokens=7), (1, 2, 1, 1, 1), Letters(), (6, "chunks")),
        (Usage(prompt_tokens=7), (1, 2, 1, 1, None), Letters(), (9, "vocabulary")),
        (Usage(prompt_tokens=7), (), None, (5, "chunk count")),
    ],
)
def test_output_tokens_come_from_the_best_source(
    usage: Usage, tokens: tuple[int | None, ...], counts: Letters | None, expected: tuple[int, str]
):
    found = metrics.output_tokens(answer(usage=usage, tokens=tokens, text="nine char"), counts)
    assert (found.count, found.source) == expected


def test_percentiles_are_numpys_linear_ones():
    seconds = [0.003, 0.001, 0.010, 0.002]
    found = metrics.statistics("itl", seconds, (50, 99.9))
    assert found["p99.9_itl_ms"] == pytest.approx(np.percentile(seconds, 99.9) * 1000)
    assert found["p50_itl_ms"] == found["median_itl_ms"] == pytest.approx(2.5)
    assert found["std_itl_ms"] == pytest.approx(np.std(seconds) * 1000)
    assert found["mean_itl_ms"] == pytest.approx(4.0)


def test_figures_have_vllms_keys_and_leave_failures_out_of_latencies():
    failed = answer(2, at=(5.0,), failure="dropped", error="the server closed the connection", text="a")
    found = figures(run(answer(0), answer(1, planned=0.5), failed, seconds=2.0))
    assert (found["completed"], found["failed"], found["failures"]) == (2, 1, {"dropped": 1})
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20, 10)
    assert found["request_throughput"] == pytest.approx(1.0)
    assert found["output_throughput"] == pytest.approx(5.0)
    assert found["total_token_throughput"] == pytest.approx(15.0)
    assert found["mean_ttft_ms"] == pytest.approx(500)
    assert found["p99_e2el_ms"] == pytest.approx(900)
    assert found["output_lens"] == [5, 5, 0]
    assert found["errors"] == ["", "", "the server closed the connection"]
    assert found["max_concurrent_requests"] == 3
    assert found["max_output_tokens_per_s"] == pytest.approx(5)  # those of the second answer begin in the next second
    assert found["request_goodput"] is None


def test_where_all_failed_latencies_are_unknown_and_not_zero():
    found = figures(run(answer(at=(), failure="refused", error="refused")))
    assert (found["completed"], found["failed"], found["mean_ttft_ms"], found["p99_tpot_ms"]) == (0, 1, None, None)


def test_an_answer_without_a_token_has_failed_even_where_the_server_says_otherwise():
    found = figures(run(answer(at=(), text="")))
    assert (found["completed"], found["failures"]) == (0, {"empty": 1})
    assert "without any token" in found["errors"][0]


def test_what_the_run_itself_cut_off_is_not_the_servers_failure():
    cut, skipped = answer(1, failure="deadline"), answer(2, at=(), text="", failure="skipped")
    found = figures(run(answer(0), cut, skipped, answer(3, failure="dropped"), stopped=True))
    assert (found["completed"], found["failed"]) == (1, 1)
    assert found["failures"] == {"deadline": 1, "skipped": 1, "dropped": 1}


def test_a_good_request_keeps_every_bound():
    fast, slow, short = answer(0), answer(1, at=(0.5, 0.6, 0.7, 1.8)), answer(2, at=(0.6,))
    measured = run(fast, slow, short, seconds=1.0)
    assert figures(measured, goodput={"ttft": 500.01, "tpot": 100.01})["request_goodput"] == pytest.approx(1)
    assert figures(measured, goodput={"tpot": 100.01})["request_goodput"] == pytest.approx(2)  # one token has no TPOT
    assert figures(measured, goodput={"e2el": 2000})["request_goodput"] == pytest.approx(3)


def test_what_was_waited_for_a_free_place_is_in_the_latencies_from_the_schedule_alone():
    late = run(answer(0), answer(1, planned=0.1, sent=1.1), seconds=3.0)
    found = figures(late, names=("ttft", "ttft_from_schedule", "e2el_including_client_queue", "client_queue_time"))
    assert found["mean_ttft_ms"] == pytest.approx(500)
    assert found["mean_ttft_from_schedule_ms"] == pytest.approx(1000)
    assert found["p99_client_queue_time_ms"] == pytest.approx(990)
    assert found["median_e2el_including_client_queue_ms"] == pytest.approx(1400)


def test_one_request_that_ends_makes_room_for_the_next():
    first, second = answer(0, at=(0.5, 1.0)), answer(1, planned=1.0, at=(0.5,))
    assert metrics.concurrency([first, second]) == [(0.0, 1), (1.0, 0), (1.0, 1), (1.5, 0)]


def test_thinking_and_cached_tokens_are_told_where_the_server_says_them():
    usage = Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=8, reasoning_tokens=3)
    found = figures(run(answer(usage=usage), answer(1)))
    assert (found["total_cached_tokens"], found["total_thinking_tokens"]) == (8, 3)
    assert "total_cached_tokens" not in figures(run(answer()))


def test_a_failed_answer_keeps_no_slo():
    failed = answer(at=(), failure="http", error="503", text="")
    assert not metrics.keeps(failed, {"tpot": 50.0})
    assert metrics.keeps(answer(at=(0.1,)), {"tpot": 50.0})  # an answer of one token has no ITL
