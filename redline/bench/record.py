"""Where a number comes from: machine, versions, commit, date. Every stored result carries it."""

import datetime
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from redline.errors import ConfigError

TOLD = "REDLINE_COMMIT"  # in the environment: the commit of a copy without its history
_COMMIT = re.compile(r"[0-9a-f]{7,40}\+?|unknown")


def provenance(*packages: str) -> dict[str, Any]:
    """machine, cores, versions of python and `packages`, commit (with "+" where the tree has changes), date (UTC).

    A copy without its history is told the commit by REDLINE_COMMIT. Raises ConfigError where that is none.
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
    """What REDLINE_COMMIT says; None where nobody has set it.

    Raises ConfigError where that is no hash of 7 to 40 digits, with "+" where the copy has changes: a number whose
    commit is a placeholder cannot be made again.
    """
    told = os.environ.get(TOLD)
    if told and not _COMMIT.fullmatch(told):
        raise ConfigError(f"{TOLD} is {told[:50]!r}; expected a commit's hash, as `git rev-parse --short HEAD` says it")
    return told or None


def cpu_name() -> str:
    """The processor's model name from /proc/cpuinfo, or what Python knows of it where there is none."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The short hash of HEAD, with "+" where tracked files have changes; "unknown" where git cannot tell."""
    try:
        return _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
