"""A sweep from the command line, against a scripted server."""

from pathlib import Path

import msgspec
import pytest

from redline.bench.serving import saved
from redline.bench.serving.sweep import Point, sweep_sections
from redline.errors import ConfigError
from tests.bench.serving.scripted import Scripted
from tests.cli.bench.http_verbs import BROKEN, FIRST_S, stopped_after, timed, type_in

SHORT = ("--random-input-len", 20, "--random-output-len", 20, "--num-warmups", 1)


def test_a_sweep_is_measured_kept_and_continued(server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    timed({server.url: 0.002}, monkeypatch)
    file, page = tmp_path / "result.json", tmp_path / "page.html"
    flags = (*SHORT, "--num-prompts", 8, "--goodput", "ttft:500", "--save", file, "--html", page)
    server.forget()
    code, said = type_in("sweep", server, *flags, "--max-concurrency", "1,2")
    assert code == 0
    assert "1 stream: " in said
    assert "met up to 2 streams" in said
    assert len(server.log().requests) == 2 * (8 + 1)
    before = saved.read(file)
    assert not before.stopped
    server.forget()
    code, said = type_in("sweep", server, *flags, "--max-concurrency", "1,2,4")
    assert code == 0
    assert "has 2 points" in said
    assert len(server.log().requests) == 8 + 1
    after = saved.read(file)
    points = msgspec.convert(after.details["points"], list[Point])
    assert [one.load for one in points] == [1, 2, 4]
    assert after.details["points"][:2] == before.details["points"]
    assert after.dataset["seed"] == before.dataset["seed"]
    assert points[2].output_throughput > 2 * points[0].output_throughput
    assert all(row.ttft == pytest.approx(FIRST_S) for one in points for row in one.rows)
    assert after.figures["slo_load"] == 4
    assert sweep_sections(after)
    assert "<html" in page.read_text()


def test_a_file_of_other_settings_is_refused_and_stays(server: Scripted, tmp_path: Path):
    file = tmp_path / "result.json"
    type_in("sweep", server, *SHORT, "--num-prompts", 2, "--max-concurrency", 1, "--save", file)
    held = file.read_bytes()
    with pytest.raises(ConfigError, match=r"other settings \(num_prompts\)"):
        type_in("sweep", server, *SHORT, "--num-prompts", 3, "--max-concurrency", 1, "--save", file)
    assert file.read_bytes() == held
    other = tmp_path / "other.json"
    type_in("leaderboard", server, "--input-len", 60, "--output-len", 9, "--runs", 1, "--save", other)
    with pytest.raises(ConfigError, match="contains a result of `leaderboard`"):
        type_in("sweep", server, "--save", other)


def test_a_sweep_that_is_stopped_is_continued(server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "result.json"
    flags = (*SHORT, "--num-prompts", 4, "--max-concurrency", "1,2", "--save", file)
    with monkeypatch.context() as patched:
        stopped_after(3, patched)  # a warm-up and a point, a warm-up
        code, _ = type_in("sweep", server, *flags)
    assert code == 130
    assert [one["load"] for one in saved.read(file).details["points"]] == [1]
    assert saved.read(file).stopped
    code, _ = type_in("sweep", server, *flags)
    assert code == 0
    assert [one["load"] for one in saved.read(file).details["points"]] == [1, 2]


def test_a_sweep_over_rates_keeps_to_the_schedule(server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    timed({server.url: 0.002}, monkeypatch)
    file = tmp_path / "result.json"
    type_in("sweep", server, *SHORT, "--num-prompts", 20, "--request-rate", "40", "--seed", 3, "--save", file)
    (one,) = msgspec.convert(saved.read(file).details["points"], list[Point])
    assert one.by == "requests/s"
    assert one.request_throughput == pytest.approx(40, rel=0.2)


def test_a_sweep_of_failures_is_code_1(server: Scripted):
    code, said = type_in("sweep", server, *SHORT, "--num-prompts", 2, "--max-concurrency", 1, script=BROKEN)
    assert code == 1
    assert "2 of 2" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--max-concurrency", "1", "--request-rate", "2"), "varies one of the two"),
        (("--max-concurrency", "1,x"), "expected whole numbers"),
        (("--max-concurrency", "1.5"), "expected whole numbers"),
        (("--request-rate", "0"), "expected numbers"),
        (("--search",), "set them"),
        (("--max-concurrency", "8", "--num-prompts", "4"), "is fewer than 8 streams"),
        (("--dataset-name", "poems"), "expected one of random"),
    ],
)
def test_a_wrong_sweep_is_said_in_one_line(server: Scripted, words: tuple[str, ...], said: str):
    with pytest.raises(ConfigError, match=said):
        type_in("sweep", server, *words)


def test_no_prompt_of_a_warm_up_is_measured(server: Scripted):
    """Ten prefixes give ten prompts, not the twelve requested: all ten are measured, and none is a warm-up's."""
    server.forget()
    flags = ("--dataset-name", "prefix_repetition", "--num-prompts", 10, "--num-warmups", 2, "--max-concurrency", 1)
    code, _ = type_in("sweep", server, *flags)
    assert code == 0
    assert len(server.log().requests) == 10


def test_prompts_of_a_file_that_other_loads_have_asked_are_told_and_kept(server: Scripted, tmp_path: Path):
    (tmp_path / "own.jsonl").write_text("\n".join(f'{{"prompt": "{at}", "output_tokens": 4}}' for at in range(9)))
    file = tmp_path / "result.json"
    data = ("--dataset-name", "custom", "--dataset-path", tmp_path / "own.jsonl", "--num-warmups", 0)
    flags = (*data, "--num-prompts", 4, "--save", file)
    _, said = type_in("sweep", server, *flags, "--max-concurrency", "1")
    assert "are repeated at other loads" not in said
    type_in("sweep", server, *flags, "--max-concurrency", "1,2")
    found = saved.read(file)
    assert any("are repeated at other loads" in note for note in found.notes)
    assert any("are repeated at other loads" in getattr(one, "text", "") for one in sweep_sections(found))


@pytest.mark.parametrize("verb", ["sweep", "leaderboard", "serve"])
def test_the_page_does_not_overwrite_the_result(verb: str, server: Scripted, tmp_path: Path):
    file = tmp_path / "result"
    save = ("--result-filename", file) if verb == "serve" else ("--save", file)
    server.forget()
    with pytest.raises(ConfigError, match="name another file"):
        type_in(verb, server, *save, "--html", tmp_path / "." / "result")
    assert not server.log().requests
