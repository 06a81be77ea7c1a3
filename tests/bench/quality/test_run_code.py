"""Model-written code is contained: its attempts fail, and the next candidate is unharmed."""

import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from redline.bench.quality import run_code
from redline.bench.quality.run_code import CodeCandidate, CodeOutcome
from tests.waiting import until

HOLDS = "assert f() == 1"
WALL_S = 120.0  # long enough for a child to finish on a busy machine


def run_asserts(candidate: CodeCandidate) -> CodeOutcome:
    return run_code.run_asserts(candidate, WALL_S)


def attempt(body: str, wall_s: float = WALL_S) -> str:
    """The reason why a candidate function with this body did not pass."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    outcome = run_code.run_asserts(CodeCandidate(f"def f():\n{lines}\n    return 1", HOLDS, "f"), wall_s)
    assert not outcome.passed
    return outcome.why


def test_right_code_passes_and_wrong_code_says_why() -> None:
    assert run_asserts(CodeCandidate("def f(): return 1", HOLDS, "f")) == (True, "")
    assert run_asserts(CodeCandidate("import math, re\ndef f(): return math.gcd(2, 3)", HOLDS, "f")).passed
    assert "assert failed" in run_asserts(CodeCandidate("def f(): return 2", HOLDS, "f")).why
    assert "SyntaxError" in run_asserts(CodeCandidate("def f( return", HOLDS, "f")).why
    assert "defines no function f" in run_asserts(CodeCandidate("f = 3", HOLDS, "f")).why
    assert "ZeroDivisionError" in attempt("1 / 0")


def test_an_endless_loop_is_killed_on_time() -> None:
    assert "still running after 0.7 s" in attempt("while True: print('x')", wall_s=0.7)


def test_a_child_that_sleeps_ends_also_where_nobody_is_left_to_kill_it() -> None:
    program = (
        "from redline.bench.quality.run_code import CodeCandidate, run_asserts\n"
        "run_asserts(CodeCandidate('import time\\ntime.sleep(600)', 'pass'), 1.0)"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as parent:
        child = _child_of(parent.pid)
        parent.kill()
    until(lambda: not _is_there(child))


def _child_of(pid: int) -> int:
    """A child that runs the candidate: its limit of open files is zero by then."""

    def found() -> int | None:
        with suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                if "Max open files            0 " in Path(f"/proc/{child}/limits").read_text():
                    return int(child)
        return None

    child = until(found)
    assert child is not None
    return child


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_endless_recursion_and_a_memory_bomb_end_only_themselves() -> None:
    assert "RecursionError" in attempt("return f()")
    assert "MemoryError" in attempt("x = bytearray(1 << 30)")
    assert "MemoryError" in attempt("x = [0]\nwhile True: x += x")


def test_no_process_or_thread_can_be_started() -> None:
    assert "os.fork" in attempt("import os\nwhile True: os.fork()")
    assert "os.system" in attempt("import os\nos.system('true')")
    assert "Error" in attempt("import subprocess\nsubprocess.run(['true'])")
    assert "Error" in attempt("import _thread\n_thread.start_new_thread(print, ())")


def test_no_file_can_be_read_written_or_deleted(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    tmp_path.chmod(0o777)
    precious.chmod(0o666)
    assert "open" in attempt(f"open({str(precious)!r}).read()")
    assert "open" in attempt(f"open({str(precious)!r}, 'w').write('lost')")
    assert "open" in attempt("open('here', 'w').write('x' * 10)")
    assert "os.remove" in attempt(f"import os\nos.remove({str(precious)!r})")
    assert "os.rename" in attempt(f"import os\nos.rename({str(precious)!r}, 'mine')")
    assert precious.read_text() == "kept"


def test_no_connection_can_be_made() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        assert "Error" in attempt(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))")
        assert "Error" in attempt(f"import _socket\n_socket.socket().connect(('127.0.0.1', {port}))")
        with pytest.raises(BlockingIOError):
            server.accept()


def test_other_processes_cannot_be_signalled() -> None:
    assert "os.kill" in attempt("import os\nos.kill(os.getppid(), 15)")
    assert "os.killpg" in attempt("import os\nos.killpg(0, 9)")


def test_nothing_of_our_environment_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_TEST_SECRET", "hush")
    code = "import os\ndef f(): return sorted(os.environ)"
    assert run_asserts(CodeCandidate(code, "assert 'REDLINE_TEST_SECRET' not in f()", "f")).passed


def test_leaving_early_or_printing_is_not_passing() -> None:
    assert "ended early" in attempt("import os\nos._exit(0)")
    assert "SystemExit" in attempt("exit = __import__('sys').exit\nexit(0)")
    assert "ended early" in attempt("import os\nos.write(3, b'x' * 100)\nos._exit(0)")


def test_one_candidate_cannot_spoil_another() -> None:
    good = CodeCandidate("def f(): return 1", HOLDS, "f")
    bad = CodeCandidate("import builtins\nbuiltins.len = None\ndef f(): return 1 / 0", HOLDS, "f")
    outcomes = run_code.run_many([bad, good, bad, good, bad], children=2, wall_s=WALL_S)
    assert [outcome.passed for outcome in outcomes] == [False, True, False, True, False]
