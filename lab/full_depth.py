"""A model at its full depth over HTTP, without its files: 32 streams of 8,192 tokens in and 2,048 out, the load of
Lambda's benchmark.

    python -m lab.full_depth [--shape kimi-k2.6] [--ranks 1 2] [--streams 1 8 32] [--input 8192]
        [--output 2048] [--in-memory N] [--step-ms MS] [--device cuda] [--save FILE] [--picture PNG]

Serves random weights (`engine.random_weights`) of the shape's own config and a tokenizer with its vocabulary size, with
each number of ranks and streams, under the load of `redline bench serve`. All layers run; those that fit in memory
together with the pages of all streams are stored, and the others reuse them. On a GPU each token's experts are drawn,
not routed. Every stream has one request, so all prompts arrive at once: the time to first token is mostly that of
waiting for the other prompts.

Each figure is compared with its floor, from the machine's rates measured in this run: for a step of all streams in the
middle of their answers, for the prefill of all prompts, and for the output tokens/s that follow from the two.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lab.program import count, output, program
from lab.trees import ROOT, Server, Tree, commit_of
from redline import clock
from redline.bench.machine import measure
from redline.bench.record import provenance
from redline.bench.step.depth import DepthCase
from redline.bench.step.predict import distinct_experts
from redline.errors import ConfigError, RedlineError
from redline.messages.job import PAGE_TOKENS
from redline.model.k2.config import K2Config
from redline.model.k2.random_weights import dense_layers
from redline.model.k2.shapes import shape
from redline.model.k2.write import k25_config
from redline.ops.op import PeakRates
from redline.run.fit import fit
from redline.worker.config import EngineConfig
from redline.worker.engine import free_memory, pick_device, sizes_of
from tests.tiny_tokenizer import RESERVED, words, write_tiny_tokenizer

STEP_TOKENS = 8192  # on a GPU, as by default if memory is not short: layers must leave room for them
LOAD_S = 560.0  # timeout of the whole load
SPARE_TOKENS = 64  # of a stream, in addition to its prompt and answer
USED = 0.92  # share of free memory used: a weight is held twice while it is laid out
LATENCIES = [f"{kind}_{what}_ms" for what in ("ttft", "tpot", "itl") for kind in ("mean", "median", "p99")]
KEPT = ["completed", "failed", "duration", "total_input_tokens", "total_output_tokens", "output_throughput", *LATENCIES]
WARM = 2, 8  # prompts, and tokens of their answers, before the measurement: kernels are compiled in their steps
SETTLE_S = 5.0  # in which shapes not captured at start are captured


def write_folder(config: K2Config, folder: Path) -> None:
    """config.json, and a tokenizer with an id for every entry of the vocabulary. Raises ValueError if that is too
    large.
    """
    write_tiny_tokenizer(folder, words(config.vocab_size - 256 - RESERVED))
    (folder / "config.json").write_text(json.dumps(k25_config(config)))


def layers_that_fit(config: K2Config, engine: EngineConfig, device: torch.device) -> int:
    """The number of layers that fit in memory with the pages. Raises ConfigError if not even one with experts does."""
    free, first = round(USED * free_memory(device)), dense_layers(config) + 1
    for layers in range(config.num_hidden_layers, 0, -1):
        sizes = sizes_of(config, replaced(engine, layers), device, torch.bfloat16, free)
        try:
            fit(sizes, free, engine.kv_memory, engine.max_model_len)
        except ConfigError:
            if layers <= first:
                raise
        else:
            return layers
    raise AssertionError("a model has layers")


def replaced(engine: EngineConfig, layers: int) -> EngineConfig:
    """The engine config with `layers` layers in memory."""
    return EngineConfig(
        kv_memory=engine.kv_memory,
        max_model_len=engine.max_model_len,
        max_running=engine.max_running,
        device=engine.device,
        ranks=engine.ranks,
        step_ms=engine.step_ms,
        step_tokens=engine.step_tokens,
        random_weights=layers,
    )


def flags(engine: EngineConfig) -> list[str]:
    """The flags of `redline serve`."""
    said = {
        "kv-memory": engine.kv_memory,
        "max-model-len": engine.max_model_len,
        "max-running": engine.max_running,
        "device": engine.device,
        "ranks": engine.ranks,
        "set": f"engine.random_weights={engine.random_weights}",
    }
    bounds = {"step_ms": engine.step_ms, "step_tokens": engine.step_tokens}
    bound = [word for key, value in bounds.items() if value for word in ("--set", f"engine.{key}={value}")]
    return [word for flag, value in said.items() for word in (f"--{flag}", str(value))] + bound


def load(folder: Path, port: int, streams: int, prompt: int, answer: int, place: Path, seed: int) -> dict[str, Any]:
    """The measurement of `redline bench serve` with one request of each stream. Raises RedlineError if it fails."""
    command = [sys.executable, "-m", "redline", "bench", "serve", "--base-url", f"http://127.0.0.1:{port}"]
    command += ["--tokenizer", str(folder), "--dataset-name", "random", "--ignore-eos", "--temperature", "0"]
    command += ["--random-input-len", str(prompt), "--random-output-len", str(answer)]
    command += [
        "--seed",
        str(seed),
        "--num-prompts",
        str(streams),
        "--max-concurrency",
        str(streams),
        "--max-seconds",
        str(LOAD_S),
    ]
    command += ["--save-result", "--result-dir", str(place), "--result-filename", "load.json", "--disable-tqdm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_S + 60)
    if done.returncode:
        raise RedlineError(f"redline bench serve has failed: {(done.stderr or done.stdout).strip()[-2000:]}")
    return json.loads((place / "load.json").read_text())


def floors(case: DepthCase, prompt: int, answer: int, machine: PeakRates) -> dict[str, float]:
    """Floors, from bytes and operations of one rank and the machine's measured rates."""
    c, moe = case.config, case.config.num_hidden_layers - case.dense
    step_s = case.cost(moe * distinct_experts(c, case.rows)).seconds(machine)
    whole = DepthCase(
        shape=case.shape,
        config=c,
        physical=case.physical,
        rows=1,
        tokens=prompt,
        context=0,
        kv_dtype=case.kv_dtype,
        overlap=case.overlap,
        ranks=case.ranks,
    )
    prompts_s = case.rows * whole.cost(moe * distinct_experts(c, prompt)).seconds(machine)
    return {
        "tpot_ms": round(1e3 * step_s, 3),
        "all_prompts_s": round(prompts_s, 3),
        "output_throughput": round(case.rows * answer / (prompts_s + answer * step_s), 1),
    }


def picture(record: dict[str, Any], path: Path) -> None:
    """Draws output tokens/s per GPU over those of one stream: measured and floor, a line for each number of GPUs."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2))
    for place, ranks in enumerate(sorted({run["ranks"] for run in record["runs"]})):
        runs = [run for run in record["runs"] if run["ranks"] == ranks]
        name, color = ("one GPU" if ranks == 1 else f"{ranks} GPUs"), f"C{place}"
        for line, label, marker, values in (
            ("-", "measured", "o", [(1e3 / run["median_tpot_ms"], run["output_throughput"]) for run in runs]),
            (":", "floor", "", [(1e3 / run["floor"]["tpot_ms"], run["floor"]["output_throughput"]) for run in runs]),
        ):
            each, whole = [x for x, _ in values], [y / ranks for _, y in values]
            axes.plot(each, whole, line, marker=marker, color=color, label=f"{name}, {label}")
        for run in runs:
            at = 1e3 / run["median_tpot_ms"], run["output_throughput"] / ranks
            axes.annotate(f"{run['streams']}", at, textcoords="offset points", xytext=(6, 6))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens/s of a stream, median")
    axes.set_ylabel("output tokens/s per GPU, prompts included")
    of = f"{record['input']:,} tokens in, {record['output']:,} out"
    axes.set_title(f"{record['shape']}, {record['gpu']}, {of}; numbers are streams", fontsize=9)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def measured(
    given: argparse.Namespace, config: K2Config, ranks: int, streams: int, folder: Path, machine: PeakRates
) -> dict[str, Any]:
    """The figures for these ranks and streams. Raises ConfigError if there is no room, RedlineError if a load fails."""
    device = pick_device(given.device)
    longest = given.input + given.output + SPARE_TOKENS
    pages = streams * -(-longest // PAGE_TOKENS) + 1
    engine = EngineConfig(
        kv_memory=pages * PAGE_TOKENS * config.kv_bytes_per_token(torch.bfloat16),
        max_model_len=longest,
        max_running=streams,
        device=device.type,
        ranks=ranks,
        step_ms=given.step_ms,
        step_tokens=STEP_TOKENS if device.type == "cuda" else None,
    )
    engine = replaced(engine, given.in_memory or layers_that_fit(config, engine, device))
    assert engine.random_weights is not None, "random_weights is not set"
    case = DepthCase(
        shape=given.shape,
        config=config,
        physical=engine.random_weights,
        rows=streams,
        tokens=1,
        context=given.input + given.output // 2,
        kv_dtype=torch.bfloat16,
        overlap=0.0 if device.type == "cuda" else None,
        ranks=ranks,
    )
    with tempfile.TemporaryDirectory(prefix="redline-depth-") as name:
        place, began = Path(name), clock.monotonic()
        server = Server(Tree(".", ROOT, commit_of(ROOT)), [str(folder), *flags(engine)], place)
        try:
            port = server.until_ready()
            start_s = clock.monotonic() - began
            load(folder, port, WARM[0], given.input, min(WARM[1], given.output), place, seed=1)
            if device.type == "cuda":
                clock.sleep(SETTLE_S)
            found = load(folder, port, streams, given.input, given.output, place, seed=2)
            end = server.stop()
        finally:
            server.close()
    return {
        "ranks": ranks,
        "streams": streams,
        "layers": config.num_hidden_layers,
        "layers_in_memory": engine.random_weights,
        "pages": pages,
        "step_ms": engine.step_ms,
        "start_s": round(start_s, 1),
        **{key: round(found[key], 3) for key in KEPT if key in found},
        "floor": floors(case, given.input, given.output, machine),
        "tracebacks": end.tracebacks,
        "ended": end.code,
    }


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="kimi-k2.6", help="a model's sizes by name, as for `redline bench decode`")
    parser.add_argument("--ranks", type=count, nargs="+", default=[1])
    parser.add_argument("--streams", type=count, nargs="+", default=[32], help="requests, all at once")
    parser.add_argument("--input", type=count, default=8192, help="tokens of a prompt")
    parser.add_argument("--output", type=count, default=2048, help="tokens of an answer")
    parser.add_argument("--in-memory", type=count, default=None, help="layers (default: all that fit)")
    parser.add_argument("--step-ms", type=float, default=None, help="time limit of mixed steps (default: none)")
    parser.add_argument("--device", default=None, help="cpu or cuda (default: the GPU, if there is one)")
    parser.add_argument("--save", type=output, default=None)
    parser.add_argument("--picture", type=output, default=None, help="tokens/s per GPU over those of a stream, as PNG")
    return parser


def main(said: Sequence[str] | None = None) -> None:
    """Runs the program with `said` instead of the command line's words.

    Raises RedlineError if a server does not start, or its load fails.
    """
    given = arguments().parse_args(said)
    config, device = shape(given.shape), pick_device(given.device)
    limits = measure(device, 4 << 30) if device.type == "cuda" else measure(device)
    record: dict[str, Any] = {
        **provenance("torch", "triton"),
        "gpu": limits.name,
        "shape": given.shape,
        "input": given.input,
        "output": given.output,
        "bytes_per_s": limits.bytes_per_s,
        "flops_per_s": limits.flops_per_s,
        "runs": [],
    }
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory(prefix="redline-shape-") as name:
        write_folder(config, Path(name))
        for ranks, streams in itertools.product(given.ranks, given.streams):
            record["runs"].append(measured(given, config, ranks, streams, Path(name), limits))
            print(json.dumps(record["runs"][-1], indent=1), flush=True)
            if given.save:
                given.save.write_text(json.dumps(record, indent=1) + "\n")
    if given.picture:
        picture(record, given.picture)


if __name__ == "__main__":
    program(main)
