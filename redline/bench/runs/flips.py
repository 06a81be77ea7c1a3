"""How long a worker takes to change its role under load, and whether a request is lost by it.

    python -m redline.bench.runs.flips [--weights models/kimi-nano] [--turns 4] [--clients 3] [--seconds 40]
        [--save FILE]

Serves three workers over HTTP on loopback, one for prompts and two for answers, while clients ask one question after
another. What they ask shifts: long prompts with short answers, then short prompts with long answers. First, roles
change by hand, in turns that end where they began; a change is timed from the request of the operator until the worker
is wholly in its role. Then the same deployment is served with [steer] and nobody asks: each kind of question has its
seconds, and what was decided and why is recorded, be it nothing. A request is lost where its answer is not whole: an
error, or fewer tokens than asked for.
"""

import argparse
import http.client
import json
import random
import re
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from redline import clock
from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.bench.runs.trees import ROOT, Server, Tree, commit_of, ended_by_a_signal
from redline.chat.tokenizer import Tokenizer
from redline.errors import RedlineError

GOAL_S = 5.0  # for a change
WAIT_S = 60.0  # for an answer, and for a change before it counts as one that never ended
POLL_S = 0.02
LOOK_S = 2.0  # between two looks of who steers
KEY = "sk-of-the-operator-of-flips"
CHANGES = (("decode-0", "prefill"), ("prefill", "decode"), ("decode-0", "decode"), ("prefill", "prefill"))
SLA = "[sla.default]\nttft_ms = {ttft_ms}\nitl_ms = {itl_ms}\n"
STEER = f"[steer]\nevery_s = {LOOK_S}\nwindow_s = 15\nrest_s = 5\n"
WORKERS = '[[workers]]\nrole = "prefill"\n[[workers]]\nrole = "decode"\ncount = 2\n'


class Kind(NamedTuple):
    """What is asked: tokens of a prompt and of its answer."""

    name: str
    prompt: int
    tokens: int


KINDS = Kind("long prompts", 1200, 16), Kind("long answers", 30, 200)


class Clients:
    """Clients that ask one question after another. Use as a context manager; `kind` may change meanwhile."""

    def __init__(self, port: int, model: str, vocabulary: int, clients: int) -> None:
        self.kind = KINDS[0]
        self.answered: dict[str, int] = {kind.name: 0 for kind in KINDS}
        self.lost: list[str] = []  # why
        self._port, self._model, self._vocabulary = port, model, vocabulary
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(clients)]

    def _ask(self, number: int) -> None:
        draw = random.Random(number)
        while not self._stopping.is_set():
            kind = self.kind
            prompt = [draw.randrange(10, self._vocabulary) for _ in range(kind.prompt)]
            try:
                why_lost = self._answer(prompt, kind.tokens)
            except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
                why_lost = f"{type(error).__name__}: {error}"
            if why_lost:
                self.lost.append(f"{kind.name}: {why_lost}")
            else:
                self.answered[kind.name] += 1

    def _answer(self, prompt: list[int], tokens: int) -> str:
        """Why a request was lost; empty: its answer is whole."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        status, told = ask(self._port, "POST", "/v1/completions", body, WAIT_S)
        if status != 200:
            return f"status {status}"
        came = told["usage"]["completion_tokens"]
        return "" if came == tokens else f"{came} of {tokens} tokens"

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def told(self) -> dict[str, Any]:
        """As JSON. Raises RedlineError where a client still waits."""
        if any(thread.is_alive() for thread in self._threads):
            raise RedlineError(f"a request has had no end in {WAIT_S:g} s")
        return {"answered": self.answered, "lost": len(self.lost), "why_lost": self.lost[:8]}


class Operator:
    """Who asks the admin routes of a server."""

    def __init__(self, server: Server) -> None:
        """Raises RedlineError where the server does not say in time where its admin routes are."""
        end = clock.perf_counter() + WAIT_S
        while (found := re.search(r"admin routes are at http://127\.0\.0\.1:(\d+)/", server.said)) is None:
            if clock.perf_counter() > end:
                raise RedlineError(f"the server does not say where its admin routes are: {server.said[-300:]}")
            clock.sleep(POLL_S)
        self._port = int(found[1])

    def status(self) -> dict[str, Any]:
        """What /admin/status says."""
        return ask(self._port, "GET", "/admin/status", None, 10.0)[1]

    def flip(self, name: str, role: str) -> dict[str, Any]:
        """Give a worker a role and wait until it has it. Raises RedlineError where it is refused or never ends."""
        before, began = self.status()["workers"][name], clock.perf_counter()
        status, told = ask(self._port, "POST", f"/admin/workers/{name}/role", {"role": role}, 10.0)
        if status != 200:
            raise RedlineError(f"{name} does not become {role}: {told.get('error', status)}")
        while (now := self.status()["workers"][name])["turning_s"] is not None:
            if clock.perf_counter() - began > WAIT_S:
                raise RedlineError(f"{name} is not {role} after {WAIT_S:g} s")
            clock.sleep(POLL_S)
        took = clock.perf_counter() - began
        return {
            "worker": name,
            "from": before["role"],
            "to": now["role"],
            "jobs": before["jobs"],
            "seconds": round(took, 2),
            "same_process": before["pid"] == now["pid"] and before["epoch"] == now["epoch"],
        }


def ask(port: int, method: str, path: str, body: object, seconds: float) -> tuple[int, dict[str, Any]]:
    """One request of loopback, with the operator's key: its status and what it says."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        link.request(method, path, None if body is None else json.dumps(body), headers)
        answer = link.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        link.close()


def by_hand(operator: Operator, clients: Clients, turns: int) -> list[dict[str, Any]]:
    """Changes of roles, in each turn CHANGES, under one kind of question and then the other."""
    flips: list[dict[str, Any]] = []
    for turn in range(turns):
        clients.kind = KINDS[turn % len(KINDS)]
        for name, role in CHANGES:
            wait_for_jobs(operator)
            flips.append({"kind": clients.kind.name, **operator.flip(name, role)})
            print(f"turn {turn + 1}: {json.dumps(flips[-1])}", flush=True)
    return flips


def wait_for_jobs(operator: Operator) -> None:
    """Until somebody works. Raises RedlineError where nobody does."""
    end = clock.perf_counter() + WAIT_S
    while not any(worker["jobs"] for worker in operator.status()["workers"].values()):
        if clock.perf_counter() > end:
            raise RedlineError(f"no worker had a job in {WAIT_S:g} s")
        clock.sleep(POLL_S)


def steered(operator: Operator, clients: Clients, seconds: int) -> list[dict[str, Any]]:
    """What was decided while each kind of question was asked for so many seconds, with the last look at its end."""
    phases: list[dict[str, Any]] = []
    told = 0
    for kind in KINDS:
        clients.kind = kind
        clock.sleep(seconds)
        status = operator.status()
        changes = status["steer"]["changes"]
        newest = list(reversed(changes[: len(changes) - told]))
        told = len(changes)
        phases.append(
            {
                "kind": kind.name,
                "roles": status["steer"]["roles"],
                "changes": newest,
                "last": status["steer"]["last"],
                "kept": status["sla"],
            }
        )
        print(f"{kind.name}: {len(newest)} changes, last look: {status['steer']['last']['why']}", flush=True)
    return phases


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=ROOT / "models" / "kimi-nano")
    parser.add_argument("--kv-memory", default="100MB", help="of each worker")
    parser.add_argument("--turns", type=count, default=4, help="of four changes by hand")
    parser.add_argument("--clients", type=count, default=3)
    parser.add_argument("--seconds", type=count, default=40, help="of each kind of question, with [steer]")
    parser.add_argument("--ttft-ms", type=count, default=1000, help="that is promised")
    parser.add_argument("--itl-ms", type=count, default=20, help="that is promised")
    parser.add_argument("--save", type=output, default="runs/flips-cpu.json")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Runs the program with `words` in place of the command line's, and writes JSON. 1 where a request was lost or a
    change by hand took longer than GOAL_S.

    Raises RedlineError where a server does not start, a change is refused or a request has no end.
    """
    asked = arguments().parse_args(words)
    tree = Tree(".", ROOT, commit_of(ROOT))
    vocabulary = Tokenizer.open(asked.weights).vocab_size // 2
    sla = SLA.format(ttft_ms=asked.ttft_ms, itl_ms=asked.itl_ms)
    found: dict[str, Any] = {}
    with ended_by_a_signal(), tempfile.TemporaryDirectory(prefix="redline-flips-") as place:
        (Path(place) / "keys.txt").write_text(f"{KEY}\n")
        for part, more in (("by_hand", sla), ("steered", sla + STEER)):
            file = Path(place) / f"{part}.toml"
            file.write_text(
                f'weights = "{asked.weights.resolve()}"\nlog_level = "info"\nadmin_port = 0\n'
                f'admin_keys_file = "keys.txt"\n[engine]\nkv_memory = "{asked.kv_memory}"\n{more}{WORKERS}'
            )
            server = Server(tree, [str(file)], Path(place))
            try:
                port = server.until_ready()
                operator = Operator(server)
                with Clients(port, asked.weights.name, vocabulary, asked.clients) as clients:
                    if part == "by_hand":
                        results = {"flips": by_hand(operator, clients, asked.turns)}
                    else:
                        results = {"phases": steered(operator, clients, asked.seconds)}
                found[part] = {**results, "requests": clients.told(), "ended": server.stop().code}
            finally:
                server.close()
    took = [flip["seconds"] for flip in found["by_hand"]["flips"]]
    lost = sum(part["requests"]["lost"] for part in found.values())
    record = {
        **provenance("torch", "uvicorn", "uvloop"),
        "model": asked.weights.name,
        "clients": asked.clients,
        "kinds": [kind._asdict() for kind in KINDS],
        "goal_s": GOAL_S,
        "longest_s": max(took),
        "lost": lost,
        **found,
    }
    asked.save.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(took)} changes by hand, the longest {max(took):.2f} s; {lost} requests lost", flush=True)
    return int(lost > 0 or max(took) > GOAL_S)


if __name__ == "__main__":
    program(main)
