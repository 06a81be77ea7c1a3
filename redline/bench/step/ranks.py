"""Measures over several tensor parallel ranks: this process is rank 0, and starts its own command for every other rank.

All ranks do the same work in the same order and communicate in the model's all-reduces; only rank 0 prints and saves.
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
from redline.kernels.cuda.collectives.gpu_group import GpuGroup
from redline.kernels.group import ALONE, Group
from redline.model.k2.config import K2Config
from redline.model.k2.shard import check_ranks, rooms_of

RANK, MEET = (
    "REDLINE_BENCH_RANK",
    "REDLINE_BENCH_MEET",
)  # set by rank 0 for the ranks that it starts
END_S = 30.0  # timeout in seconds for the other ranks to exit after rank 0 has measured


def own_rank() -> int:
    """The rank of this process: 0 unless rank 0 has started it."""
    return int(os.environ.get(RANK, "0"))


@contextlib.contextmanager
def ranks_of_gpus(config: K2Config, ranks: int) -> Generator[Group]:
    """The group of `ranks` GPUs of this host; the other ranks run the command line of this process.

    Sets torch's current device to this rank's. Raises ConfigError if the model cannot be divided into `ranks` parts, or
    if the host has too few GPUs. If another rank fails, this process prints the error and exits.
    """
    if ranks == 1:
        yield ALONE
        return
    check_ranks(config, ranks)
    if torch.cuda.device_count() < ranks:
        raise ConfigError(f"ranks is {ranks}, but torch finds {torch.cuda.device_count()} GPUs")
    rank = own_rank()
    with tempfile.TemporaryDirectory() if rank == 0 else contextlib.nullcontext() as folder:
        meet = os.environ[MEET] if folder is None else str(Path(folder) / "meet")
        with _others(ranks, meet) if rank == 0 else _with_parent():
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
            torch.cuda.manual_seed(0)  # all ranks draw the same random numbers
            group = GpuGroup(meet, rank, ranks, device, rooms_of(config, ranks))
            try:
                yield group
                group.check()
            finally:
                group.close()


@contextlib.contextmanager
def _others(ranks: int, meet: str) -> Generator[None]:
    """Runs ranks 1 and up; they exit before the context ends."""
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
    """The command line of this process, without the interpreter."""
    return sys.orig_argv[1:]


def _watch(rank: int, process: "subprocess.Popen[bytes]", done: threading.Event) -> None:
    """Exits this process if another rank exits too early: it would otherwise wait in an all-reduce forever."""
    code = process.wait()
    if not done.is_set() and code:
        print(f"error: {RankLost(f'rank {rank} exited with code {code}')}", file=sys.stderr, flush=True)
        os._exit(1)


@contextlib.contextmanager
def _with_parent() -> Generator[None]:
    """Exits this process when the one that started it exits."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    yield
