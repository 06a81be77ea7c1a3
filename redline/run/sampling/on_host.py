"""Sampling: from logits to tokens. Each row is drawn independently: its bits do not depend on the rest of the batch.

Random numbers are a function of (seed, position) alone, never of a generator with a state, so that a job is
reproducible whatever ran with it, in whatever batches, and after any preemption.

R rows, V vocabulary. All float32.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from redline.kernels.cpu.sample import sample
from redline.messages.job import OPTIONS, Sampling, options_at
from redline.messages.sampling_option import SamplingStage
from redline.messages.step import TokenLogprobs
from redline.ops.penalties import PENALTIES, penalized
from redline.ops.sample import COLUMN, FILTERS, ODDS, least_kept

_MASK = (1 << 64) - 1
SHORTLIST = 256  # candidates that `kept` examines first; it sorts the whole vocabulary only if they are not enough
SORTED = 1 << 18  # values that `kept` sorts at a time: allocating memory for more takes the time of sorting it
SCORED_ROWS = 128  # prompt positions with logits in memory at once: 84 MB at Kimi's 163,840 tokens
# The options that a stage reads, as tuples in the order of its names.
odds_of: Callable[[Sampling], tuple[float, ...]] = attrgetter(*ODDS)
penalties_of: Callable[[Sampling], tuple[float, ...]] = attrgetter(*PENALTIES)
_filters_of: Callable[[Sampling], tuple[float, ...]] = attrgetter(
    *(option.name for option in options_at(SamplingStage.FILTER))
)
_NO_PENALTIES = tuple(option.neutral for option in options_at(SamplingStage.PENALTY))
_NO_FILTERS = tuple(option.neutral for option in options_at(SamplingStage.FILTER))
COLDEST = 1e-5  # below this temperature sampling is greedy (and logits / temperature could overflow)


def uniform(seed: int, position: int) -> float:
    """A random number in [0, 1), 53 bits: two rounds of splitmix64 over (seed, position)."""
    x = _mix((seed & _MASK) ^ _mix(position))
    return (x >> 11) * 2.0**-53


def uniform_of(seed: int, stream: int, position: int) -> float:
    """As `uniform`, for other streams of random numbers: `stream` >= 0, each independent of all others."""
    return uniform(_mix((seed & _MASK) ^ _mix(_MASK - stream)), position)


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def is_greedy(sampling: Sampling) -> bool:
    """Whether sampling is greedy: only the most likely token can be drawn, with the lowest id among equals."""
    return sampling.temperature < COLDEST or sampling.top_k == 1


def is_plain_greedy(sampling: Sampling, generated: int) -> bool:
    """Whether the argmax of the raw logits is the result. generated: number of output tokens so far."""
    return is_greedy(sampling) and is_unadjusted(sampling, generated)


def is_unadjusted(sampling: Sampling, generated: int) -> bool:
    """Whether the model's logits are used unchanged, by `adjusted` and by any grammar mask, now and later in the
    output. generated: number of output tokens so far."""
    return (
        sampling.grammar is None
        and not has_penalties(sampling)
        and not sampling.logit_bias
        and generated >= sampling.min_tokens
    )


def has_penalties(sampling: Sampling) -> bool:
    """Whether logits depend on the tokens before them."""
    return penalties_of(sampling) != _NO_PENALTIES


def is_narrowed(sampling: Sampling) -> bool:
    """Whether a filter may exclude a part of the vocabulary."""
    return _filters_of(sampling) != _NO_FILTERS


def sample_token(logits_V: Tensor, sampling: Sampling, prompt: Tensor, generated: Tensor, position: int) -> int:
    """The token for `position`; -1 if no finite number is left to choose by, for example after a penalty.

    prompt, generated: the tokens so far, int64, for the penalties.
    """
    if is_plain_greedy(sampling, generated.shape[0]):
        return int(logits_V.argmax())
    logits_V = adjusted(logits_V, sampling, prompt, generated)
    if is_greedy(sampling):
        best = int(logits_V.argmax())
        return best if logits_V[best].isfinite() else -1
    return sample_each(logits_V[None], [sampling], [uniform(sampling.seed, position)])[0]


def adjusted(logits_V: Tensor, sampling: Sampling, prompt: Tensor, generated: Tensor) -> Tensor:
    """A copy of the logits with bias, penalties and the ban on stop ids before min_tokens, as in OpenAI's API and vLLM.

    prompt, generated: the tokens so far, int64.
    """
    logits_V = logits_V.clone()
    for token, bias in sampling.logit_bias:
        logits_V[token] += bias
    if has_penalties(sampling):
        before = prompt if sampling.repetition_penalty != 1 else prompt[:0]  # a long one is slow to sort
        seen, place = torch.cat([before, generated]).unique(return_inverse=True)
        counts = torch.zeros_like(seen).index_add_(0, place[len(before) :], torch.ones_like(generated))
        values = torch.tensor(penalties_of(sampling), dtype=torch.float64, device=seen.device).float()
        penalties = dict(zip(PENALTIES, values, strict=True))
        logits_V[seen] = penalized(logits_V[seen], counts, **penalties)
    if generated.shape[0] < sampling.min_tokens and sampling.stop_ids:
        logits_V[list(sampling.stop_ids)] = -torch.inf
    return logits_V


def sample_each(logits_RV: Tensor, asked: Sequence[Sampling], us: Sequence[float]) -> list[int]:
    """A token for each row, none of which is greedy; -1 if nothing can be drawn.

    A row's token is the first one at which the cumulative probability of the tokens kept by its sampling parameters
    passes u times their total. us: in [0, 1), one for each row.
    """
    return sample(logits_RV, _odds(asked, us, logits_RV.device), any(map(is_narrowed, asked))).tolist()


def _odds(asked: Sequence[Sampling], us: Sequence[float], device: torch.device) -> Tensor:
    """The sampling parameters of each row as `ops.sample` reads them, float64 [R, COLUMNS]."""
    odds = [(u, *odds_of(one)) for one, u in zip(asked, us, strict=True)]
    return torch.tensor(odds, dtype=torch.float64, device=device)


def kept(probability_RV: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities [R, V], 0 for tokens that filters exclude; they are not scaled to sum to 1."""
    rows, vocabulary = probability_RV.shape
    odds_RC = _odds([sampling], [0.0], probability_RV.device).expand(rows, -1)
    # over the whole row: the number of tokens kept follows from a cumulative sum
    nucleus = sampling.top_p < 1 and not sampling.top_k
    best_RB = _most_likely(probability_RV, sampling.top_k or (SHORTLIST if nucleus else 1))
    whole_R = torch.ones_like(odds_RC[:, 0])
    if nucleus:  # each row separately: over several rows torch's threads may add in another order
        whole_R = torch.stack([probability_V.sum(dtype=torch.float64) for probability_V in probability_RV])
    least_R = least_kept(best_RB, whole_R, odds_RC)
    if nucleus:
        short_R = best_RB.cumsum(-1, dtype=torch.float64)[:, -1] < sampling.top_p * whole_R
        if short_R.any():
            for part in short_R.nonzero().squeeze(1).split(max(1, SORTED // vocabulary)):
                best_RV = _most_likely(probability_RV[part], vocabulary)
                least_R[part] = least_kept(best_RV, whole_R[part], odds_RC[part])
    probability_RV = probability_RV * (probability_RV >= least_R[:, None])
    for name, keeps in FILTERS.items():
        if getattr(sampling, name) != OPTIONS[name].neutral:
            probability_RV = probability_RV * keeps(probability_RV, odds_RC[:, COLUMN[name]])
    return probability_RV


def _most_likely(probability_RV: Tensor, count: int) -> Tensor:
    """The `count` largest of each row, or all, largest first."""
    vocabulary = probability_RV.shape[1]
    if count == 1:
        return probability_RV.amax(-1, keepdim=True)
    if count <= vocabulary // 8 or probability_RV.is_cuda:
        return probability_RV.topk(min(count, vocabulary)).values
    ascending_RV = -probability_RV
    np.ndarray.sort(ascending_RV.numpy())  # on a CPU several times faster than torch's sort
    return ascending_RV[:, :count].neg()


def pick(weight_V: Tensor, u: float) -> int:
    """The first token, in the order of ids, at which the cumulative weight passes u times the total, which is above
    0."""
    # In float64: float32 would lose the many tokens that are each less likely than 2^-24. And u <= 1 - 2^-53, so u *
    # total rounds to less than the total, and the search ends at a possible token.
    mass = weight_V.cumsum(0, dtype=torch.float64)
    return int(torch.searchsorted(mass, u * mass[-1], right=True))


def logprobs_of(logits_V: Tensor, token: int, count: int) -> TokenLogprobs:
    """The token's log probability (natural) and rank (from 1) in the model's own distribution, and the `count` best."""
    logs = logits_V.log_softmax(-1)
    chosen = float(logs[token])
    tokens = likeliest(logs, min(count, logs.shape[0]))
    top = tuple(zip(tokens.tolist(), logs[tokens].tolist(), strict=True))
    return TokenLogprobs(token=token, logprob=chosen, rank=1 + int((logs > chosen).sum()), top=top)


def likeliest(logs: Tensor, count: int) -> Tensor:
    """The ids of the `count` most likely tokens of each row, int64 [..., count]: best first, of equal ones the lowest.

    logs: float32 [..., V]. Only this order gives the same result for every count and on every chip.
    """
    bits = (logs + 0.0).view(torch.int32).long()  # -0.0 becomes 0.0
    rising = bits ^ (bits >> 31 & 0x7FFFFFFF)
    ids = torch.arange(logs.shape[-1], device=logs.device)
    return (rising << 32 | 0x7FFFFFFF - ids).topk(count).indices
