"""The interface of a worker's services to its loop: what a worker does besides its steps.

KV transfer, KV offload, reports of the cache, traces and profiles are services. The loop knows none of them; it calls
every hook of every service, in its thread, at the moments that the hooks state. A worker without services is complete.
"""

from collections.abc import Sequence

from redline.messages.codec import Wire
from redline.messages.delta import Delta
from redline.messages.job import JobId
from redline.messages.news import Load
from redline.worker.ports import Plans, StepLauncher


class Service:
    """A service with nothing to do; each service overrides the hooks that it needs.

    idle: whether no work is in progress apart from steps: only then may the loop wait for messages without a timeout.
    changes: incremented whenever the planner's state is changed, so that it may have a step to schedule. leaves:
    whether `depart` should be called while the step that is settled next runs.
    """

    @property
    def changes(self) -> int:
        return 0

    @property
    def idle(self) -> bool:
        return True

    @property
    def leaves(self) -> bool:
        return False

    def due_in(self) -> float | None:
        """Seconds until the hooks should be called again even if no message arrives; None: not before a message."""
        return None

    def hear(self, message: Wire) -> list[Delta] | None:
        """A message has arrived. -> the deltas to send; None: another service, or the loop, has to process it."""
        return None

    def jobs_of(self, replica: str) -> list[JobId]:
        """Jobs of an API replica whose deltas the service keeps (`settled`)."""
        return []

    def abort(self, id: JobId) -> None:
        """A job is aborted; the loop aborts it in the planner afterwards."""

    def abort_all(self) -> None:
        """All jobs are aborted; the loop aborts them in the planner afterwards."""

    def recall(self) -> None:
        """An API replica needs the complete state."""

    def watched(self, planner: Plans, launcher: StepLauncher) -> tuple[Plans, StepLauncher]:
        """The planner and the launcher to use in the next iteration."""
        return planner, launcher

    def depart(self, layers: int) -> None:
        """The first `layers` layers of the prompts of the running step are computed."""

    def settled(self, deltas: list[Delta]) -> list[Delta]:
        """A step was settled, or there was none; called in each iteration. -> the deltas to send. Raises WorkerLost."""
        return deltas

    def sending(self, deltas: Sequence[Delta]) -> None:
        """Deltas are about to be sent, or are dropped because their receiver has gone."""

    def work(self) -> None:
        """An iteration's deltas were sent; called in each iteration."""

    def load(self, load: Load) -> Load:
        """Adds the service's own counters."""
        return load

    def stop(self) -> None:
        """A Stop has arrived, and every job and step has ended."""
