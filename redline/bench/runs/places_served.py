"""Where prompts are computed, served: by who computes prompts, where they are answered, or where less is predicted.

    python -m redline.bench.runs.places_served --save FILE [--gpus 0,1 | --paced 4] [--seconds 12] [--budget-s 480]

Two deployments stand on the same two GPUs: `both`, of two workers that do all alone, and one of a worker for prompts
and one that answers. At this one prompts are computed in three ways: `predicted`, as the router decides; `remote`, all
of them by the worker for prompts; `local`, all by the worker that answers. Which way is said by a file, read at every
request, so that the same processes are compared. For each kind of traffic and each load all ways are sent requests of
the same lengths at the same times, one after the other, each with words of its own, so that none has what another has
cached. A request is good where its first token and the mean time between its
tokens keep what is promised.

The model, and how fast things are taken to be, are those of `steer_served` (four layers of Kimi K2.6's widths on a GPU
each; with --paced random layers whose steps take so many times what Kimi-Nano's take on a core of its own). Told of
each point: good requests of each way, and the difference of `predicted` from the better of `remote` and `local`, with
its interval over requests. Points that are not begun within --budget-s are left out, and named.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast, get_args

import torch

from redline import clock
from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.bench.runs.steer_served import (
    BOTH,
    IN_MEMORY,
    LAYERS_ON_A_GPU,
    ON_A_CORE,
    ON_A_GPU,
    SHAPE,
    Deployed,
    Kind,
    Place,
    Setting,
    Turn,
    gpus_of,
    layouts,
    schedule,
    slowness,
    spread,
    told,
)
from redline.bench.runs.trees import ended_by_a_signal
from redline.bench.serving.intervals import interval
from redline.bench.serving.metrics import keeps, tpot, ttft
from redline.errors import ConfigError
from redline.route.choose import Predicted
from redline.simulate.fleet import Way, sent

# A server that decides by `by_the_file`, in the place of a Python that is told `-m redline serve ...`.
PYTHON = f"""#!{sys.executable}
import os, sys
from redline.bench.runs.paced_worker import PACED
from redline.bench.runs.places_served import by_the_file
from redline.fleet import process
from redline.route import links
links.apart = by_the_file
if PACED in os.environ:
    process.WORKER = sys.executable, "-m", "redline.bench.runs.paced_worker"
del sys.argv[1:3]
from redline.__main__ import main
sys.exit(main())
"""
WAY = "REDLINE_WAY"  # the environment's name of the file that says which
APART = "1:1"
# Requests a second of each worker, times the loads: long prompts beside short ones, prompts of all lengths with longer
# answers, and short prompts with long answers.
KINDS: Mapping[str, Sequence[Kind]] = {
    "documents": (Kind(1.5, 8192, 64), Kind(1.5, 512, 64)),
    "mixed": (Kind(1.5, 4096, 128), Kind(1.5, 512, 128)),
    "answers": (Kind(0.15, 8192, 64), Kind(1.5, 256, 256)),
}
LOADS = 2.0, 3.0, 4.0  # from half of what two GPUs do to a little more than all
PACED_KINDS: Mapping[str, Sequence[Kind]] = {
    "documents": (Kind(0.3, 600, 24), Kind(0.3, 60, 24)),
    "answers": (Kind(0.1, 600, 24), Kind(1.0, 24, 100)),
}
PACED_LOADS = 1.0, 2.0, 3.0


def _at(kinds: Sequence[Kind], times: float) -> tuple[Kind, ...]:
    return tuple(each._replace(rate=times * each.rate) for each in kinds)


def by_the_file(here: Sequence[Predicted], there: Sequence[Predicted]) -> tuple[int, int | None]:
    """`choose.apart`, or what the file says in its place. What is decided is written beside it."""
    file = Path(os.environ[WAY])
    way = file.read_text()
    place, computes = sent(cast("Way", way) if way in get_args(Way) else "predicted", here, there)
    took = here[place] if computes is None else there[computes]
    with noted_beside(file).open("a") as notes:
        note = [computes is None, took.uncached_tokens, took.first_token_s, here[place].between_s, here[place].answers]
        notes.write(json.dumps(note) + "\n")
    return place, computes


def noted_beside(file: Path) -> Path:
    """Where decisions are written: of each whether the prompt is computed where its answer is, its tokens that are not
    cached, seconds expected of its first token and between its others, and how many answers there were."""
    return file.with_suffix(".decided")


def decisions(noted: str, turn: Turn) -> dict[str, Any]:
    """What was decided and expected, beside what came."""
    notes = [json.loads(line) for line in noted.splitlines()]
    local = [note for note in notes if note[0]]
    came = [ttft(answer) for answer in turn.answers], [tpot(answer) for answer in turn.answers]
    return {
        "requests": len(notes),
        "local": len(local),
        "prompt_tokens_local": sum(note[1] for note in local),
        "expected_ttft_ms": spread([note[2] for note in notes]),
        "ttft_ms": spread(came[0]),
        "expected_between_ms": spread([note[3] for note in notes]),
        "between_ms": spread(came[1]),
    }


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs=1, default=None, help="of the two workers: 0,1")
    parser.add_argument("--paced", type=count, default=None, help="times a core of its own that steps take")
    parser.add_argument(
        "--seconds", type=count, default=12, help="in which requests are sent, of each way at each point"
    )
    parser.add_argument("--warm-s", type=count, default=4, help="of each way and kind, before what counts")
    parser.add_argument("--budget-s", type=count, default=480, help="for all points")
    parser.add_argument("--slow", type=float, nargs=2, default=None, help="prompts, steps; absent: tried")
    parser.add_argument("--kv-memory", default=None, help="of each worker")
    parser.add_argument("--kinds", nargs="+", default=None, help="of traffic; absent: all")
    parser.add_argument("--loads", type=float, nargs="+", default=None, help="times the rates; absent: three")
    parser.add_argument("--again", action="store_true", help="add to the runs that the file has")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=output, required=True, help="a JSON file")
    return parser


def point(turns: Mapping[str, Turn], setting: Setting) -> dict[str, Any]:
    """What came of all ways at one kind of traffic and one load."""
    good = {name: [int(keeps(answer, setting.promised)) for answer in turn.answers] for name, turn in turns.items()}
    shares = {name: round(sum(each) / len(each), 4) for name, each in good.items()}
    better = max(("remote", "local"), key=lambda name: shares[name])
    within = interval([float(a - b) for a, b in zip(good["predicted"], good[better], strict=True)])
    less = None if within is None else [round(each, 4) for each in (within.mean, within.low, within.high)]
    return {
        "requests": len(good["predicted"]),
        "good": shares,
        "better_of_both": better,
        "of_the_better": round(shares["predicted"] / shares[better], 4) if shares[better] else None,
        "predicted_less_the_better": less,
        "figures": {name: told([turn], setting)["all"] for name, turn in turns.items()},
        "each": good,
    }


def main(words: Sequence[str] | None = None) -> None:
    """Runs the program with `words` in place of the command line's, and writes JSON.

    Raises ConfigError without --gpus or --paced, RedlineError where a server does not start or ends.
    """
    given = arguments().parse_args(words)
    if not given.gpus and not given.paced:
        raise ConfigError("give --gpus 0,1 or --paced 4: two workers that do not take cores from one another")
    given.weights, given.as_a_gpu = Path("not used"), False
    gpus = gpus_of(given.gpus or [])
    kinds, loads, load = (KINDS, LOADS, ON_A_GPU) if gpus else (PACED_KINDS, PACED_LOADS, ON_A_CORE)
    loads = tuple(given.loads or loads)
    if unknown := [kind for kind in given.kinds or () if kind not in kinds]:
        raise ConfigError(f"--kinds: there is no {', '.join(unknown)}; known are {', '.join(kinds)}")
    kinds = {kind: kinds[kind] for kind in given.kinds or kinds}
    kept = given.again and given.save.exists() and given.save.stat().st_size
    runs: list[dict[str, Any]] = json.loads(given.save.read_text())["runs"] if kept else []
    workers = layouts((0, 1), bool(given.paced), gpus[0] if gpus else (), 2)
    setting = Setting(float(given.paced or 1), float(given.seconds), 60.0, 2, load)
    points, left_out = list[dict[str, Any]](), list[str]()
    with ended_by_a_signal(), tempfile.TemporaryDirectory(prefix="redline-places-") as name, ExitStack() as stack:
        folder = Path(name)
        file, python = folder / "way", folder / "python-of-ways"
        noted, decided = noted_beside(file), dict[str, Any]()
        file.write_text("predicted")
        python.write_text(PYTHON)
        python.chmod(0o700)
        place = Place(given, folder, stack, python, {WAY: str(file)})
        vocabulary = place.vocabulary
        if given.slow:
            setting = setting._replace(slow=given.slow[0], slow_between=given.slow[1])
        elif gpus:
            tried = Deployed(place.start("tried", workers[BOTH], setting))
            slow, slow_between = slowness(tried, load, vocabulary, given.seed)
            tried.server.stop()
            setting = setting._replace(slow=round(slow, 2), slow_between=round(slow_between, 2))
        slows = setting.slow, setting.slow_between or setting.slow
        print(f"{slows} times as slow as taken to be; promised are {setting.promised} ms", flush=True)
        servers = {name: place.start(name, workers[name], setting) for name in (BOTH, APART)}
        deployed = {name: Deployed(server) for name, server in servers.items()}
        for name, one in deployed.items():  # what comes for the first time is compiled, and learnt from
            for way in (BOTH,) if name == BOTH else ("local", "remote", "predicted"):
                file.write_text(way)
                warm = load._replace(phases={kind: _at(kinds[kind], loads[-1]) for kind in kinds})
                one.ask(schedule(setting._replace(load=warm, seconds=given.warm_s), given.seed, vocabulary, way))
        began = clock.monotonic()
        for number, (kind, times) in enumerate((kind, times) for times in loads for kind in kinds):
            if clock.monotonic() - began > given.budget_s:
                left_out.append(f"{kind}, {times}")
                continue
            asked = setting._replace(load=load._replace(phases={kind: _at(kinds[kind], times)}))
            ways = [BOTH, *get_args(Way)]
            turns: dict[str, Turn] = {}
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                requests = schedule(asked, given.seed + number, vocabulary, way)  # others' pages would be cached
                file.write_text(way)
                noted.write_text("")
                turns[way] = deployed[BOTH if way == BOTH else APART].ask(requests)
                if way == "predicted":
                    decided = decisions(noted.read_text(), turns[way])
            points.append({"kind": kind, "load": times, "decided": decided, **point(turns, asked)})
            shown = ("kind", "load", "requests", "good", "of_the_better", "decided")
            print(json.dumps({key: points[-1][key] for key in shown}), flush=True)
            record: dict[str, Any] = {
                **provenance("torch", "uvicorn", "uvloop"),
                "model": f"{LAYERS_ON_A_GPU} layers of {SHAPE}, random, {IN_MEMORY} in memory"
                if gpus
                else f"random layers, paced {given.paced} times as Kimi-Nano",
                **({"gpu": torch.cuda.get_device_name(), "gpus": gpus[0]} if gpus else {}),
                "slow": slows,
                "promised_ms": setting.promised,
                "seconds": setting.seconds,
                "seed": given.seed,
                "kinds": {name: [each._asdict() for each in all] for name, all in kinds.items()},
                "points": points,
                "left_out": left_out,
            }
            goal = "0.97 of the better of `remote` and `local`"
            given.save.write_text(json.dumps({"goal": goal, "runs": [*runs, record]}) + "\n")
        for server in servers.values():
            server.stop()


if __name__ == "__main__":
    program(main)
