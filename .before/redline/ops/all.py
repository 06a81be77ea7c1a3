"""Every op, for tests and benchmarks."""

from typing import Any

from redline.ops.absorb import absorb
from redline.ops.add_norm import add_norm
from redline.ops.attend import attend
from redline.ops.best import best
from redline.ops.block import block
from redline.ops.by_row import norm_rows, rotate_heads, split_a, swiglu
from redline.ops.choose_experts import choose_experts
from redline.ops.draft_pass import draft_chain, draft_fuse, draft_pass
from redline.ops.draw import draw
from redline.ops.embed import embed
from redline.ops.experts_down import experts_down
from redline.ops.experts_up import experts_up
from redline.ops.gates import gates
from redline.ops.grouped import grouped_experts
from redline.ops.head import head
from redline.ops.linear import linear
from redline.ops.mla import mla_decode, mla_prefill, mla_qkv
from redline.ops.moe import moe
from redline.ops.op import Op
from redline.ops.project_a import project_a
from redline.ops.project_out import project_out
from redline.ops.project_q import project_q
from redline.ops.route_experts import route_experts
from redline.ops.settle_rows import settle_rows
from redline.ops.sort_pairs import sort_pairs
from redline.ops.step_inputs import step_inputs
from redline.ops.step_rows import step_rows
from redline.ops.transformer import transformer
from redline.ops.unabsorb import unabsorb

ALL: tuple[Op[Any, Any], ...] = (
    *(linear, add_norm, route_experts, moe, mla_qkv, mla_decode, mla_prefill, block, transformer, best, draw),
    *(step_inputs, draft_fuse, draft_pass, draft_chain),
)

# The launches of a decode step on a GPU, in their order, and what many tokens take in their place.
CUDA: tuple[Op[Any, Any], ...] = (
    *(step_rows, embed, project_a, project_q, absorb, attend, unabsorb, project_out, gates),
    *(choose_experts, experts_up, experts_down, head, best, settle_rows),
    *(norm_rows, split_a, rotate_heads, swiglu, sort_pairs, grouped_experts),
)
