"""The scale search finds the same result as exhaustive search, and writes no number that readers misread."""

import pytest
import torch
from torch import Tensor

from redline.ops.formats import E4M3_MOST, Int4, Nvfp4, quantize_int4, quantize_nvfp4
from redline.quant.int4 import MINMAX, round_int4
from redline.quant.int4 import SEARCHED as SEARCHED_INT4
from redline.quant.nvfp4 import MAX_SCALING, SEARCHED, WIDELY_SEARCHED, exact_scale, max_scale, round_nvfp4


def random(kind: str, rows: int = 64, columns: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(rows, columns, generator=generator)
    if kind == "heavy tails":
        return normal / torch.rand(rows, columns, generator=generator).clamp(min=0.01)
    return quantize_int4(normal).dequantize() if kind == "INT4" else normal


def largest(weight: Tensor) -> float:
    return float(weight.abs().max())


def exhaustive(weight: Tensor, scale: float, importance: Tensor | None = None) -> float:
    """The least squared error over all 126 positive scales of each block, by the plain formula."""
    blocks = (weight.double() / scale).reshape(-1, 16)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    best = torch.full((len(blocks),), torch.inf, dtype=torch.float64)
    weights = torch.ones(1, 16) if importance is None else importance.view(-1, 16).repeat(len(weight), 1)
    for byte in range(1, 127):
        unit = torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        distance = (blocks.abs()[..., None] / unit - grid).abs().amin(-1) * unit
        best = torch.minimum(best, (distance.square() * weights).sum(-1))
    return float(best.sum()) * scale**2


def test_max_scaling_is_that_of_ops_code_for_code():
    weight = random("normal")
    given, error = round_nvfp4(weight, max_scale(largest(weight)), MAX_SCALING)
    expected = quantize_nvfp4(weight)
    assert torch.equal(given.codes, expected.codes)
    assert torch.equal(given.scales.view(torch.uint8), expected.scales.view(torch.uint8))
    assert torch.equal(given.scale, expected.scale)
    assert error.squared == error.max_scaling


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "INT4"])
def test_the_search_loses_a_thousandth_to_trying_every_scale_of_every_block(kind: str):
    weight = random(kind)
    scale = exact_scale(largest(weight))
    packed, error = round_nvfp4(weight, scale, SEARCHED)
    best = exhaustive(weight, scale)
    assert best * 0.99999 < error.squared < best * 1.001**2
    _, wider = round_nvfp4(weight, scale, WIDELY_SEARCHED)
    assert wider.squared == pytest.approx(best, rel=1e-5)
    assert (packed.dequantize() - weight).square().sum().item() == pytest.approx(error.squared, rel=1e-5)
    assert (packed.dequantize() - weight).abs().max().item() == pytest.approx(error.largest, rel=1e-5)
    assert error.weight_squared == pytest.approx(weight.square().sum().item(), rel=1e-5)


def test_a_search_of_what_was_int4_has_three_quarters_of_max_scalings_error():
    weight = random("INT4", 256)
    _, searched = round_nvfp4(weight, exact_scale(largest(weight)), SEARCHED)
    _, plain = round_nvfp4(weight, max_scale(largest(weight)), MAX_SCALING)
    assert (searched.squared / plain.squared) ** 0.5 <= 0.75


def test_inputs_that_matter_more_are_rounded_better():
    weight, importance = random("normal"), torch.ones(256)
    importance[::16] = 100.0
    scale = exact_scale(largest(weight))
    packed, _ = round_nvfp4(weight, scale, WIDELY_SEARCHED, importance)
    given = ((packed.dequantize() - weight).square() * importance).sum().item()
    assert given <= 1.01 * exhaustive(weight, scale, importance)
    plain, _ = round_nvfp4(weight, scale, SEARCHED)
    assert given < 0.9 * ((plain.dequantize() - weight).square() * importance).sum().item()


@pytest.mark.parametrize("level", ["fast", "search"])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 3e4])
def test_no_scale_is_nan_or_zero_and_searched_ones_do_not_saturate(level: str, size: float):
    weight = random("normal") * size
    weight[3, 16:32] = 0.0
    weight[5, :16] = 0.0
    weight[5, 7] = -largest(weight) * 3  # the only weight of its block
    weight[9] *= 1e-4
    whole = largest(weight)
    scale, offsets = (max_scale(whole), MAX_SCALING) if level == "fast" else (exact_scale(whole), SEARCHED)
    packed, error = round_nvfp4(weight, scale, offsets)
    bytes_ = packed.scales.view(torch.uint8).int()
    assert 1 <= bytes_.min() <= bytes_.max() <= 126
    assert packed.dequantize().isfinite().all()
    assert not packed.dequantize()[3, 16:32].any()
    assert (error.squared / error.weight_squared) ** 0.5 < 0.12
    if level == "search":
        assert whole / scale <= 3 * E4M3_MOST
        assert packed.dequantize()[5, 7] == pytest.approx(weight[5, 7].item(), rel=0.04)


def test_a_weight_of_zeros_stays_zero():
    for scale, offsets in ((max_scale(0.0), MAX_SCALING), (exact_scale(0.0), SEARCHED)):
        packed, error = round_nvfp4(torch.zeros(2, 32), scale, offsets)
        assert not packed.dequantize().any()
        assert (error.squared, error.largest) == (0.0, 0.0)


def test_a_searched_weight_is_exact_in_bf16_and_either_way_round():
    packed, _ = round_nvfp4(random("heavy tails"), exact_scale(1234.5), SEARCHED)
    assert torch.equal(packed.dequantize(torch.bfloat16).float(), packed.dequantize())
    other = Nvfp4(packed.codes, packed.scales, 1 / (1 / packed.scale))
    assert torch.equal(other.dequantize(), packed.dequantize())


def test_bf16_weights_of_any_number_of_blocks_are_worked_through(monkeypatch: pytest.MonkeyPatch):
    weight = random("normal", 10, 48).bfloat16()
    whole, whole_error = round_nvfp4(weight, 0.5, SEARCHED, torch.rand(48, generator=torch.Generator().manual_seed(1)))
    monkeypatch.setattr("redline.quant.nvfp4.BLOCKS_CPU", 7)
    given, error = round_nvfp4(weight, 0.5, SEARCHED, torch.rand(48, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(given.codes, whole.codes)
    assert torch.equal(given.scales.view(torch.uint8), whole.scales.view(torch.uint8))
    assert error.squared == pytest.approx(whole_error.squared, rel=1e-5)


def test_int4_by_minmax_is_that_of_ops_and_a_search_is_never_worse():
    weight = random("normal", 300)
    plain, error = round_int4(weight, MINMAX)
    expected = quantize_int4(weight)
    assert torch.equal(plain.packed, expected.packed)
    assert torch.equal(plain.scale, expected.scale)
    searched, better = round_int4(weight, SEARCHED_INT4)
    assert isinstance(searched, Int4)
    assert better.squared < 0.97 * error.squared == pytest.approx(0.97 * better.max_scaling)
    assert (searched.dequantize() - weight).square().sum().item() == pytest.approx(better.squared, rel=1e-5)


@pytest.mark.parametrize("largest_code", [7, 8])
def test_int4_to_bf16_and_back_is_a_round_trip(largest_code: int):
    """The largest weight has code 7 or -8, so its group's scale is its magnitude over 7 or 8."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-7, 8, (512, 8, 32), generator=generator)
    codes[..., 3] = 7 if largest_code == 7 else -8
    scale = torch.rand(512, 8, generator=generator).add(0.01).bfloat16()
    weight = (codes * scale.float()[..., None]).flatten(-2)
    packed, error = round_int4(weight.bfloat16(), SEARCHED_INT4)
    assert torch.equal(packed.codes() - 8, codes.flatten(-2))
    assert (packed.scale == scale).float().mean() > 0.999
    assert (error.squared / error.weight_squared) ** 0.5 < 0.0025


def test_a_group_of_zeros_has_the_scale_one_after_a_search_too():
    packed, error = round_int4(torch.zeros(2, 64), SEARCHED_INT4)
    assert torch.equal(packed.scale, torch.ones(2, 2).bfloat16())
    assert (error.squared, packed.dequantize().any()) == (0.0, False)
