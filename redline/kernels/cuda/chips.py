"""What the kernels need to know of a chip, by compute capability. No other file compares capabilities.

Sizes are from the tables of CUDA's programming guide, in bytes; numbers of multiprocessors are those of the products.
"""

import contextlib
import functools
import threading
from collections.abc import Generator
from dataclasses import dataclass, replace

import torch

_building = threading.local()
_portable = False  # of this process


@dataclass(frozen=True)
class Chip:
    """A family of chips with one compute capability. All have bulk copies, barriers in shared memory that count bytes,
    and launches that begin before the preceding one has ended."""

    products: str
    capability: tuple[int, int]
    multiprocessors: int  # of the largest product: a device's own number counts where there is one
    block_shared: int  # maximum shared memory of a block
    sm_shared: int  # shared memory of a multiprocessor
    sm_threads: int
    sm_blocks: int  # maximum resident blocks of a multiprocessor
    warpgroup_mma: bool  # wgmma; without it attention and the experts of long prompts have other forms
    was_run: bool  # whether the kernels have been run on it, or only compiled for it

    @property
    def arch(self) -> str:
        """NVIDIA's name of the architecture, with its own instructions."""
        return "sm_{}{}a".format(*self.capability)

    @property
    def is_served(self) -> bool:
        """Whether the kernels fit: several take all of the shared memory that a block of a Hopper has."""
        return self.block_shared >= HOPPER.block_shared


_KB = 1 << 10
HOPPER = Chip("H100, H200", (9, 0), 132, 227 * _KB, 228 * _KB, 2048, 32, warpgroup_mma=True, was_run=True)
CHIPS = (
    HOPPER,
    Chip("B200, GB200", (10, 0), 148, 227 * _KB, 228 * _KB, 2048, 32, warpgroup_mma=False, was_run=False),
    Chip("B300, GB300", (10, 3), 160, 227 * _KB, 228 * _KB, 2048, 32, warpgroup_mma=False, was_run=False),
    Chip("RTX PRO 6000", (12, 0), 188, 99 * _KB, 100 * _KB, 1536, 24, warpgroup_mma=False, was_run=False),
)
_BY_CAPABILITY = {chip.capability: chip for chip in CHIPS}
SERVED = ", ".join(f"{chip.products} ({'{}.{}'.format(*chip.capability)})" for chip in CHIPS if chip.is_served)


def chip() -> Chip:
    """The chip that kernels are launched on, or compiled for: a Hopper if there is no GPU that kernels exist for."""
    found = building() or _present()
    return replace(found, warpgroup_mma=False) if _portable else found


def use_portable_kernels(portable: bool) -> None:
    """Whether this process computes on a Hopper as on a chip without wgmma: to test and time those forms there."""
    global _portable
    _portable = portable


@functools.cache
def _present() -> Chip:
    if not torch.cuda.is_available():
        return HOPPER
    return _BY_CAPABILITY.get(torch.cuda.get_device_capability(), HOPPER)


def building() -> Chip | None:
    """The chip of `built_for`; None outside of it."""
    return getattr(_building, "chip", None)


@contextlib.contextmanager
def built_for(target: Chip) -> Generator[None]:
    """Context manager: kernels of this thread are for this chip, whatever GPU there is. Nothing can be launched."""
    _building.chip = target
    try:
        yield
    finally:
        _building.chip = None


def refusal(name: str, capability: tuple[int, int]) -> str | None:
    """Why there are no kernels for a GPU of this name and compute capability; None if there are."""
    has = "{} has compute capability {}.{}".format(name, *capability)
    found = _BY_CAPABILITY.get(capability)
    if found is not None and found.is_served:
        return None
    if found is not None:
        room, needed = found.block_shared // _KB, HOPPER.block_shared // _KB
        return f"{has}: a block has {room} KB of shared memory, and the CUDA kernels need up to {needed}"
    if capability < HOPPER.capability:
        return f"{has}: it lacks the bulk copies of the CUDA kernels, which are for {SERVED}"
    return f"{has}; the CUDA kernels are for {SERVED}"
