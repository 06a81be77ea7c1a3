"""Artificial Analysis' protocol: latency and speed of a server for single prompts, as that leaderboard reports them.

    default: 10,000 tokens in and 1,500 out, one prompt at a time, repeated; no prompt is sent twice

| Figure | From |
|---|---|
| TTFT | the request's first byte to the first token; a thinking token counts if the server streams it |
| time to first answer token | the same to the first token that is not thinking: input time and thinking time |
| output speed | tokens/s after the tokens of the first read of the stream |
| end to end for 500 tokens | time to first answer token, and 500 tokens at the output speed |

If a server does not stream its thinking, the speed is measured over the last four fifths of the answer's events. The
figures of a workload are medians over its requests (P50).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from redline.bench.serving.metrics import (
    TextEncoder,
    answer_ttft,
    e2el,
    error_of,
    failure_of,
    input_tokens,
    output_tokens,
    texts,
    thinking,
    ttft,
)
from redline.bench.serving.records import LoadRequest, LoadRun, TimedAnswer
from redline.bench.serving.remarks import uncounted, uncounted_remarks
from redline.bench.serving.saved import BenchResult
from redline.bench.serving.sections import Plot, PlotMark, Section, Series, Table, Words, cell
from redline.bench.serving.target import LoadPace, ServerTarget
from redline.bench.serving.texts import natural
from redline.bench.serving.vocabulary import TextTokenizer
from redline.errors import ConfigError
from redline.messages.base import Record

ANSWER_TOKENS = 500  # length of the answer for the end-to-end time
SHOWN_PART = 0.8  # share of the answer's events that is timed if thinking is hidden
TEMPLATE_TOKENS = 64  # allowance for the tokens that a chat template adds to a prompt


class Workload(Record, frozen=True):
    """The load of one row of the leaderboard. input_len, output_len: tokens. parallel: concurrent prompts."""

    input_len: int
    output_len: int
    parallel: int = 1

    @property
    def name(self) -> str:
        """A name such as 10k/1.5k, or 10k/1.5k x 10."""
        return f"{_short(self.input_len)}/{_short(self.output_len)}" + (
            f" x {self.parallel}" if self.parallel > 1 else ""
        )


LENGTHS = {"100/300": (100, 300), "1k/1k": (1000, 1000), "10k/1.5k": (10_000, 1500), "100k/2k": (100_000, 2000)}
DEFAULT = "10k/1.5k"


def workloads(names: Sequence[str], parallel: Sequence[int]) -> list[Workload]:
    """Presets by name (`LENGTHS`, or `all`), each with every number of concurrent prompts. Raises ConfigError."""
    if unknown := [name for name in names if name not in LENGTHS and name != "all"]:
        raise ConfigError(f"--workload is {unknown[0]!r}; expected {', '.join(LENGTHS)} or all")
    chosen = list(LENGTHS) if "all" in names else list(dict.fromkeys(names))
    return [
        Workload(input_len=LENGTHS[name][0], output_len=LENGTHS[name][1], parallel=many)
        for name in chosen
        for many in parallel
    ]


def check_fits(workload: Workload, max_model_len: int | None) -> None:
    """Raises ConfigError, with a length that would fit, if prompt and answer exceed the server's maximum.

    max_model_len: maximum tokens of prompt and answer from the server's list of models; None: not reported.
    """
    needed = workload.input_len + workload.output_len + TEMPLATE_TOKENS
    if max_model_len is None or needed <= max_model_len:
        return
    room = max_model_len - workload.output_len - TEMPLATE_TOKENS
    fits = f"--input-len {room} would fit" if room > 0 else "reduce --output-len too"
    raise ConfigError(
        f"--input-len {workload.input_len} and --output-len {workload.output_len} need {needed} tokens including "
        f"the chat template, but the server's max_model_len is {max_model_len}: {fits}"
    )


QUESTION = (
    "\n\nAbove are notes that somebody took. Write a long and detailed essay about them in your own words: what they "
    "say, why it is so, what follows from it, and examples."
)


def prompts(
    workload: Workload,
    count: int,
    seed: int,
    vocabulary: TextTokenizer | None,
    *,
    bare: bool = False,
    extra: dict[str, Any] | None = None,
    made: Callable[[int], object] = lambda many: None,
) -> list[LoadRequest]:
    """Prompts of the workload's length: natural text, different in each, followed by a question.

    seed: the same seed gives the same prompts, for comparing servers. vocabulary: None: lengths are approximate. bare:
    plain text instead of messages. extra: fields for each body. made: called with the number of prompts so far. Raises
    ConfigError.
    """
    asked = len(vocabulary.encode(QUESTION)) if vocabulary else len(QUESTION.split())
    question = QUESTION if asked < workload.input_len // 2 else ""
    long = workload.input_len - (asked if question else 0) - (vocabulary.added if vocabulary else 0)
    found: list[LoadRequest] = []
    for place in range(count):
        text = natural(max(1, long), vocabulary, seed * 1_000_003 + place) + question
        found.append(
            LoadRequest(
                max_tokens=workload.output_len,
                text=text if bare else None,
                messages=None if bare else ({"role": "user", "content": text},),
                prompt_tokens=len(vocabulary.encode(text)) if vocabulary else None,
                name=workload.name,
                extra=extra or {},
            )
        )
        made(len(found))
    return found


# --------------------------------------------------------------------------------------------------- one answer


class MeasuredRequest(Record, frozen=True):
    """The figures of one request. Times are in seconds, speeds in tokens/s; None: the request has no such figure.

    Native tokens are the server's own, o200k tokens those of `o200k_base`. end_to_end: time for input, thinking and
    ANSWER_TOKENS at the output speed. whole: time to the last token of the actual answer. uncounted: each event
    was counted as one token.
    """

    workload: str
    run: int
    input_tokens: int
    output_tokens: int
    ttft: float | None = None
    answer_ttft: float | None = None
    thinking: float | None = None
    whole: float | None = None
    speed: float | None = None
    end_to_end: float | None = None
    output_o200k: int | None = None
    speed_o200k: float | None = None
    end_to_end_o200k: float | None = None
    hidden_thinking: bool = False
    uncounted: bool = False
    error: str = ""


def measured(
    answer: TimedAnswer, *, workload: str, run: int, counts: TextEncoder | None = None, o200k: TextEncoder | None = None
) -> MeasuredRequest:
    """An answer's figures. counts: counts native tokens if the server does not. o200k: counts o200k tokens."""
    if failure_of(answer) is not None:
        return MeasuredRequest(
            workload=workload, run=run, input_tokens=input_tokens(answer), output_tokens=0, error=error_of(answer)
        )
    hidden = hides_thinking(answer)
    native = output_tokens(answer, counts).count
    speed = output_speed(answer, native, counts)
    speed_o200k = None if o200k is None else output_speed(answer, _count(o200k, texts(answer)), o200k, said=False)
    begun = answer_ttft(answer)
    return MeasuredRequest(
        workload=workload,
        run=run,
        input_tokens=input_tokens(answer),
        output_tokens=native,
        ttft=ttft(answer),
        answer_ttft=begun,
        thinking=thinking(answer),
        whole=e2el(answer),
        speed=speed,
        end_to_end=_end_to_end(begun, speed),
        output_o200k=None if o200k is None else _count(o200k, texts(answer)),
        speed_o200k=speed_o200k,
        end_to_end_o200k=_end_to_end(begun, speed_o200k),
        hidden_thinking=hidden,
        uncounted=uncounted([answer], counts) > 0,
    )


def hides_thinking(answer: TimedAnswer) -> bool:
    """Whether the server counted thinking tokens but did not stream them."""
    said = None if answer.usage is None else answer.usage.reasoning_tokens
    return bool(said) and not any(chunk.kind == "thinking" for chunk in answer.chunks)


def output_speed(
    answer: TimedAnswer, tokens: int, counts: TextEncoder | None = None, *, said: bool = True
) -> float | None:
    """Tokens/s after the first read; if thinking is hidden, over the last SHOWN_PART of the events.

    tokens: of the whole answer. counts: counts the tokens of the first read. said: whether the events' own counts are
    in the same vocabulary as `tokens`. Returns None if all tokens arrived at once, or if there is only one.
    """
    chunks = answer.chunks
    if hides_thinking(answer):
        assert answer.usage is not None
        if said:
            tokens -= answer.usage.reasoning_tokens or 0
        first = math.ceil(len(chunks) * (1 - SHOWN_PART))
    else:
        first = sum(chunk.at == chunks[0].at for chunk in chunks)
    if not 0 < first < len(chunks):
        return None
    first = sum(chunk.at <= chunks[first - 1].at for chunk in chunks)
    seconds = chunks[-1].at - chunks[first - 1].at
    later = tokens - _tokens_of_first(answer, first, tokens, counts, said=said)
    return later / seconds if seconds > 0 and later > 0 else None


def _tokens_of_first(answer: TimedAnswer, first: int, tokens: int, counts: TextEncoder | None, *, said: bool) -> float:
    """Tokens of the answer's first chunks: as the chunks report, as counted, or by their share of characters."""
    chunks = answer.chunks[:first]
    known = [chunk.tokens for chunk in chunks if chunk.tokens is not None]
    if said and len(known) == first:
        return sum(known)
    thought = sum(chunk.characters for chunk in chunks if chunk.kind == "thinking")
    answered = sum(chunk.characters for chunk in chunks if chunk.kind == "answer")
    if counts is not None and not any(chunk.kind == "tool" for chunk in chunks):
        return _count(counts, [answer.thinking[:thought], answer.text[:answered]])
    share = sum(chunk.characters for chunk in chunks) / max(1, sum(chunk.characters for chunk in answer.chunks))
    return max(1.0, tokens * share)


def _count(counts: TextEncoder, parts: Iterable[str]) -> int:
    return sum(len(counts.encode(part)) for part in parts if part)


def _end_to_end(begun: float | None, speed: float | None) -> float | None:
    return None if begun is None or speed is None else begun + ANSWER_TOKENS / speed


# ---------------------------------------------------------------------------------------------------- one workload

FIGURES = {
    "ttft": "TTFT, s",
    "answer_ttft": "first answer token, s",
    "speed": "output speed, tokens/s",
    "end_to_end": "end to end for 500 tokens, s",
    "speed_o200k": "output speed, o200k tokens/s",
    "end_to_end_o200k": "end to end for 500 o200k tokens, s",
}


class WorkloadOutcome(Record, frozen=True):
    """A workload's requests in the order of sending, and the worst lag of the load generator in seconds."""

    workload: Workload
    rows: tuple[MeasuredRequest, ...]
    lag: float = 0.0
    stopped: bool = False

    def p50(self, name: str) -> float | None:
        """The median of a figure of `MeasuredRequest`; None if there is none.

        A request that was still thinking at its end counts as infinitely late in figures that wait for the answer;
        otherwise the slowest requests would be left out.
        """
        late = name == "answer_ttft" or name.startswith("end_to_end")
        found: list[float] = []
        for row in self.good:
            value: float | None = math.inf if late and row.answer_ttft is None else getattr(row, name)
            if value is not None:
                found.append(value)
        median = float(np.median(found)) if found else math.inf
        return median if math.isfinite(median) else None

    @property
    def good(self) -> list[MeasuredRequest]:
        """The requests that succeeded."""
        return [row for row in self.rows if not row.error]


Load = Callable[[ServerTarget, Sequence[LoadRequest], LoadPace], LoadRun]


def measure(
    workload: Workload,
    asks: Sequence[LoadRequest],
    target: ServerTarget,
    load: Load,
    *,
    counts: TextEncoder | None = None,
    o200k: TextEncoder | None = None,
    seen: Callable[[MeasuredRequest], object] = lambda row: None,
    kept: Callable[[TimedAnswer], object] = lambda answer: None,
) -> WorkloadOutcome:
    """Sends `workload.parallel` prompts at a time, the next ones after all have been answered.

    asks: their number is a multiple of `parallel`. load: runs requests on the server. seen, kept: called with every
    finished request.
    """
    rows, lag, stopped = list[MeasuredRequest](), 0.0, False
    for run, begin in enumerate(range(0, len(asks), workload.parallel)):
        together = asks[begin : begin + workload.parallel]
        done = load(target, together, LoadPace(max_concurrency=workload.parallel))
        lag = max(lag, done.generator.lag_most)
        for answer in done.answers:
            if done.stopped and answer.failure in ("skipped", "deadline"):
                continue
            rows.append(measured(answer, workload=workload.name, run=run, counts=counts, o200k=o200k))
            seen(rows[-1])
            kept(answer)
        if done.stopped:
            stopped = True
            break
    return WorkloadOutcome(workload=workload, rows=tuple(rows), lag=lag, stopped=stopped)


# ------------------------------------------------------------------------------------------------------- report


def differs(
    target: ServerTarget, outcomes: Sequence[WorkloadOutcome], runs: int, *, o200k: bool, tokenizer: bool
) -> list[str]:
    """The differences between this measurement and the leaderboard's, one sentence each.

    o200k, tokenizer: whether these vocabularies were given.
    """
    advice = "--tokenizer with the model's vocabulary gives prompts of that length"
    if tokenizer:
        advice = "the vocabulary of --tokenizer is not the server's, or its chat template adds the rest"
    said = [
        f"This client runs on this machine and measures {target.base_url}; the leaderboard's client runs in a data "
        "centre (us-central1), and every figure includes its network time.",
        f"The median is over {runs} consecutive runs; the leaderboard's is over 72 hours.",
        "Prompts are natural text, but not the leaderboard's prompts, which are not public.",
    ]
    if not o200k:
        said.append(
            "Tokens are the server's own. The leaderboard counts all models in o200k tokens: --o200k FILE with that "
            "vocabulary reports both."
        )
    rows = [row for outcome in outcomes for row in outcome.good]
    said += [words.text for words in uncounted_remarks(sum(row.uncounted for row in rows))]
    if rows and not any(row.thinking is not None for row in rows):
        hidden = any(row.hidden_thinking for row in rows)
        said.append(
            "The server does not stream its thinking: speeds are those of the last four fifths of each answer's events."
            if hidden
            else "The model did not think: with thinking, the same model has later first answer tokens."
        )
    if rows and any(row.answer_ttft is None for row in rows):
        never = sum(row.answer_ttft is None for row in rows)
        said.append(
            f"{never} of {len(rows)} requests were still thinking at their token limit: they have no time to a "
            "first answer token. Increase --output-len, or disable thinking with --extra-body."
        )
    for outcome in outcomes:
        lens = [row.output_tokens for row in outcome.good]
        if lens and np.median(lens) < 0.9 * outcome.workload.output_len:
            said.append(
                f"{outcome.workload.name}: answers ended after {np.median(lens):.0f} tokens, not "
                f"{outcome.workload.output_len}; --ignore-eos makes servers that support it continue."
            )
        ins = [row.input_tokens for row in outcome.good if row.input_tokens]
        if ins and abs(np.median(ins) / outcome.workload.input_len - 1) > 0.1:
            said.append(
                f"{outcome.workload.name}: the server counts {np.median(ins):.0f} prompt tokens, not "
                f"{outcome.workload.input_len}; {advice}."
            )
    return said


def figures(outcomes: Sequence[WorkloadOutcome]) -> dict[str, Any]:
    """Workload -> P50 of every figure, and the number of completed and failed requests."""
    return {
        outcome.workload.name: {
            "completed": len(outcome.good),
            "failed": len(outcome.rows) - len(outcome.good),
            **{f"p50_{name}": outcome.p50(name) for name in FIGURES},
        }
        for outcome in outcomes
    }


def leaderboard_sections(result: BenchResult) -> list[Section]:
    """A page's sections, from the result's details: outcomes, and differences from the leaderboard's setting."""
    outcomes = msgspec.convert(result.details["outcomes"], list[WorkloadOutcome])
    sections: list[Section] = [summary_table(outcomes)]
    for outcome in outcomes:
        if not outcome.rows:
            continue
        sections.append(runs_table(outcome))
        if len(outcome.good) > 1:
            sections.append(_plot(outcome))
    sections.extend(Words(text=text) for text in result.details.get("differs", []))
    return sections


def summary_table(outcomes: Sequence[WorkloadOutcome]) -> Table:
    """P50 of every figure by workload."""
    names = [name for name in FIGURES if "o200k" not in name or any(outcome.p50(name) for outcome in outcomes)]
    rows = [
        (
            outcome.workload.name,
            f"{len(outcome.good)} of {len(outcome.rows)}",
            *(cell(outcome.p50(name)) for name in names),
        )
        for outcome in outcomes
    ]
    return Table(
        title="P50 by workload",
        columns=("tokens in/out", "answered", *(FIGURES[name] for name in names)),
        rows=tuple(rows),
        note="Times count from the request's first byte. A first thinking token counts for TTFT.",
    )


def runs_table(outcome: WorkloadOutcome) -> Table:
    """A workload's requests, one per row."""
    o200k = any(row.speed_o200k is not None for row in outcome.rows)
    names = [name for name in FIGURES if o200k or "o200k" not in name]
    rows = [
        (
            str(row.run + 1),
            f"{row.input_tokens:,}",
            f"{row.output_tokens:,}",
            *(cell(getattr(row, name)) for name in names),
            cell(row.thinking),
            row.error,
        )
        for row in outcome.rows
    ]
    failed = any(row.error for row in outcome.rows)
    columns = ("run", "in", "out", *(FIGURES[name] for name in names), "thinking, s", "error")
    keep = len(columns) - (not failed)
    return Table(
        title=f"{outcome.workload.name}, run by run", columns=columns[:keep], rows=tuple(row[:keep] for row in rows)
    )


def _plot(outcome: WorkloadOutcome) -> Plot:
    rows = [row for row in outcome.good if row.speed is not None]
    marks = [] if (p50 := outcome.p50("speed")) is None else [PlotMark(text="P50", y=p50)]
    series = [Series(name="native tokens", x=_order(rows), y=tuple(row.speed or 0.0 for row in rows), style="points")]
    if any(row.speed_o200k is not None for row in rows):
        speeds = tuple(row.speed_o200k or 0.0 for row in rows)
        series.append(Series(name="o200k tokens", x=_order(rows), y=speeds, style="points"))
    return Plot(
        title=f"Output speed, {outcome.workload.name}",
        x_label="request",
        y_label="tokens/s",
        series=tuple(series),
        marks=tuple(marks),
    )


def _order(rows: Sequence[MeasuredRequest]) -> tuple[float, ...]:
    return tuple(float(at) for at in range(1, len(rows) + 1))


def _short(tokens: int) -> str:
    return f"{tokens / 1000:g}k" if tokens >= 1000 and tokens % 100 == 0 else str(tokens)
