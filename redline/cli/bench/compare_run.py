"""Runs `redline bench compare`: sends loads to both servers in turn, prints and saves the result."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from redline import clock
from redline.bench.serving import compare
from redline.bench.serving.compare import FIGURES, ComparePlan, Side
from redline.bench.serving.datasets import COMPLETIONS, DatasetConfig, asks
from redline.bench.serving.metrics import error_of, failure_of
from redline.bench.serving.records import LoadRequest, LoadRun
from redline.bench.serving.saved import without_secrets
from redline.bench.serving.sections import Plot
from redline.bench.serving.target import LoadPace, ServerTarget
from redline.bench.serving.vocabulary import open_vocabulary
from redline.cli.bench import kept
from redline.cli.bench.compare import STREAMS, CompareFlags
from redline.cli.bench.options import ServerFlags, key_of
from redline.cli.bench.show import show
from redline.cli.console import INTERRUPTED, say, until_interrupted
from redline.errors import ConfigError
from redline.progress import Working

MOST_LINES = 100_000  # lines read from a dataset file, at most


class CompareRun:
    """One run of `redline bench compare`: what its flags ask for, checked. Raises ConfigError."""

    def __init__(self, flags: CompareFlags) -> None:
        if flags.figure is not None and flags.figure not in FIGURES:
            raise ConfigError(f"--figure {flags.figure!r}: expected one of {', '.join(FIGURES)}")
        self.flags, seed, rate = flags, kept.seed_of(flags.seed), flags.request_rate
        self.a = _target(flags, flags.a, flags.model_a, flags.backend_a, flags.endpoint_a, flags.key_env_a)
        self.b = _target(flags, flags.b, flags.model_b, flags.backend_b, flags.endpoint_b, flags.key_env_b)
        if (self.a.backend in COMPLETIONS) != (self.b.backend in COMPLETIONS):
            raise ConfigError(
                f"--backend-a {self.a.backend}, --backend-b {self.b.backend}: one takes plain text, the other a "
                "chat, so the two would not get the same requests; use the same kind for both"
            )
        self.plan = ComparePlan(
            blocks=flags.blocks,
            until=None if flags.until is None else share("--until", flags.until),
            most=max(flags.blocks, flags.max_blocks),
            figure=flags.figure or ("output_throughput" if rate is None else "e2el"),
            seed=seed,
            scheduled=rate is not None,
        )
        self.pace = LoadPace(
            rate=rate or math.inf,
            max_concurrency=flags.max_concurrency or (STREAMS if rate is None else None),
            seed=seed,
        )
        self.dataset = DatasetConfig(
            dataset_name=kept.dataset(flags.dataset_name),
            dataset_path=None if flags.dataset_path is None else str(flags.dataset_path),
            num_prompts=flags.size,
            random_input_len=flags.random_input_len,
            random_output_len=flags.random_output_len,
            random_range_ratio=flags.random_range_ratio,
            sharegpt_output_len=flags.output_len,
            custom_output_len=flags.output_len,
            seed=seed,
            ignore_eos=flags.ignore_eos or flags.dataset_name == "random",
            backend=self.a.backend,
        )
        self.warmups = flags.size if flags.num_warmups is None else flags.num_warmups


def _target(
    flags: CompareFlags, url: str, model: str | None, backend: str | None, endpoint: str | None, variable: str | None
) -> ServerTarget:
    server = ServerFlags(
        endpoint=endpoint,
        backend=backend,
        model=model,
        header=flags.header,
        extra_body=flags.extra_body,
        insecure=flags.insecure,
    )
    found = server.target(url, flags.waiting.patience, body={"temperature": flags.temperature})
    if variable is None:
        return found
    if (key := key_of(variable)) is None:
        raise ConfigError(f"environment variable {variable}: expected the server's API key; it is not set")
    return msgspec.structs.replace(found, key=key)


def share(flag: str, words: str) -> float:
    """Parses a share such as 2% or 0.02. Raises ConfigError."""
    text = words.strip()
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise ConfigError(f"{flag} {words!r}: expected a share such as 2% or 0.02")
    return value


def run(flags: CompareFlags, console: Console) -> int:
    """Measures, prints, saves. Returns the exit code: 0, 1 if nothing could be compared, 130 after Ctrl-C.

    Raises ConfigError.
    """
    config = CompareRun(flags)
    kept.check_files(flags.save, flags.html)
    return until_interrupted(lambda: _run(config, console), console)


class PairedPrompts:
    """The requests of each pair of loads: random prompts are new each time, prompts of a file come in turn."""

    def __init__(self, config: DatasetConfig, tokenizer: str | None, target: ServerTarget) -> None:
        """target: the server whose tokenizer counts without --tokenizer. Raises ConfigError for an unusable file."""
        self._config, self._target = config, target
        self.vocabulary = None if tokenizer is None else open_vocabulary(Path(tokenizer))
        self._file: list[LoadRequest] = []
        if config.dataset_path is not None:
            whole = msgspec.structs.replace(config, num_prompts=MOST_LINES, no_oversample=True)
            self._file = asks(whole, self.vocabulary)

    def __call__(self, pair: int) -> list[LoadRequest]:
        """The requests of pair number `pair`; -1 is the warm-up."""
        many = self._config.num_prompts
        if self._file:
            start = (pair + 1) * many
            return [self._file[at % len(self._file)] for at in range(start, start + many)]
        seed = self._config.seed + 1 + pair
        with kept.prompt_tokenizer(self.vocabulary, self._target, self._config.dataset_path) as counter:
            return asks(msgspec.structs.replace(self._config, seed=seed), counter)

    def again(self, pairs: int) -> bool:
        """Whether some prompts were sent more than once, so that they hit the prefix cache."""
        return bool(self._file) and (pairs + 1) * self._config.num_prompts > len(self._file)


def _run(config: CompareRun, console: Console) -> int:
    flags = config.flags
    began = clock.now()
    targets: dict[Side, ServerTarget] = {
        "A": kept.reached(config.a, flags.waiting.ready_check_timeout_sec, console),
        "B": kept.reached(config.b, flags.waiting.ready_check_timeout_sec, console),
    }
    prompts = PairedPrompts(config.dataset, flags.tokenizer, targets["A"])
    each, plan = config.dataset.num_prompts, config.plan
    total = 4 * each * (plan.blocks if plan.until is None else plan.most)
    done, ended = 0, 0
    with Working("requests", shown=not flags.disable_tqdm) as working:

        def put(side: Side, requests: Sequence[LoadRequest]) -> LoadRun:
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
        "greedy": flags.temperature == 0,
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
    kept.keep(result, flags.save, flags.html, console)
    show([section for section in sections if not isinstance(section, Plot)], console)
    if compared.stopped:
        say(console, f"stopped after {len(compared.blocks)} complete blocks")
        return INTERRUPTED
    return 0 if compare.outcomes(compared.blocks) else 1


def _warm(requests: Sequence[LoadRequest], many: int) -> list[LoadRequest]:
    return [requests[at % len(requests)] for at in range(many)]
