"""What the system lets this process take: memory and processors, which control groups bound (v1, v2), and open files.

A container's bound is not in /proc/meminfo, nor a quota of processor time in the affinity. A process that goes by those
is killed, or has its threads stopped in the middle of a kernel.
"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
FILES = 8192  # that each process of a deployment asks to open: 4,096 connections, and as many files and sockets beside


def processors(root: Path = ROOT) -> int:
    """Threads that can run at once without being stopped, at least 1: the least of the affinity and every quota.

    The affinity follows cpuset; a control group's quota is rounded down. root: what stands for / (tests).
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, min([allowed, *map(int, _quotas(root))]))


def free_memory(root: Path = ROOT) -> int:
    """Bytes that this process could still take: the least of what the machine has and what each group's bound leaves.

    Files that are only cached give way, so they count as free. root: what stands for / (tests).
    """
    return max(0, min([_available(root), *_headrooms(root)]))


def open_files(wanted: int = FILES) -> int:
    """How many files this process may open, once its soft limit is raised to `wanted` as far as the hard one allows.

    It is more than `wanted` where the soft limit was higher before.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return wanted if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def _available(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _quotas(root: Path) -> Iterator[float]:
    """Yield how many processors each control group allows, of those that bound processor time; may be a fraction."""
    for folder in _groups(root, "cpu"):
        v1 = (_read(folder / f"cpu.cfs_{part}_us").strip() for part in ("quota", "period"))
        quota, period = _read(folder / "cpu.max").split() or v1
        if _is_number(quota) and _is_number(period) and int(period):
            yield int(quota) / int(period)


def _headrooms(root: Path) -> Iterator[int]:
    """Yield how many bytes each control group still allows, of those that bound memory."""
    for folder in _groups(root, "memory"):
        names = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        for bound, used in names:
            most, held = _number(folder / bound), _number(folder / used)
            if most is not None and held is not None:
                yield most - held + _cached(folder)


def _cached(folder: Path) -> int:
    """Bytes of cached files, which the kernel gives up when memory is short."""
    facts = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    of_all = "total_" if "total_inactive_file" in facts else ""  # v1 has a group's own figures beside those of its tree
    return sum(int(facts.get(f"{of_all}{kind}_file", 0)) for kind in ("inactive", "active"))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those around it that can be seen, innermost first."""
    paths: dict[str, str] = {}  # of this process's group, by controller; of v2 by ""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        inside, at = mount.split()[3:5]
        match kind.split():
            case ["cgroup2", *_] if "" in paths:
                path = PurePosixPath(paths[""])
            case ["cgroup", _, options] if controller in options.split(",") and controller in paths:
                path = PurePosixPath(paths[controller])
            case _:
                continue
        below = path.relative_to(inside) if path.is_relative_to(inside) else PurePosixPath()
        mounted = root / at.lstrip("/")
        for folder in (below, *below.parents):
            yield mounted / folder


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no file, or where it says max."""
    text = _read(path).strip()
    return int(text) if _is_number(text) else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
