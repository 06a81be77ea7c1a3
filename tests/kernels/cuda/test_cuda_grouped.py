"""Products of many tokens with the experts that they chose: the kernels' own source, emulated thread by thread."""

import pytest
import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cuda.layouts.records import KINDS, Kind, Records, random_experts
from redline.kernels.cuda.prefill.grouped import grouped_experts, rtol_of
from redline.kernels.cuda.prefill.sort_pairs import WIDEST, sort_pairs, tile_width
from redline.ops.op import Case
from tests.emulator.emulator import emulation
from tests.seeds import fresh_generator

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="no C++ compiler")
HIDDEN, WIDTH = 320, 128  # Kimi-Nano's sizes, so that these tests share one program


@pytest.fixture
def g() -> torch.Generator:
    return fresh_generator()


def small(case: Case) -> bool:
    return case.small


def close(given: Tensor, wanted: Tensor, kind: Kind) -> bool:
    return bool((given - wanted).norm() <= rtol_of(kind) * wanted.norm())


def experts_and_x(tokens: int, experts: int, g: torch.Generator, kind: Kind) -> tuple[Tensor, Records, Records]:
    up = Records.prepare("up", random_experts(g, kind, "up", experts, 2 * WIDTH, HIDDEN))
    down = Records.prepare("down", random_experts(g, kind, "down", experts, HIDDEN, WIDTH))
    return torch.randn(tokens, HIDDEN, generator=g).to(torch.bfloat16), up, down


def emulated(*args: object) -> Tensor:
    with emulation():
        return grouped_experts.run(grouped_experts.op.args(*args))  # pyright: ignore[reportOptionalCall, reportArgumentType]


@pytest.mark.parametrize("case", [*filter(small, sort_pairs.op.cases())], ids=lambda case: case.name)
def test_pairs_are_sorted_as_the_reference_does(case: Case, g: torch.Generator):
    args = case.make(g)
    wanted = sort_pairs.op.reference(sort_pairs.op.args(*args))
    with emulation():
        given = sort_pairs(*args)
    count = int(wanted.tiles[0, 0])
    assert [int(n) for n in given.tiles[0, :3]] == [count, 0, 0]
    assert torch.equal(given.tiles[1 : 1 + count, :6], wanted.tiles[1 : 1 + count, :6])
    rows = int(wanted.tiles[count, 3] + wanted.tiles[count, 5])
    real = wanted.columns[:rows, 0] >= 0
    assert torch.equal(given.columns[:rows, 0], wanted.columns[:rows, 0])
    assert torch.equal(given.columns[:rows][real], wanted.columns[:rows][real])


@pytest.mark.pairwise
@pytest.mark.parametrize("case", [*filter(small, grouped_experts.op.cases())], ids=lambda case: case.name)
def test_experts_multiply_as_the_reference_does(case: Case, g: torch.Generator):
    args = case.make(g)
    assert close(emulated(*args), grouped_experts.op.reference(grouped_experts.op.args(*args)), args[3].kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [(1, 5, 40), (0, 8, 0), (7, 200, 9)])
def test_an_expert_may_have_any_number_of_tokens(counts: tuple[int, int, int], g: torch.Generator, kind: Kind):
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(counts)).to(torch.int32)
    ids = ids[torch.randperm(len(ids), generator=g)][:, None].contiguous()
    x, up, down = experts_and_x(len(ids), 3, g, kind)
    args = x, ids, torch.rand(len(ids), 1, generator=g), up, down
    assert close(emulated(*args), grouped_experts.op.reference(grouped_experts.op.args(*args)), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_bits_in_any_company(g: torch.Generator, kind: Kind):
    x, up, down = experts_and_x(30, 3, g, kind)
    ids = torch.stack([torch.randperm(3, generator=g)[:2] for _ in range(30)]).to(torch.int32)
    weight = torch.rand(30, 2, generator=g)
    alone = emulated(x[7:8].contiguous(), ids[7:8].contiguous(), weight[7:8].contiguous(), up, down)
    assert torch.equal(emulated(x, ids, weight, up, down)[7:8], alone)


def test_h_may_be_larger_than_f16_and_saturates_at_a_million(g: torch.Generator):
    x, up, down = experts_and_x(3, 3, g, "INT4")
    rest = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1), up, down
    assert close(
        emulated(x * 200, *rest), grouped_experts.op.reference(grouped_experts.op.args(x * 200, *rest)), "INT4"
    )
    assert emulated(x * 10_000, *rest).isfinite().all()


def test_tiles_are_no_wider_than_the_tokens_need():
    assert [tile_width(n) for n in (1, 8, 9, 171, WIDEST, WIDEST + 1)] == [8, 8, 16, 176, WIDEST, 104]
