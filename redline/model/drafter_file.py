"""Reads and writes a drafter's weights; every tensor is checked before any is used.

They are model.safetensors, or the files that model.safetensors.index.json names. Both names of EAGLE-3's layer
(`layers.0.`, `midlayer.`) and of its feature norms are accepted, and a prefix `model.`. A tensor that the config does
not need is an error, so that no weight is silently ignored.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from redline.errors import CheckpointError
from redline.model.k2.config import read_json

_SPELLINGS = (
    ("midlayer.", "layers.0."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
)
_DTYPES = {"d2t": ("I64", "I32"), "t2d": ("BOOL",)}
_FLOATS = ("BF16", "F16", "F32")
_COMPUTED = "rotary_emb.inv_freq"  # stored in some files; computed from the config here
_EMBEDDING = "embed_tokens.weight"


class DrafterShape(Protocol):
    """What the checks of a drafter's tensors read of its config."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def target_hidden_size(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int | None: ...
    @property
    def layer_ids(self) -> tuple[int, ...]: ...


def stored_names(folder: Path | str) -> set[str]:
    """The tensors of a folder, by our names. CheckpointError if a file is missing or broken."""
    with _Files(folder) as files:
        return set(files.names)


def read_tensors(folder: Path | str, config: DrafterShape, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of these names and shapes: weights in bf16, d2t int64, t2d bool.

    wanted  our names, with tensors of the expected shapes; their data is not read

    The file may contain embed_tokens of the right shape: it is ignored, since the target's embedding is used.
    CheckpointError names the first tensor that is missing, unexpected, or of a wrong shape or type, or a vocabulary
    table that does not fit.
    """
    with _Files(folder) as files:
        path, names = files.path, files.names
        shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
        optional = {_EMBEDDING: (config.vocab_size, config.hidden_size), "t2d": (config.vocab_size,)}
        if config.draft_vocab_size is not None:
            optional["d2t"] = (config.draft_vocab_size,)
        for name, (file, stored) in names.items():
            shape = shapes.get(name) or optional.get(name)
            if shape is None:
                raise CheckpointError(f"{path}: {stored}: expected nothing of that name{_why_not_expected(name)}")
            _check(path, stored, name, shape, file.get_slice(stored), config)
        for name, shape in shapes.items():
            if name not in names and name != "t2d":
                raise CheckpointError(f"{path}: {name}: missing; expected {list(shape)}{_why_expected(name)}")
        read = {name: files.tensor(name) for name in _DTYPES if name in names}
        tables: dict[str, Tensor] = {}
        if "d2t" in read:
            d2t = read["d2t"].long()
            known = _known(path, d2t, config.vocab_size)
            if "t2d" in read and not torch.equal(read["t2d"], known):
                raise CheckpointError(f"{path}: t2d: marks other tokens than those that d2t points to")
            if "d2t" in wanted:
                tables = {"d2t": d2t, "t2d": known}
        weights = {name: files.tensor(name) for name in names if name not in {_EMBEDDING, *_DTYPES}}
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()} | tables


def as_stored(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights in bf16; index tables unchanged."""
    return {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in state.items()
    }


def write_folder(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes config.json and model.safetensors; creates the folder. tensors: contiguous, on the CPU."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".writing-", dir=folder) as building:
        weights, text = Path(building) / "model.safetensors", Path(building) / "config.json"
        save_file(tensors, weights, metadata={"format": "pt"})
        text.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for path in (weights, text):
            path.chmod(0o644)  # safetensors makes files that only their owner can read
            path.replace(folder / path.name)


class _Files:
    """The open files of a folder's weights, and in `names` the file and the stored name of each tensor of ours."""

    def __init__(self, folder: Path | str) -> None:
        self.path = Path(folder) / "model.safetensors"
        self.names: dict[str, tuple[Any, str]] = {}
        self._opened = ExitStack()

    def __enter__(self) -> "_Files":
        with self._opened:
            for path in self._paths():
                self._read(path)
            self._opened = self._opened.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._opened.close()

    def tensor(self, name: str) -> Tensor:
        file, stored = self.names[name]
        return file.get_tensor(stored)

    def _paths(self) -> list[Path]:
        index = self.path.with_suffix(".safetensors.index.json")
        if self.path.is_file() or not index.is_file():
            return [self.path]
        named = read_json(index).get("weight_map")
        if not isinstance(named, dict) or not named:
            raise CheckpointError(f"{index}: weight_map is {str(named)[:80]}; expected the file of each tensor")
        self.path = index
        return [index.parent / Path(str(name)).name for name in sorted(set(named.values()))]

    def _read(self, path: Path) -> None:
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; a drafter's weights are this file, or those of an index")
        try:
            file = self._opened.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: truncated or not safetensors: {error}") from None
        for stored in file.keys():  # noqa: SIM118 (not a dict)
            name = _name(stored)
            if name.endswith(_COMPUTED):
                continue
            if name in self.names:
                raise CheckpointError(f"{path}: {stored}: a second tensor of that name; expected one")
            self.names[name] = file, stored


def _name(stored: str) -> str:
    stored = stored.removeprefix("model.")
    for theirs, ours in _SPELLINGS:
        if stored.startswith(theirs):
            return ours + stored.removeprefix(theirs)
    return stored


def _check(path: Path, stored: str, name: str, shape: tuple[int, ...], found: Any, config: DrafterShape) -> None:
    dtypes = _DTYPES.get(name, _FLOATS)
    if found.get_dtype() in dtypes and tuple(found.get_shape()) == shape:
        return
    why = ""
    states = found.get_shape()[-1] / config.target_hidden_size if found.get_shape() else 0
    if name == "fc.weight" and states != len(config.layer_ids):
        why = f": it reads {states:g} states of the target, and {len(config.layer_ids)} layer ids are given"
    raise CheckpointError(
        f"{path}: {stored}: expected {' or '.join(dtypes)} {list(shape)}, found {found.get_dtype()} "
        f"{found.get_shape()}{why}"
    )


def _known(path: Path, d2t: Tensor, vocabulary: int) -> Tensor:
    """bool [vocabulary]: the target tokens that d2t points to."""
    ids = d2t + torch.arange(len(d2t))
    for draft, token in enumerate(ids.tolist()):
        if not 0 <= token < vocabulary:
            raise CheckpointError(f"{path}: d2t: draft id {draft} is token {token}; the target has {vocabulary} tokens")
    known = torch.zeros(vocabulary, dtype=torch.bool)
    known[ids] = True
    if int(known.sum()) != len(ids):
        raise CheckpointError(f"{path}: d2t: two draft ids are the same token; expected different ones")
    if len(ids) == vocabulary and bool(d2t.any()):
        raise CheckpointError(f"{path}: d2t: reorders a full vocabulary; expected zeros, or no d2t")
    return known


def _why_not_expected(name: str) -> str:
    if name.startswith("fc_norm."):
        return ": config.json has no fc_norm, or names fewer layer ids"
    if name in ("d2t", "t2d"):
        return ": config.json has no draft_vocab_size"
    return ""


def _why_expected(name: str) -> str:
    if name == "lm_head.weight":
        return ", since config.json has draft_vocab_size; without it the target's head is used"
    return ", since config.json has fc_norm" if name.startswith("fc_norm.") else ""
