"""Runs `redline bench accept`: sends the prompts, reads the server's counters, prints and saves the result."""

from pathlib import Path

import msgspec
from rich.console import Console

from redline import clock
from redline.bench.serving import accept, ready
from redline.bench.serving.accept import ServerAcceptance, by_domain, part, settled
from redline.bench.serving.datasets import DatasetConfig, asks
from redline.bench.serving.records import LoadRequest, TimedAnswer
from redline.bench.serving.target import LoadPace, ServerTarget
from redline.bench.serving.vocabulary import open_vocabulary
from redline.cli.bench import kept
from redline.cli.bench.accept import AcceptFlags
from redline.cli.bench.options import address
from redline.cli.bench.show import show
from redline.cli.console import INTERRUPTED, say, until_interrupted
from redline.errors import ConfigError
from redline.progress import Working

MOST_LINES = 100_000  # lines read from a file, at most


class AcceptRun:
    """One run of `redline bench accept`: what its flags ask for, checked. Raises ConfigError.

    metrics_url: the address whose /metrics has the counters; None: the server's.
    """

    def __init__(self, flags: AcceptFlags) -> None:
        patience = flags.waiting.patience
        self.flags, self.tokenizer = flags, flags.server.vocabulary
        self.targets = [flags.server.target(url, patience) for url in flags.base_url or [None]]
        if flags.metrics_url is not None and len(self.targets) > 1:
            raise ConfigError("--metrics-url applies to one server, but several --base-url were given")
        self.metrics_url = flags.metrics_url and address(flags.metrics_url.removesuffix("/metrics"))[0]
        self.temperatures = tuple(dict.fromkeys(flags.temperature))
        self.dataset = DatasetConfig(
            dataset_name=kept.dataset(flags.dataset_name),
            dataset_path=None if flags.dataset_path is None else str(flags.dataset_path),
            num_prompts=flags.num_prompts if flags.dataset_name == "random" else MOST_LINES,
            random_output_len=flags.output_len,
            sharegpt_output_len=flags.output_len,
            custom_output_len=flags.output_len,
            seed=kept.seed_of(flags.seed),
            ignore_eos=flags.ignore_eos,
            no_oversample=True,
        )


def run(flags: AcceptFlags, console: Console) -> int:
    """Measures, prints, saves. Returns the exit code: 0, 1 if every request failed, 130 after Ctrl-C.

    Raises ConfigError.
    """
    config = AcceptRun(flags)
    kept.check_files(flags.save, flags.html)
    return until_interrupted(lambda: _run(config, console), console)


def questions(config: AcceptRun, target: ServerTarget) -> dict[str, list[LoadRequest]]:
    """Maps each domain to its prompts. Raises ConfigError for a domain that the prompts do not have."""
    vocabulary = None if config.tokenizer is None else open_vocabulary(Path(config.tokenizer))
    dataset = msgspec.structs.replace(config.dataset, backend=target.backend)
    with kept.prompt_tokenizer(vocabulary, target, dataset.dataset_path) as tokenizer:
        found = by_domain(asks(dataset, tokenizer))
    if unknown := [name for name in config.flags.domain if name not in found]:
        raise ConfigError(f"--domain {unknown[0]!r}: the prompts have {', '.join(found)}")
    return {
        name: of[: config.flags.num_prompts]
        for name, of in found.items()
        if not config.flags.domain or name in config.flags.domain
    }


def _run(config: AcceptRun, console: Console) -> int:
    targets = [kept.reached(target, config.flags.waiting.ready_check_timeout_sec, console) for target in config.targets]
    asked = [questions(config, target) for target in targets]
    total = len(config.temperatures) * sum(len(of) for domains in asked for of in domains.values())
    began, parts, answers, stopped = clock.now(), list[ServerAcceptance](), list[TimedAnswer](), False
    with Working("requests", shown=not config.flags.disable_tqdm) as working:
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
    kept.keep(found, config.flags.save, config.flags.html, console)
    show(accept.accept_sections(found), console)
    if stopped:
        say(console, "stopped: the figures cover the answers received so far")
        return INTERRUPTED
    return 0 if any(one.answers for one in parts) else 1


def measured(
    config: AcceptRun, target: ServerTarget, temperature: float, domain: str, of: list[LoadRequest], load: kept.Load
) -> tuple[ServerAcceptance, list[TimedAnswer], bool]:
    """Measures a domain at one temperature: its figures, its answers, and whether Ctrl-C interrupted it."""
    place = target if config.metrics_url is None else msgspec.structs.replace(target, base_url=config.metrics_url)
    those_asked = [msgspec.structs.replace(ask, extra={**ask.extra, "temperature": temperature}) for ask in of]
    before = settled(lambda: ready.drafting(place))
    found = load(target, those_asked, LoadPace(max_concurrency=config.flags.max_concurrency))
    after = settled(lambda: ready.drafting(place))
    answers = [answer for answer in found.answers if answer.failure != "skipped"]
    counted = None if before is None or after is None else after.since(before)
    return part(target.base_url, temperature, domain, answers, counted), answers, found.stopped
