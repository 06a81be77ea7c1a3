"""Where there is no GPU, Triton's kernels run in its interpreter, whose bf16 has to be mended first."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is decorated
    from tests import triton_bf16

    triton_bf16.mend()
