"""`redline chat` at a real pseudo-terminal: typing and pasting at every moment, and its state afterwards."""

import os
import pty
import signal
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from redline.cli import prompt
from tests.cli.pty_session import BRACKETS_OFF, BRACKETS_ON, Session, session
from tests.cli.servers import DONE, Fake, server, stream, text
from tests.waiting import LIMIT_S, until

PASTED = "def f():\n\n    return 1\n\nrm -rf everything\n"


class Answers:
    """The server's side: the first answer is held until the test releases it, the others come at once."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, fake: Fake) -> None:
        if len(fake.asked) > 1:
            fake.say(stream(*text(f"answer {len(fake.asked)}")))
            return
        begun, ended = stream(*text("answer ", "1")).removesuffix(DONE).split("\n\n", 1)
        fake.send_response(200)
        fake.send_header("content-type", "text/event-stream")
        fake.end_headers()
        fake.wfile.write(f"{begun}\n\n".encode())
        fake.wfile.flush()
        self.begun.set()
        self.go_on.wait(LIMIT_S)
        with suppress(OSError):  # the client has disconnected
            fake.wfile.write((ended + DONE).encode())


@contextmanager
def chat(*, hold: bool = False, **how: Any) -> Iterator[tuple[Session, list[dict[str, Any]], Answers]]:
    """hold: hold the first answer."""
    answers = Answers()
    if not hold:
        answers.go_on.set()
    with server(answers) as (url, asked):
        try:
            with session("chat", "--url", url, **how) as one:
                yield one, asked, answers
        finally:
            answers.go_on.set()


def questions(asked: list[dict[str, Any]]) -> list[str]:
    return [body["messages"][-1]["content"] for body in asked]


# ---------------------------------------------------------------------------------------------------------- pastes


def test_a_paste_with_empty_lines_is_one_question_and_is_asked_at_enter():
    with chat() as (one, asked, _):
        one.until_prompt(1)
        one.paste(PASTED)
        one.until(lambda: "rm -rf everything" in one.shown)
        assert not asked
        one.type("\r")
        one.until_prompt(2)
        assert questions(asked) == [PASTED]
        assert one.process.poll() is None


def test_alt_enter_begins_a_new_line():
    with chat() as (one, asked, _):
        one.until_prompt(1)
        one.type("first\x1b\rsecond\r")
        one.until_prompt(2)
        assert questions(asked) == ["first\nsecond"]


def test_a_paste_that_no_terminal_marks_is_one_question():
    with chat() as (one, asked, _):
        one.until_prompt(1)
        one.type(PASTED.replace("\n", "\r"))
        one.until(lambda: asked)
        one.until_prompt(2)
        assert questions(asked) == [PASTED.rstrip("\n")]


def test_a_paste_while_an_answer_streams_waits_for_the_next_question():
    with chat(hold=True) as (one, asked, answers):
        one.until_prompt(1)
        one.type("first\r")
        assert answers.begun.wait(LIMIT_S)
        one.until(lambda: "answer " in one.shown)
        one.paste(PASTED)
        answers.go_on.set()
        one.until(lambda: "rm -rf everything" in one.shown)
        one.type("\r")
        one.until(lambda: len(asked) == 2)
        assert questions(asked) == ["first", PASTED]
        assert one.process.poll() is None


def test_a_paste_before_chat_has_started_is_one_question():
    with chat(typed=PASTED) as (one, asked, _):
        one.until(lambda: asked)
        one.until(lambda: "answer 1" in one.shown)
        assert questions(asked) == [PASTED.rstrip("\n")]
        assert one.process.poll() is None


def test_a_long_paste_arrives_whole():
    # a line in canonical mode has at most 4,095 bytes
    lines = "\n".join(f"{i} " + "x" * 90 for i in range(400)) + "\n" + "y" * 6000
    with chat(hold=True) as (one, asked, answers):
        one.until_prompt(1)
        one.type("first\r")
        assert answers.begun.wait(LIMIT_S)
        one.until(lambda: "answer " in one.shown)
        typing = threading.Thread(target=one.paste, args=[lines])  # it blocks while the terminal's buffer is full
        typing.start()
        answers.go_on.set()
        typing.join()
        one.type("\r")
        one.until(lambda: len(asked) == 2)
        assert questions(asked)[1] == lines


def test_while_an_answer_streams_each_key_is_kept_as_it_is_and_shown_nowhere():
    with chat(hold=True, least=9) as (one, _, answers):
        one.until_prompt(1)
        one.type("first\r")
        assert answers.begun.wait(LIMIT_S)
        one.until(lambda: "answer " in one.shown)
        given, _, _, local, _, _, characters = termios.tcgetattr(one.slave)
        assert not given & termios.ICRNL, "Enter differs from the line ends of a paste"
        assert not local & (termios.ICANON | termios.ECHO), (
            "a line may be of any length, and is echoed by the next prompt"
        )
        assert local & termios.ISIG, "Ctrl-C stops the answer"
        assert local & termios.NOFLSH, "and does not drop typed input"
        assert (characters[termios.VMIN], characters[termios.VTIME]) == (1, 0)


# --------------------------------------------------------------------------------------------------------- leaving


def test_empty_lines_do_not_leave_and_ctrl_d_does():
    with chat() as (one, asked, _):
        before = termios.tcgetattr(one.slave)
        one.until_prompt(1)
        for number in range(2, 5):
            one.type("\r")
            one.until_prompt(number)
        assert one.process.poll() is None
        one.type("\x04")
        assert one.ends() == 0
        assert not asked
        assert termios.tcgetattr(one.slave) == before
        assert one.raw.rfind(BRACKETS_OFF) > one.raw.rfind(BRACKETS_ON) > 0


def test_what_was_not_read_is_not_left_to_the_shell():
    with chat(hold=True) as (one, _, answers):
        one.until_prompt(1)
        one.type("first\r")
        assert answers.begun.wait(LIMIT_S)
        one.until(lambda: "answer " in one.shown)
        one.paste(PASTED)
        one.until(lambda: one.waiting() > len(PASTED))
        os.kill(one.process.pid, signal.SIGTERM)
        assert one.ends() == 128 + signal.SIGTERM
        assert one.unread() == b""


def test_of_a_paste_that_the_terminal_cannot_hold_at_once_nothing_is_left_to_the_shell(
    monkeypatch: pytest.MonkeyPatch,
):
    """The terminal's buffer has 4 KiB; the paste blocks until there is room again."""
    master, slave = pty.openpty()
    one = Session.__new__(Session)
    one.slave, one._master, one._raw = slave, master, b""
    pasting = threading.Thread(target=one.paste, args=[PASTED * 200])

    def follows(read: list[int], *_: object) -> tuple[list[int], list[int], list[int]]:
        """Stands in for select: the rest of a paste arrives before the timeout."""
        until(lambda: one.waiting() > 1024 or not pasting.is_alive())
        return read if one.waiting() else [], [], []

    with os.fdopen(slave, closefd=False) as stdin, os.fdopen(slave, "w", closefd=False) as stdout:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        with prompt.Prompt(None):
            pasting.start()
            monkeypatch.setattr(prompt, "select", SimpleNamespace(select=follows))
            until(lambda: one.waiting() > len(PASTED))
        pasting.join()
        assert one.unread() == b""
    os.close(slave)
    os.close(master)


def test_a_server_that_is_not_there_leaves_the_terminal_as_it_was():
    with session("chat", "--url", "http://127.0.0.1:9", typed=PASTED) as one:
        assert one.ends() == 1
        assert "no server at http://127.0.0.1:9" in one.shown
        assert termios.tcgetattr(one.slave)[3] & (termios.ICANON | termios.ECHO)
        assert one.unread() == b""


@pytest.mark.parametrize("where", ["prompt", "answer"])
def test_sigterm_leaves_the_terminal_as_it_was(where: str):
    with chat(hold=True) as (one, _, answers):
        before = termios.tcgetattr(one.slave)
        one.until_prompt(1)
        if where == "answer":
            one.type("first\r")
            assert answers.begun.wait(LIMIT_S)
        os.kill(one.process.pid, signal.SIGTERM)
        assert one.ends() == 128 + signal.SIGTERM
        assert termios.tcgetattr(one.slave) == before
        assert one.raw.rfind(BRACKETS_OFF) > one.raw.rfind(BRACKETS_ON)
        assert "Traceback" not in one.shown


# ---------------------------------------------------------------------------------------------------------- Ctrl-C


def test_ctrl_c_stops_an_answer_and_what_was_said_stays():
    with chat(hold=True) as (one, asked, answers):
        one.until_prompt(1)
        one.type("first\r")
        assert answers.begun.wait(LIMIT_S)
        one.until(lambda: "answer " in one.shown)
        one.type("\x03")
        one.until(lambda: "(stopped)" in one.shown)
        one.until_prompt(2)
        one.type("second\r")
        one.until(lambda: len(asked) == 2)
        said = [(message["role"], message["content"]) for message in asked[1]["messages"]]
        assert said == [("user", "first"), ("assistant", "answer "), ("user", "second")]
        one.until(lambda: "answer 2" in one.shown)


def test_what_was_pasted_before_ctrl_c_stopped_an_answer_is_still_there():
    with chat(hold=True) as (one, asked, answers):
        one.until_prompt(1)
        one.type("first\r")
        assert answers.begun.wait(LIMIT_S)
        one.until(lambda: "answer " in one.shown)
        one.paste(PASTED)
        one.type("\x03")
        one.until_prompt(2)
        one.until(lambda: "rm -rf everything" in one.shown)
        one.type("\r")
        one.until(lambda: len(asked) == 2)
        assert questions(asked)[1] == PASTED


def test_ctrl_c_at_the_prompt_clears_the_line_and_does_not_leave():
    with chat() as (one, asked, _):
        one.until_prompt(1)
        one.type("half a quest\x03")
        one.until(lambda: "(Ctrl-D quits)" in one.shown)
        one.until_prompt(2)
        one.type("whole\r")
        one.until(lambda: asked)
        assert questions(asked) == ["whole"]


# ------------------------------------------------------------------------------------------------- odd terminals


def test_the_greeting_names_model_and_address_in_one_piece_so_that_a_narrow_terminal_can_open_it():
    with server() as (url, _), session("chat", "--url", f"{url}/{'behind-a-proxy/' * 4}", size=(40, 30)) as one:
        one.until(lambda: "\n>" in one.shown or one.process.poll() is not None)
        address = f"{url}/{'behind-a-proxy/' * 4}".rstrip("/")
        assert f"fake at {address}   (Ctrl-C stops an answer, Ctrl-D quits, /help)" in one.shown


@pytest.mark.parametrize(
    "how",
    [
        {"size": (1, 1)},
        {"size": (24, 2)},
        {"size": (0, 0)},
        {"environment": {"TERM": "dumb"}},
        {"environment": {"TERM": ""}},
        {"environment": {"TERM": "no-such-terminal"}},
        {"environment": {"PYTHONIOENCODING": "ascii"}},
        {"environment": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}},
        {"environment": {"HOME": "/nowhere/at/all"}},
    ],
    ids=str,
)
def test_an_odd_terminal_is_talked_to_all_the_same(how: dict[str, Any]):
    with chat(**how) as (one, asked, _):
        # with one column the prompt is not shown
        one.until(lambda: ">" in one.shown or one.raw.count(BRACKETS_ON) >= 2)
        one.type("hi\r")
        one.until(lambda: "answer1" in "".join(one.shown.split()))
        one.until(lambda: one.process.poll() is not None or one.type("\x04") or one.ended_within(0.5))
        assert one.ends() == 0
        assert questions(asked) == ["hi"]
        assert "Traceback" not in one.shown


def test_questions_of_earlier_conversations_come_back(tmp_path: Path):
    kept = {"REDLINE_HISTORY": str(tmp_path / "state" / "questions")}
    with chat(environment=kept) as (one, asked, _):
        one.until_prompt(1)
        one.type("what was it?\r")
        one.until_prompt(2)
        one.type("\x04")
        assert one.ends() == 0
    assert (tmp_path / "state" / "questions").stat().st_mode & 0o777 == 0o600
    with chat(environment=kept) as (one, asked, _):
        one.until_prompt(1)
        one.type("\x1b[A")
        one.until(lambda: "what was it?" in one.shown)
        one.type("\r")
        one.until_prompt(2)
        assert questions(asked) == ["what was it?"]


def test_a_long_file_of_questions_loses_its_older_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompt, "MOST_HISTORY_BYTES", 1000)
    path = tmp_path / "questions"
    path.write_text("".join(f"\n# 2026\n+question {number}\n" for number in range(60)))
    kept = list(prompt._history(path).load_history_strings())
    assert kept[0] == "question 59"
    assert 10 < len(kept) < 30
    assert not [text for text in kept if not text.startswith("question ")]
    assert list(prompt._history(tmp_path / "questions" / "no").load_history_strings()) == []
