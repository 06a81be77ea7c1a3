"""Many commands on the cores of one machine: each in a slot of its own, until a time, resumable."""

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 20.0  # to write down what is there, once told to end
BEAT_S = 30.0  # between two words of what runs
SAID = 150  # characters of a line


@dataclass(frozen=True)
class Job:
    """A command to run, under a name that is the name of its log."""

    name: str
    command: tuple[str, ...]
    journal: Path | None = None  # what it writes of its progress; None: its output


Slot = tuple[int, ...]  # cores


def slots(each: int) -> list[Slot]:
    """The cores that this process may use, in slots of `each`; cores left over are the last slot's."""
    cores = sorted(os.sched_getaffinity(0))
    count = max(1, len(cores) // each)
    return [tuple(cores[i * each : (i + 1) * each if i < count - 1 else None]) for i in range(count)]


def run_all(
    jobs: Sequence[Job], places: Sequence[Slot], seconds: float, folder: Path, tell: Callable[[str], object] = print
) -> list[str]:
    """Runs the jobs in order, one to a slot at a time, for at most `seconds`; gives the names of those not done.

    A job's output is appended to FOLDER/NAME.log. FOLDER/NAME.done marks one that ended well, which is not run again.
    When time is up, running jobs are told to end (SIGINT), and killed if they do not within GRACE_S. `tell` is called
    with a line at each job's end, and every BEAT_S with the last line that each running job has written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + seconds
    waiting = deque(job for job in jobs if not (folder / f"{job.name}.done").exists())
    running: dict[str, Job] = {}

    def work(slot: Slot) -> None:
        os.sched_setaffinity(0, slot)  # of this thread, which its jobs inherit
        while time.monotonic() < until:
            try:
                job = waiting.popleft()
            except IndexError:
                return
            running[job.name] = job
            began = time.monotonic()
            status = _run(job, until, folder)
            del running[job.name]
            if status == 0:
                (folder / f"{job.name}.done").touch()
            said = f"status {status}, {time.monotonic() - began:.0f} s"
            tell(f"{job.name}: {said}; {_last(folder / f'{job.name}.log')}")

    threads = [threading.Thread(target=work, args=(slot,)) for slot in places]
    with _heard_by_jobs():
        for thread in threads:
            thread.start()
        beat = time.monotonic()
        while alive := [thread for thread in threads if thread.is_alive()]:
            alive[0].join(1.0)
            if time.monotonic() - beat > BEAT_S:
                beat = time.monotonic()
                for job in list(running.values()):
                    tell(f"{job.name} runs: {_last(job.journal or folder / f'{job.name}.log')}")
    return [job.name for job in jobs if not (folder / f"{job.name}.done").exists()]


@contextmanager
def _heard_by_jobs() -> Generator[None]:
    """Lets jobs hear SIGINT even where this process was told to ignore it, as behind `nohup` or `&` of a script.

    A program inherits that SIGINT is ignored, and could not be told to end. It does not inherit a handler, so here a
    handler that does nothing takes the place of ignoring.
    """
    if (
        signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _last(path: Path) -> str:
    """The last line of a file, or nothing."""
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "")[:SAID]


def _run(job: Job, until: float, folder: Path) -> int:
    with (folder / f"{job.name}.log").open("ab") as log:
        process = subprocess.Popen(job.command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            return process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        try:
            return process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
