"""Files that a kill or a full disk leaves whole."""

import errno
import fcntl
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from redline.errors import ConfigError

FULL = {errno.ENOSPC, errno.EDQUOT}


def is_full(error: BaseException) -> bool:
    """Whether the disk, or this user's share of it, is full. safetensors says it in words: `... (os error 28)`."""
    if isinstance(error, OSError):
        return error.errno in FULL
    number = re.search(r"os error (\d+)", str(error)) if isinstance(error, SafetensorError) else None
    return number is not None and int(number[1]) in FULL


def hold(descriptor: int, path: Path) -> None:
    """Keeps an open file to this process until it is closed; a kill lets it go too.

    ConfigError where another process holds it. A file system without locks is trusted.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{path}: another process is writing it: wait for its end, or name another") from None
    except OSError:
        return


@contextmanager
def alone(folder: Path) -> Generator[None]:
    """Keeps a folder to this process, by FOLDER/.lock. ConfigError where it cannot be made, or another has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from None
    try:
        hold(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def human(size: int) -> str:
    """Bytes for a reader: 812 B, 65.2 MB, 1.20 GB."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:,.3g} {name}"
    return f"{size} B"


def write_whole(path: Path, data: bytes) -> None:
    """The file as it was, or as it shall be, whenever the power goes. Raises OSError, and leaves nothing behind."""
    building = path.with_name(f".{path.name}.writing")
    try:
        with open(building, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        building.replace(path)
    except OSError:
        building.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """What is written to a file, or renamed in a folder, is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
