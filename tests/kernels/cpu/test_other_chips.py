"""The CPU kernels as compiled for other chips: law 1 with AVX2; in `make test-all` also with AVX-512 without bf16
pairs, and with neither.

Each library is built from scratch with -O0 to save compile time: the code paths selected by chip are the same, and law
1 on the present chip covers what -O3 makes of them. The tests run with as many threads as there are cores, while the
other tests use one thread.
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
    """The instruction sets of this list that the machine supports; only x86 machines have any."""
    if platform.machine() != "x86_64":
        return []
    info = Path("/proc/cpuinfo").read_text()
    return ["x86-64", *(["x86-64-v3"] if " avx2 " in info else []), *(["x86-64-v4"] if " avx512vl " in info else [])]


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize("chip", chips())
def test_kernels_for_another_chip_are_the_references(chip: str):
    command = [sys.executable, "-c", PROGRAM, chip, LAW_1]
    done = forked.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
