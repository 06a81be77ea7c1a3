"""Where a number comes from: machine, versions, commit, date. Every stored result carries it."""

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from redline.bench.machine import cpu_name


def provenance(*packages: str) -> dict[str, Any]:
    """machine, cores, versions of python and `packages`, commit (with "+" where the tree has changes), date (UTC).

    A copy without its history is told the commit by REDLINE_COMMIT.
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
        "commit": os.environ.get("REDLINE_COMMIT") or commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
    }


def commit() -> str:
    """The short hash of HEAD, with "+" where tracked files have changes; "unknown+" where git cannot tell."""
    return _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else "")


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
