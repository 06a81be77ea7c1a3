"""Logits to tokens. Each row is drawn on its own: its bits do not depend on its company.

Randomness is a function of (seed, position) alone, never of a generator with a state, so that a job is reproduced
whatever ran beside it, in whatever batches, and after any pre-emption.

V vocabulary. All float32.
"""

import torch
from torch import Tensor

from redline.wire.job import Sampling
from redline.wire.step import TokenLogprobs

_MASK = (1 << 64) - 1
SHORTLIST = 256  # top_p looks at so many candidates first, and sorts the whole vocabulary only where they do not do


def uniform(seed: int, position: int) -> float:
    """In [0, 1), 53 bits: two rounds of splitmix64 over (seed, position)."""
    x = _mix((seed & _MASK) ^ _mix(position))
    return (x >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def is_plain_greedy(sampling: Sampling, generated: int) -> bool:
    """Whether argmax of the raw logits is the answer."""
    return (
        sampling.temperature == 0
        and sampling.presence_penalty == sampling.frequency_penalty == 0
        and sampling.repetition_penalty == 1
        and not sampling.logit_bias
        and generated >= sampling.min_tokens
    )


def sample(logits_V: Tensor, sampling: Sampling, prompt: Tensor, generated: Tensor, position: int) -> int:
    """The token for `position`. prompt, generated: the tokens so far, int64, for the penalties."""
    if is_plain_greedy(sampling, generated.shape[0]):
        return int(logits_V.argmax())
    logits_V = adjusted(logits_V, sampling, prompt, generated)
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    return draw(logits_V / sampling.temperature, sampling, uniform(sampling.seed, position))


def adjusted(logits_V: Tensor, sampling: Sampling, prompt: Tensor, generated: Tensor) -> Tensor:
    """Bias, penalties and the ban on stop ids before min_tokens, as OpenAI and vLLM define them."""
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


def draw(logits_V: Tensor, sampling: Sampling, u: float) -> int:
    """Top-k, then top-p of what is left, then min-p; then the token at which the cumulative probability passes u."""
    vocabulary = logits_V.shape[0]
    if sampling.top_k <= 0 and sampling.top_p >= 1 and sampling.min_p <= 0:
        return _at(logits_V.softmax(-1), u)
    probability = logits_V.softmax(-1)
    count = min(sampling.top_k, vocabulary) if sampling.top_k > 0 else min(SHORTLIST, vocabulary)
    best, tokens = probability.topk(count)
    if sampling.top_k > 0:
        best = best / best.sum()
    # The shortlist serves if what top_p (or min_p) keeps is inside it.
    enough = sampling.top_k > 0 or float(best.sum()) >= sampling.top_p
    if sampling.min_p > 0 and float(best[-1]) < sampling.min_p * float(best[0]):
        enough = True
    if not enough:
        best, tokens = probability.sort(descending=True, stable=True)
    before = best.cumsum(0) - best
    keep = before < sampling.top_p
    keep[0] = True
    keep &= best >= sampling.min_p * best[0]
    best = torch.where(keep, best, 0.0)
    return int(tokens[_at(best, u)])


def _at(weight: Tensor, u: float) -> int:
    """The first index at which the cumulative weight exceeds u of the total."""
    cumulative = weight.cumsum(0)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    return min(index, int(weight.nonzero()[-1]))


def logprobs_of(logits_V: Tensor, token: int, count: int) -> TokenLogprobs:
    """Of the model's own distribution: the token's log probability and rank, and the `count` best."""
    logs = logits_V.log_softmax(-1)
    chosen = float(logs[token])
    best, tokens = logs.topk(min(count, logs.shape[0])) if count else (logs[:0], logs[:0].long())
    top = tuple(zip(tokens.tolist(), best.tolist(), strict=True))
    return TokenLogprobs(token=token, logprob=chosen, rank=1 + int((logs > chosen).sum()), top=top)
