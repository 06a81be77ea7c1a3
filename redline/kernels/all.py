"""All kernels, for tests and benchmarks; the single-call forward passes of the models are in their `one_call.py`."""

from typing import Any

from redline.kernels.by_chip import best, checksum, checksums
from redline.kernels.cpu.add_norm import add_norm
from redline.kernels.cpu.blocks.step_inputs import step_inputs
from redline.kernels.cpu.linear import linear
from redline.kernels.cpu.mla import mla_decode, mla_prefill, mla_qkv
from redline.kernels.cpu.moe import moe
from redline.kernels.cpu.route_experts import route_experts
from redline.kernels.cpu.sample import sample
from redline.kernels.hopper.collectives.all_reduce import all_reduce
from redline.kernels.hopper.decode.absorb import absorb
from redline.kernels.hopper.decode.attend import attend
from redline.kernels.hopper.decode.choose_experts import choose_experts
from redline.kernels.hopper.decode.drafter_rows import join_rows, norm_states
from redline.kernels.hopper.decode.embed import embed
from redline.kernels.hopper.decode.experts_down import experts_down
from redline.kernels.hopper.decode.experts_up import experts_up
from redline.kernels.hopper.decode.gates import gates
from redline.kernels.hopper.decode.grouped import attend_grouped, keep_rows
from redline.kernels.hopper.decode.head import head, head_8
from redline.kernels.hopper.decode.pairs_down import pairs_down
from redline.kernels.hopper.decode.project_a import project_a
from redline.kernels.hopper.decode.project_out import project_out
from redline.kernels.hopper.decode.project_q import project_q
from redline.kernels.hopper.decode.unabsorb import unabsorb
from redline.kernels.hopper.prefill.grouped import grouped_experts
from redline.kernels.hopper.prefill.rowwise import norm_rows, rotate_heads, split_a, swiglu
from redline.kernels.hopper.prefill.sort_pairs import sort_pairs
from redline.kernels.hopper.step.adjust import adjust
from redline.kernels.hopper.step.keep_drafts import keep_drafts
from redline.kernels.hopper.step.read_rows import read_rows
from redline.kernels.hopper.step.step_rows import step_rows
from redline.kernels.hopper.step.suffix_match import suffix_match
from redline.kernels.hopper.step.verify_drafts import verify_drafts
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
        best.cpu,
        sample,
        step_inputs,
        checksum.cpu,
        checksums.cpu,
    ),
)

# The launches of a GPU decode step in order, then their counterparts for many tokens, then data transfers.
HOPPER: tuple[Kernel[Any, Any, Any], ...] = (
    *(step_rows, embed, project_a, project_q, absorb, attend, unabsorb, project_out, all_reduce, gates),
    *(choose_experts, experts_up, experts_down, pairs_down, head, head_8, adjust, best.hopper, verify_drafts),
    *(suffix_match, read_rows, keep_drafts),
    *(norm_states, join_rows, keep_rows, attend_grouped),
    *(norm_rows, split_a, rotate_heads, swiglu, sort_pairs, grouped_experts),
    checksum.hopper,
    checksums.hopper,
)
