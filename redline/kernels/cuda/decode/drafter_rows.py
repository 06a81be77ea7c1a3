"""Inputs of a drafter's pass, one launch each, in Triton (`triton/drafter.py`).

`norm_states`  norms the target's states of a token, each by its own weights
`join_rows`    concatenates normed embedding and feature, and gathers the residual of the finished rows

T rows, R finished rows, S states, D hidden, V vocabulary.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.cuda.layouts.tiled import PAD_K
from redline.kernels.kernel import Kernel
from redline.ops.add_norm import rms_norm
from redline.ops.op import Case, Cost, Op


class NormStatesArgs(NamedTuple):
    """S concatenated states of each token, and the weights of their norms."""

    features_TF: Tensor  # bf16 [T, S D]
    norms_SD: Tensor  # float32
    eps: float


def _states_reference(args: NormStatesArgs) -> Tensor:
    """-> bf16 [T, S D]"""
    states = args.features_TF.unflatten(1, tuple(args.norms_SD.shape)).float()
    root = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + args.eps)
    return (states * root * args.norms_SD).to(torch.bfloat16).flatten(1)


def _states_triton(args: NormStatesArgs) -> Tensor:
    from redline.kernels.cuda.triton import drafter  # Triton is imported only on use

    return drafter.norm_states(args.features_TF, args.norms_SD, args.eps)


def _states_fits(args: NormStatesArgs) -> bool:
    return args.features_TF.is_contiguous() and args.features_TF.dtype == torch.bfloat16


def _states_cost(args: NormStatesArgs) -> Cost:
    return Cost(2 * args.features_TF.nbytes + args.norms_SD.nbytes)


def _states_cases() -> Iterator[Case]:
    def make(tokens: int, states: int, d: int):
        def inputs(g: torch.Generator) -> NormStatesArgs:
            features = torch.randn(tokens, states * d, generator=g).to(torch.bfloat16)
            return NormStatesArgs(features, torch.rand(states, d, generator=g) + 0.5, 1e-5)

        return inputs

    yield Case("T=3 nano", make(3, 3, 320))
    yield Case("T=8 Kimi", make(8, 3, 7168), small=False)


class JoinRowsArgs(NamedTuple):
    """A drafter's rows: tokens, features, and which rows are finished."""

    ids_T: Tensor  # int64
    table_VD: Tensor  # bf16: the embedding
    input_norm_D: Tensor  # float32
    feature_TD: Tensor  # bf16
    hidden_norm_D: Tensor  # float32
    finished_R: Tensor  # int32: indices of rows
    norm_before_residual: bool
    eps: float


def _join_reference(args: JoinRowsArgs) -> tuple[Tensor, Tensor]:
    """-> x bf16 [T, 2 D padded to 128 with zeros], residual float32 [R, D]"""
    embedding = rms_norm(args.table_VD[args.ids_T].float(), args.input_norm_D, args.eps)
    hidden = rms_norm(args.feature_TD.float(), args.hidden_norm_D, args.eps)
    x = torch.cat([embedding, hidden], -1).to(torch.bfloat16)
    residual = hidden if args.norm_before_residual else args.feature_TD.float()
    return F.pad(x, (0, -x.shape[1] % PAD_K)), residual[args.finished_R.long()]


def _join_triton(args: JoinRowsArgs) -> tuple[Tensor, Tensor]:
    from redline.kernels.cuda.triton import drafter

    return drafter.join_rows(*args)


def _join_fits(args: JoinRowsArgs) -> bool:
    return args.feature_TD.is_contiguous() and args.feature_TD.dtype == args.table_VD.dtype == torch.bfloat16


def _join_cost(args: JoinRowsArgs) -> Cost:
    rows, d = args.feature_TD.shape
    return Cost(rows * d * (2 + 2 + 4) + args.finished_R.shape[0] * d * (2 + 4) + 8 * d)


def _join_cases() -> Iterator[Case]:
    def make(tokens: int, finished: int, v: int, d: int, normed: bool):
        def inputs(g: torch.Generator) -> JoinRowsArgs:
            table = torch.randn(v, d, generator=g).to(torch.bfloat16)
            norms = torch.rand(2, d, generator=g) + 0.5
            feature = (torch.randn(tokens, d, generator=g) * 3).to(torch.bfloat16)
            rows = torch.randperm(tokens, generator=g)[:finished].to(torch.int32)
            ids = torch.randint(v, (tokens,), generator=g)
            return JoinRowsArgs(ids, table, norms[0], feature, norms[1], rows, normed, 1e-5)

        return inputs

    yield Case("T=1 nano", make(1, 1, 4096, 320, False))
    yield Case("T=8 nano, 2 finished", make(8, 2, 4096, 320, False))
    yield Case("T=5 odd width, normed", make(5, 3, 50, 76, True))
    yield Case("T=32 Kimi, 8 finished", make(32, 8, 500, 7168, False), small=False)


norm_states = Kernel(
    Op("norm_states", NormStatesArgs, _states_reference, _states_cost, _states_cases),
    _states_triton,
    "cuda",
    _states_fits,
)
join_rows = Kernel(
    Op("join_rows", JoinRowsArgs, _join_reference, _join_cost, _join_cases), _join_triton, "cuda", _join_fits
)
