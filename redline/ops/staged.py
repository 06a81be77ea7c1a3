"""Copies numbers from the host to a device without waiting for the device's pending work."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def staged(
    values: Sequence[int] | np.ndarray | Tensor, device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """The numbers as a tensor on `device`. On a CPU it may share the memory of an array.

    For a GPU they are copied through pinned memory, in the order of the current stream: a copy from pageable memory
    would wait for all work already queued on the stream. Torch keeps the pinned memory until the copy is done, then
    reuses it.
    """
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
