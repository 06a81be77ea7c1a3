"""Every option of Sampling, compared with a plain float64 implementation of the distribution that it requests."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redline.kernels.cpu import sample as cpu
from redline.messages.job import Sampling
from redline.ops.sample import COLUMN, COLUMNS, least_kept
from redline.run.sampling import on_host as module
from redline.run.sampling.on_host import (
    COLDEST,
    SHORTLIST,
    adjusted,
    is_greedy,
    is_plain_greedy,
    kept,
    logprobs_of,
    odds_of,
    pick,
    sample_each,
    sample_token,
    uniform,
)

NOTHING = torch.zeros(0, dtype=torch.int64)
LOGITS = torch.tensor([1.5, -0.3, 2.2, 0.0, 0.7, -2.5, 1.1, 2.0, -1.0, 0.4])
PROMPT, GENERATED = [2, 2, 3, 9], [7, 7, 7, 0, 4]


def draw(logits: Tensor, sampling: Sampling, u: float) -> int:
    return sample_each(logits[None], [sampling], [u])[0]


def asked(**options: Any) -> Sampling:
    return Sampling(**{"max_tokens": 1, **options})


def distribution(logits: Tensor, sampling: Sampling, prompt: list[int], generated: list[int]) -> np.ndarray:
    """Probability of each token, from the definitions."""
    values = [float(x) for x in logits]
    for token, bias in sampling.logit_bias:
        values[token] += bias
    for token in set(prompt) | set(generated):
        penalty = sampling.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token, count in Counter(generated).items():
        values[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    if len(generated) < sampling.min_tokens:
        for token in sampling.stop_ids:
            values[token] = -math.inf
    order = sorted(range(len(values)), key=lambda token: -values[token])
    if sampling.temperature == 0:
        return np.eye(len(values))[order[0]]
    weight = {token: math.exp((values[token] - values[order[0]]) / sampling.temperature) for token in order}
    kept = order[: sampling.top_k] if sampling.top_k else order
    total, before, nucleus = sum(weight[token] for token in kept), 0.0, []
    for token in kept:
        if before < sampling.top_p * total or not nucleus:
            nucleus.append(token)
        before += weight[token]
    kept = [token for token in nucleus if weight[token] >= sampling.min_p * weight[order[0]]]
    probability = np.zeros(len(values))
    probability[kept] = [weight[token] for token in kept]
    return probability / probability.sum()


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.9},
    "top_k": {"top_k": 3},
    "top_k of one": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.7},
    "top_p tiny": {"top_p": 1e-6},
    "top_p of what top_k leaves": {"top_k": 4, "top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "min_p of one": {"min_p": 1.0},
    "min_p after top_p": {"min_p": 0.3, "top_p": 0.95, "temperature": 0.8},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.9},
    "repetition": {"repetition_penalty": 1.7},
    "repetition wanted": {"repetition_penalty": 0.6},
    "all penalties": {"presence_penalty": -0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.3, "top_p": 0.9},
    "bias": {"logit_bias": ((5, 6.0), (2, -100.0))},
    "bias before penalties": {"logit_bias": ((1, 3.0), (7, -4.0)), "repetition_penalty": 2.0},
    "stop ids too early": {"min_tokens": 6, "stop_ids": (2, 0)},
    "stop ids in time": {"min_tokens": 5, "stop_ids": (2, 0)},
}


def drawn(sampling: Sampling, u: float, prompt: list[int], generated: list[int]) -> int:
    """`sample` with a given u instead of the random one."""
    logits = adjusted(LOGITS, sampling, torch.tensor(prompt), torch.tensor(generated))
    if is_greedy(sampling):
        return int(logits.argmax())
    return draw(logits, sampling, u)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_unit_interval_is_shared_out_as_the_options_ask(options: dict[str, Any]):
    sampling = asked(**options)
    expected = distribution(LOGITS, sampling, PROMPT, GENERATED)
    ends = expected.cumsum()
    for token in np.flatnonzero(
        expected > 1e-4
    ):  # probabilities are float32: intervals narrower than that may be off by their width
        begin, end = ends[token] - expected[token], ends[token]
        for part in (0.001, 0.5, 0.999):
            assert drawn(sampling, begin + part * (end - begin), PROMPT, GENERATED) == token


@pytest.mark.parametrize("name", ["as it is", "top_p of what top_k leaves"])
def test_thirty_thousand_draws_are_distributed_as_asked(name: str):
    options = OPTIONS[name]
    expected = 30_000 * distribution(LOGITS, asked(**options), PROMPT, GENERATED)
    prompt, generated = torch.tensor(PROMPT), torch.tensor(GENERATED)
    counts = np.zeros(len(LOGITS))
    for seed in range(200):
        sampling = asked(seed=seed, **options)
        for position in range(150):
            counts[sample_token(LOGITS, sampling, prompt, generated, position)] += 1
    possible = expected > 0
    assert not counts[~possible].any()
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_greedy_is_the_most_likely_token_after_penalties():
    assert sample_token(LOGITS, asked(temperature=0.0), NOTHING, NOTHING, 5) == 2
    for options in OPTIONS.values():
        sampling = asked(**{**options, "temperature": 0.0})
        best = distribution(LOGITS, sampling, PROMPT, GENERATED).argmax()
        assert sample_token(LOGITS, sampling, torch.tensor(PROMPT), torch.tensor(GENERATED), 5) == best


@pytest.mark.parametrize("options", [{"top_k": 1}, {"temperature": 1e-40}, {"temperature": COLDEST / 2}], ids=str)
def test_what_can_only_be_the_best_token_is_greedy_also_in_ties(options: dict[str, Any]):
    logits = torch.zeros(50)
    logits[[7, 30, 31]] = 3.0
    for seed in range(20):
        assert sample_token(logits, asked(seed=seed, **options), NOTHING, NOTHING, 1) == 7


def test_a_low_temperature_overflows_nothing():
    logits = LOGITS * 1e6
    for seed in range(20):
        assert sample_token(logits, asked(seed=seed, temperature=COLDEST), NOTHING, NOTHING, 1) == 2


@pytest.mark.parametrize("factor", [1e-40, 1e40])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_that_overflows_gives_no_token(factor: float, temperature: float):
    """A factor of 1e-40 makes a positive logit infinite, 1e40 a negative one; the latter is rightly a
    ban of the token.
    """
    logits, seen = torch.tensor([1.0, -2.0, 3.0, 0.0]), torch.tensor([0, 1])
    sampling = asked(repetition_penalty=factor, temperature=temperature)
    token = sample_token(logits, sampling, seen, seen[:0], 7)
    assert token == -1 if factor < 1 else token in (0, 2, 3)


def test_plain_greedy_means_that_the_raw_logits_decide():
    assert is_plain_greedy(asked(temperature=0.0), 0)
    assert is_plain_greedy(asked(temperature=0.0, min_tokens=3), 3)
    assert not is_plain_greedy(asked(temperature=0.0, min_tokens=3), 2)
    assert not is_plain_greedy(asked(), 0)
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert not is_plain_greedy(asked(temperature=0.0, **{name: 0.5}), 0)
    assert not is_plain_greedy(asked(temperature=0.0, logit_bias=((1, 1.0),)), 0)


def test_sampling_leaves_the_logits_as_they_were():
    before = LOGITS.clone()
    sample_token(LOGITS, asked(**OPTIONS["all penalties"], logit_bias=((1, 5.0),)), torch.tensor(PROMPT), NOTHING, 1)
    assert torch.equal(LOGITS, before)


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 1.0}], ids=str)
def test_tokens_as_likely_as_the_last_one_kept_are_kept(options: dict[str, Any]):
    logits = torch.tensor([0.0, 4.0, 4.0, -1.0, 4.0])
    seen = {sample_token(logits, asked(seed=seed, **options), NOTHING, NOTHING, 1) for seed in range(100)}
    assert seen == {1, 2, 4}


@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.2}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 700, "top_p": 0.9}, {"top_p": 0.9, "min_p": 0.05}],
    ids=str,
)
def test_the_shortlist_changes_nothing(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 2
    sampling = asked(**options)
    probability = logits.softmax(-1)[None]
    answers: list[list[float]] = []
    for shortlist in (1, 40, SHORTLIST, 5000):
        monkeypatch.setattr(module, "SHORTLIST", shortlist)
        answers.append(kept(probability, sampling).tolist())
    assert answers.count(answers[0]) == len(answers)


@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 5),
    vocabulary=st.sampled_from([1, 7, 300, 2500, 9000]),
    spread=st.sampled_from([0.0, 0.3, 2.0, 6.0]),
    top_k=st.sampled_from([0, 1, 5, 299, 300, 1000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.0001, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    piece=st.sampled_from([1, 600, 1 << 18]),
)
@settings(deadline=None)
def test_what_is_kept_is_what_the_meaning_keeps_and_company_does_not_matter(
    seed: int, rows: int, vocabulary: int, spread: float, top_k: int, top_p: float, min_p: float, piece: int
):
    """The filter looks at a few of the most likely tokens, or at the whole vocabulary in order: the same bits."""
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    probability = logits.mul(8).round().div(8).softmax(-1)  # with ties
    sampling = asked(top_k=top_k, top_p=top_p, min_p=min_p)
    odds = torch.tensor([(0.0, *odds_of(sampling))] * rows, dtype=torch.float64)
    everything = probability.sort(-1, descending=True).values
    least = least_kept(everything, torch.stack([row.sum(dtype=torch.float64) for row in probability]), odds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SORTED", piece)
        found = kept(probability, sampling)
    expected = probability * (probability >= least[:, None])
    assert torch.equal(found, expected * (expected >= (min_p * expected.amax(-1).double()).float()[:, None]))
    for row, alone in zip(found, probability, strict=True):
        assert torch.equal(row, kept(alone[None], sampling)[0])


def test_a_row_of_no_numbers_is_kept_as_it_is():
    probability = torch.stack([torch.full((3000,), torch.nan), torch.full((3000,), 1 / 3000)])
    for options in OPTIONS.values():
        nothing, sound = kept(probability, asked(**options))
        assert nothing.isnan().all()
        assert not sound.isnan().any()


def test_a_row_with_an_option_that_the_kernel_does_not_read_is_drawn_by_the_reference(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(COLUMN, "none", len(COLUMNS))
    monkeypatch.setattr(cpu, "READ", tuple("none" if name == "min_p" else name for name in cpu.READ))
    us, each = [0.05, 0.6, 0.999], [asked(min_p=0.2), asked(top_p=0.7), asked(min_p=0.9)]
    odds = torch.tensor([(u, *odds_of(one), 0.0) for u, one in zip(us, each, strict=True)], dtype=torch.float64)
    shares = [distribution(LOGITS, one, [], []).cumsum() for one in each]
    expected = [int(np.searchsorted(share, u)) for share, u in zip(shares, us, strict=True)]
    assert cpu.sample(LOGITS.repeat(3, 1), odds, True).tolist() == expected


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_is_drawn_is_picked_from_what_is_kept(options: dict[str, Any]):
    """`kept` is the distribution that block verification uses; `sample_each` must draw from the same one."""
    sampling = asked(**options)
    logits = adjusted(LOGITS, sampling, torch.tensor(PROMPT), torch.tensor(GENERATED))
    (share,) = kept((logits / sampling.temperature).softmax(-1)[None], sampling)
    grid = [(i + 0.5) / 60 for i in range(60)]
    assert [draw(logits, sampling, u) for u in grid] == [pick(share, u) for u in grid]


def test_top_p_beyond_the_shortlist_keeps_its_mass():
    logits = torch.randn(4096, generator=torch.Generator().manual_seed(2))
    expected = distribution(logits, asked(top_p=0.9), [], [])
    kept = np.flatnonzero(expected)
    assert len(kept) > SHORTLIST
    ends = expected.cumsum()
    for token in kept[:: len(kept) // 50]:
        assert draw(logits, asked(top_p=0.9), ends[token] - expected[token] / 2) == token


def test_tokens_that_are_very_unlikely_keep_their_share():
    # together, these tokens have a fifth of a thousandth of the probability
    logits = torch.full((200_001,), math.log(1e-9))
    logits[0] = 0.0
    share = 2e-4 / (1 + 2e-4)
    assert draw(logits, asked(), 1 - share * 1.01) == 0
    assert draw(logits, asked(), 1 - share / 2) == pytest.approx(100_000, abs=50)


@given(
    u=st.floats(0, 1 - 2**-53),
    values=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12),
    top_k=st.integers(0, 13),
    top_p=st.floats(0.0001, 1),
    min_p=st.floats(0, 1),
)
@settings(max_examples=300, deadline=None)
def test_any_u_draws_a_token_that_is_possible(u: float, values: list[float], top_k: int, top_p: float, min_p: float):
    logits = torch.tensor(values)
    token = draw(logits, asked(top_k=top_k, top_p=top_p, min_p=min_p), u)
    assert 0 <= token < len(values)
    probability = logits.softmax(-1)
    assert float(probability[token]) > 0
    if top_k:  # ties of probabilities: logits that differ may be equally likely in float32
        assert int((probability > probability[token]).sum()) < top_k
    assert float((logits[token] - logits.max()).exp()) >= min_p * 0.999


def test_uniform_is_the_stated_function():
    def mix(x: np.ndarray) -> np.ndarray:  # splitmix64
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    seeds = np.array([0, 1, -1, 2**63 - 1, -(2**63), 1234567], dtype=np.int64).astype(np.uint64)
    positions = np.arange(6, dtype=np.uint64)
    expected = (mix(seeds ^ mix(positions)) >> np.uint64(11)) * 2.0**-53
    signed = seeds.astype(np.int64)
    assert [uniform(int(seed), position) for position, seed in enumerate(signed)] == expected.tolist()


def test_uniform_is_uniform_and_independent_over_positions_and_seeds():
    values = np.array([[uniform(seed, position) for position in range(300)] for seed in range(300)])
    assert values.min() >= 0
    assert values.max() < 1
    assert len(np.unique(values)) == values.size
    for cells in (values.ravel(), values.diagonal(), values[:, 0], values[0], values[::7, 100:].ravel()):
        expected = len(cells) / 20
        counts = np.histogram(cells, 20, (0, 1))[0]
        assert ((counts - expected) ** 2 / expected).sum() < 19 + 4 * math.sqrt(2 * 19)
    for one, other in ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1]), (values, values.T)):
        off_diagonal = one.ravel() != other.ravel()
        correlation = np.corrcoef(one.ravel()[off_diagonal], other.ravel()[off_diagonal])[0, 1]
        assert abs(correlation) < 4 / math.sqrt(off_diagonal.sum() / 2)


def test_logprobs_are_of_the_models_own_distribution():
    logs = np.log(distribution(LOGITS, asked(), [], []))
    given = logprobs_of(LOGITS, 6, 4)
    assert (given.token, given.rank) == (6, 4)
    assert given.logprob == pytest.approx(logs[6], abs=1e-6)
    assert [token for token, _ in given.top] == [2, 7, 0, 6]
    assert [value for _, value in given.top] == pytest.approx(logs[[2, 7, 0, 6]], abs=1e-6)


@pytest.mark.parametrize(("count", "given"), [(0, 0), (1, 1), (20, 10)])
def test_no_more_alternatives_than_asked_for_or_than_there_are(count: int, given: int):
    assert len(logprobs_of(LOGITS, 2, count).top) == given


def test_equal_tokens_have_equal_rank():
    logits = torch.tensor([1.0, 3.0, 3.0, 0.0])
    assert [logprobs_of(logits, token, 0).rank for token in range(4)] == [3, 1, 1, 4]
