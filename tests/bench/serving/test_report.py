"""Saved results as sections and as one page: which are compared, their names, and which are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from redline.bench.serving import metrics, saved
from redline.bench.serving.report import compared, merged, names_of, page_of, provenance_of, sections_of
from redline.bench.serving.saved import BenchResult
from redline.bench.serving.sections import Plot, PlotMark, Series, Table, Words
from redline.cli import app
from redline.errors import ConfigError
from tests.bench.serving.answers import answer, run
from tests.bench.serving.test_page import data_of


def result(pause: float = 0.1, *, server: str = "http://127.0.0.1:1", **more: Any) -> BenchResult:
    """Four requests of five tokens, with `pause` seconds between tokens, and five times that before the first."""
    at = tuple(pause * n for n in range(5, 10))
    load = run(*(answer(n, planned=0.1 * n, at=at) for n in range(4)))
    figures = {**metrics.figures(load), "model_id": "nano", "num_prompts": 4, **more}
    return BenchResult(
        kind="serve",
        figures=figures,
        command=("redline", "bench", "serve"),
        provenance={"machine": "a chip", "versions": {"python": "3.11", "uvloop": "0.22"}},
        target={"base_url": server, "model": "nano"},
        answers=load.answers,
    )


def plots(sections: list[Any]) -> dict[str, Plot]:
    return {section.title: section for section in sections if isinstance(section, Plot)}


def test_loads_stand_beside_one_another_in_a_table_and_in_plots():
    slow, fast = result(0.2, label="slow"), result(0.1, label="fast")
    found = compared([("a", slow), ("b", fast)])
    table = found[0]
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == ["slow", "fast"]
    place = table.columns.index("TTFT median, ms")
    assert [row[place] for row in table.rows] == ["1,000.0", "500.0"]
    trade = plots(found)["Throughput and interactivity"]
    assert [one.x[0] for one in trade.series] == pytest.approx([5, 10])  # 1 / TPOT
    ttft = plots(found)["Time to first token (TTFT)"]
    assert [one.name for one in ttft.series] == ["slow", "fast"]
    assert [one.x[-1] for one in ttft.series] == pytest.approx([1000, 500])
    assert [(one.y[0], one.y[-1]) for one in ttft.series] == [(0, 100)] * 2


def test_one_load_is_compared_with_nothing_and_other_kinds_only_with_their_own():
    assert compared([("a", result())]) == []
    assert compared([("a", result(server="http://a:1")), ("b", BenchResult(kind="accept", figures={}))]) == []


def test_the_page_of_several_has_what_is_compared_then_each_then_where_it_is_from():
    data = data_of(page_of([("a", result(0.2)), ("b", result(0.1))]))
    headings = [section["text"] for section in data["sections"] if section["type"] == "Heading"]
    assert headings == ["Comparison", "a", "b", "Where the numbers come from"]
    origins = data["sections"][-1]
    assert origins["columns"] == ["", "command", "server", "machine", "versions"]
    assert origins["rows"][0] == [
        "a",
        "redline bench serve",
        "nano at http://127.0.0.1:1",
        "a chip",
        "python 3.11, uvloop 0.22",
    ]


def test_the_page_of_one_says_at_its_foot_where_it_is_from():
    one = result()
    data = data_of(page_of([("a", one)]))
    assert data["title"] == "redline bench serve: nano"
    assert [tuple(pair) for pair in data["provenance"]] == provenance_of(one)
    assert not [section for section in data["sections"] if section["type"] == "Heading"]


def test_results_are_called_by_what_tells_them_apart():
    two_servers = [("f", result(server="http://a:1")), ("g", result(server="http://b:1"))]
    assert names_of(two_servers) == ["http://a:1", "http://b:1"]
    assert names_of([("f", result(label="x")), ("g", result(label="y"))]) == ["x", "y"]
    assert names_of([("f", result(label="x")), ("g", result())]) == ["f", "g"]  # one of them has no label
    assert names_of([("f", result()), ("f", result())]) == ["f (1)", "f (2)"]


def test_plots_that_every_result_has_become_one():
    def part(name: str, y: float) -> tuple[str, list[Any]]:
        series = (Series(name="p50", x=(1.0,), y=(y,)), Series(name="p99", x=(1.0,), y=(2 * y,)))
        marks = (PlotMark(text="SLO", y=300.0), PlotMark(text="kept", x=1.0, y=y))
        both = Plot(title="TTFT", x_label="streams", y_label="ms", series=series, marks=marks)
        alone = Plot(title="The frontier", x_label="s", y_label=f"of {name}", series=(series[0],))
        return name, [Words(text="said"), both, alone]

    found = list(merged([part("A", 1.0), part("B", 2.0)]))
    assert [plot.title for plot in found] == ["TTFT"]  # the axes of the other plot differ
    assert [one.name for one in found[0].series] == ["A: p50", "A: p99", "B: p50", "B: p99"]
    assert [mark.text for mark in found[0].marks] == ["SLO", "A: kept", "B: kept"]


def test_an_unknown_kind_and_a_result_without_its_details_are_refused():
    with pytest.raises(ConfigError, match="kind 'dance': expected one of serve, vllm"):
        sections_of(BenchResult(kind="dance", figures={}))
    with pytest.raises(ConfigError, match="is incomplete: 'completed'"):
        sections_of(BenchResult(kind="serve", figures={}))


def test_the_verb_prints_tables_and_writes_a_page(tmp_path: Path):
    ours, theirs, page = tmp_path / "ours.json", tmp_path / "theirs.json", tmp_path / "page.html"
    saved.save(ours, result())
    figures = {"duration": 2.0, "completed": 4, "model_id": "nano", "output_throughput": 11.5, "median_tpot_ms": 80.0}
    theirs.write_text(json.dumps(figures))
    done = CliRunner().invoke(app, ["bench", "report", str(ours), str(theirs), "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert "All of them" in done.output
    assert "11.5" in done.output
    assert f"written to {page}" in done.output.replace("\n", "")
    sections = data_of(page.read_text())["sections"]
    assert sections[0] == {"type": "Heading", "text": "Comparison"}
    trade = next(section for section in sections if section.get("title", "").startswith("Throughput and interactivity"))
    assert [one["x"][0] for one in trade["series"]] == pytest.approx([10.0, 12.5])


def test_a_file_that_is_no_result_is_refused_before_anything_is_written(tmp_path: Path):
    other, page = tmp_path / "other.json", tmp_path / "page.html"
    other.write_text("[]")
    done = CliRunner().invoke(app, ["bench", "report", str(other), "--html", str(page)])
    assert isinstance(done.exception, ConfigError)
    assert str(other) in str(done.exception)
    assert not page.exists()


def test_a_result_whose_figures_are_no_numbers_is_an_error_in_one_line(tmp_path: Path):
    other = tmp_path / "other.json"
    other.write_text('{"duration": "long", "completed": "many", "model_id": 3}')
    done = CliRunner().invoke(app, ["bench", "report", str(other)])
    assert isinstance(done.exception, ConfigError)


def test_a_page_does_not_overwrite_a_result_that_it_shows(tmp_path: Path):
    other = tmp_path / "other.json"
    other.write_text("[]")
    done = CliRunner().invoke(app, ["bench", "report", str(other), "--html", str(tmp_path / "." / "other.json")])
    assert "name another file" in str(done.exception)
