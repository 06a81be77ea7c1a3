"""`redline doctor`: this machine's hardware, what fits on it, and why. For a model, config.json is enough."""

import platform
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from redline.bench.machine import measure
from redline.bench.record import cpu_name
from redline.cli.doctor_on import LABEL, say_line, would_do
from redline.disk import human
from redline.errors import CheckpointError, ConfigError
from redline.folder import check_drafter
from redline.kernels.cpu import native
from redline.kernels.cuda.kernel import why_not
from redline.kernels.rates import WORKING_SET_BYTES
from redline.media.rules import ImageRules
from redline.model.eagle3.config import Eagle3Config
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.config import K2Config, Nvfp4Experts
from redline.model.k2.shapes import KIMI_K26
from redline.model.vision.load import vision_config
from redline.progress import Working
from redline.quant.quantize import plan
from redline.quant.settings import QuantizeConfig
from redline.run.fit import KV_MOST, KV_PAGES_ALONE, KV_SHARE, KV_SHARE_ALONE, Layout, MemorySizes, fit
from redline.worker.config import EngineConfig
from redline.worker.engine import IMAGE_TOKENS, KV_DTYPES, free_memory, pick_device, sizes_of, vision_bytes
from redline.worker.transfer_paths import aside


def doctor(folder: Path | None, console: Console) -> int:
    """Measure and print; returns the exit code: 1 if the folder's weight files are broken, else 0.

    Raises CheckpointError if config.json cannot be read, or if its model is not supported.
    """

    def say(text: str) -> None:
        say_line(console, text[:LABEL].rstrip(), text[LABEL:])

    config = None if folder is None else K2Config.from_folder(folder)
    device = pick_device(None)
    torch.set_num_threads(native.threads())
    with Working("measuring this machine"):
        machine = measure(device)
        found = None if folder is None or config is None else _found(folder, config, device)
    if found is None:
        say("verdict          name a folder to check whether its model fits; `redline serve --nano` fits anywhere")
    else:
        for line in _verdict(found):
            say(line)
    console.print("\nThis machine", style="bold")
    say(f"python           {platform.python_version()}, torch {torch.__version__}")
    say(f"CPU              {cpu_name()}, {native.threads()} cores available to this process")
    say(f"memory           {free_memory(torch.device('cpu')) / 1e9:.1f} GB free")
    built = native.library() is not None
    chip = f"{native.instruction_set()}, set by REDLINE_CPU_ISA" if native.instruction_set() else "this chip"
    say(f"CPU kernels      {f'built for {chip}' if built else native.why_not()}")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        say(f"GPU              {torch.cuda.get_device_name(device)}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")
        reason = why_not()
        kernels = f"none: {reason}; the reference path is used" if reason else "compiled at the first start"
        say(f"GPU kernels      {kernels}")
    else:
        say("GPU              none found by torch")
    say(f"reads memory at  {machine.bytes_per_s / 1e9:.1f} GB/s (measured)")
    say(f"multiplies at    {machine.flops_per_s / 1e12:.2f} TFLOP/s (measured)")
    kimi = f"Kimi K2.6 (61 layers, INT4 experts) is {KIMI_K26.weight_bytes / 1e9:,.0f} GB of weights"
    say(f"fit              {kimi}: the fewest GPUs that hold it are {would_do(KIMI_K26)} (`redline doctor --on`)")
    if found is None:
        return 0
    config = found.config
    console.print(f"\n{found.folder}", style="bold", highlight=False, soft_wrap=True)
    say(found.files.line)
    for line in (*config.explain_parameters(), *config.explain_weight_bytes()):
        say(line)
    say(config.explain_kv_bytes(KV_DTYPES["bf16"]))
    if found.layout is None:
        say(f"does not fit     {found.why_not}")
    else:
        for line in _memory(found.sizes, found.free, found.images, found.layout):
            say(line)
    if found.floor is not None:
        say(found.floor.line)
    checkpoint = found.files.checkpoint
    if checkpoint is not None and not isinstance(config.quantization, Nvfp4Experts):
        say(_quantizing(found.folder, checkpoint))
    return int(found.files.broken is not None)


def _quantizing(folder: Path, checkpoint: Checkpoint) -> str:
    """The peak memory and the disk space that `redline quantize` would take."""
    work = plan(QuantizeConfig(source=str(folder), out=str(folder)), checkpoint)
    needs = f"{human(work.bytes)} of disk, at most {human(work.memory)} of memory for {work.workers} workers"
    return f"to NVFP4         {needs} (`redline quantize`)"


class _Files(NamedTuple):
    """A folder's weight files. checkpoint: None if there are none, or if they are broken; `broken` is the error."""

    checkpoint: Checkpoint | None
    broken: str | None = None

    @property
    def line(self) -> str:
        if self.broken is not None:
            return f"files            {self.broken}; the figures below are computed from config.json"
        if self.checkpoint is None:
            return "files            config.json alone, no weights yet: the figures below are computed from it"
        return f"files            complete: {self.checkpoint.bytes / 1e9:,.2f} GB of weights, as stored"


def _files(folder: Path) -> _Files:
    if not any(folder.glob("*.safetensors*")):
        return _Files(None)
    try:
        return _Files(Checkpoint.open(folder))
    except CheckpointError as error:
        return _Files(None, str(error))


class _Floor(NamedTuple):
    """The minimum time of a token, as a line of text, and the tokens/s that it allows."""

    tokens_per_s: float
    line: str


class _Found(NamedTuple):
    """How a folder's model fits this machine. free: bytes of free device memory. images: bytes for reading images.
    layout: None if the model does not fit; `why_not` is then the reason."""

    folder: Path
    config: K2Config
    files: _Files
    sizes: MemorySizes
    free: int
    images: int
    layout: Layout | None
    why_not: str
    floor: _Floor | None


def _found(folder: Path, config: K2Config, device: torch.device) -> _Found:
    free = free_memory(device)
    tower = None if ImageRules.of_model(folder) is None else vision_config(folder, config.hidden_size)
    images = 0 if tower is None else vision_bytes(tower, device)
    sizes = sizes_of(config, EngineConfig(), device, KV_DTYPES["bf16"], free - images)
    layout, why_not = None, ""
    try:
        layout = fit(sizes, free - images, alone=True)
    except ConfigError as error:
        why_not = str(error)
    floor = _floor(config, device) if sizes.left(free - images, 1) > 0 else None
    return _Found(folder, config, _files(folder), sizes, free, images, layout, why_not, floor)


def _verdict(found: _Found) -> Iterator[str]:
    """Whether the model fits, the speed it would reach, and the commands to run."""
    where = shlex.quote(str(found.folder))
    if found.layout is None or found.floor is None:
        yield f"verdict          does not fit: {found.why_not}"
        yield f"would do         {would_do(found.config)}: see `redline doctor {where} --on MACHINE`"
        return
    speed = f"at most {found.floor.tokens_per_s:,.0f} tokens/s of one stream"
    yield f"verdict          fits: room for {found.layout.tokens:,} tokens of KV cache, {speed}"
    if found.files.broken is not None:
        yield f"but              {found.files.broken}"
        return
    draft, about = _drafter(found)
    yield f"run              redline serve {where}{draft}" + (
        "" if found.files.checkpoint else ", once it has its weights"
    )
    yield from about
    yield f"verify           redline verify {where}"


def _drafter(found: _Found) -> tuple[str, list[str]]:
    """The flag of `serve` for the drafter next to the model, in FOLDER-eagle3, and a line about it; empty without."""
    folder = found.folder if found.folder.name.strip(".") else found.folder.resolve()
    beside = folder.with_name(f"{folder.name}-eagle3")
    if not (beside / "config.json").is_file():
        return "", []
    try:
        check_drafter(beside)
        Eagle3Config.from_folder(beside, found.config).check(found.config, str(beside))
    except CheckpointError as error:
        return "", [f"drafter          not used: {error}"]
    about = f"drafter          {beside} is next to the model; its memory is not included in the figures below"
    return f" --draft {shlex.quote(str(beside))}", [about]


def _memory(sizes: MemorySizes, free: int, images: int, layout: Layout) -> list[str]:
    """The memory of a server without flags, computed by the server's own code. images: as in `_Found`."""
    needs, left = sizes.needs(layout.max_model_len), sizes.left(free - images, layout.max_model_len)
    lines = needs.explain()[1:]  # without the weights, which are listed above
    if sizes.gpu_kernels:
        lines.extend(sizes.recorded_steps(layout.max_model_len).explain())
    if handoffs := aside("auto", torch.device(sizes.device), sizes.ranks):
        lines.append(
            f"handoff          {handoffs / 1e9:.2f} GB more if [[workers]] have roles, not included in the sum"
        )
    if images:
        parts = f"the vision tower, embeddings of {IMAGE_TOKENS:,} tokens, activations"
        lines.append(f"images           {images / 1e9:.2f} GB: {parts}")
    whole = needs.whole + images
    lines.append(f"memory           {free / 1e9:.2f} GB free - {whole / 1e9:.2f} GB = {left / 1e9:.2f} GB")
    share = f"{KV_SHARE:.0%} of that, at most {KV_MOST / 1e9:.2f} GB, and at least enough for one job"
    if sizes.gpu_kernels:
        most = f"at most {KV_PAGES_ALONE:,} pages"
        share = f"{KV_SHARE_ALONE:.0%} of that, {most}, if no other worker uses the GPU (otherwise {share})"
    lines.append(f"for pages        {share} = {layout.kv_bytes / 1e9:.2f} GB")
    return [*lines, *layout.explain()]


def _floor(config: K2Config, device: torch.device) -> _Floor:
    """The minimum time of a token. A small model's weights may fit into a cache, which is faster than memory, so the
    bandwidth is measured over the bytes that a token reads, up to a size that no cache holds.
    """
    read = config.bytes_per_token
    machine = measure(device, working_set_bytes=min(read, WORKING_SET_BYTES))
    seconds = read / machine.bytes_per_s
    return _Floor(
        1 / seconds,
        f"floor            a token reads {read / 1e6:,.1f} MB of weights: {seconds * 1e3:.2f} ms at "
        f"{machine.bytes_per_s / 1e9:.1f} GB/s (measured over that size), at most {1 / seconds:,.0f} tokens/s, batch 1",
    )
