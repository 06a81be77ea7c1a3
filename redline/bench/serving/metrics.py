"""The figures of a load, computed from its answers: latencies, throughput, goodput.

Names and definitions are those of `vllm bench serve`, so that a number means the same in both. Our own figures have
other names. Functions of one answer return seconds, or None if the answer has no such time; a failed answer has none.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np

from redline.bench.serving.records import LoadRun, StreamChunk, TimedAnswer
from redline.messages.base import Record

PERCENTILES = (50.0, 90.0, 99.0)
Source = Literal["usage", "chunks", "vocabulary", "chunk count"]


class TextEncoder(Protocol):
    """Encodes text as the model does, such as a `Vocabulary`."""

    def encode(self, text: str) -> Sequence[int]:
        """The ids of a text, without control tokens."""
        ...


class Tokens(Record, frozen=True):
    """The number of tokens of an answer, and its source.

    usage: the server's count. chunks: the sum over its events. vocabulary: its text, encoded by the client. chunk
    count: one per event, which is too low if events contain several tokens.
    """

    count: int
    source: Source


# ----------------------------------------------------------------------------------------------------- one answer


UNFINISHED = ("skipped", "deadline")  # ended by the client with the run: not failures of the server


def failure_of(answer: TimedAnswer) -> str | None:
    """Why an answer failed: its failure, or `empty` if it ended without any token. None: it succeeded."""
    return answer.failure or (None if answer.chunks and answer.sent is not None else "empty")


def ttft(answer: TimedAnswer) -> float | None:
    """From the request's first byte to the first token, thinking or not."""
    return _since(answer.sent, answer, answer.chunks)


def answer_ttft(answer: TimedAnswer) -> float | None:
    """From the request's first byte to the first token that is not thinking: of the answer or of a tool call.

    None if thinking took all tokens: an empty event after it, such as the one with finish_reason, does not count.
    """
    return _since(answer.sent, answer, [chunk for chunk in answer.chunks if _answers(chunk)])


def thinking(answer: TimedAnswer) -> float | None:
    """From the first thinking token to the first other token, or to the end; None without thinking."""
    first = next((chunk.at for chunk in answer.chunks if chunk.kind == "thinking"), None)
    if failure_of(answer) is not None or first is None:
        return None
    after = (chunk.at for chunk in answer.chunks if _answers(chunk))
    return next(after, answer.chunks[-1].at) - first


def _answers(chunk: StreamChunk) -> bool:
    return chunk.kind != "thinking" and chunk.characters > 0


def e2el(answer: TimedAnswer) -> float | None:
    """From the request's first byte to the last token; the end of the stream after it is not counted."""
    return _since(answer.sent, answer, answer.chunks[-1:])


def tpot(answer: TimedAnswer, counts: TextEncoder | None = None) -> float | None:
    """Seconds per output token after the first: (e2el - ttft) / (tokens - 1); None for an answer of one token."""
    first, last = ttft(answer), e2el(answer)
    tokens = output_tokens(answer, counts).count
    return None if first is None or last is None or tokens < 2 else (last - first) / (tokens - 1)


def itls(answer: TimedAnswer) -> list[float]:
    """The gaps between chunks. They equal gaps between tokens only if each chunk has one token."""
    if failure_of(answer) is not None:
        return []
    times = [chunk.at for chunk in answer.chunks]
    return [after - before for before, after in pairwise(times)]


def ttft_from_schedule(answer: TimedAnswer) -> float | None:
    """From the request's scheduled time to the first token, including a wait for max_concurrency."""
    return _since(answer.planned, answer, answer.chunks)


def e2el_from_schedule(answer: TimedAnswer) -> float | None:
    """From the request's scheduled time to the last token, including a wait for max_concurrency."""
    return _since(answer.planned, answer, answer.chunks[-1:])


def queue_time(answer: TimedAnswer) -> float | None:
    """Seconds from the planned time to sending: the delay by max_concurrency, or by this client."""
    return None if answer.sent is None or failure_of(answer) is not None else max(0.0, answer.sent - answer.planned)


def output_tokens(answer: TimedAnswer, counts: TextEncoder | None = None) -> Tokens:
    """Tokens of an answer, including thinking and tool calls, from the best available source.

    counts: counts tokens if the server does not report them.
    """
    if answer.usage is not None and answer.usage.completion_tokens is not None:
        return Tokens(count=answer.usage.completion_tokens, source="usage")
    said = [chunk.tokens for chunk in answer.chunks if chunk.tokens is not None]
    if said and len(said) == len(answer.chunks):
        return Tokens(count=sum(said), source="chunks")
    if counts is not None:
        return Tokens(count=sum(len(counts.encode(part)) for part in texts(answer)), source="vocabulary")
    return Tokens(count=len(answer.chunks), source="chunk count")


def input_tokens(answer: TimedAnswer) -> int:
    """Tokens of the prompt: the server's count, else the count from the request's creation, else 0."""
    said = None if answer.usage is None else answer.usage.prompt_tokens
    return said if said is not None else answer.ask.prompt_tokens or 0


def texts(answer: TimedAnswer) -> list[str]:
    """All generated text, in parts: thinking, answer, names and arguments of tool calls."""
    calls = [str(call.get(part) or "") for call in answer.calls for part in ("name", "arguments")]
    return [part for part in (answer.thinking, answer.text, *calls) if part]


def _since(start: float | None, answer: TimedAnswer, chunks: Sequence[StreamChunk]) -> float | None:
    return None if start is None or not chunks or failure_of(answer) is not None else chunks[0].at - start


# ------------------------------------------------------------------------------------------------------ many answers

# Names as in the keys. e2el_including_client_queue is vLLM's name for our e2el_from_schedule.
MEASURES: dict[str, Callable[[TimedAnswer], float | None]] = {
    "ttft": ttft,
    "tpot": tpot,
    "e2el": e2el,
    "client_queue_time": queue_time,
    "e2el_including_client_queue": e2el_from_schedule,
    "answer_ttft": answer_ttft,
    "thinking": thinking,
    "ttft_from_schedule": ttft_from_schedule,
    "e2el_from_schedule": e2el_from_schedule,
}
NAMES = (*MEASURES, "itl")
SLOS = ("ttft", "tpot", "e2el", "answer_ttft")


def values(answers: Iterable[TimedAnswer], name: str, counts: TextEncoder | None = None) -> list[float]:
    """The measure `name` (of NAMES) in seconds, of every answer that has it; itl: the gaps of all answers."""
    if name == "itl":
        return [gap for answer in answers for gap in itls(answer)]
    measure = MEASURES[name]
    found = (tpot(answer, counts) if name == "tpot" else measure(answer) for answer in answers)
    return [value for value in found if value is not None]


def percentile(seconds: Iterable[float | None], p: float) -> float | None:
    """Interpolated linearly, over the values that are known; None if there is none."""
    known = [value for value in seconds if value is not None]
    return float(np.percentile(known, p)) if known else None


def statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float] = PERCENTILES) -> dict[str, Any]:
    """mean, median, std and percentiles under vLLM's names, such as `p99_ttft_ms`. All are None without values.

    Percentiles are interpolated linearly, as in numpy; std is that of the population.
    """
    ms = np.asarray(seconds, dtype=np.float64) * 1000
    keys = [f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", *(f"p{p:g}_{name}_ms" for p in percentiles)]
    if not len(ms):
        return dict.fromkeys(keys)
    found = [ms.mean(), np.median(ms), ms.std(), *(np.percentile(ms, p) for p in percentiles)]
    return {key: float(value) for key, value in zip(keys, found, strict=True)}


def figures(
    run: LoadRun,
    *,
    percentiles: Sequence[float] = PERCENTILES,
    names: Sequence[str] = ("ttft", "tpot", "itl", "e2el"),
    goodput: Mapping[str, float] | None = None,
    counts: TextEncoder | None = None,
) -> dict[str, Any]:
    """The figures under vLLM's keys, including the per-request lists (LISTS); times per request are in seconds.

    names: latencies of NAMES for which statistics are computed. goodput: SLO targets in milliseconds by a name of SLOS;
    a good request meets all. counts: counts tokens if a server does not report them.

    In addition to vLLM's keys: `failures`, the number by kind, including UNFINISHED, which `failed` leaves out;
    `output_tokens_sources`, the number of answers by source of their token count; `total_thinking_tokens` and
    `total_cached_tokens`, if the server reports them.
    """
    answers, seconds = run.answers, max(run.seconds, 1e-9)
    good = [answer for answer in answers if failure_of(answer) is None]
    failures = dict(Counter(filter(None, map(failure_of, answers))))
    tokens = {answer.index: output_tokens(answer, counts) for answer in good}
    total_in, total_out = sum(map(input_tokens, good)), sum(one.count for one in tokens.values())
    kept = None if not goodput else sum(keeps(answer, goodput, counts) for answer in good)
    found: dict[str, Any] = {
        "duration": run.seconds,
        "completed": len(good),
        "failed": sum(many for kind, many in failures.items() if kind not in UNFINISHED),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(good) / seconds,
        "request_goodput": None if kept is None else kept / seconds,
        "output_throughput": total_out / seconds,
        "total_token_throughput": (total_in + total_out) / seconds,
        "input_lens": [input_tokens(answer) for answer in answers],
        "output_lens": [tokens[answer.index].count if answer.index in tokens else 0 for answer in answers],
        "ttfts": [ttft(answer) or 0.0 for answer in answers],
        "itls": [itls(answer) for answer in answers],
        "latencies": [e2el(answer) or 0.0 for answer in answers],
        "start_times": [answer.planned if answer.sent is None else answer.sent for answer in answers],
        "queue_times": [queue_time(answer) or 0.0 for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [error_of(answer) for answer in answers],
        "max_output_tokens_per_s": max(tokens_by_second(good, counts), default=0.0),
        "max_concurrent_requests": max((level for _, level in concurrency(answers)), default=0),
        "failures": failures,
        "output_tokens_sources": dict(Counter(one.source for one in tokens.values())),
    }
    for key, field in (("total_thinking_tokens", "reasoning_tokens"), ("total_cached_tokens", "cached_tokens")):
        said = [getattr(answer.usage, field, None) for answer in good]
        if any(value is not None for value in said):
            found[key] = sum(value or 0 for value in said)
    for name in names:
        found |= statistics(name, values(good, name, counts), percentiles)
    return found


# The per-request lists, which vLLM saves only with --save-detailed.
LISTS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")


def error_of(answer: TimedAnswer) -> str:
    """One line on why an answer failed; empty if it succeeded."""
    kind = failure_of(answer)
    return "" if kind is None else answer.error or ("the answer ended without any token" if kind == "empty" else kind)


def spread(answer: TimedAnswer, counts: TextEncoder | None = None) -> list[tuple[float, float]]:
    """(time, tokens) of each chunk. If events do not report tokens, each gets the same share of the total."""
    said = [chunk.tokens for chunk in answer.chunks if chunk.tokens is not None]
    if said and len(said) == len(answer.chunks):
        return [(chunk.at, float(tokens)) for chunk, tokens in zip(answer.chunks, said, strict=True)]
    share = output_tokens(answer, counts).count / max(1, len(answer.chunks))
    return [(chunk.at, share) for chunk in answer.chunks]


def tokens_by_second(answers: Sequence[TimedAnswer], counts: TextEncoder | None = None) -> list[float]:
    """Output tokens in each second since the first request was sent."""
    began = min((answer.sent for answer in answers if answer.sent is not None), default=0.0)
    seconds: list[float] = []
    for answer in answers:
        for at, tokens in spread(answer, counts):
            second = int(at - began)
            seconds += [0.0] * (second + 1 - len(seconds))
            seconds[second] += tokens
    return seconds


def concurrency(answers: Iterable[TimedAnswer]) -> list[tuple[float, int]]:
    """Running requests over time, as (time, number from then on), failed ones included. Ends sort before starts."""
    changes: list[tuple[float, int]] = []
    for answer in answers:
        if answer.sent is not None:
            last = answer.end if failure_of(answer) is not None else answer.chunks[-1].at
            changes += [(answer.sent, 1), (max(last, answer.sent), -1)]
    level, levels = 0, list[tuple[float, int]]()
    for at, change in sorted(changes):
        level += change
        levels.append((at, level))
    return levels


def keeps(answer: TimedAnswer, goodput: Mapping[str, float], counts: TextEncoder | None = None) -> bool:
    """Whether an answer meets every SLO target, in milliseconds by a name of SLOS. A failed answer meets none."""

    if failure_of(answer) is not None:
        return False

    def value(name: str) -> float | None:
        return tpot(answer, counts) or 0.0 if name == "tpot" else MEASURES[name](answer)

    found = [(value(name), bound) for name, bound in goodput.items()]
    return all(seconds is not None and seconds * 1000 <= bound for seconds, bound in found)
