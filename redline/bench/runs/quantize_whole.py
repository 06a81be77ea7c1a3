"""How long a whole `redline quantize` takes on a set of shards of Kimi's width, beside a copy of the same files.

    python -m redline.bench.runs.quantize_whole --folder /scratch --save benchmarks/results/quantize-whole.json

The set has a dense layer and one of experts at Kimi K2.6's shapes, INT4, random: its 384 experts are 9.5 GB, all
alike, which no level can make use of. `redline quantize` is a process of its own, from the command to its end: it
reads, rounds, hashes, writes and judges. Its files are read from the page cache where they fit. The floor is a copy of
the source's files to the same folder and their flushing to the disk.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from redline import clock
from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.errors import ConfigError
from redline.model.k2.write import random_checkpoint, tiny_config
from redline.progress import Working
from redline.wire.base import Record

SHARD_BYTES = 4 << 30
KIMI: dict[str, Any] = {
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
}


class Run(Record, frozen=True):
    """seconds: from the command to its end. peak_bytes: of the process's memory, resident."""

    level: str
    seconds: float
    int4_gb_s: float
    peak_bytes: int


class Measured(Record, frozen=True):
    """int4_bytes: of the routed experts, scales included; source_bytes: of all files."""

    int4_bytes: int
    source_bytes: int
    copy_seconds: float
    runs: tuple[Run, ...]


def _flushed(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def measure(folder: Path, experts: int, levels: tuple[str, ...], device: str | None) -> Measured:
    """Make the set in `folder`, copy it, and quantise it by each level. Raises ConfigError where a run fails."""
    source, out = folder / "source", folder / "out"
    config = tiny_config(num_hidden_layers=2, n_routed_experts=experts, **KIMI)
    with Working("writing the set", bar=False):
        random_checkpoint(source, config, 0, "int4", shard_bytes=SHARD_BYTES, experts_alike=True)
    one = config.hidden_size * config.moe_intermediate_size
    int4 = experts * 3 * (one // 2 + one // 32 * 2)
    files = list(source.glob("*.safetensors"))
    _flushed(source)
    began = clock.perf_counter()
    out.mkdir()
    for path in files:
        shutil.copyfile(path, out / path.name)
    _flushed(out)
    copied = clock.perf_counter() - began
    shutil.rmtree(out)
    runs: list[Run] = []
    for level in levels:
        words = [sys.executable, "-m", "redline", "quantize", str(source), str(out), "--level", level]
        words += [] if device is None else ["--device", device]
        began = clock.perf_counter()
        done = subprocess.run(words, capture_output=True, text=True)
        seconds = clock.perf_counter() - began
        if done.returncode:
            raise ConfigError(f"redline quantize --level {level}: {(done.stderr or done.stdout).strip()[-500:]}")
        print(done.stdout, flush=True)
        shutil.rmtree(out)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # of the largest so far
        runs.append(Run(level=level, seconds=seconds, int4_gb_s=int4 / seconds / 1e9, peak_bytes=peak))
    size = sum(path.stat().st_size for path in files)
    return Measured(int4_bytes=int4, source_bytes=size, copy_seconds=copied, runs=tuple(runs))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder with room for three times the set")
    parser.add_argument("--experts", type=count, default=384, help="of the layer of experts; 25 MB each")
    parser.add_argument("--level", action="append", choices=("fast", "search"), help="repeatable; absent: both")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--save", type=output, default=None)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if any(options.folder.iterdir()):
        raise ConfigError(f"--folder {options.folder}: is not empty")
    levels = tuple(options.level or ("fast", "search"))
    try:
        measured = measure(options.folder, options.experts, levels, options.device)
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() and options.device != "cpu" else None
    print(f"{measured.int4_bytes / 1e9:.2f} GB of INT4; a copy of the files takes {measured.copy_seconds:.1f} s")
    for one in measured.runs:
        print(
            f"{one.level:8} {one.seconds:6.1f} s  {one.int4_gb_s:6.2f} GB/s  {one.peak_bytes / 1e9:5.1f} GB at the peak"
        )
    if options.save is not None:
        record = {"run": provenance(), "gpu": gpu, "measured": msgspec.to_builtins(measured)}
        options.save.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


if __name__ == "__main__":
    program(main, heard=False)
