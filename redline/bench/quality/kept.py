"""Saves the answers of an evaluation, so that an interrupted one can be resumed."""

import contextlib
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from redline import clock
from redline.bench.quality.answering import Greedy
from redline.bench.quality.prompts import EvalPrompt, ModelAnswer
from redline.messages.base import Record


class _Line(Record, frozen=True):
    """A saved answer."""

    prompt: str  # hash of the prompt
    answer: ModelAnswer
    seconds: float  # since the previous answer of the same run, or its start


class KeptAnswers:
    """Answers of a `Greedy`, each appended to a file when it ends; saved answers are not generated again.

    file: for one checkpoint and one configuration; `forget` removes it. If it cannot be written, nothing is saved.
    earlier_s: seconds of answering in earlier runs.
    """

    def __init__(self, answerer: Greedy, file: Path) -> None:
        self._answerer, self._file = answerer, file
        self.earlier_s = 0.0

    @property
    def fingerprint(self) -> str:
        """The checkpoint's fingerprint."""
        return self._answerer.fingerprint

    def answer(self, prompts: Sequence[EvalPrompt], done: Callable[[], None]) -> list[ModelAnswer]:
        """The answers in the order of the prompts; calls `done` once for each as it ends."""
        kept = self._read()
        left = [prompt for prompt in prompts if _name(prompt) not in kept]
        for _ in range(len(prompts) - len(left)):
            done()
        last = clock.monotonic()

        def keep(prompt: EvalPrompt, answer: ModelAnswer) -> None:
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

    def _read(self) -> dict[str, ModelAnswer]:
        found: dict[str, ModelAnswer] = {}
        with contextlib.suppress(OSError):
            for line in self._file.read_bytes().splitlines():
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # an incomplete line
                    one = msgspec.json.decode(line, type=_Line)
                    found[one.prompt] = one.answer
                    self.earlier_s += one.seconds
        return found

    def forget(self) -> None:
        """Removes the file after a complete evaluation, so that the next one starts from the beginning."""
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)


def _name(prompt: EvalPrompt) -> str:
    return blake2b(msgspec.json.encode(prompt), digest_size=16).hexdigest()
