"""Twenty minutes of mixed load, and whether the server afterwards is as before: pages, memory, descriptors, log.

    python -m lab.soak [--minutes 20] [--requests 24000] [--at-once 24] [--seed 0] [--save FILE]
        [--server http://127.0.0.1:PORT --pid PID]

Serves a model with its drafter, or uses a running server; PID is the process id of its API. Requests of all three
dialects, with tools, schemas, streams and whole answers, arrive at a constant rate; some clients disconnect early, some
bodies are invalid (`random_requests.light`). A bystander reads two streams, alone at first and then under the load
(`watch.py`). When all clients have gone, every page must be free, and no job may run or wait. Ends with 1 if a check
fails.
"""

import argparse
import asyncio
import json
import os
import random
import re
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from lab.attack.random_requests import Request, light
from lab.attack.raw_http import ask, get
from lab.bystander import CALM_S, Bench, Sample, memory_slopes, slopes, told
from lab.program import count, output, program
from lab.trees import END_S, ROOT, Server, Tree, commit_of, ended_by_a_signal, hard_limit
from redline import clock
from redline.api.config import Limits
from redline.bench.record import provenance

FLAT_MIB = 1.0  # per 1,000 requests, of each process, over the second half
WARM = 2000  # requests during which memory still grows to its working size, so that slopes have no meaning
MORE_FILES = (
    8  # more descriptors than before are permitted for an idle server: two processes that compile grammars have some
)
TOLD_EVERY = 20  # one of this number of memory samples, taken once a second, is put into the record
IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "redline:queue_jobs")
IDLE_TOKENS = "redline:queue_tokens"


def source(seed: int) -> Iterator[Request]:
    """The requests of a soak, without end. The nth is a function of (seed, n) alone."""
    number = 0
    while True:
        yield light(random.Random(f"soak {seed},{number}"))
        number += 1


def open_files(pid: int) -> int:
    """How many descriptors a process has. Raises OSError if it has ended."""
    return len(os.listdir(f"/proc/{pid}/fd"))


async def figures(port: int) -> dict[str, float]:
    """The series of /metrics about running and waiting jobs and held pages, by name."""
    reply = await ask(port, get("/metrics"), limit_s=CALM_S)
    found = re.findall(r"^([\w:]+)\{[^}]*\} (\S+)$", reply.body.decode(), re.MULTILINE)
    return {name: float(value) for name, value in found if name in (*IDLE, IDLE_TOKENS)}


async def rest(port: int) -> dict[str, float]:
    """The figures once all of them are 0, or the present ones after CALM_S seconds."""
    deadline = clock.monotonic() + CALM_S
    while True:
        found = await figures(port)
        if (found and not any(found.values())) or clock.monotonic() > deadline:
            return found
        await asyncio.sleep(0.5)


def wrong(record: dict[str, Any]) -> list[str]:
    """The failed checks of a soak, in words; empty if there are none."""
    found = [f"{name} is {value:g} at rest" for name, value in record["at_rest"].items() if value]
    if set(record["at_rest"]) != {*IDLE, IDLE_TOKENS}:
        found.append("not all figures at rest were reported")
    found += [
        f"the memory of the {who} grows by {mib} MiB per 1,000 requests"
        for who, mib in record["mib_per_1000_requests"].items()
        if mib > FLAT_MIB and record["soak"]["sent"] >= WARM
    ]
    found += [
        f"the {who} has {after} descriptors, {before} before"
        for who, (before, after) in record["descriptors"].items()
        if after > before + MORE_FILES
    ]
    if record["soak"]["odd"]:
        found.append(f"{len(record['soak']['odd'])} answers that no client should get")
    found += [f"{phase['name']}: answers another than before" for phase in record["phases"] if not phase["right"]]
    if record["end"] is not None and (record["end"]["code"] != 0 or record["end"]["tracebacks"]):
        found.append(f"the server ended with {record['end']['code']} and {record['end']['tracebacks']} tracebacks")
    return found


def quarters(samples: Sequence[Sample]) -> list[dict[str, float]]:
    """The slopes of each quarter of the requests: the growth of caches declines from quarter to quarter, that of a leak
    does not.
    """
    last = samples[-1].requests if samples else 0
    parts = [[one for one in samples if k * last < 4 * one.requests <= (k + 1) * last] for k in range(4)]
    return [slopes(part) for part in parts]


async def run(bench: Bench, asked: argparse.Namespace, pids: dict[str, int]) -> dict[str, Any]:
    """The bystander alone, then under the load, and then at rest. `asked`: the flags. pids: of API and worker."""
    await bench.open(asked.kv_tokens, asked.known_bytes)
    await bench.control("alone", asked.alone)
    before = {who: open_files(pid) for who, pid in pids.items()}
    at = len(bench.memory.samples)
    every_s = 60 * asked.minutes / asked.requests
    soak = await bench.traffic(
        "soak", source(asked.seed), asked.requests, 60 * asked.minutes, asked.at_once, every_s=every_s
    )
    samples = bench.memory.samples[at:]
    await bench.control("alone again", asked.alone)
    bench.watch.close()
    bench.doing = "rest"
    at_rest = await rest(bench.port)
    after = {who: open_files(pid) for who, pid in pids.items()}
    bench.memory.close()
    return {
        "soak": soak,
        "mib_per_1000_requests": memory_slopes(samples),
        "mib_per_1000_requests_by_quarter": quarters(samples),
        "mib": [[sent, api >> 20, worker >> 20] for _, sent, api, worker in samples[::TOLD_EVERY]],
        "descriptors": {who: [before[who], after[who]] for who in pids},
        "at_rest": at_rest,
    }


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="models/kimi-nano")
    parser.add_argument("--server", help="its address on loopback (default: a server is started)")
    parser.add_argument("--pid", type=count, help="process id of the API of --server")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--requests", type=count, default=24_000, help="spread evenly over the minutes")
    parser.add_argument("--at-once", type=count, default=24, help="requests in flight, at most")
    parser.add_argument("--alone", type=float, default=20.0, help="seconds of the bystander alone, before and after")
    parser.add_argument("--kv-memory", default="1GB")
    parser.add_argument(
        "--kv-tokens", type=int, default=105_000, help="tokens that are prefilled first, to touch every page"
    )
    parser.add_argument(
        "--known-bytes",
        type=int,
        default=Limits().known_bytes,
        help="size of the API's cache of texts, which is filled first",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=output, default="runs/soak.json")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Runs the program with `words` instead of the command line's; writes JSON. Returns 1 if a check fails.

    Raises SystemExit for --server without --pid, and RedlineError if the server does not start.
    """
    asked = arguments().parse_args(words)
    if (asked.server is None) != (asked.pid is None):
        raise SystemExit("--server and --pid go together")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit(), hard_limit()))
    draft = f"{asked.model.rstrip('/')}-eagle3"
    served = [asked.model, "--kv-memory", asked.kv_memory, *(["--draft", draft] if (ROOT / draft).is_dir() else [])]
    with ExitStack() as stack:
        stack.enter_context(ended_by_a_signal())
        if asked.server is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = Server(Tree(str(ROOT), ROOT, commit_of(ROOT)), served, folder, sys.executable)
            stack.callback(server.close)
        else:
            server = cast("Server", _running(asked.server, asked.pid))
        bench = Bench(server, Path(asked.model).name, lambda line: print(line, flush=True))
        with told(bench):
            found = asyncio.run(run(bench, asked, {"api": server.process.pid, "worker": server.worker}))
        end = server.stop()._asdict() if asked.server is None else None
    p99 = {phase.name: phase.pauses.gap.p99 for phase in bench.phases}
    record: dict[str, Any] = {
        **provenance("torch", "uvicorn", "uvloop", "msgspec", "llguidance"),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "model": Path(asked.model).name,
        "served": served if asked.server is None else asked.server,
        "minutes": asked.minutes,
        "bystander_p99_ms": p99,
        "phases": [phase.row() for phase in bench.phases],
        **found,
        "end": end,
        "end_s": END_S,
    }
    record["wrong"] = wrong(record)
    asked.save.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{record['soak']['sent']} requests; MiB per 1,000: {record['mib_per_1000_requests']}")
    print(f"at rest: {record['at_rest']}; descriptors before and after: {record['descriptors']}")
    print(f"the bystander's p99, ms: {p99}")
    print("wrong: " + ("; ".join(record["wrong"]) or "nothing"))
    return 1 if record["wrong"] else 0


def _running(address: str, pid: int) -> SimpleNamespace:
    """A running server, with the part of the interface that `Bench` uses."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    port = int(address.rstrip("/").rpartition(":")[2])
    return SimpleNamespace(process=SimpleNamespace(pid=pid), worker=int(children[0]), until_ready=lambda: port)


if __name__ == "__main__":
    program(main, heard=False)
