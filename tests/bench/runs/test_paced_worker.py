"""What a paced worker's steps are to take, and what it is served from; no worker is started for either."""

from pathlib import Path

import pytest

from redline.bench.runs.paced_worker import AS_A_GPU, LAYERS, ON_AN_H100, step_model, work_of, write
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


def test_as_a_gpu_a_prompt_of_an_eighth_takes_what_8192_tokens_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """84 ms to its first token were measured, and 4.5 for a step of 12 answers (2026-11-27, a lead)."""
    monkeypatch.setenv(AS_A_GPU, "1")
    assert step_model().prompt_ms(0, 1024, 1024) == pytest.approx(84, rel=0.15)
    assert step_model().decode_ms(12, 300) == pytest.approx(4.5, rel=0.2)
    config = K2Config.from_folder(write(tmp_path, as_a_gpu=True)[0])
    assert (config.n_routed_experts, config.num_experts_per_tok) == (ON_AN_H100.experts_of, ON_AN_H100.experts_chosen)
