"""The leaderboard's figures, from answers with known times."""

from collections.abc import Sequence

import msgspec
import pytest

from redline.bench.serving import leaderboard
from redline.bench.serving.leaderboard import Workload, WorkloadOutcome, check_fits, measured, output_speed
from redline.bench.serving.records import LoadRequest, LoadRun, TimedAnswer
from redline.bench.serving.saved import BenchResult
from redline.bench.serving.sections import Plot, Table, Words
from redline.bench.serving.target import LoadPace, ServerTarget
from redline.errors import ConfigError
from tests.bench.serving.hand_made import answer, run, steady

TARGET = ServerTarget(base_url="http://127.0.0.1:1")


class Pairs:
    """A token for every two characters."""

    def encode(self, text: str) -> list[int]:
        return [0] * (len(text) // 2)


def test_the_figures_of_an_answer_that_thinks():
    row = measured(steady(2.0, 0.01, 301, thought=100), workload="w", run=0)
    assert row.ttft == pytest.approx(2.0)
    assert row.answer_ttft == pytest.approx(3.0)  # after 100 tokens of thinking
    assert row.thinking == pytest.approx(1.0)
    assert row.speed == pytest.approx(100.0)  # 300 tokens after the first, in 3 s
    assert row.end_to_end == pytest.approx(3.0 + 5.0)  # 500 tokens at that speed
    assert row.whole == pytest.approx(5.0)


def test_what_came_with_the_first_read_is_no_part_of_the_speed():
    """Four tokens in the first read, as with draft tokens; then six more in a second."""
    first = [(1.0, "ab", "answer")] * 4
    later = [(1.0 + 0.5 * at, "abcdef", "answer") for at in (1, 2)]
    said = answer(*first, *later, tokens=10)  # type: ignore[arg-type]
    assert output_speed(said, 10) == pytest.approx(10 * 12 / 20)  # by characters: 12 of 20 came later
    counted = answer(*first, *later, tokens=6, counted=True)  # type: ignore[arg-type]
    assert output_speed(counted, 6) == pytest.approx(2.0)  # by the events' counts: 2 of 6 came later


def test_tokens_of_another_vocabulary_have_their_own_speed():
    row = measured(steady(1.0, 0.5, 5), workload="w", run=0, o200k=Pairs())
    assert row.output_o200k == 15 // 2
    assert row.speed == pytest.approx(2.0)
    assert row.speed_o200k == pytest.approx((15 // 2 - 3 // 2) / 2.0)
    assert row.end_to_end_o200k == pytest.approx(1.0 + 500 / 3.0)


def test_hidden_thinking_is_measured_over_the_last_four_fifths():
    """40 tokens of thinking that are not sent; ten events of the answer, the first two of which came in a burst."""
    late = [(5.0, "ab", "answer"), (5.001, "ab", "answer"), *((5.0 + at, "ab", "answer") for at in range(1, 9))]
    row = measured(answer(*late, tokens=50, reasoning=40), workload="w", run=0)  # type: ignore[arg-type]
    assert row.hidden_thinking
    assert row.answer_ttft == pytest.approx(5.0)
    assert row.speed == pytest.approx(8 / 7.999, rel=1e-6)


def test_an_answer_that_never_began_has_no_end_to_end():
    row = measured(steady(1.0, 0.1, 20, thought=20), workload="w", run=0)
    assert row.ttft is not None
    assert row.answer_ttft is None
    assert row.end_to_end is None
    said = leaderboard.differs(
        TARGET, [WorkloadOutcome(workload=Workload(10, 20), rows=(row,))], 1, o200k=True, tokenizer=False
    )
    assert any("1 of 1 requests were still thinking" in text for text in said)


def test_a_vocabulary_that_was_given_is_not_asked_for():
    row = measured(steady(1.0, 0.1, 20), workload="w", run=0)
    of = [WorkloadOutcome(workload=Workload(1000, 20), rows=(row,))]
    for given in (False, True):
        (said,) = (
            text
            for text in leaderboard.differs(TARGET, of, 1, o200k=True, tokenizer=given)
            if "prompt tokens, not" in text
        )
        assert ("gives prompts of that length" in said) == (not given)


def test_who_was_still_thinking_is_later_than_all_others():
    quick, slow = steady(1.0, 0.1, 20, thought=2), steady(1.0, 0.1, 20, thought=12)
    never = steady(1.0, 0.1, 20, thought=20)

    def p50(*answers: TimedAnswer) -> float | None:
        rows = tuple(measured(one, workload="w", run=at) for at, one in enumerate(answers))
        return WorkloadOutcome(workload=Workload(input_len=10, output_len=20), rows=rows).p50("answer_ttft")

    assert p50(quick, slow, never) == pytest.approx(2.2)
    assert p50(quick, never, never) is None


def test_all_at_once_has_no_speed():
    assert output_speed(answer((1.0, "a", "answer"), (1.0, "b", "answer"), tokens=2), 2) is None
    assert output_speed(answer((1.0, "a", "answer"), tokens=1), 1) is None


def test_a_failed_request_is_a_row_with_its_reason():
    row = measured(answer((1.0, "a", "answer"), failure="dropped"), workload="w", run=3)
    assert (row.run, row.error, row.ttft) == (3, "it dropped", None)
    outcome = WorkloadOutcome(workload=Workload(10, 10), rows=(row, measured(steady(2.0, 0.1, 5), workload="w", run=4)))
    assert outcome.p50("ttft") == pytest.approx(2.0)
    assert leaderboard.figures([outcome])["10/10"]["failed"] == 1
    assert leaderboard.runs_table(outcome).columns[-1] == "error"


def test_prompts_of_a_run_are_asked_together_and_runs_one_after_another():
    paces: list[tuple[int, LoadPace]] = []

    def load(target: ServerTarget, asks: Sequence[LoadRequest], pace: LoadPace) -> LoadRun:
        paces.append((len(asks), pace))
        return run(*(steady(1.0, 0.1, 11, index=at) for at in range(len(asks))))

    asks = [LoadRequest(max_tokens=11, text=str(at)) for at in range(6)]
    seen: list[leaderboard.MeasuredRequest] = []
    outcome = leaderboard.measure(Workload(10, 11, parallel=3), asks, TARGET, load, seen=seen.append)
    assert [(many, pace.max_concurrency, pace.warmups) for many, pace in paces] == [(3, 3, 0), (3, 3, 0)]
    assert [row.run for row in outcome.rows] == [0, 0, 0, 1, 1, 1]
    assert seen == list(outcome.rows)
    assert not outcome.stopped


def test_what_was_measured_until_ctrl_c_is_kept():
    def load(target: ServerTarget, asks: Sequence[LoadRequest], pace: LoadPace) -> LoadRun:
        left = answer(index=1, failure="skipped")
        return run(steady(1.0, 0.1, 11), left, stopped=True)

    outcome = leaderboard.measure(Workload(10, 11, parallel=2), [LoadRequest(max_tokens=1, text="")] * 4, TARGET, load)
    assert outcome.stopped
    assert len(outcome.rows) == 1


def test_a_server_with_too_little_room_is_named_with_what_would_fit():
    with pytest.raises(ConfigError, match=r"--input-len 10000 and .*11564.*4096.*--input-len 2532 would fit"):
        check_fits(Workload(10_000, 1500), 4096)
    with pytest.raises(ConfigError, match="reduce --output-len"):
        check_fits(Workload(10_000, 1500), 1024)
    check_fits(Workload(2532, 1500), 4096)
    check_fits(Workload(10_000, 1500), None)


def test_presets_by_name():
    found = leaderboard.workloads(["all"], [1, 10])
    assert [one.name for one in found[:3]] == ["100/300", "100/300 x 10", "1k/1k"]
    assert [one.name for one in leaderboard.workloads([leaderboard.DEFAULT], [1])] == ["10k/1.5k"]
    with pytest.raises(ConfigError, match="expected 100/300"):
        leaderboard.workloads(["5k"], [1])


def page(answers: Sequence[TimedAnswer]) -> list[object]:
    rows = tuple(measured(one, workload="10/10", run=at) for at, one in enumerate(answers))
    outcome = WorkloadOutcome(workload=Workload(10, 10), rows=rows)
    details = {"outcomes": [leaderboard.msgspec.to_builtins(outcome)], "differs": ["It differs."]}
    return list(leaderboard.leaderboard_sections(BenchResult(kind="leaderboard", figures={}, details=details)))


def test_a_page_is_made_of_what_a_file_holds():
    summary, runs, plot, words = page([steady(1.0, 0.1, 10), steady(3.0, 0.2, 10)])
    assert isinstance(summary, Table)
    assert summary.rows[0][:3] == ("10/10", "2 of 2", "2")  # P50 of 1 s and 3 s
    assert isinstance(runs, Table)
    assert len(runs.rows) == 2
    assert isinstance(plot, Plot)
    assert plot.series[0].y == pytest.approx((10.0, 5.0))
    assert words == Words(text="It differs.")


def test_a_workload_without_answers_still_has_a_page():
    assert isinstance(page([answer(failure="refused")])[0], Table)


def test_answers_whose_tokens_nobody_counted_are_told():
    bare = msgspec.structs.replace(steady(1.0, 0.1, 20), usage=None)
    said = [
        leaderboard.differs(
            TARGET, [WorkloadOutcome(workload=Workload(10, 20), rows=(row,))], 1, o200k=True, tokenizer=False
        )
        for row in (measured(one, workload="w", run=0) for one in (bare, steady(1.0, 0.1, 20)))
    ]
    assert [any("1 answers have no token count" in text for text in texts) for texts in said] == [True, False]
