"""Verification of draft tokens: which of a row's drafts are accepted, and the token after them. Exact for any drafter.

There are two methods. With own draws, each token is drawn as without a drafter, and a draft is accepted if it equals
the draw. The output is then the same whatever was drafted, as greedy and seeded requests require; and if the drafts are
certain (one-hot), no other method accepts more. Otherwise, block verification (Sun et al., arXiv 2403.10444, algorithm
2): drafts sampled from a distribution are accepted as a block, and on average no fewer of them than one by one.

d drafts, N rows of logits (row i follows the first i drafts), V vocabulary. Logits float32. N is d + 1; or d, if no
token can be drawn after the last draft.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from redline.messages.job import Sampling
from redline.ops.draws import VERDICT
from redline.run.sampling.on_host import (
    adjusted,
    is_greedy,
    is_narrowed,
    is_plain_greedy,
    is_unadjusted,
    kept,
    pick,
    sample_token,
    uniform_of,
)

# Streams of random numbers; the index of a draft counts up in steps of _STREAMS. Numbers are keyed by the position at
# which the row begins: whether a draft is accepted decides what later rows draft at its position, so those rows need
# fresh numbers.
_DRAFT, _ACCEPT, _LAST = range(3)
_STREAMS = 3

_HUGE = 1e30  # a logit that stays finite at any temperature


class Verified(NamedTuple):
    """`tokens`: the accepted drafts and one token more; `accepted`: number of tokens before that one.

    The tokens end before the first one without a row of logits, or without a finite number to choose by: so there may
    be no token, and the last one may be an accepted draft.
    """

    tokens: list[int]
    accepted: int


def verify(
    logits_NV: Tensor,
    drafts: Sequence[int],
    q_dV: Tensor | None,
    sampling: Sampling,
    prompt: Tensor,
    generated: Tensor,
    position: int,
) -> Verified:
    """The accepted drafts, and the token after them.

    - logits_NV: float32, of the row's last token and its drafts; may lack the row of the last draft.
    - q_dV: the distributions that the drafts were drawn from, as returned by `draft_token`; None: the drafts are
    certain.
    - prompt, generated: the tokens before the drafts, int64, for the penalties.
    - position: of the first token of this row's result, the position that `draft_token` was given.
    """
    before = generated.shape[0]
    if is_plain_greedy(sampling, before):
        return verify_chosen(logits_NV.argmax(-1).tolist(), drafts)
    if drafts and not is_unadjusted(sampling, before):
        generated = torch.cat([generated, torch.tensor(drafts, device=generated.device)])
    rows = logits_NV.shape[0]
    seen = [generated[: before + i] for i in range(rows)]  # unused if nothing is adjusted
    if q_dV is None or not drafts or sampling.seeded or is_greedy(sampling):
        return _own_draws(logits_NV, drafts, sampling, prompt, seen, position)
    return _block(_probabilities(logits_NV, sampling, prompt, seen), drafts, q_dV, sampling.seed, position)


def is_chosen_alone(sampling: Sampling, generated: int, q_dV: Tensor | None) -> bool:
    """Whether each position's token is a function of its raw logits and its position, whatever the drafts are.

    generated: number of output tokens so far. q_dV: as in `verify`.
    """
    return is_unadjusted(sampling, generated) and (q_dV is None or sampling.seeded or is_greedy(sampling))


def verify_chosen(chosen: list[int], drafts: Sequence[int]) -> Verified:
    """As `verify`, if `is_chosen_alone` holds. chosen: the token of each of the N positions."""
    accepted = 0
    for token, draft in zip(chosen[:-1], drafts, strict=False):
        if token != draft:
            break
        accepted += 1
    return Verified(chosen[: accepted + 1], accepted)


def verify_synthetic(rates: Sequence[float], seed: int, position: int, drafts: int) -> int:
    """How many of `drafts` drafts are accepted with synthetic acceptance, drawn as in `verify_drafts`.

    rates: shares of rounds in which the first 1, 2 ... drafts are all accepted (`policy.synthetic`). position: as in
    `verify`.
    """
    draw = uniform_of(seed, VERDICT, position)
    return sum(draw < rate for rate in rates[:drafts])


def draft_token(logits_V: Tensor, sampling: Sampling, position: int, index: int) -> tuple[int, Tensor | None]:
    """A drafter's proposal from its logits, and the distribution [V] that it was drawn from; None: it is the argmax.

    - logits_V: float32; -inf for tokens outside of a reduced vocabulary. NaN and infinity still give some token: drafts
    need not be right, but they must be tokens.
    - position: of the first token of the row that will verify it. index: among that row's drafts.
    """
    if sampling.seeded or is_greedy(sampling):
        return int(logits_V.argmax()), None
    sound_V = logits_V.nan_to_num(nan=-_HUGE, posinf=_HUGE, neginf=-torch.inf)
    q_V = (sound_V / sampling.temperature).softmax(-1)
    token = pick(q_V, uniform_of(sampling.seed, _DRAFT + _STREAMS * index, position))
    if token < len(q_V):
        return token, q_V
    # no logit is above -infinity, or the temperature makes too many infinite: draft token 0 with certainty
    q_V = torch.zeros_like(q_V)
    q_V[0] = 1
    return 0, q_V


def _own_draws(
    logits_NV: Tensor, drafts: Sequence[int], sampling: Sampling, prompt: Tensor, seen: Sequence[Tensor], position: int
) -> Verified:
    """Own draws. seen: the output tokens before each of the N rows."""
    tokens: list[int] = []
    for i, generated in enumerate(seen):
        token = sample_token(logits_NV[i], sampling, prompt, generated, position + i)
        if token < 0:
            break
        tokens.append(token)
        if i >= len(drafts) or token != drafts[i]:
            break
    return Verified(tokens, max(0, len(tokens) - 1))


def _probabilities(logits_NV: Tensor, sampling: Sampling, prompt: Tensor, seen: Sequence[Tensor]) -> Tensor:
    """The distribution that each row is drawn from, float64 [N, V]."""
    if not is_unadjusted(sampling, len(seen[0])):
        logits_NV = torch.stack(
            [
                adjusted(logits_V, sampling, prompt, generated)
                for logits_V, generated in zip(logits_NV, seen, strict=True)
            ]
        )
    logits_NV = logits_NV / sampling.temperature
    if not is_narrowed(sampling):
        return logits_NV.softmax(-1, dtype=torch.float64)
    p_NV = kept(logits_NV.softmax(-1), sampling).double()
    return p_NV / p_NV.sum(-1, keepdim=True)


def _block(p_NV: Tensor, drafts: Sequence[int], q_dV: Tensor, seed: int, position: int) -> Verified:
    """Algorithm 2 of the paper; `reached[i]` is its p_i: the probability with which a prefix of i drafts may be
    accepted.

    The result has distribution p exactly if the drafts before draft i alone decide whether i is verified. So if the
    logits end after a draft, that draft is still verified, as the last one.
    """
    # A row from which nothing can be drawn is NaN throughout.
    sound = [*map(math.isnan, p_NV[:, 0].tolist()), True].index(True)
    if not sound:
        return Verified([], 0)
    count = min(len(drafts), sound)
    drafts, q_dV, p_dV = drafts[:count], q_dV[:count], p_NV[:count]
    index_d1 = torch.tensor(drafts, dtype=torch.int64, device=p_NV.device)[:, None]
    reached = [1.0]
    for [p], [q] in zip(p_dV.gather(1, index_d1).tolist(), q_dV.gather(1, index_d1).tolist(), strict=True):
        reached.append(min(reached[-1] * p / q, 1.0) if q > 0 else 0.0)
    rest_dV = residual(p_dV, q_dV, reached[:count])
    masses: list[float] = rest_dV.sum(-1).tolist()
    accepted = 0
    for i in range(1, count + 1):
        chance = reached[i]
        if i < count:
            free = masses[i] + 1 - reached[i]
            chance = masses[i] / free if free > 0 else 0.0
        if uniform_of(seed, _ACCEPT + _STREAMS * (i - 1), position) < chance:
            accepted = i
    if accepted == sound:
        return Verified([*drafts[:accepted]], accepted - 1)
    # A mass of 0 occurs only if p and q are equal up to rounding.
    whole = accepted == count or masses[accepted] <= 0
    last = pick(p_NV[accepted] if whole else rest_dV[accepted], uniform_of(seed, _LAST, position))
    return Verified([*drafts[:accepted], last], accepted)


def residual(p_dV: Tensor, q_dV: Tensor, reached: Sequence[float]) -> Tensor:
    """The residual distribution of a row that ends after i drafts: max(reached[i] p - q, 0), [d, V].

    reached: as in algorithm 2 of the paper, its p_i; d of them.
    """
    scale = torch.tensor(reached, dtype=p_dV.dtype, device=p_dV.device)
    return (p_dV * scale[:, None]).sub_(q_dV).clamp_(min=0)
