"""The prompts of a decode worker that other workers prefill: their KV chunks are read, verified and copied into pages.

A prompt belongs to this side until all its chunks are copied and its first token has arrived: then its job continues in
the planner. On any failure the prompt is computed here instead, once none of its chunks can arrive any more
(`_fence`). A job that waits occupies only its own pages.
"""

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping

from redline import clock
from redline.errors import RedlineError, WorkerLost
from redline.messages.delta import Delta
from redline.messages.handoff import ChunkAck, ChunkReady, PrefillDone, PrefillStarted, PullRequest, Queued
from redline.messages.job import PAGE_TOKENS, Abort, Job, JobId, PagesFrom
from redline.scheduler.planner import Planner
from redline.transport.base import Peer, TransferFailed
from redline.worker.kv_transfer.connections import KvConnections
from redline.worker.kv_transfer.prompts import IncomingPrompt, KvPath

SILENCE_S = 10.0  # heartbeat timeout of the prefill worker, in seconds: then the prompt is computed here
LEAST = PAGE_TOKENS  # positions; up to this many the decode worker computes itself: a transfer is no faster

_log = logging.getLogger(__name__)


class IncomingTransfers:
    """prompts: those that have not continued, by job. offers: chunks whose read has not begun. changes: incremented
    whenever the planner's state is changed.

    counts: the number of prompts that were taken over is added here, and of those computed here, by reason.
    """

    def __init__(
        self,
        planner: Planner,
        ways: Mapping[str, KvPath],
        connections: KvConnections,
        counts: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self.prompts: dict[JobId, IncomingPrompt] = {}
        self.offers: deque[tuple[IncomingPrompt, ChunkReady]] = deque()
        self.changes = 0
        self._planner = planner
        self._ways = ways
        self._parcels = next(iter(ways.values())).parcels  # used only for properties that all ways share
        self._connections = connections
        self._counts = counts
        self._clock = clock
        self._listened_at = clock()  # when messages of other workers were last processed

    @property
    def receiving(self) -> int:
        """Number of KV chunks that are being received."""
        return sum(len(way.arrivals.under_way) for way in self._ways.values())

    def expect(self, job: Job) -> list[Delta]:
        """Accepts a job that another worker prefills. -> deltas to send."""
        source = job.pages_from
        assert source is not None
        if source.format != self._parcels.format:
            _log.error(
                "worker %s sends KV chunks in another format: %s; expected %s",
                source.worker,
                source.format,
                self._parcels.format,
            )
            return self._submit_here(job, source, "another format")
        try:
            other = self._connections.to(source, reads=True)
        except RedlineError as error:
            _log.error("cannot connect to the KV chunks of worker %s: %s", source.worker, error)
            return self._submit_here(job, source, "no connection")
        deltas = self._planner.transfers.expect(job)
        if deltas:
            other.outbox.put(Abort(job=job.id))
        else:
            self.prompts[job.id] = IncomingPrompt(job, source, other.outbox, self._clock(), other.way)
        return deltas

    def hear(self, message: Queued | PrefillStarted | ChunkReady | PrefillDone) -> None:
        """Processes a message of the prefill worker of a prompt; `advance` acts on it."""
        incoming = self.prompts.get(message.job)
        if incoming is None:
            return
        incoming.heard_at = self._clock()
        match message:
            case Queued():
                pass
            case PrefillStarted(job=id):
                incoming.begun = True
                if incoming.first is not None and not incoming.offered:  # the first `PullRequest` may have been lost
                    incoming.outbox.put(PullRequest(job=id, first=incoming.first, way=incoming.way))
            case ChunkReady():
                incoming.offered = True
                self.offers.append((incoming, message))
            case PrefillDone():
                incoming.handed = message

    def abort(self, id: JobId) -> None:
        """Cancels a job's reads, and aborts its prefill."""
        if (incoming := self.prompts.pop(id, None)) is not None:
            self._fence(incoming)
            incoming.outbox.put(Abort(job=id))

    def begin(self) -> None:
        """An iteration begins: the time since the last one was a step's, if jobs run."""
        offered = [offer.ticket.size for _, offer in self.offers]
        for way in self._ways.values():
            most = max(offered + way.arrivals.sizes, default=0)
            way.arrivals.budget.begin(busy=not self._planner.idle, most=most)

    def advance(self, now: float) -> list[Delta]:
        """Receives chunks within the time budget. -> the deltas of jobs that continue."""
        for incoming in list(self.prompts.values()):
            if incoming.first is None and (incoming.begun or incoming.handed is not None):
                self._open(incoming)
            if incoming.job.id in self.prompts and self._listened_at - incoming.heard_at > SILENCE_S:
                self._compute_here(incoming, "silence")
        self._listened_at = now
        told = self._receive()
        for way in self._ways.values():
            way.arrivals.budget.end()
        return told

    def give_room(self) -> bool:
        """Frees the pages of the newest prompt that is still being transferred, because other jobs wait for pages: it
        is queued after those jobs and computed here. Returns whether there was one."""
        opened = [one for one in self.prompts.values() if one.first is not None]
        if opened:
            self._compute_here(opened[-1], "room", "its pages were needed")
        return bool(opened)

    def gone(self, worker: str, epoch: int) -> None:
        """A worker went down: the prompts that it was prefilling are computed here."""
        of = (worker, epoch)
        for incoming in [one for one in self.prompts.values() if (one.source.worker, one.source.epoch) == of]:
            self._compute_here(incoming, "gone", f"worker {worker} is down")
        self.offers = deque(one for one in self.offers if (one[0].source.worker, one[0].source.epoch) != of)

    def _submit_here(self, job: Job, source: PagesFrom, why: str) -> list[Delta]:
        self._counts[why] += 1
        with contextlib.suppress(RedlineError):  # without the abort, the prefill worker drops the prompt by timeout
            self._connections.to(source, reads=False).outbox.put(Abort(job=job.id))
        return self._planner.submit(job)

    def _open(self, incoming: IncomingPrompt) -> None:
        opened = self._planner.transfers.open(incoming.job.id)
        if opened is None:
            return
        incoming.first, incoming.pages = opened
        if len(incoming.job.tokens) - incoming.first <= LEAST:
            self._compute_here(incoming, "short")
            return
        incoming.outbox.put(PullRequest(job=incoming.job.id, first=incoming.first, way=incoming.way))

    def _receive(self) -> list[Delta]:
        """Completes chunks that have arrived, begins to read others, and continues the jobs that are complete."""
        for way in self._ways.values():
            self._take(way)
        self._read_offered()
        for way in self._ways.values():
            until = clock.perf_counter() + way.arrivals.patience()
            while way.arrivals.under_way and clock.perf_counter() < until:
                way.arrivals.wait()
                self._take(way)
                self._read_offered()
        told: list[Delta] = []
        for incoming in [one for one in self.prompts.values() if one.handed is not None]:
            told += self._land(incoming)
        return told

    def _take(self, way: KvPath) -> None:
        for arrival in list(way.arrivals.under_way):
            if arrival in way.arrivals.under_way:  # an earlier iteration may have cancelled it, with its job
                incoming, offer = arrival.of, arrival.offer
                try:
                    if way.arrivals.take(arrival, incoming.pages):
                        self._count(incoming, offer)
                except TransferFailed as error:
                    self._lose(incoming, offer, arrival.peer, error)

    def _read_offered(self) -> None:
        while self.offers:
            incoming, offer = self.offers[0]
            if self.prompts.get(offer.job) is not incoming:  # no longer needed
                incoming.outbox.put(ChunkAck(id=offer.ticket.id, epoch=offer.ticket.epoch))
            else:
                try:
                    if not self._read(incoming, offer):
                        break
                except WorkerLost:
                    raise
                except RedlineError as error:
                    self._lose(incoming, offer, self._connections.peer_of(incoming.source), error)
            self.offers.popleft()

    def _read(self, incoming: IncomingPrompt, offer: ChunkReady) -> bool:
        """Begins to read a chunk; False if it has to wait. Raises TransferFailed or ConfigError."""
        piece, ticket = offer.piece, offer.ticket
        known = incoming.first is not None and piece.positions[0] >= incoming.first
        twice = offer.number in incoming.reads
        if not known or twice or not self._parcels.fits(piece, incoming.pages, ticket.size):
            raise TransferFailed(
                f"unexpected KV chunk (not requested, duplicate, or wrong size): {piece} of {ticket.size:,} bytes"
            )
        other = self._connections.to(incoming.source, reads=True)
        if other.peer is None or other.way != incoming.way:
            raise TransferFailed(
                f"KV chunk over `{incoming.way}`, by which worker {incoming.source.worker} is no longer connected"
            )
        begun = self._ways[other.way].arrivals.read(incoming, offer, other.peer)
        if begun:
            incoming.reads.add(offer.number)
        return begun

    def _count(self, incoming: IncomingPrompt, offer: ChunkReady) -> None:
        """Counts and acknowledges a chunk that has been copied into the pages."""
        incoming.parcels += 1
        (layer, last), (at, to) = offer.piece.layers, offer.piece.positions
        incoming.rows += (last - layer) * (to - at)
        incoming.outbox.put(ChunkAck(id=offer.ticket.id, epoch=offer.ticket.epoch))

    def _lose(self, incoming: IncomingPrompt, offer: ChunkReady, peer: Peer | None, error: RedlineError) -> None:
        """Handles a chunk that could not be read: its job's prompt is computed here. peer: the connection over which
        the chunk was read."""
        incoming.outbox.put(ChunkAck(id=offer.ticket.id, epoch=offer.ticket.epoch))
        self._compute_here(incoming, "transfer", error)
        self._connections.failed(incoming.source, peer)

    def _land(self, incoming: IncomingPrompt) -> list[Delta]:
        """Continues a job here if its prefill has ended and all its chunks have arrived."""
        handed = incoming.handed
        assert handed is not None
        if handed.error is not None:
            self._compute_here(incoming, "error", handed.error)
            return []
        if incoming.first is None or incoming.parcels < handed.parcels:
            return []
        missing = self._parcels.layers * (len(incoming.job.tokens) - incoming.first) - incoming.rows
        if missing:
            self._compute_here(incoming, "transfer", f"{missing} rows are missing from its {handed.parcels} KV chunks")
            return []
        del self.prompts[incoming.job.id]
        self._counts["taken over"] += 1
        self.changes += 1
        return self._planner.transfers.land(handed)

    def _compute_here(self, incoming: IncomingPrompt, why: str, error: object = "") -> None:
        """Falls back to computing the prompt here."""
        if why != "short":
            _log.warning(
                "job %s: KV transfer from worker %s failed, the prompt is computed here: %s: %s",
                incoming.job.id,
                incoming.source.worker,
                why,
                error,
            )
        self._counts[why] += 1
        self.changes += 1
        del self.prompts[incoming.job.id]
        self._fence(incoming)
        incoming.outbox.put(Abort(job=incoming.job.id))
        self._planner.transfers.compute_here(incoming.job.id)

    def _fence(self, incoming: IncomingPrompt) -> None:
        """Cancels the job's reads: returns once none of its chunks can arrive any more."""
        for offer in self._ways[incoming.way].arrivals.cancel(incoming):
            incoming.outbox.put(ChunkAck(id=offer.ticket.id, epoch=offer.ticket.epoch))
