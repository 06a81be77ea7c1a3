"""How fast a checkpoint is loaded from a disk, beside a plain read of the same files, and what memory each rank takes.

    python -m redline.bench.runs.load_rate --folder /scratch [--gb 4] [--ranks 1 2] [--rounds 2] [--device cuda]
        [--save benchmarks/results/load-rate-cpu.json]

A random checkpoint of Kimi's widths is written into the folder, in shards as they are published; nearly all of it are
INT4 experts. In each round its files are taken out of the page cache and read plainly, by one thread and by several;
then, taken out again, loaded by a worker's own `load_model`, by so many ranks, each a process; and once more from the
cache, which shows what of it is no reading. `disk_share` is what the system fetched from a disk meanwhile, of the
files: below 1 the cache was not empty, above it something was read twice. A cache below this system, of a virtual disk
or a server of files, shows in nothing here but in later reads that are faster. Processes start before the clock does.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from redline.bench.disk_rate import THREADS, Read, forget, read
from redline.bench.machine import device_name
from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.bench.runs.load_rank import Task, Took
from redline.disk import save
from redline.errors import ConfigError
from redline.kernels.cpu import native
from redline.model.k2.shapes import KIMI_K26
from redline.model.k2.write import random_checkpoint
from redline.progress import Working
from redline.wire.base import Record
from redline.worker.engine import pick_device

SHARD_BYTES = 1 << 30
EXPERT_BYTES, LAYER_BYTES = 24_772_608, 300_000_000  # of Kimi's widths: an expert in INT4; a layer without its experts
LAYERS = 2
READY_S, LOAD_S = 180.0, 900.0  # for ranks to be ready; for them to load


class Load(Record, frozen=True):
    """A load by `ranks` processes.

    gb_per_s           the files' bytes over the time from the first rank's begin to the last one's end
    of_plain           over the fastest plain read of the same round
    disk_share         of the files' bytes, fetched by all ranks together
    processor_s        of all ranks
    beside_bytes       the most that any rank's process held beyond the part that it keeps
    device_beside_bytes  likewise of a GPU's memory
    part_bytes         of the rank that keeps the most
    largest_bytes      the largest tensor
    """

    ranks: int
    cached: bool
    seconds: float
    gb_per_s: float
    of_plain: float
    disk_share: float | None
    processor_s: float
    beside_bytes: int
    device_beside_bytes: int
    part_bytes: int
    largest_bytes: int


class Round(Record, frozen=True):
    """One after another: plain reads, then loads, each from an empty cache unless it says otherwise."""

    reads: tuple[Read, ...]
    loads: tuple[Load, ...]


def write(folder: Path, size: int) -> None:
    """A random checkpoint of about `size` bytes. Every expert holds the same, which no reader can make use of."""
    experts = max(8, (size - LAYERS * LAYER_BYTES) // LAYERS // EXPERT_BYTES)
    config = replace(
        KIMI_K26, num_hidden_layers=LAYERS, first_k_dense_replace=0, n_routed_experts=experts, vocab_size=1024
    )
    with Working("writing the checkpoint", bar=False):
        random_checkpoint(folder, config, shard_bytes=SHARD_BYTES, experts_alike=True)


def shards(folder: Path) -> list[Path]:
    """The files that are read."""
    return sorted(folder.glob("*.safetensors"))


def load(folder: Path, ranks: int, device: torch.device, *, cached: bool, plain: float) -> Load:
    """By so many processes. plain: GB/s of the plain read that it stands beside. Raises ConfigError where one fails."""
    files = shards(folder)
    whole = sum(path.stat().st_size for path in files)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if device.type == "cpu" else None) as meet:
        took = _of_ranks(folder, ranks, device, Path(meet), () if cached else files)
    seconds = max(one.ended for one in took) - min(one.began for one in took)
    fetched = [one.disk_bytes for one in took]
    known = [one for one in fetched if one is not None]
    return Load(
        ranks=ranks,
        cached=cached,
        seconds=round(seconds, 3),
        gb_per_s=round(whole / seconds / 1e9, 3),
        of_plain=round(whole / seconds / 1e9 / plain, 3),
        disk_share=round(sum(known) / whole, 3) if len(known) == len(fetched) else None,
        processor_s=round(sum(one.user_s + one.kernel_s for one in took), 2),
        beside_bytes=max(one.host_peak_bytes - one.host_bytes for one in took),
        device_beside_bytes=max(one.device_peak_bytes - one.device_bytes for one in took),
        part_bytes=max(one.device_bytes or one.host_bytes for one in took),
        largest_bytes=max(one.largest_bytes for one in took),
    )


def _of_ranks(folder: Path, ranks: int, device: torch.device, meet: Path, files: Sequence[Path]) -> list[Took]:
    """What each rank took. files: to be forgotten before they begin."""
    if ranks > 1 and device.type == "cpu":
        from redline.kernels.cpu.ranks import SharedMemoryGroup
        from redline.worker.ranks import MEET

        SharedMemoryGroup.create(meet / MEET, ranks)
    command = [sys.executable, "-m", "redline.bench.runs.load_rank"]
    started: list[subprocess.Popen[str]] = []
    too_late = threading.Timer(READY_S + LOAD_S, lambda: [one.kill() for one in started])
    too_late.start()
    try:
        for _ in range(ranks):
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        for rank, one in enumerate(started):
            task = Task(folder=str(folder), rank=rank, ranks=ranks, device=device.type, meet=str(meet))
            _say(one, msgspec.json.encode(task).decode())
        for one in started:
            _hear(one)
        forget(files)
        for one in started:
            _say(one, "")
        return [msgspec.json.decode(_hear(one), type=Took) for one in started]
    finally:
        too_late.cancel()
        for one in started:
            one.kill()
            one.communicate()


def _say(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _hear(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise ConfigError(f"a rank has ended with code {process.wait()} before it had loaded; what it said is above")
    return line


def measure(folder: Path, ranks: Sequence[int], device: torch.device, rounds: int) -> list[Round]:
    """So many rounds over the checkpoint in a folder, printed as they come."""
    found: list[Round] = []
    for _ in range(rounds):
        reads: list[Read] = []
        for threads in THREADS:
            forget(shards(folder))
            reads.append(read(shards(folder), threads))
            print(_line("plain read", reads[-1]), flush=True)
        plain = max(one.gb_per_s for one in reads)
        loads: list[Load] = []
        for number in ranks:
            for cached in (False, True):
                loads.append(load(folder, number, device, cached=cached, plain=plain))
                print(_line("load", loads[-1]), flush=True)
        found.append(Round(reads=tuple(reads), loads=tuple(loads)))
    return found


def _line(what: str, record: Record) -> str:
    return f"{what:10}  " + "  ".join(f"{name} {value}" for name, value in msgspec.to_builtins(record).items())


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians over the rounds, of each number of ranks."""
    told: dict[str, Any] = {"plain_gb_per_s": statistics.median(max(r.gb_per_s for r in one.reads) for one in rounds)}
    for ranks in dict.fromkeys(load.ranks for load in rounds[0].loads):
        cold, cached = (
            [load for one in rounds for load in one.loads if load.ranks == ranks and load.cached == wanted]
            for wanted in (False, True)
        )
        told[f"ranks_{ranks}"] = {
            "gb_per_s": statistics.median(load.gb_per_s for load in cold),
            "of_plain": statistics.median(load.of_plain for load in cold),
            "cached_gb_per_s": statistics.median(load.gb_per_s for load in cached),
            "processor_s": statistics.median(load.processor_s for load in cold),
            "beside_bytes": max(load.beside_bytes for load in cold + cached),
            "device_beside_bytes": max(load.device_beside_bytes for load in cold + cached),
        }
    return told


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="on the disk that is measured: a new one, which is removed at the end",
    )
    parser.add_argument("--gb", type=float, default=4.0, help="of the checkpoint")
    parser.add_argument("--ranks", type=count, nargs="+", default=(1, 2))
    parser.add_argument("--rounds", type=count, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--save", type=output, default=None)
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"--folder {folder}: is not empty")
    device = pick_device(options.device)
    native.library()  # built once, here
    try:
        write(folder, int(options.gb * 1e9))
        size = sum(path.stat().st_size for path in shards(folder))
        rounds = measure(folder, options.ranks, device, options.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    told = summary(rounds)
    print(json.dumps(told, indent=1))
    if options.save is not None:
        body = {
            "what": "loads of a checkpoint beside plain reads of its files, from an empty page cache",
            "command": f"python -m redline.bench.runs.load_rate {' '.join(sys.argv[1:])}",
            **provenance("torch"),
            "device": device_name(device),
            "load_average": round(os.getloadavg()[0], 1),
            "bytes": size,
            "layers": LAYERS,
            **told,
            "rounds": msgspec.to_builtins(rounds),
        }
        save(options.save, (json.dumps(body, indent=1) + "\n").encode())


if __name__ == "__main__":
    program(main, heard=False)
