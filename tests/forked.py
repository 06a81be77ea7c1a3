"""Processes of tests, forked from one that has imported what they import: 0.1 s of CPU each in the place of 4.

`Popen` and `run` are subprocess's, for commands of this interpreter (`-m MODULE`, `-c PROGRAM`, `redline ...`). The
process that they ask has no thread and has done nothing but import. Where one that it forks starts others (a server its
workers, a worker its ranks), `subprocess.Popen` is this one there too. A fork that leads a session keeps such a process
beside itself, whose forks are of its session and process group; /proc calls it NURSERY, and it ends with its leader.
A fork that runs a module has the module's last name there.

Where tests run side by side, the processes that run them are forks too (`testers`): of one that has collected them all,
so what they import is imported once.

It is not a start of the interpreter: what libraries read of the environment while they are imported was read before,
the parent of each is a nursery, and the end is `os._exit` once exit functions have run. So some tests of each kind of
process start it really.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import re
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import termios
import threading
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import pytest

ROOT = Path(__file__).parents[1]
REDLINE = str(Path(sys.executable).with_name("redline"))
NURSERY = "nursery"
MOST_BYTES, MOST_FILES = 1 << 17, 64  # of one start: what it is told, and its descriptors
HIGH = 500  # descriptors from here on are free, while those below find their numbers
# Where one test imports these, most of the processes that run tests would, each for itself.
LIBRARIES = (
    "anthropic",
    "openai",
    "torch._dynamo",
    "torch.distributed.tensor",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
)
SIGNALS = signal.SIGTERM, signal.SIGHUP, signal.SIGINT
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # of prctl(2)

_start = subprocess.Popen  # really
_address: bytes | None = None  # of the nursery that this process asks; None: there is none yet


class Start(NamedTuple):
    """What a nursery is told of a process: its command without the interpreter, and what it would inherit."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]  # the numbers that its descriptors have: 0, 1, 2 and what is passed
    leads: bool  # a session of its own
    controlled: bool  # by the terminal that is its standard input
    cores: list[int]
    nice: int
    blocked: list[int]  # signals


class Popen(subprocess.Popen[Any]):
    """subprocess.Popen whose process is a fork, where the command is of this interpreter; else that itself."""

    _told: socket.socket | None = None  # first its pid, then how it has ended

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, *more: Any):
        cwd, env, _, _, shell, *pipes = more[:11]
        environment = dict(os.environ if env is None else env)
        others = shell or executable or preexec_fn not in (None, be_controlled)
        words = None if others else words_of(args)
        if words is None or read_at_start(environment) != read_at_start(os.environ):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, *more)
            return
        start = Start(
            words,
            environment,
            os.fspath(cwd or os.getcwd()),
            [0, 1, 2, *pass_fds],
            more[-2],
            preexec_fn is be_controlled,
            [*os.sched_getaffinity(0)],
            os.getpriority(os.PRIO_PROCESS, 0),
            [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        )
        told = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = pipes[0], pipes[3], pipes[5]  # its ends; -1: as this process has it
        files = [each if number == -1 else number for each, number in enumerate(own)]
        try:
            told.connect(nursery())
            socket.send_fds(told, [json.dumps(start).encode()], [*files, *pass_fds])
            self.pid = int(told.recv(100))
        except (ConnectionError, ValueError):  # there is no nursery (`_serve`)
            told.close()
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, *more)
            return
        self._told = told
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._told is None:
            return super()._try_wait(wait_flags)
        try:
            status = self._told.recv(100, socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else 0)
        except BlockingIOError:
            return 0, 0
        self._told.close()
        return self.pid, int(status or signal.SIGKILL)  # nothing: its nursery has been killed, and with it all

    def _internal_poll(self, *how: Any, **more: Any) -> int | None:
        if self._told is None:
            return super()._internal_poll(*how, **more)
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):
            try:
                pid, status = (0, 0) if self.returncode is not None else self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


if sys.platform != "linux":
    Popen = subprocess.Popen


def run(command: Sequence[Any], **how: Any) -> "subprocess.CompletedProcess[Any]":
    """As subprocess.run."""
    with all_processes():
        return subprocess.run(command, **how)


@contextmanager
def all_processes() -> Iterator[None]:
    """What is started here is forked, whoever starts it, such as a worker's ranks."""
    with mock.patch.object(subprocess, "Popen", Popen):
        yield


def be_controlled() -> None:
    """A preexec_fn: the terminal that is standard input controls the new session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def words_of(command: Any) -> list[str] | None:
    """The words of a command behind the interpreter; None: it is not of this interpreter."""
    if isinstance(command, (str, bytes, os.PathLike)):
        return None
    words = [os.fsdecode(word) for word in command]
    if words[0] == sys.executable and words[1:2] in (["-m"], ["-c"]):
        return words[1:]
    return words if words[0] == REDLINE else None


@contextmanager
def testers(arguments: Sequence[str]) -> Iterator[None]:
    """What pytest-xdist starts here are forks of a process that has collected the tests. arguments: pytest's own."""
    global _address
    program = "import sys; from tests import forked; forked.collected(int(sys.argv[1]), sys.argv[2:])"
    _address = _start_nursery(program, *arguments)
    with mock.patch.object(subprocess, "Popen", Tester):
        yield


class Tester(Popen):
    """A process that runs tests. Its command, `-u -c PROGRAM`, makes it hear what pytest-xdist wants."""

    def __init__(self, command: Sequence[str], **how: Any) -> None:
        interpreter, unbuffered, *words = command  # the pipes by which it hears are not the interpreter's streams
        assert unbuffered == "-u", command
        super().__init__([interpreter, *words], **how)


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """What the interpreter, or a library, reads once of an environment, which a nursery has done.

    It has this folder's modules whatever the path says, and a fork's streams are made anew.
    """
    read = {
        name: value
        for name, value in environment.items()
        if re.match("PYTHON|LC_|LANG|OMP_|MKL_|TRITON_|ATEN_|ONEDNN_|REDLINE_CPU_ISA", name)
    }
    read.pop("PYTHONUNBUFFERED", None)
    return {name: value for name, value in read.items() if (name, value) != ("PYTHONPATH", str(ROOT))}


def nursery() -> bytes:
    """The address of the process that is asked for forks; the first call of a session of tests starts it."""
    global _address
    if _address is None:
        _address = _start_nursery("import sys; from tests import forked; forked.first(int(sys.argv[1]))")
    return _address


def _start_nursery(program: str, *arguments: str) -> bytes:
    """Its address; it ends with this process. program: is told the number of the socket that it reads."""
    with _listener() as listener:
        command = [sys.executable, "-c", program, str(listener.fileno()), *arguments]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}  # numpy would start threads, which no fork has
        started = _start(command, cwd=ROOT, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=environment)
        atexit.register(_end, started)
        return listener.getsockname()


def _end(started: "subprocess.Popen[bytes]") -> None:
    assert started.stdin is not None
    started.stdin.close()
    started.wait()


# ------------------------------------------------------------------------------------------------------- a nursery


def first(number: int) -> None:
    """The nursery of a session of tests, which ends with its standard input. number: of the socket that it reads."""
    _import()
    _serve(socket.socket(fileno=number))


def collected(number: int, arguments: Sequence[str]) -> None:
    """The nursery of the processes that run tests, and beside it, begun before it knows of tests, that of all others.

    number: of the socket that it reads; arguments: what pytest was called with.
    """
    _import()
    listener, others = socket.socket(fileno=number), _listener()
    if os.fork() == 0:
        listener.close()
        _serve(others)
        return
    address = others.getsockname()
    others.close()
    for each in LIBRARIES:
        importlib.import_module(each)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        pytest.main(
            [*arguments, "-n0", "--collect-only", "-qq"]
        )  # what cannot be collected is said by those that run it
    _serve(listener, address)


def _import() -> None:
    """What the programs of Redline import."""
    gc.disable()  # nothing of what is imported goes
    import redline.cli.chat
    import redline.cli.doctor
    import redline.cli.prompt
    import redline.fleet.agent
    import redline.fleet.replica
    import redline.fleet.serve
    import redline.worker.main
    import redline.worker.rank  # noqa: F401

    gc.freeze()
    gc.enable()


def _serve(listener: socket.socket, others: bytes | None = None) -> None:
    """Forks until standard input is at its end. others: the nursery of what these forks start, if they run tests."""
    global _address
    if len(os.listdir("/proc/self/task")) > 1:  # a fork has one thread, whatever the others held
        print("tests: a library started a thread on import, so processes start anew, which is slower", file=sys.stderr)
        return
    start = _forks(listener, end=0)
    if start is not None and others is not None:
        _address = others
        _run(start)
    elif start is not None:
        start = _lead(start) if start.leads else start
        subprocess.Popen = Popen
        _run(start)


def _forks(listener: socket.socket, end: int | None = None) -> Start | None:
    """Forks for whoever asks, and says how each has ended. Returns in the forks; and None once `end` is at its end."""
    global _address
    _address = listener.getsockname()
    _call_me(NURSERY)
    for each in SIGNALS:  # they reach whole groups
        signal.signal(each, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    if end is not None:
        selector.register(end, selectors.EVENT_READ)
    askers: dict[int, tuple[int, socket.socket]] = {}  # by what tells that a fork has ended: its pid, and who is told
    while True:
        for key, _ in selector.select():
            if key.fd == end:
                return None
            if key.fileobj is listener:
                asker, _ = listener.accept()
                told, files, _, _ = socket.recv_fds(asker, MOST_BYTES, MOST_FILES)
                if not told:  # who asked has ended
                    asker.close()
                    continue
                start = Start(*json.loads(told))
                pid = os.fork()
                if pid == 0:
                    for each in (selector, listener, asker, *(other for _, other in askers.values())):
                        each.close()
                    for number in askers:
                        os.close(number)
                    _take(start, files)
                    return start
                for number in files:
                    os.close(number)
                with suppress(OSError):  # who asked has ended
                    asker.send(str(pid).encode())
                ended = os.pidfd_open(pid)
                askers[ended] = pid, asker
                selector.register(ended, selectors.EVENT_READ)
            else:
                selector.unregister(key.fd)
                pid, asker = askers.pop(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(pid, 0)
                with asker, suppress(OSError):  # who asked has ended
                    asker.send(str(status).encode())


def _take(start: Start, files: list[int]) -> None:
    """What a fork has of its starter."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, HIGH) for number in files]
    for number in files:
        os.close(number)
    for number, wanted in zip(high, start.files, strict=True):
        os.dup2(number, wanted)
        os.close(number)
    if start.leads:
        os.setsid()
    if start.controlled:
        be_controlled()
    os.chdir(start.folder)
    os.environ.clear()
    os.environ.update(start.environment)
    os.sched_setaffinity(0, start.cores)
    os.setpriority(os.PRIO_PROCESS, 0, start.nice)


def _lead(start: Start) -> Start:
    """A nursery beside this process, in its session. Returns here, and in the forks of that one."""
    leader, listener = os.getpid(), _listener()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != leader:
            os._exit(0)
        nobody = os.open(os.devnull, os.O_RDWR)
        for number in start.files:  # they end with those that they are for
            os.dup2(nobody, number)
        os.close(nobody)
        start = _forks(listener) or start
        return _lead(start) if start.leads else start
    global _address
    _address = listener.getsockname()
    listener.close()
    return start


def _listener() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")  # any name that is free
    listener.listen(100)
    return listener


def _call_me(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


# ---------------------------------------------------------------------------------------------------------- a fork


def _run(start: Start) -> NoReturn:
    """The process that was asked for, to its end."""
    module = start.words[1] if start.words[0] == "-m" else "python"
    _call_me(module.rpartition(".")[2])
    random.seed()  # not all as their nursery would go on
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        nurserys = getattr(sys, name)  # which knows what its descriptor was
        how = {"encoding": nurserys.encoding, "errors": nurserys.errors, "closefd": False}
        stream = open(number, mode, **how)  # noqa: SIM115
        if name == "stderr" or os.environ.get("PYTHONUNBUFFERED"):
            stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, start.blocked)
    code = 0
    try:
        _command(start.words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _command(words: list[str]) -> None:
    """As the interpreter would be told it."""
    match words:
        case ["-m", module, *arguments]:
            sys.argv, sys.path[0] = [module, *arguments], os.getcwd()
            sys.modules.pop(module, None)  # it is run as what it is not imported as
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", program, *arguments]:
            sys.argv, sys.path[0] = ["-c", *arguments], ""
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), vars(main))
        case _:
            sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
            runpy.run_path(words[0], run_name="__main__")
