"""Copies of the project for comparisons: a commit or a folder becomes a tree, and a tree is served.

Only the command line of a tree (`python -m redline`) and HTTP are used, so it may be of any commit. Models are the
tree's own if it has them, otherwise those of this checkout.
"""

import http.client
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from redline import clock
from redline.bench.record import told_commit
from redline.errors import ConfigError, RedlineError

ROOT = Path(__file__).parents[1]
MODEL = "models/kimi-nano"
START_S = 300.0  # seconds; a tree's kernels may have to be compiled first
END_S = 20.0  # seconds from SIGTERM to the server's end
KNOCK_S = 5.0  # timeout in seconds of a health check
OPEN_FILES = 1024  # open files of the server, the limit of a login shell
GIT_S = 60.0
TOLD_TRACEBACKS = 4


class Tree(NamedTuple):
    """A copy of the project. name: as given by the user. commit: with "+" if the folder has changes."""

    name: str
    folder: Path
    commit: str

    def model(self, path: str) -> Path:
        """The folder of a model: the tree's own, or this checkout's if the tree has none.

        Raises ConfigError if neither has it.
        """
        for folder in (self.folder / path, ROOT / path):
            if (folder / "config.json").exists():
                return folder
        raise ConfigError(f"{path}: no model here (config.json is missing), neither in {self.name} nor in {ROOT}")

    def environment(self) -> dict[str, str]:
        """The environment of a process that runs this tree's code."""
        commit = {"REDLINE_COMMIT": self.commit}
        return {**os.environ, **commit, "PYTHONPATH": str(self.folder), "PYTHONUNBUFFERED": "1"}


@contextmanager
def opened(names: Sequence[str]) -> Generator[list[Tree]]:
    """The trees of commits, branches or folders. A commit's files are in a temporary folder until the end.

    Raises ConfigError for a name that is neither a commit nor a folder, or does not contain Redline.
    """
    with ExitStack() as stack:
        stack.enter_context(ended_by_a_signal())
        trees = {name: stack.enter_context(_tree(name)) for name in dict.fromkeys(names)}
        yield [trees[name] for name in names]


@contextmanager
def _tree(name: str) -> Generator[Tree]:
    path = Path(name)
    commit = "" if path.is_absolute() or name.startswith(".") else _commit(name)
    if not commit:
        if not path.is_dir():
            raise ConfigError(f"{name}: neither a commit of this repository nor a folder")
        yield _checked(Tree(name, path.resolve(), commit_of(path)))
        return
    with tempfile.TemporaryDirectory(prefix="redline-tree-") as place:
        folder = Path(place) / commit
        try:
            _git("worktree", "add", "--detach", "--quiet", str(folder), commit)
            yield _checked(Tree(name, folder, commit))
        finally:
            with suppress(ConfigError):  # a worktree that was not added
                _git("worktree", "remove", "--force", str(folder))


def _checked(tree: Tree) -> Tree:
    """The tree, after a check that Python imports the tree's code, and not an installed copy."""
    if not (tree.folder / "redline" / "__main__.py").is_file():
        raise ConfigError(f"{tree.name}: no copy of Redline (redline/__main__.py is missing)")
    told = subprocess.run(
        [sys.executable, "-c", "from importlib.util import find_spec; print(find_spec('redline.__main__').origin)"],
        cwd=tree.folder,
        env=tree.environment(),
        capture_output=True,
        text=True,
        timeout=GIT_S,
    )
    found = Path(told.stdout.strip())
    if not found.is_relative_to(tree.folder):
        raise ConfigError(f"{tree.name}: Python would run {found or told.stderr} in its place")
    return tree


def _commit(name: str) -> str:
    """The short hash, or empty if the name is not a commit of this repository."""
    try:
        return _git("rev-parse", "--short", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except ConfigError:
        return ""


def _git(*arguments: str, tree: Path | None = None) -> str:
    """The output of git for a folder, or for this checkout. Raises ConfigError if it fails, or takes
    longer than GIT_S.
    """
    command = ["git", "-C", str(tree or ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_S)
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"git {arguments[0]}: {(error.stderr.strip() or 'failed').splitlines()[-1]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"git {arguments[0]}: {error}") from None
    return done.stdout.strip()


def commit_of(tree: Path) -> str:
    """The short hash of a folder's HEAD, with "+" if it has changes; "unknown" if git fails.

    REDLINE_COMMIT in the environment replaces it.
    """
    if told := told_commit():
        return told
    try:
        commit = _git("rev-parse", "--short", "HEAD", tree=tree)
        return commit + ("+" if _git("status", "--porcelain", "-uno", tree=tree) else "")
    except ConfigError:
        return "unknown"


@contextmanager
def ended_by_a_signal() -> Generator[None]:
    """SIGTERM and SIGHUP raise an exception, so that servers and folders are cleaned up."""

    def unwind(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, unwind) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class End(NamedTuple):
    """How a server ended. seconds: since SIGTERM. code: its exit status; None if it had to be killed.

    tracebacks: how many its output has. first_tracebacks: the first few, with the lines around them.
    """

    seconds: float
    code: int | None
    tracebacks: int
    first_tracebacks: list[str]
    last_words: str


class Server:
    """`redline serve` of a tree, in its own process group, and its output."""

    def __init__(
        self,
        tree: Tree,
        arguments: Sequence[str],
        folder: Path,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the process, and does not wait for it. folder: for a file of the server's output.

        environment: in addition to the tree's.
        """
        self.tree = tree
        self.port = free_port()
        with tempfile.NamedTemporaryFile(dir=folder, prefix="said-", suffix=".txt", delete=False) as said:
            self._said = Path(said.name)
            self.process = subprocess.Popen(
                [python, "-m", "redline", "serve", *arguments, "--port", str(self.port)],
                cwd=tree.folder,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**tree.environment(), **(environment or {})},
            )
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (OPEN_FILES, hard_limit()))

    @property
    def said(self) -> str:
        """All output of the server so far, stdout and stderr together."""
        return self._said.read_text(errors="replace")

    def until_ready(self) -> int:
        """The port, once the model answers.

        Raises RedlineError with the server's output if it ends before that or is not ready after START_S.
        """
        deadline = clock.monotonic() + START_S
        while self.process.poll() is None and clock.monotonic() < deadline:
            if is_healthy(self.port):
                return self.port
            clock.sleep(0.1)
        raise RedlineError(f"the server of {self.tree.name} did not start: {self.said.strip()[-2000:]}")

    def check(self) -> None:
        """Raises RedlineError if the server has ended by itself."""
        if self.process.poll() is not None:
            raise RedlineError(
                f"the server of {self.tree.name} has ended with status {self.process.returncode}: "
                f"{self.said.strip()[-2000:]}"
            )

    @property
    def worker(self) -> int:
        """The process id of the server's first child.

        Raises IndexError if it has none, and OSError if it has ended.
        """
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def stop(self) -> End:
        """Asks the server to end (SIGTERM), and kills it after twice END_S; returns the outcome."""
        began = clock.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(2 * END_S)
        except subprocess.TimeoutExpired:
            code = None
        took = clock.monotonic() - began
        self.close()
        said = self.said
        found = [match.start() for match in re.finditer("Traceback", said)]
        first = [said[max(0, at - 500) : at + 2500] for at in found[:TOLD_TRACEBACKS]]
        return End(round(took, 1), code, len(found), first, said[-2000:])

    def close(self) -> None:
        """Kills the server and its children if it still runs, and waits for it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def served(trees: Sequence[Tree], arguments: Sequence[Sequence[str]]) -> Generator[list[Server]]:
    """A server of each tree with its arguments, all of them ready. They start together, and are killed at the end.

    Raises RedlineError if one does not start.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="redline-said-")))
        servers: list[Server] = []
        for tree, words in zip(trees, arguments, strict=True):
            servers.append(Server(tree, words, folder))
            stack.callback(servers[-1].close)
        for server in servers:
            server.until_ready()
        yield servers


def is_healthy(port: int) -> bool:
    """Whether the server on this port of loopback reports that it is ready."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=KNOCK_S)
    try:
        link.request("GET", "/health")
        return link.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        link.close()


def free_port() -> int:
    """A port of 127.0.0.1 without a listener at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def hard_limit() -> int:
    """The hard limit of open files of a process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]
