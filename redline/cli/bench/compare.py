"""`redline bench compare`: the flags, and the run from them."""

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from redline.bench.serving import compare
from redline.bench.serving.compare import FIGURES, Plan, Side
from redline.bench.serving.datasets import COMPLETIONS, DatasetConfig, asks
from redline.bench.serving.metrics import error_of, failure_of
from redline.bench.serving.records import Ask, Run
from redline.bench.serving.saved import without_secrets
from redline.bench.serving.sections import Plot
from redline.bench.serving.target import Pace, Patience, Target
from redline.bench.serving.vocabulary import open_vocabulary
from redline.cli.bench import kept, options
from redline.cli.bench.show import show
from redline.cli.console import INTERRUPTED, plain_console, say, until_interrupted
from redline.disk import check_output
from redline.errors import ConfigError
from redline.progress import Working
from redline.wire.base import Record

STREAMS, EACH = 4, 2  # at once where no load is given, and requests of a load for each stream
MOST_LINES = 100_000  # of a dataset that is a file
THE_TWO = "The two servers"


class CompareConfig(Record, frozen=True):
    """What `redline bench compare` is told. warmups: requests to each server before the first block."""

    a: Target
    b: Target
    plan: Plan
    pace: Pace
    dataset: DatasetConfig
    warmups: int
    temperature: float | None = 0.0
    tokenizer: str | None = None
    ready_s: float | None = None
    quiet: bool = False
    save: str | None = None
    html: str | None = None


def _of(side: str, what: str, metavar: str) -> Any:
    return typer.Option(metavar=metavar, help=f"{what} of {side}.", rich_help_panel=THE_TWO)


def bench_compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A server, such as http://127.0.0.1:8000.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    model_a: Annotated[str | None, _of("A", "The model's name; absent: the first that it lists.", "NAME")] = None,
    model_b: Annotated[str | None, _of("B", "The model's name; absent: the first that it lists.", "NAME")] = None,
    backend_a: Annotated[str | None, _of("A", "How it is spoken to.", "NAME")] = None,
    backend_b: Annotated[str | None, _of("B", "How it is spoken to.", "NAME")] = None,
    endpoint_a: Annotated[str | None, _of("A", "The path; absent: the backend's own.", "PATH")] = None,
    endpoint_b: Annotated[str | None, _of("B", "The path; absent: the backend's own.", "PATH")] = None,
    key_env_a: Annotated[str | None, _of("A", "The environment's variable with the key.", "NAME")] = None,
    key_env_b: Annotated[str | None, _of("B", "The environment's variable with the key.", "NAME")] = None,
    tokenizer: options.Tokenizer = None,
    header: options.Header = None,
    extra_body: options.ExtraBody = None,
    insecure: options.Insecure = False,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help=f"Streams at once. Absent: {STREAMS}; with a rate: as many as come.")
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests/s of a load. Absent: as places become free.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help=f"Requests of each load. Absent: {EACH} a stream, or 10 s of the rate.")
    ] = None,
    num_warmups: Annotated[
        int | None, typer.Option(min=0, help="Requests to each server before, not counted. Absent: one load.")
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of four loads; with --until the fewest.")] = 8,
    until: Annotated[
        str | None, typer.Option(metavar="2%", help="Add blocks until the interval is ± this narrow.")
    ] = None,
    max_blocks: Annotated[int, typer.Option(min=1, help="With --until: blocks at most.")] = 40,
    figure: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(FIGURES),
            help="Whose interval --until narrows. Absent: output_throughput; of a rate: e2el.",
        ),
    ] = None,
    dataset_name: kept.DatasetName = "random",
    dataset_path: kept.DatasetPath = None,
    random_input_len: Annotated[int, typer.Option(min=1, help="Tokens of a random prompt.")] = 1024,
    random_output_len: Annotated[int, typer.Option(min=1, help="Tokens of its answer.")] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(min=0.0, max=0.999, help="Lengths lie within this share of them.")
    ] = 0.0,
    output_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an answer, at most, of a dataset that is a file.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Every answer has its whole length. Random prompts ask so anyway.")
    ] = False,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy, so that answers can be compared too.")] = 0.0,
    seed: kept.Seed = None,
    save: kept.Save = None,
    html: kept.Html = None,
    disable_tqdm: options.Quiet = False,
    ready_check_timeout_sec: options.ReadyTimeout = None,
    connect_timeout_sec: options.ConnectTimeout = 10.0,
    first_token_timeout_sec: options.FirstTokenTimeout = 600.0,
    silence_timeout_sec: options.SilenceTimeout = 60.0,
    request_timeout_sec: options.RequestTimeout = 6 * 3600.0,
) -> None:
    """Which of two servers is faster, by how much, and how sure that is; and whether they answer alike.

    The same requests go to both in small alternating loads, so that what drifts on the machine or network cancels.
    """
    if figure is not None and figure not in FIGURES:
        raise ConfigError(f"--figure {figure!r}: expected one of {', '.join(FIGURES)}")
    many, drawn = loads_size(num_prompts, max_concurrency, request_rate), kept.seed_of(seed)
    patience = Patience(
        connect=connect_timeout_sec,
        first=first_token_timeout_sec,
        silence=silence_timeout_sec,
        whole=request_timeout_sec,
    )

    def target(url: str, model: str | None, backend: str | None, endpoint: str | None, variable: str | None) -> Target:
        found = options.target_of(
            base_url=url,
            endpoint=endpoint,
            backend=backend,
            model=model,
            header=header,
            extra_body=extra_body,
            insecure=insecure,
            body={"temperature": temperature},
            patience=patience,
        )
        return found if variable is None else msgspec.structs.replace(found, key=key_of(variable))

    one = target(a, model_a, backend_a, endpoint_a, key_env_a)
    other = target(b, model_b, backend_b, endpoint_b, key_env_b)
    if (one.backend in COMPLETIONS) != (other.backend in COMPLETIONS):
        raise ConfigError(
            f"--backend-a {one.backend}, --backend-b {other.backend}: one takes a bare text, the other a chat, "
            "so that the two would not get the same requests; give both the same kind"
        )
    config = CompareConfig(
        a=one,
        b=other,
        plan=Plan(
            blocks=blocks,
            until=None if until is None else share("--until", until),
            most=max(blocks, max_blocks),
            figure=figure or ("output_throughput" if request_rate is None else "e2el"),
            seed=drawn,
        ),
        pace=Pace(
            rate=request_rate or math.inf,
            max_concurrency=max_concurrency or (STREAMS if request_rate is None else None),
            seed=drawn,
        ),
        dataset=DatasetConfig(
            dataset_name=kept.dataset(dataset_name),
            dataset_path=None if dataset_path is None else str(dataset_path),
            num_prompts=many,
            random_input_len=random_input_len,
            random_output_len=random_output_len,
            random_range_ratio=random_range_ratio,
            sharegpt_output_len=output_len,
            custom_output_len=output_len,
            seed=drawn,
            ignore_eos=ignore_eos or dataset_name == "random",
            backend=one.backend,
        ),
        warmups=many if num_warmups is None else num_warmups,
        temperature=temperature,
        tokenizer=tokenizer,
        ready_s=ready_check_timeout_sec,
        quiet=disable_tqdm,
        save=None if save is None else str(save),
        html=None if html is None else str(html),
    )
    raise typer.Exit(run(config, plain_console()))


def loads_size(given: int | None, streams: int | None, rate: float | None) -> int:
    """How many requests a load has."""
    if given is not None:
        return given
    return (streams or STREAMS) * EACH if rate is None else max(10, round(rate * 10))


def share(flag: str, words: str) -> float:
    """A share such as 2% or 0.02. Raises ConfigError."""
    text = words.strip()
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise ConfigError(f"{flag} {words!r}: expected a share such as 2% or 0.02")
    return value


def key_of(variable: str) -> str:
    """The key in a variable of the environment. Raises ConfigError where it is not set, or no key."""
    key = os.environ.get(variable, "")
    if not key or not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{variable} of the environment: expected the server's key, letters, digits and signs of ASCII"
        )
    return key


def run(config: CompareConfig, console: Console) -> int:
    """Measures, prints, saves; the exit code: 0, 1 where nothing could be compared, 130 after Ctrl-C.

    Raises ConfigError.
    """
    for path in (config.save, config.html):
        if path is not None:
            check_output(Path(path))
    return until_interrupted(lambda: _run(config, console), console)


class Prompts:
    """The requests of each pair of loads: random ones are new for every pair; those of a file are taken in turn."""

    def __init__(self, config: DatasetConfig, tokenizer: str | None) -> None:
        """Raises ConfigError where a file cannot be used."""
        self._config = config
        self._vocabulary = None if tokenizer is None else open_vocabulary(Path(tokenizer))
        self._file: list[Ask] = []
        if config.dataset_path is not None:
            whole = msgspec.structs.replace(config, num_prompts=MOST_LINES, no_oversample=True)
            self._file = asks(whole, self._vocabulary)

    def __call__(self, pair: int) -> list[Ask]:
        """The requests of a pair of loads, by its number; -1 is the warm-up's."""
        many = self._config.num_prompts
        if self._file:
            start = (pair + 1) * many
            return [self._file[at % len(self._file)] for at in range(start, start + many)]
        seed = self._config.seed + 1 + pair
        return asks(msgspec.structs.replace(self._config, seed=seed), self._vocabulary)

    def again(self, pairs: int) -> bool:
        """Whether some prompts were asked more than once: a prefix cache knows those."""
        return bool(self._file) and (pairs + 1) * self._config.num_prompts > len(self._file)


def _run(config: CompareConfig, console: Console) -> int:
    began = time.time()
    targets: dict[Side, Target] = {
        "A": kept.reached(config.a, config.ready_s, console),
        "B": kept.reached(config.b, config.ready_s, console),
    }
    prompts = Prompts(config.dataset, config.tokenizer)
    each, plan = config.dataset.num_prompts, config.plan
    total = 4 * each * (plan.blocks if plan.until is None else plan.most)
    done, ended = 0, 0
    with Working("requests", shown=not config.quiet) as working:

        def put(side: Side, requests: Sequence[Ask]) -> Run:
            nonlocal done
            what = f"{side}, block {ended + 1}: "
            run = kept.watched(working, lambda: done, total, what)(targets[side], requests, config.pace)
            done += len(requests)
            return run

        def tell(blocks: int) -> None:
            nonlocal ended
            ended = blocks

        for side in ("A", "B") if config.warmups else ():
            warm = _warm(prompts(-1), config.warmups)
            found = kept.watched(working, lambda: 0, len(warm), f"{side}, warm-up: ")(targets[side], warm, config.pace)
            if found.stopped:
                raise KeyboardInterrupt
            if all(failure_of(answer) is not None for answer in found.answers):
                raise ConfigError(
                    f"{side}, {targets[side].base_url}: no warm-up was answered: {error_of(found.answers[0])}"
                )
        compared = compare.compare(plan, put, prompts, tell)
    notes: tuple[str, ...] = ()
    if prompts.again(2 * len(compared.blocks)):
        notes = ("The file has fewer prompts than were asked: some came again, and a prefix cache knew them.",)
    details: dict[str, Any] = {
        "plan": plan,
        "blocks": compared.blocks,
        "same": compared.same,
        "greedy": config.temperature == 0,
        "servers": {side: compare.describe(target, config.pace) for side, target in targets.items()},
        "target_b": without_secrets(targets["B"]),
    }
    result = kept.result(
        "compare",
        compare.figures_of(compared.blocks, compared.same, plan.seed),
        targets["A"],
        dataset=msgspec.to_builtins(config.dataset),
        details=details,
        began=began,
        stopped=compared.stopped,
        pace=config.pace,
        answers=compared.answers,
    )
    result = msgspec.structs.replace(result, notes=notes)
    sections = compare.compare_sections(result)
    show([section for section in sections if not isinstance(section, Plot)], console)
    title = f"redline bench compare: {targets['A'].base_url} and {targets['B'].base_url}"
    kept.keep(result, sections, title, config.save, config.html, console)
    if compared.stopped:
        say(console, f"stopped: {len(compared.blocks)} blocks had ended")
        return INTERRUPTED
    return 0 if compare.outcomes(compared.blocks) else 1


def _warm(requests: Sequence[Ask], many: int) -> list[Ask]:
    return [requests[at % len(requests)] for at in range(many)]
