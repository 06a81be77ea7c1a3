"""A drafter's training corpus: prompts with the target's own answers, as token ids, one JSON example per line.

Reading skips invalid lines and reports them. Writing appends; a last line that was cut by a kill is repaired
first.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from redline.chat.lines import NOT_JSON
from redline.disk import hold, unwritable, write_whole
from redline.errors import ConfigError
from redline.messages.base import Record

SYNC_EXAMPLES = 64  # lines between two fsyncs: the most that a power failure loses; a kill loses none


class Example(Record, frozen=True, kw_only=True):
    """A prompt and its answer, as token ids. The answer includes the stop id that ended it."""

    id: str
    domain: str
    language: str = "en"
    tokens: tuple[int, ...]
    prompt: int  # tokens [0, prompt) are the prompt
    finish: str  # as in wire.delta.Finish
    kind: str = ""
    rounds: tuple[tuple[int, int, int], ...] = ()
    """(position of the first token, drafts verified, drafts accepted) of each step that had drafts."""


class About(Record, frozen=True):
    """Stored with a corpus: the target that answered, and the sampling parameters. The same for the whole corpus."""

    fingerprint: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float


class Corpus(NamedTuple):
    """The examples of some files, and messages about the lines that were skipped."""

    examples: list[Example]
    skipped: list[str]  # "file, line n: reason"


def read_examples(*paths: Path) -> Corpus:
    """All examples of the files, in order. Raises ConfigError if a file cannot be read."""
    reader = CorpusReader(*paths)
    return Corpus(list(reader), reader.skipped)


class CorpusReader:
    """Iterates over the examples of some files.

    skipped  filled while iterating: a message for each line that is not an example, or repeats an earlier id
    done     bytes read so far, of `size`
    """

    def __init__(self, *paths: Path) -> None:
        """Raises ConfigError if a file does not exist."""
        self.skipped: list[str] = []
        self.done = 0
        try:
            self.size = sum(path.stat().st_size for path in paths)
        except OSError as error:
            raise ConfigError(f"{error.filename}: cannot be read ({error.strerror}); expected a corpus") from None
        self._paths = paths

    def __iter__(self) -> Iterator[Example]:
        decoder = msgspec.json.Decoder(Example)
        seen: set[str] = set()
        for path in self._paths:
            try:
                with open(path, "rb") as lines:
                    for number, line in enumerate(lines, 1):
                        self.done += len(line)
                        try:
                            example = decoder.decode(line)
                            reason = _wrong(example) if example.id not in seen else f"duplicate id {example.id!r}"
                        except NOT_JSON as error:
                            example, reason = None, str(error) if line.strip() else "the line is empty"
                        if example is not None and reason is None:
                            seen.add(example.id)
                            yield example
                        else:
                            self.skipped.append(f"{path}, line {number}: {reason}")
            except OSError as error:
                raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a corpus") from None


def _wrong(example: Example) -> str | None:
    if not example.tokens:
        return "tokens is empty"
    if min(example.tokens) < 0:
        return f"tokens has {min(example.tokens)}; expected ids from 0 on"
    if not 0 < example.prompt <= len(example.tokens):
        return f"prompt is {example.prompt}; expected 1 to {len(example.tokens)}, the number of tokens"
    return None


class CorpusWriter:
    """Appends examples to a file; each is written completely or not at all. Use as a context manager.

    Opening creates the file if needed and repairs a last line that was cut by a kill; `cut` is the number of bytes
    removed. Raises ConfigError if the file cannot be written or another process is writing it, OSError if the disk is
    full; appended examples are kept.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._held = hold(path)
            try:
                self.cut = _mend(path)
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            except OSError:
                self._held.release()
                raise
        except OSError as error:
            raise unwritable(path, error) from None
        self._path = path
        self._unsynced = 0

    def append(self, example: Example) -> None:
        """Adds one line. Raises OSError if the disk is full; the file then still ends with a complete line."""
        line = msgspec.json.encode(example) + b"\n"
        end = os.fstat(self._file).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
            self._unsynced += 1
            if self._unsynced >= SYNC_EXAMPLES:
                self._sync()
        except OSError:
            if os.fstat(self._file).st_size < end + len(line):
                os.ftruncate(self._file, end)
            raise

    def close(self) -> None:
        """Syncs all lines to disk, and releases the file's lock."""
        try:
            self._sync()
        finally:
            os.close(self._file)
            self._held.release()

    def _sync(self) -> None:
        os.fsync(self._file)
        self._unsynced = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        empty = os.fstat(self._file).st_size == 0
        self.close()
        if kind is not None and empty:  # if it failed before the first example, the file is removed
            self._path.unlink(missing_ok=True)


def mend(path: Path) -> int:
    """Ends the file's last line, or removes it if it is not a complete JSON value. Returns the number of bytes removed.

    Raises ConfigError if the file cannot be written, or if another process is writing it: that process may not have
    finished the last line.
    """
    if not path.exists():
        return 0
    try:
        held = hold(path)
        try:
            return _mend(path)
        finally:
            held.release()
    except OSError as error:
        raise unwritable(path, error) from None


def _mend(path: Path) -> int:
    if not path.exists():
        return 0
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        start = end
        while start > 0:  # backwards to the beginning of the line
            step = min(start, 1 << 16)
            file.seek(start - step)
            newline = file.read(step).rfind(b"\n")
            start -= step
            if newline >= 0:
                start += newline + 1
                break
        if start == end:
            return 0
        file.seek(start)
        try:
            msgspec.json.decode(file.read())
        except NOT_JSON:
            file.truncate(start)
            return end - start
        file.write(b"\n")
        return 0


def read_about(corpus: Path) -> About | None:
    """The stored facts about a corpus's answers; None if there are none.

    Raises ConfigError if they are damaged.
    """
    path = corpus.with_name(f"{corpus.name}.about.json")
    try:
        return msgspec.json.decode(path.read_bytes(), type=About)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def claim(corpus: Path, about: About) -> None:
    """Stores the facts about the corpus's answers.

    Raises ConfigError if other facts are stored already, and OSError if the disk is full.
    """
    path, before = corpus.with_name(f"{corpus.name}.about.json"), read_about(corpus)
    if before is None:
        write_whole(path, msgspec.json.format(msgspec.json.encode(about)) + b"\n")
        return
    for field in About.__struct_fields__:
        was, now = getattr(before, field), getattr(about, field)
        if was != now:
            raise ConfigError(
                f"{path}: the corpus was answered with {field} {was}, this run has {now}: write to another file"
            )
