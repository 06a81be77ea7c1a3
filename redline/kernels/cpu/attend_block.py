"""`block_attention` on a CPU."""

import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cpu.mla import kv_type
from redline.kernels.kernel import Kernel
from redline.messages.job import PAGE_TOKENS
from redline.ops import block_attention as meaning

_attend_block = native.function("attend_block")


def run(args: meaning.BlockAttentionArgs) -> Tensor:
    """-> float32 [R, B, H, X]."""
    q_RBHX, plane = args.q_RBHX, args.plane
    blocks, size, heads, width = q_RBHX.shape
    y = torch.empty_like(q_RBHX)
    _attend_block(
        q=q_RBHX,
        own=args.own_RBW,
        starts=args.starts_R,
        counts=args.counts_R,
        tables=args.tables_RP,
        plane=plane.data_ptr(),
        stride=plane.stride(1),
        y=y,
        kv_type=kv_type(plane),
        R=blocks,
        B=size,
        H=heads,
        G=args.own_RBW.shape[-1] // (2 * width),
        X=width,
        P=args.tables_RP.shape[1],
        window=args.window or 0,
    )
    return y


def fits(args: meaning.BlockAttentionArgs) -> bool:
    """Whether a head's width is a multiple of 32, queries are contiguous, and a page's rows follow one another."""
    plane = args.plane
    return (
        args.q_RBHX.shape[-1] % 32 == 0
        and args.q_RBHX.dtype == args.own_RBW.dtype == torch.float32
        and args.q_RBHX.is_contiguous()
        and args.own_RBW.is_contiguous()
        and plane.stride(2) == 1
        and plane.stride(0) == PAGE_TOKENS * plane.stride(1)
    )


attend_block = Kernel(meaning.block_attention, run, "cpu", fits)
