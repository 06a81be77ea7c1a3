"""Two scripted servers compared from the command line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from redline.bench.serving import saved
from redline.bench.serving.compare import compare_sections
from redline.cli.bench import app
from redline.errors import ConfigError
from tests.bench.serving.script import Play, Script
from tests.bench.serving.scripted import Scripted
from tests.cli.bench.http_verbs import stopped_after, timed

SHORT = (
    *("--max-concurrency", 2, "--num-prompts", 2, "--random-input-len", 20, "--random-output-len", 16),
    *("--seed", 3, "--disable-tqdm"),
)


@pytest.fixture(scope="module")
def slow() -> Iterator[Scripted]:
    with Scripted(Play(in_order=(Script(first_s=0.0, gaps_s=(0.0,)),))) as server:
        yield server


@pytest.fixture(scope="module")
def fast() -> Iterator[Scripted]:
    with Scripted(Play(in_order=(Script(first_s=0.0, gaps_s=(0.0,)),))) as server:
        yield server


def type_in(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["compare", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_the_faster_of_two_is_named_with_what_it_is_faster_by(
    slow: Scripted, fast: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    timed({slow.url: 0.004, fast.url: 0.002}, monkeypatch)
    file, page = tmp_path / "result.json", tmp_path / "page.html"
    for server in (slow, fast):
        server.forget()
    code, said = type_in(slow.url, fast.url, *SHORT, "--blocks", 4, "--save", file, "--html", page)
    assert code == 0
    assert "B is faster by" in said
    found = saved.read(file)
    assert found.figures["tpot_ratio"] == pytest.approx(0.5)
    assert found.figures["tpot_ratio_high"] == pytest.approx(0.5)
    assert found.figures["ttft_ratio_low"] == pytest.approx(1)
    assert found.figures["equal_answers"] == found.figures["answer_pairs"] == 4 * 2 * 2
    assert len(found.answers) == 4 * 4 * 2
    loads = [one.ask.name for one in found.answers[:8:2]]
    assert [name[1:] for name in loads] == [f" block 1 load {at}" for at in (1, 2, 3, 4)]
    assert "".join(name[0] for name in loads) in ("ABBA", "BAAB")
    assert compare_sections(found)
    assert "<html" in page.read_text()
    for server in (slow, fast):  # the warm-up's load, then two loads of each block
        assert len(server.log().requests) == 2 + 4 * 2 * 2


def test_ctrl_c_keeps_the_blocks_that_had_ended(
    slow: Scripted, fast: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stopped_after(2 + 4 + 1, monkeypatch)
    file = tmp_path / "result.json"
    code, said = type_in(slow.url, fast.url, *SHORT, "--blocks", 5, "--save", file)
    assert code == 130
    assert "stopped after 1 complete blocks" in said
    found = saved.read(file)
    assert found.stopped
    assert found.figures["blocks"] == 1
    assert "too few blocks" in said


def test_a_server_that_answers_nothing_ends_it_before_the_first_block(slow: Scripted):
    with Scripted(Play(in_order=(Script(fault="status", status=500),))) as broken:
        with pytest.raises(ConfigError, match=r"^B, .*: no warm-up request was answered: .*500"):
            type_in(slow.url, broken.url, *SHORT)
        code, said = type_in(slow.url, broken.url, *SHORT, "--num-warmups", 0, "--blocks", 1)
        assert code == 1
        assert "4 of B" in said


def test_each_server_gets_its_own_key(slow: Scripted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("OTHER_KEY", "secret-of-b")
    file = tmp_path / "result.json"
    code, _ = type_in(slow.url, slow.url, *SHORT, "--blocks", 1, "--key-env-b", "OTHER_KEY", "--save", file)
    assert code == 0
    details: dict[str, Any] = saved.read(file).details
    assert details["target_b"]["key"] == "given"
    assert saved.read(file).target["key"] is None
    assert "secret-of-b" not in file.read_text()


def test_prompts_of_a_file_that_come_again_are_told(slow: Scripted, tmp_path: Path):
    lines = [json.dumps({"prompt": f"question {at}", "output_tokens": 4}) for at in range(3)]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    dataset = ("--dataset-name", "custom", "--dataset-path", tmp_path / "own.jsonl")
    code, said = type_in(slow.url, slow.url, *SHORT, *dataset, "--blocks", 1)
    assert code == 0
    assert "some were repeated" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--figure", "speed"), "--figure 'speed': expected one of output_throughput"),
        (("--until", "much"), "--until 'much': expected a share such as 2%"),
        (("--until", "150%"), "--until '150%': expected a share"),
        (("--key-env-a", "NOT_SET_ANYWHERE"), "environment variable NOT_SET_ANYWHERE"),
        (("--backend-b", "openai"), "would not get the same requests"),
        (("--dataset-name", "alpaca"), "--dataset-name 'alpaca'"),
    ],
)
def test_flags_that_make_no_sense_are_named(words: tuple[str, ...], said: str):
    with pytest.raises(ConfigError, match=said):
        type_in("http://127.0.0.1:1", "http://127.0.0.1:1", *words)


def test_one_server_against_itself_is_told_of_its_cache(slow: Scripted, fast: Scripted):
    _, said = type_in(slow.url, slow.url, *SHORT, "--blocks", 1)
    assert "A and B are the same server" in said
    _, said = type_in(slow.url, fast.url, *SHORT, "--blocks", 1)
    assert "A and B are the same server" not in said
