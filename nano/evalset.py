"""Writes the evaluation sets of Kimi-Nano from the generators, with values or phrase families that training never sees.

    python -m nano.evalset models/kimi-nano            its folder eval: values, families, hand, and targets.json
    python -m nano.evalset --paired 1200 FOLDER        FOLDER/paired.jsonl, for what INT4 costs

The same seed gives the same files on every machine. What keeps them apart from training is the generators' split.
Recall has files of its own, since it is long: a few texts with several questions each.
"""

import argparse
import gzip
import importlib
import itertools
import json
import pkgutil
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import nano
from nano.data_recall import AFTER, BEFORE, PLANTED, Planted, filler, plant
from nano.data_recall import Line as TextLine
from nano.sample import Generator, Sample, Split
from redline.bench.quality.checks import GradedCall, grade

Line = dict[str, Any]  # of an evaluation set: a `redline.bench.quality.prompts.EvalPrompt`

SEED = 2026
SETS: tuple[Split, ...] = ("values", "families")
PER_ROW = 130  # least prompts of a row in each set, so that it has 250 in both
PER_PART = 45  # prompts of each kind where several make a row

# The rows of the table, as the hand-written set names them, and the generators' kinds in each. Others stand alone.
ROWS = {
    "arithmetic": ("add", "sub", "mul", "div"),
    "tools": ("tool_call", "tool_multi", "tool_none", "tool_followup"),
    "word_problem": ("word",),
}
HAND = Path(__file__).parent / "texts" / "hand.jsonl"

QUESTIONS = 10  # about each long text; reading the texts is most of what an evaluation costs
LONG = "recall"
FACT = 14  # tokens of one, about
LEAD = 50  # the first fact asked for stands about so many tokens before PLANTED, the last behind it
TAIL = (50, 180)  # tokens behind them
JOINTS = ("\n", "\n", " ")

# Percent of right answers that the model is built for: on unseen families by kind, on the hand-written set in total.
FAMILY_TARGETS = {"arithmetic": 90, "tools": 95, "code": 60, "json": 95, "lexicon": 90, "recall": 80}
TARGETS = {"families": FAMILY_TARGETS, "hand": {"all": 70}}


def main() -> None:
    """The command line above: writes the sets, each as `write` does, and the table of targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--paired", type=int, metavar="N", help="only a set of N prompts, evenly over the kinds")
    arguments = parser.parse_args()
    if arguments.paired:
        write(arguments.folder / "paired.jsonl", paired(arguments.paired))
        return
    sets = arguments.folder / "eval"
    for split in SETS:
        write(sets / f"{split}.jsonl.gz", of_split(split))
        write(sets / f"{split}.{LONG}.jsonl.gz", long_texts(split))
    write(sets / "hand.jsonl", map(json.loads, HAND.read_text(encoding="utf-8").splitlines()))
    (sets / "targets.json").write_text(json.dumps(TARGETS, indent=1) + "\n")


def of_split(split: Split, per_row: int = PER_ROW, per_part: int = PER_PART, seed: int = SEED) -> Iterator[Line]:
    """Different graded prompts of every kind but recall, kind by kind; fewer where a kind has no more to say."""
    rows = {kind: row for row, kinds in ROWS.items() for kind in kinds}
    for kind, generator in graded_kinds().items():
        row = rows.get(kind, kind)
        count = per_part if len(ROWS.get(row, ())) > 1 else per_row
        for prompt in draw(kind, generator, split, count, seed):
            yield prompt | {"kind": row}


def paired(count: int, seed: int = SEED + 1) -> list[Line]:
    """`count` prompts in random order, evenly over kinds and held-out splits, from another seed than the sets above."""
    share = -(-count // (len(graded_kinds()) * len(SETS)))
    prompts = [prompt for split in SETS for prompt in of_split(split, share, share, seed)]
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
        if kind != LONG and any(generator(random.Random(seed), "families").check for seed in range(8))
    }


def long_texts(split: Split, count: int = PER_ROW, seed: int = SEED) -> Iterator[Line]:
    """`count` prompts of about 3,700 tokens, QUESTIONS for each text; the facts asked for stand at token 3,500.

    All questions about a text stand at its end, so the prefix cache reads the text once. Texts take turns in pairs:
    the pages of one are settled while the other is read.
    """
    texts = [_questions(random.Random(f"{seed}/{split}/{LONG}/{n}"), split) for n in range(-(-count // QUESTIONS))]
    pairs = (texts[n : n + 2] for n in range(0, len(texts), 2))
    turns = (prompt for pair in pairs for turn in zip(*pair, strict=True) for prompt in turn)
    yield from itertools.islice(turns, count)


def _questions(rng: random.Random, split: Split) -> list[Line]:
    """The prompts about one text."""
    asked: list[Planted] = []
    others: list[Planted] = []
    said: set[tuple[str, str]] = set()
    while len(asked) < QUESTIONS:
        group = plant(rng, split, rng.choice((1, 1, 2, 3)))  # the first is this split's; the rest look like it
        keys = {(planted.fact.statement, planted.key) for planted in group}
        if said.isdisjoint(keys):
            said |= keys
            asked.append(group[0])
            others += group[1:]
    head = filler(rng, PLANTED - LEAD - FACT * len(others))
    for planted in others:
        head.insert(rng.randrange(len(head)), TextLine(planted.sentence, 0))
    lines = [line.text for line in head]
    for first, second in zip(asked[::2], asked[1::2], strict=True):
        lines += [first.sentence, second.sentence, *(line.text for line in filler(rng, 1))]
    lines += [line.text for line in filler(rng, rng.uniform(*TAIL))]
    text = f"{BEFORE.pick(rng, split)}\n\n{rng.choice(JOINTS).join(lines)}\n\n"

    def prompt(planted: Planted) -> Line:
        content = text + AFTER.pick(rng, split).replace("{q}", planted.question(rng, split))
        check = {"contains": [planted.value]}
        return {"kind": LONG, "messages": [{"role": "user", "content": content}], "check": check}

    return [prompt(planted) for planted in rng.sample(asked, QUESTIONS)]


def draw(kind: str, generator: Generator, split: Split, count: int, seed: int) -> Iterator[Line]:
    """Up to `count` different prompts. Each depends on its number alone, so a larger set begins with a smaller one.

    Gives fewer where 20 times `count` draws have no more new ones. Samples without a check are skipped.
    """
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


def as_prompt(sample: Sample) -> Line:
    """The line of an evaluation set: everything before the last answer, and its check. It asks for thinking.

    Raises AssertionError where the generator's own answer fails the check, which is then wrong. Code is not run here.
    """
    *before, answer = sample.messages
    assert answer["role"] == "assistant", sample
    calls: list[GradedCall] = [call["function"] for call in answer.get("tool_calls") or []]
    verdict = grade(sample.check or {}, answer.get("content") or "", calls)
    assert verdict.ok is not False, (verdict.why, sample)
    prompt: Line = {"kind": sample.kind, "messages": before, "check": sample.check}
    return prompt | ({"tools": sample.tools} if sample.tools else {})


def write(path: Path, prompts: Iterable[Line]) -> None:
    """One compact JSON line per prompt, gzipped where the name ends in .gz; prints how many there are of each kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = list(prompts)
    text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
    data = text.encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)  # no time of day in it: the same prompts are the same file
    path.write_bytes(data)
    kinds = Counter(line["kind"] for line in lines)
    print(f"{path}: {len(lines)} prompts, {len(data):,} bytes:", *(f"{k} {n}" for k, n in sorted(kinds.items())))


if __name__ == "__main__":
    main()
