"""Verification is exact: its output has the distribution of sampling without a drafter, or is the identical answer."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from redline.messages.job import Sampling
from redline.run.drafting import verify as module
from redline.run.drafting.verify import Verified, draft_token, verify, verify_chosen
from redline.run.sampling.on_host import adjusted, kept, pick, sample_each, sample_token, uniform_of

V, K = 6, 3  # size of the vocabulary, drafts in a row
NOTHING = torch.zeros(0, dtype=torch.int64)
PROMPT = torch.tensor([1, 4])
# The next token depends on the last two: logits of the model and of its drafter, which is of medium quality.
_random = torch.Generator().manual_seed(5)
MODEL_CCV = torch.randn(V, V, V, generator=_random) * 1.5
DRAFTER_CCV = MODEL_CCV + torch.randn(V, V, V, generator=_random)
DRAFTER_CCV[:, :, 2] = -torch.inf  # a reduced draft vocabulary without token 2

Tokens = tuple[int, ...]
honest_uniform_of = uniform_of


def asked(**options: Any) -> Sampling:
    return Sampling(**{"max_tokens": 100, **options})


@cache
def model_rows(before: Tokens, drafts: Tokens) -> Tensor:
    """[1 + d, V]: the model's logits after `before`, and after each draft."""
    whole = before + drafts
    return torch.stack([MODEL_CCV[whole[i - 2], whole[i - 1]] for i in range(len(before), len(whole) + 1)])


@cache
def drafter_rows(before: Tokens, drafts: Tokens, temperature: float) -> Tensor:
    """[d, V]: the distributions that the drafts are drawn from."""
    whole = before + drafts
    logits = [DRAFTER_CCV[whole[i - 2], whole[i - 1]] for i in range(len(before), len(whole))]
    return (torch.stack(logits) / temperature).softmax(-1)


@cache
def ladder(before: Tokens, temperature: float) -> list[float]:
    """Cumulative probabilities of the drafter's next token."""
    q = drafter_rows(before, (0,), temperature)[0].double()
    return list(accumulate((q / q.sum()).tolist()))


@cache
def plain_ladder(before: Tokens) -> list[float]:
    """Cumulative probabilities of the model's next token, at temperature 1."""
    return list(accumulate(model_rows(before, ())[0].softmax(-1, dtype=torch.float64).tolist()))


def drafted(before: Tokens, sampling: Sampling, position: int) -> Tokens:
    """Draws drafts as `draft_token` does, but in plain Python for speed, since the tests draw very many."""
    drafts: Tokens = ()
    for index in range(K):
        u = uniform_of(sampling.seed, 3 * index, position)
        drafts += (bisect_right(ladder((before + drafts)[-2:], sampling.temperature), u),)
    return drafts


def row(tokens: Tokens, sampling: Sampling, certain: bool = False) -> Verified:
    """Verifies the row that follows the given first tokens of an answer."""
    position = len(PROMPT) + len(tokens)
    before = (tuple(PROMPT.tolist()) + tokens)[-2:]
    drafts = (0, 3, 2) if certain else drafted(before, sampling, position)
    q_dV = None if certain else drafter_rows(before, drafts, sampling.temperature)
    generated = torch.tensor(tokens, dtype=torch.int64) if tokens else NOTHING
    return verify(model_rows(before, drafts), drafts, q_dV, sampling, PROMPT, generated, position)


def expected(sampling: Sampling, length: int) -> np.ndarray:
    """The exact probability of every sequence of `length` tokens, [V] * length, from the sampler's own definition."""
    shares = np.zeros([V] * length)
    for tokens in itertools.product(range(V), repeat=length):
        share = 1.0
        for i, token in enumerate(tokens):
            before = (tuple(PROMPT.tolist()) + tokens[:i])[-2:]
            logits = adjusted(model_rows(before, ())[0], sampling, PROMPT, torch.tensor(tokens[:i], dtype=torch.int64))
            p_V = kept((logits / sampling.temperature).softmax(-1)[None], sampling)[0].double()
            share *= float(p_V[token] / p_V.sum())
            if share == 0:
                break
        shares[tokens] = share
    return shares


def deviation(counts: np.ndarray, shares: np.ndarray) -> float:
    """Chi-square over the cells with an expected count of 5 or more (all others pooled), in standard deviations above
    its mean.
    """
    wanted = counts.sum() * shares
    assert not counts[wanted == 0].any(), "a sequence of probability 0 was drawn"
    many = wanted >= 5
    observed = np.append(counts[many], counts[~many].sum())
    wanted = np.append(wanted[many], max(wanted[~many].sum(), 1e-9))
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1]
    freedom = len(wanted) - 1
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    return (chi_square - freedom) / math.sqrt(2 * freedom)


def counted(draws: int, length: int, certain: bool = False, **options: Any) -> np.ndarray:
    """How often each sequence of `length` tokens was the beginning of an answer."""
    counts = np.zeros([V] * length)
    for seed in range(draws):
        sampling, tokens = asked(seed=seed, **options), ()
        while len(tokens) < length:
            tokens += tuple(row(tokens, sampling, certain).tokens)
        counts[tokens[:length]] += 1
    return counts


def prefixes(length: int) -> Iterator[Tokens]:
    return itertools.product(range(V), repeat=length)


def chances(step: Callable[[float, float], float]) -> float:
    """The mean number of accepted drafts of a row; `step` computes a prefix's acceptance probability from the previous
    one's.
    """
    start, total = tuple(PROMPT.tolist()), 0.0
    for length in range(1, K + 1):
        for drafts in prefixes(length):
            p_dV = model_rows(start, drafts)[:length].softmax(-1)
            q_dV = drafter_rows(start, drafts, 1.0)
            reached, drawn = 1.0, 1.0
            for i, draft in enumerate(drafts):
                p, q = float(p_dV[i, draft]), float(q_dV[i, draft])
                reached = step(reached, p / q) if q > 0 else 0.0
                drawn *= q
            total += drawn * reached
    return total


@torch.inference_mode()
def test_many_rows_are_distributed_as_without_a_drafter_and_accept_more_than_one_by_one():
    """1.5 times the number of draws that reveals each of the mistakes below."""
    draws = 15_000
    counts, accepted = np.zeros([V] * 3), 0
    rest = np.random.default_rng(0).random((draws, 2)).tolist()
    for seed in range(draws):
        new = row((), asked(seed=seed))
        accepted += new.accepted
        tokens = tuple(new.tokens)
        for u in rest[seed][: max(0, 3 - len(tokens))]:  # tokens that the row did not yield are drawn without drafts
            tokens += (bisect_right(plain_ladder((1, 4, *tokens)[-2:]), u),)
        counts[tokens[:3]] += 1
    assert deviation(counts, expected(asked(), 3)) < 4
    blocks = chances(lambda reached, ratio: min(reached * ratio, 1.0))
    one_by_one = chances(lambda reached, ratio: reached * min(ratio, 1.0))
    assert accepted / draws == pytest.approx(blocks, abs=4 * K / 2 / math.sqrt(draws))
    assert blocks > one_by_one + 0.02


VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "certain drafts": {"certain": True},
    "certain drafts, penalties": {"certain": True, "frequency_penalty": 0.9, "top_p": 0.9},
    "hot": {"temperature": 1.7},
    "top_p": {"top_p": 0.8},
    "top_k and min_p": {"top_k": 4, "min_p": 0.1, "temperature": 0.7},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.4},
    "bias and banned stop ids": {"logit_bias": ((0, 2.0), (3, -100.0)), "min_tokens": 2, "stop_ids": (5,)},
}


@torch.inference_mode()
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_every_option_keeps_its_distribution(options: dict[str, Any]):
    counts = counted(1_000, 3, **options)
    wanted = {name: value for name, value in options.items() if name != "certain"}
    assert deviation(counts, expected(asked(**wanted), 3)) < 4


def unscaled(p_dV: Tensor, q_dV: Tensor, reached: list[float]) -> Tensor:
    return (p_dV - q_dV).clamp(min=0)


def numbers_by_place(seed: int, stream: int, position: int) -> float:
    """Random numbers of a drafter and a verifier that depend on a token's position, but not on the row in which it is
    drafted.
    """
    return honest_uniform_of(seed, stream % 3, position + stream // 3)


def test_the_chi_square_sees_a_residual_that_forgets_its_prefix(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "residual", unscaled)
    assert deviation(counted(1_000, 3), expected(asked(), 3)) > 30


@torch.inference_mode()
def test_the_chi_square_sees_numbers_that_are_used_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "uniform_of", numbers_by_place)
    monkeypatch.setitem(globals(), "uniform_of", numbers_by_place)
    assert deviation(counted(10_000, 3), expected(asked(), 3)) > 5


def test_the_chi_square_sees_drafts_that_come_from_elsewhere(monkeypatch: pytest.MonkeyPatch):
    honest = drafter_rows
    for before in prefixes(2):
        ladder(before, 1.0)
    monkeypatch.setitem(globals(), "drafter_rows", lambda *of: honest(*of).roll(1, -1))
    assert deviation(counted(1_000, 3), expected(asked(), 3)) > 30


def test_a_drafter_draws_from_the_distribution_that_it_reports():
    for seed in range(200):
        sampling = asked(seed=seed, temperature=0.8)
        drafts = drafted((1, 4), sampling, 9)
        whole = (1, 4, *drafts)
        for index in range(K):
            token, q_V = draft_token(DRAFTER_CCV[whole[index], whole[index + 1]], sampling, 9, index)
            assert token == drafts[index]
            assert q_V is not None
            assert torch.equal(q_V, drafter_rows((1, 4), drafts, 0.8)[index])


@pytest.mark.parametrize("options", [{"seeded": True}, {"temperature": 0.0}, {"top_k": 1}], ids=str)
def test_a_request_that_wants_one_answer_gets_the_likeliest_drafts(options: dict[str, Any]):
    assert draft_token(torch.tensor([0.1, 2.0, 2.0, -torch.inf]), asked(**options), 3, 1) == (1, None)


@pytest.mark.parametrize("logits", [[-torch.inf] * V, [torch.nan] * V, [3e38, -3e38] + [0.0] * (V - 2)], ids=repr)
def test_a_draft_is_a_token_and_a_possible_one_whatever_the_logits_are(logits: list[float]):
    for temperature in (0.01, 1.0):
        token, q_V = draft_token(torch.tensor(logits), asked(temperature=temperature), 3, 1)
        assert 0 <= token < V
        assert q_V is not None
        assert float(q_V[token]) > 0
        assert float(q_V.sum()) == pytest.approx(1)


ONE_ANSWER: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy with penalties": {"temperature": 0.0, "frequency_penalty": 1.1, "repetition_penalty": 1.2},
    "greedy, stop ids banned": {"temperature": 0.0, "min_tokens": 8, "stop_ids": (1, 2)},
    "seeded": {"seeded": True},
    "seeded, cut": {"seeded": True, "top_p": 0.8, "temperature": 1.3},
    "seeded with everything": {
        "seeded": True,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.3,
        "logit_bias": ((3, 1.0),),
        "min_tokens": 5,
        "stop_ids": (0,),
        "min_p": 0.05,
    },
}


@pytest.mark.parametrize("options", ONE_ANSWER.values(), ids=ONE_ANSWER)
def test_the_answer_is_the_one_without_a_drafter_whatever_was_drafted(options: dict[str, Any]):
    longest = 0
    for seed in range(25):
        sampling = asked(seed=seed, **options)
        plain: Tokens = ()
        while len(plain) < 16:
            logits = model_rows((tuple(PROMPT.tolist()) + plain)[-2:], ())[0]
            generated = torch.tensor(plain, dtype=torch.int64)
            plain += (sample_token(logits, sampling, PROMPT, generated, len(PROMPT) + len(plain)),)
        guess = np.random.default_rng(seed)
        tokens: Tokens = ()
        while len(tokens) < 16:
            right = plain[len(tokens) : len(tokens) + guess.integers(K + 1)]
            drafts = (*right, *guess.integers(0, V, K - len(right)).tolist())
            before = (tuple(PROMPT.tolist()) + tokens)[-2:]
            q_dV = drafter_rows(before, drafts, 1.0) if guess.random() < 0.5 else None
            generated = torch.tensor(tokens, dtype=torch.int64)
            rows = model_rows(before, drafts)
            new = verify(rows, drafts, q_dV, sampling, PROMPT, generated, len(PROMPT) + len(tokens))
            assert len(new.tokens) == new.accepted + 1
            assert new.accepted >= min(len(right), len(drafts))
            longest = max(longest, new.accepted)
            tokens += tuple(new.tokens)
        assert tokens[:16] == plain
    assert longest == K


@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("first", range(K + 1))
def test_tokens_end_where_there_is_no_finite_number_to_choose_by(first: int, temperature: float, certain: bool):
    """Logits are not finite from row `first` on: there is no token if it is row 0. The draft at that row is verified
    like any other.
    """
    before = tuple(PROMPT.tolist())
    for seed in range(60):
        sampling = asked(temperature=temperature, seed=seed, presence_penalty=0.1)
        drafts = drafted(before, asked(seed=seed), 2)
        rows = model_rows(before, drafts).clone()
        q_dV = None if certain else drafter_rows(before, drafts, 1.0)
        rows[first:, 0] = torch.inf
        given = verify(rows, drafts, q_dV, sampling, PROMPT, NOTHING, 2)
        assert len(given.tokens) <= first
        assert all(0 <= token < V for token in given.tokens)
        assert given.accepted == max(0, len(given.tokens) - 1)
        if first:
            q_dV = None if q_dV is None else q_dV[:first]
            assert verify(rows[:first], drafts[:first], q_dV, sampling, PROMPT, NOTHING, 2) == given


def test_a_token_behind_which_the_numbers_end_comes_as_often_as_without_drafts():
    before, draws, came = tuple(PROMPT.tolist()), 2000, 0
    p = float(model_rows(before, ())[0].softmax(-1)[0])
    for seed in range(draws):
        drafts = drafted(before, asked(seed=seed), 2)[:1]
        rows = model_rows(before, drafts).clone()
        if drafts == (0,):
            rows[1] = torch.nan
        given = verify(rows, drafts, drafter_rows(before, drafts, 1.0), asked(seed=seed), PROMPT, NOTHING, 2)
        came += given.tokens[0] == 0
    assert abs(came / draws - p) < 3.29 * math.sqrt(p * (1 - p) / draws)


def test_greedy_drafts_hold_up_to_the_first_that_differs():
    assert verify_chosen([4, 7, 7, 1], [4, 7, 7]) == Verified([4, 7, 7, 1], 3)
    assert verify_chosen([4, 7, 7, 1], [4, 8, 7]) == Verified([4, 7], 1)
    assert verify_chosen([4, 7, 7, 1], [5, 7, 7]) == Verified([4], 0)
    assert verify_chosen([4], []) == Verified([4], 0)
    assert verify_chosen([4, 7], [4, 7]) == Verified([4, 7], 1), "no token is chosen after the last row"


@pytest.mark.parametrize("certain", [True, False])
def test_a_draft_that_cannot_be_is_never_accepted(certain: bool):
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 0.5]] * 3)
    q_dV = None if certain else torch.nn.functional.one_hot(torch.tensor([2, 2]), 4).float()
    for seed in range(50):
        new = verify(logits, [2, 2], q_dV, asked(seed=seed), NOTHING, NOTHING, 4)
        assert new.accepted == 0
        assert new.tokens[0] != 2
    cut = verify(logits, [0, 0], None, asked(top_p=0.1), NOTHING, NOTHING, 4)
    assert cut == Verified([1], 0)


def test_a_draft_that_its_own_distribution_has_not_is_no_division_by_zero():
    logits = torch.zeros(2, 4)
    new = verify(logits, [3], torch.tensor([[0.5, 0.5, 0.0, 0.0]]), asked(seed=3), NOTHING, NOTHING, 4)
    assert new.accepted == 0
    # tokens to which the drafter gives too much probability are not in the residual distribution
    assert new.tokens[0] in (2, 3)


def test_where_nothing_is_left_of_a_row_its_token_is_drawn_from_the_whole_of_it():
    """A draft that is rejected although p and q differ only by rounding; here they differ by a half, so that it happens
    often.
    """
    q_dV = torch.tensor([[0.5, 0.25, 0.25, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.25, 0.25, 0.5]], dtype=torch.float64)
    p_NV = torch.cat([q_dV / 2, q_dV[1:]])
    given = [module._block(p_NV, (0, 5), q_dV, seed, 7) for seed in range(400)]
    assert {len(one.tokens) for one in given} == {1, 3}
    for seed, one in enumerate(given):
        assert one.accepted == len(one.tokens) - 1
        assert one.tokens[:-1] == [0, 5][: one.accepted]
        assert one.tokens[-1] == pick(p_NV[one.accepted], uniform_of(seed, 2, 7))


def test_a_perfect_drafter_is_always_accepted():
    for seed in range(200):
        sampling = asked(seed=seed)
        drafts = drafted((1, 4), sampling, 9)
        logits_NV = torch.stack([DRAFTER_CCV[a, b] for a, b in itertools.pairwise((1, 4, *drafts))])
        q_dV = logits_NV[:K].softmax(-1)
        assert verify(logits_NV, drafts, q_dV, sampling, PROMPT, NOTHING, 9).accepted == K


def test_without_drafts_a_row_is_an_ordinary_draw():
    for seed in range(30):
        sampling = asked(seed=seed, top_p=0.9)
        logits = model_rows((2, 3), ())
        new = verify(logits, [], None, sampling, PROMPT, NOTHING, 5)
        assert new == Verified([sample_token(logits[0], sampling, PROMPT, NOTHING, 5)], 0)


def test_the_logits_stay_as_they_were():
    rows = model_rows((1, 4), (0, 1, 3))
    before = rows.clone()
    options = asked(presence_penalty=1.0, logit_bias=((1, 5.0),), top_p=0.5)
    verify(rows, (0, 1, 3), drafter_rows((1, 4), (0, 1, 3), 1.0), options, PROMPT, NOTHING, 2)
    assert torch.equal(rows, before)


def test_one_hot_distributions_give_the_same_as_certain_drafts():
    """With block verification and with independent draws: the mean acceptance is the product of the model's
    probabilities.
    """
    drafts = (1, 3, 0)
    rows = model_rows((1, 4), drafts)
    q_dV = torch.nn.functional.one_hot(torch.tensor(drafts), V).float()
    p = rows[:K].softmax(-1)[range(K), list(drafts)].cumprod(0).sum()
    for q in (None, q_dV):
        total = sum(verify(rows, drafts, q, asked(seed=seed), PROMPT, NOTHING, 6).accepted for seed in range(3000))
        assert total / 3000 == pytest.approx(float(p), abs=4 * K / math.sqrt(3000) / 2)


def test_draw_is_what_a_drafter_uses_too():
    logits = DRAFTER_CCV[0, 1]
    for seed in range(50):
        # the drafter's distribution is not top-p filtered
        token, _ = draft_token(logits, asked(seed=seed, top_p=0.2), 4, 2)
        assert [token] == sample_each(logits[None], [asked()], [uniform_of(seed, 6, 4)])
