"""Runs a function written by a model against assert statements, in a sandbox.

Each candidate runs in its own subprocess: `python -I`, an empty temporary folder, an empty environment, a timeout of
five seconds, and resource limits that allow only computation. It cannot open descriptors (files, sockets, pipes) or
start processes or threads; an audit hook refuses actions that need neither (signals, deletions). Common modules are
imported before that. This is the only place in Redline that executes text from a model (docs/bench.md).
"""

import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import NamedTuple

WALL_S = 5.0
MEMORY_BYTES = 512 << 20
REPORT_BYTES = 4096  # maximum bytes that a subprocess can write


class CodeOutcome(NamedTuple):
    """Whether the code and its asserts passed, and one line of explanation if not."""

    passed: bool
    why: str  # empty if passed


class CodeCandidate(NamedTuple):
    """A program written by a model, and its test."""

    code: str
    asserts: str  # Python statements that raise if the code is wrong
    function: str | None = None  # a function that the code must define


def run_asserts(candidate: CodeCandidate, wall_s: float = WALL_S) -> CodeOutcome:
    """Executes the code, then the asserts, in one subprocess. Blocks for at most about `wall_s` seconds.

    Failures are reported in the Outcome. Raises OSError only if the subprocess cannot be started.
    """
    # The verdict starts with a random word, so that neither exit() nor a print() of the candidate can imitate it.
    word = secrets.token_hex(16)
    orders = candidate._asdict() | {
        "word": word,
        "cpu_s": int(wall_s) + 1,
        "memory": MEMORY_BYTES,
        "file": REPORT_BYTES,
    }
    command = [sys.executable, "-I", "-S", "-B", "-c", _CHILD]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as report:
        # A file instead of a pipe: the file size limit bounds it, so that output cannot fill our memory.
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=report, stderr=subprocess.DEVNULL, cwd=folder, env={}
        )
        try:
            child.communicate(json.dumps(orders).encode(), timeout=wall_s)
        except subprocess.TimeoutExpired:
            return CodeOutcome(False, f"still running after {wall_s:g} s")
        finally:
            child.kill()
            child.wait()
        report.seek(0)
        first, _, why = report.read(REPORT_BYTES).decode(errors="replace").partition(" ")
    if first != word:
        return CodeOutcome(False, f"ended early, with status {child.returncode}")
    return CodeOutcome(why == "", why)


def run_many(candidates: Sequence[CodeCandidate], children: int = 2, wall_s: float = WALL_S) -> list[CodeOutcome]:
    """The outcomes in the order of the candidates, `children` at a time, each with a timeout of `wall_s` seconds."""
    with ThreadPoolExecutor(children) as pool:
        return list(pool.map(run_asserts, candidates, repeat(wall_s)))


# The subprocess sets its limits itself, before it runs the candidate: a `preexec_fn` would run between fork and exec in
# a process with threads. RLIMIT_NPROC does not apply to root, so root switches to an unprivileged user first.
_CHILD = """
import json, os, resource, sys, _signal
import abc, bisect, calendar, cmath, collections.abc, copy, dataclasses, datetime, decimal, enum, fractions, functools
import heapq, itertools, math, numbers, operator, random, re, statistics, string, textwrap, time, typing, unicodedata

orders = json.loads(sys.stdin.buffer.read())
sys.stdin = None
report = os.dup(1)
void = os.open(os.devnull, os.O_RDWR)
for descriptor in (0, 1, 2):
    os.dup2(void, descriptor)
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
_signal.alarm(orders["cpu_s"] + 1)  # who would kill a child that sleeps may be gone
for limit, value in [
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_CPU, orders["cpu_s"]),
    (resource.RLIMIT_AS, orders["memory"]),
    (resource.RLIMIT_FSIZE, orders["file"]),
    (resource.RLIMIT_NPROC, 0),
    (resource.RLIMIT_NOFILE, 0),
]:
    resource.setrlimit(limit, (value, value))

CLOSED = ("os.", "open", "socket.", "subprocess.", "shutil.", "signal.", "ctypes.", "_thread.", "syslog.", "mmap.")

def guard(event, arguments, CLOSED=CLOSED):
    if event.startswith(CLOSED):
        raise PermissionError(event + " is not allowed here")

sys.addaudithook(guard)

def verdict(orders):
    room = {"__name__": "answer"}
    try:
        exec(compile(orders["code"], "answer", "exec"), room)
        if orders["function"] and not callable(room.get(orders["function"])):
            return "defines no function " + orders["function"]
        exec(compile(orders["asserts"], "asserts", "exec"), room)
    except AssertionError as error:
        return "an assert failed " + str(error)[:200]
    except BaseException as error:
        return type(error).__name__ + ": " + str(error)[:200]
    return ""

write, leave, word = os.write, os._exit, orders.pop("word")
why = verdict(orders).strip()
write(report, (word + " " + why).encode(errors="replace"))
leave(0)
"""
