"""The commit of a result, with and without git; and the commits in stored results."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.program import program
from lab.trees import commit_of
from redline.bench.record import commit, provenance
from redline.errors import ConfigError
from tests.lab.fake_tree import commit_all, fake_tree

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_a_commit_has_a_sign_where_its_files_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = fake_tree(tmp_path / "repository")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("REDLINE_COMMIT", raising=False)
    made = commit_all(folder)
    assert (commit(), commit_of(folder)) == (made, made)
    with (folder / "redline" / "__main__.py").open("a") as file:
        file.write("# changed\n")
    assert (commit(), commit_of(folder)) == (f"{made}+", f"{made}+")


def test_without_git_a_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("REDLINE_COMMIT", raising=False)
    assert (commit(), commit_of(tmp_path)) == ("unknown", "unknown")


def test_a_git_that_takes_too_long_cannot_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def slow(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 1.0)

    monkeypatch.setattr(subprocess, "run", slow)
    monkeypatch.delenv("REDLINE_COMMIT", raising=False)
    assert (commit(), commit_of(tmp_path)) == ("unknown", "unknown")
    monkeypatch.setenv("REDLINE_COMMIT", "abc1234+")
    assert commit_of(tmp_path) == "abc1234+"


@pytest.mark.parametrize("told", ["7xxxxxx", "abc123", "HEAD", "abc1234 abc1234", "abc1234++"])
def test_a_placeholder_is_no_commit_and_nothing_is_measured_for_it(told: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REDLINE_COMMIT", told)
    with pytest.raises(ConfigError, match=f"REDLINE_COMMIT is {re.escape(repr(told))}; expected a commit hash"):
        provenance()
    with pytest.raises(SystemExit, match="REDLINE_COMMIT is"):
        program(lambda: pytest.fail("the program has begun"), heard=False)


@pytest.mark.parametrize("told", ["abc1234", "abc1234+", "0123456789abcdef0123456789abcdef01234567", "unknown"])
def test_a_told_commit_is_stored_as_it_is(told: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REDLINE_COMMIT", told)
    assert provenance()["commit"] == told


def test_every_stored_result_names_the_commits_that_it_is_of():
    """A hash, with "+" if files had changed; one result covers several commits, "A to B"."""
    names = {path.name: list(commits(json.loads(path.read_bytes()))) for path in RESULTS.glob("*.json")}
    assert len(names) > 50
    assert [name for name, found in names.items() if not found] == []
    wrong = {
        name: found
        for name, found in names.items()
        if not all(re.fullmatch(r"[0-9a-f]{7,40}\+?( to [0-9a-f]{7,40})?", each) for each in found)
    }
    assert wrong == {}


def commits(value: Any) -> Iterator[str]:
    """All values of keys named "commit" in a result, at any depth."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name == "commit":
                yield str(each)
            yield from commits(each)
    elif isinstance(value, list):
        for each in value:
            yield from commits(each)
