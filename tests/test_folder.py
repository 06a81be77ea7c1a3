"""A folder is named as what it is, from config.json and the first bytes of its files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from redline.errors import CheckpointError
from redline.folder import check_drafter, check_model
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[1]
NANO, DRAFTER = ROOT / "models" / "kimi-nano", ROOT / "models" / "kimi-nano-eagle3"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n"
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
K2 = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}


def test_nano_is_a_model_and_its_drafter_a_drafter():
    check_model(NANO)
    check_drafter(DRAFTER)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "config.json: missing: the folder is empty; expected a model's folder"),
        ({"notes.txt": "x"}, "missing: the folder has notes.txt; expected"),
        ({"a.gguf": "GGUF"}, "GGUF files, which llama.cpp reads"),
        ({"inner/config.json": json.dumps(K2)}, "the model may be in .*/inner"),
        (
            {"config.json": json.dumps(LLAMA)},
            r"model_type is llama \(LlamaForCausalLM\); Redline serves",
        ),
        ({"config.json": "{}"}, r"model_type is not given \(without architectures\)"),
        ({"config.json": "[1]"}, "expected one JSON object"),
        (
            {"config.json": POINTER},
            "config.json: a Git LFS pointer of [0-9]+ bytes, and not the file: run `git lfs pull`",
        ),
        ({"config.json": "<!DOCTYPE html>"}, "config.json: a web page, and not the file"),
        ({"config.json": json.dumps(K2)}, "config.json alone: no "),
        ({"config.json": json.dumps(K2), "a.safetensors": POINTER}, "a.safetensors: a Git LFS pointer"),
        ({"config.json": json.dumps(K2), "a.safetensors": ""}, "a.safetensors: empty"),
        ({"config.json": json.dumps(K2), "a.safetensors": "x", "tiktoken.model": POINTER}, "tiktoken.model: a Git LFS"),
    ],
)
def test_what_is_no_model_is_named(files: dict[str, str], says: str, tmp_path: Path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=says) as refused:
        check_model(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_drafter_is_no_model_and_a_model_is_no_drafter(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"a drafter \(Eagle3DeepseekV2ForCausalLM\), not a model"):
        check_model(DRAFTER)
    with pytest.raises(CheckpointError, match=r"a model \(KimiK25ForConditionalGeneration\), not a drafter"):
        check_drafter(NANO)
    with pytest.raises(CheckpointError, match="no such folder; expected a drafter's folder"):
        check_drafter(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="a file; expected a model's folder"):
        check_model(NANO / "config.json")


def test_config_alone_is_enough_where_no_weights_are_read(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(K2))
    check_model(tmp_path, weights=False)


VERBS = (
    "serve {}", "config {}", "eval {}", "doctor {}", "bench decode {}", "bench speculate {} --draft d",
    "quantize {} out", "audit {} NANO", "draft synth {} --out o", "draft capture {} --corpus c --out o",
    "draft train {} --out o",
    "draft mine {} --draft d --corpus c --out o", "draft eval {} --draft d", "draft export {} --draft d --out o",
    "serve NANO --port 0 --draft {}", "bench speculate NANO --draft {}", "draft eval NANO --draft {}",
    "draft synth NANO --out o --draft {}",
)  # fmt: skip


def test_every_verb_names_it_before_torch_is_imported(tmp_path: Path):
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    lines = [
        verb.format("llama").replace("NANO", str(NANO)).replace("--draft d", f"--draft {DRAFTER}") for verb in VERBS
    ]
    program = (
        "import json, sys\nfrom redline.cli import app\nfrom redline.errors import CheckpointError, ConfigError\n"
        "said = {}\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        app(line.split(), standalone_mode=False)\n"
        "    except ConfigError as error:\n"
        "        said[line] = str(error)\n"
        "print(json.dumps([said, 'torch' in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(lines)],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    said, torch = json.loads(done.stdout.splitlines()[-1])
    assert {line: said.get(line) for line in lines if "LlamaForCausalLM" not in said.get(line, "")} == {}
    assert not torch
