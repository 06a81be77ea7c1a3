"""Whether roles that follow the traffic bring more good requests than roles that stay, on a served model.

    python -m redline.bench.runs.steer_served [--paced 4 [--as-a-gpu] | --gpus 0,1 ...] [--rounds 1] [--seconds 26]
        [--window-s 8] [--seed N] [--save FILE] [--again]

Deployments of as many workers stand beside each other: `steered`, with [steer]; `both`, where each does all; and every
number of workers for prompts. Other roles mean the same: one that does `both` counts as one that answers beside one
that computes prompts. In each round each deployment is sent the same requests at the same times, one after the other,
in another order each round, while those whose turn it is not do nothing. The traffic shifts: long prompts among short
questions, then short prompts with long answers. A request is good where its first token and the mean time between its
tokens keep what is promised (`[sla]`).

Kimi-Nano is served by two workers, each on a core of its own. How fast the machine is just now is tried first: rates
are divided by how many times as long as on a core of its own things take, and promises multiplied by it. On a machine
that others use this changes while one measures, so with --paced there are three workers whose steps take so many times
what Kimi-Nano's take on a core of its own, by waiting (`paced_worker.py`): all but the arithmetic is the product. With
--as-a-gpu there are two workers, and steps take so many times what four layers of Kimi K2.6 take on an H100, with
prompts of an eighth of the tokens.

With --gpus 0,1 a worker has a GPU of its own, and four layers of Kimi K2.6's widths with random weights: steps are
short then, so that some minutes have as many requests as an hour of the whole model. How fast the GPUs are is tried as
well, prompts and steps of twelve answers by themselves. `--gpus 0,1 2,3` is two places, at which deployments have
their turns at the same time.

Told are good requests a second of each kind of traffic and over all, the difference of each request between `steered`
and each fixed choice with its interval, and what was decided, when and why. Under four minutes as it is. With --again
the file's runs stay, and `together` counts the requests of all.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self

import torch

from redline import clock
from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.bench.runs.flips import KEY, Operator
from redline.bench.runs.full_depth import write_folder
from redline.bench.runs.paced_worker import AS_A_GPU, LAYERS, PACED, write
from redline.bench.runs.trees import ROOT, Server, Tree, commit_of, ended_by_a_signal
from redline.bench.serving.arrivals import planned
from redline.bench.serving.client import Client
from redline.bench.serving.intervals import interval
from redline.bench.serving.metrics import keeps, tpot, ttft
from redline.bench.serving.records import Answer, Ask
from redline.bench.serving.target import Pace, Target
from redline.chat.tokenizer import Tokenizer
from redline.errors import ConfigError, RedlineError
from redline.model.k2.shapes import shape

LOOK_S = 1.0  # between two looks of who steers, and of ours at the roles
REST_S = 3.0  # of who steers
END_S = 6.0  # for what is under way when no more comes; what has not ended by then is not good
MOST_SLOW = 8.0  # times a core of its own: beyond, so little can be asked that nothing would be seen
TRIES = 3
WARM_S = 6.0  # of each phase, before what counts
SHORT = 256  # tokens of a prompt, where steps of answers are tried
LONG = 8  # tokens of a prompt for each of its answer
BOTH, STEERED = "both", "steered"
MODEL_NAME = "kimi-nano"
SHAPE = "kimi-k2.6"  # whose widths layers on a GPU have


def layouts(cores: Sequence[int], paced: bool, gpus: Sequence[int] = (), waiting: int = 3) -> dict[str, str]:
    """The [[workers]] of each deployment: one on each of the GPUs, two on cores of their own, or, with `paced`, some
    that wait most of the time."""
    if gpus or paced:
        places = list(gpus) or [None] * waiting
        apart = {
            f"{prompts}:{len(places) - prompts}": _kind("prefill", places[:prompts]) + _kind("decode", places[prompts:])
            for prompts in range(1, len(places))
        }
        both = _kind("both", places)
    else:
        first, second = cores[:2]
        apart = {
            "1:1": f'[[workers]]\nrole = "prefill"\ncores = [{first}]\n'
            f'[[workers]]\nrole = "decode"\ncores = [{second}]\n'
        }
        both = "".join(f'[[workers]]\nname = "on-{core}"\ncores = [{core}]\n' for core in (first, second))
    return {STEERED: both, BOTH: both, **apart}


def _kind(role: str, places: Sequence[int | None]) -> str:
    devices = "" if None in places else f"devices = {[*places]}\n"
    return f'[[workers]]\nrole = "{role}"\ncount = {len(places)}\n{devices}'


class Kind(NamedTuple):
    """So many requests a second for each worker, of so many tokens of prompt and of answer."""

    rate: float
    prompt: int
    tokens: int


class Load(NamedTuple):
    """What is played, and what is promised, where a prompt alone has its first token after `first_s`, and tokens of
    `together` answers at once come `between_s` apart."""

    tried: Kind
    together: int
    first_s: float
    between_s: float
    phases: Mapping[str, Sequence[Kind]]
    ttft_ms: float
    itl_ms: float


# On a core of an AMD EPYC of its own.
PHASES: Mapping[str, Sequence[Kind]] = {
    "long prompts": (Kind(0.9, 600, 24), Kind(1.0, 24, 80)),
    "long answers": (Kind(4.0, 24, 100),),
}
ON_A_CORE = Load(Kind(1.0, 600, 100), 1, 0.57, 0.0018, PHASES, 3000.0, 6.0)
# On one H100, calculated from what layers of Kimi K2.6 take there; simulated, workers that all do both keep 0.44 and
# 0.99 of these phases, one for prompts and one that answers 0.67 and 0.45.
LAYERS_ON_A_GPU, IN_MEMORY = 4, 2
ON_A_GPU = Load(
    *(Kind(1.0, 8192, 200), 12, 0.0758, 0.0040),
    phases={
        "long prompts": (Kind(6.0, 8192, 64), Kind(6.0, 512, 64)),
        "long answers": (Kind(0.6, 8192, 64), Kind(6.0, 256, 256)),
    },
    ttft_ms=333.0,
    itl_ms=4.4,
)
# The same with prompts of an eighth, and more answers, as simulated: 0.69 and 1.00, and 0.87 and 0.56.
AS_ON_A_GPU = Load(
    *(Kind(1.0, 1024, 200), 12, 0.0758, 0.0040),
    phases={
        "long prompts": (Kind(5.3, 1024, 64), Kind(5.3, 64, 64)),
        "long answers": (Kind(0.53, 1024, 64), Kind(7.1, 32, 256)),
    },
    ttft_ms=376.0,
    itl_ms=4.97,
)


class Due(NamedTuple):
    """A request, and the second after the phases' beginning at which it is sent."""

    at_s: float
    phase: str
    ask: Ask


class Setting(NamedTuple):
    """What is played. slow: times as long as `load` says that prompts take, and slow_between that steps of answers do;
    0: as long as prompts. seconds: of a phase."""

    slow: float
    seconds: float
    window_s: float  # of traffic, that who steers goes by
    workers: int = 2
    load: Load = ON_A_CORE
    slow_between: float = 0.0

    @property
    def promised(self) -> dict[str, float]:
        """Milliseconds, by the names of `metrics.SLOS`."""
        ttft_ms, itl_ms = self.load.ttft_ms * self.slow, self.load.itl_ms * (self.slow_between or self.slow)
        return {"ttft": round(ttft_ms, 1), "tpot": round(itl_ms, 2)}

    def rate(self, kind: Kind) -> float:
        """Requests a second of all workers: by prompts where these are most of its work, else by answers."""
        slow = self.slow if kind.prompt > LONG * kind.tokens else self.slow_between or self.slow
        return kind.rate * self.workers / slow


class Turn(NamedTuple):
    """What came of all requests of a round at one deployment. looks: as `Looks` has them."""

    requests: Sequence[Due]
    answers: Sequence[Answer]
    looks: Sequence[dict[str, Any]]
    jobs: Sequence[Sequence[int]] = ()  # of each worker, about once in LOOK_S

    def of(self, phase: str) -> list[Answer]:
        """The answers to what came in a phase, or in all."""
        return [a for due, a in zip(self.requests, self.answers, strict=True) if phase in (due.phase, "all")]


def schedule(setting: Setting, seed: int, vocabulary: int, text: str = "") -> list[Due]:
    """All requests of a round, by time, made of a seed. Prompts are of random tokens, so that none is cached: others
    with another text."""
    draw, words, found = random.Random(seed), random.Random(f"{seed} {text}"), list[Due]()
    for number, (phase, kinds) in enumerate(setting.load.phases.items()):
        for kind in kinds:
            many = max(1, round(setting.rate(kind) * setting.seconds))
            times = planned(many, Pace(rate=many / setting.seconds, seed=draw.randrange(1 << 30))) or ()
            found += [Due(number * setting.seconds + at_s, phase, _asked(kind, words, vocabulary)) for at_s in times]
    return sorted(found, key=lambda due: due.at_s)


def _asked(kind: Kind, draw: random.Random, vocabulary: int) -> Ask:
    ids = tuple(draw.randrange(10, vocabulary) for _ in range(kind.prompt))
    return Ask(max_tokens=kind.tokens, ids=ids, prompt_tokens=kind.prompt)


async def sent(port: int, requests: Sequence[Due]) -> list[Answer]:
    """Sends each when it is due, and waits for all answers until END_S after the last was sent."""
    body = {"ignore_eos": True, "temperature": 0, "return_token_ids": True}
    target = Target(base_url=f"http://127.0.0.1:{port}", backend="openai", model=MODEL_NAME, body=body)
    async with Client(target) as client:
        encoded = [client.request(due.ask) for due in requests]
        client.begin()
        under_way: list[asyncio.Task[Answer]] = []
        for index, due in enumerate(requests):
            await asyncio.sleep(max(0.0, due.at_s - client.clock()))
            under_way.append(asyncio.create_task(client.ask(due.ask, index, due.at_s, encoded[index])))
        await asyncio.wait(under_way, timeout=END_S)
        client.cut(f"no end within {END_S:g} s of the last request")
        return [await task for task in under_way]


class Looks:
    """Every LOOK_S who has which role, and what who steers has seen. Use as a context manager; `all` has what changed:
    seconds, workers for prompts, and of the last look why, with what was weighed and predicted."""

    def __init__(self, operator: Operator) -> None:
        self.all: list[dict[str, Any]] = []
        self.jobs: list[list[int]] = []  # of each worker, at each look
        self._operator, self._stopping, self._began = operator, threading.Event(), clock.perf_counter()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(10.0)

    def _look(self) -> None:
        while not self._stopping.wait(LOOK_S):
            status = self._operator.status()
            prefill = sum(worker["role"] == "prefill" for worker in status["workers"].values())
            self.jobs.append([worker["jobs"] for worker in status["workers"].values()])
            steer = status["steer"] or {}
            last = steer.get("last") or {}
            seen = {"prefill": prefill, **{key: last.get(key) for key in ("why", "now", "expected")}}
            seen["weighed"] = steer.get("weighed") if last.get("now") else None
            if not self.all or any(self.all[-1][key] != value for key, value in seen.items()):
                self.all.append({"at_s": round(clock.perf_counter() - self._began, 1), **seen})


class Deployed:
    """One deployment, which serves, and its turns."""

    def __init__(self, server: Server) -> None:
        """Raises RedlineError where the server does not start."""
        self.turns: list[Turn] = []
        self.server = server
        self._port = server.until_ready()
        self.operator = Operator(server)

    def ask(self, requests: Sequence[Due]) -> Turn:
        """A turn, which is not kept. Raises RedlineError where the server has ended."""
        with Looks(self.operator) as looks:
            answers = asyncio.run(sent(self._port, requests))
        self.server.check()
        return Turn(requests, answers, looks.all, looks.jobs)


def slowness(deployed: Deployed, load: Load, vocabulary: int, seed: int) -> tuple[float, float]:
    """Times as long as `load` says that a prompt alone takes here, and steps of answers. Raises RedlineError where they
    take MOST_SLOW times as long, or do not end."""
    draw = random.Random(seed)
    firsts, betweens = list[float](), list[float]()
    for number in range(TRIES + 1):  # the first is not counted: kernels may be compiled in it
        alone = deployed.ask([Due(0.0, "", _asked(load.tried, draw, vocabulary))]).answers
        short = load.tried._replace(prompt=min(load.tried.prompt, SHORT))
        many = deployed.ask([Due(0.0, "", _asked(short, draw, vocabulary)) for _ in range(load.together)]).answers
        for answer in (*alone, *many):
            if ttft(answer) is None or tpot(answer) is None:
                raise RedlineError(f"a request has no answer: {answer.error}")
        if number:
            firsts += [ttft(answer) or 0.0 for answer in alone]
            betweens += [tpot(answer) or 0.0 for answer in (many if load.together > 1 else alone)]
    found = median(firsts) / load.first_s, median(betweens) / load.between_s
    if (slow := max(found)) > MOST_SLOW:
        raise RedlineError(f"the machine is {slow:.1f} times as slow as it is taken to be; try again when it is idle")
    return found


def told(turns: Sequence[Turn], setting: Setting) -> dict[str, Any]:
    """A deployment's figures, by phase and over all."""
    found: dict[str, Any] = {}
    promised = setting.promised
    for phase in (*setting.load.phases, "all"):
        some = [answer for turn in turns for answer in turn.of(phase)]
        seconds = setting.seconds * len(turns) * (len(setting.load.phases) if phase == "all" else 1)
        good = sum(keeps(answer, promised) for answer in some)
        found[phase] = {
            "requests": len(some),
            "good": good,
            "good_per_s": round(good / seconds, 3),
            "failed": sum(answer.failure is not None for answer in some),
            **{f"{name}_kept": sum(keeps(answer, {name: ms}) for answer in some) for name, ms in promised.items()},
            "ttft_ms": spread([ttft(answer) for answer in some]),
            "tpot_ms": spread([tpot(answer) for answer in some]),
        }
    return found


def spread(values: Sequence[float | None]) -> dict[str, float]:
    """Milliseconds of so many seconds, in the middle and of the slowest tenth; nothing where there are none."""
    ordered = sorted(1e3 * value for value in values if value is not None)
    if not ordered:
        return {}
    return {"p50": round(median(ordered), 2), "p90": round(ordered[int(0.9 * (len(ordered) - 1))], 2)}


def differences(steered: Sequence[Turn], fixed: Sequence[Turn], setting: Setting) -> dict[str, Any]:
    """Of each request, whether it was good with [steer] less whether it was without: the mean and its interval, times
    requests a second. Requests that meet one another are not independent, so the intervals are a little narrow."""
    found: dict[str, Any] = {}
    for phase in (*setting.load.phases, "all"):
        pairs = [
            pair for a, b in zip(steered, fixed, strict=True) for pair in zip(a.of(phase), b.of(phase), strict=True)
        ]
        within = interval([float(keeps(a, setting.promised)) - float(keeps(b, setting.promised)) for a, b in pairs])
        if within is None:
            continue
        rate = len(pairs) / (setting.seconds * len(steered) * (len(setting.load.phases) if phase == "all" else 1))
        mean, low, high = (round(rate * each, 3) for each in (within.mean, within.low, within.high))
        found[phase] = {"good_per_s_more": mean, "low": low, "high": high}
    return found


def deployment(given: argparse.Namespace, setting: Setting, weights: Path, workers: str, *, steered: bool) -> str:
    """A deployment file's text. workers: its [[workers]]."""
    ttft_ms, itl_ms = setting.promised.values()
    steer = f"[steer]\nevery_s = {LOOK_S}\nwindow_s = {setting.window_s}\nrest_s = {REST_S}\n"
    steer += f"horizon_s = {setting.seconds}\n"  # traffic shifts as often
    model = f'weights = "{weights.resolve()}"\nserved_model_name = ["{MODEL_NAME}"]\n'
    memory, longest = given.kv_memory or ("2GB" if given.gpus else "100MB"), 12288 if given.gpus else 4096
    engine = f'[engine]\nkv_memory = "{memory}"\nmax_model_len = {longest}\n'
    if given.gpus or given.paced:
        engine += f"random_weights = {IN_MEMORY if given.gpus else LAYERS}\n"
    if given.as_a_gpu:
        engine += "step_tokens = 1024\n"  # for 8,192
    return (
        f'{model}log_level = "info"\nadmin_port = 0\nadmin_keys_file = "keys.txt"\n{engine}'
        f"[sla.default]\nttft_ms = {ttft_ms}\nitl_ms = {itl_ms}\n{steer if steered else ''}{workers}"
    )


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=ROOT / "models" / "kimi-nano")
    parser.add_argument("--paced", type=count, default=None, help="times a core of its own that steps take")
    parser.add_argument("--as-a-gpu", action="store_true", help="with --paced: what steps take on an H100")
    parser.add_argument("--gpus", nargs="+", default=None, help="of each place, with commas: 0,1 or 0,1 2,3")
    parser.add_argument("--slow", type=float, nargs=2, default=None, help="prompts, steps; absent: tried")
    parser.add_argument("--kv-memory", default=None, help="of each worker; absent: 100MB, with --gpus 2GB")
    parser.add_argument("--rounds", type=count, default=1)
    parser.add_argument("--seconds", type=count, default=26, help="of each phase")
    parser.add_argument("--window-s", type=count, default=8, help="of traffic, that who steers goes by")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=output, default="runs/steer-served-cpu.json")
    parser.add_argument("--again", action="store_true", help="add to the runs that the file has")
    return parser


class Place:
    """Where files lie, and servers that end with it."""

    def __init__(
        self,
        given: argparse.Namespace,
        folder: Path,
        stack: ExitStack,
        python: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """python: that serves, where it is another one. environment: of servers, beside ours."""
        (folder / "keys.txt").write_text(f"{KEY}\n")
        self._given, self._folder, self._stack = given, folder, stack
        self._tree = Tree(".", ROOT, commit_of(ROOT))
        paced = write(folder, given.as_a_gpu) if given.paced else None
        self._weights, self._python = paced or (given.weights, Path(sys.executable))
        self._python, self._environment = python or self._python, environment or {}
        if given.gpus:
            self._weights = folder / "layers"
            self._weights.mkdir()
            write_folder(replace(shape(SHAPE), num_hidden_layers=LAYERS_ON_A_GPU), self._weights)

    @property
    def vocabulary(self) -> int:
        """Ids from which prompts are drawn."""
        return Tokenizer.open(self._weights).vocab_size // 2

    def start(self, name: str, workers: str, setting: Setting) -> Server:
        """A server, which is not waited for."""
        file = self._folder / f"{name.replace(':', '-')}.toml"
        file.write_text(deployment(self._given, setting, self._weights, workers, steered=name == STEERED))
        paced = {PACED: str(self._given.paced)} if self._given.paced else {}
        as_a_gpu = {AS_A_GPU: "1"} if self._given.as_a_gpu else {}
        environment = {**paced, **as_a_gpu, **self._environment}
        server = Server(self._tree, [str(file)], self._folder, str(self._python), environment)
        self._stack.callback(server.close)
        return server


def main(words: Sequence[str] | None = None) -> None:
    """Runs the program with `words` in place of the command line's, and writes JSON.

    Raises ConfigError with fewer than two cores, RedlineError where a server does not start or ends, or the machine is
    far too slow.
    """
    given = arguments().parse_args(words)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("a core for each of two workers is wanted; there is one")
    gpus = gpus_of(given.gpus or [])
    if given.as_a_gpu and not given.paced:
        raise ConfigError("--as-a-gpu says what steps of --paced take: give both")
    workers = len(gpus[0]) if gpus else 3 if given.paced and not given.as_a_gpu else 2
    names = list(layouts(cores, bool(given.paced), gpus[0] if gpus else (), workers))
    where = {name: gpus[place % len(gpus)] if gpus else () for place, name in enumerate(names)}
    all = {name: layouts(cores, bool(given.paced), where[name], workers)[name] for name in names}
    load = ON_A_GPU if gpus else AS_ON_A_GPU if given.as_a_gpu else ON_A_CORE
    setting = Setting(float(given.paced or 1), float(given.seconds), float(given.window_s), workers, load)
    loads = list[float]()
    with ended_by_a_signal(), tempfile.TemporaryDirectory(prefix="redline-steer-") as folder, ExitStack() as stack:
        place = Place(given, Path(folder), stack)
        vocabulary = place.vocabulary
        if given.slow:
            setting = setting._replace(slow=given.slow[0], slow_between=given.slow[1])
        elif not given.paced:
            tried = Deployed(place.start("tried", all[BOTH], setting))
            slow, slow_between = slowness(tried, load, vocabulary, given.seed)
            tried.server.stop()
            if gpus:
                setting = setting._replace(slow=round(slow, 2), slow_between=round(slow_between, 2))
            else:
                setting = setting._replace(slow=round(max(1.0, (slow * slow_between) ** 0.5), 2))
        slows = setting.slow, setting.slow_between or setting.slow
        print(f"{slows} times as slow as taken to be; promised are {setting.promised} ms", flush=True)
        servers = {name: place.start(name, workers, setting) for name, workers in all.items()}
        deployed = {name: Deployed(server) for name, server in servers.items()}
        if gpus:  # kernels are compiled in steps that come for the first time
            for one in deployed.values():
                one.ask(schedule(setting._replace(seconds=WARM_S), given.seed, vocabulary, "warm"))

        def play(those: Sequence[str], requests: Sequence[Due]) -> None:
            for name in those:
                loads.append(round(os.getloadavg()[0], 1))
                turn = deployed[name].ask(requests)
                deployed[name].turns.append(turn)
                shown = {phase: f"{of['good']} of {of['requests']}" for phase, of in told([turn], setting).items()}
                print(f"round {len(deployed[name].turns)}, {name}: good {json.dumps(shown)}", flush=True)

        for number in range(given.rounds):
            requests = schedule(setting, given.seed + number, vocabulary)
            first = (given.seed + number) % len(names)
            order = names[first:] + names[:first]
            with ThreadPoolExecutor() as pool:  # a thread for each place
                beside = [[name for name in order if where[name] == gpu] for gpu in dict.fromkeys(where.values())]
                list(pool.map(play, beside, [requests] * len(beside)))
        changes = deployed[STEERED].operator.status()["steer"]["changes"]
        for server in servers.values():
            server.stop()
    turns = {name: one.turns for name, one in deployed.items()}
    paced_as = f"{LAYERS_ON_A_GPU} layers of {SHAPE} on an H100" if given.as_a_gpu else "Kimi-Nano"
    model = f"{LAYERS} random layers, paced as {paced_as}" if given.paced else given.weights.name
    record: dict[str, Any] = {
        **provenance("torch", "uvicorn", "uvloop"),
        "model": f"{LAYERS_ON_A_GPU} layers of {SHAPE}, random, {IN_MEMORY} in memory" if gpus else model,
        **({"gpu": torch.cuda.get_device_name(), "gpus": where} if gpus else {}),
        "workers": setting.workers,
        "slow": setting.slow,
        "slow_between": setting.slow_between or setting.slow,
        "promised_ms": setting.promised,
        "phases": {phase: [kind._asdict() for kind in kinds] for phase, kinds in load.phases.items()},
        "phase_s": setting.seconds,
        "window_s": setting.window_s,
        "rounds": given.rounds,
        "seed": given.seed,
        "load_average_before_turns": loads,
        "deployments": {name: told(all, setting) for name, all in turns.items()},
        "steered_less_fixed": {
            name: differences(turns[STEERED], all, setting) for name, all in turns.items() if name != STEERED
        },
        "good": {
            name: [[int(keeps(a, setting.promised)) for a in turn.answers] for turn in all]
            for name, all in turns.items()
        },
        "jobs": {name: [turn.jobs for turn in all] for name, all in turns.items()},
        "looks": {name: [turn.looks for turn in all] for name, all in turns.items()},
        "changes": changes,
    }
    kept = given.again and given.save.exists() and given.save.stat().st_size
    runs: list[dict[str, Any]] = [*(json.loads(given.save.read_text())["runs"] if kept else []), record]
    given.save.write_text(json.dumps({"together": together(runs), "runs": runs}) + "\n")
    print(json.dumps({"steered_less_fixed": record["steered_less_fixed"], "together": together(runs)}), flush=True)


def gpus_of(said: Sequence[str]) -> list[tuple[int, ...]]:
    """The GPUs of each place. Raises ConfigError where they are no numbers, or not two or more at each, and as many."""
    try:
        found = [tuple(int(number) for number in place.split(",")) for place in said]
    except ValueError:
        raise ConfigError(f"--gpus {' '.join(said)}: give numbers with commas for each place, as 0,1 2,3") from None
    if any(len(place) < 2 or len(place) != len(found[0]) for place in found):
        raise ConfigError(f"--gpus {' '.join(said)}: each place has as many GPUs, and two at least")
    return found


def together(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all requests of all runs: how many were good, and the difference of each with [steer] and without."""
    good = {name: [one for run in runs for turn in run["good"][name] for one in turn] for name in runs[0]["good"]}
    found: dict[str, Any] = {"runs": len(runs)}
    for name, all in good.items():
        found[name] = {"requests": len(all), "good": sum(all), "share": round(sum(all) / len(all), 4)}
        within = interval([float(a - b) for a, b in zip(good[STEERED], all, strict=True)])
        if name != STEERED and within is not None:
            shares = {"of_requests": within.mean, "low": within.low, "high": within.high}
            found[name]["steered_less"] = {key: round(value, 4) for key, value in shares.items()}
    return found


if __name__ == "__main__":
    program(main)
