"""Which of a row's drafts hold, and the token after them: exact, whatever the drafter proposes.

Two ways. A row's own draws: each token is drawn as without a drafter, and a draft is accepted while it equals the
draw; so the answer is the same whatever was drafted, which greedy and seeded requests ask for, and where the drafts are
certain (one-hot) no other way accepts more. Else block verification (Sun et al., arXiv 2403.10444, algorithm 2): drafts
drawn from a distribution are accepted together, on average at least as many as one by one.

d drafts, N rows of logits (row i follows the first i drafts), V vocabulary. Logits float32. N is d + 1; or d, where
nothing can be drawn behind the last draft.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

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
from redline.wire.job import Sampling

# Streams of random numbers; the index of a draft counts up in steps of _STREAMS. Numbers are keyed by the position at
# which the row begins: a draft's fate decides what later rows draft at its place, so that row needs fresh ones.
_DRAFT, _ACCEPT, _LAST = range(3)
_STREAMS = 3

_HUGE = 1e30  # a logit that any temperature leaves finite


class Verified(NamedTuple):
    """`tokens`: the accepted drafts and one token more; `accepted`: how many tokens come before that one.

    The tokens end before one for which there is no row of logits, or no finite number to choose by: so there may be
    none, and the last may be a draft that holds.
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
    """Which drafts hold, and the token after them.

    - logits_NV: float32, of the row's last token and its drafts; perhaps not of the last draft.
    - q_dV: the distributions that the drafts were drawn from, as `draft_token` gives them; None: they were certain.
    - prompt, generated: the tokens before the drafts, int64, for the penalties.
    - position: of the first token that comes of this row; the one that `draft_token` was given.
    """
    before = generated.shape[0]
    if is_plain_greedy(sampling, before):
        return verify_chosen(logits_NV.argmax(-1).tolist(), drafts)
    if drafts and not is_unadjusted(sampling, before):
        generated = torch.cat([generated, torch.tensor(drafts, device=generated.device)])
    rows = logits_NV.shape[0]
    seen = [generated[: before + i] for i in range(rows)]  # where nothing is adjusted, it does not matter
    if q_dV is None or not drafts or sampling.seeded or is_greedy(sampling):
        return _own_draws(logits_NV, drafts, sampling, prompt, seen, position)
    return _block(_probabilities(logits_NV, sampling, prompt, seen), drafts, q_dV, sampling.seed, position)


def is_chosen_alone(sampling: Sampling, generated: int, q_dV: Tensor | None) -> bool:
    """Whether each position's token is a function of its raw logits and its position, whatever the drafts are.

    generated: tokens of the answer so far. q_dV: as in `verify`.
    """
    return is_unadjusted(sampling, generated) and (q_dV is None or sampling.seeded or is_greedy(sampling))


def verify_chosen(chosen: list[int], drafts: Sequence[int]) -> Verified:
    """As `verify`, where `is_chosen_alone`. chosen: the token of each of the N positions."""
    accepted = 0
    for token, draft in zip(chosen[:-1], drafts, strict=False):
        if token != draft:
            break
        accepted += 1
    return Verified(chosen[: accepted + 1], accepted)


def verify_synthetic(rates: Sequence[float], seed: int, position: int, drafts: int) -> int:
    """How many of `drafts` hold where the verdict is drawn, as `settle_rows` draws it too.

    rates: of rounds in which the first 1, 2 ... all hold (`tune.synthetic`). position: as in `verify`.
    """
    draw = uniform_of(seed, VERDICT, position)
    return sum(draw < rate for rate in rates[:drafts])


def draft_token(logits_V: Tensor, sampling: Sampling, position: int, index: int) -> tuple[int, Tensor | None]:
    """A drafter's proposal from its logits, and the distribution [V] that it was drawn from; None: it is the likeliest.

    - logits_V: float32; -inf for what a reduced vocabulary has not. NaN and infinity give some token all the same:
      drafts need not be right, but they are tokens.
    - position: of the first token of the row that will verify it. index: among that row's drafts.
    """
    if sampling.seeded or is_greedy(sampling):
        return int(logits_V.argmax()), None
    sound_V = logits_V.nan_to_num(nan=-_HUGE, posinf=_HUGE, neginf=-torch.inf)
    q_V = (sound_V / sampling.temperature).softmax(-1)
    token = pick(q_V, uniform_of(sampling.seed, _DRAFT + _STREAMS * index, position))
    if token < len(q_V):
        return token, q_V
    q_V = torch.zeros_like(q_V)  # nothing is above -infinity, or too much for the temperature: one draft is certain
    q_V[0] = 1
    return 0, q_V


def _own_draws(
    logits_NV: Tensor, drafts: Sequence[int], sampling: Sampling, prompt: Tensor, seen: Sequence[Tensor], position: int
) -> Verified:
    """seen: what the answer has before each of the N rows."""
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
    """What each row is drawn from, float64 [N, V]."""
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
    """Algorithm 2 of the paper; `reached[i]` is its p_i: how much of a prefix of i drafts may be accepted.

    It gives p exactly as long as the drafts before draft i decide whether i is verified. So where numbers end behind a
    draft, that draft is still verified, as the last one.
    """
    # A row of which nothing can be drawn is NaN from end to end.
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
    # A mass of 0 is met only where p and q are equal but for their rounding.
    whole = accepted == count or masses[accepted] <= 0
    last = pick(p_NV[accepted] if whole else rest_dV[accepted], uniform_of(seed, _LAST, position))
    return Verified([*drafts[:accepted], last], accepted)


def residual(p_dV: Tensor, q_dV: Tensor, reached: Sequence[float]) -> Tensor:
    """What a row that ends after i drafts still owes to each token: max(reached[i] p - q, 0), [d, V].

    reached: as in algorithm 2 of the paper, its p_i; d of them.
    """
    scale = torch.tensor(reached, dtype=p_dV.dtype, device=p_dV.device)
    return (p_dV * scale[:, None]).sub_(q_dV).clamp_(min=0)
