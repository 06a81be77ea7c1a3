"""The leaderboard from the command line, against a scripted server."""

from pathlib import Path

import pytest

from redline.bench.serving import ready, saved
from redline.bench.serving.leaderboard import Workload, leaderboard_sections, prompts
from redline.bench.serving.target import ServerTarget
from redline.bench.serving.vocabulary import open_vocabulary
from redline.errors import ConfigError
from tests.bench.serving.scripted import Scripted
from tests.cli.bench.http_verbs import BROKEN, FIRST_S, stopped_after, timed, type_in


def test_a_leaderboard_is_measured_and_kept(server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    timed({server.url: 0.002}, monkeypatch)
    file, page = tmp_path / "result.json", tmp_path / "page.html"
    lengths = ("--input-len", 60, "--output-len", 20, "--runs", 3, "--parallel", 1, "--parallel", 2)
    server.forget()
    code, said = type_in("leaderboard", server, *lengths, "--save", file, "--html", page)
    assert code == 0
    assert len(server.log().requests) == 1 + 3 * 1 + 3 * 2  # one warm-up request before the runs
    found = saved.read(file)
    assert found.kind == "leaderboard"
    assert [answer.index for answer in found.answers] == list(range(9))
    assert [answer.ask.name for answer in found.answers] == ["60/20"] * 3 + ["60/20 x 2"] * 6
    figures = found.figures["60/20"]
    assert figures["completed"] == 3
    assert figures["p50_ttft"] == pytest.approx(FIRST_S)
    assert figures["p50_answer_ttft"] - figures["p50_ttft"] == pytest.approx(5 * 0.002)
    assert figures["p50_speed"] == pytest.approx(500)
    assert figures["p50_end_to_end"] == pytest.approx(figures["p50_answer_ttft"] + 500 / figures["p50_speed"])
    assert found.figures["60/20 x 2"]["completed"] == 6
    assert "P50 by workload" in said
    assert "<html" in page.read_text()
    assert leaderboard_sections(found)


def test_no_prompt_of_a_leaderboard_is_asked_twice_and_a_seed_asks_the_same(server: Scripted):

    workload = Workload(input_len=200, output_len=10)
    texts = [ask.messages for ask in prompts(workload, 4, 7, None)]
    assert len({str(text) for text in texts}) == 4
    assert texts == [ask.messages for ask in prompts(workload, 4, 7, None)]
    assert texts[0] != prompts(workload, 1, 8, None)[0].messages
    assert all(ask.text is not None for ask in prompts(workload, 2, 7, None, bare=True))


def test_prompts_have_as_many_tokens_as_asked():

    vocabulary = open_vocabulary(Path("models/kimi-nano"))
    for length in (40, 300):
        (ask,) = prompts(Workload(input_len=length, output_len=10), 1, 0, vocabulary)
        assert ask.prompt_tokens == pytest.approx(length, abs=1)


def test_a_leaderboard_of_failures_is_code_1(server: Scripted):
    code, said = type_in("leaderboard", server, "--input-len", 60, "--output-len", 9, "--runs", 2, script=BROKEN)
    assert code == 1
    assert "0 of 2" in said


def test_a_leaderboard_that_is_stopped_keeps_what_it_has(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stopped_after(2, monkeypatch)  # the warm-up, and a run
    file = tmp_path / "result.json"
    code, _ = type_in("leaderboard", server, "--input-len", 60, "--output-len", 9, "--runs", 3, "--save", file)
    assert code == 130
    found = saved.read(file)
    assert found.stopped
    assert found.figures["60/9"]["completed"] == 1


def test_a_model_without_room_is_said_before_anything_is_asked(server: Scripted, monkeypatch: pytest.MonkeyPatch):
    def room(target: ServerTarget) -> int:
        return 4096

    monkeypatch.setattr(ready, "max_model_len", room)
    server.forget()
    with pytest.raises(ConfigError, match="--input-len 2532 would fit"):
        type_in("leaderboard", server)
    assert not server.log().requests


def test_lengths_are_of_one_workload(server: Scripted):
    with pytest.raises(ConfigError, match="override one --workload"):
        type_in("leaderboard", server, "--workload", "1k/1k", "--workload", "100/300", "--input-len", 5)
