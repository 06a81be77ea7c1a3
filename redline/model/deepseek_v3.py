"""DeepSeek-V3, -V3-0324 and -R1 (DeepseekV3ForCausalLM), on a CPU.

Kimi K2 is this architecture with other sizes and one group of experts, so geometry, files, formulas and tensor
parallelism are `redline.model.k2`'s. What differs is data: groups of experts (`n_group`, `topk_group`), linears in
FP8 blocks, which are dequantised to bf16 as they are read, and layers for multi-token prediction after
`num_hidden_layers`, which are not read.
"""

import torch

from redline.model.k2.config import K2Config
from redline.model.k2.load import LatentLoader


class DeepseekV3Loader(LatentLoader):
    """As Kimi K2's, and refuses a GPU."""

    def refusal(self, config: K2Config, device: torch.device) -> str | None:
        """On a GPU: the kernels that are missing there."""
        if device.type == "cpu":
            return None
        return (
            f"DeepSeek-V3 runs on a CPU only: GPU kernels for routing within groups of experts (n_group is "
            f"{config.n_group}) and for experts in fp8 are missing; set engine.device to cpu"
        )


LOADER = DeepseekV3Loader()
