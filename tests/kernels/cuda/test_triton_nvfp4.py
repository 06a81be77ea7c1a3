"""Rounding to NVFP4 by Triton, in the interpreter if there is no GPU, compared with torch operations."""

import pytest
import torch
from torch import Tensor

from redline.kernels.cuda.triton.nvfp4 import dequantize_int4, round_nvfp4, totals
from redline.ops.formats import Int4, Nvfp4, quantize_int4
from redline.quant.nvfp4 import MAX_SCALING, SEARCHED, Nvfp4Workspace, exact_scale, max_scale
from tests.seeds import fresh_generator

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = 2048 if torch.cuda.is_available() else 5


@pytest.fixture
def g() -> torch.Generator:
    return fresh_generator()


def drawn(g: torch.Generator, rows: int, columns: int) -> Tensor:
    """Blocks with magnitudes that differ by up to 2^16, some all zero, some with values midway between two codes."""
    weight = torch.randn(rows, columns // 16, 16, generator=g)
    weight *= torch.exp2(torch.randint(-16, 1, weight.shape[:2], generator=g).float())[..., None]
    weight[0, 0] = 0
    weight[-1, -1] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2) * -(2.0**-4)
    return weight.flatten(1).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offsets", [MAX_SCALING, SEARCHED])
def test_every_block_has_the_least_error_of_the_scales_that_are_tried(
    dtype: torch.dtype, offsets: tuple[int, ...], g: torch.Generator
):
    weight = drawn(g, ROWS, 464).to(dtype)  # 29 blocks a row, so the last program has fewer blocks than its size
    scale = (max_scale if offsets == MAX_SCALING else exact_scale)(float(weight.abs().max()))
    codes, scales, sums = round_nvfp4(weight, scale, offsets)
    codes, scales, weight = codes.cpu(), scales.cpu(), weight.cpu()  # torch's division on a GPU rounds differently
    part = Nvfp4Workspace(scales.numel(), weight.device)
    part.take(weight.reshape(-1, 16), scale, None)
    byte, squared, plain = part.search(offsets)
    wanted, farthest = part.codes(scales.flatten().int())
    assert torch.equal(codes.view(-1, 8), wanted)
    value = (weight.float() / scale).reshape(-1, 16).abs()
    given = Nvfp4(codes, scales.view(torch.float8_e4m3fn), torch.ones(1)).dequantize().abs()
    error = (given.view(-1, 16) - value).square().sum(1)
    # If the errors of two scales differ by less than a sum's rounding, either is right; most are equal.
    torch.testing.assert_close(error, squared, rtol=1e-4, atol=0)
    assert (scales.flatten().int() == byte)[value.amax(1) > 2**-9].float().mean() > 0.98
    expected = torch.stack([squared.sum(), value.square().sum(), plain.sum(), farthest]).double()
    torch.testing.assert_close(torch.tensor(totals(sums), dtype=torch.float64), expected, rtol=1e-5, atol=0)


def test_int4_is_what_it_stands_for(g: torch.Generator):
    weight = quantize_int4(torch.randn(ROWS, 224, generator=g))
    moved = Int4(weight.packed.to(DEVICE), weight.scale.to(DEVICE))
    assert torch.equal(dequantize_int4(moved), moved.dequantize())
