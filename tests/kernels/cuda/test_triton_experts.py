"""The products of experts on chips without wgmma are their reference: in Triton's interpreter, or on any GPU."""

from typing import Any

import pytest
import torch

from redline.kernels.cuda import chips
from redline.kernels.cuda.layouts.records import KINDS
from redline.kernels.cuda.prefill.grouped import grouped_experts, rtol_of
from redline.ops.op import Case, limit_of
from tests.emulator.emulator import emulation
from tests.seeds import fresh_generator

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_law_1_on_a_gpu.py has the GPU's kernels")
BLACKWELL = chips.CHIPS[1]
QUICK = "T=1 nano", "T=250 nano, most on one expert"
CASES = [
    pytest.param(case, id=case.name, marks=() if case.name.partition(" ")[2] in QUICK else pytest.mark.slow)
    for case in grouped_experts.op.cases()
    if case.small
]


@pytest.fixture(autouse=True)
def infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not written holds infinities: a product that reads them is invalid, which numpy reports."""
    empty = torch.empty

    def filled(*args: Any, **given: Any) -> torch.Tensor:
        x = empty(*args, **given)
        return x.fill_(torch.inf) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.parametrize("case", CASES)
def test_the_products_are_their_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "_present", lambda: BLACKWELL)
    args = case.make(fresh_generator())
    with emulation():
        assert grouped_experts.fits(args)
        got = grouped_experts.run(args)
    want = grouped_experts.op.reference(args)
    error = float((got - want).norm() / want.norm())
    assert error <= limit_of(grouped_experts.op, case, want.to(torch.bfloat16)), f"{error:.1e}"


@pytest.mark.parametrize(
    "tokens",
    [40, 100, 180, 250],
    ids=["two turns of 32", "two bunches of 64", "three bunches of 64", "two tiles"],
)
def test_an_expert_with_more_tokens_than_a_program_takes(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "_present", lambda: BLACKWELL)
    case = next(case for case in grouped_experts.op.cases() if case.name == "BF16 T=250 nano, most on one expert")
    args = case.make(fresh_generator())
    args = args._replace(**{name: getattr(args, name)[:tokens] for name in ("x_TD", "ids_TK", "weights_TK")})
    args.ids_TK.zero_()
    with emulation():
        got = grouped_experts.run(args)
    want = grouped_experts.op.reference(args)
    assert float((got - want).norm() / want.norm()) <= limit_of(grouped_experts.op, case, want.to(torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_have_no_experts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "_present", lambda: BLACKWELL)
    case = next(case for case in grouped_experts.op.cases() if case.name == f"{kind} T=1 nano")
    assert rtol_of(kind) == case.rtol
    args = case.make(fresh_generator())
    none = args._replace(x_TD=args.x_TD[:0], ids_TK=args.ids_TK[:0], weights_TK=args.weights_TK[:0])
    with emulation():
        assert grouped_experts.run(none).shape == (0, args.down.outputs)
