"""What is counted while requests are answered: the whole of it, small."""

import ctypes
import json
import sys
from pathlib import Path

from redline.bench.attack import growth
from tests import forked

ROOT = Path(__file__).parents[2]
ROW = {"objects": 5.0, "used_mib": 1.0, "free_mib": 0.0, "resident_mib": 2.0}


def test_growth_is_that_of_the_second_half_without_the_trimmed_row():
    rows = [{"after": float(at), **ROW, "objects": max(0.0, at - 600.0)} for at in growth.marks(1200)]
    assert len(rows) == growth.ROWS
    trimmed = {**rows[-1], "resident_mib": 0.0}
    assert growth.per_1000([*rows, trimmed]) == {"objects": 1000, "used_mib": 0, "free_mib": 0, "resident_mib": 0}


def test_bytes_in_use_are_the_allocators_own_account():
    before = growth.counted(0)
    block = ctypes.create_string_buffer(64 << 20)
    assert 63 < growth.counted(0)["used_mib"] - before["used_mib"] < 66
    del block
    assert growth.counted(0)["used_mib"] - before["used_mib"] < 1


def test_what_answered_requests_leave_behind_is_little(tmp_path: Path):
    """An object that stayed with each request would make 125 here; texts and verdicts that are kept make 60."""
    saved = tmp_path / "growth.json"
    words = ["--requests=300", "--jobs=12", "--kv-memory=40000000", "--known-bytes=4000000", f"--save={saved}"]
    program = "-m", "redline.bench.attack.growth"  # a process of its own: what other tests have left is collected too
    forked.run([sys.executable, *program, str(ROOT / "models" / "kimi-nano"), *words], check=True)
    told = json.loads(saved.read_text())
    assert set(told["counts"]) == {"api", "api, few texts known", "api, texts full", "engine"}
    assert all(len(rows) == growth.ROWS + 1 for rows in told["counts"].values())
    few = told["counts"]["api, few texts known"]
    assert few[growth.ROWS - 1]["objects"] - few[growth.ROWS // 2]["objects"] < 100
