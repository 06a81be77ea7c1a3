"""The API keys file: the name of each key, and its rate limits; reloaded while the server runs.

    # name  key                  limits of this name; defaults come from [per_key] of the deployment
    alice   sk-3f...             requests_per_s=5 concurrency=8
    alice   sk-77...             # a second key of the same name, while the first is being replaced
    batch   sk-a0...             tokens_per_minute=200000 tokens_per_day=20000000 sla=batch
    sk-old...                    # a key alone

sla names a class of the deployment, [sla.NAME], whose SLO targets apply to requests of that name.

Limits are in the same file as the keys, so that one reload applies both: neither a new client nor a new limit needs a
restart.
"""

import os
import secrets
import stat
from collections.abc import Callable, Collection
from hashlib import blake2b, sha256
from pathlib import Path
from typing import NamedTuple

import msgspec

from redline import clock
from redline.api.auth.access import Headers, check_key
from redline.api.auth.quota import KeyAccount
from redline.api.config import DEFAULT_SLA, KeyLimits
from redline.errors import ConfigError

NAME_CHARS = 64
MOST_BYTES = 16 << 20  # of the file
SECRET = secrets.token_bytes(16)  # for generated names of keys: they are logged, and must not reveal the key


class KeyEntry(msgspec.Struct, frozen=True):
    """Name, limits and class of a key."""

    name: str
    limits: KeyLimits
    sla: str = DEFAULT_SLA  # SLO class of its requests


def read_keys(
    path: Path,
    default: KeyLimits = KeyLimits(),  # noqa: B008
    classes: Collection[str] = (),
    secret: bytes = SECRET,
) -> dict[bytes, KeyEntry]:
    """Entries by the SHA-256 of their keys, so that a comparison takes the same time for every key length.

    classes: SLO classes of the deployment. secret: for generated names of keys without one; the same in all processes
    of a server. Raises ConfigError, which names the line and never a key, if the file cannot be read, contains no key
    or contains an unknown limit or class.
    """
    entries: dict[bytes, KeyEntry] = {}
    said_of: dict[str, tuple[KeyEntry, str]] = {}
    for number, line in enumerate(_text(path).split("\n"), 1):
        place = f"{path}, line {number}"
        words = _words(line, place)
        if not words:
            continue
        entry, key = _entry(words, default, classes, place, secret)
        digest = sha256(key.encode()).digest()
        if entries.setdefault(digest, entry).name != entry.name:
            raise ConfigError(f"{place}: this key already has another name: {entries[digest].name}")
        entries[digest], where = said_of.setdefault(entry.name, (entry, place))
        if len(words) > 2 and entries[digest] != entry:
            raise ConfigError(
                f"{place}: {entry.name} has other limits or another sla in {where}; set them in one place only"
            )
    if not entries:
        raise ConfigError(f"{path}: no API key in the file; expected one per line, as NAME KEY or KEY alone")
    return entries


def _text(path: Path) -> str:
    """Contents of the file. Raises ConfigError, also if it is not a regular file: a pipe may never end."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)  # a pipe without a writer is opened at once
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ConfigError(f"{path}: the file of API keys is not a regular file")
            with open(file, "rb", closefd=False) as opened:
                data = opened.read(MOST_BYTES + 1)
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: the file of API keys cannot be read: {why}") from None
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{path}: the file of API keys has more than {MOST_BYTES:,} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: the file of API keys is not UTF-8 text") from None


def _words(line: str, place: str) -> list[str]:
    """Words of a line without its comment. Raises ConfigError if it contains unprintable characters."""
    line = line.removesuffix("\r").replace("\t", " ").strip(" ")
    comment = 0 if line.startswith("#") else line.find(" #")
    words = line if comment < 0 else line[:comment]
    if not words.isprintable():
        raise ConfigError(f"{place}: a character that is not printable; expected NAME KEY, or KEY alone")
    return words.split()


def _entry(
    words: list[str], default: KeyLimits, classes: Collection[str], place: str, secret: bytes
) -> tuple[KeyEntry, str]:
    if len(words) == 1:
        name = f"key-{blake2b(words[0].encode(), key=secret, digest_size=4).hexdigest()}"
        return KeyEntry(name, default), words[0]
    name, key, *rest = words
    if len(name) > NAME_CHARS or not name.isprintable():
        raise ConfigError(f"{place}: the name is not printable text of at most {NAME_CHARS} characters")
    said: dict[str, str] = {}
    sla = DEFAULT_SLA
    for word in rest:
        limit, equals, number = word.partition("=")
        if limit == "sla" and equals:
            if number not in classes and number != DEFAULT_SLA:
                known = ", ".join(classes) or "none"
                raise ConfigError(f"{place}: {name}: unknown class in sla=; the deployment has {known}")
            sla = number
            continue
        if not equals or limit not in KeyLimits.__struct_fields__:
            known = ", ".join(f"{field}=NUMBER" for field in KeyLimits.__struct_fields__)
            raise ConfigError(
                f"{place}: unknown word after the key of {name}; expected {known}, sla=CLASS, or # COMMENT"
            )
        said[limit] = number
    try:
        limits = msgspec.convert({**msgspec.structs.asdict(default), **said}, KeyLimits, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {name}: {error}") from None
    return KeyEntry(name, limits, sla), key


Version = tuple[int, int, int]
"""Identity of the file's version: mtime, size and inode."""


class KeysFileRead(NamedTuple):
    """Result of reading the file once. seen: version of the file; None: it did not exist."""

    seen: Version | None
    found: dict[bytes, KeyEntry] | ConfigError


class Keyring:
    """The current keys, and a KeyAccount per name, which survives reloads of the file."""

    def __init__(
        self,
        path: Path,
        default: KeyLimits,
        clock: Callable[[], float] = clock.monotonic,
        classes: Collection[str] = (),
        secret: bytes = SECRET,
    ) -> None:
        """secret, ConfigError: as for `read_keys`."""
        self.path = path
        self._classes = classes
        self._secret = secret
        self._default = default
        self._clock = clock
        self.accounts: dict[str, KeyAccount] = {}
        self._seen: Version | None = None
        self._entries: dict[bytes, KeyEntry] = {}
        reading = self.read()
        assert reading is not None
        self.take(reading)

    def read(self, *, changed: bool = False) -> KeysFileRead | None:
        """Read the file without applying it, so it may run in another thread. changed: return None if the file's
        version is the one applied last."""
        seen = self._look()
        if changed and seen == self._seen:
            return None
        try:
            return KeysFileRead(seen, read_keys(self.path, self._default, self._classes, self._secret))
        except ConfigError as error:
            return KeysFileRead(seen, error)

    def take(self, reading: KeysFileRead) -> int:
        """Apply a reading. Returns the number of keys. Raises the ConfigError of a reading that failed; the previous
        keys stay in effect then."""
        self._seen = reading.seen
        if isinstance(reading.found, ConfigError):
            raise reading.found
        self._entries = reading.found
        names = {entry.name: entry for entry in self._entries.values()}
        for name, account in list(self.accounts.items()):
            if name not in names and not account.running:
                del self.accounts[name]
        for name, entry in names.items():
            if (account := self.accounts.get(name)) is None:
                account = self.accounts[name] = KeyAccount(name, entry.limits, self._clock)
            elif account.limits != entry.limits:
                account.limit(entry.limits)
            account.sla = entry.sla
        return len(self._entries)

    def account(self, headers: Headers) -> KeyAccount:
        """The account of a request. Raises Refusal (401) for a request without a known key."""
        return self.accounts[self._entries[check_key(headers, self._entries)].name]

    def _look(self) -> Version | None:
        try:
            found = os.stat(self.path)
        except (OSError, ValueError):
            return None  # perhaps it is just being replaced
        return found.st_mtime_ns, found.st_size, found.st_ino
