"""A server's steps without weights and without a GPU, on torch's meta device: to compile their kernels elsewhere."""

from collections.abc import Callable, Iterator

import torch

from redline.messages.job import PAGE_TOKENS
from redline.model.eagle3.module import Eagle3, Eagle3Config
from redline.model.k2.config import K2Config
from redline.model.k2.random_gpu import random_gpu_k2
from redline.model.vision.config import VisionConfig
from redline.model.vision.tower import VisionTower
from redline.run.fit import Layout
from redline.run.graphs.decode_step import SharedState
from redline.run.graphs.rehearsal import pieces
from redline.run.graphs.shapes import shapes
from redline.run.kv import KvPool
from redline.run.slots import Slots

PAGES = 8  # their number is no part of a kernel


def pieces_of(
    config: K2Config,
    slots: int,
    positions: int,
    max_model_len: int,
    kv_dtype: torch.dtype,
    drafter: Eagle3Config | None = None,
    head_bits: int = 16,
    vision: VisionConfig | None = None,
) -> Iterator[Callable[[], object]]:
    """`rehearsal.pieces` of a server of this model. positions: per row, at most. drafter, head_bits: as in
    `Eagle3.prepare`. vision: of the model's tower. Use it in torch's inference mode, in `compile_for`: the weights'
    layouts are those of the chip that it compiles for."""
    device, kinds = torch.device("meta"), {config.is_moe(layer): layer for layer in range(config.num_hidden_layers)}
    place = [kinds[config.is_moe(layer)] for layer in range(config.num_hidden_layers)]
    model = random_gpu_k2(config, place, device)
    bytes_of_page = PAGE_TOKENS * config.kv_width * config.num_hidden_layers * kv_dtype.itemsize
    eagle3 = None
    if drafter is not None:
        with device:
            eagle3 = Eagle3(drafter)
        eagle3.prepare(model, head_bits)
    kv = KvPool(model, Layout(PAGES, max_model_len, kv_dtype, bytes_of_page), eagle3)
    state = SharedState(model, Slots(slots, max_model_len, config.vocab_size, device), kv, eagle3, suffix=True)
    reach = state.slots.tables.shape[1] * PAGE_TOKENS
    yield from pieces(state, shapes(slots, positions, reach))
    if vision is not None:
        given = {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in vision.tensors()}
        yield VisionTower(vision, given).rehearse
