"""How many drafts hold: a server's acceptance by place and by domain, beside the golden curve.

A server that drafts says so in `/metrics`, under the names of vLLM, which Redline has too. They are read before and
after each part of the load, once they stand still; the difference is that part's. Rates are unconditional: the share of
rounds in which the first 1, 2 ... drafts all held. So one server with k drafts a round also says what 1 to k - 1 drafts
would have brought: 1 and the sum of the first rates.

Where there are no such series, an answer's `usage` may still say how many of its tokens were drafts: then the mean is
known and nothing else. Where neither is there, nothing can be known from outside, and that is what is said.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from redline import clock
from redline.bench.serving.metrics import failure_of
from redline.bench.serving.ready import Drafting
from redline.bench.serving.records import Answer, Ask
from redline.bench.serving.saved import Result
from redline.bench.serving.sections import Plot, Section, Series, Table, Words
from redline.tune.synthetic import GOLDEN
from redline.wire.base import Record

Source = Literal["metrics", "usage", "unknown"]

STILL_S = 0.4  # between two looks at the counters that have to be equal: longer than a scrape may be old
PATIENCE_S = 8.0  # for counters that do not stand still: somebody else is served
FULL = 0.97  # of the most drafts of a round: on average as many, but for those at the ends of answers
OTHERS = 1.02  # times our own tokens: where rounds made more, somebody else's are among them


def settled(
    read: Callable[[], Drafting | None],
    *,
    clock: Callable[[], float] = clock.monotonic,
    wait: Callable[[float], object] = clock.sleep,
) -> Drafting | None:
    """A server's counts once two looks at them are equal, or PATIENCE_S later; None where it has none.

    read: one look. clock, wait: for tests.
    """
    last, until = read(), clock() + PATIENCE_S
    while last is not None and clock() < until:
        wait(STILL_S)
        now = read()
        if now == last:
            break
        last = now
    return last


def since(before: Drafting | None, after: Drafting | None) -> Drafting | None:
    """What was counted between two looks; None where either is missing. A server that began anew counts from 0."""
    if before is None or after is None:
        return None
    if after.drafts < before.drafts or after.tokens < before.tokens:
        return after
    then = (*before.accepted_at, *[0] * len(after.accepted_at))
    return Drafting(
        drafts=after.drafts - before.drafts,
        tokens=after.tokens - before.tokens,
        accepted=after.accepted - before.accepted,
        accepted_at=tuple(now - past for now, past in zip(after.accepted_at, then, strict=False)),
    )


# ------------------------------------------------------------------------------------------------------------- a part


class Part(Record, frozen=True):
    """A domain at one temperature on one server.

    source: who says. drafts: rounds that verified drafts; draft_tokens: their drafts; accepted: of them; per_place:
    rounds in which the draft at that place held, and all before it. tokens: of the answers, as usage has them.
    others: tokens that its rounds made beyond those of the answers, so for somebody else.
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
        """Drafts of a round that had any."""
        return self.draft_tokens / self.drafts if self.drafts and self.draft_tokens else None

    @property
    def rates(self) -> list[float]:
        """The share of rounds in which the first 1, 2 ... drafts all held."""
        return [held / self.drafts for held in self.per_place] if self.drafts else []

    def length(self, k: int | None = None) -> float | None:
        """Mean tokens of a round with k drafts, the target's own among them; None: with as many as it had.

        Of usage it is over all rounds, those without drafts too. None where it cannot be known.
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


def part(server: str, temperature: float, domain: str, answers: Sequence[Answer], counted: Drafting | None) -> Part:
    """What a domain's answers and the server's counts meanwhile say. counted: None: the server does not count."""
    good = [answer for answer in answers if failure_of(answer) is None]
    usages = [answer.usage for answer in good if answer.usage is not None]
    tokens = sum(usage.completion_tokens or 0 for usage in usages)
    plain = Part(
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


def together(parts: Sequence[Part], domain: str = "all") -> Part:
    """Several domains of one server at one temperature as one, each round counting once."""
    places = max((len(one.per_place) for one in parts), default=0)
    first = parts[0]
    sources = {one.source for one in parts}
    return Part(
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


def groups(parts: Sequence[Part]) -> dict[tuple[str, float], list[Part]]:
    """Parts by server and temperature, in their order."""
    found: dict[tuple[str, float], list[Part]] = {}
    for one in parts:
        found.setdefault((one.server, one.temperature), []).append(one)
    return found


# ------------------------------------------------------------------------------------------------------- what it says


def remarks(parts: Sequence[Part]) -> list[str]:
    """What a reader of the figures must know, a sentence each."""
    said: list[str] = []
    for (server, temperature), of in groups(parts).items():
        whole = together(of)
        where = f"{server} at temperature {temperature:g}"
        if whole.source == "usage":
            said.append(
                f"{where}: /metrics has no counts of drafts. From the answers' usage the mean over all rounds "
                "is known, those without drafts among them; places and k are not."
            )
        elif whole.source == "unknown":
            said.append(
                f"{where}: neither /metrics nor the answers' usage says how many drafts held. It cannot be known from "
                "outside. Where another port serves /metrics, name it with --metrics-url."
            )
        elif not whole.drafts:
            said.append(f"{where}: it counts drafts, and made none.")
        if whole.drafts and whole.mean_drafts is not None and whole.mean_drafts < len(whole.per_place) * FULL:
            said.append(
                f"{where}: rounds had {whole.mean_drafts:.2f} drafts on average and up to {len(whole.per_place)}. A "
                "round with fewer counts as one in which the later places failed, so their rates, and the tokens "
                "of larger k, are lower bounds."
            )
        if whole.source == "metrics" and whole.drafted_share is not None and whole.drafted_share < 0.9:
            said.append(
                f"{where}: {whole.drafted_share:.0%} of the tokens came from rounds with drafts; the server made the "
                "others one by one."
            )
        if whole.others:
            said.append(
                f"{where}: the server's rounds made {whole.others:,} tokens for somebody else meanwhile; its counts "
                "have their drafts too."
            )
        if whole.failed:
            said.append(f"{where}: {whole.failed} of {whole.failed + whole.answers} requests failed.")
    return said


def by_k_table(whole: Part) -> Table:
    """Acceptance by place, and mean tokens of a round by k beside the golden curve."""
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
        columns=("k", "first k held", "held if those before did", "tokens a round", "golden", "apart"),
        rows=tuple(rows),
        note="tokens a round: 1 and the sum of the first k rates, over rounds that had drafts. golden: the curve of "
        "InferenceX for Kimi's EAGLE-3, at which its synthetic acceptance is set.",
    )


def domains_table(parts: Sequence[Part]) -> Table:
    """Acceptance by domain of one server at one temperature."""
    rows = [*parts, together(parts)] if len(parts) > 1 else list(parts)
    most = min(len(GOLDEN), max((len(one.per_place) for one in rows), default=0))
    return Table(
        title=f"By domain: {parts[0].server}, temperature {parts[0].temperature:g}",
        columns=(
            "domain",
            "answers",
            "tokens",
            "drafts a round",
            "tokens a round",
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
        note="tokens a round: with as many drafts as it had; k=1, 2 ...: with the first so many of them.",
    )


def accept_sections(result: Result) -> list[Section]:
    """A page's sections from what its details hold: parts."""
    parts = msgspec.convert(result.details["parts"], list[Part])
    sections: list[Section] = [*(Words(text=text, warning=True) for text in remarks(parts))]
    wholes = [together(of) for of in groups(parts).values()]
    if drawn := [one for one in wholes if one.rates]:
        sections.append(_curve(drawn))
    for whole, of in zip(wholes, groups(parts).values(), strict=True):
        if whole.rates:
            sections.append(by_k_table(whole))
        sections.append(domains_table(of))
    return sections


def _curve(wholes: Sequence[Part]) -> Plot:
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
        title="Tokens of a round by drafts",
        x_label="drafts of a round, k",
        y_label="mean tokens of a round",
        series=(*measured, line("golden", [1.0, *GOLDEN])),
        note="One server's curve comes from the places of its drafts: with k drafts a round it says what fewer bring.",
    )


def figures(parts: Sequence[Part]) -> dict[str, Any]:
    """server and temperature -> rates by place, mean tokens by k and of a round; vLLM's keys where it has them."""
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


def by_domain(asks: Sequence[Ask]) -> Mapping[str, list[Ask]]:
    """Asks by their name, in the order in which names first come."""
    found: dict[str, list[Ask]] = {}
    for ask in asks:
        found.setdefault(ask.name or "all", []).append(ask)
    return found


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
