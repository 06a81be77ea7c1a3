"""Reads between processes of one host, through files in shared memory."""

import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from redline.errors import ConfigError
from redline.transport import shared
from redline.transport.base import MemoryRange, TransferFailed
from redline.transport.shared import INLINE, PIECE, SharedTransport
from tests.transport.promises import Promises, pattern, wait
from tests.waiting import LIMIT_S, until

OWNER = """
import sys
from pathlib import Path
from redline.transport.shared import SharedTransport
from tests.transport.promises import fill, pattern
area = SharedTransport(Path(sys.argv[1])).area(2_000_000)
fill(area.memory, pattern(2_000_000, 5))
print(area.told.hex(), flush=True)
sys.stdin.read()
"""


class TestPromises(Promises):
    def transport(self) -> SharedTransport:
        return SharedTransport(self.folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shared"


def test_a_peer_reads_across_processes_and_after_the_owner_was_killed(folder: Path):
    command = [sys.executable, "-c", OWNER, str(folder)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        told = bytes.fromhex(owner.stdout.readline())
        peer = SharedTransport(folder).connect(told)
        for _ in range(2):
            into = bytearray(2_000_000)
            wait(peer.read(0, into, 2_000_000, LIMIT_S))
            assert into == pattern(2_000_000, 5)
            owner.send_signal(signal.SIGKILL)
            owner.wait(LIMIT_S)
        peer.close()
    finally:
        owner.kill()
        owner.wait(LIMIT_S)
        owner.communicate()


def test_a_peer_never_writes_and_the_folder_is_closed_to_others(folder: Path):
    transport = SharedTransport(folder)
    area = transport.area(100)
    (file,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o777 == 0o600
    peer = SharedTransport(folder).connect(area.told)
    assert not peer._view.flags.writeable
    transport.close()
    assert not list(folder.iterdir())


def test_a_folder_that_others_can_see_is_refused(tmp_path: Path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o750)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").write_text("")
    for name in ("open", "link", "file"):
        with pytest.raises(ConfigError, match="transport"):
            SharedTransport(tmp_path / name)


def test_only_files_of_the_folder_are_mapped(folder: Path, tmp_path: Path):
    transport = SharedTransport(folder)
    area = transport.area(4096)
    (own,) = folder.iterdir()
    (tmp_path / "secret").write_bytes(bytes(4096))
    (tmp_path / "secret").chmod(0o600)
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "readable").write_bytes(bytes(4096))
    (folder / "readable").chmod(0o644)
    kind, *_ = msgspec.msgpack.decode(area.told)
    wrong = ["../secret", "link", "readable", "..", "", "absent", str(tmp_path / "secret")]
    for name, size in (*((name, 4096) for name in wrong), (own.name, 4095), (own.name, 8192)):
        with pytest.raises(TransferFailed):
            transport.connect(msgspec.msgpack.encode([kind, name, size]))
    transport.connect(msgspec.msgpack.encode([kind, own.name, 4096]))


def test_an_area_that_has_no_room_is_a_line_for_the_operator(folder: Path):
    with pytest.raises(ConfigError, match="has no room for an area"):
        SharedTransport(folder).area(1 << 50)
    assert not list(folder.iterdir())
    with pytest.raises(ConfigError, match="pass its size"):
        SharedTransport(folder).area(MemoryRange(4096, 10))


def test_a_large_copy_stops_between_pieces_and_one_that_waits_never_begins(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    transport = SharedTransport(folder)
    size = 64 * PIECE
    peer = transport.connect(transport.area(size).told)
    first, second = bytearray(size), bytearray([7]) * size
    pieces, copying, go_on = list[int](), threading.Event(), threading.Event()

    def memmove(into: int, source: int, count: int) -> None:
        pieces.append(count)
        copying.set()
        assert go_on.wait(LIMIT_S)
        shared_ctypes.memmove(into, source, count)

    shared_ctypes = shared.ctypes
    monkeypatch.setattr(shared, "ctypes", SimpleNamespace(memmove=memmove))
    running, waiting = peer.read(0, first, size, LIMIT_S), peer.read(0, second, size, LIMIT_S)
    assert copying.wait(LIMIT_S)
    waiting.cancel()
    cancelling = threading.Thread(target=running.cancel)
    cancelling.start()
    until(lambda: running._stopped)
    go_on.set()
    cancelling.join(LIMIT_S)
    assert pieces == [PIECE]
    assert second == bytes([7]) * size
    with pytest.raises(TransferFailed, match="cancelled"):
        waiting.done()
    assert not peer.readings


def test_small_reads_are_done_at_once(folder: Path):
    transport = SharedTransport(folder)
    peer = transport.connect(transport.area(INLINE).told)
    assert peer.read(0, bytearray(INLINE), INLINE, 0.0).done()
