"""Our client and vLLM's own against one server with known delays: do their figures agree?

    python -m redline.bench.runs.two_clients --vllm-python PYTHON [--rounds 3] [--save FILE]

PYTHON has vLLM; only its `vllm bench serve` runs. Both ask the same prompts of the same scripted server, in rounds that
alternate which of them begins. What is compared is the median over rounds of each round's ratio, ours by theirs, so
that what slows a whole round slows both. Every figure here is a time or a rate that vLLM gives under the same key.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.bench.serving.script import MODEL, Play, Script
from redline.bench.serving.scripted import Scripted
from redline.errors import RedlineError

KEYS = (
    *tuple(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in ("mean", "median")),
    "request_throughput",
    "output_throughput",
)
TOKENS, PROMPTS, STREAMS = 64, 32, 4
SCRIPT = Script(first_s=0.1, gaps_s=(0.02,))
LIMIT = 0.02
CLIENT_S = 300
TOKENIZER = Path(__file__).parents[3] / "models" / "kimi-nano"
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_TARGET_DEVICE": "cpu"}


def prompts(folder: Path) -> Path:
    """A file of PROMPTS prompts, as both clients read a custom dataset."""
    path = folder / "prompts.jsonl"
    lines = (json.dumps({"prompt": f"Question {i}: what is {i} times {i + 7}?"}) for i in range(PROMPTS))
    path.write_text("\n".join(lines) + "\n")
    return path


def ask(client: Sequence[str], url: str, dataset: Path, result: Path, more: Sequence[str]) -> dict[str, Any]:
    """Figures of one run. client: the words before `bench serve`; more: flags of this client alone.

    Raises RedlineError where it fails or loses answers.
    """
    command = [
        *(*client, "bench", "serve", "--base-url", url, "--model", MODEL, "--tokenizer", str(TOKENIZER)),
        *("--backend", "openai", "--endpoint", "/v1/completions", "--dataset-name", "custom"),
        *("--dataset-path", str(dataset), "--custom-output-len", str(TOKENS), "--disable-shuffle"),
        *("--num-prompts", str(PROMPTS), "--max-concurrency", str(STREAMS), "--disable-tqdm"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--result-dir", str(result.parent)),
        *("--result-filename", result.name, *more),
    ]
    ran = subprocess.run(command, env=os.environ | OFFLINE, capture_output=True, text=True, timeout=CLIENT_S)
    if ran.returncode or not result.exists():
        raise RedlineError(f"{client[0]} ended with {ran.returncode}: {(ran.stdout + ran.stderr)[-2000:]}")
    figures = json.loads(result.read_text())
    if figures["completed"] != PROMPTS or figures["total_output_tokens"] != PROMPTS * TOKENS:
        got = f"{figures['completed']} answers, {figures['total_output_tokens']} tokens"
        raise RedlineError(f"{client[0]} counted {got}, not {PROMPTS} and {PROMPTS * TOKENS}")
    return {key: figures[key] for key in KEYS}


def compare(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """By key the median over rounds of ours / theirs - 1. Each round has the figures of `ours` and of `theirs`."""
    return {key: statistics.median(one["ours"][key] / one["theirs"][key] - 1 for one in rounds) for key in KEYS}


def measure(vllm_python: Path, count_rounds: int) -> list[dict[str, dict[str, Any]]]:
    """Figures of `ours` and `theirs` of every round. Raises RedlineError where a client fails."""
    ours = [sys.executable, "-m", "redline"]
    theirs = [str(vllm_python), "-m", "vllm.entrypoints.cli.main"]
    plain = {"ours": (), "theirs": ("--skip-chat-template",)}  # theirs puts a template around a custom prompt
    found: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as name, Scripted(Play(in_order=(SCRIPT,))) as server:
        dataset = prompts(Path(name))
        for number in range(count_rounds):
            order = (("ours", ours), ("theirs", theirs))
            pair = order if number % 2 == 0 else order[::-1]
            found.append(
                {
                    who: ask(how, server.url, dataset, Path(name) / f"{who}-{number}.json", plain[who])
                    for who, how in pair
                }
            )
    return found


def main() -> int:
    """Measures, says, saves; 1 where a figure is further apart than LIMIT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--save", type=output)
    arguments = parser.parse_args()
    rounds = measure(arguments.vllm_python, arguments.rounds)
    apart = compare(rounds)
    for key, share in apart.items():
        ours, theirs = (statistics.median(one[who][key] for one in rounds) for who in ("ours", "theirs"))
        print(f"{key:20} ours {ours:10.3f}   vllm {theirs:10.3f}   apart {share:+.3%}")
    if arguments.save:
        setting = {"prompts": PROMPTS, "streams": STREAMS, "tokens": TOKENS, "first_s": SCRIPT.first_s}
        setting["gap_s"] = SCRIPT.gaps_s[0]
        find = "import importlib.metadata as m; print(m.version('vllm'))"
        version = subprocess.run([arguments.vllm_python, "-c", find], capture_output=True, text=True, check=True)
        where = provenance("msgspec", "httptools", "uvloop")
        where["versions"]["vllm"] = version.stdout.strip()
        record = {"provenance": where, "setting": setting, "limit": LIMIT, "apart": apart, "rounds": rounds}
        arguments.save.write_text(json.dumps(record, indent=1) + "\n")
    return int(max(abs(share) for share in apart.values()) > LIMIT)


if __name__ == "__main__":
    program(main)
