"""Which small bugs are written, which tests are run for them, and what is said of one that they do not see."""

import ast
import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from redline.bench.mutation.mutants import Mutant, mutants
from redline.bench.mutation.mutate import (
    NAMED,
    Found,
    Suite,
    Tree,
    again,
    drawn,
    main,
    read_journal,
    room,
    sources,
    summary,
)

ROOT = Path(__file__).parents[2]

PYTHON = '''"""3 words are 3 words."""

def middle(low: int, high: int = 9) -> int:
    if not low <= high:
        raise ValueError(f"{low + 1} is too much")
    log.warning("1 and 2")
    note(low)  # 4 > 3
    return low + (
        # half of it, 2 > 1
        (high - low) // 2
    )


def bounded(x: Annotated[int, Meta(ge=3)], y: list[int]) -> object:
    return (x + 1).detach() and -(x)
'''

CUDA = """// 3 < 4
#ifdef REDLINE_EMULATE
  int a = 1;
#else
  int b = 2;
#endif
__global__ __launch_bounds__(256) void sum(const float* x_T, float* y_T, int count) {
    for (int t = threadIdx.x; t < count; t += 32) {
        y_T[t] = max(x_T[t] * 2, y_T[t]);  // 5 < 6
    }
    if (!done && count > 0) settle(y_T);
}
"""


def found(folder: Path, name: str, text: str) -> set[tuple[str, str]]:
    (folder / name).write_text(text)
    return {(mutant.before, mutant.after) for mutant in mutants(folder, name)}


def test_bugs_are_written_into_what_a_program_computes_with(tmp_path: Path):
    assert found(tmp_path, "a.py", PYTHON) == {
        *(("9", "10"), ("9", "8"), ("not", ""), ("<=", "<"), ("note(low)", "pass"), ("+", "-"), ("-", "+")),
        *(("//", "*"), ("2", "3"), ("2", "1"), ("3", "4"), ("3", "2"), ("1", "2"), (".detach()", "")),
        *(("and", "or"), ("-", "")),
    }


def test_bugs_are_written_into_what_the_emulator_compiles(tmp_path: Path):
    assert found(tmp_path, "a.cu", CUDA) == {
        *(("1", "2"), ("<", "<="), ("+", "-"), ("32", "33"), ("max", "min"), ("*", "+"), ("2", "3")),
        *(("!", ""), ("&&", "||"), (">", ">="), ("0", "1")),
        ("y_T[t] = max(x_T[t] * 2, y_T[t]);", ";"),
    }


@pytest.mark.parametrize(
    "file", ["redline/plan/speculation.py", "redline/api/openai.py", "redline/draft/train/losses.py"]
)
def test_bugs_of_a_file_are_programs(file: str):
    source = (ROOT / file).read_bytes()
    written = mutants(ROOT, file)
    assert len(written) > 30
    assert len({mutant.id for mutant in written}) == len(written)
    for mutant in written[::3]:
        ast.parse(mutant.apply(source))


def test_a_mutant_is_known_by_its_text_wherever_it_moves(tmp_path: Path):
    (tmp_path / "a.py").write_text("x = 1\nif x < 2:\n    y = 2\n")
    before = {mutant.id: mutant for mutant in mutants(tmp_path, "a.py")}
    (tmp_path / "a.py").write_text("z = None\nx = 1\nif x < 2:\n    y = 2\n")
    after = {mutant.id: mutant for mutant in mutants(tmp_path, "a.py")}
    assert set(before) == set(after)
    assert all(after[id].line == before[id].line + 1 for id in before)
    with pytest.raises(AssertionError, match="has changed"):
        next(iter(before.values())).apply(b"something else")


def test_every_room_and_its_kernels_are_drawn_from():
    some = drawn(ROOT, 100, seed=5)
    rooms = Counter(room(mutant.file) for mutant in some)
    assert mutants(ROOT, "redline/clock.py") == [], "nothing in it can be wrong in such a way"
    assert set(rooms) == {room(file) for file in sources(ROOT)} - {"__init__", "clock"}
    assert 95 <= sum(rooms.values()) <= 106
    assert rooms["cuda"] >= 5
    assert rooms["cpu"] >= 5
    lines = [(mutant.file, mutant.line) for mutant in some]
    assert len(set(lines)) == len(lines)
    assert {mutant.file for mutant in drawn(ROOT, 10, 0, ["plan/prefix.py"])} == {"redline/plan/prefix.py"}


def test_the_nearest_tests_come_first():
    suite = Suite(ROOT, Path("nowhere"))
    assert suite.nearest("redline/plan/prefix.py")[0] == "tests/plan/test_prefix.py"
    assert "tests/laws/test_law_3_the_cache_changes_nothing.py" in suite.nearest("redline/plan/prefix.py")
    assert suite.nearest("redline/kernels/hopper/decode/attend.cu")[:2] == [
        "tests/kernels/hopper/test_attend_together.py",
        "tests/kernels/hopper/test_cuda_attention.py",
    ], "those of its room before a timing program's"
    assert "tests/laws/test_law_1_kernel_is_reference.py" in suite.nearest("redline/kernels/cpu/moe.cpp")[:2]
    suite.seconds = {"a": 50.0, "b": 40.0, "c": 5.0}
    assert suite.within(["a", "b", "c"], 60) == ["a", "c"]
    assert suite.within(["a"], 1) == ["a"], "one at least"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of one function, whose test sees that it adds and not what happens to 0."""
    root = tmp_path / "root"
    for folder in ("redline/plan", "tests/plan"):
        (root / folder).mkdir(parents=True)
        (root / folder / "__init__.py").touch()
    (root / "redline/plan/add.py").write_text(
        "def add(a, b):\n    if a < 0:\n        return 0\n    while b > 0:\n        a, b = a + 1, b - 1\n    return a\n"
    )
    (root / "tests/plan/test_add.py").write_text(
        "from redline.plan.add import add\ndef test_it():\n    assert add(1, 2) == 3\ndef test_no():\n    assert 0\n"
    )
    for words in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    return root


@pytest.mark.slow
def test_what_becomes_of_a_mutant(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("redline.bench.mutation.mutate.SLACK_S", 5.0)
    monkeypatch.setattr("redline.bench.mutation.mutate.PATIENCE", 1.0)
    (tmp_path / "tree").mkdir()
    tree = Tree(project, tmp_path / "tree", tmp_path / "cache")
    suite = Suite(project, tmp_path / "tests.json")
    chosen = {
        f"{mutant.before} {mutant.line}": mutant
        for mutant in mutants(project, "redline/plan/add.py")
        if (mutant.before, mutant.line) in {("+", 5), ("<", 2), ("-", 5)}
    }
    outcomes = {place: tree.try_out(mutant, suite, 60) for place, mutant in chosen.items()}
    assert {place: one.outcome for place, one in outcomes.items()} == {"+ 5": "killed", "< 2": "lived", "- 5": "hung"}
    assert "test_it" in outcomes["+ 5"].by
    assert outcomes["< 2"].diff == "-    if a < 0:\n+    if a <= 0:"
    assert suite.failing == {"tests/plan/test_add.py::test_no"}, "a test that fails anyway sees nothing"
    assert Suite(project, tmp_path / "tests.json").seconds == suite.seconds
    assert (tree.project / "redline/plan/add.py").read_bytes() == (project / "redline/plan/add.py").read_bytes()


@pytest.mark.slow
def test_a_test_file_that_hangs_without_a_bug_sees_none(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is measured behind one that leaves a report, and it is the nearest."""
    monkeypatch.setattr("redline.bench.mutation.mutate.HANGS_S", 5.0)
    for name, text in (("add_hangs", "import time\ntime.sleep(60)\n"), ("other", "def test_it():\n    assert True\n")):
        (project / f"tests/plan/test_{name}.py").write_text(text)
    subprocess.run(["git", "add", "-A"], cwd=project, check=True)
    (tmp_path / "tree").mkdir()
    tree = Tree(project, tmp_path / "tree", tmp_path / "cache")
    suite = Suite(project, tmp_path / "tests.json")
    suite.measure(tree, ["tests/plan/test_add.py", "tests/plan/test_add_hangs.py"])
    assert suite.failing == {"tests/plan/test_add.py::test_no", "tests/plan/test_add_hangs.py"}
    plus = next(
        mutant for mutant in mutants(project, "redline/plan/add.py") if (mutant.before, mutant.line) == ("+", 5)
    )
    found = tree.try_out(plus, suite, 60)
    assert (found.outcome, "test_it" in found.by) == ("killed", True)


def test_a_search_in_which_no_mutant_is_tried_ends_with_its_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("redline.bench.mutation.mutate.RUNS", tmp_path)
    journal = tmp_path / "journal"
    journal.touch()
    assert main(["--again", str(journal)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 of 0 killed"


def test_an_earlier_search_is_found_again_by_the_text_of_its_mutants(tmp_path: Path):
    (tmp_path / "a.py").write_text("x = 1 + y\nz = 5\n")
    drawn_then = mutants(tmp_path, "a.py")
    lines = [Found(one.id, one.file, one.line, one.kind, "", "lived", "", 1.0)._asdict() for one in drawn_then]
    (tmp_path / "journal").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "a.py").write_text("w = 0\nx = 1 + y\n")
    now = list(again(tmp_path, tmp_path / "journal"))
    assert {(one.line, one.after) for one in now if isinstance(one, Mutant)} == {(2, "2"), (2, "-")}
    assert {one.outcome for one in now if isinstance(one, Found)} == {"gone"}
    assert len(now) == len(drawn_then)


def test_a_search_is_summed_up(tmp_path: Path):
    def one(outcome: str, file: str) -> Found:
        return Found(f"{file}:{outcome}", file, 1, "compare", "-a\n+b", outcome, "", 1.0)

    results = [
        one("killed", "redline/plan/a.py"),
        one("hung", "redline/plan/b.py"),
        one("lived", "redline/kernels/hopper/c.cu"),
    ]
    journal = tmp_path / "journal"
    journal.write_text("".join(json.dumps(result._asdict()) + "\n" for result in results))
    assert read_journal(journal) == results
    told = summary([*results, one("gone", "redline/api/d.py")])
    assert (told["mutants"], told["killed"], told["killed_share"]) == (3, 2, 0.667)
    assert told["by_room"] == {"cuda": {"lived": 1}, "plan": {"killed": 1, "hung": 1}}
    assert [lived["file"] for lived in told["lived"]] == ["redline/kernels/hopper/c.cu"]
    assert told["gone"] == ["redline/api/d.py:gone"]


def test_the_first_survivors_are_of_files_that_are_there():
    assert all((ROOT / file).exists() for file, _, _ in NAMED)
    assert len({Mutant(file, 0, "named", 0, 0, before, after, before).id for file, before, after in NAMED}) == len(
        NAMED
    )
