"""What has to be known of `worker.engine.Engine` to ask it; free of torch, so that tests can stand in for it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from redline.chat.template import Style
from redline.chat.tokenizer import Tokenizer
from redline.wire.delta import Delta
from redline.wire.job import Job, JobId


class JobRunner(Protocol):
    """A loaded target that takes jobs to their ends."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def style(self) -> Style: ...
    @property
    def fingerprint(self) -> str: ...
    def generate(
        self, jobs: Sequence[Job], on_delta: Callable[[Delta], object] | None = None
    ) -> Mapping[JobId, Sequence[Delta]]: ...
