"""A name is resolved to a tree, and a tree is served: the running code is that tree's, and no folder is left over."""

import http.client
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lab import trees
from lab.trees import ROOT, Tree, opened, served
from redline.errors import ConfigError, RedlineError
from tests.lab.fake_tree import commit_all, fake_model, fake_tree
from tests.waiting import LIMIT_S


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A fake checkout in place of this one, and its commit."""
    folder = fake_tree(tmp_path / "repository")
    fake_model(folder / "models" / "small")
    commit = commit_all(folder)
    monkeypatch.setattr(trees, "ROOT", folder)
    monkeypatch.delenv("REDLINE_COMMIT", raising=False)
    return folder, commit


def worktrees(repository: Path) -> list[str]:
    listed = subprocess.run(["git", "-C", repository, "worktree", "list"], capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def test_a_commits_files_lie_in_a_folder_of_their_own_until_the_end(repository: tuple[Path, str]):
    folder, commit = repository
    changed = folder / "redline" / "__main__.py"
    changed.write_text(changed.read_text() + "# changed\n")
    with opened(["HEAD", str(folder), "HEAD"]) as (head, here, again):
        assert (head.commit, here.commit) == (commit, f"{commit}+")
        assert again == head, "two names of one tree give one tree"
        assert here.folder == folder
        assert "# changed" not in (head.folder / "redline" / "__main__.py").read_text()
        assert head.model("models/small") == head.folder / "models" / "small"
        assert len(worktrees(folder)) == 2
        left = head.folder
    assert not left.exists()
    assert len(worktrees(folder)) == 1


def test_a_tree_without_models_gets_those_of_this_checkout(repository: tuple[Path, str], tmp_path: Path):
    folder, _ = repository
    tree = Tree("old", fake_tree(tmp_path / "old"), "")
    assert tree.model("models/small") == folder / "models" / "small"
    with pytest.raises(ConfigError, match=r"^models/none: no model here"):
        tree.model("models/none")


def test_a_name_that_is_no_tree_is_one_clear_line(repository: tuple[Path, str], tmp_path: Path):
    with (
        pytest.raises(ConfigError, match=r"^nothing: neither a commit of this repository nor a folder$"),
        opened(["nothing"]),
    ):
        pass
    with (
        pytest.raises(ConfigError, match=r"no copy of Redline \(redline/__main__.py is missing\)$"),
        opened([str(tmp_path)]),
    ):
        pass


def test_the_code_that_runs_is_the_trees_and_no_installed_copy(tmp_path: Path):
    folder = fake_tree(tmp_path / "tree")
    with opened([str(folder)]) as (tree,):
        told = subprocess.run(
            [sys.executable, "-m", "redline", "--help"], cwd="/", env=tree.environment(), capture_output=True, text=True
        )
        assert told.stdout == "--kv-dtype bf16|float32\n"


def test_servers_of_two_trees_answer_side_by_side_and_end(tmp_path: Path):
    pair = [Tree(name, fake_tree(tmp_path / name), "") for name in ("one", "other")]
    with served(pair, [["model"], ["model"]]) as servers:
        for server in servers:
            link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)
            link.request("GET", "/v1/models")
            assert link.getresponse().status == 200
            link.close()
            server.check()
        processes = [server.process for server in servers]
        processes[0].kill()
        processes[0].wait()
        with pytest.raises(RedlineError, match=r"^the server of one has ended with status -9"):
            servers[0].check()
    assert all(process.poll() is not None for process in processes)


def test_a_server_that_does_not_start_says_why(tmp_path: Path):
    folder = fake_tree(tmp_path / "broken")
    (folder / "redline" / "__main__.py").write_text("print('no memory today'); raise SystemExit(1)")
    with (
        pytest.raises(RedlineError, match=r"^the server of broken did not start: no memory today$"),
        served([Tree("broken", folder, "")], [["model"]]),
    ):
        pass


def test_sigterm_leaves_neither_a_server_nor_a_folder(repository: tuple[Path, str]):
    folder, _ = repository
    program = (
        "import os, sys; from pathlib import Path; from lab import trees\n"
        "trees.ROOT = Path(sys.argv[1])\n"
        "with trees.opened(['HEAD']) as found, trees.served(found, [['model']]) as (server,):\n"
        "    print(found[0].folder, server.process.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        left, server = running.stdout.readline().split()
        running.send_signal(signal.SIGTERM)
        assert running.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert not Path(left).exists()
    assert len(worktrees(folder)) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(server), 0)
