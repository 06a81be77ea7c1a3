"""Lines on standard error: what they let through, and what happens if the pipe is not read."""

import json
import logging
import os
import threading

from redline.deploy.lines import MOST_WAITING, JsonLines, Lines, printable


def read_all(descriptor: int) -> str:
    with os.fdopen(descriptor, "rb") as file:
        return file.read().decode()


def record(message: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("redline.access", level, "", 0, message, None, None)


def test_what_a_terminal_would_obey_is_escaped():
    assert printable("GET / 200, [bold] é 東京") == "GET / 200, [bold] é 東京"
    assert printable("a\x1b[31mb\rc\x9bd") == "a\\x1b[31mb\\rc\\x9bd"
    assert printable("a\u202eb\ud800") == "a\\u202eb\\ud800"
    assert printable("Traceback\n  File") == "Traceback\n  File"


def test_lines_are_written_in_order_and_all_of_them_before_the_end():
    reader, writer = os.pipe()
    lines = Lines(writer)
    for number in range(100):
        lines.handle(record(f"{number}"))
    lines.close()
    os.close(writer)
    assert read_all(reader) == "".join(f"{number}\n" for number in range(100))


def test_where_nobody_reads_lines_are_dropped_and_counted_and_nobody_waits():
    reader, writer = os.pipe()
    lines = Lines(writer)
    long = "x" * 4000  # a pipe's buffer holds 16 of them
    told = 3 * MOST_WAITING
    for _ in range(told):
        lines.handle(record(long))
    read: list[str] = []
    thread = threading.Thread(target=lambda: read.append(read_all(reader)))
    thread.start()
    lines.close()
    os.close(writer)
    thread.join()
    assert MOST_WAITING <= read[0].count(long) < told
    assert "lines were dropped here: stderr was blocked)" in read[0]


def test_a_reader_that_is_gone_is_no_error():
    reader, writer = os.pipe()
    lines = Lines(writer)
    os.close(reader)
    lines.handle(record("a"))
    lines.close()
    os.close(writer)


def test_a_line_of_json_is_a_request_with_its_fields_or_a_message():
    lines = JsonLines()
    told = json.loads(lines.format(record('a "quoted"\nline \x1b')))
    assert (told["level"], told["message"]) == ("INFO", 'a "quoted"\nline \x1b')
    assert len(told["time"]) == len("2026-11-23T07:01:02Z")
    request = record("request")
    request.__dict__["fields"] = {"status": 200, "path": "/health"}
    line = lines.format(request)
    assert "\n" not in line
    assert {key: value for key, value in json.loads(line).items() if key != "time"} == {
        "level": "INFO", "status": 200, "path": "/health",
    }  # fmt: skip
