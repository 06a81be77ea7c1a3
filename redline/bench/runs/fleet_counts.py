"""What workers that are started and ended as the traffic asks are worth, simulated: promises kept, and what is paid.

    python -m redline.bench.runs.fleet_counts [--only gradual|sudden]... [--save FILE]

Chat on up to eight workers of `kimi-8xh200`, with a first token promised within a second and tokens 50 ms apart.
`gradual`: the load grows and falls by about half every ten minutes. `sudden`: it is four times as high from one second
to the next. Fixed numbers of workers stand beside numbers that follow the traffic as a server's do, where a start takes
30, 120 and 240 s. GPU-hours count workers that start and end, too. These are figures of decisions, not of GPUs: the
worker was never measured whole.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from redline.bench.program import output, program
from redline.bench.record import provenance
from redline.simulate.figures import figures
from redline.simulate.fleet import Counted, Setting, Simulation
from redline.simulate.models import KIMI_8_H200
from redline.simulate.traces import CHAT, Phase, Request, made
from redline.tune.expected import Roles
from redline.tune.targets import Targets

TARGETS = {"": Targets(ttft_s=1.0, itl_s=0.05)}
LEAST, MOST = 2, 8
FIXED = range(5, MOST + 1)  # fewer keep less still
STARTS_S = 30.0, 120.0, 240.0
LOOK_S = 5.0
PHASE_S = 600.0
LOADS = {"gradual": (5.0, 8.0, 13.0, 20.0, 13.0, 8.0, 5.0), "sudden": (5.0, 20.0, 5.0)}  # requests a second
NEAR = 0.01  # of all requests: a number of workers that keeps as much less keeps as many


def played(requests: Sequence[Request], seconds: float, workers: int, counted: Counted | None, seed: int) -> Any:
    """One run's figures."""
    plan_s = None if counted is None else LOOK_S
    setting = Setting(KIMI_8_H200, Roles(both=workers), TARGETS, plan_s=plan_s, seed=seed, counted=counted)
    simulation = Simulation(setting)
    simulation.run(requests)
    simulation.check()
    found = figures(simulation, "", seconds)
    told = {
        "attainment": found.attainment,
        "ttft_s_p99": found.ttft_s_p99,
        "gpu_hours": found.cost,
        "starts": sum("are wanted, and" in change.why for change in found.changes),
        "workers": [bucket.running for bucket in found.over_time],
    }
    print(json.dumps({"begins_with": workers, "counted": counted, **told, "workers": "..."}), flush=True)
    return told


def part(load: str, seed: int) -> dict[str, Any]:
    """Fixed numbers, and numbers that follow, on one load."""
    phases = [Phase(CHAT, PHASE_S, rate) for rate in LOADS[load]]
    requests, seconds = list(made(phases, seed)), PHASE_S * len(phases)
    fixed = {str(count): played(requests, seconds, count, None, seed) for count in FIXED}
    follow = {
        f"{start_s:g}": played(requests, seconds, LEAST, Counted(LEAST, MOST, start_s), seed) for start_s in STARTS_S
    }
    most = max(each["attainment"] for each in fixed.values())
    fewest = next(count for count, each in fixed.items() if each["attainment"] >= most - NEAR)
    return {
        "load": load,
        "requests_per_s": LOADS[load],
        "phase_s": PHASE_S,
        "requests": len(requests),
        "seed": seed,
        "fixed": fixed,
        "follows_where_a_start_takes_s": follow,
        "fewest_fixed_that_keep_as_much": fewest,
        "gpu_hours_of_these": {
            start_s: round(each["gpu_hours"] / fixed[fewest]["gpu_hours"], 4) for start_s, each in follow.items()
        },
    }


def main(words: Sequence[str] | None = None) -> None:
    """Plays, with `words` in place of the command line's, and writes JSON. Other parts of the file stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=LOADS, help="of the loads; absent: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=output, default="runs/fleet-counts.json")
    asked = parser.parse_args(words)
    held = asked.save.exists() and asked.save.stat().st_size
    record: dict[str, Any] = json.loads(asked.save.read_text()) if held else {}
    for load in asked.only or LOADS:
        record[load] = {**provenance("numpy"), "worker": KIMI_8_H200.name, **part(load, asked.seed)}
        asked.save.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({load: each["gpu_hours_of_these"] for load, each in record.items()}))


if __name__ == "__main__":
    program(main)
