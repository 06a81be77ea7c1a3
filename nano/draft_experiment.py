"""Makes Kimi-Nano's drafter with the factory, and measures what mining is worth. Four commands, each under 9 minutes.

    python -m nano.draft_experiment synth      prompts; the model answers them, greedily, as it is served
    python -m nano.draft_experiment base       trains on most of the answers
    python -m nano.draft_experiment arms       goes on from there, thrice on mined examples and thrice on random ones
    python -m nano.draft_experiment measure    all seven drafters in the engine, on prompts that no training had

Each is resumable: the same command again goes on where it was ended. WORK holds everything, OUT what is small and worth
keeping; `--restore FOLDER` begins on another machine with what earlier commands left in their OUT.

The arms differ in one thing. Both take half of their answer tokens from a pool that the base has not seen, the same
number in every domain, and the rest from the base's own examples; both go on from the base for the same number of
answer tokens, with the same schedule and seed. `mined` draws from the pool by the reducible gap of each example under
the base (`redline.draft.choose`), `control` at random.

On one H200 with 16 cores (estimates; the log has what it took):

| stage | time | what it leaves in OUT |
|---|---|---|
| synth | 30 s for 190,000 prompts, 450 s of answers in eight processes | answers.xz, about 5 MB for 9 M tokens |
| base | 30 s to encode and split, 400 s of training | base.tar, at most 7 MB; base.log |
| arms | 60 s to score the pool, 200 s for six trainings at once | six tars, at most 7 MB each |
| measure | 300 s: 4.4 M answer tokens in eight processes | measure.json, .md, .png; answers.tsv.xz, about 2 MB |
"""

import argparse
import hashlib
import lzma
import shutil
import sys
import tarfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console

from nano import draft_prompts
from nano.draft_jobs import Job, Slot, run_all, slots
from nano.draft_measure import Answered, compare, plot, report, table
from nano.draft_prompts import DOMAINS
from nano.draft_store import pack, unpack
from redline.chat.lines import conversation
from redline.chat.template import encode, style_of
from redline.chat.tokenizer import RESERVED, Tokenizer
from redline.draft import synth as draft_synth
from redline.draft import train as draft_train
from redline.draft.buckets import buckets
from redline.draft.budget import Budget
from redline.draft.choose import Choose, answer_tokens, choose, mix, uniform, weights
from redline.draft.corpus import Example, mend, read_examples
from redline.draft.disk import write_whole
from redline.draft.evaluate import Asked, EvalConfig, jobs_of
from redline.draft.mine import scored
from redline.draft.prompts import read_prompts
from redline.draft.score import Serving
from redline.draft.scorer import Scorer
from redline.draft.synth import SynthConfig
from redline.draft.train import Sizes, TrainConfig
from redline.draft.trainer import Recipe
from redline.wire.base import Record
from redline.worker.acceptance import Spoken, perfect, spoken
from redline.worker.config import EngineConfig
from redline.worker.engine import Engine

# Prompts, in expected answer tokens of each domain; more of training's than the time allows to answer.
ANSWER_TOKENS, HELD_TOKENS = 1_500_000, 90_000
TRAIN_SEED, HELD_SEED = 1, 2

POOL = 0.15  # of the examples: what arms draw from
MIX = 0.1  # of the base's answer tokens: what an arm trains on
REPLAY = 0.5  # of that: the base's own
EPOCHS = 2.0  # of an arm
SEEDS = (1, 2, 3)
ARMS: dict[str, Choose] = {"mined": "gap", "control": "uniform"}
K = 3  # drafts a round

DRAFTER = Sizes(intermediate_size=640)  # 6.95 MB; as wide as the target's dense layer it would be 7.2
# Held-out states are computed before the first step, over 1 / held_out as many positions.
RECIPE = Recipe(budget=Budget(), compile=True, held_out=0.01, held_out_tokens=16_384)
ARM_LR, ARM_WARMUP = 2e-4, 0.05
MAX_TOKENS = 1_024  # of an answer

CORES = 2  # of a process that serves
BATCH = 64  # answers that it gives at once
ASK_AT_ONCE = 512
PACK_S, EXPORT_S = 40.0, 15.0  # kept of a command's time for what comes last
BASE_TIME = 0.72  # of a command's time for steps of the base; the rest is the corpus, start and export
SHOWN = 3  # logs of jobs that failed

COMMAND = (sys.executable, "-m", "nano.draft_experiment")
VERBS: dict[str, tuple[type[Any], Callable[[Any, Console], int]]] = {
    "synth": (SynthConfig, draft_synth.run),
    "train": (TrainConfig, draft_train.run),
}


@dataclass(frozen=True)
class Setup:
    """Where everything is, and how much of it there is to be."""

    work: Path
    out: Path
    target: Path
    seconds: float
    scale: float
    device: str

    @property
    def train(self) -> Path:
        return self.work / "prompts/train.jsonl"

    @property
    def held(self) -> Path:
        return self.work / "prompts/held.jsonl"

    @property
    def packed(self) -> Path:
        return self.work / "answers.xz"

    def corpus(self, name: str) -> Path:
        """base or pool"""
        return self.work / f"corpus/{name}.jsonl"

    def drafter(self, name: str) -> Path:
        """base, mined-S or control-S"""
        return self.work / f"drafters/{name}"

    def verb(self, name: str, verb: str, config: Record) -> Job:
        """A verb of the factory as a process of its own."""
        path = self.work / f"configs/{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=1))
        return Job(name, (*COMMAND, "verb", verb, str(path)))


def synth(setup: Setup) -> None:
    """Prompts, then answers until the time is up."""
    began = time.monotonic()
    make_prompts(setup)
    places = slots(CORES)
    shards = [setup.work / f"synth/{number}.jsonl" for number in range(len(places))]
    jobs = [
        setup.verb(
            f"synth-{number}",
            "synth",
            SynthConfig(
                weights=str(setup.target),
                out=str(shard),
                prompts=(str(setup.train),),
                max_tokens=MAX_TOKENS,
                temperature=0.0,
                top_p=1.0,
                shard=f"{number + 1}/{len(places)}",
                engine=EngineConfig(max_running=BATCH, device="cpu"),
            ),
        )
        for number, shard in enumerate(shards)
    ]
    unfinished = run_all(jobs, places, setup.seconds - (time.monotonic() - began) - PACK_S, setup.work / "jobs")
    examples = read_examples(*(shard for shard in shards if shard.exists())).examples
    answered = pack(examples, setup.train, setup.packed)
    keep(setup, "synth", [setup.packed], examples)
    print(f"{answered:,} prompts answered; {len(unfinished)} of {len(jobs)} processes have more to do")


def make_prompts(setup: Setup) -> None:
    """Those for training, and those that are held out; both are the same on every machine."""
    for path, tokens, seed, more in (
        (setup.train, ANSWER_TOKENS, TRAIN_SEED, ()),
        (setup.held, HELD_TOKENS, HELD_SEED, ("--split", "families", "values", "--avoid", str(setup.train))),
    ):
        if not path.exists():
            building = path.with_suffix(".building")
            size = str(round(tokens * setup.scale))
            seeds, where = str(seed), str(setup.target)
            draft_prompts.main(
                ["--out", str(building), "--answer-tokens", size, "--seed", seeds, "--tokenizer", where, *more]
            )
            building.replace(path)


def base(setup: Setup) -> None:
    """Base set and pool, then the base drafter."""
    began = time.monotonic()
    split(setup)
    config = TrainConfig(
        target=str(setup.target),
        out=str(setup.drafter("base")),
        corpus=(str(setup.corpus("base")),),
        drafter=DRAFTER,
        recipe=recipe(setup, Budget(seconds=round(BASE_TIME * setup.seconds))),
    )
    finish(setup, [setup.verb("base", "train", config)], slots(1_000), began)
    keep(setup, "base", [archive(setup, "base"), setup.work / "jobs/base.log"])


def split(setup: Setup) -> None:
    """Writes base and pool, both with equal answer tokens in all domains."""
    if setup.corpus("pool").exists():
        return
    make_prompts(setup)
    parts: dict[str, list[Example]] = {"base": [], "pool": []}
    for example in unpack(setup.packed, setup.train, setup.target):
        parts["pool" if uniform(example.id, TRAIN_SEED) < POOL else "base"].append(example)
    for name, examples in parts.items():
        least = min(tokens_of(examples)[domain] for domain in DOMAINS)
        write(setup.corpus(name), mix(examples, [], least * len(DOMAINS), replay=1.0, equal_domains=True, seed=0))


def arms(setup: Setup) -> None:
    """Six corpora and six drafters."""
    began = time.monotonic()
    names = [f"{arm}-{seed}" for seed in SEEDS for arm in ARMS]
    if not all(setup.corpus(name).exists() for name in names):
        split(setup)
        choose_all(setup)
    jobs = [setup.verb(name, "train", arm_config(setup, name)) for name in names]
    places = slots(max(2, len(slots(1)) // len(jobs)))
    finish(setup, jobs, places, began)
    keep(setup, "arms", [setup.work / "arms.json", *(archive(setup, name) for name in names)])


def choose_all(setup: Setup) -> None:
    """Scores the pool under the base, and draws what every arm trains on."""
    replayed = read_examples(setup.corpus("base")).examples
    pool = read_examples(setup.corpus("pool")).examples
    # Near ties of the target are nothing that a drafter could learn, though the engine is greedy: temperature 1.
    scorer = Scorer.open(str(setup.target), str(setup.drafter("base")), setup.device)
    found = scorer.scores(pool, K, Serving("onehot", 1.0))
    first = Tokenizer.open(setup.target).vocab_size - RESERVED
    controls = frozenset(range(first, first + RESERVED))
    marked = [scored(example, scores, controls) for example, scores in zip(pool, found, strict=True)]
    budget = round(MIX * sum(tokens_of(replayed).values()))
    told: dict[str, Any] = {"buckets": buckets(marked), "pool": tokens_of(pool), "budget": budget}
    for seed in SEEDS:
        for arm, by in ARMS.items():
            weight = weights(marked, None, by)
            places = choose(marked, weight, int(budget * (1 - REPLAY)), equal_domains=True, seed=seed)
            fresh = [pool[place] for place in places]
            mixed = mix(replayed, fresh, budget, replay=REPLAY, equal_domains=True, seed=seed)
            write(setup.corpus(f"{arm}-{seed}"), mixed)
            told[f"{arm}-{seed}"] = {
                "answer_tokens": tokens_of(mixed),
                "fresh_answer_tokens": tokens_of(fresh),
                "mean_gap": sum(marked[place].hardness for place in places) / max(1, len(places)),
            }
    (setup.work / "arms.json").write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1))


def arm_config(setup: Setup, name: str) -> TrainConfig:
    """Both arms of a seed see the same number of answer tokens: EPOCHS times all of their mix."""
    examples = read_examples(setup.corpus(name)).examples
    positions = sum(min(len(example.tokens), RECIPE.max_length) for example in examples)
    budget = Budget(tokens=round(EPOCHS * positions))
    seed = int(name.rpartition("-")[2])
    return TrainConfig(
        target=str(setup.target),
        out=str(setup.drafter(name)),
        corpus=(str(setup.corpus(name)),),
        start=str(setup.drafter("base")),
        recipe=recipe(setup, budget, lr=ARM_LR, warmup=ARM_WARMUP, held_out=0.0, seed=seed),
    )


def recipe(setup: Setup, budget: Budget, **change: Any) -> Recipe:
    """RECIPE with another budget; on a CPU with small batches, for a rehearsal."""
    if setup.device == "cpu":
        change |= {"tokens_per_batch": RECIPE.max_length, "steps_ahead": 3, "compile": False, "held_out": 0.0}
    return msgspec.structs.replace(RECIPE, budget=budget, **change)


def measure(setup: Setup) -> None:
    """Every drafter answers the held-out prompts in the engine; then the figures."""
    began = time.monotonic()
    make_prompts(setup)
    names = ["base", *(f"{arm}-{seed}" for seed in SEEDS for arm in ARMS)]
    places = slots(CORES)
    shards = [setup.work / f"held/{number}.jsonl" for number in range(len(places))]
    lines = setup.held.read_bytes().splitlines(keepends=True)
    for number, shard in enumerate(shards):
        shard.parent.mkdir(parents=True, exist_ok=True)
        shard.write_bytes(b"".join(lines[number :: len(shards)]))
    jobs = [
        Job(
            f"ask-{name}-{number}",
            (
                *COMMAND,
                "ask",
                str(setup.target),
                str(setup.drafter(name)),
                str(shard),
                str(answers(setup, name, number)),
            ),
        )
        for number, shard in enumerate(shards)  # shard by shard: drafters stay abreast
        for name in names
    ]
    finish(setup, jobs, places, began)
    found: dict[str, dict[str, list[Answered]]] = defaultdict(dict)
    everything: list[bytes] = []
    for name in names:
        raw = [line for n in range(len(shards)) for line in answers(setup, name, n).read_bytes().splitlines()]
        everything += [msgspec.json.encode(name) + b"\t" + line for line in raw]
        for line in raw:
            one = msgspec.json.decode(line, type=Answered)
            found[one.domain].setdefault(name, []).append(one)
    domains = {domain: compare(found[domain], SEEDS) for domain in DOMAINS}
    figures = report(domains)
    (setup.work / "measure.json").write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1))
    (setup.work / "measure.md").write_text(table(domains) + "\n")
    plot(setup.work / "measure.png", domains)
    (setup.work / "answers.tsv.xz").write_bytes(lzma.compress(b"\n".join(everything)))
    keep(
        setup,
        "measure",
        [setup.work / name for name in ("measure.json", "measure.md", "measure.png", "answers.tsv.xz")],
    )
    print(table(domains))
    for condition, met in figures["met"].items():
        print(f"{'yes' if met else 'NO '}  {condition}")


def answers(setup: Setup, name: str, number: int) -> Path:
    return setup.work / f"answers/{name}-{number}.jsonl"


def ask(target: Path, draft: Path, prompts: Path, out: Path) -> None:
    """Greedy answers with K drafts a round, a line each; goes on behind those that are there."""
    tokenizer, style = Tokenizer.open(target), style_of(target)
    out.parent.mkdir(parents=True, exist_ok=True)
    mend(out)
    have = (
        {msgspec.json.decode(line, type=Answered).id for line in out.read_bytes().splitlines()} if out.exists() else ()
    )
    asked = [
        Asked(one.id, one.domain, one.language, tuple(encode(conversation(one), tokenizer, style)))
        for one in read_prompts(prompts).prompts
        if one.id not in have
    ]
    config = EvalConfig(target=str(target), draft=str(draft), max_tokens=MAX_TOKENS)
    engine_config = EngineConfig(
        max_running=BATCH, device="cpu", draft=str(draft), draft_tokens=K, draft_adaptive=False, suffix=False
    )
    with Engine.open(str(target), engine_config) as engine, out.open("ab") as file:
        for first in range(0, len(asked), ASK_AT_ONCE):
            part = asked[first : first + ASK_AT_ONCE]
            jobs = jobs_of(engine, part, config, "greedy", 0)
            deltas = engine.generate(jobs)
            for one, job in zip(part, jobs, strict=True):
                answer = spoken(one.id, one.domain, one.tokens, deltas[job.id])
                file.write(msgspec.json.encode(counted(answer)) + b"\n")
            file.flush()


def counted(answer: Spoken) -> Answered:
    best = perfect(answer, K)
    return Answered(
        id=answer.id,
        domain=answer.domain,
        digest=hashlib.blake2b(repr(answer.tokens[answer.prompt :]).encode(), digest_size=8).hexdigest(),
        rounds=len(answer.rounds),
        tokens=len(answer.rounds) + sum(one.accepted for one in answer.rounds),
        best_rounds=len(best),
        best_tokens=len(best) + sum(one.accepted for one in best),
    )


# Files.


def write(path: Path, examples: Iterable[Example]) -> None:
    """Appears whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, b"".join(msgspec.json.encode(example) + b"\n" for example in examples))


def tokens_of(examples: Iterable[Example]) -> Counter[str]:
    """Answer tokens by domain."""
    found: Counter[str] = Counter()
    for example in examples:
        found[example.domain] += answer_tokens(example)
    return found


def archive(setup: Setup, name: str) -> Path:
    """A drafter with its training's logs."""
    path = setup.work / f"{name}.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(setup.drafter(name), arcname=f"drafters/{name}")
    return path


def restore(setup: Setup, folder: Path) -> None:
    """What earlier commands left in their OUT, into WORK."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".tar":
            with tarfile.open(path) as tar:
                tar.extractall(setup.work, filter="data")
        else:
            shutil.copy(path, setup.work)


def keep(setup: Setup, stage: str, files: Sequence[Path], examples: Sequence[Example] = ()) -> None:
    """Copies what a command leaves into OUT, and tells the sizes."""
    setup.out.mkdir(parents=True, exist_ok=True)
    for path in files:
        if path.resolve() != (setup.out / path.name).resolve():
            shutil.copy(path, setup.out)
        print(f"{setup.out / path.name}: {path.stat().st_size:,} bytes")
    if examples:
        print(f"{stage}: {len(examples):,} examples; answer tokens {dict(sorted(tokens_of(examples).items()))}")


def finish(setup: Setup, jobs: Sequence[Job], places: Sequence[Slot], began: float) -> None:
    """Runs the jobs in what is left of the time; where some are not done, ends the command with what they said."""
    folder = setup.work / "jobs"
    unfinished = run_all(jobs, places, setup.seconds - (time.monotonic() - began) - EXPORT_S, folder)
    for name in unfinished[:SHOWN]:
        log = folder / f"{name}.log"
        print(f"--- {log}\n{log.read_text()[-1_500:] if log.exists() else 'not begun'}")
    if unfinished:
        raise SystemExit(f"not done: {', '.join(unfinished)}; the same command goes on with them")


STAGES: dict[str, Callable[[Setup], None]] = {"synth": synth, "base": base, "arms": arms, "measure": measure}


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "ask":
        ask(*map(Path, sys.argv[2:]))
        return
    if len(sys.argv) > 1 and sys.argv[1] == "verb":
        raise SystemExit(run_verb(*sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--work", type=Path, default=Path("runs/draft"))
    parser.add_argument("--out", type=Path, default=Path("runs/draft/out"))
    parser.add_argument("--target", type=Path, default=Path("models/kimi-nano"))
    parser.add_argument("--seconds", type=float, default=520, help="for the whole command")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of prompts; less is a rehearsal")
    parser.add_argument("--restore", type=Path, metavar="FOLDER", help="what earlier commands left in their OUT")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    setup = Setup(given.work, given.out, given.target, given.seconds, given.scale, device)
    setup.work.mkdir(parents=True, exist_ok=True)
    if given.restore:
        restore(setup, given.restore)
    began = time.monotonic()
    STAGES[given.stage](setup)
    print(f"{given.stage}: {time.monotonic() - began:.0f} s")


def run_verb(verb: str, path: str) -> int:
    """A verb of the factory with its configuration in a file."""
    config, run = VERBS[verb]
    return run(msgspec.json.decode(Path(path).read_bytes(), type=config), Console())


if __name__ == "__main__":
    main()
