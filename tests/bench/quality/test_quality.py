"""The figures that an evaluation reports, for a checkpoint with fixed answers."""

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from redline.bench.quality.prompts import EvalPrompt, ModelAnswer
from redline.bench.quality.quality import EvalComparison, EvalReport, caption, compare, grade_all, judge, table
from redline.chat.lines import Turn
from redline.errors import ConfigError

DOUBLE = {"asserts": {"function": "double", "code": "assert double(3) == 6"}}


def ask(kind: str, question: str, check: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "messages": [{"role": "user", "content": question}], "check": check}


def write_sets(folder: Path, **sets: list[dict[str, Any]]) -> Path:
    (folder / "eval").mkdir(parents=True)
    for name, prompts in sets.items():
        (folder / "eval" / f"{name}.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


class Rote:
    """Looks its answers up by the question."""

    fingerprint = "rote"

    def __init__(self, answers: dict[str, ModelAnswer]) -> None:
        self.answers = answers

    def answer(self, prompts: Sequence[EvalPrompt], done: Callable[[], None]) -> list[ModelAnswer]:
        for _ in prompts:
            done()
        return [self.answers[prompt.messages[-1].content or ""] for prompt in prompts]


def opener(**by_folder: dict[str, str]) -> Callable[[Path], Any]:
    @contextmanager
    def open_checkpoint(folder: Path) -> Iterator[Rote]:
        known = by_folder[folder.name]
        yield Rote({question: ModelAnswer(content=content, tokens=7) for question, content in known.items()})

    return open_checkpoint


def test_a_table_has_a_row_per_set_and_kind_and_a_total_with_targets(tmp_path: Path) -> None:
    folder = write_sets(
        tmp_path / "ours",
        values=[
            ask("add", "1+1", {"number": 2}),
            ask("add", "1+2", {"number": 3}),
            ask("fact", "capital", {"equals": "Oslo"}),
        ],
        hand=[ask("chat", "hello", {"contains": ["hello"]})],
    )
    (folder / "eval" / "targets.json").write_text('{"values": {"add": 90}, "hand": {"all": 70}}')
    report = grade_all(folder, opener(ours={"1+1": "2", "1+2": "4", "capital": "Oslo.", "hello": "Hello!"}))
    found = {(row.set, row.kind): (row.prompts, row.right, row.met) for row in report.rows}
    assert found == {
        ("hand", "all"): (1, 1, True),
        ("hand", "chat"): (1, 1, None),
        ("values", "add"): (2, 1, False),
        ("values", "fact"): (1, 1, None),
        ("values", "all"): (3, 2, None),
    }
    assert report.generated_tokens == 28
    console = Console(record=True, width=100)
    console.print(table(report))
    console.print(caption(report))
    shown = console.export_text()
    assert "50.0" in shown
    assert "28 tokens generated" in shown
    assert msgspec.json.decode(msgspec.json.encode(report), type=EvalReport) == report


def test_functions_are_graded_only_when_code_may_run(tmp_path: Path) -> None:
    folder = write_sets(tmp_path / "ours", values=[ask("code", "double", DOUBLE), ask("add", "1+1", {"number": 2})])
    answers = opener(ours={"double": "def double(x): return 2 * x", "1+1": "2"})
    careful, running = grade_all(folder, answers), grade_all(folder, answers, run_code=True)
    assert careful.not_run == 1
    assert [row.kind for row in careful.rows] == ["add", "all"]
    assert running.not_run == 0
    assert [(row.kind, row.right) for row in running.rows] == [("add", 1), ("code", 1), ("all", 2)]


def test_prompts_that_are_too_long_are_said_beside_the_figures(tmp_path: Path) -> None:
    folder = write_sets(tmp_path / "ours", values=[ask("add", "1+1", {"number": 2})])
    opened = opener(ours={"1+1": ""})

    @contextmanager
    def refusing(folder: Path) -> Iterator[Rote]:
        with opened(folder) as rote:
            rote.answers = {"1+1": ModelAnswer(content="", finish="error")}
            yield rote

    report = grade_all(folder, refusing)
    assert (report.refused, report.rows[-1].right) == (1, 0)
    assert "1 prompts were rejected" in caption(report)
    assert "not answered" not in caption(grade_all(folder, opened))


def test_two_checkpoints_are_compared_pair_by_pair(tmp_path: Path) -> None:
    ours = write_sets(tmp_path / "ours", values=[ask("add", f"{i}", {"number": 1}) for i in range(10)])
    right_here, right_there = {0, 1, 2, 3, 4, 5}, {0, 1, 2, 6}
    answers = opener(
        ours={f"{i}": "1" if i in right_here else "0" for i in range(10)},
        theirs={f"{i}": "1" if i in right_there else "0" for i in range(10)},
    )
    counted: list[tuple[int, int]] = []
    report = grade_all(
        ours, answers, against=tmp_path / "theirs", progress=lambda done, total: counted.append((done, total))
    )
    assert report.comparison == EvalComparison(prompts=10, both=3, only_ours=3, only_theirs=1)
    assert report.comparison.difference == pytest.approx(20)
    assert counted[-1] == (20, 20)
    with pytest.raises(ValueError, match="shorter"):
        compare(report.verdicts, report.verdicts[1:])


def test_the_interval_is_that_of_agresti_and_min() -> None:
    # b* = 16.5, c* = 4.5, n* = 102: 12 / 102 = 0.1176, and 1.96 sqrt(21 - 144 / 102) / 102 = 0.0850.
    pairs = EvalComparison(prompts=100, both=50, only_ours=16, only_theirs=4)
    low, high = pairs.interval
    assert low == pytest.approx(3.26, abs=0.01)
    assert high == pytest.approx(20.27, abs=0.01)
    same = EvalComparison(prompts=1000, both=900, only_ours=0, only_theirs=0).interval
    assert same[0] == pytest.approx(-same[1])


def test_more_pairs_narrow_the_interval() -> None:
    few = EvalComparison(prompts=100, both=90, only_ours=3, only_theirs=2).interval
    many = EvalComparison(prompts=1000, both=900, only_ours=30, only_theirs=20).interval
    assert many[1] - many[0] < (few[1] - few[0]) / 2


def test_a_folder_without_sets_is_told_to_name_them(tmp_path: Path) -> None:
    def never(folder: Path) -> Any:
        raise AssertionError("opened")

    with pytest.raises(ConfigError, match=r"eval: no evaluation sets; name their folder with --sets"):
        grade_all(tmp_path, never)


def test_sets_may_be_named_within_those_of_the_model(tmp_path: Path) -> None:
    folder = write_sets(tmp_path / "ours", values=[ask("add", "1+1", {"number": 2})])
    (folder / "eval" / "vision").mkdir()
    (folder / "eval" / "vision" / "drawn.jsonl").write_text(json.dumps(ask("shape", "2+2", {"number": 4})))
    [row, _] = grade_all(folder, opener(ours={"2+2": "4"}), sets=Path("vision")).rows
    assert (row.set, row.kind, row.right) == ("drawn", "shape", 1)
    [row, _] = grade_all(folder, opener(ours={"1+1": "2"})).rows
    assert (row.set, row.right) == ("values", 1)


def test_a_set_may_lie_in_parts_and_compressed(tmp_path: Path) -> None:
    folder = write_sets(tmp_path / "ours", values=[ask("add", "1+1", {"number": 2})])
    line = json.dumps(ask("add", "1+2", {"number": 3})).encode()
    (folder / "eval" / "values.long.jsonl.gz").write_bytes(gzip.compress(line))
    [row, _] = grade_all(folder, opener(ours={"1+1": "2", "1+2": "3"})).rows
    assert (row.set, row.prompts, row.right) == ("values", 2, 2)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    folder = write_sets(tmp_path / "ours", values=[ask("add", "1+1", {"number": 2}), {"kind": "add"}])
    with pytest.raises(ConfigError, match=r"values\.jsonl, line 2: .*messages"):
        grade_all(folder, opener(ours={}))
    with pytest.raises(ConfigError, match="no evaluation sets"):
        grade_all(tmp_path, opener())


def test_tool_calls_are_graded_with_the_words() -> None:
    check = {"tool_calls": [{"name": "f", "arguments": {"x": 1}}]}
    prompt = EvalPrompt(kind="tool", messages=(Turn(role="user", content="go"),), check=check)
    right = ModelAnswer(content="", tool_calls=(("f", '{"x":1}'),))
    wrong = ModelAnswer(content='f({"x":1})')
    assert [verdict.ok for verdict in judge({"hand": [prompt, prompt]}, [right, wrong], False)] == [True, False]
