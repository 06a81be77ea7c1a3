"""Reads a drafter's model.safetensors; every tensor is checked before any is used.

Both names of the layer (`layers.0.`, `midlayer.`) and of the feature norms are accepted. A tensor that the config does
not need is an error, so that no weight is silently ignored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from redline.errors import CheckpointError
from redline.model.eagle3.config import Eagle3Config

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


def stored_tensors(folder: Path | str) -> dict[str, str]:
    """Our name of each tensor -> its name in the file. CheckpointError if the file is missing or broken."""
    with _open(folder) as (path, file):
        names: dict[str, str] = {}
        for stored in file.keys():  # noqa: SIM118 (not a dict)
            name = _name(stored)
            if name.endswith(_COMPUTED):
                continue
            if name in names:
                raise CheckpointError(f"{path}: {stored}: a second tensor of that name; expected one")
            names[name] = stored
        return names


def read_tensors(folder: Path | str, config: Eagle3Config, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of these names and shapes: weights in bf16, d2t int64, t2d bool.

    wanted  our names, with tensors of the expected shapes; their data is not read

    The file may contain embed_tokens of the right shape: it is ignored, since the target's embedding is used.
    CheckpointError names the first tensor that is missing, unexpected, or of a wrong shape or type, or a vocabulary
    table that does not fit.
    """
    names = stored_tensors(folder)
    with _open(folder) as (path, file):
        shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
        optional = {_EMBEDDING: (config.vocab_size, config.hidden_size), "t2d": (config.vocab_size,)}
        if config.draft_vocab_size is not None:
            optional["d2t"] = (config.draft_vocab_size,)
        for name, stored in names.items():
            shape = shapes.get(name) or optional.get(name)
            if shape is None:
                raise CheckpointError(f"{path}: {stored}: expected nothing of that name{_why_not_expected(name)}")
            _check(path, stored, name, shape, file.get_slice(stored), config)
        for name, shape in shapes.items():
            if name not in names and name != "t2d":
                raise CheckpointError(f"{path}: {name}: missing; expected {list(shape)}{_why_expected(name)}")
        read = {name: file.get_tensor(names[name]) for name in _DTYPES if name in names}
        tables: dict[str, Tensor] = {}
        if "d2t" in read:
            d2t = read["d2t"].long()
            known = _known(path, d2t, config.vocab_size)
            if "t2d" in read and not torch.equal(read["t2d"], known):
                raise CheckpointError(f"{path}: t2d: marks other tokens than those that d2t points to")
            if "d2t" in wanted:
                tables = {"d2t": d2t, "t2d": known}
        skipped = {_EMBEDDING, *_DTYPES}
        weights = {name: file.get_tensor(stored) for name, stored in names.items() if name not in skipped}
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()} | tables


class _open:
    """(path, open file) of a folder's weights."""

    def __init__(self, folder: Path | str) -> None:
        self._path = Path(folder) / "model.safetensors"

    def __enter__(self) -> tuple[Path, Any]:
        if not self._path.is_file():
            raise CheckpointError(f"{self._path}: missing; a drafter's weights are one file of that name")
        try:
            self._file = safe_open(self._path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._path}: truncated or not safetensors: {error}") from None
        return self._path, self._file.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._file.__exit__(*exception)


def _name(stored: str) -> str:
    for theirs, ours in _SPELLINGS:
        if stored.startswith(theirs):
            return ours + stored.removeprefix(theirs)
    return stored


def _check(path: Path, stored: str, name: str, shape: tuple[int, ...], found: Any, config: Eagle3Config) -> None:
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
