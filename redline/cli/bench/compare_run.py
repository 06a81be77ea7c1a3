"""Runs `redline bench compare`: sends loads to both servers in turn, prints and saves the result."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from redline import clock
from redline.bench.serving import compare
from redline.bench.serving.compare import Plan, Side
from redline.bench.serving.datasets import DatasetConfig, asks
from redline.bench.serving.metrics import error_of, failure_of
from redline.bench.serving.records import Ask, Run
from redline.bench.serving.saved import without_secrets
from redline.bench.serving.sections import Plot
from redline.bench.serving.target import Pace, Target
from redline.bench.serving.vocabulary import open_vocabulary
from redline.cli.bench import kept
from redline.cli.bench.show import show
from redline.cli.console import INTERRUPTED, say, until_interrupted
from redline.errors import ConfigError
from redline.messages.base import Record
from redline.progress import Working

MOST_LINES = 100_000  # lines read from a dataset file, at most


class CompareConfig(Record, frozen=True):
    """Configuration of `redline bench compare`. warmups: requests to each server before the first block."""

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


def run(config: CompareConfig, console: Console) -> int:
    """Measures, prints, saves. Returns the exit code: 0, 1 if nothing could be compared, 130 after Ctrl-C.

    Raises ConfigError.
    """
    kept.check_files(config.save, config.html)
    return until_interrupted(lambda: _run(config, console), console)


class Prompts:
    """The requests of each pair of loads: random prompts are new each time, prompts of a file come in turn."""

    def __init__(self, config: DatasetConfig, tokenizer: str | None, target: Target) -> None:
        """target: the server whose tokenizer counts without --tokenizer. Raises ConfigError for an unusable file."""
        self._config, self._target = config, target
        self.vocabulary = None if tokenizer is None else open_vocabulary(Path(tokenizer))
        self._file: list[Ask] = []
        if config.dataset_path is not None:
            whole = msgspec.structs.replace(config, num_prompts=MOST_LINES, no_oversample=True)
            self._file = asks(whole, self.vocabulary)

    def __call__(self, pair: int) -> list[Ask]:
        """The requests of pair number `pair`; -1 is the warm-up."""
        many = self._config.num_prompts
        if self._file:
            start = (pair + 1) * many
            return [self._file[at % len(self._file)] for at in range(start, start + many)]
        seed = self._config.seed + 1 + pair
        with kept.prompt_tokenizer(self.vocabulary, self._target, self._config) as counter:
            return asks(msgspec.structs.replace(self._config, seed=seed), counter)

    def again(self, pairs: int) -> bool:
        """Whether some prompts were sent more than once, so that they hit the prefix cache."""
        return bool(self._file) and (pairs + 1) * self._config.num_prompts > len(self._file)


def _run(config: CompareConfig, console: Console) -> int:
    began = clock.now()
    targets: dict[Side, Target] = {
        "A": kept.reached(config.a, config.ready_s, console),
        "B": kept.reached(config.b, config.ready_s, console),
    }
    prompts = Prompts(config.dataset, config.tokenizer, targets["A"])
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
                    f"{side}, {targets[side].base_url}: no warm-up request was answered: {error_of(found.answers[0])}"
                )
        compared = compare.compare(plan, put, prompts, tell, prompts.vocabulary)
    notes: tuple[str, ...] = ()
    if prompts.again(2 * len(compared.blocks)):
        notes = ("The file has fewer prompts than requests: some were repeated and hit the prefix cache.",)
    if targets["A"].base_url == targets["B"].base_url:
        notes += ("A and B are the same server: the second load of a pair may hit prefixes cached by the first.",)
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
    result = msgspec.structs.replace(result, notes=notes, generator=compared.generator)
    sections = compare.compare_sections(result)
    kept.keep(result, config.save, config.html, console)
    show([section for section in sections if not isinstance(section, Plot)], console)
    if compared.stopped:
        say(console, f"stopped after {len(compared.blocks)} complete blocks")
        return INTERRUPTED
    return 0 if compare.outcomes(compared.blocks) else 1


def _warm(requests: Sequence[Ask], many: int) -> list[Ask]:
    return [requests[at % len(requests)] for at in range(many)]
