"""Prompt chunks, at the start of their prompts and behind cached prefixes, attend to their own contexts."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from redline.kernels.cuda.layouts.tiled import padded
from redline.kernels.cuda.prefill import chunk_attention
from redline.kernels.cuda.prefill.attend_blocks import ROWS
from redline.kernels.cuda.prefill.chunk_attention import attend_chunks
from redline.kernels.inputs import Chunk
from redline.messages.job import PAGE_TOKENS
from redline.ops.formats import Plain
from tests.seeds import fresh_generator

HEADS, NOPE, ROPE, RANK, VALUE = 2, 16, 8, 32, 16


@dataclasses.dataclass
class Unfolds:
    w_uk: Plain
    w_uv: Plain


class Chunks(NamedTuple):
    """The chunks of a step and their pages. rows_T: as `attend_chunks` has it."""

    chunks: list[Chunk]
    rows_T: Tensor
    tables: Tensor


def chunks_of(sizes: Sequence[tuple[int, int]], g: torch.Generator) -> Chunks:
    """A chunk for each (tokens before it, its tokens), each in a slot of its own, in pages in random order."""
    pages = max(start + count for start, count in sizes) // PAGE_TOKENS + 1
    tables = torch.randperm(pages * len(sizes), generator=g).to(torch.int32).view(-1, pages)
    chunks, rows, first = list[Chunk](), list[Tensor](), 0
    for slot, (start, count) in enumerate(sizes):
        position = torch.arange(start, start + count)
        rows.append(tables[slot, position // PAGE_TOKENS].long() * PAGE_TOKENS + position % PAGE_TOKENS)
        chunks.append(Chunk(first, count, start, slot))
        first += count
    return Chunks(chunks, torch.cat(rows), tables)


@pytest.mark.parametrize("together", [1, 700, 1 << 14])
@pytest.mark.parametrize(
    "sizes",
    [
        [(1, 1)],
        [(0, 1), (0, 200)],
        [(64, 100), (0, 7), (64, 256)],
        [(256, 3), (255, 2), (257, 300)],
        [(3000, 9), (0, 64)],
    ],
    ids=str,
)
def test_chunks_attend_to_their_slots_contexts(
    sizes: list[tuple[int, int]], together: int, monkeypatch: pytest.MonkeyPatch
):
    """together: rows that are unfolded together. Nothing else of the pages is read."""
    monkeypatch.setattr(chunk_attention, "TOGETHER", together)
    g = fresh_generator()
    chunks, rows_T, tables = chunks_of(sizes, g)
    tokens = len(rows_T)
    plane = torch.full((tables.numel(), PAGE_TOKENS, RANK + ROPE), torch.nan)
    w_uk, w_uv = (torch.randn(HEADS, *of, generator=g) * RANK**-0.5 for of in ((RANK, NOPE), (VALUE, RANK)))
    q = torch.randn(tokens, HEADS, NOPE + ROPE, generator=g)
    want = torch.empty(tokens, HEADS, VALUE)
    for chunk in chunks:
        here, position = slice(chunk.first, chunk.first + chunk.count), torch.arange(chunk.start + chunk.count)
        context = torch.randn(len(position), RANK + ROPE, generator=g)
        plane[tables[chunk.slot, position // PAGE_TOKENS].long(), position % PAGE_TOKENS] = context
        latent, rope = context.split([RANK, ROPE], 1)
        keys = torch.cat([torch.einsum("sr,hrn->shn", latent, w_uk), rope[:, None].expand(-1, HEADS, -1)], -1)
        scores = torch.einsum("chx,shx->hcs", q[here], keys) * 0.2
        scores = scores.masked_fill(position > position[chunk.start :, None], -torch.inf)
        want[here] = torch.einsum("hcs,sr,hvr->chv", scores.softmax(-1), latent, w_uv)
    got = torch.full((tokens, HEADS, VALUE), torch.nan)
    attend_chunks(q, Unfolds(Plain(w_uk), Plain(w_uv)), 0.2, chunks, rows_T, tables, plane, got)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_the_rows_that_a_kernel_multiplies_by_zero_are_of_the_same_context():
    """It reads ROWS at a time: an infinity in another request's rows would make NaN."""
    chunks = [Chunk(0, 130, 0, 3), Chunk(130, 1, 0, 1), Chunk(131, 40, 1000, 2), Chunk(171, 64, 64, 0)]
    (group,) = chunk_attention._groups(tuple(chunks), 1 << 14, torch.device("cpu"))
    ends = {int(first): int(first + rows) for (_, first, _), rows in zip(group.info_C3, group.rows_C, strict=True)}
    assert group.rows == max(ends.values())
    for _, count, row, seen in group.blocks_B4.tolist():
        assert row % ROWS == 0
        assert row + padded(seen + count - 1, ROWS) <= ends[row]
