"""Coding agents drive our API, over an engine that plays their model (`scripted.py`): `make test-clients`.

Each has a home and a repository of its own, and a proxy that refuses whatever would leave the machine. The word that
it is asked for is in a file alone, so an answer with it shows that a tool's result went there and back.
"""

import json
import os
import re
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CLIENTS = ROOT / ".venv-clients"
AGENTS = CLIENTS / "agents" / "node_modules" / ".bin"
MODEL = "kimi-nano"
LIMIT_S = 180
ROOMY, TIGHT = 1_000_000, 100_000  # tokens of context; an agent's instructions and tools take about 50,000
ASKED = "What word is in note.txt?"
NOWHERE = "http://127.0.0.1:9"


@dataclass
class Done:
    """What an agent printed, what the server was asked, and what its model read and said."""

    printed: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    turns: list[dict[str, str]] = field(default_factory=list)

    def tools(self, index: int) -> list[str]:
        """The tools that a request declares."""
        declared = self.asked[index]["body"].get("tools", [])
        return [tool.get("name") or tool.get("function", {}).get("name") for tool in declared]

    def refused(self) -> list[dict[str, Any]]:
        return [entry for entry in self.asked if entry["status"] != 200]

    def routes(self) -> set[str]:
        return {entry["route"] for entry in self.asked}


@dataclass
class Desk:
    """A home and a repository with a file that has a word in it."""

    folder: Path
    word: str

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def repository(self) -> Path:
        return self.folder / "repository"

    def give(self, name: str, text: str) -> None:
        """A file of the agent's own settings."""
        (self.home / name).parent.mkdir(parents=True, exist_ok=True)
        (self.home / name).write_text(text)

    def logs(self, count: int) -> int:
        """Add files that fill a context: 10,000 tokens each."""
        for index in range(count):
            (self.repository / f"log-{index}.txt").write_text(f"nothing was seen in hour {index}\n" * 300)
        return count


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path, f"heron-{uuid.uuid4().int % 10**6}")
    made.home.mkdir()
    made.repository.mkdir()
    (made.repository / "note.txt").write_text(f"The word is {made.word}.\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "A note."]):
        subprocess.run(["git", *words], cwd=made.repository, env=environment(made), check=True)
    return made


def environment(desk: Desk) -> dict[str, str]:
    names = {f"GIT_{who}_{what}": "a@b.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    outside = {name: NOWHERE for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")}
    inside = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return {"PATH": os.environ["PATH"], "HOME": str(desk.home), "LANG": "C.UTF-8", **names, **outside, **inside}


class Served:
    """The scripted server, in a process of its own."""

    def __init__(self, desk: Desk, context: int = ROOMY, logs: int = 0) -> None:
        self.record = desk.folder / "record"
        python = os.environ.get("REDLINE_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
        command = [python, str(ROOT / "tests_clients" / "scripted.py"), self.record, context, desk.logs(logs)]
        self.process = subprocess.Popen(
            [str(word) for word in command],
            cwd=desk.repository,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, "the server did not come up"

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate(timeout=LIMIT_S)

    def drive(self, desk: Desk, *command: object, **variables: str) -> Done:
        """Run an agent until it ends by itself, and well."""
        ended = subprocess.run(
            [str(word) for word in command],
            cwd=desk.repository,
            env=environment(desk) | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        done = Done(ended.stdout)
        for entry in map(json.loads, lines):
            (done.asked if "route" in entry else done.turns).append(entry)
        assert ended.returncode == 0, (ended.stdout[-2000:], ended.stderr[-2000:], done.refused())
        return done


def assert_read(done: Done, desk: Desk, route: str, tool: str) -> None:
    """The file was read with the agent's tool, and the model's last words reached the one who asked."""
    assert not done.refused()
    assert done.routes() == {route}
    assert tool in done.tools(-2)
    first, last = done.turns[-2:]
    assert desk.word not in first["prompt"]
    assert last["prompt"].startswith(first["prompt"] + first["said"]), "what was cached of the first turn is lost"
    assert done.printed.strip().endswith(f"It is {desk.word}.")


def assert_compacted(done: Done, desk: Desk) -> None:
    """The conversation grew beyond what fits, was replaced by its summary, and the task still ended well."""
    summed = next(index for index, turn in enumerate(done.turns) if "<summary>" in turn["said"])
    assert summed > 3
    assert len(done.turns[summed + 1]["prompt"]) < len(done.turns[summed]["prompt"]) * 0.8
    assert "The logs are read" in done.turns[summed + 1]["prompt"]
    assert done.printed.strip().endswith(f"It is {desk.word}.")


# -------------------------------------------------------------------------------------------------------- Claude Code


def claude(desk: Desk, served: Served, **variables: str) -> Done:
    settings = {"ANTHROPIC_BASE_URL": served.url, "ANTHROPIC_AUTH_TOKEN": "none", **variables}
    for name in ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY"):
        settings[name] = "1"
    return served.drive(desk, AGENTS / "claude", "-p", ASKED, **settings)


def test_claude_code_reads_a_file(desk: Desk) -> None:
    with Served(desk) as served:
        done = claude(desk, served)
    assert_read(done, desk, "POST /v1/messages", "Read")
    assert done.asked[0]["body"]["model"].startswith("claude")


def test_claude_code_compacts_where_it_knows_the_context(desk: Desk) -> None:
    with Served(desk, TIGHT, logs=9) as served:
        done = claude(desk, served, ANTHROPIC_MODEL=MODEL, CLAUDE_CODE_MAX_CONTEXT_TOKENS=str(TIGHT))
    assert_compacted(done, desk)
    assert not done.refused()
    assert done.asked[0]["body"]["model"] == MODEL


def test_claude_code_compacts_where_a_prompt_is_refused(desk: Desk) -> None:
    with Served(desk, TIGHT, logs=9) as served:
        done = claude(desk, served)
    assert_compacted(done, desk)
    assert done.refused()  # the request for a summary may be refused too: it is shortened then
    assert all("prompt is too long" in refused["answer"] for refused in done.refused())


# -------------------------------------------------------------------------------------------------------------- Codex


def codex(desk: Desk, served: Served, *lines: str) -> Done:
    settings = (f'model = "{MODEL}"', 'model_provider = "redline"', "check_for_update_on_startup = false", *lines)
    provider = (
        "[model_providers.redline]",
        'name = "Redline"',
        f'base_url = "{served.url}/v1"',
        'wire_api = "responses"',
    )
    desk.give(".codex/config.toml", "\n".join([*settings, "[analytics]", "enabled = false", *provider]))
    return served.drive(desk, AGENTS / "codex", "exec", "--sandbox", "danger-full-access", ASKED)


def test_codex_reads_a_file(desk: Desk) -> None:
    with Served(desk) as served:
        done = codex(desk, served)
    assert_read(done, desk, "POST /v1/responses", "exec_command")
    sent_back = [item["type"] for item in done.asked[-1]["body"]["input"]]
    assert sent_back[-4:] == ["reasoning", "message", "function_call", "function_call_output"]


def test_codex_compacts_where_it_knows_the_context(desk: Desk) -> None:
    with Served(desk, TIGHT, logs=9) as served:
        done = codex(desk, served, f"model_context_window = {TIGHT}")
    assert_compacted(done, desk)
    assert not done.refused()


# ----------------------------------------------------------------------------------------------------------- OpenCode


def test_opencode_reads_a_file(desk: Desk) -> None:
    with Served(desk) as served:
        options = {"baseURL": f"{served.url}/v1", "apiKey": "none"}
        models = {MODEL: {"limit": {"context": ROOMY, "output": 32_000}}}
        provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
        settings = {"provider": {"redline": provider}, "model": f"redline/{MODEL}", "share": "disabled"}
        desk.give(".config/opencode/opencode.json", json.dumps(settings))
        off = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
        switches = {f"OPENCODE_DISABLE_{name}": "1" for name in off}
        done = served.drive(desk, AGENTS / "opencode", "run", ASKED, **switches)
    assert_read(done, desk, "POST /v1/chat/completions", "read")


# -------------------------------------------------------------------------------------------------------------- aider


def test_aider_edits_a_file(desk: Desk) -> None:
    with Served(desk) as served:
        asked = ["--message", "Write was for is.", "--yes-always", "note.txt"]
        quiet = ["--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-show-release-notes"]
        given = ["--model", f"openai/{MODEL}", "--edit-format", "diff", *quiet, *asked]
        address = {"OPENAI_API_BASE": f"{served.url}/v1", "OPENAI_API_KEY": "none"}
        done = served.drive(
            desk, CLIENTS / "aider" / "bin" / "aider", *given, **address, LITELLM_LOCAL_MODEL_COST_MAP="True"
        )
    assert not done.refused()
    assert done.routes() == {"POST /v1/chat/completions"}
    assert (desk.repository / "note.txt").read_text() == f"The word was {desk.word}.\n"
    assert re.search(r"Applied edit to\s+note\.txt", done.printed)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
