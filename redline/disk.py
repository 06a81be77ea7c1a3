"""Files that a kill or a full disk leaves whole, and places that are looked at before the work begins."""

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
LOCKLESS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # of a file system that has no locks


def is_full(error: BaseException) -> bool:
    """Whether the disk, or this user's share of it, is full. safetensors says it in words: `... (os error 28)`."""
    if isinstance(error, OSError):
        return error.errno in FULL
    number = re.search(r"os error (\d+)", str(error)) if isinstance(error, SafetensorError) else None
    return number is not None and int(number[1]) in FULL


def hold(path: Path, lock: Path | None = None, wait_s: float = 0.0) -> FileLock:
    """Keeps a file or folder to this process until `release` is called; a kill lets it go too.

    lock: the file that says so; absent: beside it, .NAME.lock. wait_s: for another process to let it go. Raises
    ConfigError where another process holds it, OSError where the lock cannot be made. A file system without locks is
    trusted.
    """
    held = FileLock(lock or path.with_name(f".{path.name}.lock"), timeout=wait_s, thread_local=False)
    try:
        held.acquire()
    except Timeout:
        raise ConfigError(f"{path}: another process is writing it: wait for its end, or name another") from None
    except OSError as error:
        if error.errno not in LOCKLESS:
            raise
    return held


@contextmanager
def alone(folder: Path) -> Generator[None]:
    """Keeps a folder to this process while inside, by a lock on FOLDER/.lock. A missing folder is made.

    Raises ConfigError where it cannot be made, or where another process holds it.
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
    """The error for a person whose file or folder cannot be written: why, and on a full disk how much is free."""
    if isinstance(error, FileExistsError | NotADirectoryError):
        return ConfigError(f"{path}: cannot be written (a file stands where a folder is needed)")
    if not is_full(error):
        return ConfigError(f"{path}: cannot be written ({error.strerror or error})")
    place = path
    while not place.exists():
        place = place.parent
    free = human(shutil.disk_usage(place).free)
    return ConfigError(f"{path}: cannot be written (no space left; {free} free): make room and run again")


def check_output(path: Path) -> None:
    """Check, before long work begins, that its result can be written to `path`. A missing folder is made.

    Raises ConfigError where it cannot be written, or where `path` is a folder.
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
    """Raise ConfigError where the disk of `folder`, which need not exist yet, has fewer than `needed` bytes free.

    what: how the message begins, such as "the states of 9 sequences take". otherwise: what the message advises where
    no room can be made.
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
    """Replace a file by `data`; a kill or a power cut at any moment leaves the old file or the new one, whole.

    private: it can be read by its owner alone, from its first byte. Raises OSError where it cannot be written, and
    removes what was written so far.
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
    """`write_whole` for a result that a person asked for: raises ConfigError, naming the file, instead of OSError."""
    with written(path):
        write_whole(path, data, private=private)


def _private(path: str, flags: int) -> int:
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)  # a kill may have left a file of that name
    return descriptor


def sync(path: Path) -> None:
    """Wait until what was written to a file, or renamed in a folder, is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_held(stream: IO[str]) -> None:
    """Write what Python holds of a stream's output, or drop it if it cannot be written (a full disk, a pipe whose
    reader has gone), so that it is no second error when the interpreter ends."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
