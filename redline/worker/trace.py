"""Writes a trace of prompts, answers and speculation rounds, one JSON line per job, for training drafters.

The lines contain users' text as token ids, prompt and answer, so a trace is personal data. A new file is readable only
by its owner (mode 0600), and nothing is ever deleted from it.
"""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from redline.errors import ConfigError
from redline.messages.codec import Wire
from redline.messages.delta import Delta
from redline.messages.job import Job, JobId
from redline.worker.service import Service

_log = logging.getLogger(__name__)


class _Story:
    __slots__ = ("prompt", "rounds", "tokens")

    def __init__(self, job: Job) -> None:
        self.prompt = len(job.tokens)
        self.tokens = list(job.tokens)
        self.rounds: list[tuple[int, int, int]] = []


class Trace(Service):
    """When a job has ended, appends to `path`: {"id", "tokens" (prompt and answer), "prompt" (number of prompt tokens),
    "finish", "rounds": [[position of the round's first new token, verified draft tokens, accepted draft tokens], ...]}.

    Raises ConfigError if the file cannot be opened. A line that cannot be written later is lost; the first such error
    is logged, and serving continues.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stories: dict[JobId, _Story] = {}
        self._broken = False  # the file may end in part of a line
        self._complained = False
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{path}: cannot write a trace: {error.strerror}") from error

    def hear(self, message: Wire) -> None:
        """Start the record of a job."""
        if isinstance(message, Job):
            self._stories[message.id] = _Story(message)

    def sending(self, deltas: Sequence[Delta]) -> None:
        """Add the deltas of jobs that were submitted; the last one of a job, with a `finish`, writes its line."""
        for delta in deltas:
            self._add(delta)

    def _add(self, delta: Delta) -> None:
        story = self._stories.get(delta.job)
        if story is None:
            return
        if delta.proposed:
            story.rounds.append((len(story.tokens), delta.proposed, delta.accepted))
        story.tokens += delta.tokens
        if delta.finish is None:
            return
        del self._stories[delta.job]
        self._write(
            {
                "id": delta.job,
                "tokens": story.tokens,
                "prompt": story.prompt,
                "finish": delta.finish,
                "rounds": story.rounds,
            }
        )

    def close(self) -> None:
        """Close the file; jobs that have not ended are not written."""
        os.close(self._file)

    def _write(self, line: dict[str, object]) -> None:
        data = (b"\n" if self._broken else b"") + json.dumps(line, separators=(",", ":")).encode() + b"\n"
        self._broken = True
        try:
            while data:
                data = data[os.write(self._file, data) :]
            self._broken = False
        except OSError as error:
            if not self._complained:
                self._complained = True
                _log.error("%s: traces are being lost: %s", self._path, error)
