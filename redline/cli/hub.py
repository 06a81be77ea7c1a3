"""Downloads a model named as on Hugging Face, OWNER/NAME, after printing the required space."""

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from redline.disk import human
from redline.errors import ConfigError

NAME = re.compile(r"[\w-]+/[\w.-]+")
WANTED = ["*.json", "*.safetensors", "*.model", "*.jinja"]  # no code, no figures
HEADROOM = 1.02  # of the disk space: for files written in addition to the model's


def fetched(source: Path, console: Console) -> Path:
    """The folder of the model, downloaded if it is not here yet; any other source is returned unchanged.

    Files go to Hugging Face's own cache (HF_HOME), which vLLM and transformers read too. An interrupted download is
    resumed. Raises ConfigError if the download fails, and, before it begins, if the disk or this machine's memory is
    too small.
    """
    if source.exists() or source.parent.exists() or not NAME.fullmatch(str(source)):
        return source
    if importlib.util.find_spec("huggingface_hub") is None:
        return source  # the error of `deployment.read` contains the command to download it
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    name = str(source)
    try:
        _look(name, _snapshot(name, dry_run=True), Path(constants.HF_HUB_CACHE), console)
        return Path(_snapshot(name))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = error.__cause__ or error  # a dry run's own error has no details
        if isinstance(why, GatedRepoError):
            raise ConfigError(f"{name}: its owner must grant you access first; then run `hf auth login`") from None
        if isinstance(why, RepositoryNotFoundError):
            raise ConfigError(f"{name}: no such folder here, and no such model at {constants.ENDPOINT}") from None
        return _kept(name, why)


def _snapshot(name: str, **how: bool) -> Any:
    """The folder of the model's files; with dry_run a list of the files, and whether each is here."""
    import huggingface_hub
    from huggingface_hub import utils

    if how.get("dry_run"):
        utils.disable_progress_bars()
    try:
        return huggingface_hub.snapshot_download(name, allow_patterns=WANTED, **how)  # pyright: ignore
    finally:
        utils.enable_progress_bars()


def _kept(name: str, error: BaseException) -> Path:
    """The folder of an earlier download, if the hub cannot be reached. Raises ConfigError if there is none."""
    from huggingface_hub import constants

    try:
        return Path(_snapshot(name, local_files_only=True))
    except Exception:  # of any kind: the first error has the reason
        why = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{name}: cannot be fetched from {constants.ENDPOINT}: {why}") from None


def _look(name: str, files: list[Any], cache: Path, console: Console) -> None:
    """Print the required space. Raises ConfigError if the disk or the memory is too small."""
    from redline.worker.engine import free_memory, pick_device

    whole = sum(file.file_size for file in files)
    weights = sum(file.file_size for file in files if file.filename.endswith(".safetensors"))
    missing = sum(file.file_size for file in files if file.will_download)
    place = cache
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    device = pick_device(None)
    memory = free_memory(device)
    if device.type == "cuda":
        import torch

        memory *= torch.cuda.device_count()
    if not weights:
        raise ConfigError(f"{name}: it has no *.safetensors; Redline serves checkpoints as published by Moonshot")
    if weights > memory:
        raise ConfigError(
            f"{name}: its weights are {human(weights)}, and this machine has {human(memory)} of memory for them; "
            "see `redline doctor --on '8 x H200'` for predictions on other machines"
        )
    if missing * HEADROOM > free:
        raise ConfigError(
            f"{name}: {human(missing)} to fetch, and {cache} has {human(free)} free; "
            "set HF_HOME to a folder on another disk"
        )
    if missing:
        console.print(
            f"{name}: {human(missing)} of {human(whole)} to fetch into {cache} ({human(free)} free there, "
            f"{human(memory)} of memory free); Ctrl-C stops it, the same command resumes",
            highlight=False,
            soft_wrap=True,
        )
