"""The work of `redline kernels build`."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from redline import clock
from redline.bench.record import provenance
from redline.cli.console import say
from redline.cli.kernels import BuildFlags
from redline.disk import check_output, save
from redline.errors import ConfigError
from redline.kernels.cuda import driver
from redline.kernels.cuda.chips import CHIPS, Chip
from redline.kernels.cuda.compile_ahead import Compiled, compile_for
from redline.kernels.cuda.kernel import why_not
from redline.model.eagle3.config import Eagle3Config
from redline.model.k2.config import K2Config
from redline.model.k2.shapes import shape
from redline.model.vision.config import KIMI_K26_VISION
from redline.model.vision.load import vision_config
from redline.progress import Working
from redline.run.graphs.absent import pieces_of
from redline.worker.engine import kv_dtype_of

NAMED = 12  # maximum number of kernels listed


def run(flags: BuildFlags, console: Console) -> int:
    """Returns the exit code. Raises ConfigError, CheckpointError and CudaError."""
    if (flags.folder is None) == (flags.shape is None):
        raise ConfigError("name a model's folder or a --shape, and not both")
    if flags.save is not None:
        check_output(flags.save)
    config = K2Config.from_folder(flags.folder) if flags.folder is not None else shape(flags.shape or "")
    target, dtype = _chip(flags.arch), kv_dtype_of(flags.kv_dtype)
    if (reason := driver.compiler_missing()) is not None:
        raise ConfigError(f"{reason}; a CUDA build of torch brings it, or `pip install nvidia-cuda-nvrtc`")
    length = flags.max_model_len or config.max_position_embeddings
    began = clock.monotonic()
    drafter = None
    if flags.draft is not None:
        drafter = Eagle3Config.from_folder(flags.draft, config)
        drafter.check(config, str(flags.draft / "config.json"))
    vision = KIMI_K26_VISION if config.hidden_size == KIMI_K26_VISION.text_hidden else None  # of a shape
    if flags.folder is not None:
        vision = vision_config(flags.folder, config.hidden_size)
    positions = 1 + flags.draft_tokens
    with Working(f"compiling for {target.arch}") as working, torch.inference_mode():
        pieces = pieces_of(config, flags.max_running, positions, length, dtype, drafter, flags.draft_head_bits, vision)
        made = compile_for(target, pieces, lambda made, whole: working.show(made, whole))
    say(console, f"{len(made)} kernels for {target.arch} ({target.products}) in {clock.monotonic() - began:.0f} s")
    rows = _rows(made)
    if not target.was_run:
        say(
            console, f"Redline has not been run on a {target.products}: test it there with `redline doctor --self-test`"
        )
    _say_those(console, "spill registers", [row for row in rows if row["spills"]], "spills")
    large = [row for row in rows if row["shared_memory"] > target.block_shared]
    _say_those(console, f"need more shared memory than the {target.block_shared:,} bytes of a block", large)
    if flags.save is not None:
        origin = provenance("torch", "triton")
        of = {"model": flags.shape or (flags.folder and flags.folder.name), "kv_dtype": flags.kv_dtype}
        of |= {key: origin[key] for key in ("commit", "date", "versions")}
        others: list[dict[str, Any]] = json.loads(flags.save.read_text()) if flags.save.exists() else []
        kept = [row for row in others if (row["model"], row["kv_dtype"]) != (of["model"], of["kv_dtype"])]
        save(flags.save, (json.dumps([*kept, *(row | of for row in rows)], indent=1) + "\n").encode())
        say(console, f"written to {flags.save}", "dim")
    return int(bool(large))


def _chip(arch: str | None) -> Chip:
    by_arch = {chip.arch: chip for chip in CHIPS}
    if arch is not None:
        if arch not in by_arch:
            raise ConfigError(f"--arch: {arch} is not supported; expected one of {', '.join(by_arch)}")
        return by_arch[arch]
    if (reason := why_not()) is not None:
        raise ConfigError(f"--arch is needed here: {reason}")
    major, minor = torch.cuda.get_device_capability()
    return by_arch[f"sm_{major}{minor}a"]


def _rows(made: Sequence[Compiled]) -> list[dict[str, Any]]:
    """A row for each kernel."""
    from redline.kernels.cuda.triton.ahead import resource_usage  # Triton is imported only on use

    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        for number, kernel in enumerate(made):
            file = Path(folder) / f"{number}.cubin"
            file.write_bytes(kernel.cubin)
            registers, stack = resource_usage(file)
            facts = {"registers": registers, "spills": stack, "shared_memory": kernel.shared}
            rows.append({"kernel": kernel.kernel, "variant": kernel.variant, **facts})
    return rows


def _say_those(console: Console, what: str, rows: Sequence[dict[str, Any]], key: str = "shared_memory") -> None:
    if not rows:
        return
    say(console, f"{len(rows)} kernels {what}:")
    for row in sorted(rows, key=lambda row: -row[key])[:NAMED]:
        say(console, f"  {row['kernel']}  {row[key]:,} bytes")
