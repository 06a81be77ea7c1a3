"""Answers of an evaluation that outlive it: one that was stopped goes on where it was."""

import contextlib
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from redline import clock
from redline.bench.quality.answering import Greedy
from redline.bench.quality.prompts import Answer, Prompt
from redline.wire.base import Record


class _Line(Record, frozen=True):
    """An answer in the file."""

    prompt: str  # a hash of it
    answer: Answer
    seconds: float  # since the answer before it in the same run, or the run's start


class Kept:
    """Answers by a `Greedy`, each written to a file as it ends; what is there is not asked again.

    file: of one checkpoint and one way to answer; `forget` removes it. A file that cannot be written keeps nothing.
    earlier_s: what answering took in the runs before.
    """

    def __init__(self, answerer: Greedy, file: Path) -> None:
        self._answerer, self._file = answerer, file
        self.earlier_s = 0.0

    @property
    def fingerprint(self) -> str:
        """The checkpoint's fingerprint."""
        return self._answerer.fingerprint

    def answer(self, prompts: Sequence[Prompt], done: Callable[[], None]) -> list[Answer]:
        """The answers in the order of the prompts; calls `done` once for each as it ends."""
        kept = self._read()
        left = [prompt for prompt in prompts if _name(prompt) not in kept]
        for _ in range(len(prompts) - len(left)):
            done()
        last = clock.monotonic()

        def keep(prompt: Prompt, answer: Answer) -> None:
            nonlocal last
            now, name = clock.monotonic(), _name(prompt)
            kept[name] = answer
            with contextlib.suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with open(self._file, "ab") as file:
                    file.write(msgspec.json.encode(_Line(prompt=name, answer=answer, seconds=now - last)) + b"\n")
            last = now

        self._answerer.answer(left, done, keep)
        return [kept[_name(prompt)] for prompt in prompts]

    def _read(self) -> dict[str, Answer]:
        found: dict[str, Answer] = {}
        with contextlib.suppress(OSError):
            for line in self._file.read_bytes().splitlines():
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # one that was cut off
                    one = msgspec.json.decode(line, type=_Line)
                    found[one.prompt] = one.answer
                    self.earlier_s += one.seconds
        return found

    def forget(self) -> None:
        """The evaluation is whole: the next one asks everything."""
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)


def _name(prompt: Prompt) -> str:
    return blake2b(msgspec.json.encode(prompt), digest_size=16).hexdigest()
