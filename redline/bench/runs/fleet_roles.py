"""What choosing roles and places is worth, simulated: figures, each beside what it has to be measured by.

    python -m redline.bench.runs.fleet_roles [--only shifting|again|places|pair|speed]... [--save FILE]

`shifting`: chat, then long documents, then agents, on eight workers. Every fixed ratio, and roles that are chosen as a
server chooses them: of each phase, good requests a second beside the best fixed ratio of that phase, and over all.
`again`: the same with another seed, and with less and more load, where the ratios that are best anywhere are played.
`places`: prompts computed where the router expects less, always apart, and always where answers are, on the same
workers, over a sweep of loads. `pair`: the same for a worker for prompts and one that answers, with an H100 each and
four layers of Kimi K2.6, beside two that do both, at the traffic that `places_served` plays on two GPUs, and beyond.
`speed`: how long an hour of 2,000 GPUs takes to simulate, on one core. All but `pair` is played with `kimi-8xh200`,
which was never measured whole: these are figures of decisions, not of GPUs.
"""

import argparse
import json
import random
import resource
from collections.abc import Iterable, Sequence
from typing import Any

from redline import clock
from redline.bench.program import output, program
from redline.bench.record import provenance
from redline.bench.runs.paced_worker import LAYERS_ON_AN_H100
from redline.bench.runs.places_served import KINDS
from redline.bench.runs.steer_served import Kind as Served
from redline.simulate.fleet import Setting, Simulation
from redline.simulate.models import KIMI_8_H200
from redline.simulate.traces import AGENTS, CHAT, DOCUMENTS, Kind, Phase, Request, made
from redline.tune.expected import Roles, WorkerModel
from redline.tune.targets import Targets

TARGETS = {
    "": Targets(ttft_s=1.0, itl_s=0.05),
    "documents": Targets(ttft_s=10.0, itl_s=0.05),
    "agents": Targets(ttft_s=3.0, itl_s=0.05),
}
WORKERS = 8
LOOK_S = 5.0
PHASE_S = 1800.0
PHASES = ((CHAT, 24.0), (DOCUMENTS, 4.0), (AGENTS, 5.0))
LOADS = 0.8, 1.2  # times the rates of PHASES
FEW = range(4)  # workers for prompts, where not every ratio is played again
SPLITS: dict[str, tuple[Kind, tuple[int, ...], tuple[float, ...]]] = {  # workers for prompts; requests a second
    "chat": (CHAT, (1, 2), (10.0, 15.0, 20.0, 23.0)),
    "documents": (DOCUMENTS, (1, 3, 5), (2.0, 3.0, 4.0, 5.0)),
    "agents": (AGENTS, (1, 2, 3), (3.0, 5.0, 6.0, 8.0)),
}
SWEEP_S = 200.0
H100_LAYERS = WorkerModel(
    name="four-layers-h100",
    steps=LAYERS_ON_AN_H100,
    step_tokens=8192,
    slots=64,
    kv_tokens=400_000,
    handoff_ms=9.0,
)
PAIR, PAIR_S, PAIR_LOADS = 2, 60.0, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
PAIR_TARGETS = Targets(ttft_s=0.376, itl_s=0.00497)
BIG_WORKERS, BIG_RATE, HOUR_S, BIG_LOOK_S = 250, 60.0, 3600.0, 10.0


def shifting(seed: int) -> dict[str, Any]:
    """Good requests a second in each phase, for every fixed ratio and for chosen roles."""
    return _shifting(seed, 1.0, range(WORKERS))


def again(seed: int) -> dict[str, Any]:
    """What `shifting` gives with the next seed, and with its own at other loads."""
    return {"runs": [_shifting(*each, FEW) for each in ((seed + 1, 1.0), *((seed, times) for times in LOADS))]}


def _shifting(seed: int, times: float, prefills: Iterable[int]) -> dict[str, Any]:
    phases = [Phase(kind, PHASE_S, times * rate) for kind, rate in PHASES]
    requests = list(made(phases, seed))
    static: dict[str, list[float]] = {}
    for count in prefills:
        roles = Roles(prefill=count, decode=WORKERS - count) if count else Roles(both=WORKERS)
        name = f"{roles.prefill}:{roles.decode}" if count else "both"
        static[name] = _by_phase(_played(requests, roles, seed=seed))
        print(json.dumps({name: static[name]}), flush=True)
    simulation = _played(requests, Roles(both=WORKERS), plan_s=LOOK_S, seed=seed)
    chosen = _by_phase(simulation)
    best = [max(each[place] for each in static.values()) for place in range(len(phases))]
    return {
        "workers": WORKERS,
        "seed": seed,
        "times_the_load": times,
        "phases": [[kind.name, PHASE_S, round(times * rate, 3)] for kind, rate in PHASES],
        "requests": len(requests),
        "good_per_s": {"chosen": chosen, **static},
        "of_the_best_of_each_phase": [round(a / b, 4) for a, b in zip(chosen, best, strict=True)],
        "of_the_best_fixed_over_all": round(sum(chosen) / max(sum(each) for each in static.values()), 4),
        "changes": [[round(at_s), *roles, why] for at_s, roles, why, _ in simulation.periods],
        "goal": "0.95 of the best fixed ratio in each phase; above 1 over all",
    }


def places(seed: int) -> dict[str, Any]:
    """Shares of requests that are good, by where prompts are computed."""
    points: list[dict[str, Any]] = []
    for name, (kind, counts, rates) in SPLITS.items():
        for rate in rates:
            requests = list(made([Phase(kind, SWEEP_S, rate)], seed))
            for count in counts:
                roles = Roles(prefill=count, decode=WORKERS - count)
                shares = {
                    way: round(sum(each.good for each in _played(requests, roles, way=way).ended) / len(requests), 4)
                    for way in ("predicted", "remote", "local")
                }
                of = round(shares["predicted"] / max(shares["remote"], shares["local"]), 4)
                points.append({"kind": name, "rate": rate, "prefill": count, **shares, "of_the_better": of})
                print(json.dumps(points[-1]), flush=True)
    return {
        "workers": WORKERS,
        "seed": seed,
        "points": points,
        "least_of_the_better": min(each["of_the_better"] for each in points),
        "goal": "0.97 of the better of both",
    }


def pair(seed: int) -> dict[str, Any]:
    """Shares of requests that are good on two workers, by where prompts are computed, and where both do both."""
    points: list[dict[str, Any]] = []
    for name, kinds in KINDS.items():
        for times in PAIR_LOADS:
            requests = _pairs_requests([each._replace(rate=times * PAIR * each.rate) for each in kinds], seed)
            shares = {
                way: _share(requests, Setting(H100_LAYERS, Roles(prefill=1, decode=1), {"": PAIR_TARGETS}, way=way))
                for way in ("predicted", "remote", "local")
            }
            shares["both"] = _share(requests, Setting(H100_LAYERS, Roles(both=PAIR), {"": PAIR_TARGETS}))
            of = round(shares["predicted"] / max(shares["remote"], shares["local"], 1e-9), 4)
            points.append({"kind": name, "load": times, "requests": len(requests), **shares, "of_the_better": of})
            print(json.dumps(points[-1]), flush=True)
    return {
        "seed": seed,
        "seconds": PAIR_S,
        "points": points,
        "least_of_the_better": min(each["of_the_better"] for each in points),
        "goal": "0.97 of the better of `remote` and `local`",
    }


def _pairs_requests(kinds: Sequence[Served], seed: int) -> list[Request]:
    draw, found = random.Random(seed), list[Request]()
    for kind in kinds:
        at_s = draw.expovariate(kind.rate)
        while at_s < PAIR_S:
            found.append(Request(at_s, kind.prompt, kind.tokens, (), "", 0))
            at_s += draw.expovariate(kind.rate)
    return sorted(found)


def _share(requests: Sequence[Request], setting: Setting) -> float:
    simulation = Simulation(setting)
    simulation.run(requests)
    return round(sum(each.good for each in simulation.ended) / len(requests), 4)


def speed(seed: int) -> dict[str, Any]:
    """Seconds of the process for an hour of 250 workers of eight GPUs, with roles chosen as it goes."""
    thirds = [
        Phase(kind, HOUR_S / 3, BIG_RATE * share) for kind, share in ((CHAT, 1.5), (DOCUMENTS, 0.5), (AGENTS, 1.0))
    ]
    began = clock.process_time()
    simulation = _played(made(thirds, seed), Roles(both=BIG_WORKERS), plan_s=BIG_LOOK_S, seed=seed)
    took_s = clock.process_time() - began
    return {
        "gpus": BIG_WORKERS * KIMI_8_H200.gpus,
        "seconds": HOUR_S,
        "requests": len(simulation.ended),
        "events": simulation.events,
        "process_s": round(took_s, 1),
        "us_a_request": round(1e6 * took_s / len(simulation.ended), 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "attainment": round(sum(each.good for each in simulation.ended) / len(simulation.ended), 4),
        "changes": len(simulation.periods) - 1,
        "goal": "120 s",
    }


PARTS = {"shifting": shifting, "again": again, "places": places, "pair": pair, "speed": speed}


def _played(requests: Iterable[Request], roles: Roles, **setting: Any) -> Simulation:
    simulation = Simulation(Setting(KIMI_8_H200, roles, TARGETS)._replace(**setting))
    simulation.run(requests)
    simulation.check()
    return simulation


def _by_phase(simulation: Simulation) -> list[float]:
    """Good requests a second that came in each phase."""
    good = [0] * len(PHASES)
    for each in simulation.ended:
        good[min(len(PHASES) - 1, int(each.came_s / PHASE_S))] += each.good
    return [round(count / PHASE_S, 3) for count in good]


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PARTS, help="of the figures; absent: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=output, default="runs/fleet-roles.json")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Runs the program with `words` in place of the command line's, and writes JSON. Other figures of the file stay."""
    asked = arguments().parse_args(words)
    held = asked.save.exists() and asked.save.stat().st_size
    record: dict[str, Any] = json.loads(asked.save.read_text()) if held else {}
    for part in asked.only or PARTS:
        record[part] = {**provenance("numpy"), **PARTS[part](asked.seed)}
        asked.save.write_text(json.dumps(record, indent=1) + "\n")
    print(
        json.dumps({part: {name: value for name, value in record[part].items() if name != "points"} for part in record})
    )


if __name__ == "__main__":
    program(main)
