"""The dense kernels of a decode step equal their references: on the CPU, thread by thread."""

import copy
from typing import Any

import pytest
import torch

from redline.kernels.cuda.decode import dense
from redline.kernels.cuda.decode.choose_experts import Pairs
from redline.kernels.cuda.decode.embed import embed
from redline.kernels.cuda.decode.gates import gates, gates_parts, gates_weight
from redline.kernels.cuda.decode.head import head, head_8
from redline.kernels.cuda.decode.project_a import project_a
from redline.kernels.cuda.decode.project_out import project_out
from redline.kernels.cuda.decode.project_q import project_q
from redline.kernels.cuda.layouts.tiled import Tiled, Tiled8
from redline.kernels.kernel import Kernel
from redline.ops.op import Case
from tests.emulator.emulator import emulation
from tests.seeds import fresh_generator

pytestmark = pytest.mark.usefixtures("poison")

KERNELS: tuple[Kernel[Any, Any, Any], ...] = (embed, project_a, project_q, project_out, gates, head, head_8)
CASES = [
    pytest.param(kernel, case, id=f"{kernel.op.name}: {case.name}")
    for kernel in KERNELS
    for case in kernel.op.cases()
    if case.small
]
PLANE = 9  # index of project_q's argument that it writes
SQUARES = {"embed": 2, "project_a": 1, "project_out": 2}  # index of the output
TOLERANCE = {torch.bfloat16: 1e-2, torch.float8_e4m3fn: 7e-2, torch.float32: 1e-4}


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in tensors(part)]
    return (
        [value] if isinstance(value, torch.Tensor) else list(value.lists.values()) if isinstance(value, Pairs) else []
    )


def few_multiprocessors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    def multiprocessors(device: torch.device) -> int:
        return count

    monkeypatch.setattr(dense, "multiprocessors", multiprocessors)


def run(kernel: Kernel[Any, Any, Any], args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The kernel's outputs, and the plane that it wrote."""
    with emulation():
        assert kernel.fits(kernel.op.args(*args))
        got = tensors(kernel.run(kernel.op.args(*args)))
    return [*got, args[PLANE]] if kernel is project_q else got


def check(kernel: Kernel[Any, Any, Any], args: tuple[Any, ...]) -> None:
    theirs = copy.deepcopy(args)
    got, want = run(kernel, args), tensors(kernel.op.reference(kernel.op.args(*theirs)))
    want += [theirs[PLANE]] if kernel is project_q else []
    place, tokens = SQUARES.get(kernel.op.name), args[0].shape[0]
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        # the Triton programs have other sizes than the blocks of dense.cu
        if i == place and tokens > dense.MOST_TOKENS:
            assert a.shape[1] == b.shape[1]
            a, b = a.sum(0)[:tokens], b.sum(0)[:tokens]
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if not a.is_floating_point():
            assert torch.equal(a, b), kernel.op.name
            continue
        error, most = (a.double() - b.double()).abs(), b.double().abs().amax() if b.numel() else 1.0
        assert not error.isnan().any()
        assert (error <= TOLERANCE[a.dtype] * most).all(), f"{kernel.op.name}: {error.max() / most:.2e}"
    if kernel is project_q:
        rank, width = args[5].shape[0], args[PLANE].shape[-1]
        a, b = (plane.view(-1, width).double() for plane in (got[-1], want[-1]))
        for part in slice(rank), slice(rank, None):  # a key may be a thousand times as large as a latent
            error, most = (x[:, part].abs().amax(-1) for x in (a - b, b))
            assert (error <= TOLERANCE[args[PLANE].dtype] * most).all(), "a row of the cache"


@pytest.mark.pairwise
@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_kernel_is_reference(kernel: Kernel[Any, Any, Any], case: Case):
    check(kernel, case.make(fresh_generator()))


@pytest.mark.parametrize("tokens", [8, 9])
def test_a_row_of_the_cache_that_e4m3_cannot_hold_is_its_largest_number_of_either_sign(tokens: int):
    case = next(case for case in project_q.op.cases() if case.name == f"T={tokens} nano e4m3 pages")
    args = case.make(fresh_generator())
    kv, gamma, plane = args[4], args[5], args[PLANE]
    kv[:, len(gamma) :] *= 1000
    gamma *= 1000
    check(project_q, args)
    written = plane.float().view(-1, plane.shape[-1])[args[8]]
    for part in written[:, : len(gamma)], written[:, len(gamma) :: 2], written[:, len(gamma) + 1 :: 2]:
        assert (part.amin(), part.amax()) == (-448, 448)


@pytest.mark.parametrize("kernel", KERNELS[1:], ids=lambda kernel: kernel.op.name)
def test_few_multiprocessors_take_many_tiles_each(kernel: Kernel[Any, Any, Any], monkeypatch: pytest.MonkeyPatch):
    few_multiprocessors(monkeypatch, 8 if kernel is project_q else 1)  # a block writes at most one page row
    name = {"project_q": "T=8 nano e4m3 pages", "head": "T=8 nano's width", "head_8": "T=8 nano's width"}.get(
        kernel.op.name, "T=8 nano"
    )
    case = next(case for case in kernel.op.cases() if case.name.startswith(name))
    check(kernel, case.make(torch.Generator().manual_seed(1)))


def test_wide_products_that_take_several_batches_keep_to_the_reference(monkeypatch: pytest.MonkeyPatch):
    few_multiprocessors(monkeypatch, 1)
    g = torch.Generator().manual_seed(3)
    x, squares = dense.random_x(g, 3, 7168)
    check(head, (x, squares, dense.random_tiled(g, 16 * 6, 7168), 1e-5))
    check(project_out, (x, dense.random_tiled(g, 16 * 6, 7168), torch.randn(3, 96, generator=g), torch.ones(96)))
    check(head_8, (x, Tiled8.prepare(torch.randn(16 * 6, 7168, generator=g))))


# indices of the per-token arguments; default: the first
PER_TOKEN = {"embed": (0,), "project_q": (0, 4, 6, 7, 8), "project_out": (0, 2)}


def of_tokens(kernel: Kernel[Any, Any, Any], args: tuple[Any, ...], tokens: int) -> list[torch.Tensor]:
    """The outputs for the first tokens, from a call without the other tokens."""
    cut = PER_TOKEN.get(kernel.op.name, (0,))
    args = tuple(arg[:tokens].contiguous() if i in cut else copy.deepcopy(arg) for i, arg in enumerate(args))
    got = run(kernel, args)
    if kernel is project_q:
        got[1] = got[1].view(torch.uint8).flatten(0, 1)[args[8]]
    return got


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.op.name)
def test_a_token_has_the_same_bits_in_any_company(kernel: Kernel[Any, Any, Any]):
    name = {"embed": "T=8 nano", "project_q": "T=8 odd", "head": "T=8 nano's width", "head_8": "T=8 nano's width"}.get(
        kernel.op.name, "T=8 Kimi's"
    )
    case = next(case for case in kernel.op.cases() if case.small and case.name.startswith(name))
    args = case.make(torch.Generator().manual_seed(5))
    whole = of_tokens(kernel, args, dense.MOST_TOKENS)
    for tokens in (1, 3):
        for alone, all_of_them in zip(of_tokens(kernel, args, tokens), whole, strict=True):
            if all_of_them.shape[-1] == dense.MOST_TOKENS:  # squares and 1 / rms: a token is a column
                assert torch.equal(alone[..., :tokens], all_of_them[..., :tokens])
            else:
                assert torch.equal(alone, all_of_them[:tokens])


def test_every_plan_has_room_and_does_not_change_bits_with_the_tokens():
    shapes = [(7168, 132), (1536, 768), (8192, 448), (7168, 280), (18432, 448), (7168, 2304), (7168, 10240)]
    small = [(128, 48), (384, 44), (512, 20), (768, 20), (384, 256), (1408, 7), (6144, 100)]
    cuts = [(*sizes, operands, 16) for sizes in [*shapes, *small] for operands in (False, True)]
    cuts += [(inputs, tiles, False, 8) for inputs, tiles in [(7168, 10240), (7168, 2000), (512, 256), (256, 6)]]
    for inputs, row_tiles, operands, bits in cuts:
        plans = [dense.plan(inputs, row_tiles, columns, 132, operands=operands, bits=bits) for columns in (1, 2, 4, 8)]
        assert len({(plan.warps, plan.units, plan.slices) for plan in plans}) == 1
        for plan in plans:
            assert plan.shared <= 227 << 10
            assert plan.free_stages >= 1
            assert plan.x_at % 16 == plan.sums_at % 16 == plan.operands_at % 16 == 0


@pytest.mark.parametrize(
    ("n", "k"), [(16, 128), (1, 1), (17, 33), (48, 7168), (24, 1536), (58, 8192), (3, 18432), (320, 320)]
)
def test_tiles_give_back_the_weight(n: int, k: int):
    weight = torch.randn(2, n, k).to(torch.bfloat16)
    tiled = Tiled.prepare(weight)
    assert tiled.shape == (2, n, k)
    assert tiled.data.shape == (2, -(-n // 16), -(-k // 128) * 4, 16, 32)
    assert torch.equal(tiled.dense(), weight)
    one = Tiled.prepare(weight[1].T.contiguous().T)  # strided, as a loader may pass it
    assert torch.equal(one.data, tiled.data[1])
    padding = tiled.data.transpose(-3, -2).flatten(-2).flatten(-3, -2)
    assert padding[:, n:].count_nonzero() == padding[..., k:].count_nonzero() == 0


@pytest.mark.parametrize(("n", "k"), [(16, 256), (1, 1), (17, 33), (48, 7168), (8200, 70)])
@pytest.mark.parametrize("tiled", [False, True])
def test_a_weight_in_8_bits_is_near_the_weight(n: int, k: int, tiled: bool):
    weight = (torch.randn(n, k) * torch.rand(n, 1)).to(torch.bfloat16)
    eighth = Tiled8.prepare(Tiled.prepare(weight) if tiled else weight)
    assert eighth.shape == (n, k)
    assert eighth.data.shape == (-(-n // 16), -(-k // 256) * 4, 16, 64)
    assert eighth.nbytes == eighth.data.numel() + 4 * len(eighth.scales)
    step = weight.float().abs().amax(1, keepdim=True) / 127
    assert ((eighth.dense() - weight).abs() <= 0.501 * step).all()
    assert torch.equal(eighth.dense().abs().amax(1), weight.float().abs().amax(1) / 127 * 127)
    padding = eighth.data.transpose(1, 2).flatten(2).flatten(0, 1)
    assert padding[n:].count_nonzero() == padding[:, k:].count_nonzero() == 0


def test_a_row_in_8_bits_that_is_not_finite_is_no_number_and_others_are_what_they_are():
    weight = torch.randn(20, 40)
    weight[3, 5], weight[7, 0], weight[9] = torch.nan, -torch.inf, 0.0
    dense_NK = Tiled8.prepare(weight).dense()
    assert dense_NK[[3, 7]].isnan().all()
    assert not dense_NK[9].any()
    others = [i for i in range(20) if i not in (3, 7)]
    assert torch.equal(dense_NK[others], Tiled8.prepare(weight[others]).dense())


def test_a_tile_is_what_a_warp_multiplies():
    weight = torch.arange(32 * 256).view(32, 256).to(torch.bfloat16)
    assert torch.equal(Tiled.prepare(weight).data[1, 3], weight[16:, 96:128])


@pytest.mark.parametrize("experts", [0, 16, 21])
def test_the_gates_weight_comes_apart_again(experts: int):
    router, gate_up = torch.randn(experts, 70).to(torch.bfloat16), torch.randn(80, 70).to(torch.bfloat16)
    w = gates_weight(router if experts else None, gate_up)
    assert w.shape == (-(-experts // 16) * 16 + 80, 70)
    for a, b in zip(gates_parts(w, experts), (router, gate_up), strict=True):
        assert torch.equal(a, b)
    tile = w.dense()[-16:]  # the last 8 gates over the last 8 ups
    assert torch.equal(tile, torch.cat([gate_up[32:40], gate_up[72:]]))
