"""Weights stored in panels equal the given weights bit for bit, for every shape."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cpu.panels import Int4Panels, Matrix, Nvfp4Panels, prepare_experts, stack_experts
from redline.ops.formats import Int4, Nvfp4

LEADS = st.sampled_from([(), (1,), (3,), (2, 2)])


def any_bf16(seed: int, *shape: int) -> Tensor:
    """Weights of every bit pattern, including NaNs and infinities."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)


def any_int4(seed: int, e: int, n: int, k: int) -> Int4:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(-(2**31), 2**31, (e, n, k // 8), generator=generator).to(torch.int32)
    return Int4(packed, any_bf16(seed, e, n, k // 32))


def any_nvfp4(seed: int, e: int, n: int, k: int, stacked: int = 1) -> Nvfp4:
    """Weights of every code and every block scale, including NaN; each of the `stacked` matrices has a global scale of
    its own.
    """
    generator = torch.Generator().manual_seed(seed)
    codes, scales = (
        torch.randint(0, 256, (e, n, size), generator=generator, dtype=torch.uint8) for size in (k // 2, k // 16)
    )
    return Nvfp4(codes, scales.view(torch.float8_e4m3fn), torch.rand(e, stacked, generator=generator) + 0.5)


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype == b.dtype == torch.bfloat16:
        a, b = a.view(torch.int16), b.view(torch.int16)  # NaN is not equal to itself
    if a.dtype == b.dtype == torch.float8_e4m3fn:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return a.dtype == b.dtype and torch.equal(a, b)


@given(seed=st.integers(0, 1000), lead=LEADS, n=st.integers(1, 100), steps=st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_a_matrix_in_panels_is_the_matrix(seed: int, lead: tuple[int, ...], n: int, steps: int):
    weight = any_bf16(seed, *lead, n, 32 * steps)
    matrix = Matrix.prepare(weight)
    assert matrix.panels
    assert matrix.shape == weight.shape
    assert same_bits(matrix.dense(), weight)


def test_a_transposed_matrix_is_prepared_as_what_it_means():
    weight = any_bf16(1, 3, 40, 96).transpose(1, 2)
    assert same_bits(Matrix.prepare(weight).dense(), weight)


def test_panels_are_padded_with_zeros():
    matrix = Matrix.prepare(torch.ones(33, 64, dtype=torch.bfloat16))
    assert matrix.data.numel() == 64 * 64
    assert float(matrix.data.float().sum()) == 33 * 64


def test_inputs_that_fill_no_step_stay_plain():
    weight = any_bf16(1, 64, 48)
    matrix = Matrix.prepare(weight)
    assert not matrix.panels
    assert matrix.dense() is weight


@given(seed=st.integers(0, 1000), e=st.integers(1, 4), panels=st.integers(1, 3), groups=st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_int4_in_panels_is_the_int4(seed: int, e: int, panels: int, groups: int):
    weight = any_int4(seed, e, panels * 32, groups * 32)
    prepared = prepare_experts(weight)
    assert isinstance(prepared, Int4Panels)
    assert prepared.shape == weight.shape
    assert prepared.nbytes == weight.nbytes
    assert same_bits(prepared.int4().packed, weight.packed)
    assert same_bits(prepared.int4().scale, weight.scale)


@given(
    seed=st.integers(0, 1000),
    e=st.integers(1, 4),
    panels=st.integers(1, 3),
    steps=st.integers(1, 3),
    stacked=st.integers(1, 3),
)
@settings(max_examples=80, deadline=None)
def test_nvfp4_in_panels_is_the_nvfp4(seed: int, e: int, panels: int, steps: int, stacked: int):
    weight = any_nvfp4(seed, e, stacked * panels * 32, steps * 32, stacked)
    prepared = prepare_experts(weight)
    assert isinstance(prepared, Nvfp4Panels)
    assert prepared.shape == weight.shape
    given = prepared.nvfp4()
    assert all(same_bits(getattr(given, part), getattr(weight, part)) for part in ("codes", "scales", "scale"))
    assert torch.equal(prepared.matrix(e - 1).nan_to_num(), weight.matrix(e - 1).nan_to_num())


@pytest.mark.parametrize(("n", "k", "stacked"), [(40, 32, 1), (96, 32, 2), (64, 48, 1)])
def test_nvfp4_of_broken_panels_stays_as_it_is(n: int, k: int, stacked: int):
    weight = any_nvfp4(1, 2, n, k, stacked)
    assert prepare_experts(weight) is weight


def test_panels_hold_what_their_docstring_says():
    weight = any_int4(5, 2, 64, 64)
    prepared, codes = Int4Panels.prepare(weight), weight.codes()
    for e, n, k in ((0, 0, 0), (1, 37, 11), (1, 63, 62), (0, 17, 33)):
        byte = int(prepared.codes[e, n // 32, k // 4, n % 16, k % 2, k // 2 % 2])
        assert (byte >> 4 if n % 32 >= 16 else byte & 15) == int(codes[e, n, k])


def test_int4_of_broken_panels_stays_as_it_is():
    weight = any_int4(1, 2, 40, 32)
    assert prepare_experts(weight) is weight


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("make", [any_int4, any_nvfp4, any_bf16])
def test_experts_one_by_one_are_the_experts_together(make: Any, kernels: bool, monkeypatch: pytest.MonkeyPatch):
    if not kernels:
        monkeypatch.setattr(native, "library", lambda: None)
    whole = make(3, 5, 64, 96)
    if isinstance(whole, Int4):
        singles: list[Tensor | Int4 | Nvfp4] = [Int4(*parts) for parts in zip(whole.packed, whole.scale, strict=True)]
    elif isinstance(whole, Nvfp4):
        singles = [Nvfp4(*parts) for parts in zip(whole.codes, whole.scales, whole.scale, strict=True)]
    else:
        singles = list(whole)
    stacked, together = stack_experts(iter(singles), 5), prepare_experts(whole)
    assert type(stacked) is type(together)
    assert stacked.shape == (5, 64, 96)
    for expert in range(5):
        single = singles[expert]
        given = single.dequantize() if isinstance(single, Int4 | Nvfp4) else single
        for experts in (stacked, together):
            assert torch.equal(experts.matrix(expert).nan_to_num(), given.nan_to_num())
