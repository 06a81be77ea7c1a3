"""Attention of block drafters: each block to the context of its slot, in pages, and to itself.

R blocks of B positions, H query heads, G key heads, X head width, W = 2 G X a row's width, P pages of a table.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.messages.job import PAGE_TOKENS
from redline.ops.op import Case, Cost, Op

TOGETHER = 16_384  # rows of contexts that the reference reads at once, of all blocks together


class BlockAttentionArgs(NamedTuple):
    """Each position of a block attends to the whole context before it, and to the block in both directions."""

    q_RBHX: Tensor  # float32, rotated and scaled
    own_RBW: Tensor  # float32: rows of the block's own positions, keys and then values
    starts_R: Tensor  # int64: position of a block's first token; the context is all rows before it
    counts_R: Tensor  # int64: positions of the block that are seen, at least one
    tables_RP: Tensor  # int32
    plane: Tensor  # [pages, 64, W]; rows may be strided
    longest: int  # no start is larger
    window: int | None = None  # positions that a query sees, itself included, and none after it; None: all


def reference(args: BlockAttentionArgs) -> Tensor:
    """-> float32 [R, B, H, X]. Long contexts are read in parts, so that they take no more memory; `fit` counts one."""
    q_RBHX, plane, window = args.q_RBHX, args.plane, args.window
    count, size, heads, width = q_RBHX.shape
    groups = args.own_RBW.shape[-1] // (2 * width)
    # The heads of a group, at all positions, are the rows of one product: [R, G, M, X].
    q = q_RBHX.float().unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    position_RB = args.starts_R[:, None] + torch.arange(size)
    used_RB = torch.arange(size) < args.counts_R[:, None].clamp_min(1)
    most = torch.full((count, groups, q.shape[2]), -torch.inf)
    mass, mixed = torch.zeros_like(most), torch.zeros_like(q)

    def add(rows_RSW: Tensor, place_RS: Tensor, there_RS: Tensor) -> None:
        """Adds rows to the running softmax."""
        nonlocal most, mass, mixed
        # One pass over the rows: to float32, and to [keys, values][R, G, S, X].
        of_groups = rows_RSW.unflatten(-1, (2, groups, width)).permute(2, 0, 3, 1, 4)
        keys, values = torch.empty(of_groups.shape).copy_(of_groups)
        seen = there_RS[:, None].expand(-1, size, -1)
        if window is not None:
            distance = position_RB[:, :, None] - place_RS[:, None]
            seen = seen & (distance >= 0) & (distance < window)
        scores = q @ keys.mT
        # A query's heads come first in a row of the product, its positions last.
        scores = scores.unflatten(2, (heads // groups, size)).masked_fill_(~seen[:, None, None], -torch.inf)
        scores = scores.flatten(2, 3)
        if not there_RS.all():  # nothing was written there, or rows that were not accepted: maybe not even numbers
            values.masked_fill_(~there_RS[:, None, :, None], 0.0)
        higher = torch.maximum(most, scores.amax(-1))
        safe = higher.masked_fill(higher == -torch.inf, 0.0)
        weights, fade = (scores - safe[..., None]).exp_(), (most - safe).exp()
        most, mass = higher, mass * fade + weights.sum(-1)
        mixed = mixed * fade[..., None] + weights @ values

    places = max(1, TOGETHER // (PAGE_TOKENS * count)) * PAGE_TOKENS
    for first in range(0, args.longest, places):
        end = min(first + places, args.longest)
        place_S = torch.arange(first, end)
        table_RP = args.tables_RP[:, first // PAGE_TOKENS : -(-end // PAGE_TOKENS)].long()
        rows_RSW = plane[table_RP].flatten(1, 2)[:, : end - first]
        add(rows_RSW, place_S.expand(count, -1), place_S < args.starts_R[:, None])
    add(args.own_RBW, position_RB, used_RB)
    mixed = (mixed / mass.clamp_min(1e-30)[..., None]).unflatten(2, (heads // groups, size))
    return mixed.permute(0, 3, 1, 2, 4).flatten(2, 3)


def cost(args: BlockAttentionArgs) -> Cost:
    """The rows before the blocks are read once for all positions; queries, own rows and results."""
    rows = int(args.starts_R.sum())
    row = args.own_RBW.shape[-1] * args.plane.element_size()
    heads, width = args.q_RBHX.shape[2:]
    pairs = args.q_RBHX.shape[1] * (rows + args.own_RBW.shape[:2].numel())
    return Cost(rows * row + 2 * args.q_RBHX.nbytes + args.own_RBW.nbytes, 4 * pairs * heads * width)


def cases() -> Iterator[Case]:
    """Contexts of none, of a part of a page and of several splits; shared key heads, windows, and each page format."""

    def make(starts: tuple[int, ...], dtype: torch.dtype, heads: int, groups: int, window: int | None = None):
        def inputs(g: torch.Generator) -> BlockAttentionArgs:
            blocks, size, width = len(starts), 8, 32 if heads > 4 else 128
            most = max(1, -(-max(starts) // PAGE_TOKENS))
            row, layers = 2 * groups * width, 2
            plane = torch.randn(blocks * most, PAGE_TOKENS, layers * row, generator=g).to(dtype)
            tables = torch.randperm(blocks * most, generator=g).view(blocks, most).int()
            for block, start in enumerate(starts):  # rows that were not accepted may hold anything
                if start % PAGE_TOKENS:
                    plane[tables[block, start // PAGE_TOKENS], start % PAGE_TOKENS :] = torch.nan
            counts = torch.randint(1, size + 1, (blocks,), generator=g)
            return BlockAttentionArgs(
                torch.randn(blocks, size, heads, width, generator=g) * width**-0.5,
                torch.randn(blocks, size, row, generator=g),
                torch.tensor(starts), counts, tables, plane[..., row:], max(starts), window,
            )  # fmt: skip

        return inputs

    yield Case("R=1 nano, bf16", make((507,), torch.bfloat16, 4, 4))
    yield Case("R=3, no context, a part of a page, several splits", make((0, 700, 1300), torch.bfloat16, 4, 4))
    yield Case("R=16 nano, e4m3", make((64, 65, 512, 513) * 4, torch.float8_e4m3fn, 4, 4))
    yield Case("R=2 float32, shared key heads", make((700, 5), torch.float32, 12, 3))
    yield Case("R=2 a window", make((700, 3), torch.bfloat16, 8, 2, 6))


block_attention = Op("block_attention", BlockAttentionArgs, reference, cost, cases)
