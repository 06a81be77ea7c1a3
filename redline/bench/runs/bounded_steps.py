"""What bounding steps by their predicted time brings (`engine.step_ms`), simulated: beside chunks of a fixed size.

    python -m redline.bench.runs.bounded_steps [--seed 1] [--save FILE]

Chat, long documents and agents come together to two workers of `kimi-8xh200`, at four loads. Prompts are computed in
chunks of 8,192, of 2,048 or of 512 tokens, or in such as keep a step beside answers within the bound, by prediction.

`tails`: a request is good where its first token comes in time and no more than 1 % of the gaps between its tokens are
longer than the bound. `means`: where its gaps are within the same time on the mean, as `[sla]` has it. Steps take what
the model says, so a prediction is never wrong here: these are figures of the rule. A minute or two.
"""

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from redline.bench.program import output, program
from redline.bench.record import provenance
from redline.simulate.figures import figures
from redline.simulate.fleet import Ended, Setting, Simulation
from redline.simulate.models import KIMI_8_H200
from redline.simulate.traces import AGENTS, CHAT, DOCUMENTS, Phase, Request, made
from redline.tune.expected import Roles
from redline.tune.targets import Targets

TTFT_S = {"": 1.0, "documents": 10.0, "agents": 3.0}
RATES = ((CHAT, 3.0), (DOCUMENTS, 0.25), (AGENTS, 0.4))  # sessions' requests a second, at load 1
LOADS = 0.75, 1.0, 1.25, 1.5
BOUNDS_MS = 50.0, 80.0
FIXED = 8192, 2048, 512
SECONDS = 200.0
WORKERS = 2
LATE = 0.01  # of a request's gaps, that may be longer than the bound


def mixed(load: float, seconds: float, seed: int) -> list[Request]:
    """All three kinds at once, by time."""
    kinds = (made([Phase(kind, seconds, rate * load)], seed + place) for place, (kind, rate) in enumerate(RATES))
    return sorted((request for kind in kinds for request in kind), key=lambda request: request.at_s)


def played(
    requests: Sequence[Request], bound_ms: float, tokens: int, seconds: float, *, bounded: bool
) -> dict[str, Any]:
    """Shares of the requests and what they took, with chunks of so many tokens, or of no more than that."""
    targets = {name: Targets(ttft_s, bound_ms / 1e3) for name, ttft_s in TTFT_S.items()}
    model = msgspec.structs.replace(KIMI_8_H200, step_tokens=tokens, step_ms=bound_ms if bounded else None)
    simulation = Simulation(Setting(model, Roles(both=WORKERS), targets, slow_s=bound_ms / 1e3))
    simulation.run(requests)
    simulation.check()
    ended, shown = simulation.ended, figures(simulation, "", seconds)

    def in_time(each: Ended) -> bool:
        return each.first_s <= targets.get(each.of, targets[""]).ttft_s

    def smooth(each: Ended) -> bool:
        return math.isfinite(each.first_s) and each.slow <= LATE

    return {
        "good_by_tails": _share([in_time(each) and smooth(each) for each in ended]),
        "good_by_means": round(shown.attainment, 4),
        "first_token_in_time": _share([in_time(each) for each in ended]),
        "smooth": _share([smooth(each) for each in ended]),
        "itl_ms_p50": shown.itl_ms_p50,
        "itl_ms_p99": shown.itl_ms_p99,
        "ttft_s_p50": shown.ttft_s_p50,
        "ttft_s_p99": shown.ttft_s_p99,
    }


def points(seed: int, loads: Sequence[float] = LOADS, seconds: float = SECONDS) -> list[dict[str, Any]]:
    """All loads and bounds, with each way to cut prompts."""
    found: list[dict[str, Any]] = []
    for load in loads:
        requests = mixed(load, seconds, seed)
        for bound_ms in BOUNDS_MS:
            ways = {str(tokens): played(requests, bound_ms, tokens, seconds, bounded=False) for tokens in FIXED}
            ways["predicted"] = played(requests, bound_ms, FIXED[0], seconds, bounded=True)
            found.append({"load": load, "bound_ms": bound_ms, "requests": len(requests), "ways": ways})
            print(
                json.dumps({**found[-1], "ways": {way: each["good_by_tails"] for way, each in ways.items()}}),
                flush=True,
            )
    return found


def summed(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all points, of all requests: shares by tails and by means, for each way."""
    requests = sum(point["requests"] for point in found)
    names = list(found[0]["ways"])
    return {
        key: {way: round(sum(p["requests"] * p["ways"][way][key] for p in found) / requests, 4) for way in names}
        for key in ("good_by_tails", "good_by_means", "first_token_in_time")
    }


def _share(those: Sequence[bool]) -> float:
    return round(sum(those) / len(those), 4)


def main(words: Sequence[str] | None = None) -> None:
    """Plays, with `words` in place of the command line's, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=output, default="runs/bounded-steps.json")
    asked = parser.parse_args(words)
    found = points(asked.seed)
    record = {
        **provenance("numpy"),
        "what": "chunks of prompts beside answers: of fixed sizes, and such as keep a step within a bound; simulated",
        "worker": KIMI_8_H200.name,
        "workers": WORKERS,
        "seed": asked.seed,
        "seconds": SECONDS,
        "ttft_s": TTFT_S,
        "late_gaps": LATE,
        "all": summed(found),
        "points": found,
    }
    asked.save.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["all"], indent=1))


if __name__ == "__main__":
    program(main)
