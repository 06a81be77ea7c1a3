"""Places that results go to: looked at before the work, held by one process, named in one line where they are bad."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from redline import disk
from redline.disk import alone, check_output, check_room, save, written
from redline.errors import ConfigError


def test_an_output_gets_its_folder_and_leaves_nothing_else(tmp_path: Path):
    path = tmp_path / "new" / "folder [bold]" / "result.json"
    check_output(path)
    assert list(path.parent.iterdir()) == []
    path.write_text("before")
    check_output(path)
    assert path.read_text() == "before"


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a folder; name a file in it"):
        check_output(tmp_path)
    with pytest.raises(ConfigError, match=r"file: cannot be written \(a file is in the way"):
        check_output(tmp_path / "file" / "result.json")
    with pytest.raises(ConfigError, match=r"cannot be written \(File name too long\)"):
        check_output(tmp_path / (300 * "a"))
    with pytest.raises(ConfigError, match=r"/proc.*: cannot be written"):
        check_output(Path("/proc/here/result.json"))


@pytest.mark.parametrize("code", sorted(disk.FULL))
def test_a_full_disk_is_said_with_what_is_free(tmp_path: Path, code: int):
    with (
        pytest.raises(ConfigError, match=r"cannot be written \(no space left; .* free\): make room"),
        written(tmp_path),
    ):
        raise OSError(code, os.strerror(code))


def test_work_that_needs_more_than_is_free_does_not_begin(tmp_path: Path):
    check_room(tmp_path / "not" / "yet", 1, "nothing takes")
    with pytest.raises(ConfigError, match=r"the states take 1e\+06 TB, and .* are free"):
        check_room(tmp_path / "not" / "yet", 10**18, "the states take")


def test_a_private_file_is_its_owners_alone_from_its_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, building = tmp_path / "said.json", tmp_path / ".said.json.writing"
    building.touch(0o666)  # as a kill may leave it
    modes = list[int]()

    def look(_: int) -> None:
        modes.extend(path.stat().st_mode & 0o777 for path in tmp_path.iterdir())

    monkeypatch.setattr(os, "fsync", look)  # of the file while it is built, and of the folder once it is there
    save(path, b"secret", private=True)
    assert modes == [0o600, 0o600]
    assert path.read_bytes() == b"secret"


def test_a_kill_lets_a_folder_go(tmp_path: Path):
    hold = f"import pathlib, sys, redline.disk as d\nwith d.alone(pathlib.Path({str(tmp_path)!r})):"
    hold += " print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(ConfigError, match="another process is writing it"), alone(tmp_path):
            raise AssertionError
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with alone(tmp_path):
        pass


def test_a_file_system_without_locks_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with alone(tmp_path):
        pass
