"""Provenance of a measurement: machine, versions, commit, date. Every saved result contains it."""

import datetime
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from redline.errors import ConfigError

TOLD = "REDLINE_COMMIT"  # environment variable: the commit of a source tree without git history
_COMMIT = re.compile(r"[0-9a-f]{7,40}\+?|unknown")


def provenance(*packages: str) -> dict[str, Any]:
    """machine, cores, versions of python and `packages`, commit (with "+" if the tree has changes), date (UTC).

    For a source tree without git history, REDLINE_COMMIT gives the commit. Raises ConfigError if that is not a hash.
    """
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    return {
        "machine": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions,
        "commit": told_commit() or commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
    }


def told_commit() -> str | None:
    """The value of REDLINE_COMMIT; None if it is not set.

    Raises ConfigError if the value is not a hash of 7 to 40 digits, followed by "+" if the tree has changes: a
    measurement with a placeholder as its commit cannot be reproduced.
    """
    told = os.environ.get(TOLD)
    if told and not _COMMIT.fullmatch(told):
        raise ConfigError(
            f"{TOLD} is {told[:50]!r}; expected a commit hash, as printed by `git rev-parse --short HEAD`"
        )
    return told or None


def cpu_name() -> str:
    """The processor's model name from /proc/cpuinfo, or from Python's `platform` if there is no such file."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The short hash of HEAD, with "+" if tracked files have changes; "unknown" if git fails."""
    try:
        return _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
