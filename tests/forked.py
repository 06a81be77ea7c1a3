"""A fork server for tests: processes are forked from one that has already imported their modules, for 0.1 s of CPU each
instead of 4.

`Popen` and `run` replace those of subprocess, for commands of this interpreter (`-m MODULE`, `-c PROGRAM`, `redline
...`). The fork server (`nursery`) has one thread and has only imported modules. In a fork that starts other processes
(a server its workers, a worker its ranks), `subprocess.Popen` is replaced by this one too. A fork that leads a session
has a fork server of its own, with forks that belong to its session and process group; /proc shows its name as NURSERY,
and it ends with its leader. A fork that runs a module is shown under the module's last name.

If tests run in parallel, the processes that run them are forks too (`testers`): of a process that has collected all
tests, so that modules are imported once.

A fork differs from a start of the interpreter: environment variables that libraries read at import were read before,
the parent of each fork is a fork server, and the process ends with `os._exit` after its exit functions. So some tests
of each kind of process start a real one.
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
MOST_BYTES, MOST_FILES = 1 << 17, 64  # of one start: bytes of its message, and number of descriptors
HIGH = 500  # free descriptors for temporary use, while the lower ones get their final numbers
# If one test imports these libraries, most test processes would import them separately.
LIBRARIES = (
    "anthropic",
    "openai",
    "torch._dynamo",
    "torch.distributed.tensor",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
)
SIGNALS = signal.SIGTERM, signal.SIGHUP, signal.SIGINT
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # constants of prctl(2)

_start = subprocess.Popen  # the original
_address: bytes | None = None  # of the fork server that this process uses; None: not started yet


class Start(NamedTuple):
    """The description of a process for the fork server: its command without the interpreter, and its
    inherited state.
    """

    words: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]  # the numbers of its descriptors: 0, 1, 2 and those passed
    leads: bool  # starts a session of its own
    controlled: bool  # controlled by the terminal that is its standard input
    cores: list[int]
    nice: int
    blocked: list[int]  # blocked signals


class Popen(subprocess.Popen[Any]):
    """subprocess.Popen, with a forked process if the command runs this interpreter; otherwise unchanged."""

    _told: socket.socket | None = None  # receives first the pid, then the exit status

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
        own = pipes[0], pipes[3], pipes[5]  # the child's ends; -1: inherited from this process
        files = [each if number == -1 else number for each, number in enumerate(own)]
        try:
            told.connect(nursery())
            socket.send_fds(told, [json.dumps(start).encode()], [*files, *pass_fds])
            self.pid = int(told.recv(100))
        except (ConnectionError, ValueError):  # there is no fork server (`_serve`)
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
        # empty: its fork server was killed, and all of its forks with it
        return self.pid, int(status or signal.SIGKILL)

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
    """Within this context, processes are forked whichever module starts them, such as a worker's ranks."""
    with mock.patch.object(subprocess, "Popen", Popen):
        yield


def be_controlled() -> None:
    """A preexec_fn: the terminal on standard input becomes the controlling terminal of the new session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def words_of(command: Any) -> list[str] | None:
    """The words of a command after the interpreter; None if the command does not run this interpreter."""
    if isinstance(command, (str, bytes, os.PathLike)):
        return None
    words = [os.fsdecode(word) for word in command]
    if words[0] == sys.executable and words[1:2] in (["-m"], ["-c"]):
        return words[1:]
    return words if words[0] == REDLINE else None


@contextmanager
def testers(arguments: Sequence[str]) -> Iterator[None]:
    """The processes that pytest-xdist starts within this context are forks of one that has collected the tests.
    arguments: pytest's own.
    """
    global _address
    program = "import sys; from tests import forked; forked.collected(int(sys.argv[1]), sys.argv[2:])"
    _address = _start_nursery(program, *arguments)
    with mock.patch.object(subprocess, "Popen", Tester):
        yield


class Tester(Popen):
    """A process that runs tests. Its command, `-u -c PROGRAM`, makes it read requests of pytest-xdist from standard
    input.
    """

    def __init__(self, command: Sequence[str], **how: Any) -> None:
        interpreter, unbuffered, *words = command  # it reads requests from pipes that are not the interpreter's streams
        assert unbuffered == "-u", command
        super().__init__([interpreter, *words], **how)


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that the interpreter, or a library, reads only once, which the fork server has done
    already.

    A fork server has the modules of this folder in any case, and a fork opens its standard streams again.
    """
    read = {
        name: value
        for name, value in environment.items()
        if re.match("PYTHON|LC_|LANG|OMP_|MKL_|TRITON_|ATEN_|ONEDNN_|REDLINE_CPU_ISA", name)
    }
    read.pop("PYTHONUNBUFFERED", None)
    return {name: value for name, value in read.items() if (name, value) != ("PYTHONPATH", str(ROOT))}


def nursery() -> bytes:
    """The address of the fork server; the first call of a test session starts it."""
    global _address
    if _address is None:
        _address = _start_nursery("import sys; from tests import forked; forked.first(int(sys.argv[1]))")
    return _address


def _start_nursery(program: str, *arguments: str) -> bytes:
    """Start a fork server; -> its address. It ends with this process. program: is called with the number of the socket
    that it reads.
    """
    with _listener() as listener:
        command = [sys.executable, "-c", program, str(listener.fileno()), *arguments]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}  # numpy would start threads, which a fork does not have
        started = _start(command, cwd=ROOT, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=environment)
        atexit.register(_end, started)
        return listener.getsockname()


def _end(started: "subprocess.Popen[bytes]") -> None:
    assert started.stdin is not None
    started.stdin.close()
    started.wait()


# ------------------------------------------------------------------------------------------------- the fork server


def first(number: int) -> None:
    """The fork server of a test session, which ends with its standard input. number: of the socket that it reads."""
    _import()
    _serve(socket.socket(fileno=number))


def collected(number: int, arguments: Sequence[str]) -> None:
    """The fork server of the processes that run tests, and a second one, forked before tests are collected, for all
    other processes.

    number: of the socket that it reads; arguments: the arguments of pytest.
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
        )  # collection errors are reported by the processes that run the tests
    _serve(listener, address)


def _import() -> None:
    """Import the modules of Redline's programs."""
    gc.disable()  # no imported object is freed
    import redline.cli.chat
    import redline.cli.doctor
    import redline.cli.prompt
    import redline.deploy.agent
    import redline.deploy.replica
    import redline.deploy.serve
    import redline.worker.main
    import redline.worker.rank  # noqa: F401

    gc.freeze()
    gc.enable()


def _serve(listener: socket.socket, others: bytes | None = None) -> None:
    """Forks until standard input is at its end. others: the fork server for processes that these forks start, if they
    run tests.
    """
    global _address
    if len(os.listdir("/proc/self/task")) > 1:  # a fork has one thread; locks held by other threads would stay locked
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
    """Fork for each request, and report the exit status of each fork. Returns in the forks; and None once `end` is at
    its end.
    """
    global _address
    _address = listener.getsockname()
    _call_me(NURSERY)
    for each in SIGNALS:  # signals are sent to whole process groups
        signal.signal(each, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    if end is not None:
        selector.register(end, selectors.EVENT_READ)
    askers: dict[int, tuple[int, socket.socket]] = {}  # pidfd of a fork -> its pid, and the socket for its status
    while True:
        for key, _ in selector.select():
            if key.fd == end:
                return None
            if key.fileobj is listener:
                asker, _ = listener.accept()
                told, files, _, _ = socket.recv_fds(asker, MOST_BYTES, MOST_FILES)
                if not told:  # the requesting process has ended
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
                with suppress(OSError):  # the requesting process has ended
                    asker.send(str(pid).encode())
                ended = os.pidfd_open(pid)
                askers[ended] = pid, asker
                selector.register(ended, selectors.EVENT_READ)
            else:
                selector.unregister(key.fd)
                pid, asker = askers.pop(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(pid, 0)
                with asker, suppress(OSError):  # the requesting process has ended
                    asker.send(str(status).encode())


def _take(start: Start, files: list[int]) -> None:
    """Take over the starter's descriptors, environment and other inherited state."""
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
    """A fork server next to this process, in its session. Returns in this process, and in the forks of that server."""
    leader, listener = os.getpid(), _listener()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != leader:
            os._exit(0)
        nobody = os.open(os.devnull, os.O_RDWR)
        for number in start.files:  # these descriptors close with the processes that use them
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
    listener.bind("")  # a free name, chosen by the system
    listener.listen(100)
    return listener


def _call_me(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


# ---------------------------------------------------------------------------------------------------------- a fork


def _run(start: Start) -> NoReturn:
    """Run the requested command to its end."""
    module = start.words[1] if start.words[0] == "-m" else "python"
    _call_me(module.rpartition(".")[2])
    random.seed()  # so that forks do not continue the fork server's sequence
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        nurserys = getattr(sys, name)  # which has recorded its descriptor
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
    """Set sys.argv and run the command, as the interpreter would."""
    match words:
        case ["-m", module, *arguments]:
            sys.argv, sys.path[0] = [module, *arguments], os.getcwd()
            sys.modules.pop(module, None)  # it is run as __main__, not under the name of its import
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", program, *arguments]:
            sys.argv, sys.path[0] = ["-c", *arguments], ""
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), vars(main))
        case _:
            sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
            runpy.run_path(words[0], run_name="__main__")
