"""The expert kernels of a decode step, run on the CPU thread by thread: routing, gate and up, down."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cuda.decode.choose_experts import READY, Pairs, choose_experts, list_pairs
from redline.kernels.cuda.decode.experts_down import experts_down
from redline.kernels.cuda.decode.experts_up import decode_h, encode_h, experts_up, random_x
from redline.kernels.cuda.decode.gates import gates
from redline.kernels.cuda.decode.pairs_down import pairs_down
from redline.kernels.cuda.layouts.records import (
    KINDS,
    Kind,
    Records,
    Slabs,
    Use,
    Weight,
    one_of,
    random_experts,
    random_int4,
)
from redline.ops.moe import Routed, moe
from redline.ops.op import Case
from tests.emulator.emulator import emulation
from tests.seeds import fresh_generator

pytestmark = [
    pytest.mark.skipif(native.find_compiler() is None, reason="emulation needs a C++ compiler"),
    pytest.mark.usefixtures("poison"),
]


def emulated(kernel: Any, *args: Any) -> Any:
    with emulation():
        assert kernel.fits(kernel.op.args(*args))
        return kernel.run(kernel.op.args(*args))


def same_lists(got: Pairs, want: Pairs) -> None:
    for field in dataclasses.fields(Pairs):
        a, b = getattr(got, field.name), getattr(want, field.name)
        if field.name == "ready":
            continue
        same = torch.allclose(a, b, rtol=1e-6, atol=1e-6) if a.is_floating_point() else torch.equal(a, b)
        assert same, field.name


@pytest.mark.parametrize("case", list(choose_experts.op.cases()), ids=lambda case: case.name)
def test_the_lists_name_every_choice_once(case: Case) -> None:
    args = case.make(fresh_generator())
    same_lists(emulated(choose_experts, *args), choose_experts.op.reference(choose_experts.op.args(*args)))


def test_equal_scores_go_to_the_lower_expert() -> None:
    logits = torch.zeros(3, 70)
    logits[1, 40:] = 1.0
    pairs = emulated(choose_experts, logits, None, 4, False, 1.0)
    assert pairs.ids.tolist() == [[0, 1, 2, 3], [40, 41, 42, 43], [0, 1, 2, 3]]
    same_lists(pairs, choose_experts.op.reference(choose_experts.op.args(logits, None, 4, False, 1.0)))


def near(got: Tensor, want: Tensor, tolerance: float = 3e-3) -> None:
    assert torch.isfinite(got).all()
    error = (got.float() - want.float()).abs().max() / want.float().abs().max()
    assert error < tolerance, f"off by {error:.1e} of the largest"


@pytest.mark.pairwise
@pytest.mark.parametrize("case", [case for case in experts_up.op.cases() if case.small], ids=lambda case: case.name)
def test_the_first_half_of_the_experts_is_its_reference(case: Case) -> None:
    args = case.make(fresh_generator())
    width, kind = args[2].outputs // 2, args[2].kind
    got, want = (
        decode_h(h, width, kind)
        for h in (emulated(experts_up, *args), experts_up.op.reference(experts_up.op.args(*args)))
    )
    near(got, want, 8e-3 if kind == "BF16" else 3e-3)


@pytest.mark.pairwise
@pytest.mark.parametrize("case", [case for case in experts_down.op.cases() if case.small], ids=lambda case: case.name)
def test_the_second_half_of_the_experts_is_its_reference(case: Case) -> None:
    args = case.make(fresh_generator())
    got, want = emulated(experts_down, *args), experts_down.op.reference(experts_down.op.args(*args))
    near(got[0] - args[5], want[0] - args[5])
    near(got[1], want[1], 8e-3)  # bf16
    near(got[2], want[2])


@pytest.mark.pairwise
@pytest.mark.parametrize("case", [case for case in pairs_down.op.cases() if case.small], ids=lambda case: case.name)
def test_the_second_half_pair_by_pair_is_its_reference(case: Case) -> None:
    args = case.make(fresh_generator())
    near(emulated(pairs_down, *args), pairs_down.op.reference(pairs_down.op.args(*args)))


def test_what_lies_behind_gamma_is_no_outputs() -> None:
    """The outputs do not fill whole slabs; x is zero past their end, which a NaN in gamma would change."""
    case = next(
        case for case in experts_down.op.cases() if case.small and case.make(fresh_generator())[6].shape[0] % 64
    )
    *args, gamma, _ = case.make(fresh_generator())
    behind = torch.full((len(gamma) + 64,), torch.nan)
    behind[: len(gamma)] = gamma
    x = emulated(experts_down, *args, behind[: len(gamma)])[1]
    assert x.shape[1] > len(gamma)
    assert not x[:, len(gamma) :].any()


def crowded(g: torch.Generator) -> Pairs:
    """Nine tokens: expert 0 is chosen by two of them, 1 by three, 2 by five, 4 by eight and 3 by all."""
    takers = [0] * 2 + [1] * 3 + [2] * 5 + [4] * 8
    ids = torch.tensor([[3, takers[token], takers[token + 9]] for token in range(9)], dtype=torch.int32)
    return list_pairs(ids, torch.rand(9, 3, generator=g), 5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden", "width"), [(320, 128), (7168, 64)])
def test_an_expert_serves_any_number_of_tokens(hidden: int, width: int, kind: Kind) -> None:
    g = fresh_generator()
    pairs, x, rstd = crowded(g), random_x(g, 9, hidden), torch.rand(9, generator=g) + 0.5
    up = Records.prepare("up", random_experts(g, kind, "up", 5, 2 * width, hidden))
    h, want = emulated(experts_up, x, rstd, up, pairs), experts_up.op.reference(experts_up.op.args(x, rstd, up, pairs))
    near(decode_h(h, width, kind), decode_h(want, width, kind), 8e-3 if kind == "BF16" else 3e-3)
    assert torch.equal(h, emulated(experts_up, x, rstd, up, pairs)), "the result depends on the order of threads"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden", "width"), [(320, 128), (128, 2048)])
def test_a_token_sums_over_its_own_experts(hidden: int, width: int, kind: Kind) -> None:
    g = fresh_generator()
    pairs, down = crowded(g), Records.prepare("down", random_experts(g, kind, "down", 5, hidden, width))
    h = encode_h(torch.randn(len(pairs), width, generator=g), width, kind)
    args = h, pairs, down, None, None, torch.zeros(9, hidden), torch.ones(hidden)
    got, want = emulated(experts_down, *args), experts_down.op.reference(experts_down.op.args(*args))
    for a, b in zip(got, want, strict=True):
        near(a, b, 8e-3 if a.dtype == torch.bfloat16 else 1e-4)
    assert all(torch.equal(a, b) for a, b in zip(got, emulated(experts_down, *args), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_company_that_shares_no_expert_changes_no_bit(kind: Kind) -> None:
    g = fresh_generator()
    ids, shares = torch.randperm(12, generator=g).view(4, 3).to(torch.int32), torch.rand(4, 3, generator=g)
    up = Records.prepare("up", random_experts(g, kind, "up", 12, 64, 256))
    down = Records.prepare("down", random_experts(g, kind, "down", 12, 128, 2048))
    shared_w = Slabs.prepare(torch.randn(128, 256, generator=g).to(torch.bfloat16))
    x, rstd, residual = random_x(g, 4, 256), torch.rand(4, generator=g), torch.randn(4, 128, generator=g)
    shared_h = torch.randn(4, 256, generator=g).to(torch.bfloat16)
    wide = encode_h(torch.randn(12, 2048, generator=g), 2048, kind)

    def step(tokens: slice) -> tuple[Tensor, Tensor]:
        pairs = list_pairs(ids[tokens], shares[tokens], 12)
        h = emulated(experts_up, x[tokens], rstd[tokens].contiguous(), up, pairs)
        mine = wide[pairs.slot_expert[: len(pairs)].long()]
        result = emulated(
            experts_down, mine, pairs, down, shared_h[tokens], shared_w, residual[tokens], torch.ones(128)
        )
        return h[pairs.token == pairs.token[0]] if len(pairs) == 3 else h[pairs.token == 2], result[0]

    (alone_h, alone), (together_h, together) = step(slice(2, 3)), step(slice(0, 4))
    assert torch.equal(alone_h, together_h)
    assert torch.equal(alone[0], together[2])


def test_route_up_and_down_are_a_mixture_of_experts() -> None:
    g = fresh_generator()
    logits, x = torch.randn(5, 16, generator=g), random_x(g, 5, 320)
    int4 = random_int4(g, 16, 256, 320), random_int4(g, 16, 320, 128)
    pairs = emulated(choose_experts, logits, torch.zeros(16), 4, True, 2.827, None)
    h = emulated(experts_up, x, torch.ones(8), Records.prepare("up", int4[0]), pairs)
    down = Records.prepare("down", int4[1])
    residual, _, _ = emulated(experts_down, h, pairs, down, None, None, torch.zeros(5, 320), torch.ones(320))
    routed = Routed(int4[0], int4[1], pairs.ids, pairs.weights)
    near(residual, moe.reference(moe.args(x[:, :320].float(), None, None, routed)))


def test_the_choice_of_gates_serves_the_experts() -> None:
    g = fresh_generator()
    case = next(case for case in gates.op.cases() if case.name == "T=5 nano, forced")
    x, *rest, choice = case.make(g)
    left = choice.notes.clone()
    _, h, rstd, pairs = emulated(gates, x, *rest, choice)
    left[READY] = 1
    assert torch.equal(choice.notes, left), "all other elements are unchanged"
    up = Records.prepare("up", random_int4(g, 16, 256, 320))
    down = Records.prepare("down", random_int4(g, 16, 320, 128))
    routed = emulated(experts_up, x, rstd, up, pairs)
    near(routed, experts_up.op.reference(experts_up.op.args(x, rstd, up, pairs)))
    shared = Slabs.prepare(torch.randn(320, 128, generator=g).to(torch.bfloat16))
    args = routed, pairs, down, h, shared, torch.randn(5, 320, generator=g), torch.ones(320)
    near(emulated(experts_down, *args)[0], experts_down.op.reference(experts_down.op.args(*args))[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("use", "outputs", "inputs"),
    [("up", 2 * 40, 96), ("up", 256, 7168), ("up", 64, 2112), ("down", 200, 2048), ("down", 320, 128)],
)
def test_records_give_the_weight_back(use: Use, outputs: int, inputs: int, kind: Kind) -> None:
    weight = random_experts(fresh_generator(), kind, use, 3, outputs, inputs)
    records = Records.prepare(use, weight)
    for expert in range(3):
        for given, back in zip(bits(one_of(weight, expert)), bits(records.expert(expert)), strict=True):
            assert torch.equal(given, back)


def bits(weight: Weight) -> list[Tensor]:
    parts = [weight] if isinstance(weight, Tensor) else list(vars(weight).values())
    return [part.view(torch.uint8) for part in parts]


@pytest.mark.parametrize("use", ["up", "down"])
def test_what_fills_up_a_record_stands_for_zero(use: Use) -> None:
    for kind in KINDS:
        g = fresh_generator()
        records = Records.prepare(use, random_experts(g, kind, use, 1, 2 * 40 if use == "up" else 72, 96))
        form = records.form
        outputs = 16 * form.tiles
        whole = Records(records.data, kind, use, outputs, form.width).dense(0)
        if use == "up":
            gate, up = whole.chunk(2)
            whole = torch.cat(
                [gate[40:].flatten(), up[40:].flatten(), gate[:40, 96:].flatten(), up[:40, 96:].flatten()]
            )
        else:
            whole = torch.cat([whole[72:].flatten(), whole[:72, 96:].flatten()])
        assert whole.numel() > 0
        assert not whole.any()


def test_slabs_give_the_weight_back() -> None:
    weight = torch.randn(200, 320).to(torch.bfloat16)
    assert torch.equal(Slabs.prepare(weight).dense(), weight)
