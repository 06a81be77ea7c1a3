"""KV transfers of one worker: the prompts that it prefills for other workers, and those that others prefill for it.

The prefill worker gathers a prompt's pages into KV chunks (parcels) while it computes them, in an area that other
workers may read, under leases. The decode worker reads the chunks, verifies the checksum of each, and copies it into
its own pages. No worker writes into another worker's memory, so a page has one owner, even if the other side goes down;
and a chunk that is read after its lease fails its checksum. On any failure (a worker that goes down, a link that
stalls, a corrupt byte) the decode worker computes the prompt itself: a KV transfer can be lost, an answer cannot.

All of this runs in the loop's thread between two steps. The prefill worker offers chunks as far as there is room in its
area; the decode worker receives chunks for at most a share of the steps' time (`receiver.py`). A job that waits for
its pages occupies only those pages and delays no other job.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec

from redline import clock
from redline.messages.channel import Outbox, SocketOutbox
from redline.messages.codec import Wire
from redline.messages.delta import Delta
from redline.messages.handoff import (
    ChunkAck,
    ChunkReady,
    Prefill,
    PrefillDone,
    PrefillStarted,
    PullRequest,
    Queued,
    WorkerDown,
)
from redline.messages.job import Job, JobId
from redline.messages.news import Load
from redline.scheduler.planner import Planner
from redline.worker.kv_transfer.connections import KvConnections
from redline.worker.kv_transfer.incoming import IncomingTransfers
from redline.worker.kv_transfer.outgoing import ROOM_S, OutgoingTransfers
from redline.worker.kv_transfer.prompts import KvPaths
from redline.worker.service import Service
from redline.worker.transfer_paths import told_of

MOST_UNSENT = 10_000  # unsent messages to a worker that does not read them; more than are sent in a minute
SOON_S = 0.0005  # polling interval, in seconds, of transfers in progress


class KvTransferManager(Service):
    """KV transfer manager: both sides of one worker's KV transfers. Only the loop's thread may use it.

    `counts`: the number of prompts that were sent ("handed over"), received ("taken over"), and computed here as a
    fallback, by reason. The methods that it overrides: as in `Service`.
    """

    def __init__(
        self,
        planner: Planner,
        ways: KvPaths,
        *,
        clock: Callable[[], float] = clock.monotonic,
        outbox_of: Callable[[str], Outbox] = partial(SocketOutbox, most=MOST_UNSENT),  # noqa: B008
    ) -> None:
        """ways: best first. outbox_of: opens an outbox to another worker's inbox, by its address."""
        self.counts: Counter[str] = Counter()
        self._planner = planner
        self._ways = {way.name: way for way in ways}
        self._parcels = ways[0].parcels  # used only for properties that all ways share
        self._clock = clock
        self._connections = KvConnections(self._ways, outbox_of)
        self._outgoing = OutgoingTransfers(planner, self._ways, self._connections, self.counts, clock)
        self._incoming = IncomingTransfers(planner, self._ways, self._connections, self.counts, clock)
        self._starved_at: float | None = None  # since when jobs wait for pages that KV transfers hold

    @property
    def told(self) -> bytes:
        """The descriptors of its areas, to be sent to other workers; empty if it has none."""
        return told_of(tuple(self._ways.values()))

    @property
    def format(self) -> str:
        """Name of the chunks' format."""
        return self._parcels.format

    @property
    def changes(self) -> int:
        return self._outgoing.changes + self._incoming.changes

    @property
    def idle(self) -> bool:
        """Whether no transfer is in progress."""
        return not (self._outgoing.prompts or self._incoming.prompts or self._outgoing.lent)

    @property
    def leaves(self) -> bool:
        return self._outgoing.leaves

    @property
    def chunks(self) -> int:
        """Number of KV chunks that are leased to other workers or being received."""
        return self._outgoing.lent + self._incoming.receiving

    def load(self, load: Load) -> Load:
        return msgspec.structs.replace(load, handoffs=tuple(self.counts.items()), kv_chunks=self.chunks)

    def due_in(self) -> float | None:
        if self._incoming.offers or self._incoming.receiving:
            return SOON_S
        return None if self.idle else 0.05

    def hear(self, message: Wire) -> list[Delta] | None:
        """Processes a job that another worker prefills, or a message from or about another worker; `settled` acts on
        it."""
        match message:
            case Job() if message.pages_from is not None:
                return self._incoming.expect(message)
            case Prefill():
                return self._outgoing.prefill(message)
            case Queued() | PrefillStarted() | ChunkReady() | PrefillDone():
                self._incoming.hear(message)
            case PullRequest():
                self._outgoing.request(message)
            case ChunkAck(id=id, epoch=epoch):
                self._outgoing.taken(id, epoch)
            case WorkerDown(worker=worker, epoch=epoch):
                self._incoming.gone(worker, epoch)
                self._outgoing.gone(worker, epoch)
                self._connections.drop(worker, epoch)
            case _:
                return None
        return []

    def abort(self, id: JobId) -> None:
        """Aborts a job's KV transfer on both sides."""
        self._outgoing.abort(id)
        self._incoming.abort(id)

    def jobs_of(self, replica: str) -> list[JobId]:
        """The jobs of one API replica that are prefilled here for other workers."""
        return [id for id, out in self._outgoing.prompts.items() if out.job.replica == replica]

    def abort_all(self) -> None:
        for id in [*self._outgoing.prompts, *self._incoming.prompts]:
            self.abort(id)

    def depart(self, layers: int) -> None:
        self._outgoing.depart(layers)

    def settled(self, deltas: list[Delta]) -> list[Delta]:
        """Makes progress on all transfers: offers chunks as far as there is room, and receives chunks within the time
        budget. While jobs run, the time between two calls is taken as the time of a step."""
        deltas, now = self._outgoing.keep(deltas), self._clock()
        self._incoming.begin()
        self._connections.close_failed()
        self._outgoing.advance(now)
        self._give_room(now)
        return deltas + self._incoming.advance(now)

    def _give_room(self, now: float) -> None:
        """Gives up prompts if jobs wait for pages that only KV transfers hold."""
        if not self._planner.transfers.starved:
            self._starved_at = None
            return
        self._outgoing.make_room(now)
        if self._starved_at is None:
            self._starved_at = now
        elif now - self._starved_at > ROOM_S and self._incoming.give_room():
            self._starved_at = None

    def close(self) -> None:
        """Closes all connections and areas. A decode worker that still waits for a chunk computes the prompt itself."""
        self._connections.close()

    def check(self) -> None:
        """Raises AssertionError unless every byte of the areas is lent or free, and every lease has its chunk."""
        self._outgoing.check()
        for way in self._ways.values():
            way.arrivals.check()
