"""The latents of all running and cached tokens, paged: one page id addresses 64 tokens in every layer's plane."""

import torch
from torch import Tensor

from redline.model.config import K2Config
from redline.wire.job import PAGE_TOKENS


class KvPool:
    """planes [layers, pages, 64, kv width]. Memory is touched when first written."""

    def __init__(self, config: K2Config, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self.planes: Tensor = torch.empty(
            config.num_hidden_layers, pages, PAGE_TOKENS, config.kv_width, dtype=dtype, device=device
        )
