"""Identifies a folder by its config.json and the first bytes of its files; imports no torch and reads no weights.

The error names what was found: a drafter, an unsupported model, Git LFS pointers, an empty folder. A folder that passes
may still be refused when config.json is parsed completely (`model.k2.config`, `model.eagle3.config`).
"""

from pathlib import Path
from typing import Any

import msgspec

from redline.errors import CheckpointError

SERVED = "kimi_k25", "kimi_k2", "deepseek_v3"  # supported values of model_type
POINTER = b"version https://git-lfs"
PAGE = b"<!doctype", b"<html"
HEAD_BYTES = 64
MOST_CONFIG_BYTES = 16 << 20


def check_model(folder: Path, *, weights: bool = True) -> None:
    """Raise CheckpointError, one line, if the folder contains no model of a family that Redline serves.

    weights: whether the weight files and the vocabulary are required; if False, config.json is enough.
    """
    config = _config(folder, "a model's")
    if _is_drafter(config):
        raise CheckpointError(
            f"{folder}: a drafter ({_architecture(config)}), not a model; name the model's folder, and this one with "
            f"--draft {folder}"
        )
    if config.get("model_type") not in SERVED:
        raise CheckpointError(
            f"{folder}: model_type is {_shown(config.get('model_type'))} ({_architecture(config)}); Redline serves "
            f"models of Kimi K2's and DeepSeek-V3's class: their model_type is {', '.join(SERVED[:-1])} or {SERVED[-1]}"
        )
    if weights:
        _check_files(folder, ["tiktoken.model", "tokenizer.json"])


def check_drafter(folder: Path) -> None:
    """Raise CheckpointError, one line, if the folder contains no drafter."""
    config = _config(folder, "a drafter's")
    if not _is_drafter(config):
        raise CheckpointError(
            f"{folder}: a model ({_architecture(config)}), not a drafter; the config.json of an EAGLE-3, DFlash or "
            "DSpark drafter names it in `architectures`"
        )
    _check_files(folder, [])


def _config(folder: Path, whose: str) -> dict[str, Any]:
    expected = f"expected {whose} folder with config.json and *.safetensors"
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such folder; {expected}")
    if not folder.is_dir():
        kind = "a GGUF file, which llama.cpp reads" if _head(folder).startswith(b"GGUF") else "a file"
        raise CheckpointError(f"{folder}: {kind}; {expected}")
    path = folder / "config.json"
    if not path.exists():
        raise CheckpointError(f"{path}: missing: {_contents(folder)}; {expected}")
    _check_head(path)
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(MOST_CONFIG_BYTES), type=dict[str, Any])
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected one JSON object: {error}") from None


def _contents(folder: Path) -> str:
    """Describes a folder that has no config.json, for the error message."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        return f"the folder cannot be read ({error.strerror})"
    if not names:
        return "the folder is empty"
    for name in names:
        if (folder / name / "config.json").is_file():
            return f"the model may be in {folder / name}"
    if any(name.endswith(".gguf") for name in names):
        return "the folder has GGUF files, which llama.cpp reads"
    return f"the folder has {', '.join(names[:3])}{' and others' if names[3:] else ''}"


def _is_drafter(config: dict[str, Any]) -> bool:
    names = _architecture(config).lower()
    return any(kind in names for kind in ("eagle", "dflash", "dspark")) or "eagle_aux_hidden_state_layer_ids" in config


def _architecture(config: dict[str, Any]) -> str:
    match config.get("architectures"):
        case [str(name), *_]:
            return _shown(name)
        case _:
            return "without architectures"


def _shown(value: object) -> str:
    return str(value)[:80] if isinstance(value, str) else "not given" if value is None else repr(value)[:80]


def _check_files(folder: Path, names: list[str]) -> None:
    """Check the heads of the weight files, and of those of `names` that exist. Raises CheckpointError."""
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(f"{folder}: config.json alone: no *.safetensors is here yet; download the weights to it")
    for path in [*(folder / name for name in names if (folder / name).exists()), *shards]:
        _check_head(path)


def _check_head(path: Path) -> None:
    head = _head(path)
    if head.startswith(POINTER):
        raise CheckpointError(
            f"{path}: a Git LFS pointer of {path.stat().st_size} bytes, and not the file: run `git lfs pull` in "
            f"{path.parent}"
        )
    if head.lstrip().lower().startswith(PAGE):
        raise CheckpointError(f"{path}: a web page, and not the file: download it again")
    if not head:
        raise CheckpointError(f"{path}: empty: download it again")


def _head(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
