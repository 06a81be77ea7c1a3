"""`redline draft synth`: the target answers prompts, sampled as in serving, and each answer becomes an example.

Examples are appended as they finish. Prompts with an answer in the file are skipped, so the same command resumes after
a kill, a Ctrl-C or a full disk.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b
from pathlib import Path

import msgspec
from rich.console import Console

from redline import clock
from redline.chat.generation import generation_config_of
from redline.chat.lines import conversation
from redline.chat.page_hashes import make_job
from redline.chat.template import encode, style_of
from redline.chat.tokenizer import Tokenizer
from redline.disk import check_output, is_full
from redline.draft.corpus.corpus import About, CorpusReader, CorpusWriter, Example, claim, mend
from redline.draft.corpus.prompts import LONG_CHARACTERS, PromptLine, Turns, prompts, read_prompts
from redline.errors import ConfigError
from redline.messages.base import Record
from redline.messages.delta import Delta
from redline.messages.job import Job, JobId, Sampling
from redline.model.drafter import open_drafter
from redline.model.k2.checkpoint import Checkpoint
from redline.model.spec import spec_of
from redline.progress import Working
from redline.worker.config import EngineConfig, Learned
from redline.worker.engine import Engine, pick_device
from redline.worker.job_runner import JobRunner

TOGETHER = 2  # on a GPU, jobs begin when 1 / TOGETHER of the slots are free
BULK_TOKENS = 8192  # token budget of a step on a GPU, so that whole prompts fit
NAMED = 20  # maximum number of skipped prompts that are printed one by one
INTERRUPTED = 130  # the exit status of shells for SIGINT


class SynthConfig(Record, frozen=True):
    """Settings of `redline draft synth`."""

    weights: str  # the target's folder
    out: str  # the corpus
    prompts: tuple[str, ...] = ()  # files of prompts
    turns: Turns = "all"  # of users' conversations: generate all answers, or only the last
    domains: tuple[str, ...] = ()  # built-in template domains to use
    count: int = 1000  # prompts of each domain
    samples: int = 1  # answers to each prompt
    max_tokens: int = 2048  # of an answer
    temperature: float | None = None  # None: the checkpoint's default
    top_p: float | None = None
    seed: int = 0
    shard: str = "1/1"  # i/n: this process answers every n-th prompt, beginning with the i-th
    long_characters: tuple[int, int] = LONG_CHARACTERS  # length of documents in the domain long
    engine: EngineConfig = EngineConfig()  # batch: max_running


Open = Callable[[SynthConfig], AbstractContextManager[JobRunner]]
Told = Callable[[int, float], object]
"""Callback at the end of a verb's work: number of tokens, and seconds without loading."""


class Done(Record, frozen=True):
    """The result of one run of `synth`."""

    answers: int
    tokens: int  # number of answer tokens
    seconds: float
    skipped: tuple[str, ...]  # prompts that the engine rejected: "id: reason"


def run(config: SynthConfig, console: Console, told: Told = lambda tokens, seconds: None) -> int:
    """Returns 0; 1 if the disk is full; 130 after Ctrl-C. Raises ConfigError, CheckpointError."""
    asked = check(config)
    check_output(Path(config.out))
    _name(console, asked.skipped, "lines", "are not prompts")
    before = len(existing(Path(config.out)))
    start = clock.monotonic()
    tokens = 0

    def show(answers: int, total: int, new: int) -> None:
        nonlocal tokens
        tokens += new
        rate = f"{tokens / max(clock.monotonic() - start, 1e-9):,.0f} tokens/s"
        working.show(answers, total, note=rate)

    try:
        with Working("answers") as working:
            done = synth(config, asked.prompts, open_engine, show)
    except KeyboardInterrupt:
        console.print(_kept(config, before, "stopped"), highlight=False, markup=False, soft_wrap=True)
        return INTERRUPTED
    except OSError as error:
        if not is_full(error):
            raise
        kept = _kept(config, before, "the disk is full")
        console.print(kept, style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    told(done.tokens, done.seconds)
    rate = done.tokens / max(done.seconds, 1e-9)
    console.print(
        f"{done.answers:,} new answers, {done.tokens:,} tokens ({rate:,.0f} tokens/s); {config.out} holds "
        f"{before + done.answers:,}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    _name(console, done.skipped, "prompts", "were refused")
    return 0


def check(config: SynthConfig) -> "_Asked":
    """The prompts to answer. Raises ConfigError or CheckpointError if a setting is wrong or missing.

    Does not load the model.
    """
    asked = wanted(config)
    if not asked.prompts:
        raise ConfigError(
            f"{', '.join(config.prompts)}: contains no prompt; expected one JSON per line with domain, messages"
        )
    target = Path(config.weights)
    check_target(target, config.engine.device)
    if config.samples > 1 and _temperature(config) == 0:
        raise ConfigError(
            f"samples is {config.samples}, but at temperature 0 all answers to a prompt are the same: give a "
            "temperature (the checkpoint's default is 0)"
        )
    if isinstance(config.engine.speculation, Learned):
        open_drafter(config.engine.speculation.drafter, Checkpoint.open(target).config)
    return asked


def check_target(folder: Path, device: str | None) -> None:
    """Raises ConfigError or CheckpointError if this folder cannot be served.

    device: None: the GPU, if there is one.
    """
    pick_device(device)
    Checkpoint.open(folder)
    Tokenizer.open(folder)
    style_of(folder, spec_of(folder).chat)
    generation_config_of(folder)


def wanted(config: SynthConfig) -> "_Asked":
    """This shard's prompts, each repeated `samples` times. Raises ConfigError."""
    if not config.prompts and not config.domains:
        raise ConfigError("prompts: nothing to answer: give a file of prompts, or domains")
    for name, least in (("count", 1), ("samples", 1), ("max_tokens", 1)):
        if getattr(config, name) < least:
            raise ConfigError(f"{name} is {getattr(config, name)}; expected at least {least}")
    if config.engine.max_running < 1:
        raise ConfigError(f"engine.max_running (--batch) is {config.engine.max_running}; expected at least 1")
    low, high = config.long_characters
    if not 1 <= low <= high:
        raise ConfigError(f"long_characters is [{low}, {high}]; expected 1 or more, the smaller first")
    sampling_check(config.temperature, config.top_p)
    index, shards = _shard(config.shard)
    found, skipped = read_prompts(*map(Path, config.prompts), turns=config.turns)
    every = {prompt.id: prompt for prompt in found}
    made = prompts(config.domains, config.count, config.seed, config.long_characters)
    every.update({prompt.id: prompt for prompt in made})
    asked = [
        msgspec.structs.replace(prompt, id=prompt.id if config.samples == 1 else f"{prompt.id}#{sample}")
        for prompt in every.values()
        if _number(prompt.id) % shards == index
        for sample in range(config.samples)
    ]
    return _Asked(prompts=asked, skipped=tuple(skipped))


class _Asked(Record, frozen=True):
    prompts: list[PromptLine]
    skipped: tuple[str, ...]


def existing(out: Path) -> set[str]:
    """The ids of a corpus's examples, after repairing its last line; empty if there is no file.

    Raises ConfigError if it cannot be written, or another process is writing it.
    """
    if not out.exists():
        return set()
    mend(out)
    return {example.id for example in CorpusReader(out)}


def synth(
    config: SynthConfig,
    asked: Sequence[PromptLine],
    open_target: Open,
    progress: Callable[[int, int, int], None] = lambda answers, total, tokens: None,
) -> Done:
    """Generates the answers that the corpus does not contain yet, and appends them. On any error appended answers stay.

    progress(answers in the corpus, answers in total, new tokens) is called as answers finish. Raises ConfigError if the
    corpus has another target or other sampling parameters, OSError if the disk is full.
    """
    out = Path(config.out)
    there = existing(out)
    waiting = [prompt for prompt in asked if prompt.id not in there]
    ended, total, tokens = len(asked) - len(waiting), len(asked), 0
    skipped: list[str] = []
    if not waiting:
        progress(ended, total, 0)
        return Done(answers=0, tokens=0, seconds=0.0, skipped=())
    with CorpusWriter(out) as writer, open_target(config) as target:
        about = about_of(config, target.fingerprint)
        claim(out, about)
        start = clock.monotonic()
        answers: dict[JobId, _Answer] = {}  # answers in progress

        def jobs() -> Iterator[Job]:
            for prompt in waiting:
                job = _job(config, about, target, prompt)
                answers[job.id] = _Answer(prompt, job)
                yield job

        def take(delta: Delta) -> None:
            nonlocal ended, tokens
            answer = answers[delta.job]
            answer.add(delta)
            if delta.finish is None:
                return
            del answers[delta.job]
            tokens += answer.count
            if delta.finish in ("stop", "length"):
                writer.append(answer.example(delta.finish))
                ended += 1
            else:
                skipped.append(f"{delta.job}: {delta.error or delta.finish}")
            progress(ended, total, answer.count)

        target.run(jobs(), take)
    answered = ended - (len(asked) - len(waiting))
    return Done(answers=answered, tokens=tokens, seconds=clock.monotonic() - start, skipped=tuple(skipped))


def open_engine(config: SynthConfig) -> AbstractContextManager[JobRunner]:
    """The engine that generates the answers. Raises ConfigError or CheckpointError if it cannot be loaded."""
    return Engine.open(config.weights, in_bulk(config.engine))


def in_bulk(config: EngineConfig) -> EngineConfig:
    """The config for offline generation: sets what the given config leaves at its default.

    On a GPU a step with prompts runs eagerly and costs as much as ten CUDA graph replays, whether it has one prompt or
    thirty. So jobs are admitted when half of the slots are free, in steps large enough for their prompts. On a CPU a
    step's cost is proportional to its tokens, so the config is unchanged.
    """
    if pick_device(config.device).type == "cpu":
        return config
    together = max(config.admit_together, config.max_running // TOGETHER)
    step_tokens = config.step_tokens or max(BULK_TOKENS, config.max_running)
    return msgspec.structs.replace(config, admit_together=together, step_tokens=step_tokens)


def about_of(config: SynthConfig, fingerprint: str) -> About:
    """The target and the sampling parameters: the checkpoint's defaults unless the config overrides them."""
    served = generation_config_of(Path(config.weights))
    return About(
        fingerprint=fingerprint,
        temperature=_temperature(config),
        top_p=served.top_p if config.top_p is None else config.top_p,
        top_k=served.top_k,
        min_p=served.min_p,
    )


def _temperature(config: SynthConfig) -> float:
    return generation_config_of(Path(config.weights)).temperature if config.temperature is None else config.temperature


def sampling_check(temperature: float | None, top_p: float | None) -> None:
    """Raises ConfigError for sampling parameters out of range. None: the checkpoint's default."""
    if temperature is not None and not 0 <= temperature <= 2:
        raise ConfigError(f"temperature is {temperature}; expected 0 to 2")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top_p is {top_p}; expected more than 0, and at most 1")


class _Answer:
    """One job's tokens so far."""

    def __init__(self, prompt: PromptLine, job: Job) -> None:
        self._prompt = prompt
        self._start = len(job.tokens)
        self._tokens = list(job.tokens)
        self._rounds: list[tuple[int, int, int]] = []

    @property
    def count(self) -> int:
        """Tokens of the answer so far."""
        return len(self._tokens) - self._start

    def add(self, delta: Delta) -> None:
        if delta.proposed:
            self._rounds.append((len(self._tokens), delta.proposed, delta.accepted))
        self._tokens += delta.tokens

    def example(self, finish: str) -> Example:
        return Example(
            id=self._prompt.id,
            domain=self._prompt.domain,
            language=self._prompt.language,
            kind=self._prompt.kind,
            tokens=tuple(self._tokens),
            prompt=self._start,
            finish=finish,
            rounds=tuple(self._rounds),
        )


def _job(config: SynthConfig, about: About, target: JobRunner, prompt: PromptLine) -> Job:
    """The prompt in the target's template. Its seed is derived from its id, and is the same in every run."""
    tokens = tuple(encode(conversation(prompt), target.tokenizer, target.style))
    sampling = Sampling(
        max_tokens=config.max_tokens,
        temperature=about.temperature,
        top_p=about.top_p,
        top_k=about.top_k,
        min_p=about.min_p,
        seed=_number(f"{config.seed}/{prompt.id}"),
        stop_ids=target.tokenizer.stop_ids,
    )
    return make_job(JobId(prompt.id), tokens, sampling, target.fingerprint)


def _number(text: str) -> int:
    """A hash of the text in [0, 2^63), the same on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _shard(text: str) -> tuple[int, int]:
    """i/n as (i - 1, n)."""
    i, slash, n = text.partition("/")
    if not (slash and i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise ConfigError(f"shard is {text!r}; expected i/n with i from 1 to n, such as 2/8")
    return int(i) - 1, int(n)


def _kept(config: SynthConfig, before: int, why: str) -> str:
    there = len(existing(Path(config.out)))
    return f"{why}: {there - before:,} new answers are kept, {there:,} in {config.out}; run the same command to resume"


def _name(console: Console, messages: Sequence[str], what: str, why: str) -> None:
    """Prints the skipped prompts: the first NAMED of them by name, then counts by reason and the total."""
    if not messages:
        return
    for message in messages[:NAMED]:
        console.print(f"skipped {message}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    reasons = Counter(message.rpartition(": ")[2] for message in messages[NAMED:])
    for reason, count in reasons.most_common(3):
        console.print(
            f"... and {count:,} more: {reason}", style="yellow", highlight=False, markup=False, soft_wrap=True
        )
    console.print(f"{len(messages):,} {what} {why}", style="yellow", highlight=False)
