"""Which errors are the device's own.

After one of them nothing on the device can be trusted: CUDA gives the same error to every later call of the process,
and only a new process helps.
"""

import torch

from redline.kernels.hopper.driver import CudaError

_BEGINNINGS = "CUDA error", "Triton Error [CUDA]"  # of what torch's libraries and Triton raise as a plain RuntimeError


def is_device_error(error: BaseException | None) -> bool:
    """Whether this error, or one that caused it, is CUDA's. Too little memory is none: the next step may need less."""
    while error is not None:
        if isinstance(error, torch.AcceleratorError | CudaError):
            return True
        if type(error) is RuntimeError and str(error).startswith(_BEGINNINGS):
            return True
        error = error.__cause__
    return False
