"""Runs texts through a model one layer at a time: a checkpoint of any size with memory for one of its layers.

All texts go through a layer before the next one is read, so each weight is read once, whatever the number of texts.
A listener receives the inputs of each layer's experts and the rows that its attention writes to the KV cache.

T tokens of all texts, n of a call, D hidden, K chosen experts, W width of a token's latent and rotated key.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from redline.kernels.cpu.add_norm import add_norm
from redline.kernels.cpu.moe import moe
from redline.kernels.inputs import Chunk, Inputs
from redline.messages.job import PAGE_TOKENS
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.config import K2Config
from redline.model.k2.cpu import Reader
from redline.model.k2.forward import attended, route
from redline.ops.mla import rounds
from redline.quant.texts import CalibrationText

CALL_TOKENS = 8192  # maximum tokens of the texts that go through a layer together


class LayerListener(Protocol):
    """Receives, layer by layer and call by call, the MLP inputs of the layer and its KV cache rows."""

    def __call__(self, layer: int, x: Tensor, ids: Tensor | None, kept: Tensor) -> None:
        """x [n, D], normed; ids [n, K], the experts of each token, None in a dense layer; kept [n, W], page rows."""
        ...


class _Call(NamedTuple):
    """Texts that go through a layer together: tokens [first, first + n) of all tokens."""

    first: int
    lengths: list[int]


def through(
    checkpoint: Checkpoint,
    texts: Sequence[CalibrationText],
    device: torch.device,
    heard: LayerListener = lambda layer, x, ids, kept: None,
    progress: Callable[[int, int], object] = lambda layer, layers: None,
    layers: int | None = None,
) -> Tensor:
    """The normed states that the output head reads, float32 [T, D] on the CPU, of all texts, concatenated.

    progress(layers done, total layers). layers: stop after this number of layers, if only the listener's data is
    needed; the result is then meaningless.
    """
    config = checkpoint.config
    reader = Reader(checkpoint, device, config.low_rank_norm_eps)
    ids_T = torch.tensor([token for text in texts for token in text.tokens])
    embedding = checkpoint.plain("embed_tokens.weight")
    residual = embedding[ids_T].float()  # kept on the CPU between layers
    partial = torch.zeros_like(residual)
    calls = list(_calls(texts))
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    last = config.num_hidden_layers if layers is None else layers
    with torch.inference_mode():
        for layer in range(last):
            block = reader.block(layer)
            for call in calls:
                rows = slice(call.first, call.first + sum(call.lengths))
                inputs = _inputs(call, ids_T[rows], config, device)
                plane = torch.zeros(
                    int(inputs.tables.max()) + 1, PAGE_TOKENS, config.kv_width, dtype=torch.bfloat16, device=device
                )
                r, p = (part[rows].to(device, dtype) for part in (residual, partial))
                r, x = attended(r, p, block, inputs, plane)
                routed = route(x, block.experts)
                kept = plane.view(-1, config.kv_width)[inputs.rows_T]
                heard(layer, x, None if routed is None else routed.ids_TK, kept)
                residual[rows] = r.float().cpu()
                partial[rows] = moe(x, block.shared_gate_up, block.shared_down, routed, rounds(plane)).float().cpu()
            progress(layer + 1, last)
        norm = reader.vector("norm.weight")
        for call in calls:
            rows = slice(call.first, call.first + sum(call.lengths))
            r, p = (part[rows].to(device, dtype) for part in (residual, partial))
            residual[rows] = add_norm(r, p, norm, config.rms_norm_eps)[1].float().cpu()
    return residual


def _calls(texts: Sequence[CalibrationText]) -> Iterator[_Call]:
    first, lengths = 0, list[int]()
    for text in texts:
        if lengths and sum(lengths) + len(text.tokens) > CALL_TOKENS:
            yield _Call(first, lengths)
            first, lengths = first + sum(lengths), []
        lengths.append(len(text.tokens))
    yield _Call(first, lengths)


def _inputs(call: _Call, ids: Tensor, config: K2Config, device: torch.device) -> Inputs:
    """The inputs of a call: every text is a prompt from its first token on, in its own pages."""
    positions = torch.cat([torch.arange(length) for length in call.lengths])
    pages = [-(-length // PAGE_TOKENS) for length in call.lengths]
    tables = torch.zeros(len(pages), max(pages), dtype=torch.int32)
    chunks: list[Chunk] = []
    rows: list[Tensor] = []
    page, first = 0, 0
    for slot, (length, count) in enumerate(zip(call.lengths, pages, strict=True)):
        tables[slot, :count] = torch.arange(page, page + count, dtype=torch.int32)
        rows.append(torch.arange(page * PAGE_TOKENS, page * PAGE_TOKENS + length))
        chunks.append(Chunk(first, length, 0, slot))
        page, first = page + count, first + length
    angle = positions.float()[:, None] * config.inv_freq()
    none = torch.empty(0, dtype=torch.int32, device=device)
    return Inputs(
        ids_T=ids.to(device),
        cos_T=angle.cos().to(device),
        sin_T=angle.sin().to(device),
        rows_T=torch.cat(rows).to(device),
        chunks=chunks,
        tokens_Q=none,
        slots_Q=none,
        lengths_Q=none,
        tables=tables.to(device),
    )
