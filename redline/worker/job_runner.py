"""What a caller needs of `worker.engine.Engine`, as a protocol without torch, so that tests can stand in for it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from redline.chat.template import Style
from redline.chat.tokenizer import Tokenizer
from redline.wire.delta import Delta
from redline.wire.job import Job, JobId


class JobRunner(Protocol):
    """A loaded target that takes jobs to their ends."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's own."""
        ...

    @property
    def style(self) -> Style:
        """How the target's prompts are written."""
        ...

    @property
    def fingerprint(self) -> str:
        """Names the target and its pages' number format; jobs are made with it (`chat.hashing.make_job`)."""
        ...

    def generate(
        self, jobs: Sequence[Job], on_delta: Callable[[Delta], object] | None = None
    ) -> Mapping[JobId, Sequence[Delta]]:
        """Run jobs to their ends: the deltas of each job, in order. Raises WorkerLost, as `Engine.generate` does."""
        ...

    def run(self, jobs: Iterable[Job], on_delta: Callable[[Delta], object]) -> None:
        """As `generate`, but keeps no delta, and takes a job when it is wanted."""
        ...
