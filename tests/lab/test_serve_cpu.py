"""Requests to a peer: a program that answers at once, and reports the seconds that it would have taken."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from lab.serve_cpu import (
    PEER_ANSWER,
    SHORT_NEW,
    SHORT_PREFILL,
    SHORT_PROMPT,
    Case,
    Peer,
    PeerAsker,
    Prompts,
    by_domain,
    served,
)
from redline.bench.speculation.rates import Question, Rate
from redline.errors import RedlineError

PROGRAM = """
import json, sys
for line in sys.stdin:
    task = json.loads(line)
    prompt = sum(map(len, task["prompts"]))
    print(json.dumps({"first_s": task["way"]["prefill"] * prompt, "rest_s": task["way"]["decode"] * task["new"]}))
    sys.stdout.flush()
"""


class Pace(NamedTuple):
    """Seconds per token."""

    prefill: float
    decode: float


PREFILLS, DECODES = Pace(0.001, 0.1), Pace(0.01, 0.05)


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer("paced", [sys.executable, "-c", PROGRAM], [PREFILLS, DECODES]) as peer:
        yield peer


def test_the_fastest_way_is_that_of_what_is_measured(peer: Peer):
    drawn: list[Case] = []

    def draw(case: Case) -> Prompts:
        drawn.append(case)
        return [[0] * case.prompt] * case.batch

    assert peer.fastest(draw, Case(2, 200, 96), "rest_s") == DECODES
    assert set(drawn) == {Case(2, SHORT_PROMPT, SHORT_NEW)}, "decoding is tried with short prompts"
    drawn.clear()
    assert peer.fastest(draw, Case(1, 2000, 1), "first_s") == PREFILLS
    assert Case(1, SHORT_PREFILL, 1) in drawn, "and a prefill with a longer one"


def test_a_peer_that_answers_a_question_counts_its_decoding_alone(peer: Peer):
    outcome = PeerAsker(peer, DECODES).ask([Question("chat", (1, 2, 3))])
    assert outcome.seconds == pytest.approx(0.05 * PEER_ANSWER)
    assert outcome.tokens == PEER_ANSWER - 1, "the first one belongs to the prefill"


def test_rates_are_told_by_domain():
    def rate(domain: str, variant: str, speed: float) -> Rate:
        return Rate(
            domain=domain, variant=variant, batch=1, tokens_per_s=speed, times=1.0, length=None, accepted=None, rounds=0
        )

    rates = [rate("chat", "off", 10.04), rate("chat", "auto", 20.0), rate("code", "off", 5.0)]
    assert by_domain(rates) == {"chat": {"off": 10.0, "auto": 20.0}, "code": {"off": 5.0}}


@pytest.mark.parametrize(
    ("program", "words"),
    [("exec sleep 60", r"model is not ready after 0\.5 s$"), ("exit 3", r"model ended with status 3$")],
)
def test_a_server_that_does_not_become_ready_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, words: str
):
    redline = tmp_path / "redline"
    redline.write_text(f"#!/bin/sh\n{program}\n")
    redline.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("lab.serve_cpu.START_S", 0.5)
    with pytest.raises(RedlineError, match=words), served(Path("model")):
        pass
