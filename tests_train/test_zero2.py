"""Two ranks under DeepSpeed's ZeRO-2 learn what one process learns, stopped on the way and gone on from.

`make test-train`. Apart from the other tests, for DeepSpeed takes minutes to install.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.draft.train.captured import target_folder
from tests.draft.train.test_train_ranks import assert_same

ROOT = Path(__file__).parents[1]
RANKS = "tests.draft.train.ranks"


def test_two_ranks_under_zero_2_learn_what_one_process_learns(tmp_path: Path):
    target = str(target_folder(tmp_path / "target"))
    accelerate = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    programs = Path(sys.executable).parent  # ninja, with which DeepSpeed builds its collectives
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    for command in (
        [sys.executable, "-m", RANKS, target, str(tmp_path), "one process"],
        [*accelerate, "--config_file", "tests_train/zero2.yaml", "-m", RANKS, target, str(tmp_path / "zero 2")],
    ):
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=230)
        assert ran.returncode == 0, ran.stderr
    for kind in ("one process", "zero 2"):
        print(kind, *(tmp_path / kind / "training" / "log.jsonl").read_text().splitlines()[:4], sep="\n")
    assert_same(tmp_path / "zero 2", tmp_path / "one process")
