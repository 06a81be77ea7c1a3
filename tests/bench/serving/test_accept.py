"""Acceptance rates from a server's counters, and the remarks if there are none."""

import msgspec
import pytest

from redline.bench.serving import accept
from redline.bench.serving.accept import ServerAcceptance, part, settled, together
from redline.bench.serving.ready import DraftCounters
from redline.bench.serving.records import LoadRequest
from redline.bench.serving.saved import BenchResult
from redline.bench.serving.sections import Plot, Table, Words
from tests.bench.serving.hand_made import answer, steady

BEFORE = DraftCounters(drafts=100, tokens=300, accepted=150, accepted_at=(80, 50, 20))
AFTER = DraftCounters(drafts=300, tokens=900, accepted=550, accepted_at=(240, 180, 130))


def counted(domain: str = "code") -> ServerAcceptance:
    """200 rounds of 3 draft tokens: 160, 130, 110 were accepted at positions 1 to 3; so 600 tokens in rounds."""
    return part("s", 0.0, domain, [steady(1.0, 0.01, 602)], AFTER.since(BEFORE))


def test_acceptance_is_the_difference_of_two_looks():
    one = counted()
    assert one.rates == pytest.approx([0.8, 0.65, 0.55])
    assert one.length() == pytest.approx(3.0)
    assert [one.length(k) for k in (1, 2, 3)] == pytest.approx([1.8, 2.45, 3.0])
    assert one.length(4) is None
    assert one.mean_drafts == 3
    assert one.drafted_share == pytest.approx(600 / 602)
    assert not accept.remarks([one])


def test_a_server_that_began_anew_counts_from_nothing():
    assert BEFORE.since(AFTER) == BEFORE
    first = AFTER.since(DraftCounters())
    assert first is not None
    assert first.accepted_at == AFTER.accepted_at


def test_counters_are_read_once_they_stand_still():
    looks = iter([BEFORE, AFTER, AFTER, BEFORE])
    waited: list[float] = []
    assert settled(lambda: next(looks), clock=lambda: 0.0, wait=waited.append) == AFTER
    assert len(waited) == 2
    assert settled(lambda: None) is None


def test_counters_that_never_stand_still_end_the_wait():
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    def read() -> DraftCounters:
        return DraftCounters(drafts=int(now[0] * 10))

    found = settled(read, clock=lambda: now[0], wait=wait)
    assert found is not None
    assert accept.PATIENCE_S <= now[0] < accept.PATIENCE_S + 1


def test_rounds_of_fewer_drafts_make_the_later_places_lower_bounds():
    adaptive = DraftCounters(drafts=100, tokens=150, accepted=90, accepted_at=(80, 10))
    said = accept.remarks([part("s", 0.0, "code", [steady(1.0, 0.01, 190)], adaptive)])
    assert len(said) == 1
    assert "1.50 drafts on average and up to 2" in said[0]


def test_tokens_of_somebody_else_are_noticed():
    said = accept.remarks([part("s", 0.0, "code", [steady(1.0, 0.01, 500)], AFTER.since(BEFORE))])
    assert any("generated 100 tokens for other clients" in text for text in said)


def test_tokens_that_were_not_drafted_are_said():
    said = accept.remarks([part("s", 0.0, "code", [steady(1.0, 0.01, 1200)], AFTER.since(BEFORE))])
    assert any("50% of the tokens came from rounds with drafts" in text for text in said)


def test_without_metrics_usage_says_the_mean_alone():
    one = part("s", 0.0, "code", [answer((1.0, "a", "answer"), tokens=300, accepted=200)], None)
    assert one.source == "usage"
    assert one.length() == pytest.approx(3.0)
    assert one.rates == []
    assert "by position and by k is unknown" in accept.remarks([one])[0]


def test_without_either_it_says_that_it_cannot_know():
    one = part("s", 0.0, "code", [steady(1.0, 0.1, 10)], None)
    assert one.length() is None
    assert "cannot be measured" in accept.remarks([one])[0]


def test_a_server_that_counts_and_does_not_draft():
    one = part("s", 0.0, "code", [steady(1.0, 0.1, 10)], DraftCounters())
    assert one.length() is None
    assert "generated none" in accept.remarks([one])[0]


def test_domains_together_count_each_round_once():
    other = ServerAcceptance(server="s", temperature=0.0, domain="chat", source="metrics", answers=1, failed=1,
                 tokens=110, drafts=100, draft_tokens=300, accepted=10, per_place=(10,))  # fmt: skip
    whole = together([counted(), other])
    assert whole.length() == pytest.approx(1 + 410 / 300)
    assert whole.per_place == (170, 130, 110)
    assert (whole.answers, whole.failed, whole.domain) == (2, 1, "all")


def test_the_curve_stands_beside_the_golden_one():
    parts = [counted(), counted("chat"), msgspec.structs.replace(counted(), temperature=1.0)]
    details = msgspec.json.decode(msgspec.json.encode({"parts": parts}))
    sections = accept.accept_sections(BenchResult(kind="accept", figures={}, details=details))
    plot, by_k, domains, *rest = sections
    assert isinstance(plot, Plot)
    assert [series.name for series in plot.series] == ["s, temperature 0", "s, temperature 1", "golden"]
    assert plot.series[0].y == pytest.approx((1, 1.8, 2.45, 3.0))
    assert plot.series[-1].y[:3] == (1.0, 1.83, 2.43)
    assert isinstance(by_k, Table)
    assert by_k.rows[1] == ("2", "65.0%", "81.2%", "2.45", "2.43", "+0.02")
    assert isinstance(domains, Table)
    assert [row[0] for row in domains.rows] == ["code", "chat", "all"]
    assert len(rest) == 2
    assert accept.figures(parts)["s temperature 1"]["tokens_a_round_by_k"] == pytest.approx([1.8, 2.45, 3.0])


def test_a_page_of_nothing_known_says_so_first():
    details = {"parts": [msgspec.to_builtins(part("s", 0.0, "code", [steady(1.0, 0.1, 10)], None))]}
    words, table = accept.accept_sections(BenchResult(kind="accept", figures={}, details=details))
    assert isinstance(words, Words)
    assert words.warning
    assert isinstance(table, Table)
    assert table.rows[0][3:5] == ("-", "-")


def test_asks_by_domain_keep_their_order():
    asks = [LoadRequest(max_tokens=1, text=text, name=name) for text, name in (("1", "b"), ("2", "a"), ("3", "b"))]
    assert [(name, [ask.text for ask in of]) for name, of in accept.by_domain(asks).items()] == [
        ("b", ["1", "3"]), ("a", ["2"]),
    ]  # fmt: skip
