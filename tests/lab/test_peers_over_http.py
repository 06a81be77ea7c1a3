"""Comparison of servers: medians of the rounds' ratios; and a server is ended with all processes that it started."""

import os
import sys
from pathlib import Path

import pytest

from lab.peers_over_http import ANSWER, KEYS, OURS, Figures, Server, loads, medians, running, table
from redline.errors import RedlineError

NANO = Path(__file__).parents[2] / "models" / "kimi-nano"
HEALTHY = """
import http.server, sys, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


def test_the_median_of_the_rounds_ratios_counts_and_not_the_ratio_of_medians():
    def figures(value: float) -> Figures:
        return {**dict.fromkeys(KEYS, value)}

    rounds = [
        {OURS: {"random, 1": figures(mine)}, "peer": {"random, 1": figures(theirs)}}
        for mine, theirs in ((100.0, 50.0), (10.0, 5.0), (1.0, 3.0))
    ]
    found = medians(rounds)
    assert found["random, 1"]["peer"]["output_throughput / redline's"] == 0.5
    assert found["random, 1"]["peer"]["output_throughput"] == 5.0
    assert "0.50x" in table(found)


def test_every_round_asks_other_random_prompts_and_the_same_evaluation_prompts():
    first, second = loads(NANO, 0), loads(NANO, 1)
    assert [(load.name, load.streams) for load in first] == [
        *(("random", 1), ("random", 8)),
        *(("evaluation", 1), ("evaluation", 8)),
    ]
    prompts = [[ask.ids for load in one for ask in load.asks if ask.name == "random"] for one in (first, second)]
    assert not set(prompts[0]) & set(prompts[1])
    asked = [[ask.ids for load in one[2:] for ask in load.asks if ask.name != "warm-up"] for one in (first, second)]
    assert asked[0] == asked[1]
    assert len(set(asked[0])) == len(asked[0])
    assert all(ask.max_tokens == ANSWER for load in first for ask in load.asks)


def test_a_server_runs_until_the_end_and_one_that_ends_is_said(tmp_path: Path):
    with running(Server("here", (sys.executable, "-c", HEALTHY), {}), tmp_path) as url:
        assert url.startswith("http://127.0.0.1:")
    broken = Server("broken", (sys.executable, "-c", "raise SystemExit('no model here')"), dict(os.environ))
    with pytest.raises(RedlineError, match="broken did not start: no model here"), running(broken, tmp_path):
        raise AssertionError("it never was healthy")
