"""Files that a kill or a full disk leaves whole."""

import errno
import os
import re
from pathlib import Path

from safetensors import SafetensorError

FULL = {errno.ENOSPC, errno.EDQUOT}


def is_full(error: BaseException) -> bool:
    """Whether the disk, or this user's share of it, is full. safetensors says it in words: `... (os error 28)`."""
    if isinstance(error, OSError):
        return error.errno in FULL
    number = re.search(r"os error (\d+)", str(error)) if isinstance(error, SafetensorError) else None
    return number is not None and int(number[1]) in FULL


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
