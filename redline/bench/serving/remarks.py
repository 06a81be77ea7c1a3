"""What a reader of figures must know beside them: whether this client was the limit, what the latencies leave out."""

import math
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np

from redline.bench.serving.metrics import Counts, e2el, failure_of, itls, output_tokens, queue_time, values
from redline.bench.serving.records import Answer, GeneratorLoad
from redline.bench.serving.saved import Result
from redline.bench.serving.sections import Words
from redline.bench.serving.target import Pace

# From where on the load generator counts as the limit of what it measures.
MOST_CPU, MOST_LAG_S, MOST_LATE = 0.9, 0.005, 0.01


def remarks(result: Result) -> list[Words]:
    """Sentences about a load; those that put its figures in doubt are warnings."""
    good = [answer for answer in result.answers if failure_of(answer) is None]
    found = [Words(text=note) for note in result.notes]
    if result.stopped:
        asked = sum(answer.failure != "skipped" for answer in result.answers)
        cut = sum(answer.failure == "deadline" for answer in result.answers)
        text = (
            f"The run was ended early: {asked:,} of {len(result.answers):,} requests were asked, and {cut:,} of them "
            "were cut off. What these had brought is in no figure, so throughput is a little too low."
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


def generator_remark(generator: GeneratorLoad, answers: Sequence[Answer]) -> Words:
    """Whether the load generator itself was the limit, with what it was busy with."""
    gaps = [gap for gap in values(answers, "itl") if gap > 0]
    share = f", {generator.lag_p50 / median(gaps):.1%} of the median ITL" if gaps else ""
    facts = (
        f"{generator.cpu_share:.0%} of a core, late by {_ms(generator.lag_p50)} at the median{share}, "
        f"{_ms(generator.lag_p99)} at p99, {_ms(generator.lag_most)} at worst; "
        f"{generator.late_sends:,} requests were sent late"
    )
    reasons = [
        reason
        for reason, holds in (
            ("it had no processor time left", generator.cpu_share >= MOST_CPU),
            ("it woke late", generator.lag_p99 > MOST_LAG_S),
            ("it sent late", generator.late_sends > MOST_LATE * max(1, len(answers))),
        )
        if holds
    ]
    if not reasons and generator.lag_most == 0.0:
        text = f"Nothing was timed that would tell whether the load generator was the limit: {facts}. Ask for more."
        return Words(text=text)
    if not reasons:
        return Words(text=f"The load generator was not the limit: {facts}.")
    text = f"The load generator was itself a limit ({', '.join(reasons)}), so the server may be faster: {facts}."
    return Words(text=text, warning=True)


def schedule_remark(pace: Pace, good: Sequence[Answer]) -> Words:
    """What latencies from the moment of sending leave out: coordinated omission."""
    if not scheduled(pace):
        many = "without a limit" if pace.max_concurrency is None else f"{pace.max_concurrency} at once"
        text = (
            f"Requests had no schedule ({many}): each was sent as soon as a place was free, so a slow server is asked "
            "less often. Latencies are those at this concurrency, not at an arrival rate; --request-rate measures that."
        )
        return Words(text=text)
    waits = [wait for answer in good if (wait := queue_time(answer)) is not None]
    worst, latency = float(np.percentile(waits, 99)), float(np.percentile([e2el(answer) or 0.0 for answer in good], 99))
    if worst <= max(0.001, latency / 100):
        text = f"Requests were sent when they were planned (p99 {_ms(worst)} late): latencies leave nothing out."
        return Words(text=text)
    text = (
        f"Requests waited for a free place before they were sent (median {_ms(median(waits))}, p99 {_ms(worst)}): "
        "latencies from sending leave that out (coordinated omission), those from the schedule have it."
    )
    return Words(text=text, warning=True)


def scheduled(pace: Pace) -> bool:
    """Whether planned times mean something: requests have a rate, and are not sent as places become free."""
    return pace.ramp is not None or math.isfinite(pace.rate)


def uncounted(answers: Iterable[Answer], counts: Counts | None = None) -> int:
    """How many answers have no count of tokens: neither the server's, nor that of a vocabulary."""
    good = (answer for answer in answers if failure_of(answer) is None)
    return sum(output_tokens(answer, counts).source == "chunk count" for answer in good)


def uncounted_remarks(many: int, whose: str = "") -> list[Words]:
    """A warning about so many answers without a count of tokens; none of none. whose: words behind `answers`."""
    text = (
        f"{many:,} answers{whose} have no count of tokens: each event was counted as one token, which is too few where "
        "events carry several. --tokenizer FOLDER counts their text."
    )
    return [Words(text=text, warning=True)] if many else []


def _chunk_remarks(good: Sequence[Answer]) -> list[Words]:
    found: list[Words] = []
    chunks = sum(len(answer.chunks) for answer in good)
    tokens = [output_tokens(answer) for answer in good]
    ratio = sum(one.count for one in tokens) / max(1, chunks)
    if ratio > 1.05:
        text = f"An event carries {ratio:.2f} tokens on average: ITL is the gap between events, TPOT is per token."
        found.append(Words(text=text))
    gaps = [gap for answer in good for gap in itls(answer)]
    together = sum(gap == 0 for gap in gaps)
    if together > len(gaps) / 5:
        text = (
            f"{together / len(gaps):.0%} of events came in one read with the event before: the server, or something "
            "between, sends several at a time, or this client was held up. So ITL has many zeros and few long gaps."
        )
        found.append(Words(text=text))
    return found


def _eos_remarks(good: Sequence[Answer], ignore_eos: bool) -> list[Words]:
    short = [answer for answer in good if output_tokens(answer).count < answer.ask.max_tokens]
    if not ignore_eos or not short:
        return []
    text = (
        f"{len(short):,} of {len(good):,} answers ended before the tokens asked for, though ignore_eos was sent: the "
        "server does not know it, or ended for another reason. Lengths differ from what was asked."
    )
    return [Words(text=text, warning=True)]


def _ms(seconds: float) -> str:
    ms = seconds * 1000
    return f"{ms:.2f} ms" if ms < 10 else f"{ms:,.0f} ms"
