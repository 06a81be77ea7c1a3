"""How requests/s and tokens/s of the HTTP side grow with replicas of the API, over a worker that costs next to nothing.

    python -m redline.bench.runs.replicas [--weights models/kimi-nano] [--replicas 1 2] [--rounds 12] [--save FILE]

Serves a deployment with each number of replicas by `redline serve`'s own processes, with `free_worker.py` in the
worker's place, and loads them in turns from this process. `requests`: chats of some 300 prompt tokens and one token of
answer, over connections that are kept; so the template, the tokenizer, routing and both borders. `tokens`: streams with
one token a delta. Nothing is logged per request.

Client, worker and replicas share this machine's cores, so a machine of few cores bounds what is gained: a rate stands
beside what all cores would give if they had nothing else to do (`all_cores_per_s`), and the processor time of each kind
of process is told apart. The rate of one core is what a replica could give with a core of its own; that it would is not
measured.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from redline import clock
from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.errors import RedlineError

ROOT = Path(__file__).parents[3]
CONNECTIONS = 32
TEXT = "The river runs past the house and on to the sea; who walks along it finds a mill, and a bridge of stone. " * 8
START_S = 60.0
# `redline serve FILE`, with another worker's command. It is a program's text, since this room cannot import fleet.
SERVER = """
import sys
from redline.fleet import process
process.WORKER = sys.executable, "-m", "redline.bench.runs.free_worker"
sys.argv[1:1] = ["serve"]
from redline.__main__ import main
main()
"""
KINDS = {"redline.fleet.replica": "api", "redline.bench.runs.free_worker": "worker"}  # of a server's children
TICKS = os.sysconf("SC_CLK_TCK")


class Case(NamedTuple):
    """One load: so many requests over CONNECTIONS connections, each with an answer of so many tokens."""

    name: str
    requests: int
    tokens: int

    @property
    def units(self) -> int:
        """What is counted."""
        return self.requests * self.tokens


class Deployment:
    """A server with so many replicas, in processes of its own; it serves once this is made. Raises RedlineError."""

    def __init__(self, folder: Path, weights: str, replicas: int) -> None:
        self.replicas = replicas
        self.socket = str(folder / f"{replicas}.sock")
        file, said = folder / f"{replicas}.toml", folder / f"{replicas}.txt"
        keys = {"weights": weights, "unix_socket": self.socket, "log_level": "warning"}
        lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        file.write_text("\n".join([*lines, f"api_replicas = {replicas}", "page = false", ""]))
        with said.open("wb") as out:
            self._process = subprocess.Popen([sys.executable, "-c", SERVER, str(file)], stdout=out, stderr=out)
        until = clock.monotonic() + START_S
        while "is ready at" not in said.read_text():
            if self._process.poll() is not None or clock.monotonic() > until:
                self.stop()
                raise RedlineError(f"a server with {replicas} replicas did not begin to serve: {said.read_text()}")
            clock.sleep(0.05)

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds so far: of this process, the API's, the worker, and who starts them."""
        pid = self._process.pid
        found = {"client": clock.process_time(), "api": 0.0, "worker": 0.0, "supervisor": 0.0}
        found["api" if self.replicas == 1 else "supervisor"] += _process_s(pid)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            for module, kind in KINDS.items():
                if module in words:
                    found[kind] += _process_s(int(child))
        return found

    def measure(self, case: Case) -> dict[str, float]:
        """Loads it once: units/s, and microseconds of processor time for each unit. Raises RedlineError."""
        before, began = self.cpu_s(), clock.perf_counter()
        uvloop.run(_load(self.socket, case))
        wall_s, after = clock.perf_counter() - began, self.cpu_s()
        cost = {f"{kind}_us": (after[kind] - before[kind]) / case.units * 1e6 for kind in after}
        return {"per_s": case.units / wall_s, **cost}

    def stop(self) -> None:
        """Ends all its processes, and waits for them."""
        self._process.terminate()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def figures_of(runs: Sequence[dict[str, float]], cores: int) -> dict[str, float]:
    """The median over runs of each figure, and what follows from them.

    all_cores_per_s: units/s if every core did nothing but this. share_of_all_cores: per_s of it. one_core_per_s: what
    one replica could give with a core of its own.
    """
    figures = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    all_us = sum(figures[key] for key in figures if key.endswith("_us"))
    figures["all_cores_per_s"] = cores * 1e6 / all_us
    figures["share_of_all_cores"] = figures["per_s"] / figures["all_cores_per_s"]
    figures["one_core_per_s"] = 1e6 / figures["api_us"]
    return {key: float(f"{value:.4g}") for key, value in figures.items()}


def compared(runs: dict[int, list[dict[str, float]]], cores: int) -> dict[str, Any]:
    """The figures of each number of replicas, and beside the first number: the median of the ratios of neighbours.

    ratio: of units/s. api_us_ratio: of the API's processor time a unit, with whoever starts the replicas.
    """
    first = next(iter(runs))
    found: dict[str, Any] = {}
    for replicas, measured in runs.items():
        pairs = list(zip(measured, runs[first], strict=True))
        found[str(replicas)] = {
            **figures_of(measured, cores),
            "ratio": round(statistics.median(here["per_s"] / there["per_s"] for here, there in pairs), 3),
            "ratios": [round(here["per_s"] / there["per_s"], 3) for here, there in pairs],
            "api_us_ratio": round(statistics.median(_http_us(here) / _http_us(there) for here, there in pairs), 3),
        }
    return found


def _http_us(run: dict[str, float]) -> float:
    return run["api_us"] + run["supervisor_us"]


def _process_s(pid: int) -> float:
    """Processor seconds of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def _load(path: str, case: Case) -> None:
    """All requests of a case, shared out among CONNECTIONS connections."""
    numbers = iter(range(case.requests))
    read = _read_whole if case.tokens == 1 else _read_stream
    await asyncio.gather(*(_connection(path, case, numbers, read) for _ in range(CONNECTIONS)))


Read = Callable[[asyncio.StreamReader, Case], Awaitable[None]]


async def _connection(path: str, case: Case, numbers: Iterator[int], read: Read) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        for number in numbers:
            content = f"Read this, number {number}, and say what it is about. {TEXT}"
            body = json.dumps(
                {
                    "messages": [{"role": "user", "content": content}],
                    "max_tokens": case.tokens,
                    "ignore_eos": True,
                    "stream": case.tokens > 1,
                    "thinking": {"type": "disabled"},
                }
            ).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            await read(reader, case)
    except (OSError, asyncio.IncompleteReadError) as error:
        raise RedlineError(f"a connection ended before its answer: {error}") from None
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise RedlineError(f"a request was refused: {head[:100]!r}")
    return head


async def _read_whole(reader: asyncio.StreamReader, case: Case) -> None:
    head = await _read_head(reader)
    length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
    told = json.loads(await reader.readexactly(length))
    if (tokens := told["usage"]["completion_tokens"]) != case.tokens:
        raise RedlineError(f"{tokens} tokens came; {case.tokens} were asked for")


async def _read_stream(reader: asyncio.StreamReader, case: Case) -> None:
    await _read_head(reader)
    seen, tail = 0, b""
    while not tail.endswith(b"\r\n0\r\n\r\n"):
        data = await reader.read(1 << 18)
        if not data:
            raise RedlineError("a stream ended before its end")
        seen += (tail + data).count(b"data: {") - tail.count(b"data: {")
        tail = (tail + data)[-64:]
    if seen < case.tokens:
        raise RedlineError(f"{seen} chunks came of {case.tokens} tokens")


def main() -> None:
    """Measures every case in turns, prints each, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default=str(ROOT / "models" / "kimi-nano"), help="whose tokenizer and template")
    parser.add_argument("--replicas", type=count, nargs="+", default=[1, 2], help="the first is what others are beside")
    parser.add_argument("--rounds", type=count, default=12, help="of all cases; the median counts")
    parser.add_argument("--requests", type=count, default=800, help="of the case `requests`")
    parser.add_argument("--tokens", type=count, default=400, help="of each stream of the case `tokens`")
    parser.add_argument("--save", type=output, default="runs/replicas-cpu.json")
    asked = parser.parse_args()
    cases = Case("requests", asked.requests, 1), Case("tokens", 2 * CONNECTIONS, max(2, asked.tokens))
    record = provenance("uvicorn", "uvloop", "httptools", "starlette", "msgspec", "pyzmq", "tiktoken")
    cores: int = record["cores"]
    deployments: list[Deployment] = []
    runs: dict[str, dict[int, list[dict[str, float]]]] = {case.name: {n: [] for n in asked.replicas} for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        try:
            deployments += (Deployment(Path(folder), asked.weights, replicas) for replicas in asked.replicas)
            for deployment in deployments:
                for case in cases:  # what is slow once is not counted
                    deployment.measure(case._replace(requests=2 * CONNECTIONS))
            for _ in range(asked.rounds):
                for case in cases:
                    for deployment in deployments:
                        runs[case.name][deployment.replicas].append(deployment.measure(case))
        finally:
            for deployment in deployments:
                deployment.stop()
    result: dict[str, Any] = {case.name: {**case._asdict(), **compared(runs[case.name], cores)} for case in cases}
    for case in cases:
        for replicas in asked.replicas:
            told = result[case.name][str(replicas)]
            print(
                f"{case.name:8} {replicas} replicas  {told['per_s']:9,.0f}/s   x {told['ratio']:.2f}   "
                f"{told['share_of_all_cores']:4.0%} of all cores   API {told['api_us']:,.1f} us each, "
                f"supervisor {told['supervisor_us']:,.1f}, worker {told['worker_us']:,.1f}, "
                f"client {told['client_us']:,.1f}"
            )
    what = "the HTTP side with several replicas, over a worker without a model; rates, and processor time of each part"
    found = {"what": what, **record, "rounds": asked.rounds, "load_average": round(os.getloadavg()[0], 1), **result}
    asked.save.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    program(main)
