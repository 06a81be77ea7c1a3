"""Chunks behind cached prefixes attend as the reference, with the library's attention replaced by plain PyTorch; and
their calls have few shapes."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from redline.kernels.cuda.prefill import chunk_attention
from redline.kernels.cuda.prefill.chunk_attention import FILL
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


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        assert q.shape[2] == k.shape[2]
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)


@pytest.mark.parametrize(
    "sizes",
    [
        [(1, 1)],
        [(64, 100), (64, 7), (64, 256)],
        [(256, 3), (255, 2), (257, 300)],
        [(1600, 40), (1600, 33)],
        [(3000, 9)],
    ],
    ids=str,
)
def test_chunks_behind_prefixes_are_the_reference(sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunk_attention, "_attention", attention)
    g = fresh_generator()
    chunks, rows_T, tables = chunks_of(sizes, g)
    first = len(rows_T)
    plane = torch.randn(tables.numel(), PAGE_TOKENS, RANK + ROPE, generator=g)
    q = torch.randn(first, HEADS, NOPE + ROPE, generator=g)
    w_uk, w_uv = (torch.randn(HEADS, *of, generator=g) * RANK**-0.5 for of in ((RANK, NOPE), (VALUE, RANK)))
    w = Unfolds(Plain(w_uk), Plain(w_uv))
    got, want = torch.full((first, HEADS, VALUE), torch.nan), torch.empty(first, HEADS, VALUE)
    for group in chunk_attention._alike(tuple(chunks), chunk_attention.TOGETHER, torch.device("cpu")):
        o = chunk_attention._behind(q[group.place_CS], w, 0.2, group, rows_T, tables, plane)
        got[group.token_R] = o.flatten(0, 1)[group.real_R]
    for chunk in chunks:
        here = slice(chunk.first, chunk.first + chunk.count)
        want[here] = chunk_attention._masked(q[here], w, 0.2, chunk, tables, plane)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_the_calls_have_few_shapes(monkeypatch: pytest.MonkeyPatch):
    """Every length of a prefix and of a chunk has the shapes of few others."""
    keys = set[int]()
    for length in range(0, 262_144 + FILL, FILL):
        pieces = list(chunk_attention._pieces(length))
        assert [first for first, _ in pieces] == [0, *(last for _, last in pieces)][: len(pieces)]
        assert sum(last - first for first, last in pieces) == length
        assert len(pieces) <= 4
        keys.update(last - first for first, last in pieces)
    assert len(keys - {0}) == 36
    shapes, layouts = set[tuple[int, int]](), set[tuple[tuple[int, ...], ...]]()

    def seen(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
        shapes.add((q.shape[2], k.shape[2]))
        layouts.add(tuple((*x.shape, *x.stride()) for x in (q, k, v)))
        return attention(q, k, v, scale, causal=causal)

    monkeypatch.setattr(chunk_attention, "_attention", seen)
    w = Unfolds(Plain(torch.randn(HEADS, RANK, NOPE)), Plain(torch.randn(HEADS, VALUE, RANK)))
    plane = torch.randn(16, PAGE_TOKENS, RANK + ROPE)
    tables = torch.arange(16, dtype=torch.int32)[None]
    for start in range(1, 700, 23):
        (group,) = chunk_attention._alike((Chunk(0, 50, start, 0),), chunk_attention.TOGETHER, torch.device("cpu"))
        q = torch.randn(1, group.place_CS.shape[1], HEADS, NOPE + ROPE)
        chunk_attention._behind(q, w, 0.2, group, torch.arange(start, start + 50), tables, plane)
    assert shapes <= {(queries, keys) for queries in (FILL, 2 * FILL) for keys in (FILL, 2 * FILL)}
    assert len(layouts) == len(shapes)
