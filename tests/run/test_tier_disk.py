"""The disk tier's files: how many file descriptors they use, full disks, and files that other processes remove."""

import errno
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from redline.disk import hold
from redline.errors import ConfigError
from redline.messages.job import PageHash
from redline.run.tiers import disk as module
from redline.run.tiers.disk import DiskPages, DiskPlace, FolderLock

PAGE_BYTES = 1000
A_FILE = 4 * PAGE_BYTES + 300  # room for four pages


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", A_FILE)


@contextmanager
def opened(folder: Path, most_bytes: int = 1 << 20) -> Generator[DiskPages]:
    """The pages of a folder, loaded. Their accounting is checked at the end."""
    disk = DiskPages(folder, "theirs", PAGE_BYTES, most_bytes, lambda folder, lock, _: hold(folder, lock))
    try:
        list(disk.load())
        yield disk
        disk.check()
    finally:
        disk.close()


def name(number: int) -> PageHash:
    return PageHash(number.to_bytes(16, "little"))


def page(number: int) -> memoryview:
    return memoryview(bytes([number % 256]) * PAGE_BYTES)


def write(disk: DiskPages, *numbers: int) -> None:
    for number in numbers:
        disk.write(name(number), page(number), number, 1)


def is_there(disk: DiskPages, number: int) -> bool:
    """Whether a page is in the index and can be read."""
    place = disk.places.get(name(number))
    into = bytearray(PAGE_BYTES)
    return place is not None and disk.read(place, memoryview(into)) and into == page(number)


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.pages"))


def descriptors(folder: Path) -> int:
    """The number of this process's open descriptors of page files in the folder."""
    open_files = list[str]()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            open_files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue  # the descriptor of the listing itself
    return sum(path.startswith(str(folder)) and path.endswith(".pages") for path in open_files)


class FullDisk:
    """Replaces `os.pwritev`: a file system with room for `room` bytes of page files."""

    def __init__(self, folder: Path, room: int) -> None:
        self._folder, self._room, self._pwritev = folder, room, os.pwritev

    def __call__(self, descriptor: int, parts: list[Any], offset: int) -> int:
        if on_disk(self._folder) + sum(len(part) for part in parts) > self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._pwritev(descriptor, parts, offset)


def test_many_files_take_no_descriptors_and_come_back_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        write(disk, *range(400))
        assert len(list(tmp_path.glob("*.pages"))) == 100
        assert descriptors(tmp_path) == 0
    with opened(tmp_path) as disk:
        assert all(is_there(disk, number) for number in range(400))
        assert descriptors(tmp_path) == 0


def test_the_bound_holds_after_a_restart_with_a_lower_one(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        write(disk, *range(80))
    with opened(tmp_path, most_bytes=10 * A_FILE) as disk:
        assert on_disk(tmp_path) == disk.bytes <= 10 * A_FILE
        write(disk, *range(100, 140))
        assert on_disk(tmp_path) == disk.bytes <= 10 * A_FILE
        assert is_there(disk, 139)


def test_a_file_that_cannot_be_opened_is_skipped_and_counts_until_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as disk:
        write(disk, *range(40))
    broken, open_ = tmp_path / "0000000004.pages", os.open
    os.utime(broken, ns=(1, 1))  # the least recently used

    def fails(path: Any, *args: Any, **more: Any) -> int:
        if path == broken.name:
            raise OSError(errno.EIO, "Input/output error")
        return open_(path, *args, **more)

    monkeypatch.setattr(module.os, "open", fails)
    with opened(tmp_path, most_bytes=10 * A_FILE) as disk:
        assert [number for number in range(40) if not is_there(disk, number)] == [12, 13, 14, 15]
        assert disk.bytes == on_disk(tmp_path), "a file that still exists must be counted"
        write(disk, 100)
        assert not broken.exists()
        assert on_disk(tmp_path) == disk.bytes <= 10 * A_FILE
    assert f"{broken}: cannot be read, skipped: Input/output error" in caplog.text


def test_a_full_file_system_removes_the_least_recently_used_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as disk:
        removed = list[PageHash]()
        disk.removed = removed.extend
        write(disk, *range(12))
        disk.use({1}, 2**62)
        monkeypatch.setattr(module.os, "pwritev", FullDisk(tmp_path, 3 * A_FILE))
        write(disk, 12, 13, 14, 15, 16)
        assert removed == [name(number) for number in range(4, 12)], "file 1 was used more recently"
        assert [number for number in range(17) if is_there(disk, number)] == [0, 1, 2, 3, 12, 13, 14, 15, 16]
    assert caplog.text.count("the file system is full") == 1


def test_a_full_file_system_with_nothing_to_remove_takes_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as disk:
        write(disk, 0)
        monkeypatch.setattr(module.os, "pwritev", FullDisk(tmp_path, on_disk(tmp_path)))
        with pytest.raises(OSError, match="No space left"):
            write(disk, 1)
        assert is_there(disk, 0), "the file being written must stay"


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "deep" / "tier"
    with opened(folder) as disk:
        write(disk, *range(10))
        shutil.rmtree(tmp_path / "deep")
        write(disk, 20)
        assert is_there(disk, 20)
        assert list(disk.places) == [name(20)]
        assert folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(ConfigError):
            hold(folder, folder / ".lock")
    assert "the folder was removed or replaced while in use" in caplog.text


def test_a_removed_folder_that_another_process_has_taken_is_left_to_it(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    with opened(folder) as disk:
        write(disk, 0)
        shutil.rmtree(folder)
        with pytest.raises(FileNotFoundError):
            disk.read(DiskPlace(1, 0, 0, 0), memoryview(bytearray(PAGE_BYTES)))
        folder.mkdir()
        other = hold(folder, folder / ".lock")
        for _ in range(2):
            with pytest.raises(ConfigError, match="another process"):
                write(disk, 1)
        assert list(folder.glob("*.pages")) == []
        other.release()
        write(disk, 1)
        assert is_there(disk, 1)


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def move(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def remove_the_lock(folder: Path) -> None:
    (folder / module.LOCK).unlink()


@pytest.mark.parametrize("lose", [remove, move, remove_the_lock])
def test_a_folder_that_another_process_has_by_now_is_not_written_to(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    folder, most_bytes = tmp_path / "tier", 10 * A_FILE
    with opened(folder, most_bytes) as disk:
        removed = list[PageHash]()
        disk.removed = removed.extend
        write(disk, *range(6))
        lose(folder)
        with opened(folder, most_bytes) as other:
            write(other, *range(100, 110))
            theirs = {path.name: path.read_bytes() for path in folder.glob("*.pages")}
            disk.spoil(name(0))
            disk.use({1, 2}, 2**62)
            with pytest.raises(ConfigError, match="another process"):
                write(disk, 7)
            assert set(removed) == {name(number) for number in range(1, 6)}, "page 0 was corrupted"
            assert (len(disk), disk.bytes) == (0, 0)
            with pytest.raises(ConfigError, match="another process"):
                write(disk, 8)
            assert {path.name: path.read_bytes() for path in folder.glob("*.pages")} == theirs
            assert all(is_there(other, number) for number in range(100, 110))
            assert on_disk(folder) == other.bytes
        write(disk, *range(200, 280))
        assert on_disk(folder) == disk.bytes <= most_bytes, "files written by the other process must be counted"
        assert is_there(disk, 279)


def test_a_folder_that_is_another_one_by_now_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    with opened(folder) as disk:
        write(disk, 0)
        place = disk.places[name(0)]
        shutil.rmtree(folder)
        with opened(folder) as other:
            write(other, 1)
            with pytest.raises(FileNotFoundError, match="removed or replaced"):
                disk.read(place, memoryview(bytearray(PAGE_BYTES)))
            assert not disk.places


def test_files_of_a_folder_that_was_moved_stay_as_they_are(tmp_path: Path) -> None:
    folder, moved = tmp_path / "tier", tmp_path / "moved"
    with opened(folder, 10 * A_FILE) as disk:
        write(disk, *range(40))
        before = {path.name: path.read_bytes() for path in moved.parent.glob("tier/*.pages")}
        folder.rename(moved)
        write(disk, *range(100, 140))
        assert {path.name: path.read_bytes() for path in moved.glob("*.pages")} == before
        assert on_disk(folder) == disk.bytes
        assert is_there(disk, 139)


def test_only_a_start_waits_for_a_process_that_has_the_folder(tmp_path: Path) -> None:
    """A later wait would also block reads from host memory."""
    folder, waits = tmp_path / "tier", list[float]()

    def recorded(folder: Path, lock: Path, wait_s: float) -> FolderLock:
        waits.append(wait_s)
        return hold(folder, lock)

    disk = DiskPages(folder, "theirs", PAGE_BYTES, 1 << 20, recorded)
    shutil.rmtree(folder)
    write(disk, 0)
    disk.close()
    assert waits == [module.LOCK_S, 0]


def test_the_removal_of_a_folder_that_cannot_be_made_again_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, there = tmp_path / "tier", True

    def hold_while_there(folder: Path, lock: Path, wait_s: float) -> FolderLock:
        if not there:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(lock))
        return hold(folder, lock)

    disk = DiskPages(folder, "theirs", PAGE_BYTES, 1 << 20, hold_while_there)
    shutil.rmtree(folder)
    there = False
    for number in range(3):
        with pytest.raises(FileNotFoundError):
            write(disk, number)
    disk.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: the folder was removed or replaced while in use: its pages are dropped"
    ]


def test_a_folder_takes_two_descriptors_and_gives_them_back(tmp_path: Path) -> None:
    def its_descriptors() -> int:
        paths = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
        return sum(path.is_symlink() and os.readlink(path).startswith(str(tmp_path)) for path in paths)

    folder = tmp_path / "tier"
    with opened(folder) as disk:
        write(disk, 0)
        assert its_descriptors() == 2
        shutil.rmtree(folder)
        with opened(folder):
            with pytest.raises(ConfigError):
                write(disk, 0)
            assert its_descriptors() == 2
        write(disk, 0)
        assert its_descriptors() == 2
    assert its_descriptors() == 0


def test_pages_of_files_that_were_removed_are_forgotten_together(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        removed = list[PageHash]()
        disk.removed = removed.extend
        write(disk, *range(10))
        for path in tmp_path.glob("*[13].pages"):  # the last file is being written
            path.unlink()
        with pytest.raises(FileNotFoundError):
            is_there(disk, 1)
        assert removed == [name(number) for number in (0, 1, 2, 3, 8, 9)]
        write(disk, 1)
        assert [number for number in range(10) if is_there(disk, number)] == [1, 4, 5, 6, 7]
