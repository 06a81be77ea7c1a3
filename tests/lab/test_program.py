"""The programs of lab/: progress lines while they work, and one line for an error that the user can fix."""

import ast
import re
import sys
from pathlib import Path

import pytest

from lab.program import program
from redline.errors import ConfigError
from tests import forked
from tests.waiting import until

LAB = Path(__file__).parents[2] / "lab"


def test_a_program_is_heard_of_while_it_works(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("redline.progress.EVERY_S", 0.001)
    monkeypatch.setattr(sys, "argv", ["lab/some_bench.py"])
    said: list[str] = []

    def heard() -> bool:
        said.append(capsys.readouterr().err)
        return "\n" in "".join(said)

    program(lambda: until(heard) and None)
    assert re.match(r"some_bench: \d:\d\d passed\n", "".join(said))


def test_what_somebody_can_mend_is_one_line_and_code_1():
    def wrong() -> None:
        raise ConfigError("models/none: missing")

    with pytest.raises(SystemExit, match=r"^error: models/none: missing$"):
        program(wrong)


def test_ctrl_c_is_one_line_and_code_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["some_bench.py"])
    with pytest.raises(SystemExit) as end:
        program(interrupted)
    assert end.value.code == 130
    assert capsys.readouterr().err == "stopped: some_bench has saved nothing\n"


@pytest.mark.parametrize(("name", "flag"), [("soak", "--save"), ("constrained", "--out"), ("tiers", "--save")])
def test_a_result_that_could_not_be_saved_is_said_before_the_work(name: str, flag: str, tmp_path: Path):
    command = [sys.executable, "-m", f"lab.{name}", flag, str(tmp_path)]
    done = forked.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path}: is a folder; name a file in it\n"


def test_a_trial_does_not_overwrite_what_is_stored():
    """Without a file name, programs write under runs/, which git ignores; three programs read the stored results."""
    found = {path.name for path in LAB.rglob("*.py") if '"benchmarks" / "results"' in path.read_text()}
    assert found == {"speed_page.py", "op_times.py", "peers_gpu.py"}
    assert not [path for path in LAB.rglob("*.py") if re.search(r"default=.*benchmarks", path.read_text())]


def test_the_readme_has_one_line_for_each_program():
    """A program's docstring contains its command line."""
    listed = re.findall(r"^\| `python -m (lab\.[\w.]+)", (LAB / "README.md").read_text(), re.MULTILINE)
    told = {
        name
        for path in LAB.rglob("*.py")
        if (name := ".".join(path.relative_to(LAB.parent).with_suffix("").parts))
        and f"    python -m {name}" in (ast.get_docstring(ast.parse(path.read_text())) or "")
    }
    assert sorted(listed) == sorted(told)
