"""Remarks on the figures: whether the load generator was the limit, and the waits that latencies leave out."""

import math
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np

from redline.bench.serving.metrics import TextEncoder, e2el, failure_of, itls, output_tokens, queue_time, values
from redline.bench.serving.records import GeneratorLoad, TimedAnswer
from redline.bench.serving.saved import BenchResult
from redline.bench.serving.sections import Words
from redline.bench.serving.target import LoadPace

# Thresholds from which the load generator counts as a limit: share of a core, seconds, share of requests.
MOST_CPU, MOST_LAG_S, MOST_LATE = 0.9, 0.005, 0.01


def remarks(result: BenchResult) -> list[Words]:
    """Remarks on a load; those that make its figures doubtful are warnings."""
    good = [answer for answer in result.answers if failure_of(answer) is None]
    found = [Words(text=note) for note in result.notes]
    if result.stopped:
        asked = sum(answer.failure != "skipped" for answer in result.answers)
        cut = sum(answer.failure == "deadline" for answer in result.answers)
        text = (
            f"The run ended early: {asked:,} of {len(result.answers):,} requests were sent, and {cut:,} of them were "
            "cut off. Their tokens are not counted, so throughput is a little too low."
        )
        found.append(Words(text=text, warning=True))
    if result.generator is not None and good:
        found.append(generator_remark(result.generator, result.answers))
    if result.pace is not None and good:
        found.append(schedule_remark(result.pace, good))
    sources: dict[str, int] = result.figures.get("output_tokens_sources", {})
    unsure = sources.get("chunk count", 0) if sources else uncounted(good)
    found += (
        uncounted_remarks(unsure) + _chunk_remarks(good) + _eos_remarks(good, bool(result.dataset.get("ignore_eos")))
    )
    return found


def generator_remark(generator: GeneratorLoad, answers: Sequence[TimedAnswer]) -> Words:
    """Whether the load generator was the limit, with its CPU share and lag."""
    gaps = [gap for gap in values(answers, "itl") if gap > 0]
    share = f", {generator.lag_p50 / median(gaps):.1%} of the median ITL" if gaps else ""
    facts = (
        f"{generator.cpu_share:.0%} of a core, timer lag {_ms(generator.lag_p50)} at the median{share}, "
        f"{_ms(generator.lag_p99)} at p99, {_ms(generator.lag_most)} at worst; "
        f"{generator.late_sends:,} requests were sent late"
    )
    reasons = [
        reason
        for reason, holds in (
            ("it used a whole core", generator.cpu_share >= MOST_CPU),
            ("its timers were late", generator.lag_p99 > MOST_LAG_S),
            ("it sent requests late", generator.late_sends > MOST_LATE * max(1, len(answers))),
        )
        if holds
    ]
    if not reasons and generator.lag_most == 0.0:
        text = (
            f"The run was too short to measure whether the load generator was the limit: {facts}. Send more requests."
        )
        return Words(text=text)
    if not reasons:
        return Words(text=f"The load generator was not the limit: {facts}.")
    text = f"The load generator was a limit ({', '.join(reasons)}), so the server may be faster: {facts}."
    return Words(text=text, warning=True)


def schedule_remark(pace: LoadPace, good: Sequence[TimedAnswer]) -> Words:
    """What latencies from the time of sending leave out: coordinated omission."""
    if not scheduled(pace):
        many = "no limit" if pace.max_concurrency is None else f"at most {pace.max_concurrency} concurrent"
        text = (
            f"Requests had no schedule ({many}): each was sent as soon as concurrency allowed, so a slow server gets "
            "fewer requests. Latencies hold for this concurrency, not for an arrival rate; see --request-rate."
        )
        return Words(text=text)
    waits = [wait for answer in good if (wait := queue_time(answer)) is not None]
    worst, latency = float(np.percentile(waits, 99)), float(np.percentile([e2el(answer) or 0.0 for answer in good], 99))
    if worst <= max(0.001, latency / 100):
        text = f"Requests were sent on schedule (p99 {_ms(worst)} late): latencies include all waiting."
        return Words(text=text)
    text = (
        f"Requests waited for max_concurrency before they were sent (median {_ms(median(waits))}, p99 {_ms(worst)}): "
        "latencies from sending exclude this wait (coordinated omission), those from the schedule include it."
    )
    return Words(text=text, warning=True)


def scheduled(pace: LoadPace) -> bool:
    """Whether requests have scheduled times: a rate or a ramp, instead of a concurrency limit alone."""
    return pace.ramp is not None or math.isfinite(pace.rate)


def uncounted(answers: Iterable[TimedAnswer], counts: TextEncoder | None = None) -> int:
    """Number of answers without a token count, neither by the server nor by a vocabulary."""
    good = (answer for answer in answers if failure_of(answer) is None)
    return sum(output_tokens(answer, counts).source == "chunk count" for answer in good)


def uncounted_remarks(many: int, whose: str = "") -> list[Words]:
    """A warning about `many` answers without a token count; none if it is 0. whose: inserted after "answers"."""
    text = (
        f"{many:,} answers{whose} have no token count: each event was counted as one token, which is too low if events "
        "contain several. --tokenizer FOLDER counts the tokens of the text."
    )
    return [Words(text=text, warning=True)] if many else []


def _chunk_remarks(good: Sequence[TimedAnswer]) -> list[Words]:
    found: list[Words] = []
    chunks = sum(len(answer.chunks) for answer in good)
    tokens = [output_tokens(answer) for answer in good]
    ratio = sum(one.count for one in tokens) / max(1, chunks)
    if ratio > 1.05:
        text = f"An event contains {ratio:.2f} tokens on average: ITL is the gap between events, TPOT is per token."
        found.append(Words(text=text))
    gaps = [gap for answer in good for gap in itls(answer)]
    together = sum(gap == 0 for gap in gaps)
    if together > len(gaps) / 5:
        text = (
            f"{together / len(gaps):.0%} of events arrived in the same read as the previous one: the server or a proxy "
            "sends several at a time, or this client was delayed. ITL therefore has many zeros and few long gaps."
        )
        found.append(Words(text=text))
    return found


def _eos_remarks(good: Sequence[TimedAnswer], ignore_eos: bool) -> list[Words]:
    short = [answer for answer in good if output_tokens(answer).count < answer.ask.max_tokens]
    if not ignore_eos or not short:
        return []
    text = (
        f"{len(short):,} of {len(good):,} answers ended before max_tokens although ignore_eos was sent: the server "
        "does not support it, or stopped for another reason. Lengths differ from the requested ones."
    )
    return [Words(text=text, warning=True)]


def _ms(seconds: float) -> str:
    ms = seconds * 1000
    return f"{ms:.2f} ms" if ms < 10 else f"{ms:,.0f} ms"
