"""Which offload tier has which page, which pages a read holds, and what happened to pages.

A held page is not evicted. Two threads use the tables, the caller's and the store's; `lock` protects them. A page that
is `clean` in host memory is on disk too.
"""

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from redline.messages.job import PageHash, PageId
from redline.run.tiers.copies import wait
from redline.run.tiers.disk import DiskPages, DiskPlace
from redline.run.tiers.memory import HostPage, HostPages
from redline.run.tiers.parts import Parts

Tier = Literal["host", "disk"]

EXACT, DRAFTED = 1, 2  # flags of a page, as in `PrefixCache.match`

_log = logging.getLogger(__name__)


class Found(NamedTuple):
    """A stored page."""

    tier: Tier
    exact: bool
    drafted: bool


class TierRead:
    """A read of stored pages. Once `ended` is set, nothing writes to the target pages any more, and the first
    `len(kept)` are valid.

    kept: the tier and flags of each valid page.
    """

    def __init__(self, hashes: Sequence[PageHash], found: Sequence[Found]) -> None:
        self.hashes, self.found = tuple(hashes), tuple(found)
        self.pages: tuple[PageId, ...] = ()
        self.kept: list[Found] = []
        self.ended = threading.Event()
        self.until = 0.0  # deadline, by the store's clock
        self.cancelled = False


class PageTables:
    """The tables of one store. counts: pages by tier and what happened to them. busy: whether steps run. ended: whether
    the store is being closed. parts: time spent by part of the work."""

    def __init__(self, host: HostPages, disk: DiskPages | None) -> None:
        self.host = host
        self.disk = disk
        self.counts: Counter[tuple[Tier, str]] = Counter()
        self.parts = Parts()
        self.lock = threading.Condition()
        self.on_disk: Mapping[PageHash, DiskPlace] = {} if disk is None else disk.places
        self.held: dict[TierRead, list[HostPage]] = {}  # by reads that have not ended
        self.busy = False
        self.ended = False
        self._warned: set[str] = set()

    def end_of(self, reading: TierRead) -> None:
        """A read has ended: release its pages. Takes the lock."""
        with self.lock:
            for entry in self.held.pop(reading, ()):
                entry.readings -= 1
        reading.ended.set()

    def spoilt(self, tier: Tier, hash: PageHash, why: str) -> None:
        """Drops a corrupt page from all tiers: its copy in another tier may be right, but the same hash is not tried
        twice."""
        self.counts[tier, "spoilt"] += 1
        if not any(line.startswith(f"a page of the {tier}") for line in self._warned):
            self.warn(
                f"a page of the {tier} {why} ({hash.hex()}): dropped and recomputed; further cases are only counted"
            )

        with self.lock:
            if (entry := self.host.find(hash)) is not None and entry.coming is None:
                self.host.drop(hash)
        if self.disk is not None:
            self.disk.spoil(hash)

    def warn(self, line: str) -> None:
        """Logs a line once. The store's thread."""
        if line not in self._warned:
            self._warned.add(line)
            _log.warning("%s", line)

    # ------------------------------------------------------------------------------------------- holding the lock

    def look(self, hash: PageHash) -> tuple[Tier, int] | None:
        """The tier and the flags of a stored page."""
        entry = self.host.find(hash)
        if entry is not None:
            return "host", entry.flags
        place = self.on_disk.get(hash)
        return None if place is None else ("disk", place.flags)

    def room(self) -> int | None:
        """A slot to fill, evicting a page if necessary; None if no page can be evicted."""
        slot, given_up = self.host.take()
        if given_up is not None:
            self.counts["host", "lost" if given_up == "dirty" and self.disk is not None else "given up"] += 1
        return slot

    def land(self) -> bool:
        """Waits for the pages that are still being copied, so that they can be evicted. Returns whether there were
        any."""
        coming = [entry for entry in self.host if entry.coming is not None]
        for entry in coming:
            wait(entry.coming)
            entry.coming = None
        return bool(coming)

    def holds(self, reading: TierRead, entry: HostPage) -> None:
        """A read wants a page: it is not evicted before `end_of`."""
        entry.readings += 1
        self.held.setdefault(reading, []).append(entry)

    def check(self) -> None:
        """Raises AssertionError unless every slot is free or holds exactly one page, and every hold is counted."""
        self.host.check()
        for entry in self.host:
            holding = sum(entries.count(entry) for entries in self.held.values())
            assert entry.readings == holding, f"{entry.readings} readings counted, {holding} hold a page"


def flags_of(exact: bool, drafted: bool) -> int:
    """The flags of a page with these properties."""
    return EXACT * exact | DRAFTED * drafted
