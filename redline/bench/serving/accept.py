"""Acceptance of draft tokens on a server, by position and by domain, compared with the golden curve.

A server with speculative decoding reports its counters in `/metrics`, under vLLM's names, which Redline uses too. The
counters are read before and after each part of the load, once they no longer change; the difference belongs to that
part. Rates are unconditional: the share of rounds in which the first 1, 2 ... drafts were all accepted. So one server
with k drafts per round also shows the result of 1 to k - 1 drafts: 1 plus the sum of the first rates.

Without these series, an answer's `usage` may contain the number of accepted draft tokens: then only the mean is known.
With neither, acceptance cannot be measured over HTTP, and the report states this.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from redline import clock
from redline.bench.serving.metrics import failure_of
from redline.bench.serving.ready import DraftCounters
from redline.bench.serving.records import LoadRequest, TimedAnswer
from redline.bench.serving.saved import BenchResult
from redline.bench.serving.sections import Plot, Section, Series, Table, Words
from redline.messages.base import Record
from redline.policy.synthetic import GOLDEN

Source = Literal["metrics", "usage", "unknown"]

STILL_S = 0.4  # seconds between two reads of the counters that must be equal: longer than the server may cache them
PATIENCE_S = 8.0  # timeout in seconds for counters that keep changing, since the server has other traffic
FULL = 0.97  # share of the maximum from which mean drafts count as full: rounds at the ends of answers have fewer
OTHERS = 1.02  # if rounds generated more than this times our tokens, other clients' tokens are among them


def settled(
    read: Callable[[], DraftCounters | None],
    *,
    clock: Callable[[], float] = clock.monotonic,
    wait: Callable[[float], object] = clock.sleep,
) -> DraftCounters | None:
    """A server's counters once two reads are equal, or after PATIENCE_S seconds; None if it has no counters.

    read: reads the counters once. clock, wait: for tests.
    """
    last, until = read(), clock() + PATIENCE_S
    while last is not None and clock() < until:
        wait(STILL_S)
        now = read()
        if now == last:
            break
        last = now
    return last


# ------------------------------------------------------------------------------------------------------------- parts


class ServerAcceptance(Record, frozen=True):
    """A domain at one temperature on one server.

    source: where the counts come from. drafts: rounds that verified drafts; draft_tokens: their draft tokens; accepted:
    accepted draft tokens; per_place: rounds in which the draft at this position and all before it were accepted.
    tokens: output tokens of the answers, from usage. others: tokens that the rounds generated for other clients.
    """

    server: str
    temperature: float
    domain: str
    source: Source
    answers: int
    failed: int
    tokens: int
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    per_place: tuple[int, ...] = ()
    others: int = 0

    @property
    def mean_drafts(self) -> float | None:
        """Mean draft tokens per round with drafts."""
        return self.draft_tokens / self.drafts if self.drafts and self.draft_tokens else None

    @property
    def rates(self) -> list[float]:
        """The share of rounds in which the first 1, 2 ... drafts were all accepted."""
        return [held / self.drafts for held in self.per_place] if self.drafts else []

    def length(self, k: int | None = None) -> float | None:
        """Mean tokens per round with k drafts, the target's own token included. k: None: all drafts of the round.

        From usage, the mean covers all rounds, also those without drafts. None if it cannot be known.
        """
        if k is not None:
            return 1 + sum(self.rates[:k]) if 0 < k <= len(self.rates) else None
        if self.source == "metrics":
            return 1 + self.accepted / self.drafts if self.drafts else None
        if self.source == "usage" and self.tokens > self.accepted:
            return self.tokens / (self.tokens - self.accepted)
        return None

    @property
    def drafted_share(self) -> float | None:
        """The share of the answers' tokens that came from rounds with drafts."""
        return min(1.0, (self.drafts + self.accepted) / self.tokens) if self.tokens and self.drafts else None


def part(
    server: str, temperature: float, domain: str, answers: Sequence[TimedAnswer], counted: DraftCounters | None
) -> ServerAcceptance:
    """The figures of a domain, from its answers and the server's counters. counted: None: there are no counters."""
    good = [answer for answer in answers if failure_of(answer) is None]
    usages = [answer.usage for answer in good if answer.usage is not None]
    tokens = sum(usage.completion_tokens or 0 for usage in usages)
    plain = ServerAcceptance(
        server=server,
        temperature=temperature,
        domain=domain,
        source="unknown",
        answers=len(good),
        failed=len(answers) - len(good),
        tokens=tokens,
    )
    if counted is not None:
        made = counted.drafts + counted.accepted
        return msgspec.structs.replace(
            plain,
            source="metrics",
            drafts=counted.drafts,
            draft_tokens=counted.tokens,
            accepted=counted.accepted,
            per_place=counted.accepted_at,
            others=made - tokens if tokens and made > tokens * OTHERS else 0,
        )
    if tokens and any(usage.accepted_tokens is not None for usage in usages):
        accepted = sum(usage.accepted_tokens or 0 for usage in usages)
        return msgspec.structs.replace(plain, source="usage", accepted=accepted)
    return plain


def together(parts: Sequence[ServerAcceptance], domain: str = "all") -> ServerAcceptance:
    """Merges several domains of one server at one temperature; each round counts once."""
    places = max((len(one.per_place) for one in parts), default=0)
    first = parts[0]
    sources = {one.source for one in parts}
    return ServerAcceptance(
        server=first.server,
        temperature=first.temperature,
        domain=domain,
        source=first.source if len(sources) == 1 else "unknown",
        answers=sum(one.answers for one in parts),
        failed=sum(one.failed for one in parts),
        tokens=sum(one.tokens for one in parts),
        drafts=sum(one.drafts for one in parts),
        draft_tokens=sum(one.draft_tokens for one in parts),
        accepted=sum(one.accepted for one in parts),
        per_place=tuple(sum(one.per_place[at] for one in parts if at < len(one.per_place)) for at in range(places)),
        others=sum(one.others for one in parts),
    )


def groups(parts: Sequence[ServerAcceptance]) -> dict[tuple[str, float], list[ServerAcceptance]]:
    """Groups parts by server and temperature, in order."""
    found: dict[tuple[str, float], list[ServerAcceptance]] = {}
    for one in parts:
        found.setdefault((one.server, one.temperature), []).append(one)
    return found


# ------------------------------------------------------------------------------------------------------- report


def remarks(parts: Sequence[ServerAcceptance]) -> list[str]:
    """Remarks for readers of the figures, one sentence each."""
    said: list[str] = []
    for (server, temperature), of in groups(parts).items():
        whole = together(of)
        where = f"{server} at temperature {temperature:g}"
        if whole.source == "usage":
            said.append(
                f"{where}: /metrics has no counters of drafts. The answers' usage gives only the mean over all rounds, "
                "including those without drafts; acceptance by position and by k is unknown."
            )
        elif whole.source == "unknown":
            said.append(
                f"{where}: neither /metrics nor the answers' usage reports accepted drafts, so acceptance cannot be "
                "measured. If another port serves /metrics, name it with --metrics-url."
            )
        elif not whole.drafts:
            said.append(f"{where}: the server has counters of drafts, but generated none.")
        if whole.drafts and whole.mean_drafts is not None and whole.mean_drafts < len(whole.per_place) * FULL:
            said.append(
                f"{where}: rounds had {whole.mean_drafts:.2f} drafts on average and up to {len(whole.per_place)}. A "
                "round with fewer drafts counts as one in which the later positions were rejected, so their rates, and "
                "the tokens of larger k, are lower bounds."
            )
        if whole.source == "metrics" and whole.drafted_share is not None and whole.drafted_share < 0.9:
            said.append(
                f"{where}: {whole.drafted_share:.0%} of the tokens came from rounds with drafts; the server generated "
                "the others one by one."
            )
        if whole.others:
            said.append(
                f"{where}: the server generated {whole.others:,} tokens for other clients during the run; its counters "
                "include their drafts."
            )
        if whole.failed:
            said.append(f"{where}: {whole.failed} of {whole.failed + whole.answers} requests failed.")
    return said


def by_k_table(whole: ServerAcceptance) -> Table:
    """Acceptance by position, and mean tokens per round by k next to the golden curve."""
    rows: list[tuple[str, ...]] = []
    before = 1.0
    for k, rate in enumerate(whole.rates, start=1):
        length, golden = whole.length(k), GOLDEN[k - 1] if k <= len(GOLDEN) else None
        assert length is not None
        rows.append(
            (
                str(k),
                f"{rate:.1%}",
                f"{rate / before:.1%}" if before else "-",
                f"{length:.2f}",
                "-" if golden is None else f"{golden:.2f}",
                "-" if golden is None else f"{round(length - golden, 2) + 0.0:+.2f}",
            )
        )
        before = rate
    return Table(
        title=f"Acceptance by k: {whole.server}, temperature {whole.temperature:g}",
        columns=("k", "first k accepted", "accepted if those before were", "tokens per round", "golden", "apart"),
        rows=tuple(rows),
        note="tokens per round: 1 plus the sum of the first k rates, over rounds with drafts. golden: the curve that "
        "InferenceX uses for its synthetic acceptance of Kimi's EAGLE-3.",
    )


def domains_table(parts: Sequence[ServerAcceptance]) -> Table:
    """Acceptance by domain of one server at one temperature."""
    rows = [*parts, together(parts)] if len(parts) > 1 else list(parts)
    most = min(len(GOLDEN), max((len(one.per_place) for one in rows), default=0))
    return Table(
        title=f"By domain: {parts[0].server}, temperature {parts[0].temperature:g}",
        columns=(
            "domain",
            "answers",
            "tokens",
            "drafts per round",
            "tokens per round",
            *(f"k={k + 1}" for k in range(most)),
        ),
        rows=tuple(
            (
                one.domain,
                str(one.answers),
                f"{one.tokens:,}",
                _number(one.mean_drafts),
                _number(one.length()),
                *(_number(one.length(k + 1)) for k in range(most)),
            )
            for one in rows
        ),
        note="tokens per round: with all drafts of the round; k=1, 2 ...: with its first k drafts.",
    )


def accept_sections(result: BenchResult) -> list[Section]:
    """A page's sections, from the parts in the result's details."""
    parts = msgspec.convert(result.details["parts"], list[ServerAcceptance])
    sections: list[Section] = [*(Words(text=text, warning=True) for text in remarks(parts))]
    wholes = [together(of) for of in groups(parts).values()]
    if drawn := [one for one in wholes if one.rates]:
        sections.append(_curve(drawn))
    for whole, of in zip(wholes, groups(parts).values(), strict=True):
        if whole.rates:
            sections.append(by_k_table(whole))
        sections.append(domains_table(of))
    return sections


def _curve(wholes: Sequence[ServerAcceptance]) -> Plot:
    def line(name: str, lengths: Sequence[float]) -> Series:
        return Series(name=name, x=tuple(map(float, range(len(lengths)))), y=tuple(lengths), style="line and points")

    measured = [
        line(
            f"{one.server}, temperature {one.temperature:g}",
            [1.0, *(one.length(k + 1) or 1.0 for k in range(len(one.rates)))],
        )
        for one in wholes
    ]
    return Plot(
        title="Tokens per round by drafts",
        x_label="drafts per round, k",
        y_label="mean tokens per round",
        series=(*measured, line("golden", [1.0, *GOLDEN])),
        note="A server's curve is computed from acceptance by position: a run with k drafts also shows fewer drafts.",
    )


def figures(parts: Sequence[ServerAcceptance]) -> dict[str, Any]:
    """Server and temperature -> rates by position, mean tokens by k and per round; under vLLM's keys if they exist."""
    found: dict[str, Any] = {}
    for (server, temperature), of in groups(parts).items():
        whole = together(of)
        found[f"{server} temperature {temperature:g}"] = {
            "source": whole.source,
            "spec_decode_num_drafts": whole.drafts,
            "spec_decode_draft_tokens": whole.draft_tokens,
            "spec_decode_accepted_tokens": whole.accepted,
            "spec_decode_acceptance_rate": whole.accepted / whole.draft_tokens * 100 if whole.draft_tokens else None,
            "spec_decode_acceptance_length": whole.length(),
            "spec_decode_per_position_acceptance_rates": whole.rates,
            "tokens_a_round_by_k": [whole.length(k + 1) for k in range(len(whole.rates))],
            "golden": list(GOLDEN),
        }
    return found


def by_domain(asks: Sequence[LoadRequest]) -> Mapping[str, list[LoadRequest]]:
    """Groups requests by name, in order of first appearance."""
    found: dict[str, list[LoadRequest]] = {}
    for ask in asks:
        found.setdefault(ask.name or "all", []).append(ask)
    return found


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
