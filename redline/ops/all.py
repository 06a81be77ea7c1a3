"""Every op, for tests and benchmarks."""

from typing import Any

from redline.ops.add_norm import add_norm
from redline.ops.best import best
from redline.ops.block import block
from redline.ops.draft_pass import draft_chain, draft_fuse, draft_pass
from redline.ops.linear import linear
from redline.ops.mla import mla_decode, mla_prefill, mla_qkv
from redline.ops.moe import moe
from redline.ops.op import Op
from redline.ops.route_experts import route_experts

ALL: tuple[Op[Any, Any], ...] = (
    *(linear, add_norm, route_experts, moe, mla_qkv, mla_decode, mla_prefill, block, best),
    *(draft_fuse, draft_pass, draft_chain),
)
