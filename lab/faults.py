"""Random faults under load; every answer is compared with that of an undisturbed server.

    python -m lab.faults [--weights models/kimi-nano] [--draft models/kimi-nano-eagle3]
        [--deployment pools --deployment both] [--seconds 120] [--seed 0] [--clients 6] [--long 3000] [--save FILE]

Serves each deployment: `pools`, two prefill workers and two decode workers; `both`, three mixed workers. Clients send
requests that are greedy or have a seed (`fault_requests.py`), first twice without faults, to verify that the answers
are always the same, and then for `--seconds` under faults, one after another, drawn with the seed:

    kill      a worker gets SIGKILL
    stop      a worker gets SIGSTOP, and SIGCONT 0.3 to 8 s later
    stall     a link between two processes holds its bytes for 0.3 to 8 s (`fault_links.py`)
    cut       a link is cut; or held for up to a second, and cut with the bytes it holds
    replace   a worker is drained and restarted
    api       the API's process is stopped, and continues 0.5 to 3 s later

Requests sampled without a seed are left out: they follow a distribution, and no two answers are the same. Each round of
requests has its own pages (`cache_salt`), since a prompt that begins from pages filled by an answer agrees only to
rounding (docs/routing.md).

A fault occurs once all workers are ready again after the previous one; one in five occurs during the previous one.

What must hold: every answer equals the undisturbed one, to the token and with the same log probabilities to four
places; no request ends with an error or after its deadline; the gap between two chunks of a stream is at most 1 s, plus
the 0.75 s until silence is detected, plus the longest time of a prompt without faults, unless the API's process was
stopped or faults coincided; at the end no worker has a job or holds a page for one; the server ends with code 0 and
without a traceback, and no sockets or shared memory are left. Exits with 1 otherwise.
"""

import argparse
import json
import os
import random
import re
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from lab.fault_links import Detours, LinkName
from lab.fault_requests import DEADLINE_S, Answer, Asked, ask, difference, mix
from lab.program import count, output, program
from lab.trees import ROOT, Server, Tree, commit_of
from redline import clock
from redline.bench.record import provenance
from redline.chat.tokenizer import Tokenizer
from redline.errors import RedlineError
from redline.progress import Working

KEY = "sk-admin-of-the-faults-program"
KINDS = ("kill", "stop", "stall", "stall", "cut", "cut", "replace", "api")
MOST_KILLS = 3  # of one worker: one that ends five times without a minute in between is given up
NOTICE_S = 1.0 + 0.75  # until a silent worker's answers are requeued: links.MOVE_S, a heartbeat, two polls
BACK_S = 60.0  # for a worker to be ready again
REST_S = 20.0  # for pages and leases to be returned
DEPLOYMENTS = {
    "pools": '[[workers]]\nrole = "prefill"\ncount = 2\n[[workers]]\nrole = "decode"\ncount = 2\n',
    "both": '[[workers]]\nrole = "both"\ncount = 3\n',
}


@dataclass
class Fault:
    """A fault. began, ended: time.monotonic(), until all workers were ready again."""

    kind: str
    what: str
    began: float
    ended: float = float("inf")


@dataclass
class Judged:
    """The results of the answers of one phase."""

    asked: int = 0
    left: int = 0  # aborted by their clients
    wrong: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    # longest gap of a stream, its begin, its kind of request
    gaps: list[tuple[float, float, str]] = field(default_factory=list)
    longest_s: float = 0.0  # of a request


class Deployment:
    """A server with its workers, as its operator sees it."""

    def __init__(self, file: Path, place: Path) -> None:
        """Starts it, and does not wait for it. place: its folder of temporary files."""
        tree = Tree(".", ROOT, commit_of(ROOT))
        self.server = Server(tree, [str(file)], place, environment={"TMPDIR": str(place)})
        self.port = self.server.port
        self._admin = ""
        self.parcels: set[Path] = set()

    def until_ready(self) -> None:
        """Returns once all workers are ready. Raises RedlineError if they are not in time."""
        self.server.until_ready()
        if not wait_for(lambda: " is ready at " in self.server.said, BACK_S):  # then all workers are ready
            raise RedlineError(f"not all workers are ready after {BACK_S:g} s: {self.server.said[-2000:]}")
        self._admin = re.findall(r"admin routes are at (http://\S+)/admin/status", self.server.said)[0]
        self.parcels = self._folders_of_parcels()

    def workers(self) -> dict[str, Any]:
        """Name -> the worker's state from the admin API."""
        return self._ask("status")["workers"]

    def replace(self, name: str) -> None:
        """Have a worker drained and restarted."""
        self._ask(f"workers/{name}/replace", "POST")

    def _ask(self, path: str, method: str = "GET") -> Any:
        request = Request(f"{self._admin}/admin/{path}", headers={"authorization": f"Bearer {KEY}"}, method=method)
        with urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def all_well(self) -> bool:
        """Whether every worker is ready and sends heartbeats."""
        return all(
            each["ready"] and each["silent_s"] < 0.8 and not each["draining"] for each in self.workers().values()
        )

    def at_rest(self) -> list[str]:
        """Jobs and pages that workers still have; empty if none."""
        had: list[str] = []
        for name, worker in self.workers().items():
            load = worker["load"] or {}
            for what in ("running", "waiting", "pages_used"):
                if load.get(what):
                    had.append(f"{name}: {what} {load[what]}")
            if worker["jobs"]:
                had.append(f"{name}: jobs {worker['jobs']}")
        return had

    def _folders_of_parcels(self) -> set[Path]:
        pids = [worker["pid"] for worker in self.workers().values()]
        mapped = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
        return {Path(found) for found in re.findall(r"(/\S*/redline-[^/\s]+)/parcels-", mapped)}


class Chaos:
    """Draws faults and causes them, one after another, until stopped. `faults`: those caused so far."""

    def __init__(self, deployment: Deployment, detours: Detours, seed: str, kinds: Sequence[str]) -> None:
        self.faults: list[Fault] = []
        self.problems: list[str] = []
        self._deployment = deployment
        self._detours = detours
        self._draw = random.Random(seed)
        self._kinds = kinds
        self._kills: Counter[str] = Counter()
        self._ending = threading.Event()

    def run(self, seconds: float, working: Working) -> None:
        """Causes faults for `seconds`, and returns once all workers are ready again."""
        until = clock.monotonic() + seconds
        while (left := until - clock.monotonic()) > 0:
            working.show(int(seconds - left), int(seconds))
            clock.sleep(self._draw.uniform(0.3, 2.0))
            self._one()
            if self._draw.random() < 0.2:
                self._one()
            if not wait_for(self._deployment.all_well, BACK_S):
                self.problems.append(f"not all workers were back {BACK_S:g} s after {self.faults[-1]}")
                return
            for fault in self.faults:
                fault.ended = min(fault.ended, clock.monotonic())

    def _one(self) -> None:
        kind, draw = self._draw.choice(self._kinds), self._draw
        workers = self._deployment.workers()
        name = draw.choice(sorted(workers))
        pid, seconds = workers[name]["pid"], round(draw.uniform(0.3, 8.0), 1)
        link = draw.choice(self._detours.links())
        if kind == "kill" and self._kills[name] >= MOST_KILLS:
            kind = "stop"
        began = clock.monotonic()
        match kind:
            case "kill":
                self._kills[name] += 1
                self._note(kind, name, began)
                os.kill(pid, signal.SIGKILL)
            case "stop":
                self._note(kind, f"{name} for {seconds} s", began)
                paused(pid, seconds)
            case "stall":
                self._note(kind, f"{self._words(link)} for {seconds} s", began)
                self._detours.stall(link, seconds)
                clock.sleep(seconds)
            case "cut":
                held = round(draw.choice([0.0, 0.1, 1.0]) * draw.random(), 2)
                self._note(kind, f"{self._words(link)}, held for {held} s", began)
                self._detours.stall(link, held)
                clock.sleep(held)
                self._detours.cut(link)
            case "replace":
                self._note(kind, name, began)
                self._deployment.replace(name)
                clock.sleep(1.0)
            case _:
                seconds = round(draw.uniform(0.5, 3.0), 1)
                self._note(kind, f"for {seconds} s", began)
                paused(self._deployment.server.process.pid, seconds)

    def _note(self, kind: str, what: str, began: float) -> None:
        self.faults.append(Fault(kind, what, began))

    def _words(self, link: LinkName) -> str:
        pids = {worker["pid"]: name for name, worker in self._deployment.workers().items()}
        return f"{pids.get(link.writer, 'api')} to {link.socket}"


def paused(pid: int, seconds: float) -> None:
    """Stops a process, and continues it `seconds` later; a process that has ended is ignored."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            clock.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition became true within `seconds`."""
    until = clock.monotonic() + seconds
    while not condition():
        if clock.monotonic() > until:
            return False
        clock.sleep(0.1)
    return True


def all_at_once(port: int, requests: Sequence[Asked], clients: int, salt: str) -> list[Answer]:
    """The answers to all requests, sent by `clients` clients."""
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(ask, repeat(port), requests, repeat(salt)))


def judge(requests: Sequence[Asked], truth: Sequence[Answer], answers: Sequence[tuple[int, Answer]]) -> Judged:
    """Compares answers, by the index of their request, with the undisturbed ones."""
    judged = Judged()
    for place, answer in answers:
        asked = requests[place]
        judged.asked += 1
        judged.left += asked.leaves is not None
        if asked.leaves == 0:
            continue
        judged.longest_s = max(judged.longest_s, answer.seconds)
        if why := difference(asked, truth[place], answer):
            judged.wrong.append(f"{asked.name}: {why}")
        if answer.seconds > DEADLINE_S + 1:
            judged.wrong.append(f"{asked.name}: it took {answer.seconds:.1f} s, its deadline was {DEADLINE_S:g} s")
        if asked.body.get("stream"):
            judged.first_s.append(answer.first_s)
            judged.gaps.append((answer.gap_s, answer.gap_at, asked.name))
    return judged


def load(
    port: int, requests: Sequence[Asked], clients: int, salt: str, ended: threading.Event
) -> list[tuple[int, Answer]]:
    """Clients that send one request after another until `ended` is set: their answers, by the index of the request."""
    answers: list[tuple[int, Answer]] = []
    turn = threading.Lock()
    places = _places(len(requests))

    def client() -> None:
        while not ended.is_set():
            with turn:
                round_, place = next(places)
            answers.append((place, ask(port, requests[place], f"{salt} {round_}")))

    threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _places(most: int) -> Iterator[tuple[int, int]]:
    round_ = 0
    while True:
        yield from ((round_, place) for place in range(most))
        round_ += 1


def late(gaps: Sequence[tuple[float, float, str]], faults: Sequence[Fault], limit_s: float) -> list[str]:
    """Gaps over the limit that neither a stop of the API nor two coinciding faults excuse."""
    found: list[str] = []
    for gap, at, what in gaps:
        beside = [fault for fault in faults if fault.began < at + gap and fault.ended > at]
        if gap > limit_s and len(beside) < 2 and not any(fault.kind == "api" for fault in beside):
            of = ", ".join(f"{fault.kind} {fault.what}" for fault in beside) or "nothing"
            found.append(f"{what}: {gap:.2f} s without a token, limit {limit_s:.2f} s, beside {of}")
    return found


def most(values: Sequence[float]) -> float:
    """The largest; 0 if there is none."""
    return round(max(values, default=0.0), 3)


def run(asked: argparse.Namespace, name: str, place: Path, working: Working) -> dict[str, Any]:
    """One deployment, from its start to its end."""
    (place / "keys.txt").write_text(f"{KEY}\n")
    drafter = f'[engine.speculation]\ntype = "learned"\ndrafter = "{asked.draft.resolve()}"\n' if asked.draft else ""
    file = place / f"{name}.toml"
    file.write_text(
        f'weights = "{asked.weights.resolve()}"\nadmin_port = 0\nadmin_keys_file = "keys.txt"\n'
        f'[engine]\nkv_memory = "{asked.kv_memory}"\n{drafter}{DEPLOYMENTS[name]}'
    )
    vocabulary = Tokenizer.open(asked.weights).vocab_size // 2
    requests = [
        each for n in range(asked.mixes) for each in mix(asked.seed + n, asked.weights.name, asked.long, vocabulary)
    ]
    whole = [Asked(each.name, each.path, each.body) for each in requests]
    problems: list[str] = []
    with Detours(place) as detours:
        working.show(what=f"{name}: starting")
        deployment = Deployment(file, place)
        try:
            deployment.until_ready()
            working.show(what=f"{name}: undisturbed")
            truth = all_at_once(deployment.port, whole, asked.clients, "truth")
            problems += [
                f"undisturbed: {each.name}: {of.error}" for each, of in zip(whole, truth, strict=True) if of.error
            ]
            again = judge(requests, truth, [*enumerate(all_at_once(deployment.port, requests, asked.clients, "again"))])
            problems += [f"undisturbed, again: {each}" for each in again.wrong]
            chaos = Chaos(deployment, detours, f"faults {asked.seed} {name}", asked.kind or KINDS)
            ended = threading.Event()
            answers: list[tuple[int, Answer]] = []
            loading = threading.Thread(
                target=lambda: answers.extend(load(deployment.port, requests, asked.clients, "faults", ended))
            )
            began = clock.monotonic()
            loading.start()
            try:
                working.show(what=f"{name}: faults")
                chaos.run(asked.seconds, working)
            finally:
                ended.set()
                loading.join()
            seconds = clock.monotonic() - began
            disturbed = judge(requests, truth, answers)
            limit_s = NOTICE_S + most(again.first_s) + most([gap for gap, _, _ in again.gaps])
            had_late = late(disturbed.gaps, chaos.faults, limit_s)
            if not wait_for(lambda: not deployment.at_rest(), REST_S):
                problems.append(f"not given back after {REST_S:g} s: {deployment.at_rest()}")
            counts = dict(sorted(Counter(fault.kind for fault in chaos.faults).items()))
            end = deployment.server.stop()
        finally:
            deployment.server.close()
        said = deployment.server.said
        lost = detours.lost
    problems += chaos.problems
    if end.code != 0 or end.tracebacks:
        problems.append(f"the server ended with code {end.code}, {end.tracebacks} tracebacks: {end.first_tracebacks}")
    problems += [
        f"left behind: {left.name}" for left in (*place.glob("redline-*"), *deployment.parcels) if left.exists()
    ]
    if asked.words is not None:
        asked.words.write_text(said)
    return {
        "faults": counts,
        "seconds": round(seconds, 1),
        "bytes_lost_with_links": lost,
        "answers": disturbed.asked,
        "of_clients_that_left": disturbed.left,
        "moved": len(re.findall(r"job \S+ is requeued after", said)),
        "wrong": disturbed.wrong,
        "late": had_late,
        "longest_request_s": round(disturbed.longest_s, 2),
        "gap_limit_s": round(limit_s, 2),
        "longest_gap_s": {
            "undisturbed": most([g for g, _, _ in again.gaps]),
            "faults": most([g for g, _, _ in disturbed.gaps]),
        },
        "longest_first_token_s": {"undisturbed": most(again.first_s), "faults": most(disturbed.first_s)},
        "problems": problems,
        "what": [f"{fault.began - began:.1f} s: {fault.kind} {fault.what}" for fault in chaos.faults],
    }


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=ROOT / "models" / "kimi-nano")
    parser.add_argument("--draft", type=Path, default=None, help="a drafter's folder (default: no drafts)")
    parser.add_argument("--kv-memory", default="100MB", help="of each worker")
    parser.add_argument("--deployment", choices=[*DEPLOYMENTS], action="append", help="default: each")
    parser.add_argument("--kind", choices=sorted(set(KINDS)), action="append", help="kinds of faults (default: all)")
    parser.add_argument("--seconds", type=count, default=120, help="of faults, for each deployment")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=count, default=6)
    parser.add_argument("--mixes", type=count, default=2, help="requests of each kind")
    parser.add_argument("--long", type=count, default=3000, help="tokens of a long prompt")
    parser.add_argument("--words", type=output, default=None, help="a file for the server's output")
    parser.add_argument("--save", type=output, default="runs/faults-cpu.json")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Runs the program with `words` instead of the command line's, and writes JSON. -> 1 if a check fails. Raises
    RedlineError if a server does not start.
    """
    asked = arguments().parse_args(words)
    results: dict[str, Any] = {}
    record = {
        **provenance("torch", "pyzmq", "uvicorn", "uvloop"),
        "load_average": [round(each, 1) for each in os.getloadavg()],
        "model": asked.weights.name,
        "drafter": None if asked.draft is None else asked.draft.name,
        "seed": asked.seed,
        "clients": asked.clients,
        "long_prompt_tokens": asked.long,
        "deployments": results,
    }
    with Working("faults", bar=False) as working:
        for name in asked.deployment or DEPLOYMENTS:
            with tempfile.TemporaryDirectory(prefix="faults-") as place:
                results[name] = run(asked, name, Path(place), working)
            print(f"{name}: {json.dumps(results[name], indent=1)}", flush=True)
    asked.save.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(result[key] for result in results.values() for key in ("wrong", "late", "problems")))


if __name__ == "__main__":
    program(main, heard=False)
