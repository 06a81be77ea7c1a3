"""The peer's loop over a library that records its batches; llama.cpp itself is not installed."""

import ctypes
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from lab.peers.peer_llama_cpp import Context, Way

VOCABULARY = 50
WAY = Way("q4_0", "flash", 2)


class Fed(NamedTuple):
    """One token of a batch."""

    token: int
    position: int
    row: int
    wanted: bool


class Library:
    """Generates (t + p) mod 50 after token t at position p. Records the tokens of every call."""

    def __init__(self) -> None:
        self.calls: list[list[Fed]] = []
        self.values = SimpleNamespace()
        self._logits = np.zeros((0, VOCABULARY), np.float32)

    def llama_context_default_params(self) -> SimpleNamespace:
        return self.values

    def llama_model_get_vocab(self, model: str) -> str:
        return model

    def llama_vocab_n_tokens(self, vocabulary: str) -> int:
        return VOCABULARY

    def llama_init_from_model(self, model: str, values: SimpleNamespace) -> str:
        return "context"

    def llama_get_memory(self, context: str) -> str:
        return "memory"

    def llama_memory_clear(self, memory: str, data: bool) -> None:
        """There is no memory to clear."""

    def llama_batch_init(self, tokens: int, _: int, rows: int) -> Any:
        return SimpleNamespace(
            n_tokens=0,
            token=[0] * tokens,
            pos=[0] * tokens,
            n_seq_id=[0] * tokens,
            seq_id=[[0] * rows for _ in range(tokens)],
            logits=[0] * tokens,
        )

    def llama_decode(self, context: str, batch: Any) -> int:
        fed = [
            Fed(batch.token[i], batch.pos[i], batch.seq_id[i][0], bool(batch.logits[i])) for i in range(batch.n_tokens)
        ]
        assert all(batch.n_seq_id[i] == 1 for i in range(batch.n_tokens))
        self.calls.append(fed)
        wanted = [one for one in fed if one.wanted]
        self._logits = np.zeros((len(wanted), VOCABULARY), np.float32)
        for i, one in enumerate(wanted):
            self._logits[i, (one.token + one.position) % VOCABULARY] = 1
        return 0

    def llama_get_logits(self, context: str) -> Any:
        return self._logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


def test_every_row_is_fed_its_own_answer_at_the_next_position():
    library = Library()
    prompts = [[1, 2, 3], [7, 8, 9]]
    times = Context(library, "model", WAY, 2, 3, 256).run(prompts, 4)
    assert set(times) == {"first_s", "rest_s"}
    prefill, *steps = library.calls
    assert [one.token for one in prefill] == [1, 2, 3, 7, 8, 9]
    assert [one.position for one in prefill] == [0, 1, 2, 0, 1, 2]
    assert [one.row for one in prefill] == [0, 0, 0, 1, 1, 1]
    assert [one.wanted for one in prefill] == [False, False, True] * 2
    expected = [3, 9]
    for position, step in enumerate(steps, 3):
        expected = [(token + position - 1) % VOCABULARY for token in expected]
        assert step == [(token, position, row, True) for row, token in enumerate(expected)]
    assert len(steps) == 3, "the last of 4 tokens is not fed"


def test_logits_are_given_for_every_token_and_outlive_the_next_call():
    library = Library()
    context = Context(library, "model", WAY, 1, 4, 256)
    first = context.logits([5, 6, 7, 8])
    context.logits([0, 0, 0, 0])
    assert first.argmax(-1).tolist() == [5, 7, 9, 11]


@pytest.mark.parametrize("attention", ["flash", "plain"])
def test_the_way_reaches_the_library(attention: str):
    library = Library()
    Context(library, "model", Way("q4_0", attention, 2), 16, 200, 256)
    values = library.values
    assert values.flash_attn_type == (attention == "flash")
    assert values.n_threads == values.n_threads_batch == 2
    assert values.n_seq_max == 16
    assert values.n_ctx == 16 * 256
    assert values.n_batch == 16 * 200, "a whole prefill is one call"
