"""`redline doctor`: what this machine has, what fits on it, and why. A model's config.json is enough to ask."""

import platform
from pathlib import Path

import torch
from rich.console import Console

from redline.bench.machine import measure
from redline.bench.record import cpu_name
from redline.disk import human
from redline.errors import CheckpointError, ConfigError
from redline.kernels.cpu import native
from redline.kernels.hopper.kernel import why_not
from redline.kernels.rates import WORKING_SET_BYTES
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.config import K2Config, Nvfp4Experts
from redline.quant.quantize import plan
from redline.quant.settings import QuantizeConfig
from redline.run.fit import KV_MOST, KV_PAGES_ALONE, KV_SHARE, KV_SHARE_ALONE, Sizes, fit
from redline.worker.config import EngineConfig
from redline.worker.engine import KV_DTYPES, free_memory, pick_device, sizes_of
from redline.worker.ways import aside

KIMI = (
    "Kimi K2.6 (61 layers, INT4 experts) is 594 GB of weights: it wants eight GPUs of 80 GB and more, or four of 180 GB"
)


def doctor(folder: Path | None, console: Console) -> int:
    """Measure and print; the exit code: 1 where the folder's files of weights are broken, else 0.

    Raises CheckpointError where config.json cannot be read, or is of a model that cannot be served.
    """

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    config = None if folder is None else K2Config.from_folder(folder)
    console.print("This machine", style="bold")
    say(f"python           {platform.python_version()}, torch {torch.__version__}")
    say(f"CPU              {cpu_name()}, {native.threads()} cores that this process may use")
    say(f"memory           {free_memory(torch.device('cpu')) / 1e9:.1f} GB free")
    built = native.library() is not None
    chip = f"{native.instruction_set()}, as REDLINE_CPU_ISA says" if native.instruction_set() else "this chip"
    say(f"CPU kernels      {f'built for {chip}' if built else native.why_not()}")
    device = pick_device(None)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        say(f"GPU              {torch.cuda.get_device_name(device)}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")
        reason = why_not()
        say(f"GPU kernels      {f'none: {reason}; the reference path runs' if reason else 'compiled when first used'}")
    else:
        say("GPU              none that torch sees")
    torch.set_num_threads(native.threads())
    machine = measure(device)
    say(f"reads memory at  {machine.bytes_per_s / 1e9:.1f} GB/s (measured)")
    say(f"multiplies at    {machine.flops_per_s / 1e12:.2f} TFLOP/s (measured)")
    say(f"fit              {KIMI}")
    if folder is None or config is None:
        return 0
    console.print(f"\n{folder}", style="bold", highlight=False, soft_wrap=True)
    files, sound = _files(folder)
    say(files)
    _checkpoint(config, device, console)
    if sound and any(folder.glob("*.safetensors")) and not isinstance(config.quantization, Nvfp4Experts):
        say(_quantizing(folder))
    return int(not sound)


def _quantizing(folder: Path) -> str:
    """What `redline quantize` would take: of memory at the peak, and of the disk."""
    work = plan(QuantizeConfig(source=str(folder), out=str(folder)), Checkpoint.open(folder))
    needs = f"{human(work.bytes)} of disk, at most {human(work.memory)} of memory for {work.workers} workers"
    return f"to NVFP4         {needs} (`redline quantize`)"


def _files(folder: Path) -> tuple[str, bool]:
    """The line about the files of weights, and whether they are sound; where there are none, nothing is wrong."""
    if not any(folder.glob("*.safetensors*")):
        return "files            config.json alone: what follows is arithmetic, and no weights are here yet", True
    try:
        checkpoint = Checkpoint.open(folder)
    except CheckpointError as error:
        return f"files            {error}; what follows is config.json's arithmetic", False
    return f"files            whole: {checkpoint.bytes / 1e9:,.2f} GB of weights, as stored", True


def _checkpoint(config: K2Config, device: torch.device, console: Console) -> None:
    free = free_memory(device)
    sizes = sizes_of(config, EngineConfig(), device, KV_DTYPES["bf16"], free)
    lines = [*config.explain_parameters(), *config.explain_weight_bytes()]
    lines.append(config.explain_kv_bytes(KV_DTYPES["bf16"]))
    lines.extend(_memory(sizes, free))
    if sizes.left(free, 1) > 0:
        lines.append(_floor(config, device))
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _memory(sizes: Sizes, free: int) -> list[str]:
    """What a server without flags takes, by the same figures as the server's own."""
    try:
        layout = fit(sizes, free, alone=True)
    except ConfigError as error:
        return [f"does not fit     {error}"]
    needs, left = sizes.needs(layout.max_model_len), sizes.left(free, layout.max_model_len)
    lines = needs.explain()[1:]  # the weights stand above
    if sizes.gpu_kernels:
        lines.extend(sizes.recorded_steps(layout.max_model_len).explain())
    if handoffs := aside("auto", torch.device(sizes.device), sizes.ranks):
        lines.append(
            f"handoff          {handoffs / 1e9:.2f} GB more where [[workers]] have roles, which is not in the sum"
        )
    lines.append(f"memory           {free / 1e9:.2f} GB free - {needs.whole / 1e9:.2f} GB = {left / 1e9:.2f} GB")
    share = f"{KV_SHARE:.0%} of that, at most {KV_MOST / 1e9:.2f} GB, and of one job at least"
    if sizes.gpu_kernels:
        most = f"at most {KV_PAGES_ALONE:,} pages"
        share = f"{KV_SHARE_ALONE:.0%} of that, {most}, where no other worker has the GPU (otherwise {share})"
    lines.append(f"for pages        {share} = {layout.kv_bytes / 1e9:.2f} GB")
    return [*lines, *layout.explain()]


def _floor(config: K2Config, device: torch.device) -> str:
    """The least time of a token. A small model's weights may live in a cache, which is faster than memory: bandwidth is
    measured over as many bytes as a token reads, or over so many that no cache holds them.
    """
    read = config.bytes_per_token
    machine = measure(device, working_set_bytes=min(read, WORKING_SET_BYTES))
    seconds = read / machine.bytes_per_s
    return (
        f"floor            a token reads {read / 1e6:,.1f} MB of weights: {seconds * 1e3:.2f} ms at "
        f"{machine.bytes_per_s / 1e9:.1f} GB/s (measured over so much), at most {1 / seconds:,.0f} tokens/s at batch 1"
    )
