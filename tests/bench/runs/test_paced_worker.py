"""What a paced worker's steps are to take, and what it is served from; no worker is started for either."""

from pathlib import Path

import pytest

from redline.bench.runs.paced_worker import LAYERS, step_model, work_of, write
from redline.chat.tokenizer import Tokenizer
from redline.model.k2.config import K2Config
from redline.tune.pairs import Work
from redline.wire.step import Row, Step


def test_a_step_is_counted_by_its_prompts_and_its_answers() -> None:
    answers = tuple(Row(slot=slot, start=None, count=1) for slot in range(3))
    prompts = Row(slot=3, start=64, count=100), Row(slot=4, start=0, count=10)
    work = work_of(Step(number=1, rows=(*answers, *prompts)))
    assert work == Work(prompt=110, pairs=100 * 64 + 100 * 101 / 2 + 55, rows=3, expanded=192 + 64)  # whole pages


def test_a_step_takes_what_it_took_where_it_was_recorded() -> None:
    """There a chunk of 256 took 190 ms and a step of one answer 1.2 ms (`step-times-cpu.json`)."""
    assert step_model().step_ms(Work(prompt=256, pairs=32896.0, expanded=256)) == pytest.approx(190, rel=0.1)
    assert step_model().step_ms(Work(rows=1)) == pytest.approx(1.2, rel=0.1)


def test_what_is_served_is_a_model_of_two_layers_with_a_tokenizer_of_as_many_ids(tmp_path: Path) -> None:
    model, python = write(tmp_path)
    config = K2Config.from_folder(model)
    assert config.num_hidden_layers == LAYERS
    assert Tokenizer.open(model).vocab_size == config.vocab_size
    assert "paced_worker" in python.read_text()
    assert python.stat().st_mode & 0o777 == 0o700
