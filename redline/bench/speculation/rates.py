"""Speedup of speculative decoding on this machine: acceptance and tokens/s by domain for every k, and its costs.

Generates answers to real prompts, greedy or sampled, with the whole engine in this process. In every round each variant
runs the same prompts, and its rate is compared with the rate without drafts in the same round: on a machine with other
load only ratios of adjacent measurements are meaningful. All variants generate the same tokens (law 4), so all do the
same work.

    off      no drafts
    k1..k7   always 1 to 7 draft tokens by the learned drafter, without suffix matching
    suffix   suffix matching only
    auto     as served: the drafter, combined with suffix matching, with adaptive k

A rate is the total tokens over the total seconds of the engine's decode steps. A step's time includes the host's work
up to the next step; steps with prefill are excluded. Arrival times at the caller are not used: the tokens of several
steps may arrive at once. A rate above the floor of the same steps is not valid: it is omitted, and `above` reports it.

The parts are steps of the runner alone, timed in turn: plain, with d drafts verified, with d drafts made.
"""

import itertools
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from redline import clock
from redline.chat.lines import NOT_JSON, Chat, conversation
from redline.chat.page_hashes import make_job
from redline.chat.template import Style, encode
from redline.chat.tokenizer import Tokenizer
from redline.errors import ConfigError
from redline.kernels.cpu.blocks.draft_pass import DraftRows
from redline.kernels.inputs import Inputs
from redline.messages.base import Record
from redline.messages.job import PAGE_TOKENS, Job, JobId, Sampling
from redline.messages.news import TimedStep
from redline.model.eagle3.module import Eagle3
from redline.model.eagle3.one_call import draft_chain
from redline.model.eagle3.serve import Served
from redline.model.k2.cpu import K2
from redline.policy.synthetic import Acceptance
from redline.worker.acceptance import DraftRound, acceptance_length, spoken
from redline.worker.config import EngineConfig, Learned, Suffix
from redline.worker.engine import Engine

VERIFIED = (2, 4, 8)  # tokens per row of a step, the target's own included
TRIES = 3  # measurements of the machine's limits per engine
CHAIN = 4  # drafter passes per call


class Question(NamedTuple):
    """A prompt: its domain and its token ids."""

    domain: str
    tokens: tuple[int, ...]


class _Line(Chat, frozen=True, kw_only=True):
    """A prompt in a file: in the format of `redline draft synth`, or of an evaluation set (`kind` is the domain)."""

    id: str = ""
    domain: str = ""
    kind: str = ""
    language: str = "en"
    check: msgspec.Raw = msgspec.Raw(b"{}")


class VariantOutcome(NamedTuple):
    """The result of one variant for a batch of questions."""

    seconds: float  # in decode steps
    tokens: int  # generated in these steps
    rounds: list[list[DraftRound]]  # rounds of speculation, by answer
    floor_s: float = 0.0  # the floor of these steps in seconds; 0: not known


class Rate(Record, frozen=True):
    """One variant in one domain at one batch.

    tokens_per_s: None if the rate was above its floor. times: tokens/s divided by those without drafts in the same
    rounds; None if either rate was above its floor. rounds: steps of one answer that verified drafts.
    """

    domain: str
    variant: str
    batch: int
    tokens_per_s: float | None
    times: float | None
    length: float | None  # acceptance length; None: no drafts were verified
    accepted: float | None  # share of the draft tokens
    rounds: int
    floor_tokens_per_s: float | None = None  # the most that this machine can reach in these steps; None: not measured
    above: str | None = None  # why tokens_per_s or times is omitted; None: both are valid


class StepPart(Record, frozen=True):
    """One kind of step of the runner. ms: median milliseconds of one pass.

    times: the time relative to a plain step, median over the ratios of adjacent measurements.
    """

    name: str
    batch: int
    ms: float
    times: float


def variants(
    draft: str,
    ks: Sequence[int],
    batch: int,
    max_model_len: int,
    kv_memory: int,
    device: str | None,
    synthetic: Acceptance | None = None,
) -> dict[str, EngineConfig]:
    """The configurations of the compared engines, by name. draft: the drafter's folder.

    ks: numbers of draft tokens, one engine each. batch: maximum rows. kv_memory: bytes of each engine's KV pages.
    synthetic: synthetic acceptance; only "off" and k1 .. k7 are then returned.
    """
    plain = EngineConfig(kv_memory=kv_memory, max_model_len=max_model_len, max_running=batch, device=device)
    fixed = {f"k{k}": Learned(drafter=draft, tokens=k, adaptive=False, suffix=False) for k in ks}
    if synthetic is not None:
        fixed = {name: msgspec.structs.replace(one, synthetic_acceptance=synthetic) for name, one in fixed.items()}
    served = {"suffix": Suffix(), "auto": Learned(drafter=draft)} if synthetic is None else {}
    speculations = {"off": None, **fixed, **served}
    return {name: msgspec.structs.replace(plain, speculation=one) for name, one in speculations.items()}


def read_questions(paths: Sequence[Path], tokenizer: Tokenizer, style: Style, most: int) -> list[Question]:
    """The first `most` prompts of each domain, domain by domain. Raises ConfigError naming file and line."""
    found: dict[str, list[Question]] = defaultdict(list)
    decoder = msgspec.json.Decoder(_Line)
    for path in paths:
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected one prompt per line") from None
        for number, line in enumerate(lines, 1):
            try:
                one = decoder.decode(line)
            except NOT_JSON as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
            domain = one.domain or one.kind or path.stem
            if len(found[domain]) < most:
                tokens = tuple(encode(conversation(one), tokenizer, style))
                found[domain].append(Question(domain, tokens))
    return [question for questions in found.values() for question in questions]


class Asker:
    """Runs questions on one engine and measures the time. max_tokens: per answer. temperature: 0 is greedy; above 0,
    tokens are sampled without a per-request seed. ends: whether answers end at the model's stop tokens, which are
    meaningless with synthetic acceptance."""

    def __init__(self, engine: Engine, max_tokens: int, temperature: float = 0.0, *, ends: bool = True) -> None:
        self._engine = engine
        self._ends = ends
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._numbers = itertools.count()
        self._steps: list[tuple[float, int, float]] = []  # decode steps: seconds, tokens, floor in seconds
        engine.engine.planner.watch_steps(self._took)

    def _took(self, step: TimedStep, floor_s: float, tokens: int) -> None:
        if tokens and not step.prompt:
            self._steps.append((step.ms / 1e3, tokens, floor_s))

    def ask(self, questions: Sequence[Question]) -> VariantOutcome:
        """Runs all questions concurrently."""
        asked = {JobId(f"question-{next(self._numbers)}"): question for question in questions}
        stop_ids = self._engine.tokenizer.stop_ids if self._ends else ()
        sampling = Sampling(max_tokens=self._max_tokens, temperature=self._temperature, stop_ids=stop_ids)
        # A salt per call: a repeated prompt would otherwise hit the prefix cache and start at a later position.
        jobs: list[Job] = [
            make_job(id, question.tokens, sampling, self._engine.fingerprint, salt=id) for id, question in asked.items()
        ]
        before = len(self._steps)
        deltas = self._engine.generate(jobs)
        steps = self._steps[before:]  # a step is timed before its tokens are reported
        answers = [spoken(id, question.domain, question.tokens, deltas[id]) for id, question in asked.items()]
        return VariantOutcome(
            seconds=sum(seconds for seconds, _, _ in steps),
            tokens=sum(tokens for _, tokens, _ in steps),
            rounds=[list(answer.rounds) for answer in answers],
            floor_s=sum(floor_s for _, _, floor_s in steps),
        )

    @staticmethod
    def measure_floors(askers: Sequence["Asker"]) -> None:
        """Measures the floor of the engines' steps. The best of several measurements applies to all engines, since they
        read from the same memory. Nothing else may run during the measurement."""
        cores = [asker._engine.engine for asker in askers for _ in range(TRIES)]
        found = [(core, floor) for core in cores if (floor := core.measure()) is not None]
        for core, floor in found:
            bytes_per_s = max(other.bytes_per_s for _, other in found)
            ops_per_s = max(other.ops_per_s for _, other in found)
            core.planner.stand_beside(msgspec.structs.replace(floor, bytes_per_s=bytes_per_s, ops_per_s=ops_per_s))


def bench_rates(
    askers: Mapping[str, Asker],
    questions: Sequence[Question],
    batch: int,
    rounds: int,
    done: Callable[[], object] = lambda: None,
) -> Iterator[Rate]:
    """Yields every variant of a domain, domain by domain. Raises KeyError if `askers` does not contain "off".

    batch: concurrent questions. rounds: runs per variant; variants alternate. done: called after each run of a variant.
    A domain with answers of one token only yields nothing.
    """
    domains: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        domains[question.domain].append(question)
    for domain, members in domains.items():
        took: dict[str, list[VariantOutcome]] = {name: [] for name in askers}
        for number in range(rounds):
            order = list(askers)
            random.Random(number).shuffle(order)  # no variant always runs first
            part = [members[(number * batch + place) % len(members)] for place in range(batch)]
            for name in order:
                took[name].append(askers[name].ask(part))
                done()
        for name, outcomes in took.items():
            both = [pair for pair in zip(outcomes, took["off"], strict=True) if pair[0].tokens and pair[1].tokens]
            if not both:
                continue  # answers of one token each: no decode steps
            mine, plain = Speed.of([pair[0] for pair in both]), Speed.of([pair[1] for pair in both])
            above = mine.above or (plain.above and f"without drafts {plain.above}")
            verified = [answer for outcome in outcomes for answer in outcome.rounds]
            length = acceptance_length(verified)
            proposed = sum(round.proposed for answer in verified for round in answer)
            yield Rate(
                domain=domain,
                variant=name,
                batch=batch,
                tokens_per_s=None if mine.above else mine.tokens_per_s,
                times=None if above else mine.tokens_per_s / plain.tokens_per_s,
                length=length.mean if length.rounds else None,
                accepted=(length.mean - 1) * length.rounds / proposed if proposed else None,
                rounds=length.rounds,
                floor_tokens_per_s=mine.floor_tokens_per_s,
                above=above or None,
            )


class Speed(NamedTuple):
    """Tokens/s of some outcomes together, and the most that their steps' floor allows (None: not known)."""

    tokens_per_s: float
    floor_tokens_per_s: float | None

    @classmethod
    def of(cls, outcomes: Sequence[VariantOutcome]) -> "Speed":
        """Total tokens divided by total seconds."""
        tokens, floor_s = sum(one.tokens for one in outcomes), sum(one.floor_s for one in outcomes)
        return cls(tokens / sum(one.seconds for one in outcomes), tokens / floor_s if floor_s else None)

    @property
    def above(self) -> str:
        """Why the rate is not valid; empty if it is."""
        most = self.floor_tokens_per_s
        if most is None or self.tokens_per_s <= most:
            return ""
        return f"{self.tokens_per_s:,.0f} tokens/s measured, above the floor's {most:,.0f}"


def mean_times(rates: Sequence[Rate]) -> dict[tuple[str, int], float]:
    """{(variant, batch): mean of `times` over the domains that have it}."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for rate in rates:
        if rate.times is not None:
            found[rate.variant, rate.batch].append(rate.times)
    return {key: statistics.fmean(values) for key, values in found.items()}


def bench_parts(
    model: K2, drafter: Eagle3 | None, batches: Sequence[int], context: int, repeats: int
) -> Iterator[StepPart]:
    """Yields the time of a step by the number of tokens that each row verifies, and the time of one drafter pass.

    batches: rows per step. context: tokens before each row. drafter: prepared for the model; None: its pass is not
    timed. The kinds of steps alternate, `repeats` times after three warm-up runs. The KV pages contain zeros and the
    tokens are random: neither changes the bytes and operations.
    """
    for batch in batches:
        parts = {f"verify {tokens}": _verify_pass(model, batch, tokens, context) for tokens in (1, *VERIFIED)}
        passes = dict.fromkeys(parts, 1)
        if drafter is not None:
            parts["drafter pass"], passes["drafter pass"] = _draft_passes(model, drafter, batch, context)
        took: dict[str, list[float]] = {name: [] for name in parts}
        with torch.inference_mode():
            for number in range(repeats + 3):
                for name, step in parts.items():
                    start = clock.perf_counter()
                    step()
                    if model.device.type == "cuda":
                        torch.cuda.synchronize(model.device)
                    if number >= 3:
                        took[name].append((clock.perf_counter() - start) * 1e3 / passes[name])
        plain = took["verify 1"]
        for name, times in took.items():
            ratio = statistics.median(mine / theirs for mine, theirs in zip(times, plain, strict=True))
            yield StepPart(name=name, batch=batch, ms=statistics.median(times), times=ratio)


def _verify_pass(model: K2, batch: int, tokens: int, context: int) -> Callable[[], object]:
    config = model.config
    inputs, pages = _queries(model.angles, config.vocab_size, batch, tokens, context, 0, model.device)
    planes = torch.zeros(
        config.num_hidden_layers, pages, PAGE_TOKENS, config.kv_width, dtype=torch.bfloat16, device=model.device
    )

    def step() -> object:
        hidden, _ = model.forward(inputs, planes)
        return model.logits(hidden).argmax(-1).cpu()

    return step


def _draft_passes(model: K2, drafter: Eagle3, batch: int, context: int) -> tuple[Callable[[], object], int]:
    """Drafter passes as the engine runs them, and their number: CHAIN in one call, or one pass of single ops."""
    config, served = drafter.config, drafter.served
    if isinstance(served, Served) and served.chains and model.device.type == "cpu":
        each = -(-(context + CHAIN + 2) // PAGE_TOKENS)
        tokens = torch.zeros(batch, each * PAGE_TOKENS, dtype=torch.int64)
        tables = torch.arange(batch * each, dtype=torch.int32).view(batch, each)
        pages, rows = served.pages(tokens, tables), DraftRows(range(batch), [context] * batch, range(batch))
        feature = torch.ones(batch, config.hidden_size)
        plane = torch.zeros(batch * each, PAGE_TOKENS, config.kv_width, dtype=torch.bfloat16)
        return lambda: draft_chain(feature, served.layer, pages, rows, [CHAIN] * batch, plane), CHAIN
    inputs, pages = _queries(drafter.angles, config.vocab_size, batch, 1, context, 1, model.device)
    plane = torch.zeros(pages, PAGE_TOKENS, config.kv_width, dtype=torch.bfloat16, device=model.device)
    fed = torch.ones(batch, config.hidden_size, dtype=model.dtype, device=model.device)

    def step() -> object:
        normed, _ = drafter.forward(inputs, fed, plane)
        return drafter.logits(normed).argmax(-1).cpu()

    return step, 1


def _queries(
    angles: Callable[[Tensor], tuple[Tensor, Tensor]],
    vocabulary: int,
    batch: int,
    tokens: int,
    context: int,
    ahead: int,
    device: torch.device,
) -> tuple[Inputs, int]:
    """A step in which each of `batch` slots decodes `tokens` positions after `context` others, and the number of pages
    that it needs. ahead: offset of a token's KV row from its position (1 for a drafter)."""
    each = -(-(context + tokens + ahead) // PAGE_TOKENS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (batch * tokens,), generator=generator)
    positions = (context + torch.arange(tokens)).repeat(batch)
    slots = torch.arange(batch).repeat_interleave(tokens)
    tables = torch.arange(batch * each, dtype=torch.int32).view(batch, each)
    places = positions + ahead
    rows = tables[slots, places // PAGE_TOKENS].long() * PAGE_TOKENS + places % PAGE_TOKENS
    cos, sin = angles(positions.to(device))
    inputs = Inputs(
        ids_T=ids.to(device),
        cos_T=cos,
        sin_T=sin,
        rows_T=rows.to(device),
        chunks=(),
        tokens_Q=torch.arange(batch * tokens, dtype=torch.int32, device=device),
        slots_Q=slots.to(device, torch.int32),
        lengths_Q=(places + 1).to(device, torch.int32),
        tables=tables.to(device),
        positions=tokens,
    )
    return inputs, batch * each
