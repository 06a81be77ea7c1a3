"""Tokens sampled with speculative decoding are distributed as without drafts: for every kind of draft, with and without
a grammar, and with every option that changes a distribution.

The runner, its slots, its matchers and its drafting are the real ones. The model and the drafter are tables: a token's
logits depend on the token before it. So the exact probability of every answer follows from the same numbers that the
runner draws from, on any processor.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLTokenizer, TokenizerWrapper
from torch import Tensor

from redline.kernels.cpu.blocks.draft_pass import DraftRows
from redline.kernels.cpu.blocks.transformer import TransformerOutput
from redline.kernels.inputs import Inputs
from redline.messages.job import PAGE_TOKENS, Grammar, PageId, Sampling, Thinking
from redline.messages.step import Begin, Row, Step
from redline.model.k2.forward import predicted
from redline.run.drafting.learned import SlotDrafters
from redline.run.fit import Layout
from redline.run.runner import Runner
from redline.run.sampling.on_host import adjusted, kept
from tests.tiny_model import tiny_model

TOKENS = b"a", b"b", b"c", b"d", b"e", b"<end>"
A, B, C, D, E, END = range(6)
V, K = len(TOKENS), 2  # size of the vocabulary, drafts of a row
SLOTS = 64
LENGTH = 3  # tokens of an answer that are counted

# The token that begins the idle grammar is likely in the model, and more likely in the drafter. Among the tokens that
# the active grammar allows, the model prefers B and the drafter A.
_random = torch.Generator().manual_seed(2)
MODEL_CV = torch.tensor([0.0, 0.7, 0.0, 0.0, 1.0, -0.7]) + torch.randn(V, V, generator=_random) / 2
DRAFTER_CV = torch.tensor([0.9, 0.0, 0.0, 0.0, 1.6, -0.7]) + torch.randn(V, V, generator=_random) / 2

# The prompt continues "ab" and any token with that token's own continuation: a suffix match proposes it.
_continued = {A: (E, C), B: (D, E), C: (E, A), D: (END, A), E: (B, D), END: (A, A)}
PROMPT = (*itertools.chain(*((A, B, token, *_continued[token]) for token in range(V))), A, B)

LETTERS = "(a|bd?)+"
GRAMMARS: dict[str, Grammar | None] = {
    "no grammar": None,
    "idle": Grammar(text=f"start: /e{LETTERS}/", after=(E,)),
    "active": Grammar(text=f"start: /{LETTERS}/"),
    "bounded thinking": Grammar(text="", thinking=Thinking(most=2, end=E, ends=(E,))),
    "forced": Grammar(text=f'start: /[ab]/ "de" /{LETTERS}/'),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.25},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.4},
    "bias": {"logit_bias": ((A, 1.0), (E, -1.0))},
    "min_tokens": {"min_tokens": 2, "stop_ids": (C,)},
}
DRAWS = {"drawn": 384, "certain": 64, "suffix": 64}  # draws for each kind of draft


class Table:
    """A model that takes its logits from a table. Everything else is the tiny model's."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(vocab_size=V, num_hidden_layers=1, kv_width=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(tiny_model(), name)

    def predict(self, inputs: Inputs, planes: Tensor, layers: Sequence[int], asked: Sequence[int]) -> TransformerOutput:
        ids = inputs.ids_T[list(asked)]
        return predicted(torch.zeros(inputs.count, 1), torch.zeros(inputs.count, 1), MODEL_CV[ids])


class Guess:
    """A drafter that takes its logits from a table: its state is the last token that it read."""

    config = SimpleNamespace(kv_width=1, tail_width=1, hidden_size=1, layer_ids=(0,))

    @property
    def served(self) -> "Guess":
        return self

    def pages(self, tokens: Tensor, tables: Tensor) -> tuple[()]:
        self._tokens = tokens
        return ()

    def fuse(self, features_TF: Tensor, sources: Sequence[int]) -> Tensor:
        return torch.zeros(len(sources), 1)

    def read(self, feature: Tensor, pages: object, rows: DraftRows, plane: Tensor) -> tuple[Tensor, Tensor]:
        known = self._tokens[list(rows.slots), [position + 1 for position in rows.positions]]
        ids = known if rows.ids is None else torch.tensor(rows.ids)
        state = ids[list(rows.queries)][:, None].float()
        return state, state

    def logits(self, state_R1: Tensor) -> Tensor:
        return DRAFTER_CV[state_R1[:, 0].long()]

    def likeliest(self, state_R1: Tensor) -> Tensor:
        return self.logits(state_R1).argmax(-1)


def tokens() -> LLTokenizer:
    def encode(text: bytes) -> list[int]:
        return [
            TOKENS.index(bytes([byte])) for byte in text if bytes([byte]) in TOKENS
        ]  # the option is tested with another text

    encode.eos_token_id, encode.bos_token_id, encode.tokens = END, None, list(TOKENS)  # type: ignore[attr-defined]
    encode.special_token_ids = [END]  # type: ignore[attr-defined]
    return LLTokenizer(TokenizerWrapper(encode))


def runner(kind: str) -> Runner:
    layout = Layout(SLOTS, PAGE_TOKENS, torch.float32, 4)
    drafter: Any = None if kind == "suffix" else Guess()
    model: Any = Table()
    made = Runner(model, layout, SLOTS, drafter, suffix=kind == "suffix", tokens=tokens)
    made.drafting = SlotDrafters(drafter, made.slots, made.kv, certain=kind == "certain")
    return made


@pytest.fixture(scope="module")
def runners() -> Iterator[dict[str, Runner]]:
    made = {kind: runner(kind) for kind in DRAWS}
    yield made
    for one in made.values():
        one.close()


def asked(seed: int, grammar: str, options: dict[str, Any]) -> Sampling:
    return Sampling(max_tokens=20, temperature=0.9, seed=7919 * seed + 1, grammar=GRAMMARS[grammar], **options)


def stops(options: dict[str, Any]) -> set[int]:
    return {END, *options.get("stop_ids", ())}


def ended(answer: Sequence[int], length: int, options: dict[str, Any]) -> tuple[int, ...]:
    """The first tokens of an answer, padded with END after its end."""
    end = next((place for place, token in enumerate(answer) if token in stops(options)), length)
    return tuple((*answer[: end + 1], *[END] * length)[:length])


@torch.inference_mode()
def counted(made: Runner, kind: str, grammar: str, options: dict[str, Any], length: int) -> np.ndarray:
    """How often each sequence of `length` tokens was the beginning of an answer, [V] * length."""
    counts = np.zeros([V] * length)
    drafting, numbers, proposed = kind != "suffix", itertools.count(1), 0
    for first in range(0, DRAWS[kind], SLOTS):
        begins = [
            Begin(
                slot=slot,
                tokens=PROMPT,
                prompt=len(PROMPT),
                pages=(),
                sampling=asked(first + slot, grammar, options),
                limit=len(PROMPT) + 20,
                drafting=drafting,
            )
            for slot in range(SLOTS)
        ]
        rows = [
            Row(slot=slot, start=0, count=len(PROMPT), propose=K, drafting=drafting, new_pages=(PageId(slot),))
            for slot in range(SLOTS)
        ]
        answers: list[list[int]] = [[] for _ in range(SLOTS)]
        while rows:
            result = made.run(Step(number=next(numbers), begins=tuple(begins), rows=tuple(rows)))
            for row, came in zip(rows, result.rows, strict=True):
                assert came.error is None
                answers[row.slot] += came.tokens
                proposed += came.proposed
            begins = []
            rows = [
                Row(slot=slot, start=None, count=1 + K, drafts=K, propose=K, drafting=drafting)
                for slot, answer in enumerate(answers)
                if len(answer) < length and stops(options).isdisjoint(answer)
            ]
        for answer in answers:
            counts[ended(answer, length, options)] += 1
    assert proposed > DRAWS[kind] // 4
    return counts


def allowed(grammar: str, answer: Sequence[int]) -> set[int]:
    """The tokens that the grammar allows after the given tokens of an answer, computed without llguidance."""
    every = set(range(V))
    if grammar == "no grammar":
        return every
    if grammar == "bounded thinking":
        return every if E in answer or len(answer) < 2 else {E}
    if grammar == "idle":
        if E not in answer:
            return every
        answer = answer[answer.index(E) + 1 :]
    if grammar == "forced" and len(answer) < 3:
        return ({A, B}, {D}, {E})[len(answer)]
    if grammar == "forced":
        answer = answer[3:]
    if not answer:
        return {A, B}
    return {A, B, D, END} if answer[-1] == B else {A, B, END}


@functools.cache
def expected(grammar: str, option: str, length: int) -> np.ndarray:
    """The exact probability of each beginning, from the sampler's own definition of the filtered distribution."""
    options = OPTIONS[option]
    sampling = asked(0, "no grammar", options)
    shares = np.zeros([V] * length)

    def spread(answer: tuple[int, ...], share: float) -> None:
        if len(answer) == length or not stops(options).isdisjoint(answer):
            shares[ended(answer, length, options)] += share
            return
        logits_V = MODEL_CV[(PROMPT + answer)[-1]].clone()
        logits_V[[token not in allowed(grammar, answer) for token in range(V)]] = -torch.inf
        logits_V = adjusted(logits_V, sampling, torch.tensor(PROMPT), torch.tensor(answer, dtype=torch.int64))
        p_V = kept((logits_V / sampling.temperature).softmax(-1)[None], sampling)[0].double()
        for token in range(V):
            if p_V[token] > 0:
                spread((*answer, token), share * float(p_V[token] / p_V.sum()))

    spread((), 1.0)
    assert shares.sum() == pytest.approx(1)
    return shares


def chi_square(counts: np.ndarray, shares: np.ndarray) -> tuple[float, float]:
    """The chi-square statistic over all tokens but the first, which is drawn after the prompt without drafts: cells
    with an expected count of 5 or more, all others pooled; and the value that it exceeds by chance once in a thousand
    times (Wilson and Hilferty's approximation).
    """
    assert not counts[shares == 0].any(), "an answer of probability 0 was drawn"
    counts, wanted = counts.sum(0).flatten(), counts.sum() * shares.sum(0).flatten()
    many = wanted >= 5
    cells, seen = np.append(wanted[many], wanted[~many].sum()), np.append(counts[many], counts[~many].sum())
    if cells[-1] < 5:  # the pool is too small: add it to the smallest of the other cells
        least = cells[:-1].argmin()
        cells[least], seen[least] = cells[least] + cells[-1], seen[least] + seen[-1]
        cells, seen = cells[:-1], seen[:-1]
    freedom = len(cells) - 1
    assert freedom > 0
    limit = freedom * (1 - 2 / (9 * freedom) + 3.0902 * math.sqrt(2 / (9 * freedom))) ** 3
    return float(((seen - cells) ** 2 / cells).sum()), limit


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("grammar", ["no grammar", "idle", "active", "bounded thinking"])
@pytest.mark.parametrize("kind", DRAWS)
def test_answers_are_distributed_as_without_drafts(runners: dict[str, Runner], kind: str, grammar: str, option: str):
    counts = counted(runners[kind], kind, grammar, OPTIONS[option], LENGTH)
    statistic, limit = chi_square(counts, expected(grammar, option, LENGTH))
    assert statistic < limit


@pytest.mark.parametrize("option", OPTIONS)
def test_answers_with_forced_drafts_are_distributed_as_without(runners: dict[str, Runner], option: str):
    """One token is drawn, two forced tokens are drafted, and one is drawn after them."""
    counts = counted(runners["drawn"], "drawn", "forced", OPTIONS[option], 4)
    statistic, limit = chi_square(counts, expected("forced", option, 4))
    assert statistic < limit
