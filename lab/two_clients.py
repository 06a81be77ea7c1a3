"""Our client and vLLM's own on the same server: whether their figures agree, and which is nearer the truth.

    python -m lab.two_clients --vllm-python PYTHON [--rounds 3] [--served models/kimi-nano] [--save FILE]

PYTHON has vLLM; only its `vllm bench serve` runs. Both send the same prompts, in rounds that alternate which of them
begins. The result is the median over rounds of each round's ratio, ours to theirs, so that a disturbance of a whole
round slows both. Every figure here is a time or a rate that vLLM gives under the same key.

The first server is the scripted one, with known delays and a log of its actual times: each client's TTFT is compared
with that log. vLLM's client counts from the time when it takes up a request, so that is compared with ours from the
same moment (`Answer.taken`); its time until the server's receipt, opening a connection for each request, and its time
between the event's departure and its own time stamp, are part of its TTFT and of no server's. The second, with
--served, is `redline serve` on one core, with the clients on another.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lab.peers_over_http import NAME, Server, running
from lab.program import count, output, program
from redline.bench.record import provenance
from redline.bench.serving import saved
from redline.errors import RedlineError
from tests.bench.serving.script import MODEL, Logged, Play, Script
from tests.bench.serving.scripted import Scripted

TTFT = ("mean_ttft_ms", "median_ttft_ms")
HELD = (
    *tuple(f"{kind}_{name}_ms" for name in ("tpot", "e2el") for kind in ("mean", "median")),
    "request_throughput",
    "output_throughput",
)
KEYS = (*TTFT, "mean_itl_ms", "median_itl_ms", *HELD)
SCRIPT = Script(first_s=0.1, gaps_s=(0.02,))
LIMIT = 0.02
TTFT_MS = 3.0  # permitted difference of TTFT in any case: the time that vLLM's client adds to 100 ms
LOG_MS = 0.5  # permitted difference of ours from the server's log
CLIENT_S = 300
TOKENIZER = Path(__file__).parents[1] / "models" / "kimi-nano"
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_TARGET_DEVICE": "cpu"}
OURS = (sys.executable, "-m", "redline")


class Size(NamedTuple):
    """The size of a run: number of prompts, concurrent streams, and tokens of each answer."""

    prompts: int
    streams: int
    tokens: int


SCRIPTED = Size(prompts=32, streams=4, tokens=64)
# One stream: with several, the time at which a client sends determines which requests a step computes together, and
# clients differ in that. Long answers: vLLM's client takes milliseconds to send a request, which are a part of E2EL and
# throughput.
# that. Long answers: vLLM's client takes milliseconds to send a request, which are a part of E2EL and throughput.
SERVED = Size(prompts=8, streams=1, tokens=256)

Figures = dict[str, float]
Round = dict[str, Figures]  # {client: figures}, `ours` and `theirs`


class Asked(NamedTuple):
    """The results of one run. figures: KEYS. taken_ttfts: ms of each request since the client took it up.

    sent_ttfts: since its first byte, which vLLM's client does not report. starts: when it was taken up, seconds on the
    server's clock, if the client reports it.
    """

    figures: Figures
    taken_ttfts: list[float]
    sent_ttfts: list[float]
    starts: list[float]


def prompts(folder: Path, number: int) -> Path:
    """A file of `number` prompts, in the format of a custom dataset for both clients."""
    path = folder / "prompts.jsonl"
    lines = (json.dumps({"prompt": f"Question {i}: what is {i} times {i + 7}?"}) for i in range(number))
    path.write_text("\n".join(lines) + "\n")
    return path


def ask(
    client: Sequence[str], url: str, model: str, size: Size, dataset: Path, result: Path, more: Sequence[str]
) -> Asked:
    """One run. client: the words before `bench serve`; more: flags of this run alone.

    Raises RedlineError if it fails or loses answers.
    """
    command = [
        *(*client, "bench", "serve", "--base-url", url, "--model", model, "--tokenizer", str(TOKENIZER)),
        *("--backend", "openai", "--endpoint", "/v1/completions", "--dataset-name", "custom"),
        *("--dataset-path", str(dataset), "--custom-output-len", str(size.tokens), "--disable-shuffle"),
        *("--num-prompts", str(size.prompts), "--max-concurrency", str(size.streams), "--disable-tqdm"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--save-detailed"),
        "--skip-chat-template",  # their client adds one to a custom prompt
        *("--result-dir", str(result.parent), "--result-filename", result.name, *more),
    ]
    ran = subprocess.run(command, env=os.environ | OFFLINE, capture_output=True, text=True, timeout=CLIENT_S)
    if ran.returncode or not result.exists():
        raise RedlineError(f"{client[0]} ended with {ran.returncode}: {(ran.stdout + ran.stderr)[-2000:]}")
    found = json.loads(result.read_text())
    if found["completed"] != size.prompts or found["total_output_tokens"] != size.prompts * size.tokens:
        got = f"{found['completed']} answers, {found['total_output_tokens']} tokens"
        raise RedlineError(f"{client[0]} counted {got}, not {size.prompts} and {size.prompts * size.tokens}")
    figures = {key: found[key] for key in KEYS}
    ttfts = [seconds * 1000 for seconds in found["ttfts"]]
    if tuple(client) != OURS:
        return Asked(figures, ttfts, [], found["start_times"])
    answers = saved.read(result).answers
    taken = [(one.chunks[0].at - one.taken) * 1000 for one in answers if one.taken is not None]
    return Asked(figures, taken, ttfts, [])


def compare(rounds: Sequence[Mapping[str, Mapping[str, float]]], keys: Sequence[str] = KEYS) -> dict[str, float]:
    """By key the median over rounds of ours / theirs - 1. Each round has the figures of `ours` and of `theirs`."""
    return {key: statistics.median(one["ours"][key] / one["theirs"][key] - 1 for one in rounds) for key in keys}


def too_far(rounds: Sequence[Mapping[str, Mapping[str, float]]], keys: Sequence[str]) -> list[str]:
    """Those of `keys` that differ by more than permitted: LIMIT, or TTFT_MS for TTFT if that is more."""
    found = [key for key, share in compare(rounds, keys).items() if abs(share) > LIMIT]
    return [key for key in found if key not in TTFT or abs(_apart_ms(rounds, key)) > TTFT_MS]


def _apart_ms(rounds: Sequence[Mapping[str, Mapping[str, float]]], key: str) -> float:
    return statistics.median(one["ours"][key] - one["theirs"][key] for one in rounds)


def beside_log(asked: Asked, rows: Sequence[Logged]) -> Figures:
    """ms by which a client's TTFT exceeds the server's own, from its receipt of a request to the first event.

    Means and medians of a whole run, so that rows and requests need not be matched. sent: counted from the client's
    first byte. before and after: for a client that reports when it took requests up, the time until the server had
    them, and the time after the event had left.
    """
    log = [(row.events[0] - row.received) * 1000 for row in rows]
    found = {"server_median_ms": statistics.median(log)}
    found["taken_mean_ms"] = statistics.fmean(asked.taken_ttfts) - statistics.fmean(log)
    found["taken_median_ms"] = statistics.median(asked.taken_ttfts) - statistics.median(log)
    if asked.sent_ttfts:
        found["sent_mean_ms"] = statistics.fmean(asked.sent_ttfts) - statistics.fmean(log)
        found["sent_median_ms"] = statistics.median(asked.sent_ttfts) - statistics.median(log)
    if asked.starts:
        starts, received = sorted(asked.starts), sorted(row.received for row in rows)
        before = [(there - here) * 1000 for here, there in zip(starts, received, strict=True)]
        found["before_mean_ms"] = statistics.fmean(before)
        found["after_mean_ms"] = found["taken_mean_ms"] - found["before_mean_ms"]
    return found


def pair(number: int, vllm_python: Path) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The clients of a round in their order, each with the words of its command."""
    order = (("ours", OURS), ("theirs", (str(vllm_python), "-m", "vllm.entrypoints.cli.main")))
    return order if number % 2 == 0 else order[::-1]


def measure(vllm_python: Path, count_rounds: int) -> tuple[list[Round], list[Round]]:
    """On the scripted server: figures of every round, TTFT from when a request was taken up; and `beside_log` of each.

    Raises RedlineError if a client fails.
    """
    found: list[Round] = []
    logs: list[Round] = []
    with tempfile.TemporaryDirectory() as name, Scripted(Play(in_order=(SCRIPT,))) as server:
        dataset = prompts(Path(name), SCRIPTED.prompts)
        for number in range(count_rounds):
            figures, log = Round(), Round()
            for who, how in pair(number, vllm_python):
                server.forget()
                asked = ask(how, server.url, MODEL, SCRIPTED, dataset, Path(name) / f"{who}-{number}.json", ())
                log[who] = beside_log(
                    asked, server.log().requests[-SCRIPTED.prompts :]
                )  # their client sends one request before the measurement
                mean, median = statistics.fmean(asked.taken_ttfts), statistics.median(asked.taken_ttfts)
                figures[who] = asked.figures | dict(zip(TTFT, (mean, median), strict=True))
            found.append(figures)
            logs.append(log)
    return found, logs


def measure_served(vllm_python: Path, count_rounds: int, folder: Path) -> list[Round]:
    """On `redline serve` of a model, greedy and of one length: figures of every round.

    Raises RedlineError if the server or a client fails.
    """
    more = ("--temperature", "0", "--ignore-eos")
    serve = (*OURS, "serve", str(folder), "--served-model-name", NAME, "--log-level", "warning")
    cores = sorted(os.sched_getaffinity(0))
    found: list[Round] = []
    server = Server("redline", serve, {})
    with tempfile.TemporaryDirectory() as name, running(server, Path(name), cores[:1]) as url:
        dataset = prompts(Path(name), SERVED.prompts)
        with on(cores[-1:]):
            ask(OURS, url, NAME, SERVED, dataset, Path(name) / "warm.json", more)
            for number in range(count_rounds):
                figures = Round()
                for who, how in pair(number, vllm_python):
                    result = Path(name) / f"{who}-{number}.json"
                    figures[who] = ask(how, url, NAME, SERVED, dataset, result, more).figures
                found.append(figures)
    return found


@contextmanager
def on(cores: Sequence[int]) -> Generator[None]:
    """This process, and processes started in this context, run on these cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def main() -> int:
    """Measures, prints, saves; 1 if a figure differs by more than permitted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--served", type=Path, help="a model's folder: measure `redline serve` too")
    parser.add_argument("--served-rounds", type=count, default=7)
    parser.add_argument("--save", type=output)
    arguments = parser.parse_args()
    load = [os.getloadavg()[0]]
    rounds, logs = measure(arguments.vllm_python, arguments.rounds)
    print("on the scripted server")
    say(rounds, KEYS)
    for who in ("ours", "theirs"):
        for key in logs[0][who]:
            print(f"{who:7} TTFT beside the server's log, {key:18} {_median(logs, who, key):+9.3f}")
    wrong = [*too_far(rounds, KEYS), *(["TTFT beside the log"] if off_the_log(logs) else [])]
    record: dict[str, Any] = {"apart": compare(rounds), "rounds": rounds, "beside_log": logs}
    if arguments.served:
        load.append(os.getloadavg()[0])
        served = measure_served(arguments.vllm_python, arguments.served_rounds, arguments.served)
        print(f"on redline serve {arguments.served}")
        say(served, KEYS)
        wrong += [f"{key}, served" for key in too_far(served, HELD)]
        record["served"] = {"model": str(arguments.served), "held": HELD, "apart": compare(served), "rounds": served}
    if arguments.save:
        setting = {"scripted": SCRIPTED._asdict() | {"first_s": SCRIPT.first_s, "gap_s": SCRIPT.gaps_s[0]}}
        setting["served"] = SERVED._asdict()
        find = "import importlib.metadata as m; print(m.version('vllm'))"
        version = subprocess.run([arguments.vllm_python, "-c", find], capture_output=True, text=True, check=True)
        where = provenance("msgspec", "httptools", "uvloop")
        where["versions"]["vllm"] = version.stdout.strip()
        limits = {"share": LIMIT, "ttft_ms": TTFT_MS, "log_ms": LOG_MS}
        head = {"provenance": where, "load_average": load, "setting": setting, "limits": limits}
        arguments.save.write_text(json.dumps(head | record, indent=1) + "\n")
    if wrong:
        print(f"further apart than they may be: {', '.join(wrong)}")
    return int(bool(wrong))


def say(rounds: Sequence[Round], keys: Sequence[str]) -> None:
    """Prints a line for each figure: medians over rounds, and how far apart."""
    for key, share in compare(rounds, keys).items():
        ours, theirs = (_median(rounds, who, key) for who in ("ours", "theirs"))
        print(f"{key:20} ours {ours:10.3f}   vllm {theirs:10.3f}   apart {share:+.3%}")


def off_the_log(logs: Sequence[Round]) -> bool:
    """Whether our own TTFT differs from the server's log by more than LOG_MS: by medians, since a mean includes every
    outlier.
    """
    return abs(_median(logs, "ours", "sent_median_ms")) > LOG_MS


def _median(rounds: Sequence[Round], who: str, key: str) -> float:
    return statistics.median(one[who][key] for one in rounds)


if __name__ == "__main__":
    program(main)
