"""The copies of a tier's pages on this machine's CPU, of a small model's size: all come as they were saved."""

import json
from pathlib import Path

from redline.bench.runs.tiers_copies import main


def test_each_way_is_measured_beside_its_floor(tmp_path: Path) -> None:
    main(["--shape", "kimi-nano", "--pages", "1", "3", "--repeats", "2", "--device", "cpu", "--save", f"{tmp_path}/a"])
    told = json.loads((tmp_path / "a").read_text())
    assert [one["pages"] for one in told["runs"]] == [1, 3]
    assert told["runs"][1]["bytes"] == 3 * told["page_bytes"]
    for one in told["runs"]:
        assert one["read"]["of_floor"] > 0
        assert one["save"]["ms"] >= one["save"]["best_ms"] > 0
