"""Numbers that the host has made, brought to a device without waiting for what that device still has to do."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def staged(
    values: Sequence[int] | np.ndarray | Tensor, device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """The numbers as a tensor on `device`. On a CPU it may share the memory of an array.

    For a GPU they go through pinned memory, in the order of the current stream: a copy out of ordinary memory would
    wait for all that the stream was given before. Torch keeps the pinned memory until the copy is done, then gives it
    to the next.
    """
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
