"""Atomic file writes that survive a kill or a full disk, file locks, and checks of output paths before long work."""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from redline.errors import ConfigError

FULL = {errno.ENOSPC, errno.EDQUOT}
LOCKLESS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # raised by file systems that have no locks


def is_full(error: BaseException) -> bool:
    """Whether the disk, or this user's quota, is full. safetensors reports it only as text: `... (os error 28)`."""
    if isinstance(error, OSError):
        return error.errno in FULL
    number = re.search(r"os error (\d+)", str(error)) if isinstance(error, SafetensorError) else None
    return number is not None and int(number[1]) in FULL


def hold(path: Path, lock: Path | None = None, wait_s: float = 0.0) -> FileLock:
    """Lock a file or folder for this process until `release` is called; the lock also ends if the process is killed.

    lock: the lock file; default: .NAME.lock in the same folder. wait_s: seconds to wait for another process to release
    the lock. Raises ConfigError if another process holds it, OSError if the lock file cannot be made. On a file system
    without locks, the call succeeds without locking.
    """
    held = FileLock(lock or path.with_name(f".{path.name}.lock"), timeout=wait_s, thread_local=False)
    try:
        held.acquire()
    except Timeout:
        raise ConfigError(f"{path}: another process is writing it: wait until it ends, or name another path") from None
    except OSError as error:
        if error.errno not in LOCKLESS:
            raise
    return held


@contextmanager
def alone(folder: Path) -> Generator[None]:
    """Lock a folder for this process while inside the block, through FOLDER/.lock. A missing folder is made.

    Raises ConfigError if the folder cannot be made, or if another process holds the lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = hold(folder, folder / ".lock")
    except OSError as error:
        raise unwritable(folder, error) from None
    try:
        yield
    finally:
        held.release()


@contextmanager
def written(path: Path) -> Generator[None]:
    """Turn an OSError of the block into a ConfigError. It names the error's own file, or `path` if it has none."""
    try:
        yield
    except OSError as error:
        named = error.filename2 or error.filename
        raise unwritable(Path(os.fsdecode(named)) if isinstance(named, str | bytes) else path, error) from None


def unwritable(path: Path, error: OSError) -> ConfigError:
    """The error for a file or folder that cannot be written: the reason, and on a full disk how much is free."""
    if isinstance(error, FileExistsError | NotADirectoryError):
        return ConfigError(f"{path}: cannot be written (a file is in the way: a folder is needed)")
    if not is_full(error):
        return ConfigError(f"{path}: cannot be written ({error.strerror or error})")
    place = path
    while not place.exists():
        place = place.parent
    free = human(shutil.disk_usage(place).free)
    return ConfigError(f"{path}: cannot be written (no space left; {free} free): make room and run again")


def check_output(path: Path) -> None:
    """Check, before long work begins, that its result can be written to `path`. A missing folder is made.

    Raises ConfigError if `path` cannot be written, or is a folder.
    """
    with written(path):
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder; name a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def check_room(folder: Path, needed: int, what: str, otherwise: str = "name another folder") -> None:
    """Raise ConfigError if the disk of `folder`, which need not exist yet, has fewer than `needed` bytes free.

    what: the start of the message, such as "the states of 9 sequences take". otherwise: the advice in the message if
    no space can be freed.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(f"{folder}: {what} {human(needed)}, and {human(free)} are free: make room, or {otherwise}")


def human(size: int) -> str:
    """A number of bytes as people read it, in decimal units: 812 B, 65.2 MB, 1.2 GB."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:,.3g} {name}"
    return f"{size} B"


def write_whole(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replace a file by `data` atomically: a kill or a power cut leaves either the complete old file or the new one.

    private: only the owner can read the file, from its first byte on. Raises OSError if the file cannot be written, and
    removes the partial file.
    """
    building = path.with_name(f".{path.name}.writing")
    try:
        with open(building, "wb", opener=_private if private else None) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        building.replace(path)
    except OSError:
        building.unlink(missing_ok=True)
        raise
    sync(path.parent)


def save(path: Path, data: bytes, *, private: bool = False) -> None:
    """`write_whole` for an output file of a command: raises ConfigError, naming the file, instead of OSError."""
    with written(path):
        write_whole(path, data, private=private)


def _private(path: str, flags: int) -> int:
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)  # a killed process may have left a file of that name with another mode
    return descriptor


def sync(path: Path) -> None:
    """Wait until the content of a file, or the renames in a folder, are on the disk (fsync). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_held(stream: IO[str]) -> None:
    """Flush a stream's buffered output, or drop it if it cannot be written (a full disk, a pipe closed by its reader),
    so that the interpreter does not raise a second error when it ends."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
