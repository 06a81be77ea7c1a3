"""A worker's process on this machine: started, watched, ended. The server has some, and so has every agent."""

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import msgspec

from redline.errors import ConfigError, not_installed
from redline.limits import open_files
from redline.worker.config import AREA_BYTES, WorkerConfig

WORKER = sys.executable, "-m", "redline.worker.main"  # a worker's command
OF_A_WORKER = "torch", "numpy", "safetensors", "llguidance"  # packages that the server itself does not import
LEAST_FILES = 256  # sockets to workers, pipes, libraries, and some connections
LEAST_ADDRESSES = 2 << 30  # bytes
STOP_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # the last: its terminal was closed


def check_process() -> None:
    """ConfigError where this process is given less than a server or an agent needs, works in no folder, or could start
    no worker for want of a package.

    Its bound on open files is raised to `limits.FILES` as far as the hard one allows; what it starts inherits that.
    """
    try:
        os.getcwd()
    except OSError:
        raise ConfigError("the working directory has been deleted: cd to one that exists") from None
    for package in OF_A_WORKER:
        if find_spec(package) is None:
            raise ConfigError(not_installed(package))
    if (files := open_files()) < LEAST_FILES:
        raise ConfigError(
            f"this process may open {files} files; expected {LEAST_FILES} at least: "
            f"ulimit -n {LEAST_FILES}, or LimitNOFILE={LEAST_FILES} of its service"
        )
    memory, _ = resource.getrlimit(resource.RLIMIT_AS)
    if memory != resource.RLIM_INFINITY and memory < LEAST_ADDRESSES:
        raise ConfigError(
            f"this process may have {memory / 2**30:.1f} GiB of addresses; a worker needs "
            f"{LEAST_ADDRESSES >> 30} GiB for its libraries alone: ulimit -v unlimited"
        )


class Process(Protocol):
    """One start of a worker, wherever it runs."""

    pid: int | None  # on this machine; None: it runs on another
    ended: "asyncio.Future[str]"  # how, once it has, behind "the worker has ended": " with code 1"
    gone: bool  # it has ended with its machine, which is none of its own doing
    leaving: asyncio.Event  # set once its machine is about to leave

    def kill(self) -> None:
        """End it at once; idempotent."""
        ...

    def close(self) -> None:
        """Take away what it has left behind, once it has ended."""
        ...


class LocalProcess:
    """A worker's process on this machine; it ends with this process, however that ends."""

    gone = False

    def __init__(self, process: "subprocess.Popen[bytes]", parcels: Path | None) -> None:
        """parcels: the folder of what it hands over, where it has one."""
        self.pid: int | None = process.pid
        self.leaving = asyncio.Event()
        self._process = process
        self._parcels = parcels
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = loop.create_future()
        # Of its own, as the loop's have other work; and a daemon, since an interpreter that ends waits for others.
        threading.Thread(target=self._wait, args=(loop,), name="waiter", daemon=True).start()

    def kill(self) -> None:
        """End it at once; idempotent."""
        if self._process.poll() is None:
            self._process.kill()

    def close(self) -> None:
        """Take away what it has left behind, once it has ended."""
        if self._parcels is not None:
            for left in self._parcels.glob(f"parcels-{self.pid}-*"):
                left.unlink(missing_ok=True)
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        how = f" with code {self._process.wait()}"
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(self._has_ended, how)

    def _has_ended(self, how: str) -> None:
        if not self.ended.done():
            self.ended.set_result(how)


def start_worker(config: WorkerConfig, devices: tuple[int, ...]) -> "subprocess.Popen[bytes]":
    """A worker's process, which reads its config from a pipe that ends with this process.

    devices: GPUs that it sees; none: all that this process sees. Raises OSError.
    """
    environment = dict(os.environ)
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    # Ctrl-C, and a supervisor's SIGTERM, reach the whole group, and a child inherits what is blocked: the worker is not
    # interrupted even while it imports, before it can say so itself.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process = subprocess.Popen(WORKER, stdin=subprocess.PIPE, env=environment)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already, which its caller will see
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
    return process


def folder_for_parcels(lenders: int) -> Path:
    """A folder of mode 0700, in the host's memory where that has room for the parcels of so many workers.

    Raises ConfigError.
    """
    memory = Path("/dev/shm")
    try:
        room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > lenders * 2 * AREA_BYTES
        return Path(tempfile.mkdtemp(prefix="redline-", dir=memory if room else None))
    except OSError as error:
        raise ConfigError(f"no folder for what workers hand over: {error}; set TMPDIR to one") from None
