"""Attention blocks that take the heads of several queries of one slot: compared with the reference thread by thread,
and when the planner of splits chooses them.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import redline.kernels.cuda.decode.attend as attention
from redline.kernels.cpu import native
from redline.kernels.cuda.collectives.share_latents import gain
from redline.kernels.cuda.decode.attend import AttendArgs, AttentionPlan, attend, plan, predicted, random_context
from redline.kernels.cuda.decode.unabsorb import unabsorb
from redline.kernels.cuda.layouts.tiled import Tiled
from tests.emulator.emulator import emulation
from tests.seeds import fresh_generator

FP8 = torch.float8_e4m3fn
RANK = 128
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.skipif(native.find_compiler() is None, reason="emulation needs a C++ compiler"),
]


def by_plan(monkeypatch: pytest.MonkeyPatch, rows: int, splits: int, together: int) -> None:
    monkeypatch.setattr(attention, "plan", lambda *_: AttentionPlan(rows, splits, together))


def emulated(args: AttendArgs) -> tuple[Tensor, Tensor]:
    assert attend.fits(args)
    with emulation():
        return attend.run(args)


def check(args: AttendArgs) -> tuple[Tensor, Tensor]:
    """Check that the kernel's latents equal the reference's where the reference has any, and are absent elsewhere."""
    (out, lse), (want, want_lse) = emulated(args), attend.op.reference(args)
    holds = want_lse > -torch.inf
    assert torch.equal(holds, lse > -torch.inf)
    assert not (holds[..., 1:] & ~holds[..., :-1]).any(), "a split after an empty one is not empty"
    torch.testing.assert_close(lse[holds], want_lse[holds], atol=1e-4, rtol=1e-5)
    error = (out[holds].float() - want[holds].float()).abs().max() / want[holds].float().abs().max()
    assert error < 1e-2
    return out, lse


@pytest.fixture(params=[set(), {16, 32, 64}], ids=["warps", "warpgroups"])
def either_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with blocks of any size by warps, then by warpgroups."""
    monkeypatch.setattr(attention, "WARPGROUP_ROWS", request.param)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize(
    ("rows", "heads", "together"), [(16, 10, 3), (32, 16, 2), (32, 24, 2), (64, 16, 3), (64, 24, 3), (64, 32, 3)]
)
def test_each_query_sees_its_own_context(
    monkeypatch: pytest.MonkeyPatch, rows: int, heads: int, together: int, dtype: torch.dtype
):
    """Lengths on both sides of a page boundary, which is also a split boundary; the heads fill several blocks, one, or
    part of one.
    """
    by_plan(monkeypatch, rows, 2, together)
    check(random_context(fresh_generator(), (129,), heads, RANK, dtype, together))


@pytest.mark.usefixtures("either_kernel")
def test_rows_of_several_lengths_and_splits_of_several_pages(monkeypatch: pytest.MonkeyPatch):
    """The last of three splits is one token that only the last query sees; for a context of one page it is empty."""
    by_plan(monkeypatch, 16, 3, 3)
    check(random_context(fresh_generator(), (257, 60), 5, RANK, verify=3))


def test_latents_as_wide_as_kimis(monkeypatch: pytest.MonkeyPatch):
    by_plan(monkeypatch, 64, 1, 3)
    check(random_context(fresh_generator(), (66,), 16, verify=3))


@pytest.mark.usefixtures("either_kernel")
def test_places_that_a_row_does_not_use_repeat_its_first(monkeypatch: pytest.MonkeyPatch):
    """`step_rows` fills them so. They get the same bits as the first."""
    by_plan(monkeypatch, 16, 2, 3)
    args = random_context(fresh_generator(), (66, 129), 4, RANK, verify=3)
    lengths_Q = args.lengths_Q.view(-1, 3).clone()
    lengths_Q[0, 1:], lengths_Q[1, 2:] = lengths_Q[0, 0], lengths_Q[1, 0]
    args.q_THW[2:4] = args.q_THW[1]
    out, lse = check(args._replace(lengths_Q=lengths_Q.flatten()))
    holds = lse[0] > -torch.inf
    for place in (1, 2):
        assert torch.equal(lse[place], lse[0])
        assert torch.equal(out[place][holds], out[0][holds])


@pytest.mark.usefixtures("either_kernel")
def test_a_query_without_context_gets_zeros_beside_one_that_has(monkeypatch: pytest.MonkeyPatch):
    """Both a query of length 0 and a query with only empty rows."""
    by_plan(monkeypatch, 16, 2, 3)
    args = random_context(fresh_generator(), (3, 70), 4, RANK, verify=3, skip=1)
    lengths_Q = torch.tensor([1, 2, 3, 0, 69, 70], dtype=torch.int32)
    out, lse = check(args._replace(lengths_Q=lengths_Q))
    assert torch.equal(lse[[0, 3]], torch.full_like(lse[[0, 3]], -torch.inf))
    w_uv = Tiled.prepare(torch.randn(4, 128, RANK).to(torch.bfloat16))
    with emulation():
        y = unabsorb.run(unabsorb.op.args(out, lse, w_uv))
    assert not y[[0, 3]].any()
    assert y[[1, 2, 4, 5]].isfinite().all()
    assert y[[1, 2, 4, 5]].any(1).all()


@pytest.mark.usefixtures("either_kernel")
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_rank_reads_its_part(monkeypatch: pytest.MonkeyPatch, rank: int):
    """With three ranks. The last query's token may be all of a rank's part."""
    by_plan(monkeypatch, 16, 1, 3)
    check(random_context(fresh_generator(), (65, 257), 5, RANK, verify=3)._replace(rank=rank, ranks=3))


@pytest.mark.usefixtures("either_kernel")
def test_the_bits_of_a_query_are_its_own(monkeypatch: pytest.MonkeyPatch):
    """They do not depend on neighbouring queries, on latents that the query does not see, or on other rows."""
    by_plan(monkeypatch, 16, 2, 3)
    args = random_context(fresh_generator(), (66, 129), 4, RANK, verify=3)
    out, lse = emulated(args)
    q_THW, plane = args.q_THW.clone(), args.plane.clone()
    q_THW[2:] *= -3
    page, place = divmod(int(args.lengths_Q[0]), 64)
    plane[int(args.tables[0, page]), place:, :] *= -7
    plane[args.tables[1].long()] = 5
    other, other_lse = emulated(args._replace(q_THW=q_THW, plane=plane))
    holds = lse[0] > -torch.inf
    assert torch.equal(other_lse[0], lse[0])
    assert torch.equal(other[0][holds], out[0][holds])
    assert not torch.equal(other_lse[1], lse[1])


@pytest.mark.usefixtures("either_kernel")
def test_a_token_that_is_broken_breaks_none_before_it(monkeypatch: pytest.MonkeyPatch):
    """The row's second token has a NaN latent, on the page in which the first token's context ends."""
    by_plan(monkeypatch, 16, 2, 3)
    args = random_context(fresh_generator(), (60,), 4, RANK, verify=3)
    out, lse = emulated(args)
    plane = args.plane.clone()
    page, place = divmod(int(args.lengths_Q[0]), 64)
    plane[int(args.tables[0, page]), place, 3] = torch.nan
    broken, broken_lse = emulated(args._replace(plane=plane))
    assert torch.equal(broken_lse[0], lse[0])
    assert torch.equal(broken[0, :, 0], out[0, :, 0])
    assert broken_lse[1:, :, 0].isnan().all()


@pytest.mark.usefixtures("either_kernel")
def test_together_gives_what_apart_gives_where_splits_fall_alike(monkeypatch: pytest.MonkeyPatch):
    """Within one split the order of summation is the same for every grouping of queries into blocks."""
    args = random_context(fresh_generator(), (130, 66), 4, RANK, verify=3)
    by_plan(monkeypatch, 16, 1, 1)
    apart, apart_lse = emulated(args)
    by_plan(monkeypatch, 16, 1, 3)
    together, lse = emulated(args)
    assert torch.equal(lse, apart_lse)
    assert torch.equal(together, apart)


def test_queries_that_are_no_whole_rows_are_refused():
    args = random_context(fresh_generator(), (66,), 4, RANK, verify=3)
    with pytest.raises(AssertionError, match="3 queries are no whole rows of 2 positions"):
        emulated(args._replace(positions=2))


@pytest.mark.parametrize("length", [1024, 10240, 32768, 131072])
@pytest.mark.parametrize("heads", [4, 8, 16, 24, 32, 64, 128])
@pytest.mark.parametrize(("rows", "positions"), [(1, 2), (1, 3), (4, 4), (8, 8)])
def test_together_is_chosen_where_it_takes_fewer_blocks_and_less_time(
    rows: int, positions: int, heads: int, length: int
):
    way, apart = plan(rows * positions, heads, length, positions), plan(rows * positions, heads, length)
    best, otherwise = (predicted(rows * positions, heads, length, each) for each in (positions, 1))
    if way.together == 1:
        assert (way, best) == (apart, otherwise)
    else:
        assert way.together == positions
        assert best < otherwise
        assert -(-positions * heads // way.rows) < positions * -(-heads // way.rows)


def test_ranks_of_few_heads_verify_drafts_together_and_whole_models_apart():
    assert plan(3, 16, 32768, 3) == AttentionPlan(64, 128, 3)
    assert predicted(3, 16, 32768, 3) < 0.75 * predicted(3, 16, 32768)
    assert plan(3, 16, 10240, 3).together == 1, "with few heads, combining the splits costs what grouping saves"
    assert plan(3, 32, 10240, 3).together == 3
    assert plan(3, 64, 10240, 3) == plan(3, 64, 10240)
    assert plan(3, 16, 1024, 3).together == 1, "few pages, read by blocks of 16 rows in parallel"


def test_what_is_chosen_was_measured_to_be_the_quicker():
    """Within 5 %, on an NVIDIA H100 (`attend-rows-h100.json`)."""
    cases = json.loads((RESULTS / "attend-rows-h100.json").read_text())["cases"]
    took = {(c["heads"], c["tokens"], c["context"], c["way"]): c["attend_unabsorb_us"] for c in cases}
    asked = {key[:3] for key in took if key[3] == "together"}
    assert len(asked) == 24
    for heads, tokens, context in asked:
        way = "together" if plan(tokens, heads, context + tokens, tokens).together > 1 else "apart"
        other = "apart" if way == "together" else "together"
        assert took[heads, tokens, context, way] <= 1.05 * took[heads, tokens, context, other]


def test_dividing_contexts_saves_less_where_queries_are_together():
    assert gain(3, 16, 4, 32768, 3) < gain(3, 16, 4, 32768)
