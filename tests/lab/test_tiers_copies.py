"""Copies of a tier's pages on this machine's CPU, in a small model's size: all come back unchanged."""

import json
from pathlib import Path

from lab.tiers_copies import main


def test_each_way_is_measured_beside_its_floor(tmp_path: Path) -> None:
    few = ["--pages", "1", "3", "--repeats", "2", "--slab", str(1 << 20)]
    main(["--shape", "kimi-nano", *few, "--device", "cpu", "--save", f"{tmp_path}/a"])
    told = json.loads((tmp_path / "a").read_text())
    assert [one["pages"] for one in told["runs"]] == [1, 3]
    assert told["runs"][1]["bytes"] == 3 * told["page_bytes"]
    for one in told["runs"]:
        assert one["read"]["of_floor"] > 0
        assert one["save"]["ms"] >= one["save"]["best_ms"] > 0
        assert {"read: fetch", "read: launch", "read: wait"} <= one["read"]["parts"].keys()
        assert {"save: room", "save: launch", "save: books", "thread: seal"} <= one["save"]["parts"].keys()
        assert one["read"]["parts"]["read: launch"] <= one["read"]["ms"]
        assert one["device"].keys() == {"gather and add up", "copy out", "copy in", "add up", "place and add up"}
        assert all(piece["ms"] > 0 for piece in one["device"].values())
    for way in ("asked", "touched", "huge"):
        assert told["pinning"][way]["alone_ms"] > 0
        assert told["pinning"][way]["longest_launch_beside_ms"] >= told["pinning"][way]["usual_launch_beside_ms"] > 0
