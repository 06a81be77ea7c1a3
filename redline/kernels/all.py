"""All kernels, for tests and benchmarks; the single-call forward passes of the models are in their `one_call.py`."""

from typing import Any

from redline.kernels.by_chip import best, checksum, checksums
from redline.kernels.cpu.add_norm import add_norm
from redline.kernels.cpu.attend_block import attend_block
from redline.kernels.cpu.blocks.step_inputs import step_inputs
from redline.kernels.cpu.linear import linear
from redline.kernels.cpu.mla import mla_decode, mla_prefill, mla_qkv
from redline.kernels.cpu.moe import moe
from redline.kernels.cpu.route_experts import route_experts
from redline.kernels.cpu.sample import sample
from redline.kernels.cuda.collectives.all_reduce import all_reduce
from redline.kernels.cuda.decode.absorb import absorb
from redline.kernels.cuda.decode.attend import attend
from redline.kernels.cuda.decode.choose_experts import choose_experts
from redline.kernels.cuda.decode.drafter_rows import join_rows, norm_states
from redline.kernels.cuda.decode.embed import embed
from redline.kernels.cuda.decode.experts_down import experts_down
from redline.kernels.cuda.decode.experts_up import experts_up
from redline.kernels.cuda.decode.gates import gates
from redline.kernels.cuda.decode.gqa import attend_grouped, keep_rows
from redline.kernels.cuda.decode.head import head, head_8
from redline.kernels.cuda.decode.pairs_down import pairs_down
from redline.kernels.cuda.decode.project_a import project_a
from redline.kernels.cuda.decode.project_out import project_out
from redline.kernels.cuda.decode.project_q import project_q
from redline.kernels.cuda.decode.unabsorb import unabsorb
from redline.kernels.cuda.patches import add_layer_norm, attend_patches
from redline.kernels.cuda.prefill.attend_blocks import attend_blocks
from redline.kernels.cuda.prefill.grouped import grouped_experts
from redline.kernels.cuda.prefill.rowwise import norm_rows, rotate_heads, split_a, swiglu
from redline.kernels.cuda.prefill.sort_pairs import sort_pairs
from redline.kernels.cuda.step.adjust import adjust
from redline.kernels.cuda.step.keep_drafts import keep_drafts
from redline.kernels.cuda.step.read_rows import read_rows
from redline.kernels.cuda.step.step_rows import step_rows
from redline.kernels.cuda.step.suffix_match import suffix_match
from redline.kernels.cuda.step.verify_drafts import verify_drafts
from redline.kernels.kernel import Kernel

CPU: tuple[Kernel[Any, Any, Any], ...] = (
    *(
        linear,
        add_norm,
        route_experts,
        moe,
        mla_qkv,
        mla_decode,
        mla_prefill,
        attend_block,
        best.cpu,
        sample,
        step_inputs,
        checksum.cpu,
        checksums.cpu,
    ),
)

# The launches of a GPU decode step in order, then their counterparts for many tokens, then data transfers.
CUDA: tuple[Kernel[Any, Any, Any], ...] = (
    *(step_rows, embed, project_a, project_q, absorb, attend, unabsorb, project_out, all_reduce, gates),
    *(choose_experts, experts_up, experts_down, pairs_down, head, head_8, adjust, best.cuda, verify_drafts),
    *(suffix_match, read_rows, keep_drafts),
    *(norm_states, join_rows, keep_rows, attend_grouped),
    *(norm_rows, split_a, rotate_heads, attend_blocks, swiglu, sort_pairs, grouped_experts),
    *(add_layer_norm, attend_patches),
    checksum.cuda,
    checksums.cuda,
)
