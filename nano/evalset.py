"""Writes the evaluation sets of Kimi-Nano from the generators, with values or phrase families that training never sees.

    python -m nano.evalset models/kimi-nano            eval/{values,families,hand}.jsonl and eval/targets.json
    python -m nano.evalset --paired 1200 FOLDER        FOLDER/paired.jsonl, for what INT4 costs

The same seed gives the same files on every machine. What keeps them apart from training is the generators' split.
"""

import argparse
import importlib
import json
import pkgutil
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import nano
from nano.sample import Generator, Sample, Split
from redline.bench.local.checks import Call, grade

SEED = 2026
SETS: tuple[Split, ...] = ("values", "families")
PER_KIND = 130  # in each set, so that a kind has at least 250 in both
HAND = Path(__file__).parent / "hand.jsonl"

# Percent of right answers that the model is built for: on unseen families by kind, on the hand-written set in total.
FAMILY_TARGETS = {"add": 90, "sub": 90, "mul": 90, "div": 90}
TARGETS = {"families": FAMILY_TARGETS, "hand": {"all": 70}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--paired", type=int, metavar="N", help="only a set of N prompts, evenly over the kinds")
    arguments = parser.parse_args()
    if arguments.paired:
        write(arguments.folder / "paired.jsonl", paired(arguments.paired))
        return
    sets = arguments.folder / "eval"
    for split in SETS:
        write(sets / f"{split}.jsonl", of_split(split))
    write(sets / "hand.jsonl", map(json.loads, HAND.read_text(encoding="utf-8").splitlines()))
    (sets / "targets.json").write_text(json.dumps(TARGETS, indent=1) + "\n")


def of_split(split: Split, per_kind: int = PER_KIND, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """`per_kind` different graded prompts of every kind, kind by kind; fewer where a kind has no more to say."""
    for kind, generator in graded_kinds().items():
        yield from draw(kind, generator, split, per_kind, seed)


def paired(count: int, seed: int = SEED + 1) -> list[dict[str, Any]]:
    """`count` prompts, evenly over kinds and both held-out splits, from another seed than the sets above."""
    kinds = graded_kinds()
    share = -(-count // (len(kinds) * len(SETS)))
    prompts = [prompt for split in SETS for prompt in of_split(split, share, seed)]
    random.Random(seed).shuffle(prompts)
    return prompts[:count]


def graded_kinds() -> dict[str, Generator]:
    """Every kind that a `nano.data_*` module makes and that carries a check, by name."""
    names = [info.name for info in pkgutil.iter_modules(nano.__path__) if info.name.startswith("data_")]
    generators: dict[str, tuple[Generator, float]] = {}
    for name in names:
        generators |= getattr(importlib.import_module(f"nano.{name}"), "GENERATORS", {})
    # Some kinds are chat, free of any check. A few draws show which.
    return {
        kind: generator
        for kind, (generator, _) in sorted(generators.items())
        if any(generator(random.Random(seed), "families").check for seed in range(8))
    }


def draw(kind: str, generator: Generator, split: Split, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Up to `count` different prompts. Each depends on its number alone: a larger set begins with a smaller."""
    seen: set[str] = set()
    for number in range(20 * count):
        sample = generator(random.Random(f"{seed}/{split}/{kind}/{number}"), split)
        if sample.check is None:
            continue
        prompt = as_prompt(sample)
        asked = json.dumps([prompt["messages"], prompt.get("tools")], sort_keys=True)
        if asked in seen:
            continue
        seen.add(asked)
        yield prompt
        if len(seen) == count:
            return


def as_prompt(sample: Sample) -> dict[str, Any]:
    """The line of an evaluation set: everything before the last answer, and its check. Always in thinking mode.

    The generator's own answer must pass its check, or the check is wrong; functions are not run here.
    """
    *before, answer = sample.messages
    assert answer["role"] == "assistant", sample
    calls: list[Call] = [call["function"] for call in answer.get("tool_calls") or []]
    verdict = grade(sample.check or {}, answer.get("content") or "", calls)
    assert verdict.ok is not False, (verdict.why, sample)
    prompt: dict[str, Any] = {"kind": sample.kind, "messages": before, "check": sample.check}
    return prompt | ({"tools": sample.tools} if sample.tools else {})


def write(path: Path, prompts: Iterable[dict[str, Any]]) -> None:
    """One compact JSON line per prompt; says how many of each kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = list(prompts)
    text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    kinds = Counter(line["kind"] for line in lines)
    print(
        f"{path}: {len(lines)} prompts, {len(text.encode()):,} bytes:", *(f"{k} {n}" for k, n in sorted(kinds.items()))
    )


if __name__ == "__main__":
    main()
