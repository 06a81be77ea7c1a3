"""What constrained output does to a model's scores: its tool and JSON prompts, asked with constraint and without.

    python -m redline.bench.runs.constrained_scores [models/kimi-nano] [--limit 60]

Greedy and thinking, as `redline eval` asks them, with its sets, checks and limit of tokens. With constraint a JSON
prompt has the schema of its check as response format, and a prompt with tools has calls that fit them, in auto mode:
as the API makes them. Both ways ask the same prompts, and are compared pair by pair.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from redline import clock
from redline.bench.program import count, output, program
from redline.bench.quality.answering import MAX_TOKENS, Greedy
from redline.bench.quality.prompts import Prompt, limited, read_sets
from redline.bench.quality.quality import Verdict, compare, judge
from redline.bench.record import provenance
from redline.chat.constraint import Calls, Constraint, bound_thinking, compose
from redline.chat.conversation import Conversation
from redline.wire.job import Grammar
from redline.worker.config import EngineConfig
from redline.worker.engine import Engine

KINDS = "json", "tools"


def asked_for(engine: Engine, prompt: Prompt, conversation: Conversation) -> Grammar | None:
    """The grammar that the API would give the answer to a prompt."""
    thinks, schema = engine.style.thinks(conversation), prompt.check.get("json", {}).get("schema")
    constraint = None
    if schema is not None:
        constraint = Constraint(kind="json_schema", text=json.dumps(schema), param="schema")
    composed = compose(constraint, Calls(), conversation, engine.tokenizer, thinks=thinks)
    if composed is None or constraint is None or not thinks:
        return None if composed is None else composed.grammar
    thinking = bound_thinking(None, MAX_TOKENS, (), engine.tokenizer)
    return msgspec.structs.replace(composed.grammar, thinking=thinking)


def told(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """How many were right, by set and kind, and what became of the others."""
    found: dict[str, Any] = {}
    for name in sorted({f"{verdict.set}, {verdict.kind}" for verdict in verdicts}):
        of = [verdict for verdict in verdicts if f"{verdict.set}, {verdict.kind}" == name]
        found[name] = {
            "prompts": len(of),
            "right": sum(verdict.ok is True for verdict in of),
            "cut": sum(verdict.answer.finish == "length" for verdict in of),
            "tokens": sum(verdict.answer.tokens for verdict in of),
        }
    return found


def main() -> None:
    """Asks, grades, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, nargs="?", default=Path("models/kimi-nano"))
    parser.add_argument("--limit", type=count, default=60, help="prompts of each kind of each set, at most")
    parser.add_argument("--out", type=output, default="runs/constrained-scores-cpu.json", help="the JSON to write")
    asked = parser.parse_args()
    sets = {
        name: [prompt for prompt in prompts if prompt.kind in KINDS]
        for name, prompts in limited(read_sets(asked.weights / "eval"), asked.limit).items()
    }
    prompts = [prompt for members in sets.values() for prompt in members]
    verdicts: dict[str, list[Verdict]] = {}
    result: dict[str, Any] = {
        "what": "tool and JSON prompts, with constrained output and without",
        **provenance("llguidance", "torch"),
        "model": asked.weights.name,
        "limit": asked.limit,
    }
    with Engine.open(asked.weights, EngineConfig(max_running=16, device="cpu")) as engine:
        ways = {"without": None, "with": partial(asked_for, engine)}
        for way, grammar in ways.items():
            began = clock.perf_counter()
            answers = Greedy(engine, grammar=grammar).answer(prompts, lambda: None)
            verdicts[way] = judge(sets, answers, run_code=False)
            result[way] = {"seconds": round(clock.perf_counter() - began, 1), "scores": told(verdicts[way])}
    pair = compare(verdicts["with"], verdicts["without"])
    result["pairs"] = {**msgspec.to_builtins(pair), "difference": pair.difference, "interval": pair.interval}
    result["lost"] = [
        {"kind": ours.kind, "why": ours.why, "prompt": ours.prompt[:200], "answer": ours.answer.content[:200]}
        for ours, theirs in zip(verdicts["with"], verdicts["without"], strict=True)
        if theirs.ok and not ours.ok
    ][:20]
    asked.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(result, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    program(main)
