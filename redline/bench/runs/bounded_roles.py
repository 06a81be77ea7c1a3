"""Whether roles are predicted right where steps beside answers are bounded (`engine.step_ms`), simulated.

    python -m redline.bench.runs.bounded_roles [--seed 1] [--save FILE]

Four workers of `kimi-8xh200` that all do both, and two splits of them, with bounds of 50 and 80 ms. Chat, documents and
agents come together at three loads; and long prompts come with answers of 40 tokens, which whole chunks hold up for
longer than is promised. Each is played, and predicted from the requests that came: with the bound, and as if chunks
were whole; and so are roles chosen. These are figures of predictions, not of GPUs: the worker was never measured whole.
"""

import argparse
import json
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from redline.bench.program import output, program
from redline.bench.record import provenance
from redline.bench.runs.bounded_steps import TTFT_S, mixed
from redline.simulate.fleet import Setting, Simulation
from redline.simulate.models import KIMI_8_H200
from redline.simulate.traces import Request
from redline.tune.expected import Asked, Roles, Traffic
from redline.tune.roles import Fleet, choose_roles, predict_roles
from redline.tune.targets import Targets

WORKERS = 4
BOUNDS_MS = 50.0, 80.0
LOADS = 1.0, 2.0, 3.0  # of `bounded_steps.mixed`
SPLITS = Roles(both=4), Roles(prefill=1, decode=3), Roles(prefill=2, decode=2)
SHORT_RATE, LONG_SHARE, LONG, SHORT, OUTPUT, SHORT_TTFT_S = 6.0, 0.3, 20_000, 200, 40, 15.0
SECONDS = 150.0


def short_answers(seed: int) -> list[Request]:
    """Prompts of 20,000 and of 200 tokens with answers of 40."""
    draw, found, at = random.Random(seed), list[Request](), 0.0
    while at < SECONDS:
        at += draw.expovariate(SHORT_RATE)
        found.append(Request(at, LONG if draw.random() < LONG_SHARE else SHORT, OUTPUT, ()))
    return found


def compared(name: str, requests: Sequence[Request], ttft_s: dict[str, float], bound_ms: float) -> dict[str, Any]:
    """Shares of good requests: played, predicted with the bound, and predicted without it."""
    targets = {of: Targets(most_s, bound_ms / 1e3) for of, most_s in ttft_s.items()}
    bounded = msgspec.structs.replace(KIMI_8_H200, step_ms=bound_ms)
    splits: dict[str, Any] = {}
    chosen: dict[str, str] = {}
    for roles in SPLITS:
        simulation = Simulation(Setting(bounded, roles, targets))
        simulation.run(requests)
        simulation.check()
        ended = simulation.ended
        asked = [Asked(each.cached, each.prompt - each.cached, each.output, each.of) for each in ended]
        traffic = Traffic(len(ended) / SECONDS, asked)
        shares = {"played": round(sum(each.good for each in ended) / len(ended), 4)}
        for how, model in (("bounded", bounded), ("whole", KIMI_8_H200)):
            fleet = Fleet(WORKERS, model, roles)
            shares[how] = round(predict_roles(traffic, fleet, targets, roles).attainment, 4)
            if not roles.prefill:
                chosen[how] = _name(choose_roles(traffic, fleet, targets).roles)
        splits[_name(roles)] = shares
    found = {"traffic": name, "bound_ms": bound_ms, "splits": splits, "chosen_where_all_do_both": chosen}
    print(json.dumps(found), flush=True)
    return found


def _name(roles: Roles) -> str:
    return f"{roles.prefill}:{roles.decode}" if roles.prefill else "both"


def off(points: Sequence[dict[str, Any]], split: str) -> dict[str, float]:
    """By how much predictions of a split are off, on the mean of all points."""
    shares = [point["splits"][split] for point in points]
    return {
        how: round(sum(abs(each[how] - each["played"]) for each in shares) / len(shares), 4)
        for how in ("bounded", "whole")
    }


def main(words: Sequence[str] | None = None) -> None:
    """Plays, with `words` in place of the command line's, and writes JSON. Half a minute."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=output, default="runs/bounded-roles.json")
    asked = parser.parse_args(words)
    points: list[dict[str, Any]] = []
    for bound_ms in BOUNDS_MS:
        for load in LOADS:
            points.append(compared(f"mixed, load {load:g}", mixed(load, SECONDS, asked.seed), TTFT_S, bound_ms))
        short = short_answers(asked.seed)
        points.append(compared("short answers", short, {"": SHORT_TTFT_S}, bound_ms))
    record = {
        **provenance("numpy"),
        "what": "good requests of bounded steps: played, predicted with the bound, and as if chunks were whole",
        "worker": KIMI_8_H200.name,
        "workers": WORKERS,
        "seed": asked.seed,
        "seconds": SECONDS,
        "off_on_the_mean": {_name(roles): off(points, _name(roles)) for roles in SPLITS},
        "points": points,
    }
    asked.save.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["off_on_the_mean"]))


if __name__ == "__main__":
    program(main)
