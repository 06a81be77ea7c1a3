"""The command around every verb: any error is one line and exit code 1, on any kind of output."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from redline import __main__ as entry
from redline.cli import app, main
from redline.errors import ConfigError
from tests.cli.pty_session import session
from tests.waiting import LIMIT_S

COMMAND = [sys.executable, "-m", "redline"]
ROOT = Path(__file__).parents[2]
NANO = str(ROOT / "models" / "kimi-nano")
SHOWN = ["config", NANO]  # a verb that prints a page, and does not need torch


def main_raises(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: Exception) -> str:
    """The output of `main` if a verb raises `error`."""

    def fails() -> None:
        raise error

    monkeypatch.setattr("redline.cli.app", fails)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    return capfd.readouterr().err


def test_an_error_that_nobody_foresaw_is_one_line_and_its_traceback_is_kept(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = main_raises(monkeypatch, capfd, ZeroDivisionError("by [/red]\nnought"))
    assert re.fullmatch(r"error: ZeroDivisionError: by \[/red\] nought; this is a bug in Redline; .*\n", said)
    (kept,) = tmp_path.iterdir()
    assert said.rstrip("\n").endswith(f"the traceback is in {kept}")
    assert "in fails" in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0, "it may contain users' text"


def test_where_no_traceback_can_be_kept_the_error_is_one_line_still(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def full(**_: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("redline.cli.tempfile.mkstemp", full)
    said = main_raises(monkeypatch, capfd, ZeroDivisionError("by nought"))
    assert re.fullmatch(r"error: ZeroDivisionError: by nought; .*; REDLINE_DEBUG=1 prints the traceback\n", said)


@pytest.mark.parametrize("error", [ZeroDivisionError("by nought"), ConfigError("port: no")])
def test_the_traceback_of_any_error_is_printed_on_demand(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: Exception
):
    monkeypatch.setenv("REDLINE_DEBUG", "1")
    said = main_raises(monkeypatch, capfd, error)
    assert "Traceback" in said
    assert said.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (PermissionError(13, "Permission denied", "/a/[/b]"), r"/a/\[/b\]: Permission denied"),
        (ConfigError("\x1b[2J [bold]\ud800"), r"\\x1b\[2J \[bold\]\\ud800"),
    ],
)
def test_an_error_that_somebody_can_mend_keeps_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: Exception, words: str
):
    assert re.fullmatch(f"error: {words}\n", main_raises(monkeypatch, capfd, error))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ModuleNotFoundError("no", name="torch.nn"),
            "torch is not installed for .*: run `make serve`",
        ),
        (ImportError("libx.so: too short", name="torch._C"), "torch cannot be imported: libx.so: too short"),
        (
            ModuleNotFoundError("no", name="_sqlite3"),
            ".* was built without a part of Python: .*",
        ),
        (ModuleNotFoundError("no", name="redline.x"), "ModuleNotFoundError: no; this is a bug in Redline; .*"),
        (MemoryError(), "no memory is left: check ulimit -v .*"),
    ],
)
def test_what_cannot_be_imported_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: Exception, words: str
):
    assert re.match(f"error: {words}", main_raises(monkeypatch, capfd, error))


@pytest.mark.parametrize("words", [[], ["serve", "--nano"]])
def test_a_python_without_packages_is_told_what_installs_them(words: list[str]):
    """From the source tree, without site-packages."""
    command = [sys.executable, "-S", "-m", "redline", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 1
    how = f"run `make serve` in {ROOT}, which makes an environment, or {sys.executable} -m pip install -e {ROOT}"
    assert re.fullmatch(rf"error: \w+ is not installed for {re.escape(f'{sys.executable}: {how}')}\n", done.stderr)


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 14, 0)])
def test_a_python_that_is_not_supported_is_told_which_are(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]
):
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(SystemExit) as end:
        entry.main()
    here = ".".join(map(str, version))
    assert end.value.code == f"error: Redline needs Python 3.11, 3.12 or 3.13, and {sys.executable} is {here}"


# ---------------------------------------------------------------------------------------------------- kinds of output


def test_a_pipe_that_nobody_reads_is_no_error():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        done = subprocess.run([*COMMAND, *SHOWN], stdout=nobody, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    assert done.stderr == ""


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", [SHOWN, ["--help"]], ids=lambda words: words[0])
def test_a_full_disk_is_one_line(words: list[str], unbuffered: str):
    given: dict[str, Any] = {"env": {**os.environ, "PYTHONUNBUFFERED": unbuffered}, "timeout": LIMIT_S}
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True, **given)
    assert done.returncode == 1
    assert done.stderr == "error: No space left on device\n"


@pytest.mark.parametrize(
    ("redirected", "code"),
    [
        ("config $1 >&-", 0),
        ("--help >&-", 0),
        ("serve nowhere 2>&-", 1),
        ("serve nowhere >&- 2>&-", 1),
        ("chat <&-", 1),
    ],
)
def test_a_stream_that_is_closed_is_done_without(redirected: str, code: int):
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m redline {redirected}', sys.executable, NANO],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_a_closed_stream_leaves_its_number_to_no_socket():
    program = (
        "import os, redline.__main__ as m; m._fill_standard_streams(); s = os.open('/', 0); print(s, file=open(1, 'w'))"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- 2>&-', sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert int(done.stdout) > 2


SEVERAL = """
import sys
from redline.__main__ import main

codes = []
for words in sys.argv[1:]:
    sys.argv = ["redline", *words.split()]
    try:
        main()
    except SystemExit as end:
        codes.append(end.code)
print(codes)
"""


@pytest.mark.parametrize(
    "environment",
    [
        {"COLUMNS": "1", "HOME": "/proc/nowhere"},
        {"COLUMNS": "0", "PYTHONIOENCODING": "ascii"},
        {"TERM": "", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"TERM": "dumb", "HOME": ""},
    ],
    ids=str,
)
def test_every_environment_will_do(environment: dict[str, str]):
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, "--help", "config /no/[/földer]\udcff", "serve --port [/x]"],
        capture_output=True,
        timeout=LIMIT_S,
        env={**os.environ, **environment},
    )
    assert done.stdout.splitlines()[-1] == b"[0, 1, 2]", done.stderr
    assert b"Traceback" not in done.stderr


def test_it_says_that_it_wants_linux():
    assert "Linux" in CliRunner().invoke(app, ["--help"]).output


# ---------------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("module", ["redline.cli.doctor", "torch", "torch.nn"])
def test_ctrl_c_ends_a_verb_without_a_word_whatever_it_imports(module: str):
    done = interrupted(BEGINS.replace("redline.cli", module), "doctor")
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "")


def test_ctrl_c_as_a_class_is_made_is_ctrl_c(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Python 3.11 raises a RuntimeError from it, as when torch is imported."""

    def fails() -> None:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    monkeypatch.setattr("redline.cli.app", fails)
    with pytest.raises(KeyboardInterrupt):
        main()
    assert capfd.readouterr().err == ""


# Each prints "now", and continues after a byte on its standard input.
BEGINS = """
import importlib.abc, os, runpy, sys

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "redline.cli":
            print("now", flush=True)
            os.read(0, 1)

sys.meta_path.insert(0, Slow())
runpy.run_module("redline", run_name="__main__")
"""
ENDS = """
import atexit, os, runpy

atexit.register(lambda: (print("now", flush=True), os.read(0, 1)))
runpy.run_module("redline", run_name="__main__")
"""


READS = """
import os, runpy, typer.main

def slow(_):
    print("now", flush=True)
    os.read(0, 1)

typer.main.get_command = slow
runpy.run_module("redline", run_name="__main__")
"""


def interrupted(program: str, verb: str = "--help") -> subprocess.CompletedProcess[str]:
    """The result of a program that got Ctrl-C after it had printed "now"."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", program, verb], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "now\n":
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_S)
        said, wrong = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, said, wrong)


def test_ctrl_c_while_the_flags_are_read_ends_the_process_without_a_word():
    done = interrupted(READS)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "")


@pytest.mark.parametrize("program", [BEGINS, ENDS], ids=["while modules are loaded", "while the interpreter goes down"])
def test_ctrl_c_around_a_verb_ends_the_process_at_once_without_a_word(program: str):
    done = interrupted(program)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("program", [BEGINS, ENDS], ids=["while modules are loaded", "while the interpreter goes down"])
def test_where_ctrl_c_is_ignored_it_stays_so(program: str):
    with subprocess.Popen(
        [sys.executable, "-c", program, "--help"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "now\n":
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate("\n", timeout=LIMIT_S)
        assert process.returncode == 0


def test_the_greeting_of_a_terminal_that_is_one_column_wide():
    with session("config", "/no/such/folder", size=(1, 1)) as one:
        assert one.ends() == 1
        shown = one.shown.replace("\r\n", "")  # Rich 15 folds the word itself
        assert "error:" in shown
        assert "Traceback" not in shown


def test_the_version_and_help_have_the_names_that_people_try(capsys: pytest.CaptureFixture[str]):
    from redline import __version__
    from redline.cli import app

    for words, shown in (
        (["--version"], f"redline {__version__}\n"),
        (["-h"], "Usage"),
        (["bench", "decode", "-h"], "Usage"),
    ):
        app(words, standalone_mode=False)
        assert shown in capsys.readouterr().out
