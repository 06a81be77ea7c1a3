"""A worker's process on this machine: start, watch and kill it. Used by the server and by every agent."""

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
LEAST_FILES = 256  # open files: sockets to workers, pipes, libraries, and some connections
LEAST_ADDRESSES = 2 << 30  # bytes of address space
STOP_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # SIGHUP: the terminal was closed


def check_process() -> None:
    """Raise ConfigError if the limits of this process are too low for a server or an agent, its working directory does
    not exist, or a package that workers need is missing.

    Raises the soft limit on open files to `limits.FILES`, as far as the hard limit allows; child processes inherit it.
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
            f"this process may open {files} files; expected at least {LEAST_FILES}: "
            f"ulimit -n {LEAST_FILES}, or LimitNOFILE={LEAST_FILES} of its service"
        )
    memory, _ = resource.getrlimit(resource.RLIMIT_AS)
    if memory != resource.RLIM_INFINITY and memory < LEAST_ADDRESSES:
        raise ConfigError(
            f"this process is limited to {memory / 2**30:.1f} GiB of address space; a worker needs "
            f"{LEAST_ADDRESSES >> 30} GiB for its libraries alone: ulimit -v unlimited"
        )


class Process(Protocol):
    """One start of a worker, on this or another machine."""

    pid: int | None  # None: the process is on another machine
    ended: "asyncio.Future[str]"  # how it ended, to be appended to "the worker has ended", such as " with code 1"
    gone: bool  # it ended because its machine is down, which does not count as its failure
    leaving: asyncio.Event  # set once its machine is about to leave

    def kill(self) -> None:
        """Kill it at once; idempotent."""
        ...

    def close(self) -> None:
        """Remove the files that it has left, once it has ended."""
        ...


class LocalProcess:
    """A worker's process on this machine; it ends when this process ends for any reason."""

    gone = False

    def __init__(self, process: "subprocess.Popen[bytes]", parcels: Path | None) -> None:
        """parcels: the folder of its KV transfer buffers; None: it has none."""
        self.pid: int | None = process.pid
        self.leaving = asyncio.Event()
        self._process = process
        self._parcels = parcels
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = loop.create_future()
        # A thread of its own, as those of the loop's executor are shared; a daemon, so that the interpreter can exit.
        threading.Thread(target=self._wait, args=(loop,), name="waiter", daemon=True).start()

    def kill(self) -> None:
        """Kill it at once; idempotent."""
        if self._process.poll() is None:
            self._process.kill()

    def close(self) -> None:
        """Remove the files that it has left, once it has ended."""
        if self._parcels is not None:
            for left in self._parcels.glob(f"parcels-{self.pid}-*"):
                left.unlink(missing_ok=True)
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        how = f" with code {self._process.wait()}"
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(self._has_ended, how)

    def _has_ended(self, how: str) -> None:
        if not self.ended.done():
            self.ended.set_result(how)


def start_worker(config: WorkerConfig, devices: tuple[int, ...]) -> "subprocess.Popen[bytes]":
    """Start a worker's process. It reads its config from a pipe, and exits when the pipe closes with this process.

    devices: GPUs that it sees; empty: all that this process sees. Raises OSError.
    """
    environment = dict(os.environ)
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    # Ctrl-C, and a service manager's SIGTERM, reach the whole process group. A child inherits blocked signals, so the
    # worker is not interrupted while it imports, before it can ignore them itself.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process = subprocess.Popen(WORKER, stdin=subprocess.PIPE, env=environment)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already, which the caller will notice
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
    return process


def folder_for_parcels(lenders: int) -> Path:
    """A folder of mode 0700 for KV transfer buffers, in /dev/shm if that has room for those of `lenders` workers.

    Raises ConfigError.
    """
    memory = Path("/dev/shm")
    try:
        room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > lenders * 2 * AREA_BYTES
        return Path(tempfile.mkdtemp(prefix="redline-", dir=memory if room else None))
    except OSError as error:
        raise ConfigError(f"no folder for KV transfer buffers: {error}; set TMPDIR to a writable one") from None
