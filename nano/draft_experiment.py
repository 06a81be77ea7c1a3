"""Makes Kimi-Nano's drafter with the factory, and measures what mining is worth. Four commands, each under 9 minutes.

    python -m nano.draft_experiment synth      prompts; the model answers them, greedily, as it is served
    python -m nano.draft_experiment base       trains on half of the answers, and on the generators' own text
    python -m nano.draft_experiment arms       goes on from there, thrice on mined examples and thrice on random ones
    python -m nano.draft_experiment measure    all seven drafters in the engine, on prompts that no training had

Each is resumable: the same command again goes on where it was ended. WORK holds everything, OUT what is small and worth
keeping; `--restore FOLDER` begins on another machine with what earlier commands left in their OUT.

The base's data: half of the examples that the model has answered, and as many more as fit of the generators' own
conversations, on which the model itself was trained. There the prefix is not the model's own; the teacher is, at every
position.

The arms differ in one thing. Both take half of their answer tokens from the pool (the other half of the answers, which
the base has not seen), the same number in every domain, and the rest from the base's own examples; both go on from the
base for the same number of answer tokens, with the same schedule and seed. `mined` draws from the pool by the reducible
gap of each example under the base (`redline.draft.mine.choose`), `control` at random.

nano/README.md says what each command takes on one H200 with 16 cores, and what it leaves in OUT.
"""

import argparse
import hashlib
import lzma
import shutil
import sys
import tarfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
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
from redline.disk import write_whole
from redline.draft import evaluate as draft_evaluate
from redline.draft.corpus import capture as draft_capture
from redline.draft.corpus import synth as draft_synth
from redline.draft.corpus.capture import CaptureConfig, StoredCapture
from redline.draft.corpus.corpus import Example, mend, read_examples
from redline.draft.corpus.prompts import read_prompts
from redline.draft.corpus.synth import SynthConfig
from redline.draft.evaluate import EvalConfig, TokenizedPrompt, jobs_of
from redline.draft.mine.buckets import buckets
from redline.draft.mine.choose import Choose, answer_tokens, choose, mix, uniform, weights
from redline.draft.mine.difficulty import Scores, Serving
from redline.draft.mine.mine import scored
from redline.draft.mine.teacher_forcing import TeacherForcing
from redline.draft.train import train as draft_train
from redline.draft.train.budget import TrainBudget
from redline.draft.train.train import DrafterSizes, TrainConfig
from redline.draft.train.trainer import Recipe
from redline.messages.base import Record
from redline.model.k2.checkpoint import Checkpoint
from redline.worker.acceptance import Spoken, perfect, spoken
from redline.worker.config import EngineConfig, Learned
from redline.worker.engine import Engine

# In expected answer tokens of each domain: prompts, more of training's than the time allows to answer; own text.
ANSWER_TOKENS, HELD_TOKENS, OWN_TOKENS = 1_500_000, 100_000, 400_000
TRAIN_SEED, HELD_SEED, OWN_SEED = 1, 2, 3
BASE_TOKENS = 13_000_000  # of the base's examples, prompts included: 33 GB of states

POOL = 0.5  # of the answered examples: what arms draw from
FRESH = 0.25  # of the pool's answer tokens: what an arm takes of it
REPLAY = 0.5  # of an arm's answer tokens: the base's own
EPOCHS = 3.0  # of an arm
SEEDS = (1, 2, 3)
ARMS: dict[str, Choose] = {"mined": "gap", "control": "uniform"}
K = 3  # drafts a round

DRAFTER = DrafterSizes(intermediate_size=1_024, q_lora_rank=128, kv_lora_rank=128)  # 3.2 M parameters, 6.4 MB
# Held-out states are read before the first step, over 1 / held_out as many positions.
# Four steps ahead: with post-norm feedback (EAGLE-3.1) drafts beyond them go on as well, and steps cost time alike.
RECIPE = Recipe(
    budget=TrainBudget(), lr=1.5e-3, steps_ahead=4, held_out=0.01, held_out_tokens=16_384, measure_every=250
)
ARM_LR, ARM_WARMUP = 2.5e-4, 0.05
MAX_TOKENS = 1_024  # of an answer

CORES = 2  # of a process that serves or scores
ARM_CORES = 5  # of an arm's training: three at once on 16 cores
BATCH = 64  # answers that a process gives at once
ASK_AT_ONCE = 512
ROUNDS = 22_000  # of the base in each domain, which the arms then answer too
AGREEMENT_ROUNDS = 1_500  # of each domain: first drafts in the engine beside teacher forcing
SHARD_BYTES = 2 << 30  # few enough shards that a reader keeps all of them open
PACK_S, EXPORT_S = 40.0, 15.0  # kept of a command's time for what comes last
START_S = 45.0  # from a training's command to its first step, and from its last to its export
PRESET = 2  # of xz, where much is packed
LEAST_TRAINING = 0.4  # of a command's time; with less of it left, the base trains in the next command
SHOWN = 3  # logs of jobs that failed
BEGAN = time.monotonic()

COMMAND = (sys.executable, "-m", "nano.draft_experiment")
VERBS: dict[str, tuple[type[Any], Callable[[Any, Console], int]]] = {
    "synth": (SynthConfig, draft_synth.run),
    "capture": (CaptureConfig, draft_capture.run),
    "train": (TrainConfig, draft_train.run),
    "eval": (EvalConfig, draft_evaluate.run),
}
TRAININGS = ("train", "arm")


@dataclass(frozen=True)
class Setup:
    """Where everything is, and how much of it there is to be. seconds: for the whole command; scale: of the prompts."""

    work: Path
    out: Path
    target: Path
    seconds: float
    scale: float
    device: str

    @property
    def train(self) -> Path:
        """The file of training prompts."""
        return self.work / "prompts/train.jsonl"

    @property
    def own(self) -> Path:
        """The file of prompts that the generators answer themselves."""
        return self.work / "prompts/own.jsonl"

    @property
    def held(self) -> Path:
        """The file of prompts for `measure`, which no training has."""
        return self.work / "prompts/held.jsonl"

    @property
    def packed(self) -> Path:
        """The model's answers to the training prompts, as `draft_store.pack` writes them."""
        return self.work / "answers.xz"

    def corpus(self, name: str) -> Path:
        """The file of a corpus: "base", "pool", "own", the name of an arm, or "arms" for all of the arms together."""
        return self.work / f"corpus/{name}.jsonl"

    def drafter(self, name: str) -> Path:
        """The folder of a drafter: "base", or an arm and its seed, as in "mined-1" and "control-1"."""
        return self.work / f"drafters/{name}"

    def captured(self, name: str) -> Path:
        """The folder of a capture: "base" or "arms"."""
        return self.work / f"capture/{name}"

    def config(self, name: str) -> Path:
        """The file that holds the configuration of the job of this name."""
        return self.work / f"configs/{name}.json"

    def verb(self, name: str, verb: str, config: Record) -> Job:
        """A verb of `redline draft` as a process of its own. A training keeps the budget that it first began with."""
        path = self.config(name)
        if verb not in TRAININGS or not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=1))
        journal = self.drafter(name) / "training/log.jsonl" if verb in TRAININGS else None
        return Job(name, (*COMMAND, "verb", verb, str(path)), journal)

    @property
    def left(self) -> float:
        """Seconds that this command still has; negative once they are over."""
        return self.seconds - (time.monotonic() - BEGAN)


def synth(setup: Setup) -> None:
    """The first command: makes the training prompts, then has the model answer them until the time is up."""
    make_prompts(setup, setup.train)
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
    unfinished = run_all(jobs, places, setup.left - PACK_S, setup.work / "jobs", say)
    examples = read_examples(*(shard for shard in shards if shard.exists())).examples
    answered = pack(examples, setup.train, setup.packed)
    keep(setup, "synth", [setup.packed], examples)
    say(f"{answered:,} prompts answered; {len(unfinished)} of {len(jobs)} processes have more to do")


def make_prompts(setup: Setup, path: Path) -> None:
    """Makes one of the three files of prompts where it is not there: training's, the generators' own, or held-out ones.

    No prompt stands in two of these files.
    """
    if path.exists():
        return
    tokens, seed, more = {
        setup.train: (ANSWER_TOKENS, TRAIN_SEED, []),
        setup.own: (OWN_TOKENS, OWN_SEED, ["--short", "--avoid", setup.train, "--own", setup.corpus("own")]),
        setup.held: (
            HELD_TOKENS,
            HELD_SEED,
            ["--split", "families", "values", "--avoid", setup.train, setup.own],
        ),
    }[path]
    building = path.with_suffix(".building")
    setup.corpus("own").parent.mkdir(parents=True, exist_ok=True)
    size = ("--answer-tokens", round(tokens * setup.scale), "--seed", seed, "--tokenizer", setup.target)
    draft_prompts.main([str(word) for word in ("--out", building, *size, *more)])
    building.replace(path)
    say(f"{path} is made")


def base(setup: Setup) -> None:
    """The second command: base set and pool, the base's capture, then the base drafter."""
    split(setup)
    packing = threading.Thread(target=pack_corpus, args=(setup,))
    packing.start()
    try:
        train_base(setup)
    finally:
        packing.join()
        keep(setup, "base", [setup.work / "corpus.tar"])
    show_training(setup, "base")
    shutil.rmtree(setup.captured("base"), ignore_errors=True)
    keep(setup, "base", [archive(setup, "base"), setup.work / "jobs/base.log"])


def train_base(setup: Setup) -> None:
    """Captures the base's states and trains the base drafter in what is left of the time.

    Raises SystemExit where too little time is left, or where a job is not done.
    """
    everywhere = slots(1_000)
    if not setup.drafter("base").exists():
        finish(setup, [capture_of(setup, "base")], everywhere)
    if not setup.config("base").exists() and setup.left < LEAST_TRAINING * setup.seconds:
        raise SystemExit(f"{setup.left:.0f} s are too few to train in; the same command goes on with that")
    config = TrainConfig(
        target=str(setup.target),
        out=str(setup.drafter("base")),
        capture=str(setup.captured("base")),
        drafter=DRAFTER,
        recipe=recipe(setup, TrainBudget(seconds=round(setup.left - START_S - EXPORT_S))),
    )
    finish(setup, [setup.verb("base", "train", config)], everywhere)


def capture_of(setup: Setup, name: str) -> Job:
    """The job that captures the target's states over corpus `name`."""
    config = CaptureConfig(
        target=str(setup.target),
        corpus=(str(setup.corpus(name)),),
        out=str(setup.captured(name)),
        disk=3_000 * BASE_TOKENS,
        shard_bytes=SHARD_BYTES,
    )
    return setup.verb(f"capture-{name}", "capture", config)


def split(setup: Setup) -> None:
    """Writes base and pool, both with equal answer tokens in all domains, and the held-out prompts."""
    if setup.corpus("pool").exists() and setup.corpus("base").exists() and setup.held.exists():
        return
    make_prompts(setup, setup.train)
    make_prompts(setup, setup.own)
    make_prompts(setup, setup.held)
    parts: dict[str, list[Example]] = {"base": [], "pool": []}
    for example in unpack(setup.packed, setup.train, setup.target):
        parts["pool" if uniform(example.id, TRAIN_SEED) < POOL else "base"].append(example)
    say("answers are read")
    for name, examples in parts.items():
        least = min(tokens_of(examples)[domain] for domain in DOMAINS)
        parts[name] = mix(examples, [], least * len(DOMAINS), replay=1.0, equal_domains=True, seed=0)
        say(f"answered, for {name}: {summary(parts[name])}")
    room = BASE_TOKENS - sum(len(example.tokens) for example in parts["base"])
    own: list[Example] = []
    for example in read_examples(setup.corpus("own")).examples:  # domains are equal wherever this ends
        room -= len(example.tokens)
        if room < 0:
            break
        own.append(example)
    say(f"own text, for base: {summary(own)}")
    say(f"base in all: {summary([*parts['base'], *own])}")
    write(setup.corpus("base"), [*parts["base"], *own])
    write(setup.corpus("pool"), parts["pool"])


def pack_corpus(setup: Setup) -> None:
    """Packs base, pool and held-out prompts into corpus.tar: another machine might make other ones."""
    path = setup.work / "corpus.tar"
    if not path.exists():
        building = path.with_suffix(".building")
        with lzma.open(building, "w", preset=PRESET) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
            for file in (setup.corpus("base"), setup.corpus("pool"), setup.held):
                tar.add(file, arcname=str(file.relative_to(setup.work)))
        building.replace(path)


def arms(setup: Setup) -> None:
    """The third command: six corpora, one capture of all of them, and six drafters."""
    split(setup)
    names = [f"{arm}-{seed}" for seed in SEEDS for arm in ARMS]
    if not all(setup.corpus(name).exists() for name in (*names, "arms")):
        score_pool(setup)
        choose_all(setup, names)
    finish(setup, [capture_of(setup, "arms")], slots(1_000))
    jobs = [setup.verb(name, "arm", arm_config(setup, name)) for name in names]
    try:
        finish(setup, jobs, slots(ARM_CORES))
    finally:
        done = [name for name in names if (setup.drafter(name) / "config.json").exists()]
        keep(setup, "arms", [setup.work / "arms.json", *(archive(setup, name) for name in done)])


def score_pool(setup: Setup) -> None:
    """Scores each example of the pool under the base, in as many processes as there are slots of cores."""
    places = slots(CORES)
    jobs = [
        Job(
            f"score-{number}-{len(places)}",
            (*COMMAND, "score", setup.device, str(setup.target), str(setup.drafter("base")), str(setup.corpus("pool")),
             f"{number}/{len(places)}", str(setup.work / f"scores/{number}-{len(places)}.npz")),
        )
        for number in range(len(places))
    ]  # fmt: skip
    finish(setup, jobs, places)


def score(device: str, target: str, draft: str, corpus: str, shard: str, out: str) -> None:
    """Scores every `count`-th example of a corpus and writes them to the file `out` (npz).

    shard  "number/count": examples number, number + count, ...

    The file holds the rows of all examples, one behind the other, and where each example's end.
    """
    number, count = map(int, shard.split("/"))
    examples = read_examples(Path(corpus)).examples[number::count]
    # Near ties of the target are nothing that a drafter could learn, though the engine is greedy: temperature 1.
    found = list(TeacherForcing.open(target, draft, device).scores(examples, K, Serving("onehot", 1.0)))
    rows = {field.name: np.concatenate([getattr(one, field.name) for one in found]) for field in fields(Scores)}
    ends = np.cumsum([len(one.position_R) for one in found])
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, ends=ends, **rows)
    say(f"{len(found):,} examples scored")


def scores_of(setup: Setup, count: int) -> list[Scores]:
    """The scores of the pool's `count` examples, in the order of the pool, from the files that `score` wrote."""
    found: dict[int, Scores] = {}
    files = list((setup.work / "scores").glob("*.npz"))
    for path in files:
        number, shards = map(int, path.stem.split("-"))
        with np.load(path) as rows:
            read = {name: rows[name] for name in rows.files}
        ends = read.pop("ends")[:-1]
        parts = {name: np.split(values, ends) for name, values in read.items()}
        for place, one in enumerate(zip(*parts.values(), strict=True)):
            found[number + place * shards] = Scores(**dict(zip(parts, one, strict=True)))
    return [found[place] for place in range(count)]


def choose_all(setup: Setup, names: Sequence[str]) -> None:
    """Writes what every arm trains on, all of it together, and arms.json with the figures of the choice."""
    replayed = read_examples(setup.corpus("base")).examples
    pool = read_examples(setup.corpus("pool")).examples
    first = Tokenizer.open(setup.target).vocab_size - RESERVED
    controls = frozenset(range(first, first + RESERVED))
    found = scores_of(setup, len(pool))
    marked = [scored(example, scores, controls) for example, scores in zip(pool, found, strict=True)]
    fresh_tokens = round(FRESH * sum(tokens_of(pool).values()))
    budget = round(fresh_tokens / (1 - REPLAY))
    told: dict[str, Any] = {"buckets": buckets(marked), "pool": tokens_of(pool), "budget": budget}
    together: dict[str, Example] = {}
    for name in names:
        arm, _, seed = name.rpartition("-")
        weight = weights(marked, None, ARMS[arm])
        places = choose(marked, weight, fresh_tokens, equal_domains=True, seed=int(seed))
        fresh = [pool[place] for place in places]
        mixed = mix(replayed, fresh, budget, replay=REPLAY, equal_domains=True, seed=int(seed))
        write(setup.corpus(name), mixed)
        together |= {example.id: example for example in mixed}
        told[name] = {
            "answer_tokens": tokens_of(mixed),
            "fresh_answer_tokens": tokens_of(fresh),
            "mean_gap": sum(marked[place].hardness for place in places) / max(1, len(places)),
        }
        say(f"{name}: {summary(mixed)}; mean gap {told[name]['mean_gap']:.4f}")
    (setup.work / "arms.json").write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1))
    write(setup.corpus("arms"), together.values())
    say(f"arms together: {summary(list(together.values()))}")


def arm_config(setup: Setup, name: str) -> TrainConfig:
    """How an arm is trained: for EPOCHS over all of its own corpus, so both arms of a seed see about as much."""
    examples = read_examples(setup.corpus(name)).examples
    positions = sum(min(len(example.tokens), RECIPE.max_length) for example in examples)
    budget = TrainBudget(tokens=round(EPOCHS * positions))
    seed = int(name.rpartition("-")[2])
    return TrainConfig(
        target=str(setup.target),
        out=str(setup.drafter(name)),
        capture=str(setup.captured("arms")),
        start=str(setup.drafter("base")),
        recipe=recipe(setup, budget, lr=ARM_LR, warmup=ARM_WARMUP, held_out=0.0, seed=seed),
    )


def train_arm(config: TrainConfig, console: Console) -> int:
    """`redline draft train` on those examples of the capture that the arm's own corpus has. Gives the exit status."""
    draft_train.check(config)
    out = Path(config.out)
    mine = {example.id for example in read_examples(out.parents[1] / f"corpus/{out.name}.jsonl").examples}
    stored = StoredCapture(Path(config.capture or ""), Checkpoint.open(config.target).fingerprint, mine)
    return draft_train.train(config, stored, stored.layer_ids, console)


def recipe(setup: Setup, budget: TrainBudget, **change: Any) -> Recipe:
    """RECIPE with another budget and these changes; on a CPU, for a rehearsal, with small batches."""
    if setup.device == "cpu":
        change |= {"tokens_per_batch": RECIPE.max_length, "steps_ahead": 3, "held_out": 0.0}
    return msgspec.structs.replace(RECIPE, budget=budget, **change)


def measure(setup: Setup) -> None:
    """The fourth command: every drafter answers the held-out prompts in the engine; then the figures.

    The base answers all of them, the others those that gave the base ROUNDS rounds in each domain.
    """
    split(setup)
    names = ["base", *(f"{arm}-{seed}" for seed in SEEDS for arm in ARMS)]
    places = slots(CORES)
    (setup.work / "answers").mkdir(exist_ok=True)
    shards = dealt(setup, "all", setup.held.read_bytes().splitlines(keepends=True), len(places))
    try:
        finish(setup, asks(setup, "base", shards), places)
        show_lengths(setup, "base")
        enough = prompts_of(answered_by(setup, "base"))
        lines = [line for line in setup.held.read_bytes().splitlines(keepends=True) if id_of(line) in enough]
        shards = dealt(setup, "enough", lines, len(places))
        first, others = names[1:3], names[3:]
        jobs = [job for name in first for job in asks(setup, name, shards)]
        jobs += [agreement(setup), *(job for name in others for job in asks(setup, name, shards))]
        finish(setup, jobs, places)
    finally:
        done = [name for name in names if answered_by(setup, name)]
        for name in done[1:]:
            show_lengths(setup, name)
        with tarfile.open(setup.work / "answers.tar", "w:xz") as tar:
            tar.add(setup.work / "answers", arcname="answers")
        made = [setup.work / name for name in ("answers.tar", "agreement.json") if (setup.work / name).exists()]
        keep(setup, "measure", made)
    found: dict[str, dict[str, list[Answered]]] = defaultdict(dict)
    for name in names:
        for one in answered_by(setup, name):
            if one.id in enough:
                found[one.domain].setdefault(name, []).append(one)
    domains = {domain: compare(found[domain], SEEDS) for domain in DOMAINS}
    figures = report(domains)
    (setup.work / "measure.json").write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1))
    (setup.work / "measure.md").write_text(table(domains) + "\n")
    plot(setup.work / "measure.png", domains)
    keep(setup, "measure", [setup.work / name for name in ("measure.json", "measure.md", "measure.png")])
    print(table(domains))
    for condition, met in figures["met"].items():
        print(f"{'yes' if met else 'NO '}  {condition}")


def dealt(setup: Setup, name: str, lines: Sequence[bytes], count: int) -> list[Path]:
    """Writes the lines into `count` files in turns, and gives the files."""
    shards = [setup.work / f"held/{name}-{number}.jsonl" for number in range(count)]
    for number, shard in enumerate(shards):
        shard.parent.mkdir(parents=True, exist_ok=True)
        shard.write_bytes(b"".join(lines[number::count]))
    return shards


def asks(setup: Setup, name: str, shards: Sequence[Path]) -> list[Job]:
    """The jobs in which the drafter answers, one for each file of prompts."""
    told = setup.target, setup.drafter(name)
    return [
        Job(
            f"ask-{name}-{number}-{len(shards)}",
            (*COMMAND, "ask", *map(str, (*told, shard, setup.work / f"answers/{name}-{number}.jsonl"))),
        )
        for number, shard in enumerate(shards)
    ]


def answered_by(setup: Setup, name: str) -> list[Answered]:
    """What the drafter has answered, each prompt once.

    The files may overlap, where an earlier run of the command dealt the prompts to another number of processes.
    """
    found: dict[str, Answered] = {}
    for path in sorted((setup.work / "answers").glob(f"{name}-*.jsonl")):
        mend(path)
        for line in path.read_bytes().splitlines():
            one = msgspec.json.decode(line, type=Answered)
            found[one.id] = one
    return list(found.values())


def prompts_of(answers: Sequence[Answered]) -> set[str]:
    """The ids of the prompts, in the order of their drawing, that give ROUNDS rounds in each domain.

    All prompts of a domain that has fewer rounds are among them.
    """
    rounds: Counter[str] = Counter()
    found: set[str] = set()
    for one in sorted(answers, key=lambda one: int(one.id.rpartition("-")[2])):
        if rounds[one.domain] < ROUNDS:
            rounds[one.domain] += one.rounds
            found.add(one.id)
    return found


def id_of(line: bytes) -> str:
    """The id of a prompt, from its line of JSON."""
    return msgspec.json.decode(line)["id"]


def agreement(setup: Setup) -> Job:
    """The job that compares the base's first drafts in the engine with teacher forcing, and fails if they disagree."""
    config = EvalConfig(
        target=str(setup.target),
        draft=str(setup.drafter("base")),
        prompts=str(setup.held),
        k=(K,),
        modes=("greedy",),
        rounds=max(1, round(AGREEMENT_ROUNDS * setup.scale)),
        max_tokens=MAX_TOKENS,
        batch=BATCH,
        save=str(setup.work / "agreement.json"),
        device="cpu",
    )
    return setup.verb("agreement", "eval", config)


def ask(target: Path, draft: Path, prompts: Path, out: Path) -> None:
    """Answers prompts greedily with K drafts a round, a line of `out` for each; skips those that are there already."""
    tokenizer, style = Tokenizer.open(target), style_of(target)
    out.parent.mkdir(parents=True, exist_ok=True)
    mend(out)
    have = (
        {msgspec.json.decode(line, type=Answered).id for line in out.read_bytes().splitlines()} if out.exists() else ()
    )
    asked = [
        TokenizedPrompt(one.id, one.domain, one.language, tuple(encode(conversation(one), tokenizer, style)))
        for one in read_prompts(prompts).prompts
        if one.id not in have
    ]
    config = EvalConfig(target=str(target), draft=str(draft), max_tokens=MAX_TOKENS)
    engine_config = EngineConfig(
        max_running=BATCH,
        device="cpu",
        speculation=Learned(drafter=str(draft), tokens=K, adaptive=False, suffix=False),
    )
    say(f"{len(asked):,} prompts")
    with Engine.open(str(target), engine_config) as engine, out.open("ab") as file:
        for first in range(0, len(asked), ASK_AT_ONCE):
            part = asked[first : first + ASK_AT_ONCE]
            jobs = jobs_of(engine, part, config, "greedy", 0)
            deltas = engine.generate(jobs)
            for one, job in zip(part, jobs, strict=True):
                answer = spoken(one.id, one.domain, one.tokens, deltas[job.id])
                file.write(msgspec.json.encode(counted(answer)) + b"\n")
            file.flush()
            say(f"{first + len(part):,} of {len(asked):,} answered")


def counted(answer: Spoken) -> Answered:
    """The rounds and tokens of an answer, and those of a drafter that knows the answer."""
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


# Files, and what is said.


def say(text: str) -> None:
    """Prints a line that begins with the seconds since this process began."""
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


def summary(examples: Sequence[Example]) -> str:
    """One line: how many examples, tokens and answer tokens there are, the latter by domain too."""
    tokens = tokens_of(examples)
    whole, answers = sum(len(example.tokens) for example in examples), sum(tokens.values())
    return f"{len(examples):,} examples, {whole:,} tokens, {answers:,} of answers {dict(sorted(tokens.items()))}"


def show_training(setup: Setup, name: str) -> None:
    """Prints the held-out acceptance lengths (tokens per round at K drafts) of a training as they came, a line each."""
    for raw in (setup.drafter(name) / "training/log.jsonl").read_bytes().splitlines():
        line = msgspec.json.decode(raw)
        if "held_out" in line:
            domains = {domain: found["lengths"][K - 1] for domain, found in line["domains"].items()}
            length = line["held_out"]["lengths"][K - 1]
            print(f"{name} step {line['step']}, {line.get('tokens', 0):,} tokens: {length} {domains}")


def show_lengths(setup: Setup, name: str) -> None:
    """Prints a drafter's acceptance length (tokens per round) and rounds by domain, as far as they are known."""
    rounds: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for one in answered_by(setup, name):
        rounds[one.domain] += one.rounds
        tokens[one.domain] += one.tokens
    told = (f"{one} {tokens[one] / rounds[one]:.3f} ({rounds[one]:,})" for one in DOMAINS if rounds[one])
    say(f"{name}: {', '.join(told)}")


def write(path: Path, examples: Iterable[Example]) -> None:
    """Writes one line of JSON per example; the file appears only when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, b"".join(msgspec.json.encode(example) + b"\n" for example in examples))


def tokens_of(examples: Iterable[Example]) -> Counter[str]:
    """How many answer tokens there are, by domain."""
    found: Counter[str] = Counter()
    for example in examples:
        found[example.domain] += answer_tokens(example)
    return found


def archive(setup: Setup, name: str) -> Path:
    """A tar of a drafter's folder, its training's logs included."""
    path = setup.work / f"{name}.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(setup.drafter(name), arcname=f"drafters/{name}")
    return path


def restore(setup: Setup, folder: Path) -> None:
    """Copies what earlier commands left in their OUT, which is `folder`, into WORK."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".tar":  # packed or not
            with tarfile.open(path) as tar:
                tar.extractall(setup.work, filter="data")
        else:
            shutil.copy(path, setup.work)


def keep(setup: Setup, stage: str, files: Sequence[Path], examples: Sequence[Example] = ()) -> None:
    """Copies these files into OUT, and prints their sizes in bytes and a summary of `examples`."""
    setup.out.mkdir(parents=True, exist_ok=True)
    for path in files:
        if path.resolve() != (setup.out / path.name).resolve():
            shutil.copy(path, setup.out)
        say(f"{setup.out / path.name}: {path.stat().st_size:,} bytes")
    if examples:
        say(f"{stage}: {summary(examples)}")


def finish(setup: Setup, jobs: Sequence[Job], places: Sequence[Slot]) -> None:
    """Runs the jobs in what is left of the time.

    Where some are not done, prints the ends of their logs and raises SystemExit.
    """
    folder = setup.work / "jobs"
    unfinished = run_all(jobs, places, setup.left - EXPORT_S, folder, say)
    for name in unfinished[:SHOWN]:
        log = folder / f"{name}.log"
        print(f"--- {log}\n{log.read_text()[-1_500:] if log.exists() else 'not begun'}", flush=True)
    if unfinished:
        raise SystemExit(f"not done: {', '.join(unfinished)}; the same command goes on with them")


STAGES: dict[str, Callable[[Setup], None]] = {"synth": synth, "base": base, "arms": arms, "measure": measure}


def main() -> None:
    """The command line above; and, for processes that it starts itself, `ask`, `score` and `verb`."""
    if len(sys.argv) > 1 and sys.argv[1] == "ask":
        return ask(*map(Path, sys.argv[2:]))
    if len(sys.argv) > 1 and sys.argv[1] == "score":
        return score(*sys.argv[2:])
    if len(sys.argv) > 1 and sys.argv[1] == "verb":
        raise SystemExit(run_verb(*sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--work", type=Path, default=Path("runs/draft"))
    parser.add_argument("--out", type=Path, default=Path("runs/draft/out"))
    parser.add_argument("--target", type=Path, default=Path("models/kimi-nano"))
    parser.add_argument("--seconds", type=float, default=520, help="for the whole command")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of prompts; less is a rehearsal")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--restore", type=Path, metavar="FOLDER", help="what earlier commands left in their OUT")
    given = parser.parse_args()
    setup = Setup(given.work, given.out, given.target, given.seconds, given.scale, given.device)
    setup.work.mkdir(parents=True, exist_ok=True)
    if given.restore:
        restore(setup, given.restore)
    STAGES[given.stage](setup)
    say(f"{given.stage} is done")


def run_verb(verb: str, path: str) -> int:
    """Runs a verb of `redline draft`, or "arm", with its configuration in a JSON file. Gives the exit status."""
    config, run = VERBS[verb] if verb != "arm" else (TrainConfig, train_arm)
    return run(msgspec.json.decode(Path(path).read_bytes(), type=config), Console())


if __name__ == "__main__":
    main()
