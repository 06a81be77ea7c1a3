"""The figures of lab.tiers for measured prompts: errors next to their floor, and regret."""

import pytest

from lab import tiers
from lab.tiers import MORE, Asked, errors, told
from redline.policy.tiers import PrefillTimes
from redline.run.tiers.parts import Parts
from redline.run.tiers.parts import told as told_parts


def asked(tier: str, ms: float, **more: float | None) -> Asked:
    hit = 0 if tier == "none" else 512
    known = {"predicted_ms": ms, "read_ms": 2.0, "read_predicted_ms": 2.0, "compute_ms": 1000.0, **more}
    parts = {"step": {"count": 1, "ms": ms / 2}}
    return Asked(tier, 512 if tier == "none" else 512 + MORE, hit, ms, parts=parts, **known)  # type: ignore[arg-type]


def test_an_error_is_relative_to_what_was_measured_and_its_floor_is_of_the_same_size() -> None:
    found = errors([(1, 10.0, 8.0), (1, 10.0, 10.0), (1, 10.0, 20.0), (2, 5.0, 5.0), (2, None, 99.0)])
    assert found["count"] == 4
    assert found["median"] == pytest.approx(0.125)
    assert found["p90"] == found["floor_p90"] == 0.5
    assert found["floor_median"] == pytest.approx(0.125)
    assert errors([(1, None, 1.0)]) == {"count": 0}


def test_hits_stand_beside_prompts_that_were_computed_and_slower_ones_are_counted() -> None:
    prompts = [asked("none", 1000.0), asked("none", 1200.0), asked("none", 800.0)]
    found = told([*prompts, asked("host", 300.0), asked("host", 1100.0), asked("disk", 400.0), asked("cache", 1.0)])
    assert found["of_computed"] == {"host": {"512": 0.7}, "disk": {"512": 0.4}}
    assert found["asked"] == {"host": 2, "disk": 1, "cache": 1, "none": 3}
    slower = "slower_than_computing_was", "slower_than_computing_was_predicted"
    assert [found["regret"][key] for key in ("hits", *slower)] == [3, 1, 1]


def test_parts_are_told_by_the_time_that_they_lie_in() -> None:
    clock = iter([1.0, 3.0, 3.5, 9.0])
    parts = Parts(lambda: next(clock))
    with parts.of("nobody asks"):
        pass
    parts.kept = []
    with parts.of("seal"):
        pass
    with parts.of("pin"):
        pass
    parts.kept.append(parts.kept[0]._replace(began=0.0, ended=1.9))
    assert told_parts(parts.kept, 2.0, 4.0) == {"seal": {"count": 1, "ms": 1000.0}, "pin": {"count": 1, "ms": 500.0}}


def test_first_tokens_of_a_small_model_are_told_with_the_parts_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "WARM", (130, 100, 70))
    monkeypatch.setattr(PrefillTimes, "observed", lambda *_: None)  # so everything that is stored is fetched
    given = tiers.arguments().parse_args(["--lengths", "130", "--conversations", "3", "--device", "cpu"])
    found = tiers.played(given.folder, tiers.Series(given.lengths, given.conversations), given)
    assert found["asked"]["none"] == 3
    assert found["asked"]["host"] > 0
    for one in found["prompts"]:
        assert one["parts"]["step"]["ms"] > 0
        if one["tier"] == "host":
            assert {"room", "read: fetch", "read: launch", "read: wait"} <= one["parts"].keys()
    assert found["parts"]["host"]["194"]["first token"] >= found["parts"]["host"]["194"]["launch"] > 0
