"""`redline bench speculate`: the tables of `bench.speculation.rates`."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from redline.bench.record import provenance
from redline.bench.speculation.rates import (
    Asker,
    Question,
    Rate,
    StepPart,
    bench_parts,
    bench_rates,
    mean_times,
    read_questions,
    variants,
)
from redline.chat.template import style_of
from redline.chat.tokenizer import Tokenizer
from redline.cli.bench.steps import SpeculateFlags
from redline.cli.console import save_result, until_interrupted
from redline.disk import check_output
from redline.errors import ConfigError
from redline.messages.job import PAGE_TOKENS
from redline.model.drafter import open_drafter
from redline.model.eagle3.module import Eagle3
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.config import K2Config
from redline.model.spec import spec_of
from redline.policy.synthetic import Acceptance, rates_of, read_acceptance
from redline.progress import Working
from redline.worker.config import EngineConfig
from redline.worker.engine import Engine

ABOVE = "A speed above its floor means that the floor was measured on a busy machine; run again with the machine idle."


def run(config: SpeculateFlags, console: Console) -> int:
    """Measures, prints, saves. Returns the exit code: 0, or 130 after Ctrl-C.

    Raises ConfigError or CheckpointError.
    """
    folder = Path(config.folder)
    if config.save is not None:
        check_output(config.save)
    acceptance = _synthetic(config)
    if acceptance is not None:
        for k in config.k:
            rates_of(acceptance, k, f"synthetic-acceptance, with --k {k},")
    target = Checkpoint.open(folder).config
    open_drafter(config.draft, target)  # reject a wrong folder before anything is loaded
    paths = [Path(name) for name in config.prompts] or sorted((folder / "eval").glob("*.jsonl"))
    if not paths:
        raise ConfigError(f"{folder / 'eval'}: no prompts (*.jsonl) in this folder; name a file with --prompts")
    questions = read_questions(paths, Tokenizer.open(folder), style_of(folder, spec_of(folder).chat), config.questions)
    if not questions:
        raise ConfigError(f"{', '.join(map(str, paths))}: contains no prompt")
    return until_interrupted(lambda: _run(config, folder, target, questions, console), console)


def _synthetic(config: SpeculateFlags) -> Acceptance | None:
    text = config.synthetic_acceptance
    return None if text is None else read_acceptance(text, "synthetic-acceptance")


def _run(
    config: SpeculateFlags, folder: Path, target: K2Config, questions: Sequence[Question], console: Console
) -> int:
    longest = max(len(question.tokens) for question in questions) + config.max_tokens
    pages = max(config.batch) * (2 + longest // PAGE_TOKENS) + 8
    row_bytes = (
        2 * (target.num_hidden_layers + 8) * target.kv_width
    )  # a drafter's KV is no larger than that of a few layers
    opened: dict[str, EngineConfig] = variants(
        *(config.draft, config.k, max(config.batch), longest, pages * PAGE_TOKENS * row_bytes, None),
        _synthetic(config),
    )
    domains = len({question.domain for question in questions})
    rates: list[Rate] = []
    with ExitStack() as stack, Working("loading the engines of each variant") as working:
        engines: dict[str, Engine] = {}
        for name, one in opened.items():
            engines[name] = stack.enter_context(Engine.open(folder, one))
            engines[name].record_all()
        ends = config.synthetic_acceptance is None
        askers = {
            name: Asker(engine, config.max_tokens, config.temperature, ends=ends) for name, engine in engines.items()
        }
        working.show(what="measuring the floor")
        Asker.measure_floors(list(askers.values()))
        working.show(what="warming up")
        for asker in askers.values():
            asker.ask(questions[:1])
        asked, total = 0, len(config.batch) * domains * config.rounds * len(askers)
        working.show(0, total, what="runs")

        def did() -> None:
            nonlocal asked
            asked += 1
            working.show(asked, total)

        for batch in config.batch:
            rates += bench_rates(askers, questions, batch, config.rounds, did)
        working.show(what="timing the parts of a step")
        model = engines["off"].engine.model
        drafter = open_drafter(config.draft, model.config)
        chain = drafter if isinstance(drafter, Eagle3) else None  # the pass of a block is not timed apart
        if chain is not None:
            chain.prepare(model)
        parts = list(bench_parts(model, chain, config.batch, config.context, config.repeats))
    for batch in config.batch:
        console.print(_rate_table([rate for rate in rates if rate.batch == batch], batch, folder.name))
    for rate in rates:
        if rate.above is not None:
            console.print(f"no speed for {rate.domain}, {rate.variant}, batch {rate.batch}: {rate.above}. {ABOVE}")
    console.print(_part_table(parts, config.context))
    if config.save is not None:
        record = {
            **provenance("torch"),
            "config": msgspec.structs.replace(config, save=None),  # the path does not belong to the measurement
            "rates": rates,
            "mean_times": {f"{variant}, batch {batch}": ratio for (variant, batch), ratio in mean_times(rates).items()},
            "parts": parts,
        }
        save_result(config.save, record, console)
    return 0


def _rate_table(rates: Sequence[Rate], batch: int, name: str) -> Table:
    """A row per domain, a column per variant; the last row is the mean over domains."""
    order = list(dict.fromkeys(rate.variant for rate in rates))
    table = Table(
        title=f"speculation, {name}, batch {batch}",
        caption="speedup in tokens/s over `off`, and the acceptance length; off: tokens/s without drafts",
    )
    table.add_column("domain")
    for variant in order:
        table.add_column(variant, justify="right")
    by_domain: dict[str, dict[str, Rate]] = {}
    for rate in rates:
        by_domain.setdefault(rate.domain, {})[rate.variant] = rate

    def cell(rate: Rate | None) -> str:
        if rate is None:
            return ""
        if rate.variant == "off":
            return "-" if rate.tokens_per_s is None else f"{rate.tokens_per_s:,.0f}"
        times = "-" if rate.times is None else f"{rate.times:.2f}x"
        return f"{times}\n" + ("-" if rate.length is None else f"{rate.length:.2f}")

    for domain, found in by_domain.items():
        table.add_row(
            domain, *(cell(found.get(variant)) for variant in order), end_section=domain == list(by_domain)[-1]
        )
    means = mean_times(rates)
    cells = (
        "" if variant == "off" else f"{means[variant, batch]:.2f}x" if (variant, batch) in means else "-"
        for variant in order
    )
    table.add_row("mean over domains", *cells, style="bold")
    return table


def _part_table(parts: Sequence[StepPart], context: int) -> Table:
    table = Table(title=f"time of the parts of a step at context {context:,}")
    table.add_column("part")
    for name in ("batch", "ms", "times a plain step"):
        table.add_column(name, justify="right")
    for part in parts:
        table.add_row(part.name, str(part.batch), f"{part.ms:.2f}", f"{part.times:.2f}")
    return table
