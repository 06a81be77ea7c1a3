"""Runs `redline bench accept`: sends the prompts, reads the server's counters, prints and saves the result."""

from pathlib import Path

import msgspec
from rich.console import Console

from redline import clock
from redline.bench.serving import accept, ready
from redline.bench.serving.accept import Part, by_domain, part, settled, since
from redline.bench.serving.datasets import DatasetConfig, asks
from redline.bench.serving.records import Answer, Ask
from redline.bench.serving.target import Pace, Target
from redline.bench.serving.vocabulary import open_vocabulary
from redline.cli.bench import kept
from redline.cli.bench.show import show
from redline.cli.console import INTERRUPTED, say, until_interrupted
from redline.errors import ConfigError
from redline.messages.base import Record
from redline.progress import Working


class AcceptConfig(Record, frozen=True):
    """Configuration of `redline bench accept`. questions: prompts per domain, at most."""

    targets: tuple[Target, ...]
    dataset: DatasetConfig
    questions: int = 16
    domains: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.0,)
    concurrency: int = 1
    tokenizer: str | None = None
    metrics_url: str | None = None
    ready_s: float | None = None
    quiet: bool = False
    save: str | None = None
    html: str | None = None


def run(config: AcceptConfig, console: Console) -> int:
    """Measures, prints, saves. Returns the exit code: 0, 1 if every request failed, 130 after Ctrl-C.

    Raises ConfigError.
    """
    kept.check_files(config.save, config.html)
    return until_interrupted(lambda: _run(config, console), console)


def questions(config: AcceptConfig, target: Target) -> dict[str, list[Ask]]:
    """Maps each domain to its prompts. Raises ConfigError for a domain that the prompts do not have."""
    vocabulary = None if config.tokenizer is None else open_vocabulary(Path(config.tokenizer))
    dataset = msgspec.structs.replace(config.dataset, backend=target.backend)
    with kept.prompt_tokenizer(vocabulary, target, dataset) as tokenizer:
        found = by_domain(asks(dataset, tokenizer))
    if unknown := [name for name in config.domains if name not in found]:
        raise ConfigError(f"--domain {unknown[0]!r}: the prompts have {', '.join(found)}")
    return {name: of[: config.questions] for name, of in found.items() if not config.domains or name in config.domains}


def _run(config: AcceptConfig, console: Console) -> int:
    targets = [kept.reached(target, config.ready_s, console) for target in config.targets]
    asked = [questions(config, target) for target in targets]
    total = len(config.temperatures) * sum(len(of) for domains in asked for of in domains.values())
    began, parts, answers, stopped = clock.now(), list[Part](), list[Answer](), False
    with Working("requests", shown=not config.quiet) as working:
        for target, domains in zip(targets, asked, strict=True):
            for temperature in config.temperatures:
                for name, of in domains.items():
                    load = kept.watched(working, lambda: len(answers), total, f"{name}: ")
                    one, those, stopped = measured(config, target, temperature, name, of, load)
                    parts.append(one)
                    answers.extend(kept.numbered(answer, len(answers) + at) for at, answer in enumerate(those))
                    if stopped:
                        break
                if stopped:
                    break
            if stopped:
                break
    found = kept.result(
        "accept",
        accept.figures(parts),
        targets[0],
        dataset=msgspec.to_builtins(config.dataset),
        details={"parts": parts, "servers": [target.base_url for target in targets]},
        began=began,
        stopped=stopped,
        answers=answers,
    )
    kept.keep(found, config.save, config.html, console)
    show(accept.accept_sections(found), console)
    if stopped:
        say(console, "stopped: the figures cover the answers received so far")
        return INTERRUPTED
    return 0 if any(one.answers for one in parts) else 1


def measured(
    config: AcceptConfig, target: Target, temperature: float, domain: str, of: list[Ask], load: kept.Load
) -> tuple[Part, list[Answer], bool]:
    """Measures a domain at one temperature: its figures, its answers, and whether Ctrl-C interrupted it."""
    place = target if config.metrics_url is None else msgspec.structs.replace(target, base_url=config.metrics_url)
    those_asked = [msgspec.structs.replace(ask, extra={**ask.extra, "temperature": temperature}) for ask in of]
    before = settled(lambda: ready.drafting(place))
    found = load(target, those_asked, Pace(max_concurrency=config.concurrency))
    after = settled(lambda: ready.drafting(place))
    answers = [answer for answer in found.answers if answer.failure != "skipped"]
    return part(target.base_url, temperature, domain, answers, since(before, after)), answers, found.stopped
