"""`redline bench accept`: the flags, and the run from them."""

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from redline.bench.serving import accept, ready
from redline.bench.serving.accept import Part, by_domain, part, settled, since
from redline.bench.serving.datasets import DatasetConfig, asks
from redline.bench.serving.records import Answer, Ask
from redline.bench.serving.target import Pace, Patience, Target
from redline.bench.serving.vocabulary import open_vocabulary
from redline.cli.bench import kept, options
from redline.cli.bench.show import show
from redline.cli.console import INTERRUPTED, plain_console, say, until_interrupted
from redline.disk import check_output
from redline.errors import ConfigError
from redline.progress import Working
from redline.wire.base import Record

QUESTIONS, MOST_TOKENS = 16, 256
MOST_LINES = 100_000  # of a file that are looked at


class AcceptConfig(Record, frozen=True):
    """What `redline bench accept` is told. questions: of each domain, at most."""

    targets: tuple[Target, ...]
    dataset: DatasetConfig
    questions: int = QUESTIONS
    domains: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.0,)
    concurrency: int = 1
    tokenizer: str | None = None
    metrics_url: str | None = None
    ready_s: float | None = None
    quiet: bool = False
    save: str | None = None
    html: str | None = None


def bench_accept(
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="The server; repeat it to put several on one page, such as one for each k.",
            rich_help_panel=options.SERVER,
        ),
    ] = None,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    endpoint: options.Endpoint = None,
    backend: options.Backend = None,
    model: options.Model = None,
    served_model_name: options.ServedModelName = None,
    tokenizer: options.Tokenizer = None,
    header: options.Header = None,
    extra_body: options.ExtraBody = None,
    insecure: options.Insecure = False,
    metrics_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where /metrics is, if not beside the API.", rich_help_panel=options.SERVER),
    ] = None,
    dataset_name: kept.DatasetName = "redline",
    dataset_path: kept.DatasetPath = None,
    domain: Annotated[
        list[str] | None, typer.Option(help="Only this domain of the prompts (repeatable). Absent: all.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of each domain, at most.")] = QUESTIONS,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of an answer, at most.")] = MOST_TOKENS,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, help="Of the answers (repeatable). Absent: 0, the likeliest tokens.")
    ] = None,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Answers at once.")] = 1,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Every answer has its whole length, where the server knows the field.")
    ] = False,
    seed: kept.Seed = 0,
    save: kept.Save = None,
    html: kept.Html = None,
    disable_tqdm: options.Quiet = False,
    ready_check_timeout_sec: options.ReadyTimeout = None,
    connect_timeout_sec: options.ConnectTimeout = 10.0,
    first_token_timeout_sec: options.FirstTokenTimeout = 600.0,
    silence_timeout_sec: options.SilenceTimeout = 60.0,
    request_timeout_sec: options.RequestTimeout = 6 * 3600.0,
) -> None:
    """How many drafts hold: by place and by domain, and tokens of a round by k beside the golden curve.

    From the counters in the server's /metrics before and after each domain. Nobody else should ask meanwhile.
    """
    targets = tuple(
        options.target_of(
            base_url=url,
            host=host,
            port=port,
            endpoint=endpoint,
            backend=backend,
            model=model,
            served_model_name=served_model_name,
            header=header,
            extra_body=extra_body,
            insecure=insecure,
            patience=Patience(
                connect=connect_timeout_sec,
                first=first_token_timeout_sec,
                silence=silence_timeout_sec,
                whole=request_timeout_sec,
            ),
        )
        for url in base_url or [None]
    )
    if metrics_url is not None and len(targets) > 1:
        raise ConfigError("--metrics-url is of one server; several --base-url were given")
    config = AcceptConfig(
        targets=targets,
        dataset=DatasetConfig(
            dataset_name=kept.dataset(dataset_name),
            dataset_path=None if dataset_path is None else str(dataset_path),
            num_prompts=num_prompts if dataset_name == "random" else MOST_LINES,
            random_output_len=output_len,
            sharegpt_output_len=output_len,
            custom_output_len=output_len,
            seed=kept.seed_of(seed),
            ignore_eos=ignore_eos,
            no_oversample=True,
        ),
        questions=num_prompts,
        domains=tuple(domain or ()),
        temperatures=tuple(dict.fromkeys(temperature or (0.0,))),
        concurrency=max_concurrency,
        tokenizer=tokenizer or (model if model and Path(model).is_dir() else None),
        metrics_url=None
        if metrics_url is None
        else options.target_of(base_url=metrics_url.removesuffix("/metrics")).base_url,
        ready_s=ready_check_timeout_sec,
        quiet=disable_tqdm,
        save=None if save is None else str(save),
        html=None if html is None else str(html),
    )
    raise typer.Exit(run(config, plain_console()))


def run(config: AcceptConfig, console: Console) -> int:
    """Measures, prints, saves; the exit code: 0, 1 where every request failed, 130 after Ctrl-C.

    Raises ConfigError.
    """
    for path in (config.save, config.html):
        if path is not None:
            check_output(Path(path))
    return until_interrupted(lambda: _run(config, console), console)


def questions(config: AcceptConfig, target: Target) -> dict[str, list[Ask]]:
    """Domain -> its prompts. Raises ConfigError for a domain that the prompts do not have."""
    vocabulary = None if config.tokenizer is None else open_vocabulary(Path(config.tokenizer))
    dataset = msgspec.structs.replace(config.dataset, backend=target.backend)
    found = by_domain(asks(dataset, vocabulary))
    if unknown := [name for name in config.domains if name not in found]:
        raise ConfigError(f"--domain {unknown[0]!r}: the prompts have {', '.join(found)}")
    return {name: of[: config.questions] for name, of in found.items() if not config.domains or name in config.domains}


def _run(config: AcceptConfig, console: Console) -> int:
    targets = [kept.reached(target, config.ready_s, console) for target in config.targets]
    asked = [questions(config, target) for target in targets]
    total = len(config.temperatures) * sum(len(of) for domains in asked for of in domains.values())
    began, parts, answers, stopped = time.time(), list[Part](), list[Answer](), False
    with Working("requests", shown=not config.quiet) as working:
        for target, domains in zip(targets, asked, strict=True):
            for temperature in config.temperatures:
                for name, of in domains.items():
                    load = kept.watched(working, lambda: len(answers), total, f"{name}: ")
                    one, those, stopped = measured(config, target, temperature, name, of, load)
                    parts.append(one)
                    answers.extend(those)
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
    sections = accept.accept_sections(found)
    show(sections, console)
    title = f"redline bench accept: {', '.join(dict.fromkeys(target.model for target in targets))}"
    kept.keep(found, sections, title, config.save, config.html, console)
    if stopped:
        say(console, "stopped: the figures are of what had been answered")
        return INTERRUPTED
    return 0 if any(one.answers for one in parts) else 1


def measured(
    config: AcceptConfig, target: Target, temperature: float, domain: str, of: list[Ask], load: kept.Load
) -> tuple[Part, list[Answer], bool]:
    """A domain at one temperature: its figures, its answers, and whether Ctrl-C ended it."""
    place = target if config.metrics_url is None else msgspec.structs.replace(target, base_url=config.metrics_url)
    those_asked = [msgspec.structs.replace(ask, extra={**ask.extra, "temperature": temperature}) for ask in of]
    before = settled(lambda: ready.drafting(place))
    found = load(target, those_asked, Pace(max_concurrency=config.concurrency))
    after = settled(lambda: ready.drafting(place))
    answers = [answer for answer in found.answers if answer.failure != "skipped"]
    return part(target.base_url, temperature, domain, answers, since(before, after)), answers, found.stopped
