"""KV transfers of one worker: the prompts that it prefills for other workers, and those that others prefill for it.

The prefill worker gathers a prompt's pages into KV chunks (parcels) while it computes them, in an area that other
workers may read, under leases. The decode worker reads the chunks, verifies the checksum of each, and copies it into
its own pages. No worker writes into another worker's memory, so a page has one owner, even if the other side goes down;
and a chunk that is read after its lease fails its checksum. On any failure (a worker that goes down, a link that
stalls, a corrupt byte) the decode worker computes the prompt itself: a KV transfer can be lost, an answer cannot.

All of this runs in the loop's thread between two steps. The prefill worker offers chunks as far as there is room in its
area; the decode worker receives chunks for at most a share of the steps' time (`kv_receiver.py`). A job that waits for
its pages occupies only those pages and delays no other job.
"""

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from redline import clock
from redline.errors import RedlineError, WorkerLost
from redline.messages.channel import Outbox, SocketOutbox
from redline.messages.codec import Wire
from redline.messages.delta import Delta, Note
from redline.messages.handoff import (
    ChunkAck,
    ChunkReady,
    Piece,
    Prefill,
    PrefillDone,
    PrefillStarted,
    PullRequest,
    Queued,
    WorkerDown,
)
from redline.messages.job import PAGE_TOKENS, Abort, Job, JobId, PagesFrom
from redline.messages.step import TokenLogprobs
from redline.scheduler.planner import Computed, Planner
from redline.transport.base import Peer, TransferFailed
from redline.transport.ledger import KvChunk
from redline.worker.kv_sender import KvSender
from redline.worker.transfer_paths import TransferPath, connect, told_of

WANT_S = 30.0  # timeout, in seconds from the end of a prefill, for the decode worker to request the prompt's pages
ROOM_S = 2.0  # the same timeout while other jobs wait for pages
SILENCE_S = 10.0  # heartbeat timeout of the prefill worker, in seconds: then the prompt is computed here
WORD_S = 1.0  # heartbeat interval of the prefill worker, in seconds, while it has no other message to send
LEAST = PAGE_TOKENS  # positions; up to this many the decode worker computes itself: a transfer is no faster
MOST_UNSENT = 10_000  # unsent messages to a worker that does not read them; more than are sent in a minute
SOON_S = 0.0005  # polling interval, in seconds, of transfers in progress

_log = logging.getLogger(__name__)


@dataclass
class _Outgoing:
    """A prompt that this worker prefills for another worker."""

    job: Job
    to: PagesFrom
    outbox: Outbox
    pieces: Iterator[Piece] | None = None  # the pieces that are computed and not offered yet
    piece: Piece | None = None  # the piece that waits for room in the area
    # Positions below `end` are in `pieces`, offered, or cached by the decode worker; None: not requested yet.
    end: int | None = None
    leaving: tuple[int, int] | None = None  # (to, layers): the same for the first `layers` layers of [end, to)
    way: str = ""  # the transport by which the decode worker reads it, once it is requested
    filling: int = 0  # number of chunks that are being filled
    parcels: int = 0  # number of chunks that have been offered
    # The conjunction over all filled chunks of the flags of `Computed`: a job may be preempted after some chunks have
    # been sent, and restart from other cached pages.
    exact: bool = True
    drafting: bool = True
    begun: bool = False  # whether `PrefillStarted` was sent: the prompt is no longer queued
    said_at: float = 0.0  # when the last `Queued` or `PrefillStarted` was sent
    handed: PrefillDone | None = None  # set once the first token is sampled
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    noted: dict[type, Note] = field(default_factory=dict)  # by its kind
    ended_at: float = 0.0


@dataclass(eq=False)
class _Incoming:
    """A prompt that another worker prefills for this one."""

    job: Job
    source: PagesFrom
    outbox: Outbox
    heard_at: float
    way: str  # the transport by which it is read
    begun: bool = False
    offered: bool = False
    first: int | None = None  # positions [0, first) were cached here; None: it has no pages yet
    pages: tuple[int, ...] = ()
    reads: set[int] = field(default_factory=set)  # numbers of the chunks that are being read or have been read
    parcels: int = 0  # number of chunks that have been copied into the pages
    rows: int = 0  # number of rows (layers x positions) in these chunks
    handed: PrefillDone | None = None


class _Peer(NamedTuple):
    peer: Peer | None  # None: not connected for reads
    outbox: Outbox
    way: str = ""  # the transport of `peer`


Ways = Sequence[TransferPath[_Outgoing, _Incoming]]


class KvTransferManager:
    """KV transfer manager: both sides of one worker's KV transfers. Only the loop's thread may use it.

    `counts`: the number of prompts that were sent ("handed over"), received ("taken over"), and computed here as a
    fallback, by reason. `changes` is incremented whenever the planner's state is changed, so that the planner may have
    a new step to schedule.
    """

    def __init__(
        self,
        planner: Planner,
        ways: Ways,
        *,
        clock: Callable[[], float] = clock.monotonic,
        outbox_of: Callable[[str], Outbox] = partial(SocketOutbox, most=MOST_UNSENT),  # noqa: B008
    ) -> None:
        """ways: best first. outbox_of: opens an outbox to another worker's inbox, by its address."""
        self.counts: Counter[str] = Counter()
        self.changes = 0
        self._planner = planner
        self._ways = {way.name: way for way in ways}
        self._parcels = ways[0].parcels  # used only for properties that all ways share
        self._clock = clock
        self._outbox_of = outbox_of
        self._out: dict[JobId, _Outgoing] = {}
        self._leases: dict[tuple[int, int], JobId] = {}  # jobs of the leased chunks, by id and epoch of their tickets
        # `PullRequest`s (None: aborts) that arrived before the `Prefill` of their job, and when.
        self._early: dict[JobId, tuple[PullRequest | None, float]] = {}
        self._in: dict[JobId, _Incoming] = {}
        self._offers: deque[tuple[_Incoming, ChunkReady]] = deque()
        self._listened_at = clock()  # when messages of other workers were last processed
        self._starved_at: float | None = None  # since when jobs wait for pages that KV transfers hold
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._failed: list[Peer] = []  # failed connections, to be closed once no read uses them

    @property
    def told(self) -> bytes:
        """The descriptors of its areas, to be sent to other workers; empty if it has none."""
        return told_of(tuple(self._ways.values()))

    @property
    def format(self) -> str:
        """Name of the chunks' format."""
        return self._parcels.format

    @property
    def idle(self) -> bool:
        """Whether no transfer is in progress."""
        return not (self._out or self._in or self._lent)

    @property
    def chunks(self) -> int:
        """Number of KV chunks that are leased to other workers or being received."""
        lent = sum(len(departures.lender.lent) for departures in self._departures)
        return lent + sum(len(way.arrivals.under_way) for way in self._ways.values())

    def due_in(self) -> float | None:
        """Seconds until `work` should be called again even if no message arrives; None: not before a message."""
        if self._offers or any(way.arrivals.under_way for way in self._ways.values()):
            return SOON_S
        return None if self.idle else 0.05

    # ------------------------------------------------------------------------------- messages and deltas of the loop

    def prefill(self, asked: Prefill) -> list[Delta]:
        """Prefills a prompt for another worker. `keep` turns its deltas into messages to that worker."""
        job, to = asked.job, asked.to
        out = _Outgoing(job, to, self._peer(to, reads=False).outbox)
        if job.id in self._early:  # the decode worker's message arrived before the gateway's
            want, _ = self._early.pop(job.id)
            if want is None or want.way not in self._ways:
                return []
            out.end, out.way = want.first, want.way
        self._out[job.id] = out
        return self.keep(self._planner.submit(_for_another(job), lends=True))

    def expect(self, job: Job) -> list[Delta]:
        """Accepts a job that another worker prefills. -> deltas to send."""
        source = job.pages_from
        assert source is not None
        if source.format != self.format:
            _log.error(
                "worker %s sends KV chunks in another format: %s; expected %s",
                source.worker,
                source.format,
                self.format,
            )
            return self._submit_here(job, source, "another format")
        try:
            other = self._peer(source, reads=True)
        except RedlineError as error:
            _log.error("cannot connect to the KV chunks of worker %s: %s", source.worker, error)
            return self._submit_here(job, source, "no connection")
        deltas = self._planner.expect(job)
        if deltas:
            other.outbox.put(Abort(job=job.id))
        else:
            self._in[job.id] = _Incoming(job, source, other.outbox, self._clock(), other.way)
        return deltas

    def _submit_here(self, job: Job, source: PagesFrom, why: str) -> list[Delta]:
        self.counts[why] += 1
        with contextlib.suppress(RedlineError):  # without the abort, the prefill worker drops the prompt by timeout
            self._peer(source, reads=False).outbox.put(Abort(job=job.id))
        return self._planner.submit(job)

    def hear(self, message: Wire) -> None:
        """Processes a message from or about another worker; `work` acts on it."""
        match message:
            case Queued(job=id):
                if (incoming := self._in.get(id)) is not None:
                    incoming.heard_at = self._clock()
            case PrefillStarted(job=id):
                if (incoming := self._in.get(id)) is not None:
                    incoming.heard_at, incoming.begun = self._clock(), True
                    if (
                        incoming.first is not None and not incoming.offered
                    ):  # the first `PullRequest` may have been lost
                        incoming.outbox.put(PullRequest(job=id, first=incoming.first, way=incoming.way))
            case PullRequest(job=id):
                if (out := self._out.get(id)) is None:
                    self._early[id] = message, self._clock()
                elif out.end is None and message.way in self._ways:
                    out.end, out.way = message.first, message.way
            case ChunkReady(job=id):
                incoming = self._in.get(id)
                if incoming is not None:
                    incoming.heard_at, incoming.offered = self._clock(), True
                    self._offers.append((incoming, message))
            case ChunkAck(id=id, epoch=epoch):
                self._taken(id, epoch)
            case PrefillDone(job=id):
                if (incoming := self._in.get(id)) is not None:
                    incoming.heard_at, incoming.handed = self._clock(), message
            case WorkerDown():
                self._gone(message)
            case _:
                raise AssertionError(f"unexpected message of another worker: {type(message).__name__}")

    def keep(self, deltas: list[Delta]) -> list[Delta]:
        """Removes the deltas of prompts that are prefilled for other workers from a step's deltas. -> the rest."""
        if not self._out:
            return deltas
        others: list[Delta] = []
        for delta in deltas:
            if (out := self._out.get(delta.job)) is None:
                others.append(delta)
                continue
            out.prompt_logprobs += delta.prompt_logprobs
            out.noted.update((type(note), note) for note in delta.noted)
            if delta.finish is None and not delta.tokens:
                continue
            out.ended_at = self._clock()
            out.handed = PrefillDone(
                job=delta.job,
                tokens=delta.tokens,
                logprobs=delta.logprobs,
                prompt_logprobs=tuple(out.prompt_logprobs),
                cached_tokens=delta.cached_tokens,
                queued_s=delta.queued_s,
                noted=tuple(out.noted.values()),
                error=delta.error
                if delta.finish in ("stop", "length")
                else delta.error or "the prefill worker aborted it",
            )
        return others

    def abort(self, id: JobId) -> None:
        """Aborts a job's KV transfer on both sides. The caller has to abort the job in the planner afterwards."""
        if (out := self._out.pop(id, None)) is not None:
            self._drop(out)
        elif id in self._leases.values():
            self._take_back(id)
        elif self._departures:
            self._early[id] = None, self._clock()
        if (incoming := self._in.pop(id, None)) is not None:
            self._fence(incoming)
            incoming.outbox.put(Abort(job=id))

    def computes_for(self, replica: str) -> list[JobId]:
        """The jobs of one API replica that are prefilled here for other workers."""
        return [id for id, out in self._out.items() if out.job.replica == replica]

    def abort_all(self) -> None:
        """Aborts all KV transfers on both sides. The caller has to abort the jobs in the planner afterwards."""
        for id in [*self._out, *self._in]:
            self.abort(id)

    @property
    def leaves(self) -> bool:
        """Whether the step that is settled next prefills a prompt for another worker: then the loop should call
        `depart` while the step runs."""
        return any(self._planner.computing(id) is not None for id in self._out)

    # ------------------------------------------------------------------------------------------ one loop iteration

    def depart(self, layers: int) -> None:
        """Offers the first `layers` layers of prompts while the step that computes them (and is settled next) is still
        running. The last layer is sent after the step has ended, together with the drafter's rows."""
        for out in self._out.values():
            if out.end is not None and (row := self._planner.computing(out.job.id)) is not None:
                self._fill_layers(out, out.end, row, min(layers, self._parcels.layers - 1))
        self._offer_filled()

    def work(self) -> list[Delta]:
        """Makes progress on all transfers: offers chunks as far as there is room, and receives chunks within the time
        budget. -> deltas to send. While jobs run, the time between two calls is taken as the time of a step."""
        now = self._clock()
        offered = [offer.ticket.size for _, offer in self._offers]
        for way in self._ways.values():
            most = max(offered + way.arrivals.sizes, default=0)
            way.arrivals.budget.begin(busy=not self._planner.idle, most=most)
        for departures in self._departures:
            self._end_leases(departures.lender.expire(now))
        self._close_failed()
        while self._early and now - next(iter(self._early.values()))[1] > WANT_S:
            del self._early[next(iter(self._early))]
        for out in list(self._out.values()):
            self._fill(out, now)
        self._offer_filled()
        for out in [one for one in self._out.values() if one.handed is not None]:
            self._hand_over(out)
        if not self._planner.starved:
            self._starved_at = None
        else:
            self._make_room(now)
            if self._starved_at is None:
                self._starved_at = now
            elif now - self._starved_at > ROOM_S:
                self._give_room()
        told: list[Delta] = []
        for incoming in list(self._in.values()):
            if incoming.first is None and (incoming.begun or incoming.handed is not None):
                self._open(incoming)
            if incoming.job.id in self._in and self._listened_at - incoming.heard_at > SILENCE_S:
                self._compute_here(incoming, "silence")
        self._listened_at = now
        told += self._receive()
        for way in self._ways.values():
            way.arrivals.budget.end()
        return told

    def close(self) -> None:
        """Closes all connections and areas. A decode worker that still waits for a chunk computes the prompt itself."""
        for way in self._ways.values():
            way.transport.close()
        for peer in self._peers.values():
            if isinstance(peer.outbox, SocketOutbox):
                peer.outbox.close()

    def check(self) -> None:
        """Raises AssertionError unless every byte of the areas is lent or free, and every lease has its chunk."""
        lent = {(parcel.id, parcel.epoch) for one in self._departures for parcel in one.lender.lent}
        assert self._leases.keys() <= lent, "a lease of a KV chunk that is no longer lent"
        for way in self._ways.values():
            way.arrivals.check()
            if way.departures is not None:
                way.departures.lender.check()

    # ------------------------------------------------------------------------------------------- prefill worker

    @property
    def _departures(self) -> list[KvSender[_Outgoing]]:
        return [way.departures for way in self._ways.values() if way.departures is not None]

    @property
    def _lent(self) -> bool:
        return any(departures.lender.lent for departures in self._departures)

    def _fill(self, out: _Outgoing, now: float) -> None:
        """Begins to fill chunks with the newly computed positions, as far as there is room."""
        computed = self._planner.computed(out.job.id)
        if computed is None:  # the prefill has failed
            if out.handed is not None:
                out.outbox.put(out.handed)
            del self._out[out.job.id]
            return
        begins = not out.begun and bool(computed.pages)
        out.begun |= begins
        if begins or now - out.said_at >= WORD_S:
            out.said_at = now
            out.outbox.put(PrefillStarted(job=out.job.id) if out.begun else Queued(job=out.job.id))
        if out.end is None:
            if out.handed is not None and now - out.ended_at > WANT_S:
                del self._out[out.job.id]
                out.outbox.put(
                    msgspec.structs.replace(out.handed, error=f"its pages were not requested within {WANT_S:g} s")
                )
                self._drop(out)
            return
        parcels, positions, prompt = self._ways[out.way].parcels, computed.positions, len(out.job.tokens)
        end = prompt if out.handed is not None else positions // PAGE_TOKENS * PAGE_TOKENS

        def more() -> Iterator[Piece] | None:
            """All layers of the newly computed positions, or the layers of them that have not been sent yet."""
            first, (to, left) = out.end, out.leaving or (end, 0)
            assert first is not None, "the prompt's pages have been requested"
            if end <= first or end < to:
                return None
            draft_end = to + (to == prompt and bool(prompt % PAGE_TOKENS))
            out.end, out.leaving = to, None
            return parcels.pieces(first, to, draft_end, (left, parcels.layers))

        self._fill_pieces(out, computed, more, lambda piece: piece.positions[1] <= positions)

    def _fill_layers(self, out: _Outgoing, first: int, row: tuple[int, int], layers: int) -> None:
        """Begins to fill chunks with the first layers of the positions that the running step computes. first: the first
        position that has not been sent. row: the step's positions; earlier positions are computed in all layers."""
        computed, parcels = self._planner.computed(out.job.id), self._ways[out.way].parcels
        assert computed is not None, "the planner has the job that a step computes"
        positions, (begin, end) = computed.positions, row
        to = end if end == len(out.job.tokens) else end // PAGE_TOKENS * PAGE_TOKENS

        def more() -> Iterator[Piece] | None:
            leaving, left = out.leaving or (to, 0)
            if positions < begin or leaving != to or to <= first:
                return None
            group = parcels.group(to - first)
            ready = left + (layers - left) // group * group
            if ready <= left:
                return None
            out.leaving = to, ready
            return parcels.pieces(first, to, to, (left, ready))

        def is_computed(piece: Piece) -> bool:
            (_, last), (_, stop) = piece.layers, piece.positions
            return stop <= positions or (last <= layers and stop <= to and positions >= begin)

        self._fill_pieces(out, computed, more, is_computed)

    def _fill_pieces(
        self,
        out: _Outgoing,
        computed: Computed,
        more: Callable[[], Iterator[Piece] | None],
        is_computed: Callable[[Piece], bool],
    ) -> None:
        """Begins to fill chunks as far as there is room. more: returns further pieces; None: there are none now.
        is_computed: whether a piece is computed; while it waited for room, the job may have been preempted, and may
        be computing the piece's pages again."""
        departures = self._ways[out.way].departures
        assert departures is not None, "a prefill worker has an area"
        while True:
            if out.piece is None and out.pieces is not None:
                out.piece = next(out.pieces, None)
            if out.piece is None:
                out.pieces = more()
                if out.pieces is None:
                    return
            elif is_computed(out.piece) and departures.fill(
                out, out.piece, computed.pages, f"{out.to.worker}.{out.to.epoch}"
            ):
                out.piece, out.filling = None, out.filling + 1
                out.exact, out.drafting = out.exact and computed.exact, out.drafting and computed.drafting
            else:
                return

    def _offer_filled(self) -> None:
        """Sends an `ChunkReady` for each chunk that has been filled."""
        for departures in self._departures:
            for out, piece, ticket in departures.filled():
                out.filling -= 1
                if ticket is None or self._out.get(out.job.id) is not out:
                    if ticket is not None:
                        departures.lender.taken(ticket.id, ticket.epoch)
                    continue
                out.outbox.put(ChunkReady(job=out.job.id, number=out.parcels, piece=piece, ticket=ticket))
                out.parcels += 1
                self._leases[ticket.id, ticket.epoch] = out.job.id

    def _hand_over(self, out: _Outgoing) -> None:
        """Sends the first token, once all chunks are offered."""
        computed, left = self._planner.computed(out.job.id), out.pieces is not None or out.filling
        if computed is None or out.handed is None or out.end is None or out.end < len(out.job.tokens) or left:
            return
        exact, drafting = computed.exact and out.exact, computed.drafting and out.drafting
        handed = msgspec.structs.replace(out.handed, parcels=out.parcels, exact=exact, drafting=drafting)
        out.outbox.put(handed)
        self.counts["handed over"] += 1
        del self._out[out.job.id]
        self._planner.give_back(out.job.id)
        self.changes += 1

    def _make_room(self, now: float) -> None:
        """Drops the oldest prefilled prompt that no worker has requested yet, because other prompts wait for pages: the
        decode worker may have no room for the former before it receives the latter. Its cached pages stay cached."""
        for out in self._out.values():
            if out.handed is not None and out.end is None and now - out.ended_at > ROOM_S:
                del self._out[out.job.id]
                out.outbox.put(msgspec.structs.replace(out.handed, error="its pages were needed"))
                self._drop(out)
                return

    def _drop(self, out: _Outgoing) -> None:
        """Frees the chunks and the pages of a prompt that is no longer needed."""
        self.changes += 1
        self._take_back(out.job.id)
        self._planner.abort(out.job.id)
        if self._planner.computed(out.job.id) is not None:
            self._planner.give_back(out.job.id)

    def _take_back(self, job: JobId) -> None:
        for id, epoch in [lease for lease, of in self._leases.items() if of == job]:
            self._taken(id, epoch)

    def _taken(self, id: int, epoch: int) -> None:
        self._leases.pop((id, epoch), None)
        for departures in self._departures:  # epochs are unique among all chunks of a worker
            departures.lender.taken(id, epoch)

    def _end_leases(self, parcels: Sequence[KvChunk]) -> None:
        for parcel in parcels:
            self._leases.pop((parcel.id, parcel.epoch), None)

    # -------------------------------------------------------------------------------------------- decode worker

    def _open(self, incoming: _Incoming) -> None:
        opened = self._planner.open(incoming.job.id)
        if opened is None:
            return
        incoming.first, incoming.pages = opened
        if len(incoming.job.tokens) - incoming.first <= LEAST:
            self._compute_here(incoming, "short")
            return
        incoming.outbox.put(PullRequest(job=incoming.job.id, first=incoming.first, way=incoming.way))

    def _give_room(self) -> None:
        """Frees the pages of the newest prompt that is still being transferred, because other jobs wait for pages: it
        is queued after those jobs and computed here."""
        opened = [one for one in self._in.values() if one.first is not None]
        if opened:
            self._compute_here(opened[-1], "room", "its pages were needed")
            self._starved_at = None

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
        for incoming in [one for one in self._in.values() if one.handed is not None]:
            told += self._land(incoming)
        return told

    def _take(self, way: TransferPath[_Outgoing, _Incoming]) -> None:
        for arrival in list(way.arrivals.under_way):
            if arrival in way.arrivals.under_way:  # an earlier iteration may have cancelled it, with its job
                incoming, offer = arrival.of, arrival.offer
                try:
                    if way.arrivals.take(arrival, incoming.pages):
                        self._count(incoming, offer)
                except TransferFailed as error:
                    self._lose(incoming, offer, arrival.peer, error)

    def _read_offered(self) -> None:
        while self._offers:
            incoming, offer = self._offers[0]
            if self._in.get(offer.job) is not incoming:  # no longer needed
                incoming.outbox.put(ChunkAck(id=offer.ticket.id, epoch=offer.ticket.epoch))
            else:
                try:
                    if not self._read(incoming, offer):
                        break
                except WorkerLost:
                    raise
                except RedlineError as error:
                    known = self._peers.get((incoming.source.worker, incoming.source.epoch))
                    self._lose(incoming, offer, None if known is None else known.peer, error)
            self._offers.popleft()

    def _read(self, incoming: _Incoming, offer: ChunkReady) -> bool:
        """Begins to read a chunk; False if it has to wait. Raises TransferFailed or ConfigError."""
        piece, ticket = offer.piece, offer.ticket
        known = incoming.first is not None and piece.positions[0] >= incoming.first
        twice = offer.number in incoming.reads
        if not known or twice or not self._parcels.fits(piece, incoming.pages, ticket.size):
            raise TransferFailed(
                f"unexpected KV chunk (not requested, duplicate, or wrong size): {piece} of {ticket.size:,} bytes"
            )
        other = self._peer(incoming.source, reads=True)
        if other.peer is None or other.way != incoming.way:
            raise TransferFailed(
                f"KV chunk over `{incoming.way}`, by which worker {incoming.source.worker} is no longer connected"
            )
        begun = self._ways[other.way].arrivals.read(incoming, offer, other.peer)
        if begun:
            incoming.reads.add(offer.number)
        return begun

    def _count(self, incoming: _Incoming, offer: ChunkReady) -> None:
        """Counts and acknowledges a chunk that has been copied into the pages."""
        incoming.parcels += 1
        (layer, last), (at, to) = offer.piece.layers, offer.piece.positions
        incoming.rows += (last - layer) * (to - at)
        incoming.outbox.put(ChunkAck(id=offer.ticket.id, epoch=offer.ticket.epoch))

    def _lose(self, incoming: _Incoming, offer: ChunkReady, peer: Peer | None, error: RedlineError) -> None:
        """Handles a chunk that could not be read: its job's prompt is computed here. The connection may have failed
        permanently, so the next read reconnects, and this connection is closed once the reads of other jobs over it
        have ended. peer: the connection over which the chunk was read."""
        incoming.outbox.put(ChunkAck(id=offer.ticket.id, epoch=offer.ticket.epoch))
        self._compute_here(incoming, "transfer", error)
        of = (incoming.source.worker, incoming.source.epoch)
        if peer is not None and (known := self._peers.get(of)) is not None and known.peer is peer:
            self._peers[of] = known._replace(peer=None)
            self._failed.append(peer)
            self._close_failed()

    def _close_failed(self) -> None:
        """Closes failed connections that no read uses any more: while a connection is open, the other worker's memory
        stays mapped."""
        if self._failed:
            used = [arrival.peer for way in self._ways.values() for arrival in way.arrivals.under_way]
            for peer in [one for one in self._failed if all(one is not other for other in used)]:
                self._failed.remove(peer)
                peer.close()

    def _land(self, incoming: _Incoming) -> list[Delta]:
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
        del self._in[incoming.job.id]
        self.counts["taken over"] += 1
        self.changes += 1
        return self._planner.land(handed)

    def _compute_here(self, incoming: _Incoming, why: str, error: object = "") -> None:
        """Falls back to computing the prompt here."""
        if why != "short":
            _log.warning(
                "job %s: KV transfer from worker %s failed, the prompt is computed here: %s: %s",
                incoming.job.id,
                incoming.source.worker,
                why,
                error,
            )
        self.counts[why] += 1
        self.changes += 1
        del self._in[incoming.job.id]
        self._fence(incoming)
        incoming.outbox.put(Abort(job=incoming.job.id))
        self._planner.compute_here(incoming.job.id)

    def _fence(self, incoming: _Incoming) -> None:
        """Cancels the job's reads: returns once none of its chunks can arrive any more."""
        for offer in self._ways[incoming.way].arrivals.cancel(incoming):
            incoming.outbox.put(ChunkAck(id=offer.ticket.id, epoch=offer.ticket.epoch))

    # ------------------------------------------------------------------------------------------------- both sides

    def _gone(self, gone: WorkerDown) -> None:
        """Handles a worker that went down: prompts that it was prefilling are computed here, and KV chunks for it are
        dropped."""
        of = (gone.worker, gone.epoch)
        for incoming in [one for one in self._in.values() if (one.source.worker, one.source.epoch) == of]:
            self._compute_here(incoming, "gone", f"worker {gone.worker} is down")
        for out in [one for one in self._out.values() if (one.to.worker, one.to.epoch) == of]:
            del self._out[out.job.id]
            # The worker may be alive and only have missed heartbeats: it is informed in any case.
            handed = out.handed or PrefillDone(job=out.job.id)
            out.outbox.put(msgspec.structs.replace(handed, error=f"worker {gone.worker} was reported down"))
            self._drop(out)
        for departures in self._departures:
            self._end_leases(departures.lender.give_up(f"{gone.worker}.{gone.epoch}"))
        self._offers = deque(one for one in self._offers if (one[0].source.worker, one[0].source.epoch) != of)
        if (peer := self._peers.pop(of, None)) is not None:
            if peer.peer is not None:
                peer.peer.close()
            if isinstance(peer.outbox, SocketOutbox):
                peer.outbox.close()
        self._close_failed()

    def _peer(self, other: PagesFrom, *, reads: bool) -> _Peer:
        """The connection to another worker, opened if needed. Raises TransferFailed if its area cannot be reached, or
        ConfigError."""
        of = (other.worker, other.epoch)
        known = self._peers.get(of)
        if known is None:
            known = self._peers[of] = _Peer(None, self._outbox_of(other.inbox))
        if reads and known.peer is None:
            way, peer = connect(tuple(self._ways.values()), other.area, other.worker)
            known = self._peers[of] = known._replace(peer=peer, way=way.name)
        return known


def _for_another(job: Job) -> Job:
    """The job as it is submitted on a prefill worker: only one token of its answer is computed."""
    sampling = msgspec.structs.replace(job.sampling, max_tokens=1)
    return msgspec.structs.replace(job, sampling=sampling, pages_from=None)
