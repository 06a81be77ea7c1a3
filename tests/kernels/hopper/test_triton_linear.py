"""The Triton product, in the interpreter where there is no GPU."""

import pytest
import torch
from torch import Tensor

from redline.kernels.hopper.layouts.tiled import Tiled
from redline.kernels.hopper.triton.linear import linear, turns_of
from tests.seeds import fresh_generator

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def g() -> torch.Generator:
    return fresh_generator()


def close(given: Tensor, wanted: Tensor, rtol: float) -> bool:
    error = (given.float() - wanted.float()).abs().max()
    return bool(error <= rtol * wanted.float().abs().max())


def test_programs_of_few_rows_take_more_inputs_in_a_turn_as_far_as_there_is_room() -> None:
    assert [turns_of(7168, 16, tokens) for tokens in (16, 32, 33)] == [(512, 4, 4), (512, 4, 4), (256, 1, 5)]
    assert [turns_of(inputs, 32, 16) for inputs in (1536, 768, 384)] == [(512, 1, 4), (256, 1, 5), (128, 1, 5)]
    assert turns_of(7168, 64, 16) == (128, 1, 5)


@pytest.mark.parametrize(("tokens", "k", "n"), [(9, 320, 50), (33, 128, 96), (70, 256, 40), (11, 1024, 50)])
def test_the_product_reads_tiles(tokens: int, k: int, n: int, g: torch.Generator):
    w = (torch.randn(n, k, generator=g) * k**-0.5).bfloat16().to(DEVICE)
    tiled = Tiled.prepare(w)
    x = torch.zeros(tokens, tiled.data.shape[-3] * 32, dtype=torch.bfloat16, device=DEVICE)
    x[:, :k] = torch.randn(tokens, k, generator=g).to(DEVICE)
    assert close(linear(x, tiled, torch.float32), x[:, :k].float() @ w.float().T, 1e-5)
