"""Measuring over several ranks: this process is rank 0, and starts the same command once more for each other rank.

All do the same, in the same order, and meet in the sums of the model; rank 0 alone prints and keeps what it measured.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from pathlib import Path

import torch

from redline.errors import ConfigError, RankLost
from redline.kernels.group import ALONE, Group
from redline.kernels.hopper.group import GpuGroup
from redline.model.k2.config import K2Config
from redline.model.k2.shard import check_ranks, rooms_of

RANK, MEET = "REDLINE_BENCH_RANK", "REDLINE_BENCH_MEET"  # told to the ranks that rank 0 starts
END_S = 30.0  # for the others to end once rank 0 has measured


def own_rank() -> int:
    """This process's number: 0 unless rank 0 has started it."""
    return int(os.environ.get(RANK, "0"))


@contextlib.contextmanager
def ranks_of_gpus(config: K2Config, ranks: int) -> Generator[Group]:
    """The group of so many GPUs of this host, whose other ranks run this process's own command.

    torch's current device is this rank's from then on. Raises ConfigError where the model does not come apart into so
    many parts or the host has too few GPUs. Where another rank fails, this process ends, with what it said.
    """
    if ranks == 1:
        yield ALONE
        return
    check_ranks(config, ranks)
    if torch.cuda.device_count() < ranks:
        raise ConfigError(f"ranks is {ranks}, and torch sees {torch.cuda.device_count()} GPUs")
    rank = own_rank()
    with tempfile.TemporaryDirectory() if rank == 0 else contextlib.nullcontext() as folder:
        meet = os.environ[MEET] if folder is None else str(Path(folder) / "meet")
        with _others(ranks, meet) if rank == 0 else _with_parent():
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
            torch.cuda.manual_seed(0)  # what is random is the same on all
            group = GpuGroup(meet, rank, ranks, device, rooms_of(config, ranks))
            try:
                yield group
                group.check()
            finally:
                group.close()


@contextlib.contextmanager
def _others(ranks: int, meet: str) -> Generator[None]:
    """Ranks 1 and up; they end before this does."""
    environment = {**os.environ, MEET: meet}
    started = [
        subprocess.Popen(
            [sys.executable, *_command()],
            env={**environment, RANK: str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        for rank in range(1, ranks)
    ]
    done = threading.Event()
    for rank, process in enumerate(started, 1):
        threading.Thread(target=_watch, args=(rank, process, done), daemon=True).start()
    try:
        yield
        done.set()
        for process in started:
            process.wait(END_S)
    finally:
        done.set()
        for process in started:
            process.kill()
            process.wait()


def _command() -> Sequence[str]:
    """What started this process, from the interpreter's arguments on."""
    return sys.orig_argv[1:]


def _watch(rank: int, process: "subprocess.Popen[bytes]", done: threading.Event) -> None:
    """Ends this process where another rank ends too early: nobody would wake it, deep in a sum."""
    code = process.wait()
    if not done.is_set() and code:
        print(f"error: {RankLost(f'rank {rank} has ended with code {code}')}", file=sys.stderr, flush=True)
        os._exit(1)


@contextlib.contextmanager
def _with_parent() -> Generator[None]:
    """Ends this process with the one that started it."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    yield
