"""Pages of e4m3 on a CPU: every code is read exactly, writes round as torch does, and NaN is preserved."""

import dataclasses

import pytest
import torch
from torch import Tensor

from redline.kernels.cpu.mla import mla_decode, mla_prefill, mla_qkv
from redline.kernels.cpu.panels import Matrix
from redline.ops.mla import FP8, NANO, TINY, MlaWeights, random_weights, stored

CODES = torch.arange(256, dtype=torch.uint8)
FINITE = CODES[CODES & 127 != 127]


def attended(plane: Tensor, w: MlaWeights, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The values that each query of slot 0 reads, by the absorbed and by the expanded form; the latter for its last
    rows.
    """
    count = len(lengths)
    q = torch.randn(count, w.heads, w.nope + w.rope, generator=torch.Generator().manual_seed(1))
    table = torch.arange(plane.shape[0], dtype=torch.int32)
    order, slots = torch.arange(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
    absorbed, expanded = torch.zeros(2, count, w.heads, w.value).unbind(0)
    mla_decode(q, w, 0.1, order, slots, torch.tensor(lengths, dtype=torch.int32), table[None], plane, absorbed)
    mla_prefill(q, w, 0.1, lengths[0] - 1, table, plane, expanded)
    return absorbed, expanded


@pytest.mark.parametrize("first", [0, 254])
def test_every_code_is_read_exactly(first: int):
    """A context of one row is that row, so its values are the row read times W_UV."""
    w = random_weights(torch.Generator().manual_seed(0), *NANO)
    codes = FINITE.roll(first).repeat(3)[: w.rank + w.rope]
    plane = torch.zeros(1, 64, w.rank + w.rope, dtype=torch.uint8).view(FP8)
    plane[0, 0] = codes.view(FP8)
    wanted = torch.einsum("r,hvr->hv", codes.view(FP8)[: w.rank].double(), w.w_uv.dense().double())
    for got, rtol in zip(
        attended(plane, w, (1,)), (2e-6, 4e-3), strict=True
    ):  # values of the expanded form may be bf16
        assert (got[0].double() - wanted).norm() <= rtol * wanted.norm()


def test_what_is_written_is_the_nearest_and_the_largest_beyond_it():
    """Keys that are copied unchanged: every bf16 from 2^-12 to 1024, including ties and both ends."""
    w = random_weights(torch.Generator().manual_seed(0), *TINY)
    size = torch.arange(0x3980, 0x4481, dtype=torch.int16).view(torch.bfloat16)
    values = torch.cat([size, -size, torch.zeros(64, dtype=torch.bfloat16)])
    values = values[: len(values) // w.rope * w.rope].view(-1, w.rope).float()
    w_a = torch.zeros(w.w_a.shape)
    w_a[-w.rope :, : w.rope] = torch.eye(w.rope)
    w = dataclasses.replace(w, w_a=Matrix.prepare(w_a.bfloat16()))
    x = torch.nn.functional.pad(values, (0, TINY[0] - w.rope))
    plane = torch.zeros(-(-len(x) // 64), 64, w.rank + w.rope, dtype=FP8)
    still = torch.ones(len(x), w.rope // 2), torch.zeros(len(x), w.rope // 2)
    mla_qkv(x, w, *still, torch.arange(len(x)), plane)
    written = plane.view(torch.uint8).flatten(0, 1)[: len(x), w.rank :]
    assert torch.equal(written, stored(values, FP8).view(torch.uint8))
    assert written.unique().numel() == 254, "not every number was written"


@pytest.mark.parametrize("place", [0, 5, 64, 130])
def test_who_sees_a_row_that_is_not_a_number_reads_none(place: int):
    w = random_weights(torch.Generator().manual_seed(0), *TINY)
    plane = torch.randn(3, 64, w.rank + w.rope, generator=torch.Generator().manual_seed(2)).to(FP8)
    plane[place // 64, place % 64, 7] = torch.nan
    for got in attended(plane, w, (131,)):
        assert bool(got.isnan().all())
    if place:
        for got in attended(plane, w, (place,)):
            assert bool(got.isfinite().all())
