"""The latents of all running and cached tokens, paged: one page id addresses 64 tokens in every layer's plane."""

import torch
from torch import Tensor

from redline.errors import ConfigError
from redline.model.config import K2Config
from redline.wire.job import PAGE_TOKENS


class KvPool:
    """planes [layers, pages, 64, kv width]. Memory is touched when first written.

    Raises ConfigError where the machine refuses so much.
    """

    def __init__(self, config: K2Config, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = config.num_hidden_layers, pages, PAGE_TOKENS, config.kv_width
        try:
            self.planes: Tensor = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch's word for no memory, on a CPU as on a GPU
            size = pages * PAGE_TOKENS * config.kv_bytes_per_token(dtype) / 1e9
            raise ConfigError(
                f"kv-memory: this machine does not give {size:,.2f} GB for pages; `redline doctor` prints what fits"
            ) from error
