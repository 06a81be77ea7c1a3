"""Acceptance statistics of speculative decoding: rounds counted from the engine's deltas, with confidence intervals,
and the upper bound of a perfect drafter.

A round is a decode step of one job that verified at least one draft token. It yields the accepted draft tokens and one
token of the target's own, so the acceptance length is 1 + accepted / rounds: vLLM's definition, including the bonus
token. Accepted draft tokens after a stop id are not counted. Decode rows without draft tokens are not rounds; they are
counted separately (`Spoken.rows`). The first token of an answer comes from the prompt's prefill, and not from a round.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from redline.messages.delta import Delta, Finish

RESAMPLES = 2000  # number of resamples of a bootstrap


class DraftRound(NamedTuple):
    """A decode step of one job that verified at least one draft token."""

    position: int  # position of the first draft token, counted from the start of the prompt
    proposed: int
    accepted: int


class Spoken(NamedTuple):
    """A generated answer with its prompt; tokens are ids."""

    id: str
    domain: str
    tokens: tuple[int, ...]  # prompt and answer
    prompt: int  # number of prompt tokens
    finish: Finish
    rounds: tuple[DraftRound, ...]
    rows: int  # number of decode rows, with or without draft tokens


class AcceptanceLength(NamedTuple):
    """An acceptance length with its 95 % interval by a bootstrap over prompts."""

    mean: float
    low: float
    high: float
    rounds: int
    prompts: int


def spoken(id: str, domain: str, prompt: Sequence[int], deltas: Iterable[Delta]) -> Spoken:
    """Assembles an answer from a job's deltas, in order. prompt: its token ids. Raises AssertionError if no delta has a
    `finish`."""
    tokens, rounds, rows, finish = list(prompt), list[DraftRound](), 0, None
    for delta in deltas:
        if delta.proposed:
            rounds.append(DraftRound(len(tokens), delta.proposed, min(delta.accepted, len(delta.tokens))))
        rows += len(tokens) > len(prompt) and bool(delta.tokens)
        tokens += delta.tokens
        finish = delta.finish or finish
    assert finish is not None, f"job {id} has not finished"
    return Spoken(id, domain, tuple(tokens), len(prompt), finish, tuple(rounds), rows)


def acceptance_length(answers: Sequence[Sequence[DraftRound]], seed: int = 0) -> AcceptanceLength:
    """1 + accepted / rounds over the rounds of the answers, in tokens; nan if there are no rounds.

    answers: the rounds of each prompt's answer. seed: seed of the interval's bootstrap.
    """
    accepted = np.array([sum(round.accepted for round in rounds) for rounds in answers], dtype=np.float64)
    count = np.array([len(rounds) for rounds in answers], dtype=np.float64)
    total = int(count.sum())
    if not total:
        return AcceptanceLength(float("nan"), float("nan"), float("nan"), 0, len(answers))
    low, high = interval(accepted, count, seed)
    return AcceptanceLength(1 + float(accepted.sum()) / total, 1 + low, 1 + high, total, len(answers))


def interval(above: npt.NDArray[np.float64], below: npt.NDArray[np.float64], seed: int = 0) -> tuple[float, float]:
    """The 95 % interval (low, high) of sum(above) / sum(below), by a percentile bootstrap over prompts.

    above, below: [N], one entry per prompt.
    """
    draws = np.random.default_rng(seed).multinomial(len(below), np.full(len(below), 1 / len(below)), size=RESAMPLES)
    bottom = draws @ below
    ratios = (draws @ above)[bottom > 0] / bottom[bottom > 0]
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def by_position(answers: Iterable[Sequence[DraftRound]], k: int) -> list[float]:
    """For each j from 1 to k: the share of the rounds with at least j draft tokens that accepted the first j.

    nan if no round proposed j draft tokens.
    """
    proposed, accepted = [0] * k, [0] * k
    for round in itertools.chain.from_iterable(answers):
        for place in range(min(k, round.proposed)):
            proposed[place] += 1
            accepted[place] += place < round.accepted
    return [held / asked if asked else float("nan") for held, asked in zip(accepted, proposed, strict=True)]


def perfect(answer: Spoken, k: int) -> list[DraftRound]:
    """The rounds of a perfect drafter, which proposes exactly the target's tokens: k are accepted, fewer at the
    answer's end.

    If the answer ends at a length limit, the last round leaves room for the target's own token after its draft tokens.
    """
    rounds: list[DraftRound] = []
    at = answer.prompt + 1
    while (left := len(answer.tokens) - at) > 0:
        drafts = min(k, left if answer.finish == "stop" else left - 1)
        if drafts:
            rounds.append(DraftRound(at, drafts, drafts))
        at += drafts + 1
    return rounds
