"""Loading takes the memory of the model, of one tensor, and little more: nothing is held twice."""

import sys
from pathlib import Path

import pytest

from tests import forked

LOAD = """
import sys
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace as Alone  # a rank without the others: reading weights has no all-reduce

import torch
from redline.model.k2.checkpoint import Checkpoint, weights
from redline.model.k2.cpu import load
from redline.kernels.cpu import native


def anonymous():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def watch():
    global peak
    while not over.wait(0.002):
        peak = max(peak, anonymous())


assert native.library() is not None, native.why_not()
torch.zeros(1000).clone()  # what torch allocates once is not the model's
peak = before = anonymous()
over = Event()
watcher = Thread(target=watch, daemon=True)
watcher.start()
checkpoint = Checkpoint.open(sys.argv[1])
read = []
checkpoint.progress = read.append
model = load(checkpoint, torch.device("cpu"), group=Alone(rank=int(sys.argv[2]), ranks=int(sys.argv[3])))
over.set()
watcher.join()
print(checkpoint.bytes, sum(read), max(read), anonymous() - before, peak - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from /proc")
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_loading_1_gb_takes_a_ranks_part_and_one_tensor(rank: int, ranks: int, big_checkpoint: Path):
    child = forked.run(
        [sys.executable, "-c", LOAD, str(big_checkpoint), str(rank), str(ranks)],
        capture_output=True,
        text=True,
        check=True,
    )
    stored, read, largest, kept, peak = map(int, child.stdout.split())
    part = stored // ranks  # except for some MB that each rank holds completely
    assert stored > 1_000_000_000
    assert read == stored  # the progress bar reaches its end
    assert abs(kept - part) < 100_000_000
    assert peak <= part + largest + 100_000_000, f"{(peak - part) / 1e6:.0f} MB in addition to its part"
