"""KV transfers from one GPU to another while the second one generates answers: Kimi's widths, random weights.

    python -m lab.pools_gpus --save benchmarks/results/pools-gpus.json

This command is for two GPUs of 80 GB, and ends within 200 s. `--transport nixl` is the same over NIXL, from GPU to GPU
if it supports their memory. `--devices 0 0` uses one GPU for both; `--smoke` is Kimi-Nano from its files with short
prompts, also on a CPU, to test the sequence. `--ranks 2 2 --devices 0 2` gives each worker two GPUs, starting at these
numbers, and pages pass through the host's memory; different numbers of ranks need `--smoke`, since random weights
depend on the number of ranks. The file is rewritten after each part, and each worker's log is next to it
(`.prefill.log`, `.decode.log`); the logs contain the path of KV transfers, and why no better one is used.

1. pieces: `peer_pieces`, in a separate process: GB/s by chunk size, compared with plain copies of the same bytes.
2. Two workers as `redline serve` starts them, a prefill worker and a decode worker; this program takes the gateway's
place.
3. alone: milliseconds to the first token of a prompt, computed by the decode worker (`local`), computed and answered by
the prefill worker (`there`: it has other GPUs, which may have another speed), transferred (`handed`), and the last two
once more with all but the last page cached on the prefill worker (`there_cached`, `handed_cached`). The part of a
transfer not hidden behind the prompt is `handed - there`; `handed_cached - there_cached` is the part not hidden behind
one page's step, if layers are sent during the step, and otherwise (on a CPU) the whole transfer. Each prompt follows a
pause, since a GPU that has just computed a prompt takes several per cent longer for the next.
4. beside: streams decode; windows without prompts, with prompts in sequence, and with prompts that are cached on the
prefill worker, so that only their pages arrive, one window after the other and in reverse order. A step is the time
between two tokens of a stream.
5. answers: greedy tokens of transferred prompts, compared with those of the same prompts computed locally. Each runs
alone, since the experts of random weights depend on a token's position in its step.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import torch

from lab.full_depth import write_folder
from lab.program import count, output, program
from lab.trees import ROOT
from redline import clock
from redline.bench.record import provenance
from redline.chat.page_hashes import page_hashes
from redline.errors import ConfigError, RedlineError
from redline.messages.channel import SocketInbox, SocketOutbox, ipc_address
from redline.messages.delta import Delta
from redline.messages.handoff import Prefill
from redline.messages.job import Abort, Job, JobId, PagesFrom, Sampling
from redline.messages.news import Failed, Load, Ready, Role, Stop
from redline.model.k2.config import K2Config
from redline.model.k2.shapes import shape
from redline.transport.choice import TransportName
from redline.worker.config import EngineConfig, WorkerConfig

WORKER = sys.executable, "-m", "redline.worker.main"
STREAM = 16384  # tokens of a stream, enough to last for all windows
LOAD_S = 120.0  # timeout for both workers to be ready
ANSWER_S = 60.0  # timeout of one answer
STOP_S = 10.0
REST_S = 1.5  # before each prompt of `alone`
NEAR = 0.05  # nats between the two most likely tokens: if closer, rounding may decide


class Asked(NamedTuple):
    """The parameters of the run, from its flags."""

    weights: Path | None  # None: random weights of a shape
    config: K2Config
    in_memory: int | None
    device: str
    devices: tuple[int, int]
    ranks: tuple[int, int]
    transport: TransportName
    prompt: int
    streams: int
    stream_prompt: int
    times: int
    answers: int
    tokens: int
    window_s: float
    turns: int
    rest_s: float = 0.0  # before each prompt of `alone`


class Worker:
    """One worker's process, and its messages."""

    def __init__(self, name: Role, asked: Asked, weights: Path, folder: Path, parcels: Path, log: Path) -> None:
        self.name, self.log = name, log
        self.ready: Ready | None = None
        self.failed: str | None = None
        self.load: Load | None = None
        self._came = threading.Condition()
        self._deltas: dict[str, list[tuple[float, Delta]]] = {}
        self._inbox = SocketInbox(ipc_address(folder, f"{name}.deltas"))
        self.address = ipc_address(folder, f"{name}.jobs")
        self._outbox = SocketOutbox(self.address)
        longest = max(asked.prompt, asked.stream_prompt + STREAM) + 256
        tokens = 4 * asked.prompt + asked.streams * (asked.stream_prompt + STREAM)
        place = 0 if name == "prefill" else 1
        engine = EngineConfig(
            kv_memory=tokens * asked.config.kv_bytes_per_token(torch.bfloat16),
            max_model_len=longest,
            max_running=max(8, asked.streams),
            device=asked.device,
            ranks=asked.ranks[place],
            random_weights=asked.in_memory,
        )
        config = WorkerConfig(
            weights=str(weights),
            engine=engine,
            inbox=self.address,
            outbox=self._inbox.address,
            name=name,
            role=name,
            transport=asked.transport,
            parcels=str(parcels),
        )
        environment = {**os.environ, "REDLINE_LOG": "INFO"}
        if asked.device == "cuda":
            devices = range(asked.devices[place], asked.devices[place] + asked.ranks[place])
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        with log.open("wb") as file:
            self._process = subprocess.Popen(WORKER, stdin=subprocess.PIPE, stderr=file, env=environment)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(config) + b"\n")
        self._process.stdin.flush()
        self._thread = threading.Thread(target=self._listen, name=name, daemon=True)
        self._ended = False
        self._thread.start()

    def _listen(self) -> None:
        while not self._ended:
            messages = self._inbox.drain(wait=True, timeout=0.2)
            at = clock.perf_counter()
            with self._came:
                for message in messages:
                    match message:
                        case Delta():
                            self._deltas.setdefault(message.job, []).append((at, message))
                        case Ready():
                            self.ready = message
                        case Failed():
                            self.failed = message.reason
                        case Load():
                            self.load = message
                        case _:
                            pass
                if self._process.poll() is not None and self.failed is None:
                    self.failed = f"it has ended with code {self._process.returncode}"
                self._came.notify_all()

    def until(self, what: str, seconds: float, there: Callable[[], bool]) -> None:
        """Waits until `there` is true. Raises RedlineError if the worker fails first, or at the timeout."""
        with self._came:
            came = self._came.wait_for(lambda: self.failed is not None or there(), seconds)
        if self.failed is not None or not came:
            last = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            why = self.failed or f"no {what} in {seconds:g} s"
            raise RedlineError(f"the worker {self.name}: {why}; the end of {self.log}:\n{last}")

    def put(self, message: Job | Prefill | Abort | Stop) -> None:
        """Sends a message, as a gateway does."""
        self._outbox.put(message)

    def is_ready(self) -> bool:
        """Whether it is loaded. For `until`."""
        return self.ready is not None

    def parts(self, id: str) -> list[tuple[float, Delta]]:
        """The deltas received for a job: (seconds, delta)."""
        with self._came:
            return list(self._deltas.get(id, ()))

    def has(self, id: str, count: int) -> bool:
        """Whether `count` deltas of a job have been received. For `until`."""
        return len(self._deltas.get(id, ())) >= count

    def ended(self, id: str) -> bool:
        """Whether a job's last delta has been received. For `until`."""
        parts = self._deltas.get(id, ())
        return bool(parts) and parts[-1][1].finish is not None

    def ways(self) -> list[str]:
        """Lines of its log about the path of KV transfers."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if "travel" in line or "way" in line]

    def close(self) -> int | None:
        """Sends Stop, and waits; kills the process if it does not end. -> its exit code, -9 if killed."""
        self.put(Stop())
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._ended = True
        self._thread.join(5.0)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._outbox.close()
        self._inbox.close()
        return self._process.returncode


class Answer(NamedTuple):
    """The answer to a job."""

    first_ms: float
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]  # nats between the two most likely tokens at each token, if requested
    cached: int  # cached tokens of its prompt


class Pools:
    """Both workers, as seen by a gateway."""

    def __init__(self, computes: Worker, answers: Worker) -> None:
        self.computes, self.answers = computes, answers
        self._numbers = itertools.count()

    def other(self, worker: Worker) -> PagesFrom:
        """The address of the other worker, for `worker`."""
        ready = worker.ready
        assert ready is not None
        return PagesFrom(worker=worker.name, epoch=1, inbox=worker.address, area=ready.area, format=ready.format)

    def job(self, tokens: Sequence[int], most: int, salt: str, logprobs: int | None = None) -> Job:
        """A greedy job. salt: jobs with another salt share no cached page with it."""
        ready = self.answers.ready
        assert ready is not None
        sampling = Sampling(max_tokens=most, temperature=0.0, logprobs=logprobs)
        pages = page_hashes(tuple(tokens), salt, ready.fingerprint)
        return Job(id=JobId(f"job-{next(self._numbers)}"), tokens=tuple(tokens), pages=pages, sampling=sampling)

    def ask(self, job: Job, *, handed: bool = False, by: Worker | None = None) -> Answer:
        """Sends a job and waits for its end.

        handed: its prompt is computed by the prefill worker, and answered by the decode worker, which has none of it
        cached. by: the worker that does both otherwise; None: the decode worker.
        """
        worker, ready = self.answers if handed or by is None else by, self.answers.ready
        assert ready is not None
        there, prefill = job, Prefill(job=job, to=self.other(self.answers))
        if handed:
            fresh = page_hashes(job.tokens, f"{job.id} there", ready.fingerprint)
            there = msgspec.structs.replace(job, pages=fresh, pages_from=self.other(self.computes))
        began = clock.perf_counter()
        worker.put(there)
        if handed:
            self.computes.put(prefill)
        worker.until(f"end of {job.id}", ANSWER_S, functools.partial(worker.ended, job.id))
        parts = worker.parts(job.id)
        if parts[-1][1].finish not in ("length", "stop"):
            raise RedlineError(f"the worker {worker.name} gave no answer to {job.id}: {parts[-1][1].error}")
        tokens = tuple(token for _, delta in parts for token in delta.tokens)
        scored = [one for _, delta in parts for one in delta.logprobs]
        gaps = tuple(one.top[0][1] - one.top[1][1] if len(one.top) > 1 else 0.0 for one in scored)
        first = next(at for at, delta in parts if delta.tokens)
        return Answer(1000 * (first - began), tokens, gaps, parts[-1][1].cached_tokens)


class Prompts:
    """Prompts in sequence, each sent once the previous one has its first token. Use as a context manager."""

    def __init__(self, ask: Callable[[], float], ttft_ms: list[float]) -> None:
        """ask: sends one and returns milliseconds to its first token, which are appended to ttft_ms."""
        self._stopping = threading.Event()
        self._failed: Exception | None = None

        def send() -> None:
            try:
                while not self._stopping.is_set():
                    ttft_ms.append(ask())
            except (OSError, RedlineError) as error:
                self._failed = error

        self._thread = threading.Thread(target=send, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(ANSWER_S)
        if self._failed is not None:
            raise self._failed


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, the mean, the 99th percentile, the largest, and the number of values."""
    if not values:
        return {"count": 0}
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 3),
        "mean": round(statistics.fmean(ordered), 3),
        "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3),
        "most": round(ordered[-1], 3),
        "count": len(ordered),
    }


def alone(pools: Pools, draw: Callable[[int], list[int]], asked: Asked) -> dict[str, Any]:
    """First tokens without other load."""
    times: dict[str, list[float]] = {kind: [] for kind in ("local", "there", "handed", "there_cached", "handed_cached")}
    cached: dict[str, list[int]] = {kind: [] for kind in times}
    for number in range(asked.times):
        tokens, salt = draw(asked.prompt), f"alone {number}"
        whole = [("local", f"{salt} local"), ("there", f"{salt} there"), ("handed", salt)]
        for kind, name in (*(whole if number % 2 else whole[::-1]), ("there_cached", salt), ("handed_cached", salt)):
            clock.sleep(asked.rest_s)
            by = pools.computes if kind.startswith("there") else None
            answer = pools.ask(pools.job(tokens, 1, name), handed=kind.startswith("handed"), by=by)
            times[kind].append(answer.first_ms)
            cached[kind].append(answer.cached)
    middle = {kind: statistics.median(each) for kind, each in times.items()}
    size = asked.prompt * asked.config.kv_bytes_per_token(torch.bfloat16)
    behind_a_page, not_hidden = middle["handed_cached"] - middle["there_cached"], middle["handed"] - middle["there"]
    return {
        "first_token_ms": {kind: spread(each) for kind, each in times.items()},
        "cached_tokens": cached,
        "prompt_bytes": size,
        "not_hidden_behind_a_page_ms": round(behind_a_page, 3),
        "not_hidden_ms": round(not_hidden, 3),
        "not_hidden_over_first_token": round(not_hidden / middle["there"], 4),
    }


def answers(pools: Pools, draw: Callable[[int], list[int]], asked: Asked) -> dict[str, Any]:
    """Greedy tokens, of transferred and of local prompts."""
    equal, parted = 0, list[dict[str, Any]]()
    for number in range(asked.answers):
        tokens = draw(asked.prompt - 7 * number)  # most lengths end within a page
        there = pools.ask(pools.job(tokens, asked.tokens, f"answers {number}", logprobs=2), handed=True)
        here = pools.ask(pools.job(tokens, asked.tokens, f"answers {number} local", logprobs=2))
        if there.tokens == here.tokens:
            equal += 1
            continue
        at = next(i for i, (a, b) in enumerate(zip(there.tokens, here.tokens, strict=True)) if a != b)
        gap = here.gaps[at] if at < len(here.gaps) else None
        parted.append({"prompt": number, "at": at, "gap_nats": gap, "near": gap is not None and abs(gap) < NEAR})
    return {"asked": asked.answers, "tokens_each": asked.tokens, "equal": equal, "parted": parted}


def beside(pools: Pools, draw: Callable[[int], list[int]], asked: Asked, turns: int) -> dict[str, Any]:
    """Steps of streams, with and without arriving pages."""
    streams = [pools.job(draw(asked.stream_prompt), STREAM, f"stream {i}") for i in range(asked.streams)]
    for job in streams:
        pools.answers.put(job)
    worker = pools.answers
    for job in streams:
        worker.until(f"tokens of {job.id}", ANSWER_S, functools.partial(worker.has, job.id, 8))
    repeated = draw(asked.prompt)
    pools.ask(pools.job(repeated, 1, "repeated"), handed=True)  # cached on the prefill worker from now on
    first_ms: dict[str, list[float]] = {"prompts": [], "pages": []}
    windows: list[tuple[str, float, float]] = []
    kinds: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
        "nothing": contextlib.nullcontext,
        "prompts": lambda: Prompts(
            lambda: pools.ask(pools.job(draw(asked.prompt), 1, f"{clock.now_ns()}"), handed=True).first_ms,
            first_ms["prompts"],
        ),
        "pages": lambda: Prompts(
            lambda: pools.ask(pools.job(repeated, 1, "repeated"), handed=True).first_ms, first_ms["pages"]
        ),
    }
    order = ["nothing", "prompts", "pages", "pages", "prompts", "nothing"]
    for kind in order * turns:
        with kinds[kind]():
            began = clock.perf_counter()
            clock.sleep(asked.window_s)
            windows.append((kind, began, clock.perf_counter()))
    steps: dict[str, list[float]] = {kind: [] for kind in kinds}
    over: list[str] = []
    for job in streams:
        parts = worker.parts(job.id)
        if parts[-1][1].finish is not None:
            over.append(job.id)
        for (before, _), (at, _) in itertools.pairwise(parts):
            for kind, began, ended in windows:
                if began <= before and at <= ended:
                    steps[kind].append(1000 * (at - before))
        pools.answers.put(Abort(job=job.id))
    for job in streams:
        worker.until(f"end of {job.id}", ANSWER_S, functools.partial(worker.ended, job.id))
    found = {kind: spread(each) for kind, each in steps.items()}
    base = found["nothing"]
    size = asked.prompt * asked.config.kv_bytes_per_token(torch.bfloat16)
    lasted = {kind: sum(ended - began for each, began, ended in windows if each == kind) for kind in kinds}
    return {
        "streams": asked.streams,
        "windows": len(windows),
        "step_ms": found,
        "over_nothing": {
            kind: {of: round(found[kind][of] / base[of], 4) for of in ("p50", "mean", "p99")}
            for kind in ("prompts", "pages")
            if found[kind]["count"] and base["count"]
        },
        "first_token_ms": {kind: spread(each) for kind, each in first_ms.items()},
        "came_gb_s": {kind: round(len(each) * size / lasted[kind] / 1e9, 3) for kind, each in first_ms.items()},
        "streams_that_ended_early": over,
    }


def pieces(asked: Asked, save: Path) -> dict[str, Any]:
    """The results of `peer_pieces`; an error is recorded in their place."""
    command = [sys.executable, "-m", "lab.peer_pieces", "--device", asked.device]
    command += ["--devices", *map(str, asked.devices), "--transport", asked.transport, "--save", str(save)]
    if asked.device == "cpu":
        command += ["--layers", "4", "--pages", "64", "--mib", "1", "4"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
    except subprocess.TimeoutExpired:
        return {"error": "it took longer than 60 s"}
    if done.returncode:
        return {"error": done.stderr.strip()[-3000:]}
    return json.loads(save.read_text())


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=output, required=True, help="a JSON file")
    parser.add_argument("--smoke", action="store_true", help="Kimi-Nano, short prompts, on the available device")
    parser.add_argument("--shape", default="kimi-k2.6")
    parser.add_argument("--layers", type=count, default=12, help="of the model")
    parser.add_argument("--in-memory", type=count, default=4, help="layers in memory; all others reuse them")
    parser.add_argument(
        "--devices", type=int, nargs=2, default=[0, 1], help="first device of the prefill worker, of the decode worker"
    )
    parser.add_argument(
        "--ranks", type=int, nargs=2, default=[1, 1], help="ranks of the prefill worker, of the decode worker"
    )
    parser.add_argument("--transport", choices=get_args(TransportName), default="peer")
    parser.add_argument("--prompt", type=count, default=8192, help="tokens")
    parser.add_argument("--streams", type=count, default=8)
    parser.add_argument("--window", type=float, default=3.0, help="seconds of one window with streams")
    parser.add_argument("--turns", type=count, default=2, help="of six windows each")
    parser.add_argument(
        "--seconds", type=float, default=190.0, help="time limit; parts are shortened or left out beyond it"
    )
    parser.add_argument("--skip-pieces", action="store_true")
    return parser


def asked_of(said: Sequence[str] | None) -> tuple[Asked, argparse.Namespace]:
    """The parameters given by the flags."""
    given = arguments().parse_args(said)
    devices, ranks = (given.devices[0], given.devices[1]), (given.ranks[0], given.ranks[1])
    if ranks[0] != ranks[1] and not given.smoke:
        raise ConfigError(f"--ranks is {ranks[0]} {ranks[1]}: with random weights both workers have as many")
    if given.smoke:
        nano = ROOT / "models" / "kimi-nano"
        device = "cuda" if torch.cuda.is_available() else "cpu"
        devices = (0, 0) if torch.cuda.device_count() == 1 and ranks == (1, 1) else devices
        config = K2Config.from_folder(nano)
        small = {"prompt": 640, "streams": 2, "stream_prompt": 64, "times": 2, "answers": 2, "tokens": 8}
        return Asked(nano, config, None, device, devices, ranks, given.transport, **small, window_s=1.0, turns=1), given
    config = replace(shape(given.shape), num_hidden_layers=given.layers)
    full = {
        "prompt": given.prompt,
        "streams": given.streams,
        "stream_prompt": 1024,
        "times": 5,
        "answers": 6,
        "tokens": 24,
    }
    how = {"window_s": given.window, "turns": given.turns}
    of = None, config, given.in_memory, "cuda", devices, ranks, given.transport
    return Asked(*of, **full, **how, rest_s=REST_S), given


def main(said: Sequence[str] | None = None) -> None:
    """Runs the program with `said` instead of the command line's words, and writes JSON after each part.

    Raises RedlineError if a worker fails, or an answer does not arrive.
    """
    asked, given = asked_of(said)
    began = clock.monotonic()
    record: dict[str, Any] = {
        **provenance("torch", "triton", "nixl"),
        "shape": "kimi-nano" if asked.weights else given.shape,
        "layers": asked.config.num_hidden_layers,
        "layers_in_memory": asked.in_memory,
        "prompt_tokens": asked.prompt,
        "transport": asked.transport,
        "devices": asked.devices,
        "ranks": asked.ranks,
    }

    def keep(part: str, value: Any) -> None:
        record[part] = value
        record["seconds"] = round(clock.monotonic() - began, 1)
        given.save.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{record['seconds']} s, {part}: {json.dumps(value)}", flush=True)

    if not given.skip_pieces:
        keep("pieces", pieces(asked, given.save.with_suffix(".pieces.json")))

    def end(worker: Worker) -> None:
        keep(f"{worker.name} ended", worker.close())

    drawn = random.Random(1)

    def draw(length: int) -> list[int]:
        return [drawn.randrange(300, asked.config.vocab_size // 2) for _ in range(length)]

    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="redline-pools-")))
        weights = asked.weights
        if weights is None:
            weights = folder / "weights"
            write_folder(asked.config, weights)
        parcels = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="redline-parcels-", dir="/dev/shm")))
        roles: tuple[Role, Role] = ("prefill", "decode")
        workers: list[Worker] = []
        for role in roles:
            log = given.save.with_suffix(f".{role}.log")
            workers.append(Worker(role, asked, weights, folder / "run", parcels, log))
            opened.callback(end, workers[-1])
        for worker in workers:
            worker.until("Ready", LOAD_S, worker.is_ready)
        pools = Pools(*workers)
        keep("workers", [worker.ready.summary for worker in workers if worker.ready is not None])
        for _ in range(2):  # compiles kernels, and uses all shapes once
            tokens = draw(asked.prompt)
            pools.ask(pools.job(tokens, 4, "warm", logprobs=2))
            pools.ask(pools.job(tokens, 4, "warm", logprobs=2), by=pools.computes)
            pools.ask(pools.job(draw(asked.prompt), 4, "warm", logprobs=2), handed=True)
        keep("ways", workers[1].ways())
        keep("alone", alone(pools, draw, asked))
        left_s = given.seconds - (clock.monotonic() - began) - 20
        turns = max(1, min(asked.turns, int(left_s / (6 * asked.window_s))))
        keep("beside", beside(pools, draw, asked, turns))
        if clock.monotonic() - began < given.seconds - 20:
            keep("answers", answers(pools, draw, asked))
        clock.sleep(0.5)  # waits for the last Load
        keep("handoffs", {worker.name: dict(worker.load.handoffs) for worker in workers if worker.load is not None})


if __name__ == "__main__":
    program(main)
