"""What is kept of all running and cached tokens, paged: one page id addresses 64 tokens in every plane."""

import torch
from torch import Tensor

from redline.errors import ConfigError
from redline.model.eagle3.module import Eagle3
from redline.model.k2.cpu import K2
from redline.run.fit import Layout
from redline.wire.job import PAGE_TOKENS


class KvPool:
    """planes [layers, pages, 64, kv width]: the target's latents.
    draft    [pages, 64, drafter's kv width]: at place p the drafter's row that took token p, whose feature is that of
             the token before; so a page's rows are told by the tokens up to its end, whatever follows.
    tails    [pages, hidden]: the fused feature of each page's last token, for the row at the next page's first place.

    placed   where a GPU's stream of steps has the last parcel that came from another worker behind it. A page whose job
             has gone on without it may be given away before: other streams than that of steps wait (`run/tiers`).

    There is one page more than the layout has: it is nobody's, and takes what must be written somewhere.
    Memory is touched when first written. Raises ConfigError where the machine refuses so much.
    """

    def __init__(self, model: K2, layout: Layout, drafter: Eagle3 | None = None) -> None:
        config, pages, dtype = model.config, layout.pages + 1, layout.kv_dtype
        self.pages = layout.pages
        self.placed: torch.cuda.Event | None = None
        try:
            shape = config.num_hidden_layers, pages, PAGE_TOKENS, config.kv_width
            self.planes: Tensor = torch.empty(shape, dtype=dtype, device=model.device)
            width = drafter.config.kv_width if drafter is not None else 0
            self.draft: Tensor = torch.empty(pages, PAGE_TOKENS, width, dtype=dtype, device=model.device)
            hidden = drafter.config.hidden_size if drafter is not None else 0
            self.tails: Tensor = torch.empty(pages, hidden, dtype=model.dtype, device=model.device)
            self.planes[:, self.pages] = 0
        except RuntimeError as error:  # torch's word for no memory, on a CPU as on a GPU
            raise ConfigError(
                f"kv-memory: this machine does not give {layout.kv_bytes / 1e9:,.2f} GB for pages; "
                "`redline doctor` prints what fits"
            ) from error
