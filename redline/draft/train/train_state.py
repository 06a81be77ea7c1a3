"""Training checkpoints: weights, averages, optimiser moments and the position in the data, without pickle.

A state is a folder `step-N` of two files, state.safetensors and state.json. It appears atomically, and only then is the
previous one removed. Every kind of sharding writes the same files: whole tensors, named after the drafter's parameters.
"""

import shutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from redline.disk import is_full, sync
from redline.draft.train.budget import Reached
from redline.errors import ConfigError
from redline.messages.base import Record

MOMENTS = ("exp_avg", "exp_avg_sq")


class Facts(Record, frozen=True):
    """The part of a state that is not tensors."""

    step: int
    reached: Reached
    drawn: int  # number of batches that each rank has consumed
    optimizer_step: int
    tokens: int = 0  # number trained on, over all ranks


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank; a collective call if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def put(into: Tensor, value: Tensor) -> None:
    """Copies this rank's part of the whole tensor `value` into `into`."""
    if isinstance(into, DTensor):
        value = distribute_tensor(value.to(into.device), into.device_mesh, into.placements, src_data_rank=None)
    into.copy_(value)


class Moments:
    """The weights and the optimiser's state by parameter, wherever it stores them. All ranks must call the methods.

    names  of the trainable parameters of `model`, in order
    """

    def __init__(self, model: nn.Module, optimizer: Any, names: Sequence[str]) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._parameters = dict(zip(names, parameters, strict=True))
        self._optimizer = optimizer
        # ZeRO stores weights and moments in flat partitions, and can look up each parameter's part itself.
        self._zero: Any = None
        if any(hasattr(parameter, "_hp_mapping") for parameter in parameters):
            self._zero = import_module("deepspeed.utils")

    def read(self) -> tuple[int, dict[str, Tensor]]:
        """(steps taken, name -> tensor), each tensor whole: weights and both moments of every parameter."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if self._zero is not None:
                found[f"model.{name}"] = self._zero.safe_get_full_fp32_param(parameter)
                for moment in MOMENTS:
                    found[f"{moment}.{name}"] = self._zero.safe_get_full_optimizer_state(parameter, moment)
                continue
            found[f"model.{name}"] = whole(parameter.detach())
            entry = self._optimizer.state[parameter]
            for moment in entry.keys() & MOMENTS:  # a matrix of Muon's has one
                found[f"{moment}.{name}"] = whole(entry[moment])
        return max(int(entry["step"]) for entry in self._optimizer.state.values()), found

    def write(self, steps: int, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `read` returned. Raises KeyError if a parameter's tensor is missing."""
        if self._zero is not None:
            self._make_flat_state(steps)
        for name, parameter in self._parameters.items():
            put(parameter.data, tensors[f"model.{name}"])
            if self._zero is not None:
                self._zero.safe_set_full_fp32_param(parameter, tensors[f"model.{name}"])
                for moment in MOMENTS:
                    self._zero.safe_set_full_optimizer_state(parameter, tensors[f"{moment}.{name}"], moment)
                continue
            entry = self._optimizer.state[parameter]
            entry["step"] = torch.tensor(float(steps))
            for moment in MOMENTS[: 1 + (f"{MOMENTS[1]}.{name}" in tensors)]:
                entry[moment] = torch.zeros_like(parameter)
                put(entry[moment], tensors[f"{moment}.{name}"])

    def _make_flat_state(self, steps: int) -> None:
        """Creates the state that ZeRO would create in its first step; until then there is none."""
        zero = self._optimizer.optimizer
        for group in zero.optimizer.param_groups:
            for flat in group["params"]:
                moments = {moment: torch.zeros_like(flat) for moment in MOMENTS}
                zero.optimizer.state[flat] = {"step": torch.tensor(float(steps)), **moments}
        zero._lazy_init_hp_params_optimizer_state()


def latest(folder: Path) -> Path | None:
    """The newest complete state in the folder; None if there is none."""
    found = [
        path
        for path in folder.glob("step-*")
        if path.name.removeprefix("step-").isdecimal() and (path / "state.json").is_file()
    ]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def save(folder: Path, facts: Facts, tensors: Mapping[str, Tensor]) -> Path:
    """Writes the state as `folder`/step-N, removes older states, and returns its folder.

    Raises ConfigError if it cannot be written; the previous state is then unchanged.
    """
    path = folder / f"step-{facts.step}"
    building = folder / ".writing"
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(parents=True)
        flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(flat, building / "state.safetensors")
        (building / "state.json").write_bytes(msgspec.json.encode(facts))
        for file in building.iterdir():
            sync(file)
        shutil.rmtree(path, ignore_errors=True)
        building.rename(path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(building, ignore_errors=True)
        if isinstance(error, SafetensorError) and not is_full(error):
            raise
        raise full(folder, error, latest(folder)) from None
    for other in folder.glob("step-*"):
        if other != path:
            shutil.rmtree(other)
    return path


def full(folder: Path, error: Exception, state: Path | None) -> ConfigError:
    """The error for a state that cannot be written: free space, and where training resumes.

    state: the last one, or None.
    """
    reason = "no space left" if is_full(error) else str(error)
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    return ConfigError(
        f"{folder}: cannot be written ({reason}; {free / 1e6:.0f} MB free): make room and run again; training "
        f"{goes_on(state)}"
    )


def goes_on(state: Path | None) -> str:
    """How the same call continues from this state, as part of a message. None: there is no state."""
    return f"resumes from step {state.name.removeprefix('step-')}" if state is not None else "starts over"


def load(path: Path) -> tuple[Facts, dict[str, Tensor]]:
    """The facts and tensors (on the CPU) of a state's folder. Raises ConfigError if its files are damaged."""
    try:
        facts = msgspec.json.decode((path / "state.json").read_bytes(), type=Facts)
        with safe_open(path / "state.safetensors", framework="pt") as file:
            return facts, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, msgspec.DecodeError, SafetensorError) as error:
        raise ConfigError(f"{path}: damaged ({error}): remove this folder to start over") from None


def remove(path: Path) -> None:
    """Deletes a state's folder. Raises OSError if that fails."""
    shutil.rmtree(path)
