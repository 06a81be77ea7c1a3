"""Where a number comes from: machine, versions, commit, date. Every stored result carries it."""

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


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
