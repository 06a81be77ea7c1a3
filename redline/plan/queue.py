"""Who waits, and whose turn it is.

Names take turns: the next to begin is the oldest job of the name whose last turn is longest ago. Jobs that have lost
their pages stand in front of all. A job with less to compute may begin before the one whose turn it is, but those that
do so may together compute no more than that job itself: so it waits twice as long at worst, and then nobody passes it.
"""

from collections import deque
from collections.abc import Iterator

from redline.plan.active import ActiveJob


class Queue:
    """Waiting jobs. `tenant` of a job is its name; the names are those of an operator's keys, so there are few."""

    def __init__(self) -> None:
        self._again: deque[ActiveJob] = deque()  # in the order in which they first began
        self._lines: dict[str, deque[ActiveJob]] = {}  # of names with waiting jobs; each in the order of arrival
        self._turns: dict[str, int] = {}  # when each name had its last turn
        self._turn = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ActiveJob]:
        """Those that have lost their pages, then each name's in the order of arrival."""
        yield from self._again
        for line in self._lines.values():
            yield from line

    @property
    def again(self) -> list[ActiveJob]:
        """Jobs that have lost their pages, in the order in which they first began."""
        return list(self._again)

    def add(self, job: ActiveJob) -> None:
        """A job has come, or waits again for its turn: it stands where it came."""
        line = self._lines.setdefault(job.job.tenant, deque())
        later = (at for at in range(len(line), 0, -1) if line[at - 1].arrival < job.arrival)
        line.insert(next(later, 0), job)
        self._count += 1

    def put_back(self, job: ActiveJob) -> None:
        """A job has lost its pages: it stands where it first began."""
        later = (at for at, other in enumerate(self._again) if (other.entry or 0) > (job.entry or 0))
        self._again.insert(next(later, len(self._again)), job)
        self._count += 1

    def due(self) -> ActiveJob:
        """Whose turn it is. Raises ValueError where nobody waits."""
        if self._again:
            return self._again[0]
        heads = (line[0] for line in self._lines.values())
        return min(heads, key=lambda job: (self._turns.get(job.job.tenant, 0), job.arrival))

    def quick(self, most: int) -> ActiveJob | None:
        """The job that has least to compute, or where it may not pass the one whose turn it is, that one; None where it
        has `most` positions to compute or more. Of two alike it is the older one."""
        if self._again:
            return None
        due, least = self.due(), min(self, key=lambda job: (job.work, job.arrival))
        if least.work >= due.work or due.passed + least.work > due.work:
            least = due
        return least if least.work < most else None

    def begins(self, job: ActiveJob) -> None:
        """The job waits no more, as it begins. Raises ValueError where it does not wait."""
        if not self._again:
            due = self.due()
            if job is due:
                self._turn += 1
                self._turns[job.job.tenant] = self._turn
            else:
                due.passed += job.work
        self.remove(job)

    def remove(self, job: ActiveJob) -> None:
        """The job waits no more. Raises ValueError where it does not wait."""
        if job in self._again:
            self._again.remove(job)
        else:
            line = self._lines[job.job.tenant]
            line.remove(job)
            if not line:
                del self._lines[job.job.tenant]
        self._count -= 1
