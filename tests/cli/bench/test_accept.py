"""Acceptance from the command line, against a scripted server."""

import json
from pathlib import Path

import pytest

from redline.bench.serving import ready, saved
from redline.bench.serving.accept import accept_sections
from redline.bench.serving.ready import DraftCounters
from redline.bench.serving.target import ServerTarget
from redline.errors import ConfigError
from tests.bench.serving.scripted import Scripted
from tests.cli.bench.http_verbs import BROKEN, stopped_after, type_in


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [{"kind": kind, "messages": [{"role": "user", "content": f"{kind} {at}"}]} for kind in "ab" for at in "123"]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_acceptance_is_read_before_and_after_each_domain(
    server: Scripted, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Counters that grow with the requests: 10 rounds of two draft tokens each; 8 first and 5 second ones accepted."""

    def read(target: ServerTarget) -> DraftCounters:
        asked = len(server.log().requests)
        return DraftCounters(
            drafts=10 * asked, tokens=20 * asked, accepted=13 * asked, accepted_at=(8 * asked, 5 * asked)
        )

    monkeypatch.setattr(ready, "drafting", read)
    server.forget()
    file = tmp_path / "result.json"
    flags = ("--dataset-path", prompts, "--num-prompts", 2, "--temperature", 0, "--temperature", 1, "--save", file)
    code, said = type_in("accept", server, *flags)
    assert code == 0
    assert len(server.log().requests) == 2 * 2 * 2
    found = saved.read(file)
    parts = found.details["parts"]
    assert [(one["domain"], one["temperature"], one["drafts"]) for one in parts] == [
        ("a", 0.0, 20), ("b", 0.0, 20), ("a", 1.0, 20), ("b", 1.0, 20),
    ]  # fmt: skip
    figures = found.figures[f"{server.url} temperature 0"]
    assert figures["tokens_a_round_by_k"] == pytest.approx([1.8, 2.3])
    assert figures["spec_decode_acceptance_length"] == pytest.approx(2.3)
    assert "Acceptance by k" in said
    assert accept_sections(found)


def test_a_server_that_does_not_say_is_no_error(server: Scripted, prompts: Path):
    code, said = type_in("accept", server, "--dataset-path", prompts, "--domain", "b", "--num-prompts", 1)
    assert code == 0
    assert "acceptance cannot be measured" in said


def test_an_unknown_domain_is_said_with_those_there_are(server: Scripted, prompts: Path):
    with pytest.raises(ConfigError, match=r"--domain 'c': the prompts have a, b"):
        type_in("accept", server, "--dataset-path", prompts, "--domain", "c")


def test_acceptance_that_is_stopped_keeps_the_domains_before(
    server: Scripted, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stopped_after(1, monkeypatch)
    file = tmp_path / "result.json"
    code, _ = type_in("accept", server, "--dataset-path", prompts, "--num-prompts", 1, "--save", file)
    assert code == 130
    assert [one["answers"] for one in saved.read(file).details["parts"]] == [1, 0]


def test_accept_of_failures_is_code_1(server: Scripted, prompts: Path):
    code, _ = type_in("accept", server, "--dataset-path", prompts, "--num-prompts", 1, script=BROKEN)
    assert code == 1


def test_counters_elsewhere_are_of_one_server(server: Scripted):
    with pytest.raises(ConfigError, match="applies to one server"):
        type_in("accept", server, "--base-url", "http://127.0.0.1:1", "--metrics-url", "http://127.0.0.1:2/metrics")
