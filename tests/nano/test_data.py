"""From samples to rows: the tokens equal those of inference, and the loss covers what the model generates."""

import random
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from nano.data import (
    ANSWER,
    DOCUMENTS_PER_ROW,
    LONG_MIXTURE,
    LONG_ROW,
    LOSS_SHIFT,
    MIXTURE,
    NO_LOSS,
    PROMPT,
    ROW,
    START_SHIFT,
    Encoder,
    Mixture,
    Packer,
    Pool,
    Tokens,
    conversation,
    evaluation,
    rows,
)
from nano.evaluate import unpack
from nano.sample import Document, Sample
from redline.chat.conversation import Conversation
from redline.chat.template import encode
from redline.chat.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[2] / "models/kimi-nano"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(FOLDER)


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> Encoder:
    return Encoder(tokenizer)


def ids(tokens: Tokens) -> list[int]:
    return (tokens & ((1 << LOSS_SHIFT) - 1)).tolist()


def text_with(tokenizer: Tokenizer, tokens: Tokens, loss: int) -> str:
    """The text of the tokens with this loss."""
    chosen = tokens[(tokens >> LOSS_SHIFT & 3) == loss]
    return b"".join(tokenizer.token_bytes(token) for token in ids(chosen)).decode()


def call(name: str, index: int, arguments: str) -> dict[str, object]:
    return {"id": f"functions.{name}:{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TOOL_LOOP = Sample(
    "tools",
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi.", "reasoning_content": "A greeting."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "I ask.", "tool_calls": [call("weather", 0, "{}")]},
        {"role": "tool", "tool_call_id": "functions.weather:0", "content": "sun"},
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "It says sun."},
    ],
    [WEATHER],
)


def test_loss_falls_on_every_turn_and_on_reasoning_that_the_prompt_would_keep(
    tokenizer: Tokenizer, encoder: Encoder
) -> None:
    tokens = encoder.sample(TOOL_LOOP)
    call_text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    answers = f"Hi.<|im_end|>I ask.</think>{call_text}<|im_end|>It says sun.</think>Sunny.<|im_end|>"
    assert text_with(tokenizer, tokens, ANSWER) == answers
    assert "A greeting." not in text_with(tokenizer, tokens, PROMPT)


def test_an_instant_sample_learns_the_answer_alone(tokenizer: Tokenizer, encoder: Encoder) -> None:
    sample = Sample("x", [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}], thinking=False)
    tokens = encoder.sample(sample)
    assert text_with(tokenizer, tokens, ANSWER) == "Ho<|im_end|>"
    assert text_with(tokenizer, tokens, NO_LOSS).endswith("<think></think>")


def test_a_thinking_sample_without_reasoning_learns_to_end_the_thought(tokenizer: Tokenizer, encoder: Encoder) -> None:
    sample = Sample("x", [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}])
    assert text_with(tokenizer, encoder.sample(sample), ANSWER) == "</think>Ho<|im_end|>"


@pytest.mark.parametrize("thinking", [True, False])
def test_a_sample_begins_with_the_prompt_of_inference(tokenizer: Tokenizer, encoder: Encoder, thinking: bool) -> None:
    """`encode` gets the messages as a client sends them, with the reasoning of all turns, and drops the same parts."""
    sample = Sample("tools", TOOL_LOOP.messages, TOOL_LOOP.tools, thinking)
    sent = conversation(Sample("tools", sample.messages, sample.tools, thinking=True))
    every_thought = tuple(
        message
        if message.role != "assistant"
        else type(message)(
            role="assistant",
            content=message.content,
            reasoning=str(given.get("reasoning_content")),
            tool_calls=message.tool_calls,
        )
        for message, given in zip(sent.messages, sample.messages, strict=True)
    )
    prompt = encode(Conversation(messages=every_thought[:-1], tools=sent.tools, thinking=thinking), tokenizer)
    assert encoder.prompt(sample) == prompt
    assert ids(encoder.sample(sample))[: len(prompt)] == prompt


def test_every_kind_is_encoded_as_inference_would(encoder: Encoder) -> None:
    for kind, sample in evaluation("families", 1, seed=3):
        prompt = encoder.prompt(sample)
        tokens = encoder.sample(sample)
        assert ids(tokens)[: len(prompt)] == prompt, kind
        losses = (tokens >> LOSS_SHIFT & 3).tolist()
        assert set(losses[len(prompt) :]) == {ANSWER}, kind
        assert len(tokens) <= LONG_ROW


def document(length: int, value: int) -> Tokens:
    tokens = np.full(length, value | ANSWER << LOSS_SHIFT, np.uint16)
    tokens[0] = value | 1 << START_SHIFT
    return tokens


def test_packing_loses_nothing_and_fills_rows() -> None:
    rng = random.Random(0)
    packer = Packer(ROW, pad=4_095)
    added: Counter[int] = Counter()
    packed: list[Tokens] = []
    for number in range(1_500):
        tokens = document(min(ROW, int(rng.expovariate(1 / 150)) + 30), number)
        added[number] = len(tokens)
        if (row := packer.add(tokens)) is not None:
            packed.append(row)
    filled = np.mean([(row >> LOSS_SHIFT & 3 != NO_LOSS).mean() for row in packed])
    assert filled > 0.95
    packed += packer.close()
    found = Counter(np.concatenate([np.array(ids(row)) for row in packed]).tolist())
    del found[4_095]
    assert found == added
    for row in packed:
        assert len(row) == ROW
        assert row[0] >> START_SHIFT == 1
        assert (row >> START_SHIFT).sum() <= DOCUMENTS_PER_ROW


def test_many_small_documents_never_exceed_what_the_attention_kernel_is_told() -> None:
    packer = Packer(ROW, pad=4_095)
    packed = [row for number in range(2_000) if (row := packer.add(document(8, number % 4_000))) is not None]
    assert packed
    assert max((row >> START_SHIFT).sum() for row in packed) <= DOCUMENTS_PER_ROW


def test_targets_are_the_next_tokens_and_no_loss_crosses_documents() -> None:
    import torch

    row = np.concatenate([document(3, 7), document(5, 9)])
    batch = unpack(torch.from_numpy(row.astype(np.int32)[None]))
    assert batch.tokens.tolist() == [7] * 3 + [9] * 5
    assert batch.targets.tolist() == [7] * 2 + [9] * 5 + [7]
    assert batch.loss.tolist() == [ANSWER, ANSWER, NO_LOSS] + [ANSWER] * 4 + [NO_LOSS]
    assert batch.starts.tolist() == [True, False, False] + [True] + [False] * 4


@pytest.mark.parametrize("row", [ROW, LONG_ROW])
def test_the_same_seed_gives_the_same_rows_and_shares_follow_the_table(tokenizer: Tokenizer, row: int) -> None:
    first, second = (list(islice(rows(tokenizer, "a", row), 2)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    mixture, encoder = Mixture("b", row), Encoder(tokenizer)
    for _ in range(400):
        module, drawn = mixture.draw()
        tokens = encoder.document(drawn) if isinstance(drawn, Document) else encoder.sample(drawn)
        mixture.spent(module, len(tokens))
    for module, share in (MIXTURE if row == ROW else LONG_MIXTURE).items():
        assert mixture.shares[module] == pytest.approx(share, abs=0.05)


def test_shares_add_up() -> None:
    assert sum(MIXTURE.values()) == pytest.approx(1)
    assert sum(LONG_MIXTURE.values()) == pytest.approx(1)


def test_a_pool_gives_rows_of_both_lengths_and_repeats_rather_than_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano.data.PATIENCE_S", 0.0)  # otherwise it reads on as long as the workers make more
    pool = Pool(FOLDER, seed=0, workers=2)
    try:
        assert pool.take(2, ROW).shape == (2, ROW)
        assert pool.take(1, LONG_ROW).shape == (1, LONG_ROW)
        # Far more than one worker can have made by now.
        assert pool.take(20_000, ROW).shape == (20_000, ROW)
        assert pool.repeated > 0
    finally:
        pool.close()
