"""Load of the other API replicas, from each one's latest report. It counts for limits and routing."""

from collections.abc import Collection, Iterator

from redline.messages.replicas import Use
from redline.router.worker_registry import WorkerRegistry


class PeerReplicas:
    """The latest report of each replica; empty if there is one API process. `workers` get the load of their peers."""

    def __init__(self, workers: WorkerRegistry) -> None:
        self._workers = workers
        self._uses: dict[str, Use] = {}

    def __iter__(self) -> Iterator[Use]:
        return iter(self._uses.values())

    def update(self, use: Use) -> None:
        """Store a replica's report."""
        self._uses[use.replica] = use
        self.apply()

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

    def apply(self) -> None:
        """Set the load that other replicas have on each worker; call it again after a worker has joined."""
        for worker in self._workers:
            start = worker.name, worker.epoch
            there = [each for use in self for each in use.workers if (each.worker, each.epoch) == start]
            worker.peer_jobs = sum(each.jobs for each in there)
            worker.peer_tokens = sum(each.tokens for each in there)
