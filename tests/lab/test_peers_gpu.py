"""vLLM's figures, extrapolated to 61 layers: a script stands in for the peer's process."""

import json
import sys
from pathlib import Path

import pytest

from lab import peers_gpu
from redline.errors import ConfigError

PLAYED = """
import json, sys
task = json.loads(sys.argv[2])
print("INFO a line of the library")
print(json.dumps({"vllm": "0.33.0", "gpu": "NVIDIA H200"}))
for rows in task["rows"]:
    if task["eager"]:
        print(json.dumps({"rows": rows, "experts": 7.5 * rows}))
    else:
        print(json.dumps({"rows": rows, "ms": 0.5 + rows + 0.1 * task["config"]["num_hidden_layers"] + task["drafts"]}))
if task["prompt"]:
    print(json.dumps({"prompt": task["prompt"], "ms": 7 + 18.1 * task["layers"]}))
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A fake Python interpreter with vLLM."""
    (tmp_path / "played.py").write_text(PLAYED)
    played = tmp_path / "python"
    played.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/played.py "$@"\n')
    played.chmod(0o755)
    return str(played)


def test_steps_rounds_and_prompts_are_carried_to_61_layers(
    python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "peer.json"
    peers_gpu.main(["--python", python, "--rows", "1", "32", "--rounds", "8", "--save", str(file)])
    kept = json.loads(file.read_text())
    assert [(one["rows"], round(one["ms"], 6)) for one in kept["decode"]] == [(1, 7.6), (32, 38.6)]
    assert kept["prompt_layer_ms"] == pytest.approx(18.1)
    assert [one["experts"] for one in kept["experts"]] == [60, 480]
    assert kept["rounds"][0]["ms"] == pytest.approx(0.5 + 8 + 6.1 + 3)
    assert (kept["vllm"], kept["gpu"], kept["layers"]) == ("0.33.0", "NVIDIA H200", [5, 9])
    said = capsys.readouterr().out
    stored = peers_gpu.ours("NVIDIA H200", 1)[32]
    assert f"{stored.ms:.2f}" in said
    assert f"{38.6 / stored.ms:.2f}" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--python", "/nowhere/python"], "--python is /nowhere/python, which cannot be run: No such file"),
        (["--python", sys.executable, "--layers", "9", "5"], "the second has to be more"),
        (["--python", sys.executable], r"the peer's process ended with code 1: .*(vllm|torch)"),
    ],
)
def test_what_cannot_be_measured_is_named(words: list[str], says: str):
    with pytest.raises(ConfigError, match=says):
        peers_gpu.main([*words, "--rows", "1"])


def test_the_config_has_kimis_sizes():
    config = peers_gpu.config(9)
    assert (config["num_hidden_layers"], config["n_routed_experts"], config["num_experts_per_tok"]) == (9, 384, 8)
    assert (config["hidden_size"], config["kv_lora_rank"], config["moe_intermediate_size"]) == (7168, 512, 2048)
    assert config["eos_token_id"] == 163586
