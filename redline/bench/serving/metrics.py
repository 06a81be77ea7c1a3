"""The figures of a load, from the facts of its answers: latencies, throughput, goodput.

Names and definitions are those of `vllm bench serve`, so that one number means one thing. What is ours beside them says
so in its name. All functions of one answer give seconds, or None where the answer has no such time; a failed answer has
none at all.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np

from redline.bench.serving.records import Answer, Chunk, Run
from redline.wire.base import Record

PERCENTILES = (50.0, 90.0, 99.0)
Source = Literal["usage", "chunks", "vocabulary", "chunk count"]


class Counts(Protocol):
    """Whoever encodes text as the model does, such as a `Vocabulary`."""

    def encode(self, text: str) -> Sequence[int]:
        """The ids of a text, without control tokens."""
        ...


class Tokens(Record, frozen=True):
    """How many tokens an answer has, and who says so.

    usage: the server's count. chunks: the sum of what its events say. vocabulary: its text encoded anew. chunk count:
    one for each event, which is too few where events carry several.
    """

    count: int
    source: Source


# ----------------------------------------------------------------------------------------------------- of one answer


UNFINISHED = ("skipped", "deadline")  # by us, who ended the run: the server is not to blame


def failure_of(answer: Answer) -> str | None:
    """Why an answer has failed: its failure, or `empty` where it ended well and nothing came. None: it has not."""
    return answer.failure or (None if answer.chunks and answer.sent is not None else "empty")


def ttft(answer: Answer) -> float | None:
    """From the request's first byte to the first token, thinking or not."""
    return _since(answer.sent, answer, answer.chunks)


def answer_ttft(answer: Answer) -> float | None:
    """From the request's first byte to the first token that is not thinking: of the answer or of a tool call.

    None where thinking took all tokens: an empty event behind it, as with the finish_reason, is no answer.
    """
    return _since(answer.sent, answer, [chunk for chunk in answer.chunks if _answers(chunk)])


def thinking(answer: Answer) -> float | None:
    """From the first token of thinking to the first that is none, or to the end; None where nothing was thought."""
    first = next((chunk.at for chunk in answer.chunks if chunk.kind == "thinking"), None)
    if failure_of(answer) is not None or first is None:
        return None
    after = (chunk.at for chunk in answer.chunks if _answers(chunk))
    return next(after, answer.chunks[-1].at) - first


def _answers(chunk: Chunk) -> bool:
    return chunk.kind != "thinking" and chunk.characters > 0


def e2el(answer: Answer) -> float | None:
    """From the request's first byte to the last token; what ends the stream after it is not counted."""
    return _since(answer.sent, answer, answer.chunks[-1:])


def tpot(answer: Answer, counts: Counts | None = None) -> float | None:
    """Seconds per output token after the first: (e2el - ttft) / (tokens - 1); None for an answer of one token."""
    first, last = ttft(answer), e2el(answer)
    tokens = output_tokens(answer, counts).count
    return None if first is None or last is None or tokens < 2 else (last - first) / (tokens - 1)


def itls(answer: Answer) -> list[float]:
    """The gaps between chunks. They are gaps between tokens only where each chunk carries one."""
    if failure_of(answer) is not None:
        return []
    times = [chunk.at for chunk in answer.chunks]
    return [after - before for before, after in pairwise(times)]


def ttft_from_schedule(answer: Answer) -> float | None:
    """From when the schedule wanted the request sent to the first token. A wait for a free place is part of it."""
    return _since(answer.planned, answer, answer.chunks)


def e2el_from_schedule(answer: Answer) -> float | None:
    """From when the schedule wanted the request sent to the last token. A wait for a free place is part of it."""
    return _since(answer.planned, answer, answer.chunks[-1:])


def queue_time(answer: Answer) -> float | None:
    """How long after its planned time the request was sent: what the limit of concurrency, or this client, cost."""
    return None if answer.sent is None or failure_of(answer) is not None else max(0.0, answer.sent - answer.planned)


def output_tokens(answer: Answer, counts: Counts | None = None) -> Tokens:
    """Tokens of an answer, thinking and tool calls among them, from the best source that there is.

    counts: who counts text, where the server says nothing.
    """
    if answer.usage is not None and answer.usage.completion_tokens is not None:
        return Tokens(count=answer.usage.completion_tokens, source="usage")
    said = [chunk.tokens for chunk in answer.chunks if chunk.tokens is not None]
    if said and len(said) == len(answer.chunks):
        return Tokens(count=sum(said), source="chunks")
    if counts is not None:
        return Tokens(count=sum(len(counts.encode(part)) for part in texts(answer)), source="vocabulary")
    return Tokens(count=len(answer.chunks), source="chunk count")


def input_tokens(answer: Answer) -> int:
    """Tokens of the prompt: as the server counts them, else as whoever made the request did, else 0."""
    said = None if answer.usage is None else answer.usage.prompt_tokens
    return said if said is not None else answer.ask.prompt_tokens or 0


def texts(answer: Answer) -> list[str]:
    """All that the model wrote, in parts: thinking, answer, arguments and names of calls."""
    calls = [str(call.get(part) or "") for call in answer.calls for part in ("name", "arguments")]
    return [part for part in (answer.thinking, answer.text, *calls) if part]


def _since(start: float | None, answer: Answer, chunks: Sequence[Chunk]) -> float | None:
    return None if start is None or not chunks or failure_of(answer) is not None else chunks[0].at - start


# ------------------------------------------------------------------------------------------------------ of many answers

# Names as the keys have them. vLLM knows the first seven; the eighth is its name for our e2el_from_schedule.
MEASURES: dict[str, Callable[[Answer], float | None]] = {
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


def values(answers: Iterable[Answer], name: str, counts: Counts | None = None) -> list[float]:
    """A measure of every answer that has it, seconds. name: of NAMES; itl gives the gaps of all answers."""
    if name == "itl":
        return [gap for answer in answers for gap in itls(answer)]
    measure = MEASURES[name]
    found = (tpot(answer, counts) if name == "tpot" else measure(answer) for answer in answers)
    return [value for value in found if value is not None]


def statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float] = PERCENTILES) -> dict[str, Any]:
    """mean, median, std and percentiles as vLLM names them: `p99_ttft_ms`. None, all of them, of no values.

    Percentiles are linear between two values, as numpy has them; std is that of the population.
    """
    ms = np.asarray(seconds, dtype=np.float64) * 1000
    keys = [f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", *(f"p{p:g}_{name}_ms" for p in percentiles)]
    if not len(ms):
        return dict.fromkeys(keys)
    found = [ms.mean(), np.median(ms), ms.std(), *(np.percentile(ms, p) for p in percentiles)]
    return {key: float(value) for key, value in zip(keys, found, strict=True)}


def figures(
    run: Run,
    *,
    percentiles: Sequence[float] = PERCENTILES,
    names: Sequence[str] = ("ttft", "tpot", "itl", "e2el"),
    goodput: Mapping[str, float] | None = None,
    counts: Counts | None = None,
) -> dict[str, Any]:
    """What was measured, under vLLM's keys, the lists per request among them (LISTS); times per request are seconds.

    names: of NAMES, which get statistics. goodput: milliseconds by a name of SLOS, all of which a good request keeps.
    counts: who counts text, where a server says nothing.

    Beside vLLM's keys: `failures`, how many by kind, those of UNFINISHED too, which `failed` leaves out;
    `output_tokens_sources`, how many answers were counted by whom; `total_thinking_tokens` and `total_cached_tokens`,
    where the server says so.
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


# The lists per request, which vLLM leaves out of a file unless --save-detailed is given.
LISTS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")


def error_of(answer: Answer) -> str:
    """One line on why an answer failed; empty where it has not."""
    kind = failure_of(answer)
    return (
        "" if kind is None else answer.error or ("the answer ended, and nothing had come" if kind == "empty" else kind)
    )


def spread(answer: Answer, counts: Counts | None = None) -> list[tuple[float, float]]:
    """When its tokens came: (time, tokens) of each chunk. Where events do not say, each has the same share of all."""
    said = [chunk.tokens for chunk in answer.chunks if chunk.tokens is not None]
    if said and len(said) == len(answer.chunks):
        return [(chunk.at, float(tokens)) for chunk, tokens in zip(answer.chunks, said, strict=True)]
    share = output_tokens(answer, counts).count / max(1, len(answer.chunks))
    return [(chunk.at, share) for chunk in answer.chunks]


def tokens_by_second(answers: Sequence[Answer], counts: Counts | None = None) -> list[float]:
    """Output tokens in each second since the first request was sent."""
    began = min((answer.sent for answer in answers if answer.sent is not None), default=0.0)
    seconds: list[float] = []
    for answer in answers:
        for at, tokens in spread(answer, counts):
            second = int(at - began)
            seconds += [0.0] * (second + 1 - len(seconds))
            seconds[second] += tokens
    return seconds


def concurrency(answers: Iterable[Answer]) -> list[tuple[float, int]]:
    """How many requests ran, as (time, from then on), those among them that failed. One that ends makes room first."""
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


def keeps(answer: Answer, goodput: Mapping[str, float], counts: Counts | None = None) -> bool:
    """Whether an answer keeps every SLO, milliseconds by a name of SLOS. One that failed keeps none."""

    if failure_of(answer) is not None:
        return False

    def value(name: str) -> float | None:
        return tpot(answer, counts) or 0.0 if name == "tpot" else MEASURES[name](answer)

    found = [(value(name), bound) for name, bound in goodput.items()]
    return all(seconds is not None and seconds * 1000 <= bound for seconds, bound in found)
