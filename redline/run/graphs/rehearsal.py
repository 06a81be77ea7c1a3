"""The work whose kernels are compiled before a worker serves: decode steps of all shapes, and prompt chunks.

Layers of one kind launch the same kernels, so an excerpt of the model with one layer of each kind is enough.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from redline.kernels.cuda.prefill.attend_blocks import attend_blocks
from redline.kernels.inputs import Inputs
from redline.messages.job import PAGE_TOKENS
from redline.messages.step import Shape
from redline.model.k2.cuda import GpuK2
from redline.run.graphs.decode_step import DecodeStep, SamplingKind, SharedState

# Tokens of prompt chunks: matmuls have a kernel for each range of tokens, and the library's from 513 on. Experts
# without wgmma have another kernel from 24 tokens of an expert on.
CHUNKS = 8, 16, 32, 64, 128, 256, 512, 1024, 2048


def pieces(shared: SharedState, shapes: Sequence[Shape]) -> Iterator[Callable[[], object]]:
    """Calls that launch every kernel of the shapes' decode steps and of prompt chunks, on meaningless contents."""
    model = shared.model
    assert isinstance(model, GpuK2), "only a GPU's kernels are compiled at run time"
    excerpt, part = copy.copy(shared), model.excerpt()
    excerpt.model, excerpt.kv = part, copy.copy(shared.kv)
    excerpt.kv.planes = shared.kv.planes[: len(part.gpu_blocks)]
    for tokens in CHUNKS:
        if tokens <= shared.slots.tokens.shape[1]:
            yield functools.partial(part.rehearse_prompt, _prompt(excerpt, tokens), excerpt.kv.planes)
    yield functools.partial(_attend, part)
    for shape in shapes:
        yield functools.partial(_decode, DecodeStep(excerpt, shape))


def _decode(step: DecodeStep) -> None:
    """Draws and log probabilities are left out: torch computes them."""
    step.forward()
    for adjusted in (False, True):
        step.settle(SamplingKind.LIKELIEST, adjusted=adjusted)
    if step.drafts:
        step.draft_all()


def _attend(model: GpuK2) -> None:
    """The attention of prompt chunks, over no tokens."""
    w, device = model.gpu_blocks[0].attention, model.device
    rank, nope = w.w_uk.shape[1:]
    value, rope = w.w_uv.shape[1], w.width - nope
    q, keys, values, out = (
        torch.empty(1, w.heads, width, dtype=torch.bfloat16, device=device) for width in (w.width, nope, value, value)
    )
    cache = torch.empty(1, rank + rope, dtype=torch.bfloat16, device=device)
    blocks = torch.zeros(1, 4, dtype=torch.int32, device=device)
    attend_blocks(q, keys, cache[:, rank:], values, blocks, 1.0, out)


def _prompt(shared: SharedState, tokens: int) -> Inputs:
    """Tokens without their attention (`_attend`); their rows are written to the spare page."""
    device, nowhere = shared.plan.device, torch.empty(0, dtype=torch.int32, device=shared.plan.device)
    cos, sin = shared.model.angles(torch.arange(tokens, device=device))
    return Inputs(
        ids_T=torch.zeros(tokens, dtype=torch.int64, device=device),
        cos_T=cos,
        sin_T=sin,
        rows_T=torch.full((tokens,), shared.spare_page * PAGE_TOKENS, device=device),
        chunks=(),
        tokens_Q=nowhere,
        slots_Q=nowhere,
        lengths_Q=nowhere,
        tables=shared.slots.tables,
    )
