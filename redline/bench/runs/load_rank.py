"""One rank of `redline.bench.runs.load_rate`: it loads its part of a checkpoint as a worker does.

Standard input has a `Task` in one line, and later an empty line at which it begins. Standard output has an empty line
once it is ready to begin, and at the end a `Took`: what it has taken.
"""

import os
import resource
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from redline import clock
from redline.bench.disk_rate import from_disk
from redline.bench.program import program
from redline.kernels.cpu import native
from redline.kernels.group import ALONE
from redline.model.k2.checkpoint import Checkpoint
from redline.wire.base import Record
from redline.worker.config import EngineConfig
from redline.worker.engine import load_model
from redline.worker.ranks import device_of, open_group

LOOK_S = 0.002  # between two looks at the memory


class Task(Record, frozen=True):
    """What one rank loads. meet: a folder that the ranks share, unused before."""

    folder: str
    rank: int
    ranks: int
    device: str
    meet: str


class Took(Record, frozen=True):
    """What one rank's loading took.

    began, ended    seconds of the machine's one clock (monotonic)
    read_bytes      of tensors that were handed out, whole as they are stored
    disk_bytes      that the system fetched from a disk for this process; None where it does not say
    largest_bytes   of the tensors handed out
    user_s, kernel_s  of processor time, all threads
    host_bytes      of anonymous memory that are kept, and host_peak_bytes at most meanwhile; both above the start's
    device_bytes    likewise of a GPU's memory; 0 on a CPU
    """

    rank: int
    began: float
    ended: float
    read_bytes: int
    disk_bytes: int | None
    largest_bytes: int
    user_s: float
    kernel_s: float
    host_bytes: int
    host_peak_bytes: int
    device_bytes: int = 0
    device_peak_bytes: int = 0


def anonymous() -> int:
    """Bytes of this process's memory that belong to no file, resident. Linux alone says it."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


class Peak:
    """The most anonymous memory while inside `watched`."""

    def __init__(self) -> None:
        self.bytes = 0

    @contextmanager
    def watched(self) -> Generator[None]:
        """Looks every LOOK_S, in a thread."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(LOOK_S):
                self.bytes = max(self.bytes, anonymous())

        watcher = threading.Thread(target=watch, daemon=True)
        self.bytes = anonymous()
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
            self.bytes = max(self.bytes, anonymous())


def load(task: Task) -> Took:
    """Ready, begin, load, as the module says. Raises as `load_model`."""
    device = device_of(task.rank, torch.device(task.device))
    if device.type == "cpu":
        native.share_processors(task.ranks)
    native.library()  # built and loaded before the clock runs
    torch.zeros(1000, device=device).clone()
    config = Checkpoint.open(task.folder).config
    group = ALONE if task.ranks == 1 else open_group(Path(task.meet), task.rank, task.ranks, device, config)
    handed: list[int] = []
    so_far = 0

    def progress(done: int, _: int) -> None:
        nonlocal so_far
        handed.append(done - so_far)
        so_far = done

    engine = EngineConfig(kv_memory=64_000_000, max_model_len=1024, device=task.device, ranks=task.ranks)
    print(flush=True)
    sys.stdin.readline()
    peak, cuda = Peak(), device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    before, used, disk = anonymous(), resource.getrusage(resource.RUSAGE_SELF), from_disk()
    device_before = torch.cuda.memory_allocated(device) if cuda else 0
    began = clock.monotonic()
    with peak.watched():
        loaded = load_model(task.folder, engine, device, group, progress)
        if cuda:
            torch.cuda.synchronize(device)
        ended = clock.monotonic()
    after, now = resource.getrusage(resource.RUSAGE_SELF), from_disk()
    took = Took(
        rank=task.rank,
        began=began,
        ended=ended,
        read_bytes=sum(handed),
        disk_bytes=None if now is None or disk is None else now - disk,
        largest_bytes=max(handed),
        user_s=round(after.ru_utime - used.ru_utime, 3),
        kernel_s=round(after.ru_stime - used.ru_stime, 3),
        host_bytes=anonymous() - before,
        host_peak_bytes=peak.bytes - before,
        device_bytes=torch.cuda.memory_allocated(device) - device_before if cuda else 0,
        device_peak_bytes=torch.cuda.max_memory_allocated(device) - device_before if cuda else 0,
    )
    assert loaded.model.group.rank == task.rank, "each rank has its own part"
    group.close()
    return took


def main() -> None:
    """The command."""
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    task = msgspec.json.decode(sys.stdin.readline(), type=Task)
    print(msgspec.json.encode(load(task)).decode(), flush=True)


def _leave_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        clock.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    program(main, heard=False)
