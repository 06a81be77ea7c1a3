"""What fits: pages and slots from memory. A pure function whose result prints its own arithmetic."""

from dataclasses import dataclass

import torch

from redline.errors import ConfigError
from redline.model.config import K2Config
from redline.model.eagle3 import Eagle3Config
from redline.wire.job import PAGE_TOKENS


@dataclass(frozen=True)
class Layout:
    """pages: of PAGE_TOKENS tokens. max_model_len: tokens of one job, prompt and answer.

    draft_bytes: of page_bytes, the drafter's.
    """

    pages: int
    max_model_len: int
    kv_dtype: torch.dtype
    page_bytes: int
    draft_bytes: int = 0

    @property
    def tokens(self) -> int:
        return self.pages * PAGE_TOKENS

    @property
    def kv_bytes(self) -> int:
        return self.pages * self.page_bytes

    def explain(self) -> list[str]:
        """Each number with its arithmetic."""
        per_token = (self.page_bytes - self.draft_bytes) // PAGE_TOKENS
        drafter = f" + {self.draft_bytes:,} of the drafter" if self.draft_bytes else ""
        jobs = self.tokens / self.max_model_len
        return [
            f"a page           {PAGE_TOKENS} tokens x {per_token:,} bytes{drafter} = {self.page_bytes:,} bytes",
            f"KV memory        {self.pages:,} pages x {self.page_bytes:,} bytes = {self.kv_bytes / 1e9:.2f} GB",
            f"KV capacity      {self.tokens:,} tokens = {jobs:.1f} x the longest context of {self.max_model_len:,}",
        ]


def check_weights(config: K2Config, free: int, kv_bytes: int) -> None:
    """ConfigError, with the arithmetic, where the weights and so many bytes of pages are more than `free` memory."""
    weights = config.weight_bytes
    if weights + kv_bytes <= free:
        return
    pages = f" + {kv_bytes / 1e9:,.2f} GB of pages (kv-memory)" if kv_bytes else ""
    missing = (weights + kv_bytes - free) / 1e9
    advice = (
        f"give --kv-memory {max(free - weights, 0) / 1e9:,.2f}GB or less"
        if weights < free
        else "a larger device is needed, or several"
    )
    raise ConfigError(
        f"{weights / 1e9:,.2f} GB of weights{pages} do not fit into the {free / 1e9:,.2f} GB that are free here: "
        f"{missing:,.2f} GB too many; {advice}. The weights: {'; '.join(config.explain_weight_bytes())}"
    )


def fit(
    config: K2Config,
    kv_bytes: int,
    kv_dtype: torch.dtype,
    max_model_len: int | None,
    drafter: Eagle3Config | None = None,
) -> Layout:
    """As many pages as `kv_bytes` holds, and the longest job that they allow. A drafter's rows share the pages.

    ConfigError, with the arithmetic, where one job of `max_model_len` does not fit, or the model reads fewer tokens.
    """
    draft_bytes = 0
    if drafter is not None:  # its rows, and the page's last feature (kv.py)
        draft_bytes = drafter.kv_bytes_per_token(kv_dtype) * PAGE_TOKENS + 4 * drafter.hidden_size
    page_bytes = config.kv_bytes_per_token(kv_dtype) * PAGE_TOKENS + draft_bytes
    pages = kv_bytes // page_bytes
    reads = config.max_position_embeddings
    if max_model_len is not None and not 1 <= max_model_len <= reads:
        raise ConfigError(
            f"max-model-len is {max_model_len:,}; this model reads {reads:,} tokens at most, and 1 at least"
        )
    wanted = max_model_len or min(reads, pages * PAGE_TOKENS)
    needed = -(-wanted // PAGE_TOKENS)
    if pages < max(needed, 1):
        enough = -(-max(needed, 1) * page_bytes // 10**7) / 100  # rounded up, so that the advice works
        raise ConfigError(
            f"kv-memory {kv_bytes / 1e9:.2f} GB holds {pages:,} pages of {page_bytes:,} bytes, {pages * PAGE_TOKENS:,} "
            f"tokens; max-model-len {wanted:,} needs {max(needed, 1):,} pages: give --kv-memory {enough:.2f}GB, or a "
            "smaller --max-model-len"
        )
    return Layout(pages, wanted, kv_dtype, page_bytes, draft_bytes)
