"""The interface of `worker.engine.Engine` for its callers, as a protocol without torch that tests can implement."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from redline.chat.conversation import Conversation
from redline.chat.template import Style
from redline.chat.tokenizer import Tokenizer
from redline.messages.delta import Delta
from redline.messages.job import Job, JobId


class JobRunner(Protocol):
    """A loaded target model that runs jobs to completion."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        ...

    @property
    def style(self) -> Style:
        """The target's chat template style."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identifies the target and the number format of its KV pages; jobs are created with it
        (`chat.page_hashes.make_job`)."""
        ...

    def seen(self, conversation: Conversation) -> Conversation:
        """The conversation with hash and size of each of its images, whose pixels later jobs find. Raises ConfigError
        for an image that cannot be read, and if the target reads none."""
        ...

    def generate(
        self, jobs: Sequence[Job], on_delta: Callable[[Delta], object] | None = None
    ) -> Mapping[JobId, Sequence[Delta]]:
        """Run jobs to completion. -> the deltas of each job, in order. Raises WorkerLost, as `Engine.generate` does."""
        ...

    def run(self, jobs: Iterable[Job], on_delta: Callable[[Delta], object]) -> None:
        """As `generate`, but stores no deltas, and takes jobs from `jobs` only as earlier ones end."""
        ...
