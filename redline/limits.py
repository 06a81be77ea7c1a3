"""The limits of this process: memory and processors, which control groups bound (v1, v2), and open files.

/proc/meminfo does not contain a container's memory limit, nor does the CPU affinity contain a CPU quota. A process that
relies on them alone is killed, or its threads are throttled in the middle of a kernel.
"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
FILES = 8192  # open files that each process of a deployment requests: 4,096 connections, and 4,096 other descriptors


def processors(root: Path = ROOT) -> int:
    """The number of threads that can run at once without throttling, at least 1: the minimum of affinity and quotas.

    The affinity includes cpuset; a control group's quota is rounded down. root: replaces / in tests.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, min([allowed, *map(int, _quotas(root))]))


def free_memory(root: Path = ROOT) -> int:
    """Bytes that this process can still allocate: the minimum of the machine's free memory and each cgroup's headroom.

    The page cache counts as free, since the kernel gives it up when memory is short. root: replaces / in tests.
    """
    return max(0, min([_available(root), *_headrooms(root)]))


def open_files(wanted: int = FILES) -> int:
    """Raise the soft limit of open files to `wanted`, as far as the hard limit allows, and return the limit in force.

    The result exceeds `wanted` if the soft limit was higher before.
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
    """Yield the number of processors, possibly a fraction, that each control group with a CPU quota allows."""
    for folder in _groups(root, "cpu"):
        v1 = (_read(folder / f"cpu.cfs_{part}_us").strip() for part in ("quota", "period"))
        quota, period = _read(folder / "cpu.max").split() or v1
        if _is_number(quota) and _is_number(period) and int(period):
            yield int(quota) / int(period)


def _headrooms(root: Path) -> Iterator[int]:
    """Yield the bytes that each control group with a memory limit still allows."""
    for folder in _groups(root, "memory"):
        names = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        for bound, used in names:
            most, held = _number(folder / bound), _number(folder / used)
            if most is not None and held is not None:
                yield most - held + _cached(folder)


def _cached(folder: Path) -> int:
    """Bytes of page cache, which the kernel gives up when memory is short."""
    facts = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    of_all = "total_" if "total_inactive_file" in facts else ""  # v1 has figures of the group and of its subtree
    return sum(int(facts.get(f"{of_all}{kind}_file", 0)) for kind in ("inactive", "active"))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of its visible parents, innermost first."""
    paths: dict[str, str] = {}  # path of this process's group by controller; the v2 group's under ""
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
    """The number in a file; None if there is no such file, or if it contains `max`."""
    text = _read(path).strip()
    return int(text) if _is_number(text) else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
