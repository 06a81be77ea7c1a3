"""Finds a drafter's weak positions, those with room for improvement, and makes the next training set.

    score     teacher forcing over a corpus and over traces: the reducible gap of every position (`score`)
    report    the cost of each bucket (`buckets`): a table, OUT/report.json, OUT/report.png
    choose    examples under a budget, by weight and cap (`choose`): OUT/chosen.jsonl
    answer    several new answers of the target to each chosen prompt, sampled as in serving: OUT/hard.jsonl
    window    the hardest part of each chosen long answer, after all of its context: OUT/windows.jsonl
    mix       both with replay of the base set, under the budget: OUT/mixed.jsonl, a corpus for `capture`

Answering resumes after a kill; the other steps are computed again, with bit-identical results.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from rich.console import Console

from redline.chat.generation import generation_config_of
from redline.chat.tokenizer import RESERVED, Tokenizer
from redline.disk import alone, is_full, save, unwritable
from redline.draft.corpus.corpus import About, CorpusWriter, Example, claim, read_examples
from redline.draft.corpus.new_answers import answer_afresh
from redline.draft.corpus.synth import check_target, existing, in_bulk, sampling_check
from redline.draft.corpus.traces import read_traces
from redline.draft.mine.buckets import DifficultyBucket, Scored, buckets, rejections, since_control
from redline.draft.mine.choose import Choose, answer_tokens, choose, mix, weights, window
from redline.draft.mine.difficulty import Proposals, Scores, Serving
from redline.draft.mine.report import bucket_plot, bucket_table, drawn, tell_skipped
from redline.draft.mine.teacher_forcing import TeacherForcing
from redline.errors import ConfigError
from redline.messages.base import Record
from redline.messages.job import Sampling
from redline.progress import Working
from redline.worker.config import EngineConfig
from redline.worker.engine import Engine

TABLE_ROWS = 20
INTERRUPTED = 130  # the exit status of shells for SIGINT


class MineConfig(Record, frozen=True):
    """Settings of `redline draft mine`. Sampling parameters that are None default to the checkpoint's."""

    target: str
    draft: str
    out: str
    corpus: tuple[str, ...]  # the base set: scored, chosen from and replayed
    traces: tuple[str, ...] = ()  # [DOMAIN=]FILE of serving engines: scored and chosen from, not replayed
    steps: int = 3  # drafts per round
    proposals: Proposals = "onehot"
    temperature: float | None = None
    top_p: float | None = None
    examples: int = 0  # maximum number of examples per domain to score; 0: all
    traffic: dict[str, float] = msgspec.field(
        default_factory=dict[str, float]
    )  # share of each domain; empty: as in the corpus
    budget: int = 1_000_000  # answer tokens of the mix
    replay: float = 0.5  # minimum share of the base set in the budget
    cap: float = 0.5  # maximum share of one domain in one language in the hard part
    equal_domains: bool = False
    choose: Choose = "gap"  # uniform: the control arm
    answers: int = 4  # new answers to each chosen prompt
    windows: float = 0.25  # share of windows of existing answers in the hard part; the rest is new answers
    window_tokens: int = 2048
    max_tokens: int = 4096
    batch: int = 64  # number of answers in a step
    seed: int = 0
    device: str | None = None


class Mined(Record, frozen=True):
    """The result of scoring, as stored in OUT/report.json."""

    examples: int
    positions: int
    skipped: int  # number of lines that were not examples
    buckets: tuple[DifficultyBucket, ...]


def scored(example: Example, scores: Scores, controls: frozenset[int]) -> Scored:
    """An example and its scores, with the data for its buckets. controls: the ids of control tokens."""
    positions = scores.position_R
    return Scored(
        id=example.id,
        domain=example.domain,
        language=example.language,
        answer=answer_tokens(example),
        scores=scores,
        since_start_R=positions - example.prompt + 1,
        since_control_R=since_control(example.tokens, controls, positions),
        rejected_R=rejections(example.rounds, positions),
    )


def run(config: MineConfig, console: Console) -> int:
    """Runs all steps; returns 0, or 130 after Ctrl-C. Raises ConfigError, also if the disk is full.

    Raises CheckpointError if target or drafter cannot be read.
    """
    check(config)
    answers = Path(config.out) / "hard.jsonl"
    try:
        with alone(Path(config.out)):
            return _run(config, console)
    except KeyboardInterrupt:
        kept = f"the answers in {answers} are kept; " if answers.exists() else ""
        console.print(f"stopped: {kept}run the same command to resume", highlight=False, markup=False, soft_wrap=True)
        return INTERRUPTED
    except OSError as error:
        if not is_full(error):
            raise
        raise unwritable(Path(config.out), error) from None


def _run(config: MineConfig, console: Console) -> int:
    out = Path(config.out)
    _check_folder(out, config)
    base, traced = read_examples(*map(Path, config.corpus)), read_traces(*config.traces)
    if not base.examples:
        raise ConfigError(f"{', '.join(config.corpus)}: contains no example; `redline draft synth` makes a corpus")
    unknown = sorted(set(config.traffic) - {one.domain for one in (*base.examples, *traced.examples)})
    if unknown:
        raise ConfigError(f"traffic names the domain {unknown[0]!r}, which no example has")
    generation = generation_config_of(Path(config.target))
    temperature = generation.temperature if config.temperature is None else config.temperature
    top_p = generation.top_p if config.top_p is None else config.top_p
    answers = config.answers
    if temperature == 0 and answers > 1:
        answers = 1
        console.print("temperature is 0: one answer to each chosen prompt, since others would be the same", style="dim")

    teacher_forcing = TeacherForcing.open(config.target, config.draft, config.device)
    save(out / "config.json", msgspec.json.format(msgspec.json.encode(config), indent=1))
    refused = {one.id: reason for one in (*base.examples, *traced.examples) if (reason := teacher_forcing.refusal(one))}
    skipped = [*base.skipped, *traced.skipped, *(f"{id}: {reason}" for id, reason in refused.items())]
    tell_skipped(skipped, console)
    replayed = [one for one in base.examples if one.id not in refused]
    candidates = _some([*replayed, *(one for one in traced.examples if one.id not in refused)], config.examples)
    marked = _score(candidates, teacher_forcing, config, Serving(config.proposals, temperature, top_p))
    del teacher_forcing  # the answering engine loads the target again
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    found = buckets(marked, config.traffic or None)
    positions = sum(len(one.scores.position_R) for one in marked)
    report = Mined(examples=len(marked), positions=positions, skipped=len(skipped), buckets=tuple(found))
    save(out / "report.json", msgspec.json.format(msgspec.json.encode(report), indent=1))
    console.print(bucket_table(found, TABLE_ROWS))
    drawn(out / "report.png", console, bucket_plot, found)

    total = config.budget  # of the mix; limited by the base set, which must provide its share
    if config.replay > 0:
        total = min(total, int(sum(map(answer_tokens, replayed)) / config.replay))
    budget = int(total * (1 - config.replay))
    places = choose(
        marked,
        weights(marked, config.traffic or None, config.choose),
        budget,
        cap=config.cap,
        equal_domains=config.equal_domains,
        times=max(1, answers),
        seed=config.seed,
    )
    chosen = [candidates[place] for place in places]
    _write(out / "chosen.jsonl", chosen)
    windows = [
        cut
        for place in places
        if (cut := window(candidates[place], marked[place].hardness_R, config.window_tokens)) is not None
    ]
    _write(out / "windows.jsonl", windows)
    sampling = msgspec.structs.replace(generation, max_tokens=config.max_tokens, temperature=temperature, top_p=top_p)
    fresh = _answer(chosen, answers, config, sampling, out / "hard.jsonl") if answers else []
    equal, seed = config.equal_domains, config.seed
    if fresh:
        windows = mix([], windows, int(budget * config.windows), replay=0.0, equal_domains=equal, seed=seed)
    mixed = mix(replayed, [*windows, *fresh], total, replay=config.replay, equal_domains=equal, seed=seed)
    _write(out / "mixed.jsonl", mixed)
    hard = {example.id for example in (*windows, *fresh)}
    console.print(_summary(mixed, hard, out), highlight=False, markup=False, soft_wrap=True)
    return 0


def check(config: MineConfig) -> None:
    """Raises ConfigError or CheckpointError if a setting is wrong or missing, before anything is loaded."""
    for name in ("replay", "cap", "windows"):
        if not 0 <= getattr(config, name) <= 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; expected a share from 0 to 1")
    for name in ("steps", "budget", "window_tokens", "max_tokens", "batch"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; expected at least 1")
    sampling_check(config.temperature, config.top_p)
    if min(config.examples, config.answers) < 0 or any(share < 0 for share in config.traffic.values()):
        raise ConfigError("examples, answers and the shares of traffic cannot be negative")
    if not all(math.isfinite(share) for share in config.traffic.values()):
        raise ConfigError("traffic: a share is not a finite number")
    check_target(Path(config.target), config.device)


def _check_folder(out: Path, config: MineConfig) -> None:
    """Raises ConfigError if the folder contains results of other settings."""
    path = out / "config.json"
    try:
        before = msgspec.json.decode(path.read_bytes(), type=MineConfig)
    except FileNotFoundError:
        before = config
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}; use another --out, or remove the folder") from None
    for field in set(MineConfig.__struct_fields__) - {"out", "batch", "device"}:
        was, now = getattr(before, field), getattr(config, field)
        if was != now:
            raise ConfigError(
                f"{path}: made with {field} {was!r}, not {now!r}; use another --out, or remove the folder"
            )


def _some(examples: Sequence[Example], most: int) -> list[Example]:
    """The first `most` examples of each domain; all if `most` is 0."""
    seen: Counter[str] = Counter()
    found: list[Example] = []
    for example in examples:
        seen[example.domain] += 1
        if not most or seen[example.domain] <= most:
            found.append(example)
    return found


def _score(
    examples: Sequence[Example], teacher_forcing: TeacherForcing, config: MineConfig, serving: Serving
) -> list[Scored]:
    first = Tokenizer.open(Path(config.target)).vocab_size - RESERVED
    controls = frozenset(range(first, first + RESERVED))
    found: list[Scored] = []
    with Working("scored examples") as working:
        working.show(0, len(examples))
        for example, scores in zip(examples, teacher_forcing.scores(examples, config.steps, serving), strict=True):
            found.append(scored(example, scores, controls))
            working.show(len(found), len(examples))
    return found


def _answer(
    chosen: Sequence[Example], answers: int, config: MineConfig, sampling: Sampling, path: Path
) -> list[Example]:
    """Appends the missing answers to `path`, and returns all answers to the chosen prompts."""
    wanted = {f"{example.id} again {number}" for example in chosen for number in range(1, answers + 1)}
    have = existing(path)
    if wanted - have:
        engine_config = in_bulk(EngineConfig(max_running=config.batch, device=config.device))
        with (
            Working("fresh answers") as working,
            Engine.open(config.target, engine_config) as engine,
            CorpusWriter(path) as writer,
        ):
            claim(
                path,
                About(
                    fingerprint=engine.fingerprint,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    min_p=sampling.min_p,
                ),
            )

            def done(asked: int) -> None:
                working.show(asked, len(wanted))

            for example in answer_afresh(engine, chosen, sampling, answers, config.seed, have, done):
                writer.append(example)
    return [example for example in read_examples(path).examples if example.id in wanted] if wanted else []


def _write(path: Path, examples: Iterable[Example]) -> None:
    save(path, b"".join(msgspec.json.encode(example) + b"\n" for example in examples))


def _summary(mixed: Sequence[Example], hard: set[str], out: Path) -> str:
    tokens, fresh = Counter[str](), Counter[str]()
    for example in mixed:
        tokens[example.domain] += answer_tokens(example)
        fresh[example.domain] += answer_tokens(example) * (example.id in hard)
    total = max(1, sum(tokens.values()))
    parts = ", ".join(f"{domain} {count:,} ({fresh[domain]:,})" for domain, count in sorted(tokens.items()))
    return (
        f"{out / 'mixed.jsonl'}: {len(mixed):,} examples, {total:,} answer tokens, "
        f"{sum(fresh.values()) / total:.0%} of them hard; by domain, hard in brackets: {parts}"
    )
