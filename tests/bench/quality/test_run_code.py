"""Model-written code is contained: what it tries, it cannot do, and the next candidate is unharmed."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from redline.bench.quality.run_code import Candidate, run_asserts, run_many

HOLDS = "assert f() == 1"


def attempt(body: str, wall_s: float = 5.0) -> str:
    """Why a candidate whose function has this body did not pass."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    outcome = run_asserts(Candidate(f"def f():\n{lines}\n    return 1", HOLDS, "f"), wall_s)
    assert not outcome.passed
    return outcome.why


def test_right_code_passes_and_wrong_code_says_why() -> None:
    assert run_asserts(Candidate("def f(): return 1", HOLDS, "f")) == (True, "")
    assert run_asserts(Candidate("import math, re\ndef f(): return math.gcd(2, 3)", HOLDS, "f")).passed
    assert "assert failed" in run_asserts(Candidate("def f(): return 2", HOLDS, "f")).why
    assert "SyntaxError" in run_asserts(Candidate("def f( return", HOLDS, "f")).why
    assert "defines no function f" in run_asserts(Candidate("f = 3", HOLDS, "f")).why
    assert "ZeroDivisionError" in attempt("1 / 0")


def test_an_endless_loop_is_killed_on_time() -> None:
    start = time.monotonic()
    assert "still running after 0.7 s" in attempt("while True: print('x')", wall_s=0.7)
    assert time.monotonic() - start < 3


def test_a_child_that_sleeps_ends_also_where_nobody_is_left_to_kill_it() -> None:
    program = (
        "from redline.bench.quality.run_code import Candidate, run_asserts\n"
        "run_asserts(Candidate('import time\\ntime.sleep(600)', 'pass'), 1.0)"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as parent:
        child = _child_of(parent.pid)
        parent.kill()
    deadline = time.monotonic() + 60
    while _is_there(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _is_there(child)


def _child_of(pid: int) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        # it runs the candidate once it has given up its descriptors
        if found and "Max open files            0 " in Path(f"/proc/{found[0]}/limits").read_text():
            return int(found[0])
    raise AssertionError("no child")


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
        server.settimeout(0.1)
        port = server.getsockname()[1]
        assert "Error" in attempt(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))")
        assert "Error" in attempt(f"import _socket\n_socket.socket().connect(('127.0.0.1', {port}))")
        with pytest.raises(TimeoutError):
            server.accept()


def test_other_processes_cannot_be_signalled() -> None:
    assert "os.kill" in attempt("import os\nos.kill(os.getppid(), 15)")
    assert "os.killpg" in attempt("import os\nos.killpg(0, 9)")


def test_nothing_of_our_environment_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_TEST_SECRET", "hush")
    code = "import os\ndef f(): return sorted(os.environ)"
    assert run_asserts(Candidate(code, "assert 'REDLINE_TEST_SECRET' not in f()", "f")).passed


def test_leaving_early_or_printing_is_not_passing() -> None:
    assert "ended early" in attempt("import os\nos._exit(0)")
    assert "SystemExit" in attempt("exit = __import__('sys').exit\nexit(0)")
    assert "ended early" in attempt("import os\nos.write(3, b'x' * 100)\nos._exit(0)")


def test_one_candidate_cannot_spoil_another() -> None:
    good = Candidate("def f(): return 1", HOLDS, "f")
    bad = Candidate("import builtins\nbuiltins.len = None\ndef f(): return 1 / 0", HOLDS, "f")
    outcomes = run_many([bad, good, bad, good, bad], children=2)
    assert [outcome.passed for outcome in outcomes] == [False, True, False, True, False]
