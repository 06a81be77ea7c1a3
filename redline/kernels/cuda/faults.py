"""Which errors are faults of the device.

After such an error the device's state is undefined: CUDA returns the same error for every later call of the process,
and only a new process helps.
"""

import torch

from redline.kernels.cuda.driver import CudaError

_BEGINNINGS = "CUDA error", "Triton Error [CUDA]"  # prefixes of the plain RuntimeErrors of torch's libraries and Triton


def is_device_error(error: BaseException | None) -> bool:
    """Whether this error, or one that caused it, is a CUDA fault. Out of memory is not: the next step may need less."""
    while error is not None:
        if isinstance(error, torch.AcceleratorError | CudaError):
            return True
        if type(error) is RuntimeError and str(error).startswith(_BEGINNINGS):
            return True
        error = error.__cause__
    return False
