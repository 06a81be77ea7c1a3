"""The program of figures at work on a short sweep; and what its stored figures are said to keep."""

import json
from pathlib import Path

import pytest

from redline.bench.runs import fleet_roles
from redline.simulate.traces import AGENTS, CHAT

STORED = Path(__file__).parents[3] / "benchmarks" / "results" / "fleet-roles.json"


def test_the_figures_are_written_and_those_before_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fleet_roles, "PHASE_S", 40.0)
    monkeypatch.setattr(fleet_roles, "PHASES", ((CHAT, 4.0), (AGENTS, 2.0)))
    monkeypatch.setattr(fleet_roles, "WORKERS", 3)
    monkeypatch.setattr(fleet_roles, "SWEEP_S", 20.0)
    monkeypatch.setattr(fleet_roles, "SPLITS", {"chat": (CHAT, (1,), (2.0,))})
    path = tmp_path / "figures.json"
    fleet_roles.main(["--only", "shifting", "--save", str(path)])
    fleet_roles.main(["--only", "places", "--save", str(path)])
    told = json.loads(path.read_text())
    assert set(told["shifting"]["good_per_s"]) == {"chosen", "both", "1:2", "2:1"}
    assert len(told["shifting"]["of_the_best_of_each_phase"]) == 2
    assert told["places"]["least_of_the_better"] > 0.9


def test_an_hour_of_two_thousand_gpus_took_less_than_two_minutes_when_it_was_measured():
    """Of the stored run alone: a slower simulation shows when it is measured again. The next test sees what grows."""
    speed = json.loads(STORED.read_text())["speed"]
    assert speed["gpus"] == 2000
    assert speed["seconds"] == 3600
    assert speed["process_s"] < 120
    assert speed["events"] < 5 * speed["requests"]


def test_a_request_takes_as_few_events_as_in_the_stored_run(monkeypatch: pytest.MonkeyPatch):
    """What a simulated request costs is events times what one takes; the former does not depend on the machine."""
    monkeypatch.setattr(fleet_roles, "BIG_WORKERS", 10)
    monkeypatch.setattr(fleet_roles, "BIG_RATE", 2.4)
    monkeypatch.setattr(fleet_roles, "HOUR_S", 120.0)
    told = fleet_roles.speed(seed=1)
    assert told["requests"] > 200
    assert told["events"] < 5 * told["requests"]
