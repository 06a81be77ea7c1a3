"""The problems that a soak test detects; and a small run of it against a real server."""

import json
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from lab import soak
from lab.bystander import Sample
from tests import forked
from tests.waiting import LIMIT_S, until

ROOT = Path(__file__).parents[2]


def record(**changed: Any) -> dict[str, Any]:
    return {
        "at_rest": dict.fromkeys((*soak.IDLE, soak.IDLE_TOKENS), 0.0),
        "mib_per_1000_requests": {"api": 0.1, "worker": -0.2},
        "descriptors": {"api": [20, 21], "worker": [9, 9]},
        "soak": {"odd": [], "sent": soak.WARM},
        "phases": [{"name": "soak", "right": True}],
        "end": {"code": 0, "tracebacks": 0},
        **changed,
    }


def test_a_server_that_is_what_it_was_has_nothing_wrong():
    assert soak.wrong(record()) == []
    assert soak.wrong(record(end=None)) == [], "a server that the soak did not start is not ended"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"at_rest": {**record()["at_rest"], "vllm:kv_cache_usage_perc": 0.01}}, "kv_cache_usage_perc is 0.01"),
        ({"at_rest": {}}, "not all figures"),
        ({"mib_per_1000_requests": {"api": 5.0}}, "memory of the api grows by 5.0"),
        ({"descriptors": {"api": [20, 90]}}, "90 descriptors, 20 before"),
        ({"soak": {"odd": [{"odd": "500"}], "sent": 9}}, "1 answers that no client should get"),
        ({"phases": [{"name": "soak", "right": False}]}, "answers another"),
        ({"end": {"code": 0, "tracebacks": 1}}, "1 tracebacks"),
        ({"end": {"code": None, "tracebacks": 0}}, "ended with None"),
    ],
)
def test_what_is_wrong_is_said(changed: dict[str, Any], said: str):
    (told,) = soak.wrong(record(**changed))
    assert said in told


def test_each_quarters_slope_tells_what_settles_from_what_leaks():
    mib = 1 << 20
    leaks = [Sample(float(k), 10 * k, 50 * mib + k * mib // 100, mib * min(k, 100)) for k in range(401)]
    assert [one["api"] for one in soak.quarters(leaks)] == [1.0] * 4
    assert [one["worker"] for one in soak.quarters(leaks)] == [100.0, 0.0, 0.0, 0.0]
    assert soak.quarters([]) == [{}] * 4


def test_requests_of_a_soak_are_of_every_dialect_and_some_clients_leave():
    some = list(islice(soak.source(0), 300))
    assert some == list(islice(soak.source(0), 300))
    assert {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"} <= {one.route for one in some}
    assert {"stream", "json", "any"} == {one.shape for one in some}
    assert sum("leave_s" in one.how for one in some) > 15


@pytest.mark.slow
def test_a_small_soak_against_a_real_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved = tmp_path / "soak.json"
    sizes = {
        "kv-memory": "15MB",
        "kv-tokens": 1000,
        "known-bytes": 1,
        "alone": 0.5,
        "requests": 12,
        "minutes": 0.05,
        "save": saved,
    }
    words = [f"--{name}={value}" for name, value in sizes.items()]
    with forked.all_processes():
        assert soak.main([str(ROOT / "models" / "kimi-nano"), *words]) == 0
    told = json.loads(saved.read_text())
    assert told["at_rest"] == record()["at_rest"]
    assert told["soak"]["sent"] > 0
    assert told["mib"]
    assert told["end"]["tracebacks"] == 0
    assert "wrong: nothing" in capsys.readouterr().out


def runs(pid: str) -> bool:
    """Whether a process exists and has not ended; a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_soak_that_is_ended_leaves_no_process_behind(tmp_path: Path):
    """Its server is in a separate session, so no signal to the soak reaches it."""
    sizes = {"kv-memory": "15MB", "kv-tokens": 1000, "known-bytes": 1, "save": tmp_path / "soak.json"}
    words = [str(ROOT / "models" / "kimi-nano"), *(f"--{name}={value}" for name, value in sizes.items())]
    command = [sys.executable, "-m", "lab.soak", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as running:
        try:
            children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
            # The server, and then the bystander.
            until(lambda: len(children.read_text().split()) >= 2 or running.poll() is not None)
            started = children.read_text().split()
            running.terminate()
            assert running.wait(LIMIT_S) == 128 + signal.SIGTERM
            until(lambda: not any(runs(pid) for pid in started), lambda: str([pid for pid in started if runs(pid)]))
        finally:
            running.kill()
