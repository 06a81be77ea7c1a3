"""Quality of a checkpoint's answers: `redline eval FOLDER` answers the prompts in FOLDER/eval and grades the answers.

Each line of FOLDER/eval/SET.jsonl is a prompt (prompts.py) with its check (checks.py). Answers are greedy and generated
by the serving engine, so the table measures the quality that users get. Two checkpoints, usually one model before and
after quantisation, are compared prompt by prompt: pairs detect smaller differences than two totals.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import Protocol

import msgspec
from rich.table import Table

from redline import clock
from redline.bench.quality.checks import Grade, GradedCall, grade
from redline.bench.quality.prompts import EvalPrompt, ModelAnswer, limited, read_sets
from redline.errors import ConfigError
from redline.messages.base import Record

TARGETS = "targets.json"  # in the folder of the sets: {set: {kind: percent}}; the kind "all" is the set's total
TOTAL = "all"


class EvalVerdict(Record, frozen=True):
    """A graded answer."""

    set: str
    kind: str
    ok: bool | None  # None: its check needs --run-code
    why: str
    prompt: str  # the last user message
    answer: ModelAnswer


class EvalRow(Record, frozen=True):
    """One line of the table: a kind within a set, or the set's total."""

    set: str
    kind: str
    prompts: int  # graded prompts
    right: int
    target: float | None = None  # percent

    @property
    def percent(self) -> float:
        """Right answers as percent of graded ones.

        Raises ZeroDivisionError if none was graded; `rows` returns no such row.
        """
        return 100 * self.right / self.prompts

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None if the set has no target for this kind."""
        return None if self.target is None else self.percent >= self.target


class EvalComparison(Record, frozen=True):
    """The same prompts with two checkpoints. The difference is ours minus theirs, in points (percent of prompts).

    prompts: pairs of graded answers. both, only_ours, only_theirs: number of pairs with right answers of both, of ours
    only, of theirs only.
    """

    prompts: int
    both: int
    only_ours: int
    only_theirs: int

    @property
    def difference(self) -> float:
        """Points by which ours is better. Raises ZeroDivisionError if no pair was graded."""
        return 100 * (self.only_ours - self.only_theirs) / self.prompts

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the difference, in points: Wald, with half a pair added to each of the four cells.

        Agresti and Min, "Simple improved confidence intervals for comparing matched proportions", 2005.
        """
        n, b, c = self.prompts + 2, self.only_ours + 0.5, self.only_theirs + 0.5
        middle, half = (b - c) / n, 1.96 * math.sqrt(b + c - (b - c) ** 2 / n) / n
        return 100 * max(middle - half, -1), 100 * min(middle + half, 1)


class EvalReport(Record, frozen=True):
    """The report of an evaluation."""

    folder: str
    fingerprint: str
    seconds: float  # seconds of answering, without loading and grading
    generated_tokens: int
    rows: list[EvalRow]
    not_run: int  # prompts with a check that needs --run-code
    cut_off: int  # answers that reached the token limit
    verdicts: list[EvalVerdict]
    against: str | None = None
    comparison: EvalComparison | None = None
    refused: int = 0  # prompts that the engine rejected; they count as wrong
    limit: int | None = None  # maximum prompts per kind and set
    left_out: int = 0  # prompts left out by the limit


class Answerer(Protocol):
    """A loaded checkpoint that answers: `answering.Greedy` over an engine."""

    @property
    def fingerprint(self) -> str:
        """The checkpoint's fingerprint, which identifies the model and its weights in a report."""
        ...

    def answer(self, prompts: Sequence[EvalPrompt], done: Callable[[], None]) -> list[ModelAnswer]:
        """The answers in the order of the prompts; calls `done` once for each as it ends."""
        ...


Open = Callable[[Path], AbstractContextManager[Answerer]]


def _place(folder: Path, sets: Path | None) -> Path:
    own = folder / "eval"
    if sets is None:
        if not own.is_dir():
            raise ConfigError(f"{own}: no evaluation sets; name their folder with --sets, such as SOURCE/eval")
        return own
    named = own / sets
    if len(sets.parts) == 1 and named.is_dir():
        return named
    if not sets.is_dir():
        raise ConfigError(f"{sets}: contains no evaluation sets, since there is no such folder, and no {named}")
    return sets


def grade_all(
    folder: Path,
    open_checkpoint: Open,
    *,
    sets: Path | None = None,
    against: Path | None = None,
    run_code: bool = False,
    limit: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> EvalReport:
    """Answers all prompts in `sets` with the checkpoint in `folder`, grades, compares.

    sets: the name of a folder in folder/eval, or a folder; None: folder/eval itself.
    against: the checkpoint to compare with, if any. run_code: runs functions written by the model. limit: maximum
    prompts per kind and set, always the same ones. progress: called with (done, total) answers over both checkpoints.
    Raises ConfigError, before answering, if there are no sets or a check is invalid.
    """
    place = _place(folder, sets)
    found, targets = read_sets(place), read_targets(place)
    asked = found if limit is None else limited(found, limit)
    prompts = [prompt for members in asked.values() for prompt in members]
    total, done = len(prompts) * (1 if against is None else 2), 0

    def one_more() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    def ask(which: Path) -> tuple[str, float, list[ModelAnswer]]:
        with open_checkpoint(which) as checkpoint:
            start = clock.monotonic()
            answers = checkpoint.answer(prompts, one_more)
            return checkpoint.fingerprint, clock.monotonic() - start, answers

    fingerprint, seconds, answers = ask(folder)
    verdicts = judge(asked, answers, run_code)
    comparison = None
    if against is not None:
        comparison = compare(verdicts, judge(asked, ask(against)[2], run_code))
    return EvalReport(
        folder=str(folder),
        fingerprint=fingerprint,
        seconds=round(seconds, 2),
        generated_tokens=sum(answer.tokens for answer in answers),
        rows=rows(verdicts, targets),
        not_run=sum(verdict.ok is None for verdict in verdicts),
        cut_off=sum(answer.finish == "length" for answer in answers),
        verdicts=verdicts,
        refused=sum(answer.finish == "error" for answer in answers),
        against=None if against is None else str(against),
        comparison=comparison,
        limit=limit,
        left_out=sum(map(len, found.values())) - len(prompts),
    )


def read_targets(folder: Path) -> dict[str, dict[str, float]]:
    """{set: {kind: percent}} from `folder`/targets.json; empty if there is no such file.

    Raises ConfigError if the file cannot be read or has another format.
    """
    path = folder / TARGETS
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, float]]) if path.exists() else {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: expected {{set: {{kind: percent}}}}: {error}") from None


def judge(
    sets: Mapping[str, Sequence[EvalPrompt]], answers: Sequence[ModelAnswer], run_code: bool
) -> list[EvalVerdict]:
    """Grades the answers, given in the order of the sets' prompts. run_code: see `grade_all`."""
    asked = [(name, prompt) for name, prompts in sets.items() for prompt in prompts]

    def one(place: int) -> Grade:
        answer = answers[place]
        calls: list[GradedCall] = [{"name": name, "arguments": arguments} for name, arguments in answer.tool_calls]
        return grade(asked[place][1].check, answer.content, calls, run_code)

    with ThreadPoolExecutor(2) as pool:  # functions written by the model run in subprocesses, two at a time
        grades = list(pool.map(one, range(len(asked))))
    return [
        EvalVerdict(set=name, kind=prompt.kind, ok=grade.ok, why=grade.why, prompt=_last_words(prompt), answer=answer)
        for (name, prompt), grade, answer in zip(asked, grades, answers, strict=True)
    ]


def rows(verdicts: Iterable[EvalVerdict], targets: Mapping[str, Mapping[str, float]]) -> list[EvalRow]:
    """One row per set and kind, then one per set, over graded prompts."""
    graded = [verdict for verdict in verdicts if verdict.ok is not None]
    found: list[EvalRow] = []
    for name, members in groupby(graded, lambda verdict: verdict.set):
        of_set = list(members)
        for kind in [*sorted({verdict.kind for verdict in of_set}), TOTAL]:
            chosen = [verdict for verdict in of_set if kind in (verdict.kind, TOTAL)]
            right = sum(verdict.ok is True for verdict in chosen)
            target = targets.get(name, {}).get(kind)
            found.append(EvalRow(set=name, kind=kind, prompts=len(chosen), right=right, target=target))
    return found


def compare(ours: Sequence[EvalVerdict], theirs: Sequence[EvalVerdict]) -> EvalComparison:
    """Pairs the verdicts on the same prompts, given in the same order; ungraded prompts are left out."""
    pairs = [(a.ok, b.ok) for a, b in zip(ours, theirs, strict=True) if a.ok is not None and b.ok is not None]
    return EvalComparison(
        prompts=len(pairs),
        both=pairs.count((True, True)),
        only_ours=pairs.count((True, False)),
        only_theirs=pairs.count((False, True)),
    )


def table(report: EvalReport) -> Table:
    """The report as a table for a terminal; `caption` contains the rest."""
    shown = Table(title=report.folder)
    for column in ("set", "kind"):
        shown.add_column(column)
    for column in ("prompts", "right", "%", "target"):
        shown.add_column(column, justify="right")
    for row in report.rows:
        style = {None: "", True: "green", False: "red"}[row.met]
        cells = (row.set, row.kind, str(row.prompts), str(row.right), f"{row.percent:.1f}")
        target = "" if row.target is None else f"{row.target:g}"
        total = row.kind == TOTAL
        shown.add_row(*cells, target, style=f"{style} bold" if total else style, end_section=total)
    return shown


def caption(report: EvalReport) -> str:
    """The facts that the table does not show, in a few lines."""
    rate = report.generated_tokens / max(report.seconds, 1e-9)
    lines = [f"{report.generated_tokens:,} tokens generated in {report.seconds:.0f} s ({rate:,.0f} tokens/s)"]
    if report.left_out:
        lines.append(
            f"at most {report.limit:,} prompts per kind were used (--limit); {report.left_out:,} were left out"
        )
    if report.refused:
        lines.append(
            f"{report.refused} prompts were rejected (longer than the evaluation's context), and count as wrong"
        )
    if report.cut_off:
        lines.append(f"{report.cut_off} answers reached the token limit")
    if report.not_run:
        lines.append(
            f"{report.not_run} prompts ask for a function and were not graded; --run-code runs the model's code"
        )
    if report.comparison is not None:
        pair, (low, high) = report.comparison, report.comparison.interval
        lines.append(
            f"against {report.against}: {pair.prompts} pairs, both right {pair.both}, only this one {pair.only_ours}, "
            f"only the other {pair.only_theirs}: {pair.difference:+.2f} points (95 %: {low:+.2f} to {high:+.2f})"
        )
    return "\n".join(lines)


def _last_words(prompt: EvalPrompt) -> str:
    return next((turn.text for turn in reversed(prompt.messages) if turn.role == "user"), "")
