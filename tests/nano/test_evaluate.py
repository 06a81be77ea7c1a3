"""Errors of a run's own evaluation."""

from pathlib import Path
from typing import Any, cast

import pytest

from nano.data import Encoder
from nano.evaluate import held_out_loss
from nano.sample import Sample
from redline.chat.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[2] / "models/kimi-nano"


def test_a_kind_of_which_every_sample_is_too_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano.evaluate.LONG_ROW", 64)

    def sample(words: int) -> Sample:
        return Sample("chat", [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes " * words}])

    samples = [("short", sample(3)), ("long", sample(100)), ("long", sample(200))]
    with pytest.raises(ValueError, match=r"^long: every sample has more than 64 tokens"):
        held_out_loss(cast("Any", None), Encoder(Tokenizer.open(FOLDER)), samples)
