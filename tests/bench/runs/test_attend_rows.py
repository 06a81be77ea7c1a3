"""The program that times attention of rows that verify drafts: what it compares before it times, and which ways."""

import pytest
import torch

from redline.bench.runs import attend_rows
from redline.bench.runs.attend_rows import Case, Memory, check, plain_attention, ways
from redline.kernels.cpu import native
from redline.kernels.emulator.emulator import emulation
from redline.kernels.hopper.decode.attend import AttendArgs, Plan, attend_as

CASE = Case(heads=8, tokens=3, context=62)

needs_compiler = pytest.mark.skipif(native.find_compiler() is None, reason="emulation needs a C++ compiler")


@pytest.fixture(scope="module")
def memory() -> Memory:
    return Memory(torch.device("cpu"), 4, [CASE.heads], 2)


@needs_compiler
@pytest.mark.parametrize("way", [Plan(16, 2, 1), Plan(32, 2, 3)])
def test_what_comes_out_is_attention(memory: Memory, way: Plan):
    args, w_uv = memory.steps(CASE)[-1]
    with emulation():
        assert check(args, way, w_uv) > 0


@needs_compiler
def test_a_token_too_many_is_told(memory: Memory, monkeypatch: pytest.MonkeyPatch):
    def sees_more(args: AttendArgs, way: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        return attend_as(args._replace(lengths_Q=(args.lengths_Q + 1).clamp(max=CASE.longest)), way)

    monkeypatch.setattr(attend_rows, "attend_as", sees_more)
    args, w_uv = memory.steps(CASE)[-1]
    with emulation(), pytest.raises(AssertionError, match="outputs differ by"):
        check(args, Plan(32, 2, 3), w_uv)


def test_a_row_gives_no_layer_anothers_pages(memory: Memory):
    steps = memory.steps(CASE)
    tables = [set(args.tables[int(args.slots_Q[0])].tolist()) for args, _ in steps]
    assert len(steps) == 2
    assert not tables[0] & tables[1]
    args, w_uv = steps[0]
    assert plain_attention(args, w_uv).shape == (CASE.tokens, CASE.heads * attend_rows.VALUE)


def test_every_way_that_may_be_quick_is_timed():
    assert {name: way.together for name, way in ways(Case(16, 3, 1024)).items()} == {"apart": 1, "together": 3}
    assert set(ways(Case(32, 1, 10240))) == {"apart", "wide"}
    assert set(ways(Case(64, 4, 10240))) == {"apart"}, "blocks of 64 heads are no fewer together"
