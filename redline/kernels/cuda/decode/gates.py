"""The router and the shared expert's hidden row for T <= 256 tokens.    D hidden, E experts, I width.

With up to 8 tokens the logits are computed first, in parts of K that are divided over all blocks, and the experts are
chosen while the other weights are still streaming.

One weight, so one stream, made by `gates_weight`: [router E rows, padded to 16 | tiles of 8 gate and 8 up rows].
Without a router (E = 0) it is the first half of a dense MLP.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.cuda.decode import dense
from redline.kernels.cuda.decode.choose_experts import (
    MOST_EXPERTS,
    READY,
    Pairs,
    RouterChoice,
    choose_experts,
    notes_of,
)
from redline.kernels.cuda.kernel import launch_record
from redline.kernels.cuda.layouts.tiled import PAD_K, TILE_N, Tiled, padded
from redline.kernels.kernel import Kernel
from redline.ops.op import Case, Cost, Op

HALF = TILE_N // 2
_Launch = launch_record("decode/dense.cu", "GatesLaunch")
_NOBODY_CHOOSES: dict[str, Any] = dict.fromkeys(
    (
        "notes",
        "bias",
        "forced",
        "pair_token",
        "pair_weight",
        "slot_expert",
        "slot_first",
        "count",
        "ids",
        "shares",
        "origin",
    )
) | {"slots": 0, "normalise": 0, "scale": 0.0}
Result = tuple[Tensor, Tensor, Tensor, Pairs | None]


def gates_weight(router: Tensor | None, gate_up: Tensor) -> Tiled:
    """The weight of `gates`: router bf16 [E, D] or None, gate_up bf16 [2 I, D], gate first, I divisible by 8."""
    width = gate_up.shape[0] // 2
    assert width % HALF == 0, f"tiles have 8 gates and 8 ups, got a width of {width}"
    mixed = gate_up.unflatten(0, (2, -1, HALF)).transpose(0, 1).flatten(0, 2)
    if router is None:
        return Tiled.prepare(mixed)
    filling = padded(router.shape[0], TILE_N) - router.shape[0]
    return Tiled.prepare(torch.cat([F.pad(router, (0, 0, 0, filling)), mixed]))


def gates_parts(w: Tiled, experts: int) -> tuple[Tensor, Tensor]:
    """(router [E, D], gate_up [2 I, D]) bf16: the original weights of `gates_weight`, bit for bit."""
    router, mixed = w.dense().tensor_split([padded(experts, TILE_N)])
    return router[:experts], mixed.unflatten(0, (-1, 2, HALF)).transpose(0, 1).flatten(0, 2)


class GatesArgs(NamedTuple):
    """Multiplies by the router and the shared expert's gate and up, and optionally chooses the experts."""

    x: Tensor  # bf16 [T, D padded], as described in `dense`
    squares: Tensor  # float32 [parts, T padded to 8]: of x's residual
    w: Tiled  # as `gates_weight` makes it: E rows padded to 16, then 2 I rows
    experts: int  # E; 0: a dense MLP
    width: int  # I
    eps: float  # of the norm that is still to be applied to x
    choice: RouterChoice | None = None  # how experts are chosen; its `notes` are written. None: no experts are chosen


def reference(args: GatesArgs) -> Result:
    """-> (logits float32 [T, E], h = silu(gate) * up bf16 [T, I padded], 1 / rms float32 [T padded to 8], pairs).

    1 / rms is zero in the padding. pairs: the result of `choose_experts` for the logits; None without a choice.
    """
    x, w = args.x, args.w
    tokens, (router, gate_up) = x.shape[0], gates_parts(w, args.experts)
    rstd = dense.rstd_of(args.squares, tokens, w.inputs, args.eps)
    x = x[:, : w.inputs].float()
    gate, up = (x @ gate_up.float().T * rstd).split([args.width, args.width], -1)
    h = dense.pad_columns((F.silu(gate) * up).to(torch.bfloat16))
    logits = x @ router.float().T * rstd
    pairs = None
    if args.choice is not None:
        c = args.choice
        pairs = choose_experts.op.reference(
            choose_experts.op.args(logits, c.bias_E, c.chosen, c.normalise, c.scale, c.forced_TK)
        )
        if tokens <= dense.MOST_TOKENS:
            pairs = replace(pairs, ready=c.notes[READY : READY + 1].fill_(1))
    return logits, h, dense.pad_columns(rstd[:, 0], dense.MOST_TOKENS), pairs


def cuda(args: GatesArgs) -> Result:
    """The reference's result: one launch up to 8 tokens; above, Triton's matmul followed by `choose_experts`. That
    launch is also added if K is divided into slices."""
    x, squares, w, experts, width, choice = args.x, args.squares, args.w, args.experts, args.width, args.choice
    tokens, width_padded, device = x.shape[0], padded(width, PAD_K), x.device
    if tokens > dense.MOST_TOKENS:
        from redline.kernels.cuda.triton import dense as streamed

        logits, h, rstd = streamed.gates(x, squares, w, experts, width, args.eps)
        if choice is None:
            return logits, h, rstd, None
        c = choice
        return logits, h, rstd, choose_experts(logits, c.bias_E, c.chosen, c.normalise, c.scale, c.forced_TK)
    in_units = padded(experts, TILE_N) // TILE_N if choice else 0
    cut = dense.cut_of(w, tokens, "GATES", in_units)
    if choice is not None and cut.slices > 1:
        logits, h, rstd, _ = cuda(args._replace(choice=None))
        c = choice
        pairs = choose_experts(logits, c.bias_E, c.chosen, c.normalise, c.scale, c.forced_TK)
        return logits, h, rstd, replace(pairs, ready=c.notes[READY : READY + 1].fill_(1))
    chosen = choice.chosen if choice else 0
    sizes = {"EXPERTS": experts, "CHOSEN": chosen, "WIDTH": width, "WIDTH_PADDED": width_padded}
    kernel, blocks = dense.kernel_of(_Launch, "GATES", w, tokens, in_units, **sizes)
    logits = torch.empty(tokens, experts, device=device)
    h = torch.empty(tokens, width_padded, dtype=torch.bfloat16, device=device)
    rstd = torch.empty(dense.MOST_TOKENS, device=device)
    pairs, choosing = None, _NOBODY_CHOOSES
    if choice is not None:
        pairs = Pairs.empty(tokens, choice.chosen, experts, device, choice.notes[READY : READY + 1])
        choosing = {
            "notes": choice.notes,
            "bias": choice.bias_E,
            "forced": choice.forced_TK,
            **pairs.lists,
            "slots": pairs.most,
            "normalise": int(choice.normalise),
            "scale": choice.scale,
        }
    given = _Launch(
        weights=w.data,
        x=x,
        squares=squares,
        logits=logits,
        h=h,
        rstd=rstd,
        tokens=tokens,
        parts=squares.shape[0],
        eps=args.eps,
        **choosing,
    )
    kernel.launch(given, blocks)
    return logits, h, rstd, pairs


def fits(args: GatesArgs) -> bool:
    """Whether there are 1 to 256 tokens in the layout of `dense`, and at most 512 experts, 32 of them chosen."""
    choosable = args.choice is None or (args.experts <= MOST_EXPERTS and args.choice.chosen <= min(32, args.experts))
    return (
        (dense.fits(args.x, args.w) or dense.streams(args.x, args.w))
        and args.squares.shape[0] <= dense.MOST_PARTS
        and choosable
    )


def cost(args: GatesArgs) -> Cost:
    """The weight, x and the squares once, logits and h; the bytes of the choice are negligible."""
    tokens = args.x.shape[0]
    return dense.cost_of(args.w, tokens, args.x, args.squares) + Cost(tokens * (4 * args.experts + 2 * args.width))


def random_choice(
    g: torch.Generator, tokens: int, experts: int, chosen: int, forced: bool = False
) -> RouterChoice | None:
    """A choice of `chosen` experts with a random bias, or of random forced ids; None if `chosen` is 0."""
    if not chosen:
        return None
    ids = torch.stack([torch.randperm(experts, generator=g)[:chosen] for _ in range(tokens)]).to(torch.int32)
    bias, notes = torch.randn(experts, generator=g) * 0.1, notes_of(experts, torch.device("cpu"))
    return RouterChoice(bias, chosen, True, 2.827, notes, ids if forced else None)


def cases() -> Iterator[Case]:
    """1 to 256 tokens at sizes of nano and of Kimi and at odd ones, with and without a router, with forced experts."""

    def make(tokens: int, d: int, experts: int, width: int, chosen: int = 0, forced: bool = False):
        def inputs(g: torch.Generator) -> GatesArgs:
            def weight(rows: int) -> Tensor:
                return (torch.randn(rows, d, generator=g) * d**-0.5).to(torch.bfloat16)

            x, squares = dense.random_x(g, tokens, d)
            w = gates_weight(weight(experts) if experts else None, weight(2 * width))
            choice = random_choice(g, tokens, experts, chosen, forced)
            return GatesArgs(x, squares, w, experts, width, 1e-5, choice)

        return inputs

    yield Case("T=1 nano", make(1, 320, 16, 128, 4))
    for tokens in (8, 9, 32, 64, 100, 200):
        yield Case(f"T={tokens} nano", make(tokens, 320, 16, 128, 4))
    yield Case("T=5 nano, forced", make(5, 320, 16, 128, 4, forced=True))
    for tokens in (1, 3, 8, 9, 32, 64, 128, 256):
        yield Case(f"T={tokens} Kimi", make(tokens, 7168, 384, 2048, 8), small=False)
    yield Case("T=8 of 384 experts", make(8, 256, 384, 2048, 8))
    for tokens in (2, 20):
        yield Case(f"T={tokens} nano, dense", make(tokens, 320, 0, 768))
    for tokens in (3, 11):
        yield Case(f"T={tokens} odd sizes", make(tokens, 150, 21, 40))
    yield Case("T=2 in slices", make(2, 2304, 20, 64, 4))
    yield Case("T=9 wide", make(9, 96, 24, 2040))
    yield Case("T=8 Kimi's width", make(8, 7168, 20, 16))
    for tokens in (8, 32, 256):
        yield Case(f"T={tokens} Kimi, dense", make(tokens, 7168, 0, 18432), small=False)


gates = Kernel(Op("gates", GatesArgs, reference, cost, cases, rtol=dense.RTOL), cuda, "cuda", fits)
