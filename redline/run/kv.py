"""The paged KV cache of all running and cached tokens: one page id addresses 64 tokens in every plane."""

import torch
from torch import Tensor

from redline.errors import ConfigError
from redline.messages.job import PAGE_TOKENS
from redline.model.drafter import Drafter
from redline.model.k2.cpu import K2
from redline.run.fit import Layout


class KvPool:
    """planes   [layers, pages, 64, kv width]: the target model's latents.
    draft    [pages, 64, drafter's kv width]: at place p a chain's row that took token p with the feature of the token
             before it, or a block drafter's rows of token p, layer after layer; so a page's rows depend only on the
             tokens up to its end.
    tails    [pages, hidden]: the fused feature of each page's last token, for a chain's row at the next page's first
             place; of width 0 for a block drafter.

    placed   event on the GPU's stream of steps after the last parcel received from another worker. A page may be freed
             and reused before that, if its job continued without it: streams other than that of steps wait for the
             event (`run/tiers`).

    There is one page more than the layout has: a spare page without an owner that takes writes to be discarded. Memory
    is committed at the first write. Raises ConfigError if the machine has too little memory.
    """

    def __init__(self, model: K2, layout: Layout, drafter: Drafter | None = None) -> None:
        config, pages, dtype = model.config, layout.pages + 1, layout.kv_dtype
        self.pages = layout.pages
        self.placed: torch.cuda.Event | None = None
        try:
            shape = config.num_hidden_layers, pages, PAGE_TOKENS, config.kv_width
            self.planes: Tensor = torch.empty(shape, dtype=dtype, device=model.device)
            width = drafter.config.kv_width if drafter is not None else 0
            self.draft: Tensor = torch.empty(pages, PAGE_TOKENS, width, dtype=dtype, device=model.device)
            hidden = drafter.config.tail_width if drafter is not None else 0
            self.tails: Tensor = torch.empty(pages, hidden, dtype=model.dtype, device=model.device)
            self.planes[:, self.pages] = 0
        except RuntimeError as error:  # torch's out-of-memory error, on a CPU and on a GPU
            raise ConfigError(
                f"kv-memory: cannot allocate {layout.kv_bytes / 1e9:,.2f} GB for pages on this machine; "
                "`redline doctor` prints what fits"
            ) from error
