"""Acceptance length by domain, for each k, greedy and sampled: measured in the engine, and predicted by training.

The engine serves real prompts with exactly k drafts per round and reports the verified and accepted drafts
(`worker.acceptance` defines a round, its length and the interval). On some of the same answers the drafter is then
scored by teacher forcing (`score`), at the positions where the engine's rounds began. With greedy decoding the first
draft of a round depends only on the text, so both must find the same share of hits within one point; otherwise the two
compute different drafters (layer ids, norms, RoPE: docs/drafters.md).

Upper bounds, on the same answers:
    perfect   a drafter that proposes exactly the target's own continuation: k + 1, less at the ends of answers
    one-hot   sampled mode with the drafter's argmax as draft: 1 + the sum of the products of max p
"""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from redline.chat.lines import conversation
from redline.chat.page_hashes import make_job
from redline.chat.template import encode, style_of
from redline.chat.tokenizer import Tokenizer
from redline.disk import check_output, save
from redline.draft.corpus.corpus import Example, read_examples
from redline.draft.corpus.prompts import prompts, read_prompts
from redline.draft.corpus.synth import INTERRUPTED, check_target, in_bulk, sampling_check
from redline.draft.corpus.target import TargetModel
from redline.draft.mine.difficulty import Scores, Serving, walk
from redline.draft.mine.report import drawn, length_plot, narrow, tell_skipped
from redline.draft.mine.teacher_forcing import TeacherForcing
from redline.errors import ConfigError
from redline.messages.base import Record
from redline.messages.job import Job, JobId, Sampling
from redline.model.drafter import is_block, open_drafter
from redline.model.eagle3.module import Eagle3
from redline.model.k2.checkpoint import Checkpoint
from redline.model.spec import spec_of
from redline.progress import Working
from redline.worker.acceptance import DraftRound, Spoken, acceptance_length, by_position, perfect, spoken
from redline.worker.config import EngineConfig, Learned
from redline.worker.engine import Engine

Mode = Literal["greedy", "sampled"]
BATCH = 64  # prompts submitted at once per 16 that run, so that few steps are at the end of a batch
HELD_OUT = 1_000_003  # added to the seed, so that the prompts differ from those of synth
ENOUGH = 1000  # with this number of rounds a difference of one point is significant


class EvalConfig(Record, frozen=True):
    """Settings of `redline draft eval`."""

    target: str
    draft: str
    prompts: str | None = None  # a file of prompts
    corpus: str | None = None  # or a corpus: its prompts are answered again
    domains: tuple[str, ...] = ()  # or built-in templates, with another seed than synth's
    count: int = 200  # prompts of each of these domains
    k: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)
    modes: tuple[Mode, ...] = ("greedy", "sampled")
    rounds: int = 2000  # minimum number for each domain, k and mode; 0: every prompt once
    temperature: float = 1.0  # of the sampled mode
    top_p: float = 1.0
    max_tokens: int = 1024
    batch: int = 16  # number of answers in a step
    suffix: bool = False  # whether suffix matches in the text are proposed too
    offline: int = 64  # number of answers per domain that are also scored by teacher forcing; 0: none
    seed: int = 0
    save: str | None = None  # a JSON file; a plot is written next to it
    device: str | None = None


class TokenizedPrompt(NamedTuple):
    """A prompt as token ids."""

    id: str
    domain: str
    language: str
    tokens: tuple[int, ...]


class DomainAcceptance(Record, frozen=True):
    """One domain at one k in one mode. Lengths in tokens per round."""

    domain: str
    k: int
    mode: Mode
    prompts: int
    rounds: int
    rows: int  # decode rows, including those without drafts
    length: float
    low: float
    high: float
    positions: tuple[float, ...]  # acceptance rate of each draft position, given that it was proposed
    ceiling: float  # of a perfect drafter
    onehot_ceiling: float | None = None
    offline: float | None = None  # length predicted by teacher forcing
    offline_first: float | None = None  # predicted acceptance of the first draft, at the engine's positions
    engine_first: float | None = None  # acceptance of the first draft in the engine, over the same rounds

    @property
    def gap(self) -> float:
        """Tokens per round by which a perfect drafter is better."""
        return self.ceiling - self.length


class Pooled(Record, frozen=True):
    """All domains at one k in one mode, with rounds and accepted drafts per prompt, so that runs can be paired."""

    k: int
    mode: Mode
    rounds: int
    length: float
    low: float
    high: float
    by_prompt: dict[str, tuple[int, int]]


class Evaluation(Record, frozen=True):
    """The results of one run of `eval`, with the folders of target and drafter."""

    target: str
    draft: str
    measured: tuple[DomainAcceptance, ...]
    short: tuple[str, ...]  # measurements that ran out of prompts before reaching their rounds
    pooled: tuple[Pooled, ...] = ()  # for every k and mode with rounds


Open = Callable[[int], AbstractContextManager[Engine]]
"""Opens an engine that always proposes exactly the given number of drafts."""
Offline = Callable[[Sequence[Spoken], Serving, int], list[Scores]]
"""Scores answers by teacher forcing, with the given number of drafts per round."""


def evaluate(
    open_engine: Open,
    asked: Sequence[TokenizedPrompt],
    config: EvalConfig,
    offline: Callable[[Engine], Offline] | None = None,
    done: Callable[[str, int], object] = lambda what, rounds: None,
) -> Evaluation:
    """Runs the prompts, counts and scores. `done` is called after every batch: description, number of rounds so far.

    open_engine: loads an engine that proposes k drafts; it is closed before the next one is opened. offline: returns
    the scoring function for an engine, using the engine's copy of the target; None disables scoring. Raises ConfigError
    if an answer ends in an error.
    """
    measured: list[DomainAcceptance] = []
    short: list[str] = []
    pooled: list[Pooled] = []
    for k in config.k:
        with open_engine(k) as engine:
            said: dict[Mode, dict[str, list[Spoken]]] = {
                mode: _ask_all(engine, asked, config, k, mode, done) for mode in config.modes
            }
            beside = None if offline is None else offline(engine)
            for mode, answers in said.items():
                pooled += _pooled([one for of_domain in answers.values() for one in of_domain], k, mode, config.seed)
                for domain, of_domain in sorted(answers.items()):
                    one = _measure(domain, of_domain, k, mode, config, beside)
                    measured.append(one)
                    if config.rounds > one.rounds:
                        short.append(f"{domain}, k = {k}, {mode}: {one.rounds:,} rounds of {config.rounds:,}")
    return Evaluation(
        target=config.target, draft=config.draft, measured=tuple(measured), short=tuple(short), pooled=tuple(pooled)
    )


def first_draft_check(evaluation: Evaluation) -> tuple[float, float, int] | None:
    """(the engine's acceptance rate of first drafts, the predicted rate, number of rounds), greedy only.

    None if no answer was scored.
    """
    pairs = [
        (one.engine_first, one.offline_first, one.rounds)
        for one in evaluation.measured
        if one.mode == "greedy" and one.engine_first is not None and one.offline_first is not None
    ]
    total = sum(rounds for *_, rounds in pairs)
    if not total:
        return None
    engine, foretold = (sum(pair[side] * pair[2] for pair in pairs) / total for side in (0, 1))
    return engine, foretold, total


def agree(evaluation: Evaluation) -> bool:
    """Whether engine and trainer agree within a point on the first draft; True if there are too few rounds."""
    found = first_draft_check(evaluation)
    return found is None or found[2] < ENOUGH or abs(found[0] - found[1]) <= 0.01


def jobs_of(engine: Engine, asked: Sequence[TokenizedPrompt], config: EvalConfig, mode: Mode, turn: int) -> list[Job]:
    """A job for each prompt. turn: how often the same prompts were used before; it changes the sampling seed.

    max_tokens is reduced if the prompt leaves less room in the engine's context.
    """
    stop_ids = engine.tokenizer.stop_ids
    room = engine.engine.layout.max_model_len
    jobs: list[Job] = []
    for one in asked:
        seed = int.from_bytes(blake2b(f"{config.seed} {turn} {one.id}".encode(), digest_size=6).digest(), "little")
        greedy = mode == "greedy"
        sampling = Sampling(
            max_tokens=min(config.max_tokens, max(1, room - len(one.tokens))),
            temperature=0.0 if greedy else config.temperature,
            top_p=1.0 if greedy else config.top_p,
            seed=seed,
            stop_ids=stop_ids,
        )
        jobs.append(make_job(JobId(f"{one.id} {mode} {turn}"), one.tokens, sampling, engine.fingerprint))
    return jobs


def _ask_all(
    engine: Engine,
    asked: Sequence[TokenizedPrompt],
    config: EvalConfig,
    k: int,
    mode: Mode,
    done: Callable[[str, int], object],
) -> dict[str, list[Spoken]]:
    """Answers by domain: each domain until it has enough rounds or, with greedy decoding, until its prompts are used.

    A prompt's greedy answer is always the same, so only sampled prompts are repeated.
    """
    found: dict[str, list[Spoken]] = defaultdict(list)
    rounds: dict[str, int] = defaultdict(int)
    prompts_of = Counter(one.domain for one in asked)

    def missing(domain: str) -> bool:
        if not config.rounds:
            return True
        hopeless = len(found[domain]) >= prompts_of[domain] and not rounds[domain]  # no draft is ever proposed here
        return rounds[domain] < config.rounds and not hopeless

    size = BATCH * max(1, config.batch // 16)
    for turn, batch in _batches(asked, again=mode == "sampled" and config.rounds > 0, missing=missing, size=size):
        jobs = jobs_of(engine, batch, config, mode, turn)
        deltas = engine.generate(jobs)
        for one, job in zip(batch, jobs, strict=True):
            if deltas[job.id][-1].finish == "error":
                raise ConfigError(f"prompt {one.id}: {deltas[job.id][-1].error}")
            answer = spoken(one.id, one.domain, one.tokens, deltas[job.id])
            found[one.domain].append(answer)
            rounds[one.domain] += len(answer.rounds)
        done(f"k = {k}, {mode}", sum(rounds.values()))
    return found


def _batches(
    asked: Sequence[TokenizedPrompt], *, again: bool, missing: Callable[[str], bool], size: int
) -> Iterator[tuple[int, list[TokenizedPrompt]]]:
    """Batches of prompts of the domains that still need rounds, round-robin over domains."""
    domains: dict[str, list[TokenizedPrompt]] = defaultdict(list)
    for one in asked:
        domains[one.domain].append(one)
    turn = 0
    while turn == 0 or again:
        place = 0
        while wanted := [d for d in domains if place < len(domains[d]) and missing(d)]:
            each = max(1, size // len(wanted))
            yield turn, [one for domain in wanted for one in domains[domain][place : place + each]]
            place += each
        if not any(missing(domain) for domain in domains):
            return
        turn += 1


def _measure(
    domain: str, answers: Sequence[Spoken], k: int, mode: Mode, config: EvalConfig, offline: Offline | None
) -> DomainAcceptance:
    rounds = [answer.rounds for answer in answers]
    length = acceptance_length(rounds, config.seed)
    scored = answers[: config.offline] if offline is not None else []
    beside = _beside(scored, k, mode, config, offline) if offline is not None and scored else (None,) * 4
    onehot, foretold, foretold_first, engine_first = beside
    return DomainAcceptance(
        domain=domain,
        k=k,
        mode=mode,
        prompts=len(answers),
        rounds=length.rounds,
        rows=sum(answer.rows for answer in answers),
        length=length.mean,
        low=length.low,
        high=length.high,
        positions=tuple(by_position(rounds, k)),
        ceiling=acceptance_length([perfect(answer, k) for answer in answers], config.seed).mean,
        onehot_ceiling=onehot,
        offline=foretold,
        offline_first=foretold_first,
        engine_first=engine_first,
    )


def _pooled(answers: Sequence[Spoken], k: int, mode: Mode, seed: int) -> list[Pooled]:
    """A list of one; empty if there is no round."""
    by_prompt: dict[str, list[DraftRound]] = defaultdict(list)
    for answer in answers:  # in sampled mode a prompt may occur several times
        by_prompt[answer.id] += answer.rounds
    length = acceptance_length(list(by_prompt.values()), seed)
    if not length.rounds:
        return []
    counts = {name: (len(rounds), sum(one.accepted for one in rounds)) for name, rounds in by_prompt.items()}
    return [
        Pooled(
            k=k,
            mode=mode,
            rounds=length.rounds,
            length=length.mean,
            low=length.low,
            high=length.high,
            by_prompt=counts,
        )
    ]


def _beside(
    answers: Sequence[Spoken], k: int, mode: Mode, config: EvalConfig, offline: Offline
) -> tuple[float | None, float | None, float | None, float | None]:
    """one-hot ceiling, predicted length, predicted acceptance of first drafts, the engine's over the same rounds."""
    if mode == "greedy":
        found = offline(answers, Serving("onehot", 0.0, own=True), k)
        foretold = acceptance_length([[DraftRound(*one) for one in walk(scores, k)] for scores in found]).mean
        ceiling = None
    else:
        found = offline(answers, Serving("sampled", config.temperature, config.top_p), k)
        foretold = _mean([scores.length_R for scores in found])
        likeliest = offline(answers, Serving("onehot", config.temperature, config.top_p), k)
        ceiling = _mean([scores.longest_R for scores in likeliest])
    first: list[float] = []
    held: list[float] = []
    for answer, scores in zip(answers, found, strict=True):
        place = {int(position): row for row, position in enumerate(scores.position_R)}
        for round in answer.rounds:
            if round.position in place:
                first.append(float(scores.accept_Rk[place[round.position], 0]))
                held.append(float(round.accepted > 0))
    if not first:
        return ceiling, foretold, None, None
    return ceiling, foretold, float(np.mean(first)), float(np.mean(held))


def _mean(parts: Sequence["np.ndarray"]) -> float:
    joined = np.concatenate(parts)
    return float(joined.mean()) if len(joined) else math.nan


def _mean_of(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def table(evaluation: Evaluation, mode: Mode) -> Table:
    """A row for each domain and k of one mode, and the mean over domains for each k, in tokens per round."""
    shown = narrow(f"acceptance length, {mode}", "tokens per round, including the target's own")
    for name in ("k", "domain"):
        shown.add_column(name, no_wrap=True)
    for name in ("length", "95 %", "ceiling", "gap", "offline", "rounds", "by position"):
        shown.add_column(name, justify="right")
    of_mode = [one for one in evaluation.measured if one.mode == mode]
    for k in sorted({one.k for one in of_mode}):
        here = [one for one in of_mode if one.k == k]
        for one in here:
            shown.add_row(
                str(k),
                one.domain,
                f"{one.length:.3f}",
                f"{one.low:.3f}-{one.high:.3f}",
                f"{one.ceiling:.2f}" if one.onehot_ceiling is None else f"{one.ceiling:.2f} ({one.onehot_ceiling:.2f})",
                f"{one.gap:.2f}",
                "" if one.offline is None else f"{one.offline:.3f}",
                f"{one.rounds:,}",
                " ".join(f"{share:.2f}" for share in one.positions),
            )
        sound = [one for one in here if one.rounds]
        mean, most = _mean_of([one.length for one in sound]), _mean_of([one.ceiling for one in sound])
        cells = (f"{mean:.3f}", "", f"{most:.2f}", f"{most - mean:.2f}", "", f"{sum(one.rounds for one in here):,}", "")
        shown.add_row(str(k), "mean", *cells, style="bold", end_section=True)
    return shown


def run(config: EvalConfig, console: Console, origin: Mapping[str, Any] | None = None) -> int:
    """Measures, prints, saves. Returns 0, 1 if the engine and the trainer's estimate disagree, or 130 after Ctrl-C.

    origin: where and when the numbers were made; saved with them. Raises ConfigError, and CheckpointError if target or
    drafter cannot be read.
    """
    asked, skipped = check(config)
    tell_skipped(skipped, console)
    open_drafter(config.draft, Checkpoint.open(config.target).config)  # report a wrong folder before the work begins
    if config.offline and is_block(config.draft):
        console.print("a block drafter is measured in the engine alone: teacher forcing scores chains", style="dim")
        config = msgspec.structs.replace(config, offline=0)
    try:
        return _run(config, asked, console, origin)
    except KeyboardInterrupt:
        console.print("stopped: nothing was saved", highlight=False)
        return INTERRUPTED


def check(config: EvalConfig) -> "tuple[list[TokenizedPrompt], list[str]]":
    """The prompts, and a message for each line that is not a prompt.

    The drafter is not checked: an earlier stage may still have to make it. Raises ConfigError if another setting is
    wrong or missing, and CheckpointError if the target cannot be read.
    """
    if sum(map(bool, (config.prompts, config.corpus, config.domains))) != 1:
        raise ConfigError("redline draft eval: expected exactly one of --prompts, --corpus and --domain")
    if min(config.count, config.max_tokens, config.batch) < 1:
        raise ConfigError("redline draft eval: --count, --max-tokens and --batch are at least 1")
    if min(config.rounds, config.offline) < 0:
        raise ConfigError("redline draft eval: --rounds and --offline are 0 or more")
    if not config.k or min(config.k) < 1:
        raise ConfigError(f"redline draft eval: --k is {config.k}; expected drafts per round, each at least 1")
    if not config.modes:
        raise ConfigError("redline draft eval: --mode: expected greedy or sampled")
    sampling_check(config.temperature, config.top_p)
    check_target(Path(config.target), config.device)
    if config.save is not None:
        check_output(Path(config.save))
    return _asked(config)


def _run(
    config: EvalConfig, asked: Sequence[TokenizedPrompt], console: Console, origin: Mapping[str, Any] | None
) -> int:
    offline = functools.partial(_offline, config) if config.offline else None

    def open_engine(k: int) -> Engine:
        return Engine.open(
            config.target,
            in_bulk(
                EngineConfig(
                    max_running=config.batch,
                    device=config.device,
                    speculation=Learned(drafter=config.draft, tokens=k, adaptive=False, suffix=config.suffix),
                )
            ),
        )

    with Working("loading the engine") as working:
        domains = len({one.domain for one in asked})
        total = domains * config.rounds * len(config.k) * len(config.modes)
        before: dict[str, int] = {}

        def done(what: str, rounds: int) -> None:
            before[what] = min(rounds, domains * config.rounds) if config.rounds else rounds
            working.show(sum(before.values()), total, what="rounds", note=what)

        evaluation = evaluate(open_engine, asked, config, offline, done)
    for mode in config.modes:
        console.print(table(evaluation, mode))
    for line in evaluation.short:
        console.print(f"not enough prompts: {line}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    found = first_draft_check(evaluation)
    if found is not None:
        engine, foretold, rounds = found
        console.print(
            f"first draft, greedy: the engine accepts {engine:.2%}, teacher forcing on the same answers "
            f"{foretold:.2%}: {100 * (engine - foretold):+.2f} points over {rounds:,} rounds"
            + ("" if agree(evaluation) else "; more than one point apart"),
            style="" if agree(evaluation) else "red",
        )
    if config.save is not None:
        _save(Path(config.save), {**(origin or {}), "config": config}, evaluation, console)
    return 0 if agree(evaluation) else 1


def _save(path: Path, facts: Mapping[str, Any], evaluation: Evaluation, console: Console) -> None:
    save(path, msgspec.json.format(msgspec.json.encode({**facts, **msgspec.structs.asdict(evaluation)}), indent=1))
    console.print(f"written to {path}", style="dim", highlight=False, markup=False, soft_wrap=True)
    lengths: dict[str, dict[str, dict[int, tuple[float, float, float]]]] = defaultdict(lambda: defaultdict(dict))
    for one in evaluation.measured:
        lengths[one.mode][one.domain][one.k] = (one.length, one.low, one.high)
    for mode, by_domain in lengths.items():
        picture = path.with_name(f"{path.stem}-{mode}.png")
        drawn(picture, console, length_plot, by_domain, f"acceptance length, {mode}")


def _asked(config: EvalConfig) -> tuple[list[TokenizedPrompt], list[str]]:
    """The prompts of a file, of a corpus or of the built-in templates. Raises ConfigError."""
    if config.corpus is not None:
        examples, skipped = read_examples(Path(config.corpus))
        asked = [TokenizedPrompt(one.id, one.domain, one.language, one.tokens[: one.prompt]) for one in examples]
    else:
        found, skipped = read_prompts(Path(config.prompts)) if config.prompts is not None else ([], [])
        found = found if config.prompts is not None else prompts(config.domains, config.count, config.seed + HELD_OUT)
        target = Path(config.target)
        tokenizer, style = Tokenizer.open(target), style_of(target, spec_of(target).chat)
        asked = [
            TokenizedPrompt(one.id, one.domain, one.language, tuple(encode(conversation(one), tokenizer, style)))
            for one in found
        ]
    if not asked:
        raise ConfigError(f"{config.prompts or config.corpus}: contains no prompt")
    return asked, skipped


def _offline(config: EvalConfig, engine: Engine) -> Offline:
    """Teacher forcing as in `mine`, with the engine's copy of the target; the engine is idle during scoring."""
    model = engine.engine.model
    drafter = Eagle3.open(config.draft, model.config)
    teacher_forcing = TeacherForcing(TargetModel(model, engine.fingerprint, drafter.config.layer_ids), drafter)

    def offline(answers: Sequence[Spoken], serving: Serving, k: int) -> list[Scores]:
        examples = [
            Example(id=one.id, domain=one.domain, tokens=one.tokens, prompt=one.prompt, finish=one.finish)
            for one in answers
        ]
        return list(teacher_forcing.scores(examples, k, serving))

    return offline
