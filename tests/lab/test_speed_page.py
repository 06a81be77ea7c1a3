"""docs/speed.md agrees with the committed results."""

from pathlib import Path
from typing import Any

import msgspec

from lab import speed_page
from redline.bench.step.depth_record import DepthRecord, OpRecord, read

ROOT = Path(__file__).parents[2]


def record(**changes: Any) -> DepthRecord:
    """A step of 9 ms on an NVIDIA H200."""
    one = DepthRecord(
        shape="kimi-k2.6",
        gpu="NVIDIA H200",
        ranks=1,
        layers=61,
        physical_layers=12,
        experts=384,
        rows=1,
        tokens_per_row=1,
        context=1024,
        kv_dtype="bf16",
        routing="uniform",
        ms=9.0,
        p10_ms=8.9,
        p90_ms=9.2,
        floor_ms=7.6,
        expert_bytes=11_900_000_000,
        bytes_per_s=4.4e12,
        flops_per_s=700e12,
        ops=(OpRecord(name="experts_up", us=2040.0, floor_us=1800.0, launches=60),),
        commit="abc1234",
        date="2026-11-22 12:00",
        versions={"python": "3.11.7", "torch": "2.13.0"},
    )
    return msgspec.structs.replace(one, **changes)


def test_the_page_is_what_the_committed_results_make():
    files = sorted((ROOT / "benchmarks" / "results").glob("decode-*.json"))
    records = [one for path in files for one in read(path, DepthRecord)]
    assert (ROOT / "docs" / "speed.md").read_text() == speed_page.page(records), "run python -m lab.speed_page"


def test_without_results_the_page_says_so():
    assert "no figures" in speed_page.page([])


def test_a_case_has_time_floor_ratio_peer_and_where_it_comes_from():
    text = speed_page.page([record()])
    assert "61 layers, 12 of them in memory" in text
    assert "| step, ms | **9.00** |" in text
    assert "| floor over time | 84% |" in text
    assert "| vLLM's time over ours | 1.47 |" in text
    assert "| experts_up | 60 | 34.0 / 30.0 (88%) |" in text
    assert "| sum over step |  | 0.23 |" in text
    assert "- 1 x 1: NVIDIA H200 (4.40 TB/s, 700 TFLOP/s measured)" in text
    assert "commit abc1234, 2026-11-22 12:00 UTC" in text


def test_a_case_whose_ops_were_not_timed_has_no_table_of_them():
    text = speed_page.page([record(ops=())])
    assert "| step, ms | **9.00** |" in text
    assert "Its ops were not timed one by one." in text
    assert "sum over step" not in text


def test_the_last_measurement_of_a_case_is_the_one_that_is_shown():
    text = speed_page.page([record(ms=9.5), record(ms=9.0), record(rows=4, ms=18.0)])
    assert "| step, ms | **9.00** | **18.00** |" in text
    assert "9.50" not in text


def test_cases_that_differ_in_more_than_rows_and_tokens_have_tables_of_their_own():
    text = speed_page.page([record(), record(context=8192), record(kv_dtype="fp8"), record(routing="correlated 0.4")])
    assert text.count("| step, ms |") == 4
    assert text.count("vLLM 0.33, ms") == 1


def test_an_op_that_a_case_has_not_is_an_empty_cell():
    other = OpRecord(name="moe", us=900.0, floor_us=600.0, launches=60)
    text = speed_page.page([record(), record(rows=32, ops=(other,))])
    assert "| experts_up | 60 | 34.0 / 30.0 (88%) |  |" in text
    assert "| moe | 60 |  | 15.0 / 10.0 (67%) |" in text
