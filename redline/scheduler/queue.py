"""The queue of waiting jobs, and which of them is scheduled next.

Tenants are served round-robin: next is the oldest job of the tenant that was served least recently. Preempted jobs come
before all others. A job with less to compute may overtake the next job, but the jobs that overtake it may together not
compute more positions than that job itself: so it waits at most twice as long, and is not overtaken after that.
"""

from collections import deque
from collections.abc import Iterator

from redline.scheduler.active import ActiveJob


class Queue:
    """Waiting jobs. Tenants are the names of an operator's API keys, so there are few."""

    def __init__(self) -> None:
        self._again: deque[ActiveJob] = deque()  # preempted jobs, in the order in which they first started
        self._lines: dict[str, deque[ActiveJob]] = {}  # by tenant with waiting jobs; each in order of arrival
        self._turns: dict[str, int] = {}  # number of the turn in which each tenant was last served
        self._turn = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ActiveJob]:
        """Preempted jobs first, then each tenant's jobs in order of arrival."""
        yield from self._again
        for line in self._lines.values():
            yield from line

    @property
    def again(self) -> list[ActiveJob]:
        """Preempted jobs, in the order in which they first started."""
        return list(self._again)

    def add(self, job: ActiveJob) -> None:
        """Add a job to its tenant's queue, at its position by arrival."""
        line = self._lines.setdefault(job.job.tenant, deque())
        later = (at for at in range(len(line), 0, -1) if line[at - 1].arrival < job.arrival)
        line.insert(next(later, 0), job)
        self._count += 1

    def put_back(self, job: ActiveJob) -> None:
        """Requeue a preempted job at its original position."""
        later = (at for at, other in enumerate(self._again) if (other.entry or 0) > (job.entry or 0))
        self._again.insert(next(later, len(self._again)), job)
        self._count += 1

    def due(self) -> ActiveJob:
        """The job to schedule next. Raises ValueError if no job waits."""
        if self._again:
            return self._again[0]
        heads = (line[0] for line in self._lines.values())
        return min(heads, key=lambda job: (self._turns.get(job.job.tenant, 0), job.arrival))

    def quick(self, most: int) -> ActiveJob | None:
        """The job with the least to compute, or the next job (`due`) if that job may not be overtaken; None if it
        has `most` positions to compute or more. Ties go to the older job."""
        if self._again:
            return None
        due, least = self.due(), min(self, key=lambda job: (job.work, job.arrival))
        if least.work >= due.work or due.passed + least.work > due.work:
            least = due
        return least if least.work < most else None

    def begins(self, job: ActiveJob) -> None:
        """Remove a job because it starts, and update the turns. Raises ValueError if it is not queued."""
        if not self._again:
            due = self.due()
            if job is due:
                self._turn += 1
                self._turns[job.job.tenant] = self._turn
            else:
                due.passed += job.work
        self.remove(job)

    def remove(self, job: ActiveJob) -> None:
        """Remove a job. Raises ValueError if it is not queued."""
        if job in self._again:
            self._again.remove(job)
        else:
            line = self._lines[job.job.tenant]
            line.remove(job)
            if not line:
                del self._lines[job.job.tenant]
        self._count -= 1
