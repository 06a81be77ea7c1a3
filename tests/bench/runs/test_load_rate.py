"""The program that measures loading: its plain read, and what it does where a rank fails."""

from pathlib import Path

import pytest
import torch

from redline.bench import disk_rate
from redline.bench.runs import load_rate
from redline.errors import ConfigError
from tests import forked


@pytest.mark.parametrize("threads", [1, 3])
def test_a_plain_read_has_all_bytes_or_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(disk_rate, "BLOCK", 1000)
    files = [tmp_path / "a", tmp_path / "b"]
    for number, path in enumerate(files):
        path.write_bytes(bytes(2500 + number))
    assert disk_rate.read(files, threads).threads == threads
    monkeypatch.setattr(disk_rate.os, "preadv", lambda file, blocks, at: 999)
    with pytest.raises(ConfigError, match=r"5,994 of 5,001 bytes were read; leave the files as they are$"):
        disk_rate.read(files, threads)

    def fails(file: int, blocks: list[bytearray], at: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk_rate.os, "preadv", fails)
    with pytest.raises(OSError, match="Input/output error"):
        disk_rate.read(files, threads)


def test_a_rank_that_cannot_load_is_one_line_and_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    said = r"^a rank has ended with code 1 before it had loaded; what it said is above$"
    with forked.all_processes(), pytest.raises(ConfigError, match=said):
        load_rate.load(tmp_path, 1, torch.device("cpu"), cached=True, plain=1.0)
