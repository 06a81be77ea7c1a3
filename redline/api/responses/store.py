"""Stores responses for their clients in a SQLite file: limited in number, bytes and age.

A response is written before its client reads the end of it, so that a later request for it succeeds, also in other
processes that use the same file. All access is in one thread.
"""

import asyncio
import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import msgspec

from redline import clock
from redline.api.errors import Refusal
from redline.chat.conversation import Message
from redline.errors import ConfigError
from redline.messages.base import Record

MIB = 1 << 20
NO_ITEMS: Mapping[str, bytes] = MappingProxyType({})
T = TypeVar("T")

log = logging.getLogger("redline.api")

_COLUMNS = ["number", "id", "owner", "created", "size", "body", "messages"]
# Row count and bytes, so that they need not be computed from all rows. They are in the file, since several processes
# may write to it; for a file from an older version they are computed once.
_TABLES = """
    BEGIN IMMEDIATE;
    CREATE TABLE IF NOT EXISTS responses (
        number INTEGER PRIMARY KEY, id TEXT UNIQUE, owner TEXT, created REAL, size INTEGER, body BLOB, messages BLOB
    );
    CREATE TABLE IF NOT EXISTS totals (rows INTEGER, bytes INTEGER);
    CREATE TABLE IF NOT EXISTS items (id TEXT PRIMARY KEY, response INTEGER, body BLOB);
    CREATE INDEX IF NOT EXISTS of_response ON items (response);
    CREATE TRIGGER IF NOT EXISTS forgotten AFTER DELETE ON responses
        BEGIN DELETE FROM items WHERE response = OLD.number; END;
    INSERT INTO totals SELECT (SELECT COUNT(*) FROM responses), (SELECT COALESCE(SUM(size), 0) FROM responses)
        WHERE NOT EXISTS (SELECT * FROM totals);
    CREATE TRIGGER IF NOT EXISTS counted AFTER INSERT ON responses
        BEGIN UPDATE totals SET rows = rows + 1, bytes = bytes + NEW.size; END;
    CREATE TRIGGER IF NOT EXISTS uncounted AFTER DELETE ON responses
        BEGIN UPDATE totals SET rows = rows - 1, bytes = bytes - OLD.size; END;
    COMMIT;
"""
_MESSAGES = msgspec.json.Decoder(tuple[Message, ...])


class StoreLimits(Record, frozen=True):
    """Limits of the store; the oldest responses are deleted first."""

    rows: int = 10_000
    bytes: int = 1024 * MIB  # of all responses with their conversations
    row_bytes: int = 16 * MIB  # of one response; larger ones are not stored
    age_s: float = 30 * 86_400.0
    wait_s: float = 10.0  # seconds for writing a response, after which it is reported as not stored


class ResponseStore:
    """Stores responses, each under the name of the key that requested it."""

    def __init__(
        self,
        path: Path,
        limits: StoreLimits = StoreLimits(),  # noqa: B008
        clock: Callable[[], float] = clock.now,
    ) -> None:
        """Raises ConfigError if the file cannot be opened, or is another program's database."""
        self._path = path
        self._limits = limits
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._removed = False  # the file was removed, and could not be created again
        try:
            self._file, self._identity = self._thread.submit(_opened, path).result()
        except ConfigError:
            self._thread.shutdown()
            raise

    async def keep(
        self, id: str, owner: str, body: bytes, messages: Sequence[Message], items: Mapping[str, bytes] = NO_ITEMS
    ) -> bool:
        """Store a response: its JSON body, the conversation that ends with it, and the JSON items of its output by
        id. Returns whether it was stored; if not, the reason is logged."""
        try:
            written = asyncio.wrap_future(self.put(id, owner, body, messages, items))
            return await asyncio.wait_for(written, self._limits.wait_s)
        except TimeoutError:
            log.warning("a response was not stored: writing to %s took more than %g s", self._path, self._limits.wait_s)
            return False

    def put(
        self, id: str, owner: str, body: bytes, messages: Sequence[Message], items: Mapping[str, bytes] = NO_ITEMS
    ) -> Future[bool]:
        """Like `keep`, without waiting."""
        return self._thread.submit(self._put, id, owner, body, messages, items)

    async def body(self, id: str, owner: str) -> bytes:
        """The body of a response. Raises Refusal (404) if the owner has no response of that id."""
        return (await self._found(lambda: self._row(id, owner)))[0]

    async def messages(self, id: str, owner: str) -> tuple[Message, ...]:
        """The conversation that ends with the response. Raises Refusal (404) if the owner has no response of that
        id."""
        return await self._found(lambda: _MESSAGES.decode(self._row(id, owner)[1]))

    async def items(self, ids: Iterable[str], owner: str, most_bytes: int) -> dict[str, bytes]:
        """Items with these ids from the owner's responses, as JSON. Unknown ids are missing from the result, as are
        all after the item that brings the total above `most_bytes`."""
        return await self._found(lambda: self._items(ids, owner, most_bytes))

    async def delete(self, id: str, owner: str) -> None:
        """Delete a response. Raises Refusal (404) if the owner has no response of that id."""
        await self._found(lambda: self._delete(id, owner))

    def close(self) -> None:
        """Finish pending writes, and close the file."""
        self._thread.submit(lambda: self._file.close())
        self._thread.shutdown()

    async def _found(self, work: Callable[[], T]) -> T:
        """Run `work` in the file's thread. Raises its Refusal, or a Refusal with 503 if the file cannot be read."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (sqlite3.Error, OSError, ConfigError) as error:
            log.error("%s: %s", self._path, error)
            raise Refusal(503, "the server cannot read its stored responses", "responses_unreadable") from None

    # ---------------------------------------------------------------------------------------- in the thread of the file

    def _open(self) -> sqlite3.Connection:
        """The open file, created again if it was removed. Raises what `_opened` raises."""
        if _identity_of(self._path) != self._identity:
            if not self._removed:
                self._removed = True
                log.error("%s was removed or replaced while in use: its responses are lost", self._path)
            self._file.close()
            self._file, self._identity = _opened(self._path)
            self._removed = False
        return self._file

    def _put(self, id: str, owner: str, body: bytes, messages: Sequence[Message], items: Mapping[str, bytes]) -> bool:
        said = msgspec.json.encode(messages)
        size = len(body) + len(said) + sum(map(len, items.values()))
        if size > self._limits.row_bytes:
            log.warning("a response was not stored: it is %d bytes, and the limit is %d", size, self._limits.row_bytes)
            return False
        row = (id, owner, self._clock(), size, body, said)
        try:
            with self._open() as file:
                number = file.execute(
                    "INSERT INTO responses (id, owner, created, size, body, messages) VALUES (?, ?, ?, ?, ?, ?)", row
                ).lastrowid
                file.executemany("INSERT INTO items VALUES (?, ?, ?)", [(one, number, items[one]) for one in items])
                self._make_room(file)
        except (sqlite3.Error, OSError, ConfigError) as error:
            log.error("a response was not stored: %s", error)
            return False
        return True

    def _make_room(self, file: sqlite3.Connection) -> None:
        rows, size = file.execute("SELECT rows, bytes FROM totals").fetchone()
        until = self._clock() - self._limits.age_s
        while oldest := file.execute("SELECT number, created, size FROM responses ORDER BY number LIMIT 1").fetchone():
            number, created, gone = oldest
            if created >= until and rows <= self._limits.rows and size <= self._limits.bytes:
                break
            file.execute("DELETE FROM responses WHERE number = ?", (number,))
            rows, size = rows - 1, size - gone

    def _row(self, id: str, owner: str) -> tuple[bytes, bytes]:
        found = (
            self._open()
            .execute(
                "SELECT body, messages FROM responses WHERE id = ? AND owner = ? AND created >= ?",
                (id, owner, self._clock() - self._limits.age_s),
            )
            .fetchone()
        )
        if found is None:
            raise _unknown(id)
        return found

    def _items(self, ids: Iterable[str], owner: str, most_bytes: int) -> dict[str, bytes]:
        file, since, found = self._open(), self._clock() - self._limits.age_s, dict[str, bytes]()
        left = most_bytes
        for id in ids:
            row = file.execute(
                "SELECT items.body FROM items JOIN responses ON number = response "
                "WHERE items.id = ? AND owner = ? AND created >= ?",
                (id, owner, since),
            ).fetchone()
            if row is not None:
                found[id] = row[0]
                if (left := left - len(row[0])) < 0:
                    break
        return found

    def _delete(self, id: str, owner: str) -> None:
        with self._open() as file:
            if not file.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (id, owner)).rowcount:
                raise _unknown(id)


def _opened(path: Path) -> tuple[sqlite3.Connection, tuple[int, int] | None]:
    """Open or create the file; returns it with its identity. Raises ConfigError if it cannot be opened, or contains
    other tables."""
    file: sqlite3.Connection | None = None
    try:
        with contextlib.suppress(FileExistsError):  # SQLite would create it, and its -wal and -shm, world-readable
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        file = sqlite3.connect(path)
        _check(path, file)
        for beside in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{path}{beside}").chmod(0o600)
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = NORMAL")
        file.execute("PRAGMA secure_delete = ON")
        file.executescript(_TABLES)
        return file, _identity_of(path)
    except (sqlite3.Error, OSError, ConfigError) as error:
        if file is not None:
            file.close()
        if isinstance(error, ConfigError):
            raise
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"responses_file: {path}: responses cannot be stored there: {why}") from None


def _check(path: Path, file: sqlite3.Connection) -> None:
    """Raises ConfigError unless the file has only this store's tables, or none."""
    named = file.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite!_%' ESCAPE '!'")
    tables = {name for (name,) in named}
    columns = [column[1] for column in file.execute("PRAGMA table_info(responses)")]
    if tables - {"responses", "totals", "items"} or (tables and columns != _COLUMNS):
        raise ConfigError(
            f"responses_file: {path} is a SQLite database of another program (its tables: "
            f"{', '.join(sorted(tables))}): name another file"
        )


def _identity_of(path: Path) -> tuple[int, int] | None:
    """Device and inode; None: the file does not exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _unknown(id: str) -> Refusal:
    return Refusal(404, f"there is no response {id[:64]}", "response_not_found")
