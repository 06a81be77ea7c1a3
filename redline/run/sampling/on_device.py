"""`on_host.sample_each` and `logprobs_of` with inputs that only the device has, so that they can run in a CUDA graph.

T rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from redline.kernels.cpu.sample import sample
from redline.messages.job import OPTIONS
from redline.messages.step import TokenLogprobs
from redline.ops.draws import uniforms
from redline.ops.sample import AT_ONCE
from redline.run.sampling.on_host import likeliest


def sample_rows(logits_TV: Tensor, odds_TC: Tensor, seed_T: Tensor, position_T: Tensor, *, narrowed: bool) -> Tensor:
    """The token of each row, int64 [T]; -1 if nothing can be drawn.

    odds_TC: float64 [T, ODDS], the sampling parameters of each row. seed_T: 64 bits, as `ops.draws.signed` gives them.
    position_T: int64, of the row's token. narrowed: whether any row is filtered.
    """
    u_T1 = uniforms(seed_T, position_T)[:, None]
    return sample(logits_TV, torch.cat([u_T1, odds_TC], 1), narrowed)


MOST_TOP = int(OPTIONS["logprobs"].le)  # top log probabilities per position, at most
LOGPROB, RANK = 0, 1  # columns of `score_rows`
TOP_TOKENS = slice(2, 2 + MOST_TOP)
TOP_LOGPROBS = slice(TOP_TOKENS.stop, TOP_TOKENS.stop + MOST_TOP)


def score_rows(logits_TV: Tensor, token_T: Tensor, into_TC: Tensor) -> None:
    """Writes each token's log probability and rank, and the most likely tokens with theirs, as `on_host.logprobs_of`.

    into_TC: float64 [T, TOP_LOGPROBS.stop], which holds each of these numbers exactly.
    """
    parts = (part.split(AT_ONCE) for part in (logits_TV, token_T, into_TC))
    for some_RV, token_R, into_RC in zip(*parts, strict=True):
        logs_RV = some_RV.log_softmax(-1)
        # -1 is not a token; the results of its row are not read
        chosen_R1 = logs_RV.gather(1, token_R.clamp(min=0)[:, None])
        best_RN = likeliest(logs_RV, min(MOST_TOP, logs_RV.shape[1]))
        count = best_RN.shape[1]
        into_RC[:, LOGPROB], into_RC[:, RANK] = chosen_R1[:, 0], 1 + (logs_RV > chosen_R1).sum(1)
        into_RC[:, TOP_TOKENS][:, :count] = best_RN
        into_RC[:, TOP_LOGPROBS][:, :count] = logs_RV.gather(1, best_RN)


def logprobs_of_row(row: Sequence[float], token: int, count: int) -> TokenLogprobs:
    """The log probabilities in a row of `score_rows`: of its token, and of the `count` best ones, MOST_TOP at most."""
    top = zip(map(int, row[TOP_TOKENS][:count]), row[TOP_LOGPROBS][:count], strict=True)
    return TokenLogprobs(token=token, logprob=row[LOGPROB], rank=int(row[RANK]), top=tuple(top))
