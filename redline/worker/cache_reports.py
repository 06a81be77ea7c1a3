"""Reports of a worker's prefix cache to the API (`Cached`), from which the router chooses among several workers."""

from redline.messages.channel import Outbox
from redline.scheduler.planner import Planner
from redline.worker.service import Service


class CacheReports(Service):
    """Sends the changes of the prefix cache, and all of it once a receiver needs the complete state."""

    def __init__(self, planner: Planner, outbox: Outbox) -> None:
        self._planner, self._outbox = planner, outbox
        self._whole = False  # whether the next report lists all of the cache

    def recall(self) -> None:
        self._whole = True

    def work(self) -> None:
        if (news := self._planner.cached(whole=self._whole)) is not None:
            self._outbox.put(news)
            self._whole = False
