"""The effect of one client's requests on a bystander: pauses of its stream, and memory that is not released.

    python -m lab.bystander [--list] [--only NAME ...] [--requests 5000] [--seed N]
        [--tree FOLDER] [--save FILE]

Serves a model with its drafter as `make serve` does, with two streams that are read all the time (`watch.py`), and
sends the list of attacks (`attacks.py`), one at a time, and then thousands of random requests (`random_requests.py`).
Before, between and after them are phases without an attack, and one in which normal clients saturate the engine: the
figures of attacks are meaningful only compared with these. After each attack a greedy question must get the answer that
it got before. At the end the server is asked to stop (SIGTERM) while silent sockets and unread streams are open.

`--tree` serves another copy of the project, of any commit: only `redline serve` and HTTP are used of it.
"""

import argparse
import asyncio
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lab.attack.attacks import ATTACKS, CHAT, COMPLETIONS, TOKENIZE, Attack, World, body, silent, unread
from lab.attack.random_requests import Request, requests
from lab.attack.raw_http import Reply, ask, get, post
from lab.attack.watch import Notes, Pauses, joined, notes_of, read
from lab.program import output, program
from lab.trees import END_S, ROOT, Server, Tree, commit_of, ended_by_a_signal, hard_limit
from redline import clock
from redline.api.config import Limits
from redline.bench.record import provenance

LIMIT_MS = 100.0  # the longest permitted pause
CALM_S = 90.0  # seconds within which the jobs left by an attack must end in the engine
ANSWER_S = 120.0  # seconds until a random request must be answered
OVERLOADED = (503, 529)  # statuses of an overloaded server, in each dialect
SAY_S = 10.0
TAKE_S = 2.0  # seconds; records are taken often, since a large transfer delays the bystander
QUESTION = body(prompt="The capital of France is", max_tokens=24, temperature=0, ignore_eos=True)
PROMPT = 4000  # tokens of a prompt that touches pages
TEXT = 1200  # characters
ID_BYTES = 4  # bytes of memory per token id that is kept
ANSWER = 4000  # maximum tokens of an answer of the bystander
POLITE_TOKENS = 6000  # tokens of each long prompt of a normal client


class Sample(NamedTuple):
    """Resident bytes of both processes. seconds: since sampling began. requests: random requests sent so far."""

    seconds: float
    requests: int
    api: int
    worker: int


class Memory:
    """Resident bytes of both processes, every second, with the number of random requests sent so far.

    Sampling begins in a separate thread at construction. api, worker: their process ids.
    """

    def __init__(self, api: int, worker: int) -> None:
        self.samples: list[Sample] = []
        self.requests = 0
        self._pids = api, worker
        self._began = clock.monotonic()
        self._done = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._done.wait(1.0):
            try:
                api, worker = (_resident(pid) for pid in self._pids)
            except OSError:
                return  # one of the processes has ended
            self.samples.append(Sample(round(clock.monotonic() - self._began, 1), self.requests, api, worker))

    def now(self) -> tuple[int, int]:
        """Resident bytes of the API and of the worker at the last sample; zeros before the first one."""
        return self.samples[-1][2:] if self.samples else (0, 0)

    def close(self) -> None:
        """Ends the sampling; the samples are kept."""
        self._done.set()


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the least-squares line through the points (x, y); 0 if all x are equal."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


class Watch:
    """The bystander's process, `watch.py`. port, pid: of the server. token, length: of its forced streams."""

    def __init__(self, port: int, pid: int, token: int, length: int) -> None:
        told = map(str, (port, pid, token, length))
        command = [sys.executable, "-m", "lab.attack.watch", *told]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def take(self) -> Notes:
        """The records since the last call. Waits for the process, and delays its reading a little."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("take\n")
        self._process.stdin.flush()
        return notes_of(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """Kills the process; records that were not taken are lost."""
        self._process.kill()
        self._process.communicate()


class Phase(NamedTuple):
    """One attack, or a time without one, and the bystander's figures.

    seconds: until all requests had ended. replies: how many of each kind. preempted: jobs that were pre-empted by older
    ones. calm_s: seconds until the engine had ended the jobs left by the phase; None: not within CALM_S. right: whether
    a greedy answer is unchanged. mib: resident, of API and worker.
    """

    name: str
    item: str
    what: str
    seconds: float
    pauses: Pauses
    replies: dict[str, int]
    preempted: int
    calm_s: float | None
    right: bool
    mib: tuple[int, int]

    def row(self) -> dict[str, Any]:
        """The phase in JSON types; pauses are in milliseconds."""
        pauses = {
            name: value._asdict() if hasattr(value, "_asdict") else value
            for name, value in self.pauses._asdict().items()
        }
        return {**self._asdict(), "pauses": pauses, "mib": list(self.mib)}

    def line(self) -> str:
        """The phase as one line for a terminal."""
        pauses = self.pauses
        replies = " ".join(f"{kind}:{count}" for kind, count in sorted(self.replies.items()))
        return (
            f"{self.name:20} {self.seconds:5.1f} s  beyond {pauses.beyond:8.1f} ms  knock p99 {pauses.knock.p99:7.1f}"
            f" max {pauses.knock.most:8.1f}"
            f"  left out {pauses.left_out:7.1f}  engine {pauses.engine:7.1f}  gap p50 {pauses.gap.p50:6.1f}"
            f" p99 {pauses.gap.p99:7.1f} max {pauses.gap.most:8.1f}  MiB {self.mib[0]} {self.mib[1]}  {replies}"
            f"{f'  refused {pauses.refused}' if pauses.refused else ''}"
            f"{f'  pre-empted {self.preempted}' if self.preempted else ''}"
            f"{'' if self.right else '  ANSWERS WRONGLY'}{'' if self.calm_s is not None else '  NEVER CALM'}"
        )


class Bench:
    """One server, its bystander, and their phases.

    model: the model's name in the record. say: called with a line for each phase. Raises RedlineError if the server
    does not start.
    """

    def __init__(self, server: Server, model: str, say: Callable[[str], None]) -> None:
        self._server = server
        self._say = say
        self._model = model
        self.port = server.until_ready()
        self.memory = Memory(server.process.pid, server.worker)
        self.phases: list[Phase] = []
        self.odd: list[dict[str, str]] = []  # answers that no client should get
        self.doing = "start"

    async def open(self, kv_tokens: int, known_bytes: int) -> None:
        """Looks up data for the attacks, fills caches that fill only once, and starts the bystander.

        kv_tokens: tokens that are prefilled so that every page is written once. known_bytes: size of the API's cache of
        texts with their ids (`chat.known`); this many are sent. Raises SystemExit if the server does not answer one of
        these requests correctly.
        """
        models = json.loads((await self._whole(get("/v1/models"))).body)
        (token,) = await self._ids(" the")
        (blank,) = await self._ids("\n")
        context = models["data"][0]["max_model_len"]
        self.world = World(self.port, token, blank, context)
        for request in fresh_prompts(kv_tokens, context):
            await self._whole(post(COMPLETIONS, request))
        for request in too_long(known_bytes, context):
            await self._refused(post(CHAT, request))
        self.truth = (await self._whole(post(COMPLETIONS, QUESTION))).body
        self.watch = Watch(self.port, self._server.process.pid, token, min(ANSWER, context // 4))
        await asyncio.sleep(2)

    async def control(self, name: str, seconds: float) -> None:
        """A phase of `seconds` in which only the bystander sends requests."""
        await self._phase(name, "control", "nobody else", lambda: asyncio.sleep(seconds))

    async def polite(self, seconds: float) -> None:
        """Eight clients with long prompts and eight with long answers, for `seconds`."""
        chance = random.Random(1)
        size = min(POLITE_TOKENS, self.world.context // 2)
        deadline = clock.monotonic() + seconds

        async def client(prompt_tokens: int, new: int) -> None:
            while clock.monotonic() < deadline:
                prompt = [chance.randrange(3000) for _ in range(prompt_tokens)]
                asked = {"prompt": prompt, "max_tokens": new, "stream": True}
                await self.world.send(post(COMPLETIONS, body(**asked)), keep=1 << 12)

        async def fire() -> None:
            await asyncio.gather(*(client(size, 8) for _ in range(8)), *(client(20, 200) for _ in range(8)))

        await self._phase("polite", "control", f"16 clients, prompts of {size} tokens among them", fire)

    async def attack(self, attack: Attack, most_s: float) -> None:
        """Builds and fires one attack; requests that have not ended after `most_s` seconds are
        aborted, and counted so.
        """
        fire = attack.prepare(self.world)

        async def bounded() -> None:
            try:
                async with asyncio.timeout(most_s):
                    await fire()
            except TimeoutError:
                self.world.tally["cut short"] += 1

        await self._phase(attack.name, attack.item, attack.what, bounded)

    async def random(self, count: int, seed: int, most_s: float, at_once: int, *, wild: bool = True) -> dict[str, Any]:
        """Sends `count` random requests, or fewer if `most_s` seconds are over, `at_once` at a time.

        wild: as in `random_requests.requests`; if false, the phase is called "ordinary". Returns as `traffic` does.
        """
        name = "random" if wild else "ordinary"
        return {"seed": seed, **await self.traffic(name, requests(seed, wild=wild), count, most_s, at_once)}

    async def traffic(
        self, name: str, source: Iterator[Request], count: int, most_s: float, at_once: int, every_s: float = 0.0
    ) -> dict[str, Any]:
        """A phase of `count` requests from `source`, or fewer if `most_s` seconds are over, `at_once` at a time.

        every_s: minimum seconds from the start of one request to that of the next. Returns the number sent, the counts
        by route and kind of reply, and the answers that no client should get.
        """
        began = clock.monotonic()
        sent = 0
        by_route: Counter[str] = Counter()

        async def client() -> None:
            nonlocal sent
            while sent < count and clock.monotonic() < began + most_s:
                sent += 1
                self.memory.requests += 1
                self.doing = f"{name} request {sent} of {count}"
                request = next(source)
                await asyncio.sleep(began + sent * every_s - clock.monotonic())
                reply = await self.world.send(request.data, **{"limit_s": ANSWER_S, **request.how})
                by_route[f"{request.route} {reply.kind}"] += 1
                self._judge(request, reply)

        async def fire() -> None:
            await asyncio.gather(*(client() for _ in range(at_once)))

        await self._phase(name, name, f"{count} {name} requests, {at_once} at once", fire)
        return {"asked": count, "sent": sent, "by_route": dict(sorted(by_route.items())), "odd": self.odd}

    async def end(self) -> dict[str, Any]:
        """Stops the server by SIGTERM while silent sockets and unread streams are open.

        Returns `End` as a dictionary; `clean` if the server ended with code 0, within END_S and without a traceback.
        """
        self.doing = "the end"
        self.watch.close()
        self.memory.close()
        async with AsyncExitStack() as stack:
            opened = await silent(self.port, 300, stack)
            reading = await unread(self.port, 50, stack)
            await asyncio.sleep(1)
            end = await asyncio.to_thread(self._server.stop)
        clean = end.code == 0 and end.seconds <= END_S and not end.tracebacks
        return {**end._asdict(), "clean": clean, "silent": opened, "unread": reading}

    async def _phase(self, name: str, item: str, what: str, fire: Callable[[], Any]) -> None:
        self.doing = name
        self.world.tally.clear()
        before = (await self._metrics()).get("num_preemptions_total", 0.0)
        self.watch.take()
        began = clock.monotonic()
        work = asyncio.ensure_future(fire())
        parts: list[Notes] = []
        while not work.done():
            await asyncio.wait({work}, timeout=TAKE_S)
            parts.append(await asyncio.to_thread(self.watch.take))
        await work
        seconds = clock.monotonic() - began
        calm = await self._calm(parts)
        parts.append(await asyncio.to_thread(self.watch.take))
        replies = dict(sorted(self.world.tally.items()))
        right = await self._answers_rightly()
        preempted = int((await self._metrics()).get("num_preemptions_total", 0.0) - before)
        api, worker = self.memory.now()
        mib = api >> 20, worker >> 20
        pauses = await asyncio.to_thread(read, joined(parts))
        self.phases.append(Phase(name, item, what, round(seconds, 1), pauses, replies, preempted, calm, right, mib))
        self._say(self.phases[-1].line())

    async def _calm(self, parts: list[Notes]) -> float | None:
        """Seconds until only the bystander's jobs run or wait."""
        began = clock.monotonic()
        while (past := clock.monotonic() - began) < CALM_S:
            metrics = await self._metrics()
            if metrics and metrics["num_requests_running"] + metrics["num_requests_waiting"] <= 2:
                return round(past, 1)
            await asyncio.sleep(0.25)
            parts.append(await asyncio.to_thread(self.watch.take))
        return None

    async def _metrics(self) -> dict[str, float]:
        reply = await ask(self.port, get("/metrics"), limit_s=CALM_S)
        return {
            name.decode(): float(value)
            for name, value in re.findall(rb"^vllm:(num_\w+)\{.*\} ([\d.]+)$", reply.body, re.MULTILINE)
        }

    async def _answers_rightly(self) -> bool:
        def said(answer: bytes) -> Any:
            return json.loads(answer)["choices"][0]["text"]

        reply = await ask(self.port, post(COMPLETIONS, QUESTION), limit_s=60)
        return reply.status == 200 and said(reply.body) == said(self.truth)

    def _judge(self, request: Request, reply: Reply) -> None:
        """Records an answer that no client should get: none at all, a server error, or one that breaks off."""
        odd = ""
        timed = reply.status == 504 and b"imeout" in request.data  # the request set this timeout
        lost = reply.outcome == "unanswered" or (reply.outcome == "closed" and request.shape != "any")
        if lost or (reply.status >= 500 and reply.status not in OVERLOADED and not timed):
            odd = reply.kind
        elif reply.status == 200 and not reply.whole and request.shape != "any":
            odd = "not whole"
        elif reply.status == 200 and request.shape == "stream" and not _ends_well(reply.body, request.route):
            odd = "a stream without its end"
        elif reply.status >= 400 and request.shape != "any" and b'"error"' not in reply.body:
            odd = f"{reply.status} without an error"
        if odd and len(self.odd) < 40:
            line = request.data.partition(b"\r\n\r\n")[2][:3000].decode(errors="replace")
            told = reply.body[-600:].decode(errors="replace")
            self.odd.append({"odd": odd, "route": request.route, "how": str(request.how), "sent": line, "told": told})

    async def _ids(self, text: str) -> list[int]:
        return json.loads((await self._whole(post(TOKENIZE, body(prompt=text)))).body)["tokens"]

    async def _whole(self, request: bytes) -> Reply:
        return await self._replied(request, 200)

    async def _refused(self, request: bytes) -> None:
        await self._replied(request, 400)

    async def _replied(self, request: bytes, status: int) -> Reply:
        reply = await ask(self.port, request, limit_s=120)
        if reply.status != status:
            raise SystemExit(f"{reply.kind}: {reply.body.decode(errors='replace')}")
        return reply


def fresh_prompts(tokens: int, context: int) -> Iterator[bytes]:
    """Bodies of completions with prompts of `tokens` ids in total, without common cached pages.

    context: maximum tokens of a prompt and its answer.
    """
    for start in range(0, tokens, PROMPT):
        chance = random.Random(start)
        prompt = [chance.randrange(3000) for _ in range(min(PROMPT, context - 2))]
        yield body(prompt=prompt, max_tokens=1)


def too_long(known_bytes: int, context: int) -> Iterator[bytes]:
    """Bodies of chat requests that are tokenised up to `context` tokens and then refused: they do not reach the engine.

    Each has new texts of the maximum size of `random_requests.text`; they and their ids are `known_bytes` or more, so
    that from then on texts are evicted for new ones.
    """
    words = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=TEXT))
    for number in range(-(-known_bytes // (ID_BYTES * context))):
        messages = [
            {"role": "user", "content": f"{number} {place} {words}"} for place in range(4 * context // TEXT + 1)
        ]
        yield body(messages=messages, max_tokens=1)


def _ends_well(stream: bytes, route: str) -> bool:
    """Whether a stream has the final event of its dialect, or an error event."""
    tail = stream[-4096:]
    if route == "/v1/messages":
        return b"event: message_stop" in tail or b"event: error" in tail
    if route == "/v1/responses":
        whole = stream.rpartition(b"\nevent: ")[2]  # the last event repeats the whole answer
        return whole.startswith((b"response.completed", b"response.incomplete", b"response.failed", b"error"))
    return tail.endswith(b"data: [DONE]\n\n") or b'data: {"error"' in tail


def memory_slopes(samples: Sequence[Sample]) -> dict[str, float]:
    """`slopes` over the second half of the requests, since the first half is the warm-up."""
    return slopes([sample for sample in samples if sample.requests > samples[-1].requests / 2])


def slopes(samples: Sequence[Sample]) -> dict[str, float]:
    """MiB per 1,000 random requests, by process. Empty if there are fewer than five samples."""
    if len(samples) < 5:
        return {}
    api, worker = (
        slope([(one.requests / 1000, size / (1 << 20)) for one, size in zip(samples, sizes, strict=True)])
        for sizes in ([one.api for one in samples], [one.worker for one in samples])
    )
    return {"api": round(api, 2), "worker": round(worker, 2)}


def draw(record: dict[str, Any], samples: Sequence[Sample], path: Path) -> None:
    """A picture at `path`: the longest pause of every phase compared with the limit, and both processes' memory."""
    import matplotlib.pyplot as plt

    phases = record["phases"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 2 + 0.2 * len(phases)), width_ratios=(3, 2))
    places = [-place for place in range(len(phases))]
    for offset, key, colour in ((0.2, "beyond", "C3"), (-0.2, "engine", "C7")):
        values = [max(phase["pauses"][key], 0.1) for phase in phases]
        left.barh([place + offset for place in places], values, 0.4, color=colour, label=key)
    left.axvline(record["limit_ms"], color="black", linewidth=1)
    left.set_xscale("log")
    left.set_yticks(places, [f"{phase['name']} ({phase['item']})" for phase in phases], fontsize=7)
    left.set_xlabel("longest pause, ms; the line is the limit")
    left.legend()
    seconds = [sample.seconds for sample in samples]
    for who, sizes in (("API", [one.api for one in samples]), ("worker", [one.worker for one in samples])):
        right.plot(seconds, [size / (1 << 20) for size in sizes], label=who)
    right.set_xlabel("seconds")
    right.set_ylabel("resident MiB")
    right.set_ylim(bottom=0)
    right.legend()
    figure.suptitle(f"{record['model']} on {record['machine']}, commit {record['commit']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


@contextmanager
def told(bench: Bench) -> Generator[None]:
    """Prints the current phase and both processes' MiB every ten seconds."""
    done = threading.Event()
    began = clock.monotonic()

    def run() -> None:
        while not done.wait(SAY_S):
            api, worker = (size >> 20 for size in bench.memory.now())
            print(f"{clock.monotonic() - began:5.0f} s: {bench.doing}; {api} and {worker} MiB", flush=True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


async def run(bench: Bench, asked: argparse.Namespace, attacks: Sequence[Attack]) -> dict[str, Any]:
    """All phases in their order, and the server's end. `asked`: the flags. Returns the record without its phases."""
    await bench.open(asked.kv_tokens, asked.known_bytes)
    await bench.control("control", asked.control)
    await bench.polite(asked.control)
    for attack in attacks:
        await bench.attack(attack, asked.attack_seconds)
    await bench.control("control, later", asked.control)
    valid = await bench.random(asked.requests, asked.seed, asked.control, asked.at_once, wild=False)
    before = len(bench.memory.samples)
    told = await bench.random(asked.requests, asked.seed, 60 * asked.minutes, asked.at_once)
    samples = bench.memory.samples[before:]
    await bench.control("control, at the end", asked.control)
    return {
        "ordinary": valid,
        "random": told,
        "mib_per_1000_requests": memory_slopes(samples),
        "end": await bench.end(),
    }


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="models/kimi-nano")
    parser.add_argument("--draft", help="its drafter's folder (default: the one next to the model, if any)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the copy of the project that is served")
    parser.add_argument("--python", default=sys.executable, help="what serves it")
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
    parser.add_argument("--list", action="store_true", help="describe the attacks, and do nothing")
    parser.add_argument("--only", action="append", help="an attack's name or item (repeatable)")
    parser.add_argument("--attack-seconds", type=float, default=45.0, help="maximum for one attack")
    parser.add_argument("--control", type=float, default=20.0, help="seconds of each phase without an attack")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--at-once", type=int, default=16, help="random requests in flight")
    parser.add_argument("--minutes", type=float, default=20.0, help="maximum for random requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=output, default="runs/bystander.json")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Runs the program with `words` instead of the command line's; writes JSON and a picture, and returns 0.

    Raises ConfigError for a --save that cannot be written, and RedlineError if the server does not start.
    """
    asked = arguments().parse_args(words)
    attacks = [one for one in ATTACKS if not asked.only or one.name in asked.only or one.item in asked.only]
    if asked.list:
        for one in attacks:
            print(f"{one.item:4} {one.name:20} {one.what}")
        return 0
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit(), hard_limit()))
    draft = asked.draft or f"{asked.model.rstrip('/')}-eagle3"
    words = [asked.model, "--kv-memory", asked.kv_memory]
    words += ["--draft", draft] if (asked.tree / draft).is_dir() else []
    with ended_by_a_signal(), tempfile.TemporaryDirectory() as folder:
        tree = Tree(str(asked.tree), asked.tree.resolve(), commit_of(asked.tree))
        server = Server(tree, words, Path(folder), asked.python)
        try:
            bench = Bench(server, Path(asked.model).name, lambda line: print(line, flush=True))
            with told(bench):
                found = asyncio.run(run(bench, asked, attacks))
        finally:
            server.close()
    record: dict[str, Any] = {
        **provenance("torch", "uvicorn", "uvloop", "httptools", "starlette", "msgspec", "tiktoken"),
        "commit": tree.commit,
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "model": Path(asked.model).name,
        "served": words,
        "limit_ms": LIMIT_MS,
        "over_the_limit": [one.name for one in bench.phases if one.pauses.beyond > LIMIT_MS],
        "phases": [one.row() for one in bench.phases],
        **found,
    }
    asked.save.write_text(json.dumps(record, indent=1) + "\n")
    draw(record, bench.memory.samples, asked.save.with_suffix(".png"))
    print(f"over {LIMIT_MS:g} ms: {', '.join(record['over_the_limit']) or 'none'}")
    print(f"MiB per 1,000 random requests: {record['mib_per_1000_requests']}; odd answers: {len(bench.odd)}")
    print(f"the end: {record['end']}")
    return 0


if __name__ == "__main__":
    program(main, heard=False)
