"""Load of the other API replicas, from each one's latest report. It counts for limits and routing."""

from collections.abc import Collection, Iterator

from redline.messages.replicas import Use
from redline.router.worker_registry import WorkerHandle


class PeerReplicas:
    """The latest report of each replica; empty if there is one API process."""

    def __init__(self) -> None:
        self._uses: dict[str, Use] = {}

    def __iter__(self) -> Iterator[Use]:
        return iter(self._uses.values())

    def heard(self, use: Use) -> None:
        """Store a replica's report."""
        self._uses[use.replica] = use

    def keep(self, names: Collection[str]) -> list[str]:
        """Drop replicas that are not in `names`, since they have ended. Returns the names of the dropped ones."""
        gone = [name for name in self._uses if name not in names]
        for name in gone:
            del self._uses[name]
        return gone

    @property
    def waiting(self) -> int:
        """Jobs without a first token."""
        return sum(use.waiting for use in self)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the waiting jobs, and of jobs that are being prepared."""
        return sum(use.waiting_tokens for use in self)

    @property
    def running(self) -> int:
        """Jobs that have a first token and have not ended."""
        return sum(use.running for use in self)

    @property
    def load(self) -> int:
        """Requests that are running or waiting."""
        return sum(use.load for use in self)

    def tell(self, link: WorkerHandle) -> None:
        """Set the load that other replicas have on a link's worker."""
        at = [each for use in self for each in use.workers if (each.worker, each.epoch) == (link.name, link.epoch)]
        link.jobs_of_others, link.tokens_of_others = sum(each.jobs for each in at), sum(each.tokens for each in at)
