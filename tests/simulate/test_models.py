"""The named worker model equals the measured and predicted numbers; a user's own file is read."""

import json
from pathlib import Path

import msgspec
import pytest

from redline.bench.step.machines import machine
from redline.bench.step.predict import PredictedRanks
from redline.errors import ConfigError
from redline.model.k2.shapes import KIMI_K26
from redline.policy.pairs import Work
from redline.policy.steps import StepTimeFit
from redline.simulate.models import KIMI_8_H200, worker_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RANKS, LAYERS = 8, KIMI_K26.num_hidden_layers


def test_a_step_of_answers_takes_what_is_predicted_for_eight_h200s():
    machines = PredictedRanks(KIMI_K26, machine("8 x H200"))
    fit = StepTimeFit(experts_of=KIMI_K26.n_routed_experts, experts_chosen=KIMI_K26.num_experts_per_tok)
    for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
        for context in (1024, 4096, 16384, 32768):
            ms = machines.step(rows, 1, context).ms
            assert KIMI_8_H200.steps.decode_ms(rows, context) == pytest.approx(ms, rel=0.05), (rows, context)
            fit.add(Work(rows=rows, context=rows * context), ms)
    model = fit.model()
    for name in ("base", "experts", "row", "context", "experts_of", "experts_chosen"):
        assert getattr(KIMI_8_H200.steps, name) == pytest.approx(getattr(model, name), rel=0.002), name


def test_a_prompts_tokens_take_what_a_layer_took_on_one():
    long, short = json.loads((RESULTS / "prefill-h200.json").read_text())["cases"]
    tokens = long["tokens"] - short["tokens"]
    parts = {name: (long["parts"][name] - short["parts"][name]) / tokens for name in ("products", "rows", "experts")}
    sums_ms = 2 * LAYERS * KIMI_K26.hidden_size * 2 * 2 * (RANKS - 1) / RANKS / 397e9 * 1e3
    assert KIMI_8_H200.steps.prompt == pytest.approx(sum(parts.values()) * LAYERS / RANKS + sums_ms, rel=0.01)
    pairs = long["tokens"] * (long["tokens"] + 1) / 2
    assert KIMI_8_H200.steps.pair == pytest.approx(long["parts"]["attention"] / pairs * LAYERS / RANKS, rel=0.01)


def test_a_worker_of_ones_own_is_a_file(tmp_path: Path):
    path = tmp_path / "worker.json"
    path.write_bytes(msgspec.json.encode(KIMI_8_H200))
    assert worker_model(str(path)) == KIMI_8_H200 == worker_model("kimi-8xh200")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"name": "x"}', "not a worker model: .*steps"),
        (
            '{"name": "\udcff", "steps": {"base": 1}, "step_tokens": 1, "slots": 1, "kv_tokens": 1}',
            "not a worker model: .*(?i:utf-8)",
        ),
        ('{"name": "x", "steps": {"base": 1, "speed": 2}, "step_tokens": 1, "slots": 1, "kv_tokens": 1}', "speed"),
        ('{"name": "x", "steps": {"base": 0}, "step_tokens": 1, "slots": 1, "kv_tokens": 1}', "`base` more than 0"),
        ('{"name": "x", "steps": {"base": 1}, "step_tokens": 1, "slots": 0, "kv_tokens": 1}', "`slots` is 0"),
        (
            '{"name": "x", "steps": {"base": 1}, "step_tokens": 1, "slots": 1, "kv_tokens": 1, "step_ms": -5}',
            "`step_ms` is -5; give more than 0, or leave it out",
        ),
    ],
)
def test_a_file_that_is_no_worker_is_told_why(tmp_path: Path, text: str, said: str):
    path = tmp_path / "worker.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=said):
        worker_model(str(path))
    with pytest.raises(ConfigError, match="kimi-8xh200"):
        worker_model("nobody")
