"""The programs of bounded steps: one at work on a short trace, and what their stored figures are said to show."""

import json
from pathlib import Path

from redline.bench.runs import bounded_steps

RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "bounded-steps.json"


def test_a_bound_keeps_gaps_short_that_whole_chunks_stretch() -> None:
    found = bounded_steps.points(seed=1, loads=(1.0,), seconds=40.0)
    for point in found:
        whole, predicted = point["ways"]["8192"], point["ways"]["predicted"]
        assert predicted["smooth"] > whole["smooth"] + 0.05
        assert predicted["itl_ms_p99"] <= point["bound_ms"]
    assert set(bounded_steps.summed(found)["good_by_tails"]) == {"8192", "2048", "512", "predicted"}


def test_by_tails_prediction_was_best_everywhere_and_by_means_whole_chunks_were() -> None:
    record = json.loads(RESULT.read_text())
    for point in record["points"]:
        tails = {way: each["good_by_tails"] for way, each in point["ways"].items()}
        assert max(tails, key=tails.__getitem__) == "predicted", point
    assert max(record["all"]["good_by_means"].items(), key=lambda each: each[1])[0] == "8192"
