"""Every command of README.md, the guides, docs/bench.md, docs/checkpoints.md and docs/drafters.md runs as written
against `make serve`; slow commands are only parsed.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import forked
from tests.deploy.test_serve import REDLINE, ROOT, Server
from tests.test_guides import GUIDES, wrong
from tests.waiting import LIMIT_S

TEXTS = [ROOT / "README.md", *GUIDES, *(ROOT / "docs" / page for page in ("bench.md", "checkpoints.md", "drafters.md"))]
PROGRAMS = "redline", "make", "curl", "hf", "echo", "export", ".venv/bin/python", ".venv/bin/pip"

# Commands that are parsed but not run, by their beginning, with the reason.
NOT_RUN = {
    "make serve": "the test starts its own server",
    "make test": "this is one of its tests",
    "hf download": "594 GB",
    "redline serve": "the server would keep running; tests/deploy starts servers",
    "redline agent": "needs a server that waits for machines; tests/deploy/test_machines.py has one",
    "redline doctor weights/kimi-k2.6": "needs a downloaded folder",
    "redline eval": "half an hour",
    "redline simulate": "half a minute",
    "redline bench decode": "half a minute",
    "redline bench prefill": "needs a GPU; tests/cli/test_bench_prefill.py",
    "redline bench speculate": "a quarter of an hour",
    "redline bench sweep": "four minutes",
    "redline bench accept": "two minutes",
    "redline bench serve --base-url": "a minute; README's command is run",
    "redline bench serve --preset": "needs another server",
    "redline bench compare": "minutes, and needs two servers",
    "redline bench agentic": "minutes, with a trace that it generates; tests/bench/serving",
    "redline bench leaderboard": "a minute; tests/bench/serving",
    "redline verify": "half a minute; tests/bench/verify",
    "redline quantize": "half a minute; tests/quant",
    "redline audit": "a minute; tests/quant",
    "redline draft synth": "minutes; tests/draft",
    "redline draft capture": "minutes, needs a file that `synth` writes; tests/draft",
    "redline draft train": "minutes, needs a folder that `capture` writes; tests/draft",
    "redline draft mine": "minutes, needs a file with a server's traffic; tests/draft",
    "redline draft eval": "minutes, needs a folder that `train` writes; tests/draft",
    "redline draft run": "minutes; tests/draft",
    "redline draft export": "needs a folder that `train` writes; tests/draft",
}


def commands(text: str) -> Iterator[str]:
    """Commands of the fenced and indented blocks: lines that begin with a program, joined with those that a backslash
    continues, without the explanations after two spaces.
    """
    fenced = False
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        fenced ^= line.startswith("```")
        inside = line if fenced else line.removeprefix("    ") if line.startswith("    ") else ""
        if inside.partition(" ")[0] in PROGRAMS:
            yield re.split(r"\s{2,}", inside)[0]


ALL = [(page.name, command) for page in TEXTS for command in commands(page.read_text())]


def why_not_run(command: str) -> str | None:
    """The reason why a command is not run; None: it is run. A conversation needs a user at the keyboard."""
    if command == "redline chat":
        return "it needs input from a user; tests/cli/test_chat_in_a_terminal.py covers it"
    return next((why for start, why in NOT_RUN.items() if command.startswith(start)), None)


def test_commands_are_found_in_both_kinds_of_blocks():
    text = "redline no\n\n    redline a \\\n      -b    explained\n    key = 1\n\n```\nmake c\n```\n"
    assert list(commands(text)) == ["redline a -b", "make c"]


def test_a_command_that_is_not_run_parses_and_its_reason_is_needed():
    skipped = [command for _, command in ALL if why_not_run(command)]
    assert not {command: wrong(command) for command in skipped if command.startswith("redline") and wrong(command)}
    modules = [command.split()[2] for command in skipped if command.startswith(".venv/bin/python -m")]
    assert all(find_spec(module) for module in modules)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {command.split()[1] for command in skipped if command.startswith("make")} <= set(targets)
    assert not [start for start in NOT_RUN if not any(command.startswith(start) for command in skipped)]


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    """A server as started by `make serve`, at a free port."""
    nano = ROOT / "models" / "kimi-nano"
    server = Server(nano, "--port", "0", "--draft", f"{nano}-eagle3", "--set", "engine.kv_memory=64MB")
    try:
        yield server.until_ready()
    finally:
        server.close()


def as_served(command: str, server: Server) -> str:
    """The command with this server's address and key, which a reader copies from the output of the start, and a
    request's id.
    """
    admin = re.search(r"explain REQUEST (--url \S+ --key \S+)", server.said)
    assert admin is not None, server.said
    request = re.search(r"\b([0-9a-f]{32})\b", server.said.partition("flush=True)")[2])
    command = command.replace("--url URL --key KEY", admin[1]).replace("http://127.0.0.1:8000", server.url)
    if "REQUEST" in command:
        assert request is not None, "no request was logged"
        command = command.replace("REQUEST", request[1])
    if command.startswith("redline chat"):
        command += f" --url {server.url}"
    if command.startswith("redline bench serve") and "--base-url" not in command:
        command += f" --base-url {server.url}"
    return command


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_every_quick_command_runs_as_written(served: Server, tmp_path: Path):
    for name in ("models", "examples", "redline"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(REDLINE.parents[1])
    path = f"{REDLINE.parent}{os.pathsep}{os.environ['PATH']}"
    failed: dict[str, str] = {}
    quick = list(dict.fromkeys(command for _, command in ALL if why_not_run(command) is None))
    for command in quick:
        line = as_served(command, served)
        # without a shell, since the shell would not change the command
        forks = line.startswith("redline ") and not set(line) & set("|&;<>()$`*?[]~#")
        done = (forked.run if forks else subprocess.run)(
            [str(REDLINE), *shlex.split(line)[1:]] if forks else line, shell=not forks, cwd=tmp_path,
            env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            failed[command] = done.stdout + done.stderr
    assert not failed
    assert len(quick) > 8
