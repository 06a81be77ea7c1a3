"""Traces of multi-turn agent sessions: the format, reading and writing, and synthetic traces from a seed.

A trace is JSONL, with one session per line:

    {"session": "s1", "tools": [...], "turns": [{"messages": [...], "output_tokens": 99, "answer": {...}, "wait_s": 1}]}

A turn sends all messages so far followed by its own `messages`, in the format of the chat API (system, user, tool);
`output_tokens` is the maximum length of the answer; `answer` is the recorded answer, an assistant message; `wait_s` is
the time in seconds that the tools, or the user, take before the next turn. `tools` are the functions that a session may
call; `answer`, `tools` and `wait_s` are optional.
"""

import json
import math
import random
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from redline.errors import ConfigError
from redline.messages.base import Record

CHARACTERS_PER_TOKEN = 3.6  # of Python and English text in large vocabularies; used without a tokenizer
Counter = Callable[[str], int]


class AgentTurn(Record, frozen=True, forbid_unknown_fields=False):
    """One request, and the wait after its answer. wait_s: seconds."""

    messages: tuple[dict[str, Any], ...]
    output_tokens: int
    answer: dict[str, Any] | None = None
    wait_s: float = 0.0


class Session(Record, frozen=True, forbid_unknown_fields=False):
    """Turns that share one history."""

    session: str
    turns: tuple[AgentTurn, ...]
    tools: tuple[dict[str, Any], ...] | None = None


def read(path: Path) -> list[Session]:
    """The sessions of a trace. Raises ConfigError with the file, the line and the problem."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    found: list[Session] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            session = msgspec.json.decode(line, type=Session)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: not a valid session: {error}") from None
        if problem := _problem(session):
            raise ConfigError(f"{path}, line {number}: {problem}")
        found.append(session)
    if not found:
        raise ConfigError(f"{path}: contains no session; --synthesize writes a trace")
    return found


def _problem(session: Session) -> str:
    if not session.turns:
        return "`turns` is empty"
    for number, turn in enumerate(session.turns, 1):
        if not turn.messages or not all(isinstance(message.get("role"), str) for message in turn.messages):
            return f"turn {number} needs at least one message, and `role` in each"
        if turn.output_tokens < 1:
            return f"turn {number}: `output_tokens` must be at least 1"
        if not 0 <= turn.wait_s < math.inf:
            return f"turn {number}: `wait_s` must be a finite number of seconds, at least 0"
    return ""


def encode(sessions: Sequence[Session]) -> bytes:
    """Encodes a trace as JSONL."""
    return b"".join(msgspec.json.encode(session) + b"\n" for session in sessions)


# -------------------------------------------------------------------------------------------------- synthetic traces


class TraceShape(Record, frozen=True):
    """The sizes of synthetic sessions of a coding agent. All lengths and times are medians, except context_tokens.

    context_tokens: maximum tokens of a session's history, answers included. output_tokens: of an answer; edits are
    longer, calls of other tools shorter. result_tokens: of a file excerpt that a tool returns. tool_s: seconds of a
    test run; other tools take a hundredth. think_s: seconds of a user between two tasks.
    """

    sessions: int = 8
    context_tokens: int = 32_000
    output_tokens: int = 120
    result_tokens: int = 900
    tool_s: float = 8.0
    think_s: float = 20.0
    seed: int = 0


_SYSTEM = """You are a careful software engineer who works in the repository of a Python project.
Read before you write. Make the smallest change that does what was asked, keep the style of the file, and run the tests
after every edit. Call one tool at a time. When the tests pass, say in a few sentences what was changed and why."""

_TASKS = (
    "The function {name} in {file} has no test for empty input. Read it, say what it does then, and add a test.",
    "Somebody reports that {name} in {file} is slow for large inputs. Find out why, and make it faster.",
    "Please give {name} in {file} a docstring that says what it takes, what it gives and which errors it raises.",
    "{file} has grown long. Move {name} and what only it needs into a module of its own; nothing else may change.",
    "{name} in {file} should accept a path as well as a string. Change it, and its callers where they need it.",
)
_FOLLOW_UPS = (
    "Good. Now look whether something else in {file} has the same problem, beginning with {name}.",
    "The reviewer asks why {name} is written like this. Have another look at {file} and simplify it if you can.",
    "Thank you. One more thing: {name} in {file} should log a warning where it gives up.",
)
_SAID = (
    "I will look at {file} first, to see what {name} does today.",
    "The part around {name} is what matters here; I change that and leave the rest as it is.",
    "Next come the tests, to see whether {name} still does what its callers expect.",
)
_DONE = (
    "The tests pass. In {file} only {name} was changed: it now handles the case that you described, and its callers "
    "did not need a change. A test for the case stands beside those that were there."
)


def _tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    fields = {key: {"type": "string", "description": said} for key, said in properties.items()}
    parameters = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (
    _tool("read_file", "Gives lines of a file.", path="The file.", lines="Such as 120-180."),
    _tool("search", "Finds a text in all files.", text="What is looked for.", folder="Where."),
    _tool("edit_file", "Replaces a text.", path="The file.", old="What is there.", new="What will be there."),
    _tool("run_tests", "Runs the tests of a folder.", folder="Which tests.", pattern="A part of their names."),
)


class _Source:
    """Python files of the installed standard library: text such as a coding agent reads."""

    def __init__(self) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(path for path in folder.glob("*.py") if path.stat().st_size > 8_000)
        if not files:
            raise ConfigError(f"--synthesize: {folder} does not contain the source of Python's standard library")
        self._files = files
        self._read: dict[Path, list[str]] = {}

    def draw(self, draw: random.Random) -> tuple[str, list[str], str]:
        """A random file: its name, its lines, and the name of a function or class in it."""
        path = draw.choice(self._files)
        lines = self._read.setdefault(path, path.read_text(errors="replace").splitlines())
        words = [
            line.split("(")[0].split(":")[0].split() for line in lines if line.lstrip().startswith(("def ", "class "))
        ]
        return path.name, lines, draw.choice(words)[1] if words else "main"


def by_length(text: str) -> int:
    """Estimates the tokens of a text from its length."""
    return math.ceil(len(text) / CHARACTERS_PER_TOKEN)


def synthesize(shape: TraceShape, count: Counter | None = None) -> list[Session]:
    """Sessions of a coding agent: a task, files read and searched, edits, tests, a summary, the next task, and so on.

    The same shape and version of Python give the same sessions. count: counts the tokens of a text; None: estimates
    them from its length. Raises ConfigError if context_tokens is too small for one turn.
    """
    counter = count or by_length
    source = _Source()
    made = [_Maker(shape, counter, source, number).session() for number in range(shape.sessions)]
    if not all(session.turns for session in made):
        least = counter(_SYSTEM + json.dumps(TOOLS)) + 2 * (shape.output_tokens + shape.result_tokens)
        raise ConfigError(
            f"--context-tokens {shape.context_tokens}: one turn does not fit; use at least about {least}, or reduce "
            "--result-tokens and --output-tokens"
        )
    return made


class _Maker:
    def __init__(self, shape: TraceShape, count: Counter, source: _Source, number: int) -> None:
        self._shape, self._count, self._source, self._number = shape, count, source, number
        self._draw = random.Random(f"{shape.seed} {number}")
        self._turns: list[AgentTurn] = []
        self._pending: list[dict[str, Any]] = [{"role": "system", "content": _SYSTEM}]
        self._calls = 0
        # A chat template adds tokens around every message; twelve per message are enough.
        self._used = count(_SYSTEM) + count(json.dumps(TOOLS)) + 24

    def session(self) -> Session:
        task = 0
        while self._task(_TASKS if task == 0 else _FOLLOW_UPS):
            task += 1
        if self._turns:
            self._turns[-1] = msgspec.structs.replace(self._turns[-1], wait_s=0.0)
        return Session(session=f"session-{self._number}", tools=TOOLS, turns=tuple(self._turns))

    def _task(self, wordings: Sequence[str]) -> bool:
        """Adds a task. Returns whether all of it fits into context_tokens."""
        draw = self._draw
        file, lines, name = self._source.draw(draw)
        self._say({"role": "user", "content": draw.choice(wordings).format(name=name, file=file)})
        steps = ["read_file"] + [draw.choice(("read_file", "search")) for _ in range(draw.randrange(4))]
        for _ in range(1 + draw.randrange(2)):
            steps += ["edit_file", "run_tests"]
        return all(self._step(step, file, lines, name) for step in steps) and self._end(file, name)

    def _step(self, tool: str, file: str, lines: list[str], name: str) -> bool:
        draw, shape = self._draw, self._shape
        arguments: dict[str, str]
        match tool:
            case "read_file":
                piece, start = self._piece(lines, self._length(shape.result_tokens))
                arguments, result = {"path": file, "lines": f"{start + 1}-{start + len(piece)}"}, "\n".join(piece)
                output, wait = shape.output_tokens // 2, self._time(shape.tool_s / 100)
            case "search":
                hits = [f"{file}:{at}: {line}" for at, line in enumerate(lines, 1) if name in line][:20]
                arguments, result = {"text": name, "folder": "."}, "\n".join(hits) or "nothing was found"
                output, wait = shape.output_tokens // 2, self._time(shape.tool_s / 100)
            case "edit_file":
                output = self._length(shape.output_tokens * 3)
                piece, _ = self._piece(lines, output // 3)
                old = "\n".join(piece)
                arguments = {"path": file, "old": old, "new": old.replace(name, f"{name}_checked") + "\n"}
                result, wait = f"{file}: one place was changed", self._time(shape.tool_s / 100)
            case _:
                arguments, result = {"folder": "tests", "pattern": name.lower()}, _tests(draw, name)
                output, wait = shape.output_tokens // 2, self._time(shape.tool_s)
        self._calls += 1
        call: dict[str, Any] = {
            "id": f"call_{self._calls}",
            "type": "function",
            "function": {"name": tool, "arguments": json.dumps(arguments)},
        }
        said = draw.choice(_SAID).format(name=name, file=file)
        answer = {"role": "assistant", "content": said, "tool_calls": [call]}
        tokens = max(output, self._count(said) + self._count(call["function"]["arguments"]) + 16)
        if not self._turn(answer, tokens, wait):
            return False
        self._say({"role": "tool", "tool_call_id": call["id"], "name": tool, "content": result})
        return True

    def _end(self, file: str, name: str) -> bool:
        said = _DONE.format(file=file, name=name)
        tokens = max(self._length(self._shape.output_tokens), self._count(said) + 4)
        return self._turn({"role": "assistant", "content": said}, tokens, self._time(self._shape.think_s))

    def _say(self, message: dict[str, Any]) -> None:
        self._pending.append(message)
        self._used += self._count(message["content"]) + 12

    def _turn(self, answer: dict[str, Any], tokens: int, wait_s: float) -> bool:
        if self._used + tokens > self._shape.context_tokens:
            return False
        self._turns.append(
            AgentTurn(messages=tuple(self._pending), output_tokens=tokens, answer=answer, wait_s=round(wait_s, 3))
        )
        self._pending = []
        self._used += tokens + 12
        return True

    def _length(self, median: int) -> int:
        return max(8, round(median * self._draw.lognormvariate(0.0, 0.6)))

    def _time(self, median: float) -> float:
        # Most tools return at once and some take very long: a wide log-normal distribution, cut at twenty medians.
        return min(median * self._draw.lognormvariate(0.0, 1.0), 20 * median)

    def _piece(self, lines: list[str], tokens: int) -> tuple[list[str], int]:
        """Lines with about `tokens` tokens from a random start, and the index of the first line."""
        start = self._draw.randrange(max(1, len(lines) - 20))
        piece: list[str] = []
        used = 0
        for line in lines[start:]:
            used += self._count(line + "\n")
            if piece and used > tokens:
                break
            piece.append(line)
        return piece, start


def _tests(draw: random.Random, name: str) -> str:
    passed, failed = draw.randrange(3, 40), draw.choice((0, 0, 1, 2))
    lines = [f"tests/test_{name.lower()}.py {'.' * passed}{'F' * failed}"]
    lines += [
        f"FAILED tests/test_{name.lower()}.py::test_{at} - AssertionError: assert {at} == {at + 1}"
        for at in range(failed)
    ]
    return "\n".join([*lines, f"{failed} failed, {passed} passed in {draw.uniform(0.2, 9):.2f}s"])
