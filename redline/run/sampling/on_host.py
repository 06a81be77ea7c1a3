"""Logits to tokens. Each row is drawn on its own: its bits do not depend on its company.

Randomness is a function of (seed, position) alone, never of a generator with a state, so that a job is reproduced
whatever ran beside it, in whatever batches, and after any pre-emption.

R rows, V vocabulary. All float32.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from redline.kernels.cpu.sample import sample
from redline.wire.job import Sampling
from redline.wire.step import TokenLogprobs

_MASK = (1 << 64) - 1
SHORTLIST = 256  # `kept` looks at so many candidates first, and sorts the whole vocabulary only where they do not do
SCORED_ROWS = 128  # prompt positions whose logits are there at once: 84 MB at Kimi's 163,840 tokens
COLDEST = 1e-5  # below this temperature the most likely token is all there is (and logits / temperature could overflow)


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
    """Whether only the most likely token can be drawn: the one of the lowest id, where several are as likely."""
    return sampling.temperature < COLDEST or sampling.top_k == 1


def is_plain_greedy(sampling: Sampling, generated: int) -> bool:
    """Whether argmax of the raw logits is the answer. generated: tokens of the answer so far."""
    return is_greedy(sampling) and is_unadjusted(sampling, generated)


def is_unadjusted(sampling: Sampling, generated: int) -> bool:
    """Whether `adjusted` would change nothing, now and later in the answer. generated: tokens of the answer so far."""
    return (
        sampling.presence_penalty == sampling.frequency_penalty == 0
        and sampling.repetition_penalty == 1
        and not sampling.logit_bias
        and generated >= sampling.min_tokens
    )


def is_narrowed(sampling: Sampling) -> bool:
    """Whether top_k, top_p or min_p may leave out a part of the vocabulary."""
    return bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0)


def sample_token(logits_V: Tensor, sampling: Sampling, prompt: Tensor, generated: Tensor, position: int) -> int:
    """The token for `position`; -1 where no finite number is left to choose by, as after a penalty.

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
    if sampling.repetition_penalty != 1:
        seen = torch.cat([prompt, generated]).unique()
        value = logits_V[seen]
        factor = sampling.repetition_penalty
        logits_V[seen] = torch.where(value > 0, value / factor, value * factor)
    if sampling.presence_penalty or sampling.frequency_penalty:
        tokens, counts = generated.unique(return_counts=True)
        logits_V[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if generated.shape[0] < sampling.min_tokens and sampling.stop_ids:
        logits_V[list(sampling.stop_ids)] = -torch.inf
    return logits_V


def sample_each(logits_RV: Tensor, asked: Sequence[Sampling], us: Sequence[float]) -> list[int]:
    """A token for each row, none of which is greedy; -1 where nothing can be drawn.

    A row's token is the first at which the cumulative probability of those that its sampling keeps passes u of its
    total. us: in [0, 1), one for each row.
    """
    odds = [(one.temperature, one.top_p, one.min_p, one.top_k, u) for one, u in zip(asked, us, strict=True)]
    odds_R5 = torch.tensor(odds, dtype=torch.float64, device=logits_RV.device)
    return sample(logits_RV, odds_R5, any(map(is_narrowed, asked))).tolist()


def kept(probability_V: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities [V], 0 for tokens that top_k, top_p and min_p leave out; they are not scaled to a sum of 1."""
    least = least_kept(probability_V, sampling)
    return torch.where(probability_V >= least, probability_V, 0.0) if least > 0 else probability_V


def pick(weight_V: Tensor, u: float) -> int:
    """The first token, in the order of ids, at which the cumulative weight passes u of the total, which is above 0."""
    # In float64: float32 would lose the many tokens that are each less likely than 2^-24. And u <= 1 - 2^-53, so that
    # u * total rounds to less than the total, and the search ends at a token that is possible.
    mass = weight_V.cumsum(0, dtype=torch.float64)
    return int(torch.searchsorted(mass, u * mass[-1], right=True))


def least_kept(probability_V: Tensor, sampling: Sampling) -> float:
    """The probability that a token needs to be kept: by top_k, by top_p of what top_k leaves, and by min_p; 0: all are.

    Tokens exactly as likely as the last one kept are kept too, so the choice does not depend on how ties are sorted.
    """
    vocabulary = probability_V.shape[0]
    least = 0.0
    if 0 < sampling.top_k < vocabulary or sampling.top_p < 1:
        best = _most_likely(probability_V, sampling.top_k or SHORTLIST)
        mass = best.cumsum(0, dtype=torch.float64)
        wanted = sampling.top_p * (mass[-1] if sampling.top_k else probability_V.sum(dtype=torch.float64))
        if mass[-1] < wanted:
            best = _most_likely(probability_V, vocabulary)
            mass = best.cumsum(0, dtype=torch.float64)
        last = int(torch.searchsorted(mass, wanted)) if sampling.top_p < 1 else len(best) - 1
        least = float(best[min(last, len(best) - 1)])
    if sampling.min_p > 0:
        least = max(least, sampling.min_p * float(probability_V.max()))
    return least


def _most_likely(probability_V: Tensor, count: int) -> Tensor:
    """The `count` largest, or all, largest first."""
    vocabulary = probability_V.shape[0]
    if count <= vocabulary // 8 or probability_V.is_cuda:
        return probability_V.topk(min(count, vocabulary)).values
    ascending = np.sort(probability_V.numpy())  # on a CPU several times faster than torch's
    return torch.from_numpy(ascending[::-1][:count].copy())


def logprobs_of(logits_V: Tensor, token: int, count: int) -> TokenLogprobs:
    """The token's log probability (natural) and rank (from 1) in the model's own distribution, and the `count` best."""
    logs = logits_V.log_softmax(-1)
    chosen = float(logs[token])
    best, tokens = logs.topk(min(count, logs.shape[0])) if count else (logs[:0], logs[:0].long())
    top = tuple(zip(tokens.tolist(), best.tolist(), strict=True))
    return TokenLogprobs(token=token, logprob=chosen, rank=1 + int((logs > chosen).sum()), top=top)
