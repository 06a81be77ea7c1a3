"""Pages with a stride: one layer of a pool with several layers in a page gives the bits of a separate plane."""

from typing import Any

import pytest
import torch
from torch import Tensor

import redline.kernels.cuda.decode.attend as attention
from redline.kernels.cpu import native
from redline.kernels.cuda.decode.attend import AttentionPlan, attend, random_context
from redline.kernels.cuda.decode.project_q import project_q
from redline.kernels.cuda.prefill.chunk_attention import attend_chunks
from redline.kernels.cuda.prefill.rowwise import split_a
from redline.kernels.inputs import Chunk
from redline.kernels.kernel import Kernel
from redline.messages.job import PAGE_TOKENS
from redline.ops.mla import NANO, random_weights
from tests.emulator.emulator import emulation
from tests.seeds import fresh_generator

FP8 = torch.float8_e4m3fn
LAYERS, LAYER = 3, 1

needs_compiler = pytest.mark.skipif(native.find_compiler() is None, reason="emulation needs a C++ compiler")


def in_a_pool(plane: Tensor) -> tuple[Tensor, Tensor]:
    """-> the same numbers as one layer of a pool [pages, layers, 64, width], and the pool, with NaN elsewhere."""
    pages, tokens, width = plane.shape
    pool = torch.full((pages, LAYERS, tokens, width), torch.nan).to(plane.dtype)
    pool[:, LAYER] = plane
    return pool[:, LAYER], pool


def check_others_are_as_they_were(pool: Tensor) -> None:
    assert pool[:, :LAYER].float().isnan().all()
    assert pool[:, LAYER + 1 :].float().isnan().all()


@pytest.mark.pairwise
@needs_compiler
@pytest.mark.parametrize("warpgroups", [set(), {16, 32, 64}], ids=["warps", "warpgroups"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_attention_goes_from_page_to_page(
    monkeypatch: pytest.MonkeyPatch, warpgroups: set[int], splits: int, dtype: torch.dtype
):
    monkeypatch.setattr(attention, "WARPGROUP_ROWS", warpgroups)
    monkeypatch.setattr(attention, "plan", lambda *_: AttentionPlan(16, splits))
    args = random_context(fresh_generator(), (250, 3, 130), 4, dtype=dtype)
    plane, pool = in_a_pool(args.plane)
    with emulation():
        (out, lse), (want, want_lse) = attend.run(args._replace(plane=plane)), attend.run(args)
    holds = want_lse > -torch.inf
    assert torch.equal(lse, want_lse)
    assert torch.equal(out[holds], want[holds])
    assert torch.equal(attend.op.reference(args._replace(plane=plane))[1], attend.op.reference(args)[1])
    check_others_are_as_they_were(pool)


WRITES = [
    pytest.param(kernel, case, id=f"{kernel.op.name}: {case.name}")
    for kernel in (project_q, split_a)
    for case in kernel.op.cases()
    if case.small
]


@pytest.mark.pairwise
@needs_compiler
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs if there is no GPU")
@pytest.mark.parametrize("how", ["run", "reference"])
@pytest.mark.parametrize(("kernel", "case"), WRITES)
def test_a_row_is_written_into_its_page(kernel: Kernel[Any, Any, Any], case: Any, how: str):
    """Written by dense.cu, by Triton, and by the references."""
    args = case.make(fresh_generator())
    plane, pool = in_a_pool(args.plane)
    before = args.plane.clone()
    with emulation():
        for way in (args, args._replace(plane=plane)):
            if how == "run":
                kernel.run(way)
            else:
                kernel.op.reference(way)
    assert torch.equal(plane.float(), args.plane.float())
    assert not torch.equal(args.plane.float(), before.float())
    check_others_are_as_they_were(pool)


def test_a_prompts_chunks_read_their_pages():
    """The chunks are the beginning of one prompt and the end of another."""
    g = fresh_generator()
    w = random_weights(g, *NANO)
    tables = torch.randperm(6, generator=g).to(torch.int32).view(2, 3)
    alone = torch.randn(6, PAGE_TOKENS, w.rank + w.rope, generator=g)
    chunks = [Chunk(slot=0, start=0, count=70, first=0), Chunk(slot=1, start=65, count=30, first=70)]
    places = torch.cat([torch.arange(70), torch.arange(65, 95)])
    rows = tables[torch.tensor([0] * 70 + [1] * 30), places // PAGE_TOKENS].long() * PAGE_TOKENS
    rows += places % PAGE_TOKENS
    q = torch.randn(100, w.heads, w.nope + w.rope, generator=g)
    outs = [torch.zeros(100, w.heads, w.value) for _ in range(2)]
    for plane, out in zip((alone, in_a_pool(alone)[0]), outs, strict=True):
        attend_chunks(q, w, 0.1, chunks, rows, tables, plane, out)
    assert outs[0].any(-1).all()
    assert torch.equal(*outs)
