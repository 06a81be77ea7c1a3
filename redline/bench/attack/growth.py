"""What grows with the requests that were answered: objects, a cache that fills, or the allocator's free blocks.

    python -m redline.bench.attack.growth [models/kimi-nano] [--requests 12000] [--jobs 3000] [--save FILE]

A soak sees two processes from outside. Here the same requests meet the same code where it can be counted. First the
API, clients and all, over an engine that costs nothing, so that thousands are answered in a minute: with the cache of
known texts as it is, with a small one, which is soon full, and with one that is filled first. Then an engine, whose
jobs are those that the API has made, some of them aborted. A leak shows as objects or as bytes in use. A cache shows as
bytes in use, as far as its bound. What the allocator keeps for later shows as free bytes, which it gives back at the
end, when it is asked to (`malloc_trim`).
"""

import argparse
import asyncio
import ctypes
import gc
import json
import logging
import os
import random
import resource
import socket
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import torch
import uvloop

from redline import clock
from redline.api.app import create_app
from redline.api.config import ApiConfig, Limits
from redline.api.gateway import Gateway
from redline.api.metrics import Metrics
from redline.api.server import Server, uvicorn_config
from redline.bench.attack.attacks import CHAT
from redline.bench.attack.bystander import too_long
from redline.bench.attack.raw_http import ask, post
from redline.bench.attack.soak import source
from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.bench.runs.trees import hard_limit
from redline.chat.template import style_of
from redline.chat.tokenizer import Tokenizer
from redline.route.links import Link
from redline.wire.codec import Wire, decode, encode
from redline.wire.delta import Delta
from redline.wire.job import Abort, Job, JobId
from redline.wire.news import Ready
from redline.wire.step import TokenLogprobs
from redline.worker.config import EngineConfig, Learned
from redline.worker.engine import EngineCore
from redline.worker.loop import StepInFlight, turn

SMALL = 1 << 20  # bytes of known texts: full after some hundred requests
ROWS = 12  # counts of each part
CONTEXT = 8192  # tokens, of the API's engine
SAID = "I think</think>An answer of a few words: {} and no more."
JOBS = 24  # that the engine has at once
ABORTED = 0.12  # of the jobs
MIB = 1 << 20


_BEFORE = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"


class _Allocated(ctypes.Structure):
    """`struct mallinfo2` of glibc: sums over all arenas, in bytes."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (*_BEFORE, "uordblks", "fordblks", "keepcost"))


def counted(number: int) -> dict[str, float]:
    """What this process has after so many requests, garbage collected: objects of Python, and MiB.

    used, free: of the C allocator, by its own account. Raises AttributeError where that is not glibc 2.33 or newer.
    """
    gc.collect()
    ask_libc = ctypes.CDLL(None).mallinfo2
    ask_libc.restype = _Allocated
    told = ask_libc()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "after": number,
        "objects": len(gc.get_objects()),
        "used_mib": round((told.uordblks + told.hblkhd) / MIB, 2),
        "free_mib": round(told.fordblks / MIB, 2),
        "resident_mib": round(resident / MIB, 2),
    }


def trimmed(number: int) -> dict[str, float]:
    """As `counted`, once the allocator has given back what it does not use."""
    ctypes.CDLL(None).malloc_trim(0)
    return counted(number)


class FreeAnswers:
    """The gateway's outbox: the same answer to every job, a token per turn of the event loop.

    keep: how many jobs are kept in `jobs`.
    """

    def __init__(self, tokens: Sequence[int], keep: int) -> None:
        self.jobs: list[Job] = []
        self._tokens = tokens
        self._keep = keep
        self._running: dict[JobId, asyncio.Task[None]] = {}
        self._gateway: Gateway | None = None
        self._link: Link | None = None

    def serve(self, gateway: Gateway) -> None:
        """Begins as a worker of this gateway, and is ready at once."""
        self._gateway, self._link = gateway, gateway.join("worker", self)
        gateway.deliver(self._link, Ready(max_model_len=CONTEXT, pages=1 << 10, fingerprint="free", summary="free"))

    def put(self, message: Wire) -> None:
        """Takes a job or an abort. Raises AssertionError for any other message."""
        match message:
            case Job():
                if len(self.jobs) < self._keep:
                    self.jobs.append(message)
                task = asyncio.get_running_loop().create_task(self._answer(message))
                self._running[message.id] = task
                task.add_done_callback(lambda _: self._running.pop(message.id, None))
            case Abort(job=id):
                if (task := self._running.get(id)) is not None:
                    task.cancel()
            case other:
                raise AssertionError(other)

    async def _answer(self, job: Job) -> None:
        assert self._gateway is not None
        assert self._link is not None
        asked = job.sampling
        if asked.prompt_logprobs is not None:
            scores = tuple(_scored(token, asked.prompt_logprobs) for token in job.tokens[1:])
            self._gateway.deliver(self._link, Delta(job=job.id, prompt_logprobs=scores))
        said = self._tokens[: asked.max_tokens]
        for place, token in enumerate(said, 1):
            await asyncio.sleep(0)
            scores = () if asked.logprobs is None else (_scored(token, asked.logprobs),)
            finish = ("length" if place == asked.max_tokens else "stop") if place == len(said) else None
            delta = Delta(job=job.id, tokens=(token,), finish=finish, logprobs=scores)
            self._gateway.deliver(self._link, _over_the_wire(delta))


def _over_the_wire(delta: Delta) -> Wire:
    return decode(encode(delta))


def _scored(token: int, top: int) -> TokenLogprobs:
    others = [(other, -1.0 - other) for other in range(top)]
    return TokenLogprobs(token=token, logprob=-0.5, rank=1, top=tuple([(token, -0.5), *others][:top]))


async def api(
    folder: Path, requests: int, known_bytes: int, keep: int = 0, *, full: bool = False
) -> tuple[list[dict[str, float]], list[Job]]:
    """Counts while an API in this process answers so many requests of a soak, 16 at once; and the first `keep` jobs.

    known_bytes: of texts that it keeps. full: whether so many are sent before the first count.
    """
    tokenizer, limits = Tokenizer.open(folder), Limits(known_bytes=known_bytes)
    engine = FreeAnswers(tokenizer.encode_with_specials(f"{SAID}<|im_end|>"), keep)
    gateway = Gateway(tokenizer, style_of(folder), Metrics(folder.name), limits)
    engine.serve(gateway)
    config = ApiConfig(served_model_names=(folder.name,), local=True, limits=limits)
    server = Server(uvicorn_config(create_app(gateway, config), limits, "127.0.0.1", 0))
    asked, sent, rows = source(0), 0, list[dict[str, float]]()

    async def client(port: int, until: int) -> None:
        nonlocal sent
        while sent < until:
            sent += 1
            request = next(asked)
            await ask(port, request.data, **request.how)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        port = listener.getsockname()[1]
        for body in too_long(known_bytes, CONTEXT) if full else ():
            await ask(port, post(CHAT, body))
        for until in marks(requests):
            await asyncio.gather(*(client(port, until) for _ in range(16)))
            await asyncio.sleep(0.3)  # for what clients have left to end
            rows.append(counted(until))
        rows.append(trimmed(requests))
        server.should_exit = True
        await serving
    gateway.close()
    await gateway.ended()
    return rows, engine.jobs


def marks(most: int) -> list[int]:
    """ROWS numbers at even distances, of which the last is `most`."""
    return [most * row // ROWS for row in range(1, ROWS + 1)]


def engine(config: EngineConfig, folder: Path, jobs: Sequence[Job], most: int) -> list[dict[str, float]]:
    """Counts while an engine of this process runs `most` of the jobs, over and over, JOBS at once."""
    core = EngineCore.load(folder, config)
    core.runner.kv.planes.zero_()  # every page is touched
    coming, live, ended, rows = _again(jobs), dict[JobId, int](), 0, list[dict[str, float]]()
    chance, flight = random.Random(0), None

    def told(deltas: Iterable[Delta]) -> int:
        return sum(live.pop(delta.job, None) is not None for delta in deltas if delta.finish is not None)

    try:
        with torch.inference_mode():
            for until in marks(most):
                while ended < until:
                    while len(live) < JOBS:
                        job = next(coming)
                        live[job.id] = chance.randint(1, 30) if chance.random() < ABORTED else 0
                        ended += told(core.planner.submit(job))
                    flight, deltas = _turn(core, flight)
                    ended += told(deltas)
                    for id in [id for id, turns in live.items() if turns]:
                        live[id] -= 1
                        if not live[id]:
                            ended += told(core.planner.abort(id))
                            live.pop(id, None)
                rows.append(counted(until))
            rows.append(trimmed(most))
            for id in list(live):
                core.planner.abort(id)
            while flight is not None or not core.planner.idle:
                flight, _ = _turn(core, flight)
            core.planner.check()
    finally:
        core.runner.close()
    return rows


def _turn(core: EngineCore, flight: StepInFlight | None) -> tuple[StepInFlight | None, list[Delta]]:
    return turn(core.planner, core.runner, flight)


def _again(jobs: Sequence[Job]) -> Iterator[Job]:
    for number, job in enumerate(cycle(jobs)):
        yield msgspec.structs.replace(job, id=JobId(f"{number}"))


def per_1000(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """How much each count of the second half grows per 1,000 requests; the last row, which is trimmed, is left out."""
    first, last = rows[ROWS // 2 - 1], rows[ROWS - 1]
    thousands = (last["after"] - first["after"]) / 1000
    return {name: round((last[name] - first[name]) / thousands, 2) for name in last if name != "after"}


def main(words: Sequence[str] | None = None) -> int:
    """Runs the program with `words` in place of the command line's; writes JSON. Raises RedlineError for no model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=Path("models/kimi-nano"))
    parser.add_argument("--requests", type=count, default=12_000, help="of each run of the API")
    parser.add_argument("--jobs", type=count, default=3000, help="of the engine")
    parser.add_argument("--kv-memory", type=count, default=1_000_000_000, help="bytes of its pages")
    parser.add_argument("--known-bytes", type=count, default=Limits().known_bytes, help="of texts that the API keeps")
    parser.add_argument("--api", action="store_true", help="the API alone")
    parser.add_argument("--save", type=output, default="runs/growth.json")
    asked = parser.parse_args(words)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit(), hard_limit()))
    logging.getLogger("redline").setLevel(logging.CRITICAL)
    parts: dict[str, list[dict[str, float]]] = {}

    def note(name: str, rows: list[dict[str, float]]) -> None:
        parts[name] = rows
        for row in rows:
            print(name, "  ".join(f"{key} {value:,}" for key, value in row.items()), flush=True)

    began = clock.monotonic()
    rows, jobs = uvloop.run(api(asked.model, asked.requests, asked.known_bytes, asked.jobs))
    note("api", rows)
    note("api, few texts known", uvloop.run(api(asked.model, asked.requests, SMALL))[0])
    draft = Path(f"{str(asked.model).rstrip('/')}-eagle3")
    speculation = Learned(drafter=str(draft)) if draft.is_dir() else None
    config = EngineConfig(device="cpu", kv_memory=asked.kv_memory, speculation=speculation)
    note("api, texts full", uvloop.run(api(asked.model, asked.requests, asked.known_bytes, full=True))[0])
    if not asked.api:
        note("engine", engine(config, asked.model, jobs, asked.jobs))
    record: dict[str, Any] = {
        **provenance("torch", "uvicorn", "uvloop", "msgspec", "llguidance"),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "model": asked.model.name,
        "seconds": round(clock.monotonic() - began),
        "per_1000_over_the_second_half": {name: per_1000(rows) for name, rows in parts.items()},
        "counts": parts,
    }
    asked.save.write_text(json.dumps(record, indent=1) + "\n")
    for name, grown in record["per_1000_over_the_second_half"].items():
        print(f"{name}: per 1,000 over the second half {grown}")
    return 0


if __name__ == "__main__":
    program(main)
