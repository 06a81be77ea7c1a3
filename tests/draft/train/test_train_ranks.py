"""Two ranks learn the same as one process: data parallel and fully sharded, also after a stop and a resume."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests import forked
from tests.draft.train.captured import target_folder

ROOT = Path(__file__).parents[3]


def lines(out: Path, key: str) -> list[dict[str, Any]]:
    log = (out / "training" / "log.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, log) if key in line]


def assert_same(found: Path, wanted: Path) -> None:
    losses = [[line["loss"] for line in lines(out, "loss")] for out in (found, wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    norms = [[line["norm"] for line in lines(out, "loss")] for out in (found, wanted)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert [line["tokens"] for line in lines(found, "loss")] == [line["tokens"] for line in lines(wanted, "loss")]
    held = [lines(out, "held_out")[-1]["held_out"] for out in (found, wanted)]
    assert held[0]["rows"] == held[1]["rows"] > 0
    assert held[0]["loss"] == pytest.approx(held[1]["loss"], rel=1e-4)
    other = load_file(wanted / "model.safetensors")
    for name, tensor in load_file(found / "model.safetensors").items():
        apart = (tensor.float() - other[name].float()).norm() / other[name].float().norm()
        assert apart < 4e-3, name  # bf16


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle3", "dspark"])
def test_two_ranks_learn_what_one_process_learns_and_go_on_where_they_stopped(drafter: str, tmp_path: Path):
    target = target_folder(tmp_path / "target")
    kinds = ["one process", "data parallel", "fully sharded"]
    command = [sys.executable, "-m", "tests.draft.train.ranks", str(target), str(tmp_path), *kinds]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DRAFTER": drafter}
    ran = forked.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    for kind in kinds[1:]:
        assert_same(tmp_path / kind, tmp_path / kinds[0])
