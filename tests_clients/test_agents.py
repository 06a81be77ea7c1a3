"""Coding agents drive our API, over an engine that plays their model (`scripted.py`): `make test-clients`.

Each has a home and a repository of its own, and a proxy that refuses whatever would leave the machine. The word that
it is asked for is in a file alone, so an answer with it shows that a tool's result went there and back.
"""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
CLIENTS = ROOT / ".venv-clients"
AGENTS = CLIENTS / "agents" / "node_modules" / ".bin"
MODEL, KEY = "kimi-nano", "sk-of-an-agent"
LIMIT_S = 180
ROOMY, TIGHT = 1_000_000, 100_000  # tokens of context; an agent's instructions and tools take about 50,000
ASKED = "What word is in note.txt?"
SEEN = "How many tokens has picture.png?"  # of 224 x 224 pixels: 64
NOWHERE = "http://127.0.0.1:9"


@dataclass
class Desk:
    """A home, and a repository with a file that has a word in it."""

    folder: Path
    word: str

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def repository(self) -> Path:
        return self.folder / "repository"

    @property
    def record(self) -> Path:
        return self.folder / "record"

    def give(self, name: str, text: str) -> None:
        """A file of the agent's own settings."""
        (self.home / name).parent.mkdir(parents=True, exist_ok=True)
        (self.home / name).write_text(text)


class Done:
    """What an agent printed, what the server was asked, and what its model read and said."""

    def __init__(self, desk: Desk, printed: str) -> None:
        entries = [json.loads(line) for line in desk.record.read_text().splitlines()]
        self.answer = printed.strip()
        self.asked = [entry for entry in entries if "route" in entry]
        self.turns = [entry for entry in entries if "prompt" in entry]
        self.refused = [entry["answer"] for entry in self.asked if entry["status"] != 200]

    def tools(self, index: int) -> list[str]:
        """The tools that a request declares."""
        declared = self.asked[index]["body"].get("tools", [])
        return [tool.get("name") or tool.get("function", {}).get("name") for tool in declared]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path, f"heron-{uuid.uuid4().int % 10**6}")
    made.home.mkdir()
    made.repository.mkdir()
    (made.repository / "note.txt").write_text(f"The word is {made.word}.\n")
    Image.new("RGB", (224, 224), "red").save(made.repository / "picture.png")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "A note."]):
        drive(made, "git", *words)
    return made


def drive(desk: Desk, *command: object, **variables: str) -> str:
    """What a program prints that ends by itself, and well. It finds nothing outside of the machine."""
    names = {f"GIT_{who}_{what}": "a@b.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    outside = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE)
    inside = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    basic = {"PATH": os.environ["PATH"], "HOME": str(desk.home), "LANG": "C.UTF-8"}
    ended = subprocess.run(
        [str(word) for word in command],
        cwd=desk.repository,
        env=basic | names | outside | inside | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, (ended.stdout[-2000:], ended.stderr[-2000:])
    return ended.stdout


@contextmanager
def served(desk: Desk, context: int, logs: int) -> Iterator[str]:
    """The address of the scripted server, in a process of its own. logs: files of 10,000 tokens, to be read first."""
    for index in range(logs):
        (desk.repository / f"log-{index}.txt").write_text(f"nothing was seen in hour {index}\n" * 350)
    keys = desk.folder / "keys.txt"
    keys.write_text(f"agent {KEY}\n")
    python = os.environ.get("REDLINE_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
    program = [python, ROOT / "tests_clients" / "scripted.py", desk.record, context, logs, keys]
    with subprocess.Popen(
        [str(word) for word in program],
        cwd=desk.repository,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        url = server.stdout.readline().strip()
        assert url, "the server did not come up"
        try:
            yield url
        finally:
            server.stdin.close()


def assert_read(done: Done, desk: Desk, route: str, tool: str) -> None:
    """The file was read with the agent's tool, and the model's last words reached the one who asked."""
    assert not done.refused
    assert {entry["route"] for entry in done.asked} == {route}
    assert tool in done.tools(-2)
    first, last = done.turns[-2:]
    assert desk.word not in first["prompt"]
    assert last["prompt"].startswith(first["prompt"] + first["said"]), "the first turn is cached, and not used"
    assert done.answer.endswith(f"It is {desk.word}.")


def assert_compacted(done: Done, desk: Desk) -> None:
    """The conversation grew until a summary took its place, and the task still ended well."""
    summed = next(index for index, turn in enumerate(done.turns) if "<summary>" in turn["said"])
    whole, short = (done.turns[index]["prompt"] for index in (summed - 1, summed + 1))
    assert summed > 3
    assert "seen in hour 0" in whole
    assert "seen in hour 0" not in short
    assert "The logs are read" in short
    assert done.answer.endswith(f"It is {desk.word}.")


# -------------------------------------------------------------------------------------------------------- Claude Code


def claude(desk: Desk, context: int = ROOMY, logs: int = 0, asked: str = ASKED, **variables: str) -> Done:
    off = dict.fromkeys(("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY"), "1")
    with served(desk, context, logs) as url:
        address = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": KEY}
        printed = drive(desk, AGENTS / "claude", "-p", asked, **address, **off, **variables)
    return Done(desk, printed)


def test_claude_code_reads_a_file(desk: Desk) -> None:
    done = claude(desk)
    assert_read(done, desk, "POST /v1/messages", "Read")
    assert done.asked[0]["body"]["model"].startswith("claude")


def test_claude_code_reads_a_picture(desk: Desk) -> None:
    done = claude(desk, asked=SEEN)
    assert not done.refused
    results = [block["content"] for block in done.asked[-1]["body"]["messages"][-1]["content"] if "content" in block]
    assert [part["type"] for part in results[-1]] == ["image"]
    assert done.answer.endswith("It has 64 tokens.")


def test_claude_code_compacts_where_it_knows_the_context(desk: Desk) -> None:
    done = claude(desk, TIGHT, logs=9, ANTHROPIC_MODEL=MODEL, CLAUDE_CODE_MAX_CONTEXT_TOKENS=str(TIGHT))
    assert_compacted(done, desk)
    assert not done.refused
    assert done.asked[0]["body"]["model"] == MODEL


def test_claude_code_compacts_where_a_prompt_is_refused(desk: Desk) -> None:
    done = claude(desk, TIGHT, logs=9)
    assert_compacted(done, desk)
    assert done.refused  # the request for a summary may be as well: it is shortened then
    assert all("prompt is too long" in refused for refused in done.refused)


# -------------------------------------------------------------------------------------------------------------- Codex


def codex(desk: Desk, context: int = ROOMY, logs: int = 0, settings: str = "") -> Done:
    with served(desk, context, logs) as url:
        desk.give(
            ".codex/config.toml",
            f"""
            model = "{MODEL}"
            model_provider = "redline"
            check_for_update_on_startup = false
            {settings}
            [analytics]
            enabled = false
            [model_providers.redline]
            name = "Redline"
            base_url = "{url}/v1"
            wire_api = "responses"
            env_key = "REDLINE_KEY"
            """,
        )
        printed = drive(desk, AGENTS / "codex", "exec", "--sandbox", "danger-full-access", ASKED, REDLINE_KEY=KEY)
    return Done(desk, printed)


def test_codex_reads_a_file(desk: Desk) -> None:
    done = codex(desk)
    assert_read(done, desk, "POST /v1/responses", "exec_command")
    sent_back = [item["type"] for item in done.asked[-1]["body"]["input"]]
    assert sent_back[-4:] == ["reasoning", "message", "function_call", "function_call_output"]


def test_codex_compacts_where_it_knows_the_context(desk: Desk) -> None:
    done = codex(desk, TIGHT, logs=9, settings=f"model_context_window = {TIGHT}")
    assert_compacted(done, desk)
    assert not done.refused


# ----------------------------------------------------------------------------------------------------------- OpenCode


def opencode(desk: Desk, *words: str) -> Done:
    off = (f"OPENCODE_DISABLE_{name}" for name in ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS"))
    with served(desk, ROOMY, logs=0) as url:
        options = {"baseURL": f"{url}/v1", "apiKey": KEY}
        sees = {"attachment": True, "modalities": {"input": ["text", "image"], "output": ["text"]}}
        models = {MODEL: {"limit": {"context": ROOMY, "output": 32_000}, **sees}}
        provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
        settings = {"provider": {"redline": provider}, "model": f"redline/{MODEL}", "share": "disabled"}
        desk.give(".config/opencode/opencode.json", json.dumps(settings))
        printed = drive(desk, AGENTS / "opencode", "run", *words, **dict.fromkeys(off, "1"))
    return Done(desk, printed)


def test_opencode_reads_a_file(desk: Desk) -> None:
    assert_read(opencode(desk, ASKED), desk, "POST /v1/chat/completions", "read")


def test_opencode_sends_a_picture(desk: Desk) -> None:
    """Through Vercel's AI SDK."""
    done = opencode(desk, SEEN, "--file", "picture.png")
    assert not done.refused
    assert done.answer.endswith("It has 64 tokens.")


# -------------------------------------------------------------------------------------------------------------- aider


def test_aider_edits_a_file(desk: Desk) -> None:
    off = ("--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-show-release-notes")
    given = ("--model", f"openai/{MODEL}", "--edit-format", "diff", "--yes-always", "--message", "Write was for is.")
    with served(desk, ROOMY, logs=0) as url:
        address = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        printed = drive(desk, CLIENTS / "aider" / "bin" / "aider", *given, *off, "note.txt", **address)
    done = Done(desk, printed)
    assert not done.refused
    assert {entry["route"] for entry in done.asked} == {"POST /v1/chat/completions"}
    assert (desk.repository / "note.txt").read_text() == f"The word was {desk.word}.\n"
    assert "Applied edit to note.txt" in printed


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
