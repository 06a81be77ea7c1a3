"""Responses that are kept for their clients, in a file of SQLite: bounded in number, bytes and age.

All of it happens in one thread, so what was put is found by whoever asks after it. Where other processes keep theirs in
the same file, one that is not there is looked for a little longer: it may be about to be written.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import TypeVar

import msgspec

from redline import clock
from redline.api.errors import Refusal
from redline.chat.conversation import Message
from redline.errors import ConfigError
from redline.wire.base import Record

MIB = 1 << 20
LATE_S = 1.0  # for another process to write what it has told its client
LOOK_S = 0.02  # between two looks whether it has
T = TypeVar("T")

log = logging.getLogger("redline.api")

_TABLE = """
    CREATE TABLE IF NOT EXISTS responses (
        number INTEGER PRIMARY KEY, id TEXT UNIQUE, owner TEXT, created REAL, size INTEGER, body BLOB, messages BLOB
    )
"""
_MESSAGES = msgspec.json.Decoder(tuple[Message, ...])


class StoreLimits(Record, frozen=True):
    """What is kept at most; what is older goes first."""

    rows: int = 10_000
    bytes: int = 1024 * MIB  # of all responses with their conversations
    row_bytes: int = 16 * MIB  # of one; a larger one is not kept
    age_s: float = 30 * 86_400.0
    unwritten: int = 256  # responses that wait to be written; beyond it they are not kept


class ResponseStore:
    """Keeps responses, each for the name of the key that asked for it."""

    def __init__(
        self,
        path: Path,
        limits: StoreLimits = StoreLimits(),  # noqa: B008
        clock: Callable[[], float] = clock.now,
        *,
        shared: bool = False,
    ) -> None:
        """shared: other processes have the file too. It is made by one of them alone: two that made it at once could
        find it locked. Raises ConfigError where the file cannot be opened or is none of SQLite's."""
        self._late_s = LATE_S if shared else 0.0
        self._limits = limits
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._room = Semaphore(limits.unwritten)
        try:
            self._file = self._thread.submit(_opened, path).result()
        except sqlite3.Error as error:
            self._thread.shutdown()
            raise ConfigError(f"{path}: responses cannot be kept there: {error}") from None

    def put(self, id: str, owner: str, body: bytes, messages: Sequence[Message]) -> None:
        """Keep a response: its body as JSON, and the conversation with it. It is written soon; a failure is logged."""
        if not self._room.acquire(blocking=False):
            log.warning("a response is not kept: %d others wait to be written", self._limits.unwritten)
            return
        self._thread.submit(self._put, id, owner, body, messages)

    async def body(self, id: str, owner: str) -> bytes:
        """The response as it was answered. Raises Refusal (404) where the owner has none of that id."""
        return (await self._found(lambda: self._row(id, owner)))[0]

    async def messages(self, id: str, owner: str) -> tuple[Message, ...]:
        """The conversation that ends with the response. Raises Refusal (404) where the owner has none of that id."""
        return await self._found(lambda: _MESSAGES.decode(self._row(id, owner)[1]))

    async def delete(self, id: str, owner: str) -> None:
        """Forget a response. Raises Refusal (404) where the owner has none of that id."""
        await self._found(lambda: self._delete(id, owner))

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._thread.submit(self._file.close)
        self._thread.shutdown()

    async def _found(self, work: Callable[[], T]) -> T:
        """What `work` gives, in the thread of the file. Raises Refusal where it does until _late_s seconds are over."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._late_s
        while True:
            try:
                return await loop.run_in_executor(self._thread, work)
            except Refusal:
                if loop.time() >= until:
                    raise
            await asyncio.sleep(LOOK_S)

    def _put(self, id: str, owner: str, body: bytes, messages: Sequence[Message]) -> None:
        try:
            said = msgspec.json.encode(messages)
            size = len(body) + len(said)
            if size > self._limits.row_bytes:
                log.warning("a response of %d bytes is not kept; at most %d are", size, self._limits.row_bytes)
                return
            row = (id, owner, self._clock(), size, body, said)
            with self._file as file:
                file.execute(
                    "INSERT INTO responses (id, owner, created, size, body, messages) VALUES (?, ?, ?, ?, ?, ?)", row
                )
                self._make_room(file)
        except sqlite3.Error as error:
            log.error("a response is not kept: %s", error)
        finally:
            self._room.release()

    def _make_room(self, file: sqlite3.Connection) -> None:
        file.execute("DELETE FROM responses WHERE created < ?", (self._clock() - self._limits.age_s,))
        rows, size = file.execute("SELECT COUNT(*), TOTAL(size) FROM responses").fetchone()
        while rows > self._limits.rows or size > self._limits.bytes:
            number, gone = file.execute("SELECT number, size FROM responses ORDER BY number LIMIT 1").fetchone()
            file.execute("DELETE FROM responses WHERE number = ?", (number,))
            rows, size = rows - 1, size - gone

    def _row(self, id: str, owner: str) -> tuple[bytes, bytes]:
        found = self._file.execute(
            "SELECT body, messages FROM responses WHERE id = ? AND owner = ? AND created >= ?",
            (id, owner, self._clock() - self._limits.age_s),
        ).fetchone()
        if found is None:
            raise _unknown(id)
        return found

    def _delete(self, id: str, owner: str) -> None:
        with self._file as file:
            if not file.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (id, owner)).rowcount:
                raise _unknown(id)


def _opened(path: Path) -> sqlite3.Connection:
    file = sqlite3.connect(path)
    file.execute("PRAGMA journal_mode = WAL")
    file.execute("PRAGMA synchronous = NORMAL")
    file.execute("PRAGMA secure_delete = ON")
    file.execute(_TABLE)
    file.commit()
    path.chmod(0o600)
    return file


def _unknown(id: str) -> Refusal:
    return Refusal(404, f"there is no response {id[:64]}", "response_not_found")
