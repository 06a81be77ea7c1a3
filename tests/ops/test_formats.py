"""The NVFP4 format: nearest codes, block scales and the matrix scale."""

import torch

from redline.ops.formats import Nvfp4, quantize_nvfp4
from tests.seeds import fresh_generator

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def test_every_code_stands_for_its_value():
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4)[None]
    weight = Nvfp4(packed, torch.full((1, 1), 2.0).to(torch.float8_e4m3fn), torch.tensor([0.25]))
    assert torch.equal(weight.dequantize()[0], torch.cat([VALUES, -VALUES]) * 0.5)


def test_what_nvfp4_can_say_is_kept_to_the_last_bit():
    g = fresh_generator()
    values = VALUES[torch.randint(0, 8, (3, 40, 64), generator=g)] * (
        1 - 2 * torch.randint(0, 2, (3, 40, 64), generator=g)
    )
    values[..., 0::16] = 6.0  # so that the block keeps its scale
    scales = (torch.rand(3, 40, 4, generator=g) + 0.5).to(torch.float8_e4m3fn).float()
    scales[:, 0, 0] = 448.0
    weight = values * scales.repeat_interleave(16, -1) * 0.125
    packed = quantize_nvfp4(weight)
    assert packed.shape == weight.shape
    assert torch.equal(packed.scale, torch.full((3, 1), 0.125))
    assert torch.equal(packed.dequantize(), weight)


def test_rounding_is_to_the_nearest_code_of_two_to_the_even_one():
    g = fresh_generator()
    block = torch.cat([torch.tensor([6.0, 0.25, 0.75, 1.25, -1.75, 2.5, 3.5, 5.0]), torch.rand(8, generator=g) * 6])
    weight = torch.cat([block, torch.full((16,), 6.0 * 448.0)])[None]  # the second block makes the matrix scale 1
    given = quantize_nvfp4(weight).dequantize()[0, :16]
    assert given[:8].tolist() == [6.0, 0.0, 1.0, 1.0, -2.0, 2.0, 4.0, 4.0]
    distance = (block[8:, None] - VALUES).abs()
    assert torch.equal((given[8:] - block[8:]).abs(), distance.amin(1))


def test_zeros_stay_zeros():
    assert not quantize_nvfp4(torch.zeros(2, 8, 32)).dequantize().any()


def test_stacked_matrices_have_scales_of_their_own():
    gate, up = quantize_nvfp4(torch.randn(8, 32)), quantize_nvfp4(torch.randn(8, 32) * 100)
    parts = zip((gate.codes, gate.scales, gate.scale), (up.codes, up.scales, up.scale), strict=True)
    both = Nvfp4(*(torch.cat(pair) for pair in parts))
    assert torch.equal(both.dequantize(), torch.cat([gate.dequantize(), up.dequantize()]))
