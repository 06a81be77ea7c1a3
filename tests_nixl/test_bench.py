"""The programs that measure NIXL between GPUs, over the host's memory."""

import json
from pathlib import Path

from lab import nixl_readers, peer_pieces


def test_readers_are_killed_and_their_owner_lives(tmp_path: Path) -> None:
    nixl_readers.main(["--device", "cpu", "--owners", "1", "--readers", "1", "--save", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["owners"], found["owners_that_live"]) == (1, 1)
    (row,) = found["each"]
    assert (row["way"], row["wrong_bytes"], row["wrong_bytes_of_the_last"]) == ("nixl", [0], 0)
    assert row["last_ended"]["code"] == row["owner_ended"]["code"] == 0


def test_pieces_travel_over_nixl(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--transport", "nixl", "--layers", "2", "--pages", "16", "--mib", "1"]
    peer_pieces.main([*words, "--save", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["transport"] == "nixl"
    assert [(row["most_mib"], row["wrong_bytes"]) for row in found["pieces"]] == [(1, 0)]
