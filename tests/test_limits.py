"""The limits of a container, from control groups, are below the resources of its machine."""

import os
from pathlib import Path

import pytest

from redline.limits import free_memory, processors

GB = 1 << 30
V2 = "30 23 0:26 {inside} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = "3{n} 31 0:3{n} {inside} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n"


class Machine:
    """A folder with the layout of the root of a machine with 64 GB available."""

    def __init__(self, root: Path, group: str = "0::/", mounts: str = "") -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable: {64 * GB // 1024} kB\n")
        self.write("proc/self/cgroup", group + "\n")
        self.write("proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts)

    def write(self, path: str, text: str | int) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(str(text))

    def bound(self, folder: str, most: str | int, held: int, **cached: int) -> None:
        self.write(f"{folder}/memory.max", f"{most}\n")
        self.write(f"{folder}/memory.current", f"{held}\n")
        self.write(f"{folder}/memory.stat", "".join(f"{name} {size}\n" for name, size in cached.items()))


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def test_without_groups_it_is_what_the_machine_says(tmp_path: Path, cores: None):
    machine = Machine(tmp_path)
    assert (free_memory(machine.root), processors(machine.root)) == (64 * GB, 8)


def test_a_containers_bound_counts_and_cached_files_give_way(tmp_path: Path):
    machine = Machine(tmp_path, mounts=V2.format(inside="/"))
    machine.bound("sys/fs/cgroup", 16 * GB, 10 * GB, anon=3 * GB, inactive_file=5 * GB, active_file=GB, shmem=GB)
    assert free_memory(machine.root) == 12 * GB
    machine.bound("sys/fs/cgroup", "max", 10 * GB)
    assert free_memory(machine.root) == 64 * GB
    machine.bound("sys/fs/cgroup", 16 * GB, 17 * GB)
    assert free_memory(machine.root) == 0


def test_every_group_around_counts_with_what_others_hold_in_it(tmp_path: Path):
    machine = Machine(tmp_path, "0::/pods/one", V2.format(inside="/"))
    machine.bound("sys/fs/cgroup/pods/one", 16 * GB, 2 * GB)
    machine.bound("sys/fs/cgroup/pods", 20 * GB, 15 * GB)  # another pod uses 13
    assert free_memory(machine.root) == 5 * GB


def test_a_group_is_found_where_its_mount_begins_within_the_tree(tmp_path: Path):
    machine = Machine(tmp_path, "0::/docker/abc/work", V2.format(inside="/docker/abc"))
    machine.bound("sys/fs/cgroup/work", 8 * GB, GB)
    machine.bound("sys/fs/cgroup", 4 * GB, 3 * GB)
    assert free_memory(machine.root) == GB


def test_groups_of_version_1_count_too(tmp_path: Path, cores: None):
    mounts = V1.format(n=1, inside="/", name="memory") + V1.format(n=2, inside="/docker/abc", name="cpu,cpuacct")
    machine = Machine(tmp_path, "4:memory:/here\n2:cpu,cpuacct:/docker/abc\n0::/", mounts)
    at = "sys/fs/cgroup/memory"
    machine.write(f"{at}/memory.limit_in_bytes", (1 << 63) - 4096)
    machine.write(f"{at}/memory.usage_in_bytes", 30 * GB)
    machine.write(f"{at}/here/memory.limit_in_bytes", 6 * GB)
    machine.write(f"{at}/here/memory.usage_in_bytes", 5 * GB)
    machine.write(f"{at}/here/memory.stat", f"inactive_file 7\ntotal_inactive_file {2 * GB}\ntotal_active_file {GB}\n")
    assert free_memory(machine.root) == 4 * GB
    assert processors(machine.root) == 8
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", -1)
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", 50_000)
    assert processors(machine.root) == 8
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", 150_000)
    assert processors(machine.root) == 3


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("400000 100000", 4), ("150000 100000", 1), ("20000 100000", 1), ("9900000 100000", 8)],
)
def test_threads_are_the_whole_processors_of_a_quota(tmp_path: Path, cores: None, quota: str, expected: int):
    machine = Machine(tmp_path, "0::/a/b", V2.format(inside="/"))
    machine.write("sys/fs/cgroup/a/cpu.max", quota)
    machine.write("sys/fs/cgroup/a/b/cpu.max", "max 100000")
    assert processors(machine.root) == expected


def test_this_machine_can_be_asked():
    assert 0 < free_memory() <= 1 << 50
    assert 1 <= processors() <= len(os.sched_getaffinity(0))
