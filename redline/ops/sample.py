"""Samples a token per row: temperature, top-k, top-p on the remaining tokens, then FILTERS.      R rows, V vocabulary.

The sampled token is the first one, in the order of ids, at which the cumulative probability of the kept tokens exceeds
u times its total. It is -1 if nothing can be sampled: a logit is NaN or +inf, or all of them are -inf. A single logit
of -inf marks a banned token. Tokens exactly as likely as the last kept one are kept too. Probabilities are float32, and
sums float64: float32 would lose the many tokens that are each less likely than 2^-24.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from redline.messages.job import options_at
from redline.messages.sampling_option import SamplingStage
from redline.ops.op import Case, Cost, Op

# Columns of the odds (the sampling parameters of a row): u, then the options that `Sampling` declares for these stages.
ODDS = tuple(option.name for stage in (SamplingStage.TEMPERATURE, SamplingStage.FILTER) for option in options_at(stage))
COLUMNS = ("u", *ODDS)
COLUMN = {name: place for place, name in enumerate(COLUMNS)}
_NEUTRAL = {option.name: option.neutral for option in options_at(SamplingStage.FILTER)}
AT_ONCE = 32  # rows that the reference computes at once: while it sorts, it holds six numbers per token


class SampleArgs(NamedTuple):
    """Samples a token of each row from the logits, with the row's own sampling parameters and random number."""

    logits_RV: Tensor  # float32 [R, V]
    odds_RC: Tensor  # float64 [R, COLUMNS]: u in [0, 1 - 2^-53], temperature > 0, and the filters
    narrowed: bool  # whether any row is filtered: False saves the reference a sort


def reference(args: SampleArgs) -> Tensor:
    """-> ids int64 [R]; -1 if nothing can be sampled. No shape depends on a value, so a CUDA graph can capture it."""
    logits_RV, odds_RC = args.logits_RV, args.odds_RC
    if logits_RV.shape[0] > AT_ONCE:
        parts = zip(logits_RV.split(AT_ONCE), odds_RC.split(AT_ONCE), strict=True)
        return torch.cat([reference(SampleArgs(logits, odds, args.narrowed)) for logits, odds in parts])
    mass_RV = _mass(logits_RV, odds_RC, args.narrowed)
    # u * total rounds to less than the total, so the search ends at a token with nonzero probability.
    reached_R = odds_RC[:, COLUMN["u"]] * mass_RV[:, -1]
    token_R = torch.searchsorted(mass_RV, reached_R[:, None], right=True).squeeze(-1)
    # A logit of NaN or +inf, or -inf in all logits, makes every weight NaN.
    return token_R.masked_fill(~(mass_RV[:, -1] > 0), -1)


def _mass(logits_RV: Tensor, odds_RC: Tensor, narrowed: bool) -> Tensor:
    """The cumulative weights of the kept tokens, float64 [R, V]."""
    weight_RV = (logits_RV / odds_RC[:, COLUMN["temperature"], None].float()).softmax(-1)
    if narrowed:
        best_RV = weight_RV.sort(-1, descending=True).values
        least_R = least_kept(best_RV, weight_RV.sum(-1, dtype=torch.float64), odds_RC)
        weight_RV = weight_RV * (weight_RV >= least_R[:, None])
        for name, keeps in FILTERS.items():
            weight_RV = weight_RV * keeps(weight_RV, odds_RC[:, COLUMN[name]])
    return weight_RV.cumsum(-1, dtype=torch.float64)


def least_kept(best_RB: Tensor, whole_R: Tensor, odds_RC: Tensor) -> Tensor:
    """The minimum weight of a kept token, by top_k, and by top_p on the tokens that top_k leaves. float32 [R]

    - best_RB: float32, the weights of each row's B most probable tokens, largest first: all of them, or the number that
      decides: top_k tokens, if the row has top_k; else enough tokens to reach top_p of the whole row; else any.
    - whole_R: float64, the sum of weights of the whole row; read for rows that have top_p without top_k.
    """
    top_p_R, top_k_R = odds_RC[:, COLUMN["top_p"]], odds_RC[:, COLUMN["top_k"]].long()
    mass_RB = best_RB.cumsum(-1, dtype=torch.float64)
    limited_R, nucleus_R = top_k_R > 0, top_p_R < 1
    all_R = torch.full_like(top_k_R, best_RB.shape[1])
    last_R = torch.where(limited_R, torch.minimum(top_k_R, all_R), all_R) - 1
    among_R = torch.where(limited_R, mass_RB.gather(1, last_R[:, None]).squeeze(1), whole_R)
    in_nucleus_R = torch.searchsorted(mass_RB, (top_p_R * among_R)[:, None]).squeeze(1)
    last_R = torch.where(nucleus_R, torch.minimum(in_nucleus_R, last_R), last_R)
    return best_RB.gather(1, last_R[:, None]).squeeze(1) * (limited_R | nucleus_R)


def _at_least_min_p(weight_RV: Tensor, min_p_R: Tensor) -> Tensor:
    return weight_RV >= (min_p_R * weight_RV.amax(-1)).float()[:, None]


# Filters after top_k and top_p, in this order: from the weights that are left (float32 [R, V], 0 for excluded tokens)
# and the option's column [R] to the tokens that it keeps, bool [R, V]. No shape may depend on a value.
FILTERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"min_p": _at_least_min_p}


def cost(args: SampleArgs) -> Cost:
    """Logits and parameters are read once, and an id of 8 bytes is written per row."""
    return Cost(args.logits_RV.nbytes + args.odds_RC.nbytes + 8 * args.logits_RV.shape[0])


def cases() -> Iterator[Case]:
    """All kinds of parameters, at sizes of nano and Kimi and in small vocabularies; rows that cannot be sampled."""

    def make(rows: int, vocabulary: int, *kinds: dict[str, float], step: float = 0.125, spread: float = 3):
        """kinds: sampling parameters that are not neutral; rows cycle through them.

        No result depends on the last bit. Logits are multiples of `step`, so weights are equal or far apart; and u is
        in the middle of the interval of a token with a noticeable probability.
        """

        def inputs(g: torch.Generator) -> SampleArgs:
            logits_RV = (torch.randn(rows, vocabulary, generator=g) * spread / step).round() * step
            neutral = {"u": 0.0, "temperature": 1.0, **_NEUTRAL}
            columns = [tuple((neutral | kinds[r % len(kinds)])[name] for name in COLUMNS) for r in range(rows)]
            odds_RC = torch.tensor(columns, dtype=torch.float64)
            mass_RV = _mass(logits_RV, odds_RC, narrowed=True)
            share_RV = mass_RV.diff(dim=-1, prepend=torch.zeros(rows, 1)) / mass_RV[:, -1:]
            tokens_R1 = torch.where(share_RV > 1e-5, share_RV, 0.0).multinomial(1, generator=g)
            middle_R1 = mass_RV.gather(1, tokens_R1) / mass_RV[:, -1:] - share_RV.gather(1, tokens_R1) / 2
            odds_RC[:, COLUMN["u"]] = middle_R1[:, 0]
            return SampleArgs(logits_RV, odds_RC, True)

        return inputs

    def impossible(g: torch.Generator) -> SampleArgs:
        """Rows with banned tokens, in some of them nearly all; and rows from which nothing can be sampled."""
        logits_RV, odds_RC, narrowed = make(48, 77, whole, nucleus, all_three)(g)
        logits_RV[6:9, 1:76], logits_RV[6:9, 0], logits_RV[6:9, 76] = -torch.inf, -20, 20
        for first, token, wrong in ((12, 0, torch.nan), (15, 76, torch.nan), (18, 3, torch.inf), (21, 76, torch.inf)):
            logits_RV[first : first + 3, token] = wrong
        logits_RV[24:27, :40], logits_RV[27:30], logits_RV[30:33] = torch.inf, -torch.inf, torch.nan
        return SampleArgs(logits_RV, odds_RC, narrowed)

    whole, nucleus = {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.95}
    all_three = {"temperature": 1.3, "top_p": 0.9, "min_p": 0.011, "top_k": 40}
    others: list[dict[str, float]] = [
        *({"top_p": 0.5}, {"temperature": 0.3, "top_p": 0.999}, {"temperature": 1.9, "top_k": 300}, {"min_p": 0.052}),
        *({"top_k": 1}, *({option.name: option.example} for option in options_at(SamplingStage.FILTER))),
    ]
    yield Case("R=1 nano", make(1, 4096, whole))
    yield Case("R=1 nano, top_p", make(1, 4096, nucleus))
    yield Case("R=64 nano, of all kinds", make(64, 4096, whole, nucleus, all_three, *others))
    yield Case("flat", make(20, 4096, nucleus, all_three, *others, spread=0.5))
    yield Case("hardly any that differ", make(24, 700, nucleus, all_three, *others, step=2.0))
    yield Case("V no multiple of 16", make(40, 77, whole, nucleus, all_three, *others))
    yield Case("V less than 16", make(40, 5, whole, nucleus, all_three, *others))
    yield Case("numbers that are none", impossible)
    yield Case("R=11 Kimi, of all kinds", make(11, 163840, whole, nucleus, all_three, *others))


sample = Op("sample", SampleArgs, reference, cost, cases)
