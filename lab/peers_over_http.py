"""Servers compared over HTTP, on two cores: Redline, with and without a drafter, vLLM's CPU build, llama.cpp.

    python -m lab.peers_over_http [models/kimi-nano] [--vllm-python PYTHON] [--llama-server FILE]
                                                 [--rounds 5] [--save FILE]

PYTHON has vLLM for CPUs, FILE is llama.cpp's `llama-server`; a peer without its flag is left out. Ours serves the
checkpoint as shipped. vLLM has it in bf16 (peers/to_bf16.py), as it reads our INT4 experts on GPUs only; llama.cpp has
a GGUF of 4 bits (peers/to_gguf.py), its fastest format.

One server runs at a time. In every round each is started, warmed up, and gets the same requests from our client: random
prompts and the evaluation sets' prompts, as token ids, so that templates and tokenizers do not matter; greedy, and
every answer has its full length. Each round begins with another server than the previous one. Prompts are new in every
round, and nothing is cached at its start. The result is the median over rounds of a round's ratio to ours without a
drafter: a disturbance that slows a whole round slows all servers.
"""

import argparse
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from lab.peers import to_bf16, to_gguf
from lab.program import count, output, program
from lab.trees import END_S, START_S, free_port, is_healthy
from redline import clock
from redline.bench.record import provenance
from redline.bench.serving.load import run_load
from redline.bench.serving.metrics import failure_of, figures
from redline.bench.serving.records import LoadRequest, LoadRun, TimedAnswer
from redline.bench.serving.target import LoadPace, ServerTarget
from redline.bench.speculation.rates import read_questions
from redline.chat.template import style_of
from redline.chat.tokenizer import RESERVED, Tokenizer
from redline.errors import RedlineError

CORES = 2
CONTEXT = 4096  # maximum tokens of a request
STREAMS = (1, 8)
PROMPT, ANSWER = 256, 128  # tokens of a random prompt, and of every answer
# number of prompts by streams; also of the evaluation sets' prompts, alternating between their domains
PROMPTS = {1: 4, 8: 16}
WARM = 2  # requests of each stream before the measurement
KEYS = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "median_itl_ms", "median_e2el_ms", "duration")
RATIOS = ("output_throughput", "median_ttft_ms", "median_tpot_ms")
NAME = "nano"
OPENING = 16  # characters of answers that are compared
OURS = "redline"
VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}
# Its threads spin while they wait for each other, which costs most of its speed if another process uses a core.
LLAMA = {"OMP_WAIT_POLICY": "passive"}

Figures = dict[str, float]


class Server(NamedTuple):
    """A server that can be started. command: without the port, which is appended after `--port`."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


class Load(NamedTuple):
    """The requests of one load, and the number of streams."""

    name: str
    streams: int
    asks: tuple[LoadRequest, ...]


def servers(folder: Path, place: Path, vllm_python: Path | None, llama_server: Path | None) -> list[Server]:
    """Ours, with the model's drafter and without, and the peers given by flags.

    place: a folder for the peers' copies of the model, which are written. Raises CheckpointError if the model cannot be
    converted.
    """
    ours = (sys.executable, "-m", "redline", "serve", str(folder), "--served-model-name", NAME)
    ours += ("--max-model-len", str(CONTEXT), "--log-level", "warning")
    drafter = folder.with_name(f"{folder.name}-eagle3")
    found = [Server(OURS, ours, {}), Server(f"{OURS} with its drafter", (*ours, "--draft", str(drafter)), {})]
    if vllm_python is not None:
        to_bf16.convert(folder, place / "bf16")
        vllm = (str(vllm_python), "-m", "vllm.entrypoints.cli.main", "serve", str(place / "bf16"))
        vllm += ("--served-model-name", NAME, "--host", "127.0.0.1", "--dtype", "bfloat16")
        vllm += ("--max-model-len", str(CONTEXT), "--max-num-seqs", str(max(STREAMS)))
        found.append(Server("vLLM CPU", vllm, VLLM))
    if llama_server is not None:
        to_gguf.convert(folder, place / "q4_0.gguf", words=True)
        slots = max(STREAMS)
        llama = (str(llama_server), "--model", str(place / "q4_0.gguf"), "--alias", NAME, "--threads", str(CORES))
        llama += ("--parallel", str(slots), "--ctx-size", str(slots * CONTEXT // 4), "--no-webui")
        found.append(Server("llama.cpp", llama, LLAMA))
    return found


def loads(folder: Path, number: int) -> list[Load]:
    """The requests of a round; for each load its warm-up first, with other prompts.

    Raises ConfigError if the evaluation sets cannot be read.
    """
    tokenizer = Tokenizer.open(folder)
    draw = random.Random(number)
    ordinary = tokenizer.vocab_size - RESERVED

    def fresh() -> tuple[int, ...]:
        return tuple(draw.randrange(ordinary) for _ in range(PROMPT))

    found: list[Load] = []
    for streams in STREAMS:
        warm = [_ask(fresh(), "warm-up") for _ in range(WARM * streams)]
        asks = [_ask(fresh(), "random") for _ in range(PROMPTS[streams])]
        found.append(Load("random", streams, (*warm, *asks)))
    # One stream gets other prompts than eight streams, so that pages cached by one load do not serve the other.
    paths = sorted((folder / "eval").glob("*.jsonl"))
    questions = read_questions(paths, tokenizer, style_of(folder), sum(PROMPTS.values()))
    domains = [list(group) for _, group in itertools.groupby(questions, key=lambda question: question.domain)]
    turns = (one for turn in itertools.zip_longest(*domains) for one in turn if one is not None)
    every = [_ask(one.tokens, one.domain) for one in turns if len(one.tokens) + ANSWER < CONTEXT // 4]
    for streams in STREAMS:
        warm = [_ask(fresh(), "warm-up") for _ in range(streams)]
        found.append(Load("evaluation", streams, (*warm, *every[: PROMPTS[streams]])))
        every = every[PROMPTS[streams] :]
    return found


def _ask(tokens: tuple[int, ...], name: str) -> LoadRequest:
    return LoadRequest(max_tokens=ANSWER, ids=tokens, prompt_tokens=len(tokens), name=name)


@contextmanager
def running(server: Server, folder: Path, cores: Sequence[int] = ()) -> Generator[str]:
    """Runs the server; yields its address once it is healthy, and ends it on exit. folder: for a file of its output.

    cores: on which it runs; empty: on those of this process. Raises RedlineError if it ends before that, or is not
    ready after START_S.
    """
    port = free_port()
    placed = ("taskset", "--cpu-list", ",".join(map(str, cores))) if cores else ()
    with tempfile.NamedTemporaryFile(dir=folder, prefix="said-", suffix=".txt", delete=False) as said:
        process = subprocess.Popen(
            [*placed, *server.command, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **server.environment},
        )
    try:
        deadline = clock.monotonic() + START_S
        while not is_healthy(port):
            if process.poll() is not None or clock.monotonic() > deadline:
                words = Path(said.name).read_text(errors="replace").strip()[-2000:]
                raise RedlineError(f"{server.name} did not start: {words}")
            clock.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        with suppress(ProcessLookupError):  # ends its child processes too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure(url: str, load: Load) -> tuple[Figures, dict[str, str]]:
    """KEYS of a load, and the beginnings of answers by prompt.

    Raises RedlineError if an answer failed or has another length.
    """
    body = {"temperature": 0, "ignore_eos": True}
    target = ServerTarget(base_url=url, backend="openai", model=NAME, body=body)
    warm = sum(ask.name == "warm-up" for ask in load.asks)
    run: LoadRun = run_load(target, load.asks, LoadPace(max_concurrency=load.streams, warmups=warm))
    for answer in run.answers:
        _check(answer)
    found = figures(run)
    return {key: round(found[key], 4) for key in KEYS}, {
        str(answer.ask.ids): answer.text[:OPENING] for answer in run.answers
    }


def _check(answer: TimedAnswer) -> None:
    said = None if answer.usage is None else answer.usage.completion_tokens
    if failure_of(answer) is not None or said != ANSWER:
        raise RedlineError(f"an answer of {said} tokens in place of {ANSWER}: {answer.failure} {answer.error or ''}")


def medians(rounds: Sequence[Mapping[str, Mapping[str, Figures]]]) -> dict[str, dict[str, Figures]]:
    """By load and server the median of each figure, and for RATIOS the median of rounds' ratios to OURS."""
    found: dict[str, dict[str, Figures]] = {}
    for load in rounds[0][OURS]:
        for server in rounds[0]:
            figures = {key: statistics.median(one[server][load][key] for one in rounds) for key in KEYS}
            for key in RATIOS:
                shares = (one[server][load][key] / one[OURS][load][key] for one in rounds)
                figures[f"{key} / {OURS}'s"] = round(statistics.median(shares), 4)
            found.setdefault(load, {})[server] = figures
    return found


def table(found: Mapping[str, Mapping[str, Figures]]) -> str:
    """Lines for a terminal: a row for each load and server, with ratios to ours without a drafter."""
    lines = [f"{'load, streams':16}{'server':26}{'tokens/s':>10}{'':>9}{'TTFT ms':>10}{'':>9}{'TPOT ms':>10}"]
    for load, servers in found.items():
        for server, values in servers.items():
            cells = (f"{values[key]:10.2f}{values[f'{key} / {OURS}' + chr(39) + 's']:8.2f}x" for key in RATIOS)
            lines.append(f"{load:16}{server:26}{''.join(cells)}")
    return "\n".join(lines)


def versions(vllm_python: Path | None, llama_server: Path | None) -> dict[str, str]:
    """Versions of the peers given by flags."""
    found: dict[str, str] = {}
    if vllm_python is not None:
        find = "import importlib.metadata as m; print(m.version('vllm'))"
        told = subprocess.run([vllm_python, "-c", find], capture_output=True, text=True, check=True)
        found["vllm"] = told.stdout.strip()
    if llama_server is not None:
        told = subprocess.run([llama_server, "--version"], capture_output=True, text=True, check=True)
        match = re.search(r"version: (.+)", told.stdout + told.stderr)
        found["llama.cpp"] = match[1] if match else "unknown"
    return found


def main() -> None:
    """Runs the rounds, writes the result after each, prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("models/kimi-nano"))
    parser.add_argument("--vllm-python", type=Path, help="a Python that has vLLM for CPUs")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's llama-server")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--save", type=output, default="runs/serving-nano-cpu.json")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    # the affinity of this process, inherited by every server
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    rounds: list[dict[str, dict[str, Figures]]] = []
    openings: dict[str, list[float]] = {}
    averages: list[list[float]] = []
    where = provenance("torch", "msgspec", "httptools", "uvloop")
    where["versions"] |= versions(arguments.vllm_python, arguments.llama_server)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        every = servers(folder, place, arguments.vllm_python, arguments.llama_server)
        for number in range(arguments.rounds):
            asked = loads(folder, number)
            first = number % len(every)
            averages.append([round(load, 2) for load in os.getloadavg()])
            one: dict[str, dict[str, Figures]] = {}
            begun: dict[str, dict[str, str]] = {}
            for server in (*every[first:], *every[:first]):
                with running(server, place) as url:
                    for load in asked:
                        found, texts = measure(url, load)
                        one.setdefault(server.name, {})[f"{load.name}, {load.streams}"] = found
                        begun.setdefault(server.name, {}).update(texts)
                print(f"round {number + 1}: {server.name}: {json.dumps(one[server.name])}", flush=True)
            rounds.append({server.name: one[server.name] for server in every})
            for server in every:
                same = [text == begun[OURS][prompt] for prompt, text in begun[server.name].items()]
                openings.setdefault(server.name, []).append(sum(same) / len(same))
            result = {
                "provenance": where,
                "load_average": averages,
                "setting": {
                    "model": str(folder),
                    "cores": CORES,
                    "prompt": PROMPT,
                    "answer": ANSWER,
                    "prompts": PROMPTS,
                },
                "commands": {server.name: _shown(server, place) for server in every},
                "same_opening": {who: round(statistics.fmean(shares), 3) for who, shares in openings.items()},
                "medians": medians(rounds),
                "rounds": rounds,
            }
            # written after each round: an interruption loses one round
            arguments.save.write_text(json.dumps(result, indent=1) + "\n")
    print(table(medians(rounds)))


def _shown(server: Server, place: Path) -> str:
    """Its command as a user would type it, without folders of this machine."""
    program, *words = (word.replace(f"{place}/", "") for word in server.command)
    return " ".join([f"{name}={value}" for name, value in server.environment.items()] + [Path(program).name, *words])


if __name__ == "__main__":
    program(main)
