"""Absorbed attention's three kernels against their references, on a CPU, thread by thread."""

from typing import Any

import pytest
import torch
from torch import Tensor

import redline.kernels.cuda.decode.attend as attention
from redline.kernels.cpu.panels import Matrix
from redline.kernels.cuda.decode.absorb import absorb
from redline.kernels.cuda.decode.attend import MAX_WAVES, SMS, AttentionPlan, attend, plan, random_context
from redline.kernels.cuda.decode.unabsorb import MAX_SPLITS, unabsorb
from redline.kernels.cuda.layouts.tiled import Tiled
from redline.kernels.kernel import Kernel
from redline.ops.mla import MlaWeights, mla_decode
from redline.ops.op import Case
from tests.emulator.emulator import emulation
from tests.seeds import fresh_generator

FP8 = torch.float8_e4m3fn


def generator() -> torch.Generator:
    return fresh_generator()


def emulated(kernel: Kernel[Any, Any, Any], args: tuple[Any, ...]) -> Any:
    assert kernel.fits(kernel.op.args(*args))
    with emulation():
        return kernel.run(kernel.op.args(*args))


def error(got: Tensor, want: Tensor) -> float:
    """The largest error, relative to the largest value."""
    assert got.shape == want.shape
    assert not got.isnan().any()
    return ((got.float() - want.float()).abs().max() / want.float().abs().max()).item()


def check_attend(args: tuple[Any, ...]) -> None:
    (out, lse), (want, want_lse) = emulated(attend, args), attend.op.reference(attend.op.args(*args))
    holds = want_lse > -torch.inf
    assert torch.equal(holds, lse > -torch.inf)
    assert error(lse[holds], want_lse[holds]) < 1e-5
    assert error(out[holds], want[holds]) < 1e-2


@pytest.fixture(params=[set(), {16, 32, 64}], ids=["warps", "warpgroups"])
def either_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with blocks of any size by warps, then by warpgroups."""
    monkeypatch.setattr(attention, "WARPGROUP_ROWS", request.param)


SMALL = [
    pytest.param(kernel, case, id=f"{kernel.op.name}: {case.name}")
    for kernel in (absorb, unabsorb)
    for case in kernel.op.cases()
]


@pytest.mark.parametrize(("kernel", "case"), [param for param in SMALL if param.values[1].small])
def test_a_kernel_is_its_reference(kernel: Kernel[Any, Any, Any], case: Case):
    args = case.make(generator())
    assert error(emulated(kernel, args), kernel.op.reference(kernel.op.args(*args))) < 1e-2


@pytest.mark.parametrize("case", [case for case in attend.op.cases() if case.small], ids=lambda case: case.name)
def test_attention_over_a_split_is_its_reference(case: Case):
    check_attend(case.make(generator()))


@pytest.mark.pairwise
@pytest.mark.usefixtures("either_kernel")
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_a_split_goes_through_its_pages(monkeypatch: pytest.MonkeyPatch, splits: int, rows: int, dtype: torch.dtype):
    monkeypatch.setattr(attention, "plan", lambda *_: AttentionPlan(rows, splits))
    check_attend(random_context(generator(), (250, 3), 4, dtype=dtype))


def test_blocks_of_64_rows_are_multiplied_by_warpgroups():
    assert [attention.has_warpgroups(rows, 512) for rows in (16, 32, 64)] == [False, False, True]


@pytest.mark.pairwise
@pytest.mark.usefixtures("either_kernel")
@pytest.mark.parametrize("heads", [16, 20, 64, 80])
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_heads_fill_blocks_or_parts_of_them(monkeypatch: pytest.MonkeyPatch, heads: int, rows: int, dtype: torch.dtype):
    monkeypatch.setattr(attention, "plan", lambda *_: AttentionPlan(rows, 1))
    check_attend(random_context(generator(), (70,), heads, dtype=dtype))


@pytest.mark.usefixtures("either_kernel")
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_a_drafters_short_latents(dtype: torch.dtype):
    check_attend(random_context(generator(), (130, 7), 4, rank=128, dtype=dtype))


@pytest.mark.usefixtures("either_kernel")
def test_drafts_see_those_before_them():
    check_attend(random_context(generator(), (66, 130), 4, verify=4))


@pytest.mark.usefixtures("either_kernel")
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_a_first_row_that_holds_nothing_is_not_read(dtype: torch.dtype):
    check_attend(random_context(generator(), (2, 64, 65, 130), 4, dtype=dtype, skip=1))


@pytest.mark.usefixtures("either_kernel")
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_parts_that_ranks_read_are_the_context(ranks: int):
    """Also if a rank's part is empty: a context of one page belongs to the first rank alone."""
    args = random_context(generator(), (3, 64, 65, 450), 4, skip=1)
    parts = [args._replace(rank=rank, ranks=ranks) for rank in range(ranks)]
    for part in parts:
        check_attend(part)
    latents, lse = (torch.cat(each, 2) for each in zip(*(attend.op.reference(part) for part in parts), strict=True))
    w_uv = Tiled.prepare(torch.randn(4, 128, 512).to(torch.bfloat16))
    want = unabsorb.op.reference(unabsorb.op.args(*attend.op.reference(args), w_uv))
    assert error(unabsorb.op.reference(unabsorb.op.args(latents, lse, w_uv)), want) < 1e-2
    assert not (lse[0, :, lse.shape[2] // ranks :] > -torch.inf).any()


@pytest.mark.usefixtures("either_kernel")
def test_every_e4m3_is_widened_exactly():
    """One row, so that the result is that row."""
    q, tokens, slots, lengths, tables, plane, scale, longest, skip, *_ = random_context(generator(), (1,), 4, dtype=FP8)
    codes = torch.arange(256, dtype=torch.uint8)
    row = codes[codes & 127 != 127].repeat(3)[:512].view(FP8)
    plane[tables[0, 0].long(), 0, :512] = row
    out, _ = emulated(attend, (q, tokens, slots, lengths, tables, plane, scale, longest, skip))
    assert torch.equal(out[0, 0, 0], row.to(torch.bfloat16))


def test_a_query_without_context_gets_zeros():
    """As in a captured CUDA graph with more places than rows."""
    args = list(random_context(generator(), (5, 100), 4))
    args[3] = torch.tensor([0, 100], dtype=torch.int32)
    out, lse = emulated(attend, tuple(args))
    assert torch.equal(lse[0], torch.full_like(lse[0], -torch.inf))
    w_uv = Tiled.prepare(torch.randn(4, 128, 512).to(torch.bfloat16))
    got = emulated(unabsorb, (out, lse, w_uv))
    assert not got[0].any()
    assert error(got, unabsorb.op.reference(unabsorb.op.args(*attend.op.reference(attend.op.args(*args)), w_uv))) < 1e-2


@pytest.mark.usefixtures("either_kernel")
def test_company_does_not_matter_to_a_query(monkeypatch: pytest.MonkeyPatch):
    """For a given number of splits, the bits depend on the query alone; so do those of `absorb` and `unabsorb`."""
    monkeypatch.setattr(attention, "plan", lambda *_: AttentionPlan(16, 2))
    g = generator()
    q, tokens, slots, lengths, *rest = random_context(g, (150, 64, 9), 4, verify=3)._replace(positions=1)
    w_uv = Tiled.prepare(torch.randn(4, 128, 512, generator=g).to(torch.bfloat16))
    together = emulated(unabsorb, (*emulated(attend, (q, tokens, slots, lengths, *rest)), w_uv))
    for i in range(9):
        alone = tokens[i : i + 1], slots[i : i + 1], lengths[i : i + 1]
        assert torch.equal(emulated(unabsorb, (*emulated(attend, (q, *alone, *rest)), w_uv))[0], together[i])
    w_uk = Tiled.prepare(torch.randn(4, 512, 128, generator=g).to(torch.bfloat16))
    queries = torch.randn(9, 4, 192, generator=g).to(torch.bfloat16)
    absorbed = emulated(absorb, (queries, w_uk))
    assert torch.equal(torch.cat([emulated(absorb, (queries[i : i + 1], w_uk)) for i in range(9)]), absorbed)


def test_the_three_of_them_are_mla_decode():
    g = generator()
    heads, nope, rope, rank, value = 4, 128, 64, 512, 128
    _, tokens, slots, lengths, tables, plane, scale, longest, skip, *_ = random_context(g, (1, 64, 65, 200), heads)
    w_uk = (torch.randn(heads, rank, nope, generator=g) * nope**-0.5).to(torch.bfloat16)
    w_uv = (torch.randn(heads, value, rank, generator=g) * rank**-0.5).to(torch.bfloat16)
    q = torch.randn(5, heads, nope + rope, generator=g).to(torch.bfloat16)
    absorbed = emulated(absorb, (q, Tiled.prepare(w_uk)))
    splits = emulated(attend, (absorbed, tokens, slots, lengths, tables, plane, scale, longest, skip))
    got = emulated(unabsorb, (*splits, Tiled.prepare(w_uv)))
    unused = Matrix(torch.empty(heads * (nope + rope), 1), heads * (nope + rope), panels=False)
    one = torch.ones(1)
    w = MlaWeights(unused, one, one, unused, Matrix(w_uk, rank, panels=False), Matrix(w_uv, value, panels=False), 1e-5)
    want = torch.zeros(5, heads, value)
    mla_decode(q, w, scale, tokens, slots, lengths, tables, plane, want, skip)
    assert error(got, want[1:].flatten(1)) < 1e-2


@pytest.mark.parametrize("queries", [1, 2, 3, 8, 64, 67, 100, 512])
@pytest.mark.parametrize("heads", [4, 16, 64, 128])
@pytest.mark.parametrize("length", [1, 64, 1000, 8192, 32768, 131072])
def test_blocks_fill_the_chip_and_no_split_is_shorter_than_a_page(queries: int, heads: int, length: int):
    rows, splits, _ = plan(queries, heads, length)
    pages, tiles = -(-length // 64), queries * -(-heads // rows)
    assert 1 <= splits <= min(pages, MAX_SPLITS)
    assert tiles * splits <= max(MAX_WAVES * SMS, tiles)
    if queries * pages >= 16 * SMS:
        assert tiles * splits >= (
            100 if heads >= 64 else 60
        )  # with 16 rows, 60 blocks already reach the bandwidth of the L2 cache


def test_a_long_context_takes_the_whole_chip_and_a_short_one_small_blocks():
    assert plan(1, 64, 1024).rows < plan(1, 64, 32768).rows == 64
    assert plan(1, 64, 32768).splits == 128
    assert plan(8, 64, 8192) == AttentionPlan(64, 16)


# Microseconds of `attend` on an NVIDIA H200, by shape (queries, length): 64 heads, bf16 pages, blocks of warps.
MEASURED = {
    (1, 1025): {
        AttentionPlan(16, 17): 5.6,
        AttentionPlan(32, 17): 6.8,
        AttentionPlan(16, 8): 9.0,
        AttentionPlan(32, 8): 12.9,
    },
    (4, 1025): {
        AttentionPlan(32, 17): 11.6,
        AttentionPlan(16, 8): 9.6,
        AttentionPlan(32, 9): 10.2,
        AttentionPlan(16, 17): 10.3,
    },
    (1, 8193): {
        AttentionPlan(32, 128): 12.1,
        AttentionPlan(32, 66): 12.2,
        AttentionPlan(16, 33): 12.8,
        AttentionPlan(32, 43): 15.0,
    },
    (1, 32769): {AttentionPlan(32, 66): 32.6, AttentionPlan(32, 132): 37.0, AttentionPlan(16, 33): 39.0},
}


@pytest.mark.parametrize("shape", MEASURED)
def test_the_plans_model_is_what_was_measured(shape: tuple[int, int]):
    """Each time is within a fifth; the plan that the model ranks first is within a tenth of the fastest."""
    (queries, length), ways = shape, MEASURED[shape]
    modelled = {way: attention.microseconds(way, queries, 64, -(-length // 64)) for way in ways}
    for way, measured in ways.items():
        assert modelled[way] == pytest.approx(measured, rel=0.2), way
    assert ways[min(ways, key=modelled.__getitem__)] <= 1.1 * min(ways.values())
