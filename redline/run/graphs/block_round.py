"""What a block drafter reads of a settled step: the context rows of the accepted tokens, and a block for each row.

A block is cut to the drafts that its row wants, since no page is guaranteed for the places after them (the scheduler
allocates those that a chain needs). Nothing has a data-dependent shape, so a CUDA graph can capture it.

B rows of a step, K positions of each, T = B K.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cuda.step.step_rows import (
    ASKED,
    BEFORE,
    LIMIT,
    MOST_DRAFTS,
    NEW,
    PROPOSE,
    SLOT,
    TOKENS,
    SlotTensors,
)
from redline.messages.job import PAGE_TOKENS
from redline.model.block.config import BlockConfig
from redline.model.block.serve import BlockRows


class RoundRows(NamedTuple):
    """The inputs of a block drafter's `read` and `states`."""

    position_T: Tensor  # int64: of each position of the step
    rows_T: Tensor  # int64: page * 64 + place; the spare page for a position that is not accepted
    blocks: BlockRows
    lengths_B: Tensor  # int32: length of each slot, as `keep_drafts` counts it


def used_positions(config: BlockConfig, length_B: Tensor, wanted_B: Tensor) -> Tensor:
    """Positions of a block whose rows have a page: one for each wanted draft, from the anchor's place on, as for a
    chain; and DFlash's last one, unless it begins a page.

    length_B: of the slots. The position that is left out still drafts; it is not seen.
    """
    last_B = length_B + wanted_B - 1
    more_B = (last_B % PAGE_TOKENS > 0) & (not config.sample_from_anchor)
    return ((wanted_B + more_B) * (wanted_B > 0)).clamp(max=config.block_size)


def round_rows(
    config: BlockConfig, plan_BC: Tensor, slots: SlotTensors, results: Tensor, positions: int, longest: int, spare: int
) -> RoundRows:
    """plan_BC, slots, results, positions: those of `read_rows`. longest: bound of the slots' lengths. spare: the spare
    page."""
    rows, slot_B, device = plan_BC.shape[0], plan_BC[:, SLOT], plan_BC.device
    results, limit_B = results[:rows], slots.facts[slot_B, LIMIT]
    of_row_K = torch.arange(positions, device=device)
    read_B = (plan_BC[:, ASKED] > 0) & (plan_BC[:, PROPOSE] >= 0)
    reads_BK = read_B[:, None] & (of_row_K < results[:, NEW, None])
    at_BK = (results[:, BEFORE, None] - 1 + of_row_K) * reads_BK
    page_BK = slots.tables[slot_B[:, None], at_BK // PAGE_TOKENS].long()
    spare_BK = spare * PAGE_TOKENS + torch.arange(rows * positions, device=device).view_as(at_BK) % PAGE_TOKENS
    row_BK = torch.where(reads_BK, page_BK * PAGE_TOKENS + at_BK % PAGE_TOKENS, spare_BK)
    new_B = results[:, NEW].clamp(min=1)
    length_B = results[:, BEFORE] + new_B
    anchor_B = torch.gather(results[:, TOKENS:], 1, new_B[:, None] - 1)[:, 0].clamp(min=0)
    # As many drafts as `keep_drafts` keeps. 0 for a row that is at its limit, or past it: its job has ended.
    wanted_B = torch.minimum(plan_BC[:, PROPOSE], limit_B - length_B - 1).clamp(0, MOST_DRAFTS)
    count_B = used_positions(config, length_B, wanted_B) * read_B
    start_B = torch.minimum(length_B, limit_B) - 1
    blocks = BlockRows(anchor_B, start_B * read_B, count_B, slots.tables[slot_B], longest, spare)
    lengths_B = (torch.minimum(length_B, limit_B - 1) * read_B).clamp(min=2).int()
    return RoundRows(at_BK.flatten(), row_BK.flatten(), blocks, lengths_B)
