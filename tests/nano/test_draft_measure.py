"""The measured gain of mining: known differences are found, with intervals of the right width."""

from pathlib import Path

import numpy as np
import pytest

from nano.draft_measure import Answered, Domain, compare, plot, report, table

SEEDS = (1, 2, 3)
NAMES = ("base", *(f"{arm}-{seed}" for seed in SEEDS for arm in ("mined", "control")))


def answered(accept: float, prompts: int = 400, seed: int = 0, domain: str = "code") -> list[Answered]:
    """Answers with 10 rounds of 3 draft tokens, each accepted with this probability; deterministic for a seed."""
    rng = np.random.default_rng(seed)
    found: list[Answered] = []
    for number in range(prompts):
        held = (rng.random((10, 3)) < accept).cumprod(axis=1).sum()
        found.append(Answered(f"{number}", domain, f"d{number}", 10, 10 + int(held), 5, 20))
    return found


def drafters(base: float, mined: float, control: float, domain: str = "code") -> dict[str, list[Answered]]:
    accepts = {"base": base, "mined": mined, "control": control}
    return {name: answered(accepts[name.split("-")[0]], seed=place, domain=domain) for place, name in enumerate(NAMES)}


def length(accept: float) -> float:
    return 1 + accept + accept**2 + accept**3


def test_lengths_and_the_share_of_the_gap_are_those_of_the_drafters() -> None:
    domain = compare(drafters(0.7, 0.8, 0.75), SEEDS)
    assert domain.ceiling == 4
    assert domain.rounds == 4000  # of every drafter
    assert domain.lengths["base"].mean == pytest.approx(length(0.7), abs=0.05)
    assert domain.change.mean == pytest.approx(length(0.8) - length(0.75), abs=0.04)
    closed = (length(0.8) - length(0.75)) / (4 - length(0.75))
    assert domain.closed.mean == pytest.approx(closed, abs=0.04)
    assert domain.closed.low < closed < domain.closed.high


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    truth, inside = length(0.7), 0
    for trial in range(60):
        one = {name: answered(0.7, 100, 10 * trial + place) for place, name in enumerate(NAMES)}
        found = compare(one, SEEDS, seed=trial)
        inside += found.lengths["base"].low <= truth <= found.lengths["base"].high
    assert 50 <= inside < 60


def test_seeds_that_disagree_widen_the_interval() -> None:
    alike = drafters(0.7, 0.75, 0.7)
    apart = alike | {"mined-1": answered(0.6, seed=8), "mined-2": answered(0.9, seed=9)}
    narrow, wide = (compare(found, SEEDS).change for found in (alike, apart))
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)


def test_a_drafter_that_has_not_answered_all_is_no_comparison() -> None:
    found = drafters(0.7, 0.7, 0.7)
    with pytest.raises(ValueError, match="control-2 has not answered"):
        compare(found | {"control-2": found["control-2"][1:]}, SEEDS)


def test_prompts_with_other_answers_are_left_out_and_many_of_them_are_refused() -> None:
    found = drafters(0.7, 0.7, 0.7)
    odd = [Answered(f"{number}", "code", "else", 1, 4, 1, 4) for number in range(5)]
    few = compare(found | {"mined-3": [*odd[:2], *found["mined-3"][2:]]}, SEEDS)
    assert (few.prompts, few.other) == (398, 2)
    with pytest.raises(ValueError, match="5 of 400 prompts have another answer"):
        compare(found | {"mined-3": [*odd, *found["mined-3"][5:]]}, SEEDS)


@pytest.fixture
def domains() -> dict[str, Domain]:
    return {
        "code": compare(drafters(0.9, 0.91, 0.9), SEEDS),
        "chat": compare(drafters(0.6, 0.8, 0.6, "chat"), SEEDS),
    }


def test_the_report_judges_the_domain_that_is_furthest_from_its_ceiling(domains: dict[str, Domain]) -> None:
    found = report(domains)
    assert found["worst"] == "chat"
    assert found["worst_closed"] == found["domains"]["chat"]["closed"]
    met = list(found["met"].values())
    assert met == [False, False, False, True, True]  # 3.4 and 2.2 tokens per round, 4,000 rounds
    assert report({"code": domains["code"]})["met"]["mining closes 20% of the worst domain's gap"] is False


def test_table_and_plot_show_every_domain(domains: dict[str, Domain], tmp_path: Path) -> None:
    assert [line.split()[1] for line in table(domains).splitlines()[2:]] == ["code", "chat"]
    plot(tmp_path / "arms.png", domains)
    assert (tmp_path / "arms.png").read_bytes().startswith(b"\x89PNG")
