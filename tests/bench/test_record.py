"""Where a number comes from, where git can tell and where it cannot."""

import subprocess
from pathlib import Path

import pytest

from redline.bench.record import commit
from redline.bench.runs.trees import commit_of
from tests.bench.runs.fake_tree import commit_all, fake_tree


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
    monkeypatch.setenv("REDLINE_COMMIT", "told")
    assert commit_of(tmp_path) == "told"
