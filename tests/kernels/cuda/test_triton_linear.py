"""The Triton product, in the interpreter if there is no GPU."""

import pytest
import torch
from torch import Tensor

from redline.kernels.cuda.layouts.records import Slabs
from redline.kernels.cuda.layouts.tiled import TILE_N, Tiled
from redline.kernels.cuda.triton.linear import SMS, block_rows, laid_out, linear, turns_of
from tests.seeds import fresh_generator

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def g() -> torch.Generator:
    return fresh_generator()


def close(given: Tensor, wanted: Tensor, rtol: float) -> bool:
    error = (given.float() - wanted.float()).abs().max()
    return bool(error <= rtol * wanted.float().abs().max())


def test_programs_of_few_rows_take_more_inputs_in_a_turn_as_far_as_there_is_room() -> None:
    few, some, many = TILE_N * SMS, 2 * TILE_N * SMS, 4 * TILE_N * SMS
    assert [turns_of(7168, few, tokens)[:3] for tokens in (16, 32, 33)] == [(512, 4, 4), (512, 4, 4), (256, 1, 5)]
    assert [turns_of(inputs, some, 16)[:3] for inputs in (1536, 768, 384)] == [(512, 1, 4), (256, 1, 5), (128, 1, 5)]
    assert turns_of(7168, many, 16)[:3] == (128, 1, 5)


def test_a_program_has_all_of_up_to_128_tokens() -> None:
    assert [turns_of(7168, 7168, tokens).tokens for tokens in (9, 17, 64, 65, 128, 129)] == [16, 32, 64, 128, 128, 128]
    assert [block_rows(7168, tokens) for tokens in (64, 128, 129)] == [64, 64, 128]


@pytest.mark.parametrize(
    ("tokens", "k", "n"), [(9, 320, 50), (33, 128, 96), (70, 256, 40), (11, 1024, 50), (200, 128, 72)]
)
def test_the_product_reads_tiles(tokens: int, k: int, n: int, g: torch.Generator):
    w = (torch.randn(n, k, generator=g) * k**-0.5).bfloat16().to(DEVICE)
    tiled = Tiled.prepare(w)
    x = torch.zeros(tokens, tiled.data.shape[-3] * 32, dtype=torch.bfloat16, device=DEVICE)
    x[:, :k] = torch.randn(tokens, k, generator=g).to(DEVICE)
    assert close(linear(x, tiled, torch.float32), x[:, :k].float() @ w.float().T, 1e-5)


@pytest.mark.parametrize(("n", "k"), [(40, 320), (130, 1100)])
def test_a_weight_is_laid_out_for_the_library(n: int, k: int, g: torch.Generator):
    w = torch.randn(n, k, generator=g).bfloat16().to(DEVICE)
    assert torch.equal(laid_out(Tiled.prepare(w)), w)
    assert torch.equal(laid_out(Slabs.prepare(w)), w)
