"""Progress of a long verb: a line every ten seconds if there is no terminal for a bar, by a clock of the test."""

import io
import re
import sys
import threading
from collections.abc import Callable

import pytest

from redline.progress import EVERY_S, Working


class Clock:
    """Advances whenever a wait occurs; each wait does the work of `meanwhile`. Ends the waits after the last."""

    def __init__(self, *meanwhile: Callable[[], object]) -> None:
        self.now = 1000.0
        self.waits = iter(meanwhile)

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        work = next(self.waits, None)
        if work is not None:
            work()
        return work is None


def said(*meanwhile: Callable[[Working], object], what: str = "answers") -> list[str]:
    stream, found = io.StringIO(), list[Working]()
    clock = Clock(*((lambda work=work: work(found[0])) for work in meanwhile))
    found.append(Working(what, stream=stream, clock=clock, wait=clock.wait))
    with found[0]:
        pass
    return stream.getvalue().splitlines()


def test_without_a_terminal_there_is_a_line_every_ten_seconds():
    assert EVERY_S == 10
    assert said(
        lambda bar: bar.show(0, 1170),
        lambda bar: bar.show(120, 1170, note="1,230 tokens/s"),
        lambda bar: bar.show(1170, 1170),
    ) == [
        "answers: 0 of 1,170, 0:10 passed",
        "answers: 120 of 1,170, 0:20 passed, about 1:28 left; 1,230 tokens/s",
        "answers: 1,170 of 1,170, 0:30 passed",
    ]


def test_work_that_says_nothing_of_itself_is_still_heard_of():
    assert said(lambda bar: None, lambda bar: None, what="loading [weights]") == [
        "loading [weights]: 0:10 passed",
        "loading [weights]: 0:20 passed",
    ]


def test_what_was_there_before_says_nothing_of_what_is_left():
    lines = said(lambda bar: bar.show(900, 1000), lambda bar: bar.show(910, 1000))
    assert lines[0].endswith("0:10 passed")
    assert lines[1] == "answers: 910 of 1,000, 0:20 passed, about 1:30 left"


def test_a_share_is_told_in_percent_and_another_piece_of_work_begins_anew():
    lines = said(
        lambda bar: bar.show(0.0, 1.0),
        lambda bar: bar.show(0.25, 1.0),
        lambda bar: bar.show(what="scoring"),
        lambda bar: bar.show(3, 4, what="scoring"),
    )
    assert [line.partition(",")[0] for line in lines] == [
        "answers: 0%", "answers: 25%", "scoring: 0:30 passed", "scoring: 3 of 4"
    ]  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_is_a_bar_and_a_name_keeps_its_brackets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    stream, out = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with Working("answers of [bold]", stream=stream) as bar:
        bar.show(3, 7, note="9 tokens/s")
        print("a result")
    assert "answers of [bold]" in stream.getvalue()
    assert "3 of 7 9 tokens/s" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[1A\x1b[2K"), "the bar must be removed at the end"
    assert out.getvalue() == "a result\n", "other output must go to its usual stream"


def test_times_are_whole_at_80_columns_whatever_the_words(monkeypatch: pytest.MonkeyPatch):
    for name, value in (("COLUMNS", "80"), ("TERM", "xterm"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    stream = Terminal()
    with Working("a long name of what is being worked on for a while", stream=stream) as bar:
        bar.show(123_456, 7_654_321, note="1,234,567 tokens/s, 1,234 running")
    last = stream.getvalue().rpartition("a long name")[2]
    assert "123,456 of 7,654,321" in last
    assert re.search(r"\d:\d\d:\d\d (-:--:--|\d:\d\d:\d\d)", last)


def test_a_bar_is_as_long_as_what_is_done_and_moves_to_and_fro_where_nobody_knows_how_much_there_is(
    monkeypatch: pytest.MonkeyPatch,
):
    for name, value in (("COLUMNS", "200"), ("TERM", "xterm"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)

    def longest(done: int, total: int | None) -> int:
        stream = Terminal()
        with Working("answers", stream=stream) as bar:
            bar.show(done, total)
        return max(map(len, re.findall("\u2501+", stream.getvalue())), default=0)

    assert longest(3, 3) == 2 * longest(3, 6) == 4 * longest(3, 12) > 0
    assert 0 < longest(3, None) < longest(3, 3)


def test_who_is_not_shown_says_nothing():
    stream = io.StringIO()
    with Working("answers", shown=False, stream=stream) as bar:
        bar.show(1, 2)
    assert stream.getvalue() == ""


def test_a_stderr_that_nobody_reads_stops_no_work():
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    clock = Clock(lambda: None)
    with Working("answers", stream=Closed(), clock=clock, wait=clock.wait) as bar:
        bar.show(1, 2)


def test_a_stderr_that_hangs_keeps_no_process_from_its_end():
    read = threading.Event()

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            read.wait(30)
            return len(text)

    clock = Clock(lambda: None)
    with Working("answers", stream=Full(), clock=clock, wait=clock.wait):
        pass
    (hanging,) = (thread for thread in threading.enumerate() if thread.name == "progress")
    assert hanging.daemon
    read.set()
    hanging.join()
