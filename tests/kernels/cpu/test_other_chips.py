"""The CPU kernels as other chips get them: law 1 with AVX2; in `make test-all` with AVX-512 but no bf16 pairs, and with
neither, too.

Each is built from nothing, so the compiler is asked for the least of its work (-O0): the ways that a source takes by
chip are the same, and what -O3 makes of them is held by law 1 on the chip that is here.
With as many threads as there are cores, where the other tests have one each.
"""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).parents[3]
LAW_1 = "tests/laws/test_law_1_kernel_is_reference.py"
PROGRAM = """
import os, sys, pytest, torch
os.environ.pop("OMP_NUM_THREADS", None)
torch.set_num_threads(1)
from redline.kernels.cpu import native
instead = {"-march=native": "-march=" + sys.argv[1], "-O3": "-O0"}
assert set(instead) <= set(native.FLAGS)
native.FLAGS = tuple(instead.get(flag, flag) for flag in native.FLAGS)
sys.exit(pytest.main(["-q", "-p", "no:xdist", "-p", "no:cacheprovider", sys.argv[2]]))
"""


def chips() -> list[str]:
    """Those whose instructions this machine has; none but x86 has such names."""
    if platform.machine() != "x86_64":
        return []
    info = Path("/proc/cpuinfo").read_text()
    return ["x86-64", *(["x86-64-v3"] if " avx2 " in info else []), *(["x86-64-v4"] if " avx512vl " in info else [])]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "chip", [pytest.param(chip, marks=[pytest.mark.slow] * (chip != "x86-64-v3")) for chip in chips()], ids=str
)
def test_kernels_for_another_chip_are_the_references(chip: str):
    command = [sys.executable, "-c", PROGRAM, chip, LAW_1]
    done = forked.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
