"""Handoffs of one worker: prompts that it computes for others, and prompts that others compute for it.

Whoever computes gathers a prompt's pages into parcels as they are computed, in an area that others may read, under
leases; whoever answers reads them, verifies each by its checksum, and puts it into pages of its own. Nobody writes into
another's memory, so a page has one owner, whatever becomes of the other side; and what is read too late has another
checksum. Whatever goes wrong on the way (a worker that ends, a link that stalls, a wrong byte), the worker that answers
computes the prompt itself: a handoff can be lost, an answer cannot.

All of it runs in the loop's thread between two steps: whoever computes offers what there is room for, whoever answers
takes in what a share of the steps' time allows (`worker/arrivals.py`). A job that waits for its pages is in nobody's
way but for those pages.
"""

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch

from redline.errors import RedlineError
from redline.kernels.cpu import checksum
from redline.plan.planner import Planner
from redline.run.handoff import Parcels
from redline.transport.base import Area, Peer, TransferFailed, Transport
from redline.transport.ledger import Lender
from redline.wire.channel import Outbox, SocketOutbox
from redline.wire.codec import Wire
from redline.wire.delta import Delta
from redline.wire.handoff import Begun, Gone, Handed, Offer, Piece, Prefill, Queued, Taken, Want
from redline.wire.job import PAGE_TOKENS, Abort, Job, JobId, PagesFrom
from redline.wire.step import TokenLogprobs
from redline.worker.arrivals import Arrivals, Budget, tensor_of
from redline.worker.config import AREA_BYTES, HANDOFF_SHARE

LEASE_S = 10.0  # for a parcel to be read
WANT_S = 30.0  # behind the end of a prompt, for somebody to want it
ROOM_S = 2.0  # likewise, where others wait for its pages
SILENCE_S = 10.0  # without a word of the worker that computes: then the prompt is computed here
WORD_S = 1.0  # between two words of the worker that computes, while it has nothing else to say
LEAST = PAGE_TOKENS  # positions: fewer are computed where the answer is, which takes no longer than to wait for them
SOON_S = 0.0005  # between two looks at what is under way

_log = logging.getLogger(__name__)


@dataclass
class _Outgoing:
    """A prompt that is computed for another worker."""

    job: Job
    to: PagesFrom
    outbox: Outbox
    pieces: Iterator[Piece] | None = None  # of what is computed and not offered
    piece: Piece | None = None  # the one that waits for room
    end: int | None = None  # positions [.., end) are in `pieces`, offered, or there already; None: not wanted yet
    parcels: int = 0
    begun: bool = False  # the other side has been told that it is no longer queued
    said_at: float = 0.0  # when it was last told how far the prompt is
    handed: Handed | None = None  # once its first token is chosen
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended_at: float = 0.0


@dataclass(eq=False)
class _Incoming:
    """A prompt that another worker computes."""

    job: Job
    source: PagesFrom
    outbox: Outbox
    heard_at: float
    begun: bool = False
    offered: bool = False
    first: int | None = None  # positions [0, first) were cached here; None: it has no pages yet
    pages: tuple[int, ...] = ()
    reads: set[int] = field(default_factory=set)  # numbers of parcels that are being read, or were
    parcels: int = 0  # that are in their place
    rows: int = 0  # of all layers, that they have brought
    handed: Handed | None = None


class _Peer(NamedTuple):
    peer: Peer | None  # None: its parcels are not read here
    outbox: Outbox


class Exchange:
    """Both sides of one worker's handoffs. The loop's thread uses it.

    `counts` has how many prompts were handed over, taken over, and computed here although another was to, by why.
    `changes` grows whenever the planner has been told something, so that it may have a step to plan.
    """

    def __init__(
        self,
        planner: Planner,
        parcels: Parcels,
        transport: Transport,
        *,
        area_bytes: int = AREA_BYTES,
        share: float = HANDOFF_SHARE["cpu"],
        clock: Callable[[], float] = time.monotonic,
        connect: Callable[[str], Outbox] = SocketOutbox,
    ) -> None:
        """area_bytes: for parcels; 0: it computes for nobody. share: of the steps' time, that may go to parcels which
        come in, while steps run. connect: to another worker's inbox, by its address.
        """
        self.counts: Counter[str] = Counter()
        self.changes = 0
        self._planner = planner
        self._parcels = parcels
        self._transport = transport
        self._clock = clock
        self._connect = connect
        self._area: Area | None = transport.area(area_bytes) if area_bytes else None
        self._lender = Lender(area_bytes, clock)
        self._space = tensor_of(self._area.memory) if self._area is not None else torch.empty(0, dtype=torch.uint8)
        self._budget = Budget(share, clock)
        self._arrivals: Arrivals[_Incoming] = Arrivals(parcels, transport, self._budget, clock)
        self._out: dict[JobId, _Outgoing] = {}
        self._leases: dict[JobId, list[tuple[int, int]]] = {}  # of each job; forgotten once none is lent any more
        self._early: dict[JobId, tuple[int | None, float]] = {}  # what was wanted before it was asked for, and when
        self._in: dict[JobId, _Incoming] = {}
        self._offers: deque[tuple[_Incoming, Offer]] = deque()
        self._listened_at = clock()  # when what others say had last been heard
        self._starved_at: float | None = None  # since when jobs wait for pages that handoffs have
        self._peers: dict[tuple[str, int], _Peer] = {}

    @property
    def told(self) -> bytes:
        """What others have to know of the area; empty where it has none."""
        return b"" if self._area is None else self._area.told

    @property
    def format(self) -> str:
        """Of the parcels."""
        return self._parcels.format

    @property
    def idle(self) -> bool:
        """Whether there is nothing under way."""
        return not (self._out or self._in or self._lender.lent)

    def due_in(self) -> float | None:
        """Seconds until `work` may have something to do without another message; None: never."""
        if self._arrivals.under_way or self._offers:
            return SOON_S
        return None if self.idle else 0.05

    # ------------------------------------------------------------------------------------- what the loop hands on

    def prefill(self, asked: Prefill) -> list[Delta]:
        """Computes a prompt for another worker. Its deltas are that worker's (`keep`)."""
        job, to = asked.job, asked.to
        out = _Outgoing(job, to, self._peer(to, reads=False).outbox)
        if job.id in self._early:  # the other worker was quicker than the gateway
            first, _ = self._early.pop(job.id)
            if first is None:
                return []
            out.end = first
        self._out[job.id] = out
        return self.keep(self._planner.submit(_for_another(job), lends=True))

    def expect(self, job: Job) -> list[Delta]:
        """Takes in a job whose prompt another worker computes. The deltas to tell."""
        source = job.pages_from
        assert source is not None
        if source.format != self.format:
            _log.error(
                "%s hands over parcels of another format: %s; here %s", source.worker, source.format, self.format
            )
            return self._submit_here(job, source, "another format")
        try:
            outbox = self._peer(source, reads=True).outbox
        except RedlineError as error:
            _log.error("%s cannot be read: %s", source.worker, error)
            return self._submit_here(job, source, "no connection")
        deltas = self._planner.expect(job)
        if deltas:
            outbox.put(Abort(job=job.id))
        else:
            self._in[job.id] = _Incoming(job, source, outbox, self._clock())
        return deltas

    def _submit_here(self, job: Job, source: PagesFrom, why: str) -> list[Delta]:
        self.counts[why] += 1
        with contextlib.suppress(RedlineError):  # then it will find that nobody wants it
            self._peer(source, reads=False).outbox.put(Abort(job=job.id))
        return self._planner.submit(job)

    def hear(self, message: Wire) -> None:
        """Takes in what another worker, or of another worker, has been said; `work` acts on it."""
        match message:
            case Queued(job=id):
                if (incoming := self._in.get(id)) is not None:
                    incoming.heard_at = self._clock()
            case Begun(job=id):
                if (incoming := self._in.get(id)) is not None:
                    incoming.heard_at, incoming.begun = self._clock(), True
                    if incoming.first is not None and not incoming.offered:  # lost on the way, perhaps
                        incoming.outbox.put(Want(job=id, first=incoming.first))
            case Want(job=id, first=first):
                if (out := self._out.get(id)) is None:
                    self._early[id] = first, self._clock()
                elif out.end is None:
                    out.end = first
            case Offer(job=id):
                incoming = self._in.get(id)
                if incoming is not None:
                    incoming.heard_at, incoming.offered = self._clock(), True
                    self._offers.append((incoming, message))
            case Taken(id=id, epoch=epoch):
                self._lender.taken(id, epoch)
            case Handed(job=id):
                if (incoming := self._in.get(id)) is not None:
                    incoming.heard_at, incoming.handed = self._clock(), message
            case Gone():
                self._gone(message)
            case _:
                raise AssertionError(f"a worker is not told {type(message).__name__} by another")

    def keep(self, deltas: list[Delta]) -> list[Delta]:
        """Takes what has come of prompts that are computed for others out of a step's deltas; gives the rest."""
        if not self._out:
            return deltas
        others: list[Delta] = []
        for delta in deltas:
            if (out := self._out.get(delta.job)) is None:
                others.append(delta)
                continue
            out.prompt_logprobs += delta.prompt_logprobs
            if delta.finish is None and not delta.tokens:
                continue
            out.ended_at = self._clock()
            out.handed = Handed(
                job=delta.job,
                tokens=delta.tokens,
                logprobs=delta.logprobs,
                prompt_logprobs=tuple(out.prompt_logprobs),
                cached_tokens=delta.cached_tokens,
                queued_s=delta.queued_s,
                error=delta.error if delta.finish in ("stop", "length") else delta.error or "it was given up there",
            )
        return others

    def abort(self, id: JobId) -> None:
        """Nobody wants a job any more, on this side or the other. The planner has to be told behind it."""
        if (out := self._out.pop(id, None)) is not None:
            self._drop(out)
        elif id in self._leases:
            self._take_back(id)
        elif self._area is not None:
            self._early[id] = None, self._clock()
        if (incoming := self._in.pop(id, None)) is not None:
            self._fence(incoming)
            incoming.outbox.put(Abort(job=id))

    def computes_for(self, replica: str) -> list[JobId]:
        """The jobs of one replica of the API whose prompts are computed here for other workers."""
        return [id for id, out in self._out.items() if out.job.replica == replica]

    def abort_all(self) -> None:
        """Nothing that is under way goes on, on this side or the other. The planner has to be told behind it."""
        for id in [*self._out, *self._in]:
            self.abort(id)

    # ----------------------------------------------------------------------------------------------------- a turn

    def work(self) -> list[Delta]:
        """Moves on what is under way: offers what there is room for, takes in what there is time for. The deltas to
        tell. The time between two calls is taken for that of a step, where one runs."""
        now = self._clock()
        sizes = [offer.ticket.size for _, offer in self._offers] + self._arrivals.sizes
        self._budget.begin(busy=not self._planner.idle, most=max(sizes, default=0))
        if self._lender.lent:
            self._lender.expire(now)
        else:
            self._leases.clear()
        while self._early and now - next(iter(self._early.values()))[1] > WANT_S:
            del self._early[next(iter(self._early))]
        for out in list(self._out.values()):
            self._offer(out, now)
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
        self._budget.end()
        return told

    def close(self) -> None:
        """Lets go of every connection and of the area. Whoever still waits for a parcel computes its prompt itself."""
        self._transport.close()
        for peer in self._peers.values():
            if isinstance(peer.outbox, SocketOutbox):
                peer.outbox.close()

    def check(self) -> None:
        """Raises AssertionError unless every byte of the areas is lent or free."""
        self._lender.check()
        self._arrivals.check()

    # ------------------------------------------------------------------------------------ the side that computes

    def _offer(self, out: _Outgoing, now: float) -> None:
        """Offers what has been computed since, as far as there is room; at the end, the first token."""
        computed = self._planner.computed(out.job.id)
        if computed is None:  # it could not be computed
            if out.handed is not None:
                out.outbox.put(out.handed)
            del self._out[out.job.id]
            return
        begins = not out.begun and bool(computed.pages)
        out.begun |= begins
        if begins or now - out.said_at >= WORD_S:
            out.said_at = now
            out.outbox.put(Begun(job=out.job.id) if out.begun else Queued(job=out.job.id))
        if out.end is None:
            if out.handed is not None and now - out.ended_at > WANT_S:
                del self._out[out.job.id]
                out.outbox.put(msgspec.structs.replace(out.handed, error=f"nobody wanted it for {WANT_S:g} s"))
                self._drop(out)
            return
        whole = out.handed is not None
        prompt = len(out.job.tokens)
        while True:
            if out.piece is None:
                out.piece = next(out.pieces, None) if out.pieces is not None else None
            if out.piece is None:
                end = prompt if whole else computed.positions // PAGE_TOKENS * PAGE_TOKENS
                if end <= out.end:
                    break
                draft_end = end + (whole and bool(prompt % PAGE_TOKENS))
                out.pieces, out.end = self._parcels.pieces(out.end, end, draft_end), end
                continue
            if not self._lend(out, out.piece, computed.pages):
                return  # no room now
            out.piece = None
        if whole and out.handed is not None:
            handed = msgspec.structs.replace(
                out.handed, parcels=out.parcels, exact=computed.exact, drafting=computed.drafting
            )
            out.outbox.put(handed)
            self.counts["handed over"] += 1
            del self._out[out.job.id]
            self._planner.give_back(out.job.id)
            self.changes += 1

    def _lend(self, out: _Outgoing, piece: Piece, pages: Sequence[int]) -> bool:
        """Offers a piece as a parcel; False where there is no room for it now."""
        size = self._parcels.size(piece)
        parcel = self._lender.lend(size, f"{out.to.worker}.{out.to.epoch}", LEASE_S)
        if parcel is None:
            return False
        into_B = self._space[parcel.offset : parcel.offset + size]
        self._parcels.gather(piece, pages, into_B)
        of_bytes = checksum.of_memory(into_B.data_ptr(), size, parcel.seed)
        ticket = self._lender.offer(parcel, of_bytes)
        assert ticket is not None, "nothing runs out while it is filled"
        out.outbox.put(Offer(job=out.job.id, number=out.parcels, piece=piece, ticket=ticket))
        out.parcels += 1
        self._leases.setdefault(out.job.id, []).append((ticket.id, ticket.epoch))
        return True

    def _make_room(self, now: float) -> None:
        """Prompts wait for the pages of those that are computed and that nobody has wanted yet: whoever answers may
        have no room for these before it gets the others. The oldest is given up; what of it is cached stays so."""
        for out in self._out.values():
            if out.handed is not None and out.end is None and now - out.ended_at > ROOM_S:
                del self._out[out.job.id]
                out.outbox.put(msgspec.structs.replace(out.handed, error="its pages were needed"))
                self._drop(out)
                return

    def _drop(self, out: _Outgoing) -> None:
        """Nobody wants the prompt any more: its parcels' space and its pages come back."""
        self.changes += 1
        self._take_back(out.job.id)
        self._planner.abort(out.job.id)
        if self._planner.computed(out.job.id) is not None:
            self._planner.give_back(out.job.id)

    def _take_back(self, job: JobId) -> None:
        for id, epoch in self._leases.pop(job, ()):
            self._lender.taken(id, epoch)

    # ------------------------------------------------------------------------------------ the side that answers

    def _open(self, incoming: _Incoming) -> None:
        opened = self._planner.open(incoming.job.id)
        if opened is None:
            return
        incoming.first, incoming.pages = opened
        if len(incoming.job.tokens) - incoming.first <= LEAST:
            self._compute_here(incoming, "short")
            return
        incoming.outbox.put(Want(job=incoming.job.id, first=incoming.first))

    def _give_room(self) -> None:
        """Jobs wait for the pages of prompts that are still to come: the youngest of these is queued behind them."""
        opened = [one for one in self._in.values() if one.first is not None]
        if opened:
            self._compute_here(opened[-1], "room", "its pages were needed")
            self._starved_at = None

    def _receive(self) -> list[Delta]:
        """Takes in parcels that have come, begins to read others, and lets jobs go on of which all is there."""
        for arrival in list(self._arrivals.under_way):
            if arrival in self._arrivals.under_way:  # and not given up, with its job, in the meantime
                incoming, offer = arrival.of, arrival.offer
                try:
                    if self._arrivals.take(arrival, incoming.pages):
                        self._count(incoming, offer)
                except TransferFailed as error:
                    self._lose(incoming, offer, error)
        while self._offers:
            incoming, offer = self._offers[0]
            if self._in.get(offer.job) is not incoming:  # wanted no more
                incoming.outbox.put(Taken(id=offer.ticket.id, epoch=offer.ticket.epoch))
            else:
                try:
                    if not self._read(incoming, offer):
                        break
                except RedlineError as error:
                    self._lose(incoming, offer, error)
            self._offers.popleft()
        told: list[Delta] = []
        for incoming in [one for one in self._in.values() if one.handed is not None]:
            told += self._land(incoming)
        return told

    def _read(self, incoming: _Incoming, offer: Offer) -> bool:
        """Begins to read a parcel; False where it has to wait. Raises TransferFailed, or ConfigError."""
        piece, ticket = offer.piece, offer.ticket
        known = incoming.first is not None and piece.positions[0] >= incoming.first
        twice = offer.number in incoming.reads
        if not known or twice or not self._parcels.fits(piece, incoming.pages, ticket.size):
            raise TransferFailed(f"a parcel that nobody wants: {piece} of {ticket.size:,} bytes")
        peer = self._peer(incoming.source, reads=True).peer
        assert peer is not None
        begun = self._arrivals.read(incoming, offer, peer)
        if begun:
            incoming.reads.add(offer.number)
        return begun

    def _count(self, incoming: _Incoming, offer: Offer) -> None:
        """A parcel is in its place."""
        incoming.parcels += 1
        (layer, last), (at, to) = offer.piece.layers, offer.piece.positions
        incoming.rows += (last - layer) * (to - at)
        incoming.outbox.put(Taken(id=offer.ticket.id, epoch=offer.ticket.epoch))

    def _lose(self, incoming: _Incoming, offer: Offer, error: RedlineError) -> None:
        """A parcel does not come: its job's prompt is computed here. A connection that has failed may have done so for
        ever: whoever reads next connects anew."""
        incoming.outbox.put(Taken(id=offer.ticket.id, epoch=offer.ticket.epoch))
        self._compute_here(incoming, "transfer", error)
        of = (incoming.source.worker, incoming.source.epoch)
        if (known := self._peers.get(of)) is not None:
            self._peers[of] = known._replace(peer=None)

    def _land(self, incoming: _Incoming) -> list[Delta]:
        """A job of which all is there goes on here."""
        handed = incoming.handed
        assert handed is not None
        if handed.error is not None:
            self._compute_here(incoming, "error", handed.error)
            return []
        if incoming.first is None or incoming.parcels < handed.parcels:
            return []
        missing = self._parcels.layers * (len(incoming.job.tokens) - incoming.first) - incoming.rows
        if missing:
            self._compute_here(incoming, "transfer", f"{missing} rows were not in its {handed.parcels} parcels")
            return []
        del self._in[incoming.job.id]
        self.counts["taken over"] += 1
        self.changes += 1
        return self._planner.land(handed)

    def _compute_here(self, incoming: _Incoming, why: str, error: object = "") -> None:
        """The prompt is computed here after all."""
        if why != "short":
            _log.warning("job %s of %s: %s: %s", incoming.job.id, incoming.source.worker, why, error)
        self.counts[why] += 1
        self.changes += 1
        del self._in[incoming.job.id]
        self._fence(incoming)
        incoming.outbox.put(Abort(job=incoming.job.id))
        self._planner.compute_here(incoming.job.id)

    def _fence(self, incoming: _Incoming) -> None:
        """Returns once nothing of this job's can arrive any more."""
        for offer in self._arrivals.cancel(incoming):
            incoming.outbox.put(Taken(id=offer.ticket.id, epoch=offer.ticket.epoch))

    # ------------------------------------------------------------------------------------------------- both sides

    def _gone(self, gone: Gone) -> None:
        """A worker has ended: what it computed is computed here, and what was for it is nobody's."""
        of = (gone.worker, gone.epoch)
        for incoming in [one for one in self._in.values() if (one.source.worker, one.source.epoch) == of]:
            self._compute_here(incoming, "gone", f"{gone.worker} has ended")
        for out in [one for one in self._out.values() if (one.to.worker, one.to.epoch) == of]:
            del self._out[out.job.id]
            # It may only have been silent: then it has to know.
            handed = out.handed or Handed(job=out.job.id)
            out.outbox.put(msgspec.structs.replace(handed, error=f"nothing was heard of {gone.worker}"))
            self._drop(out)
        self._lender.give_up(f"{gone.worker}.{gone.epoch}")
        self._offers = deque(one for one in self._offers if (one[0].source.worker, one[0].source.epoch) != of)
        if (peer := self._peers.pop(of, None)) is not None:
            if peer.peer is not None:
                peer.peer.close()
            if isinstance(peer.outbox, SocketOutbox):
                peer.outbox.close()

    def _peer(self, other: PagesFrom, *, reads: bool) -> _Peer:
        """A connection to another worker. Raises TransferFailed where its area is not there, or ConfigError."""
        of = (other.worker, other.epoch)
        known = self._peers.get(of)
        if known is None:
            known = self._peers[of] = _Peer(None, self._connect(other.inbox))
        if reads and known.peer is None:
            known = self._peers[of] = known._replace(peer=self._transport.connect(other.area))
        return known


def _for_another(job: Job) -> Job:
    """The job as it is computed for another worker: one token of its answer."""
    sampling = msgspec.structs.replace(job.sampling, max_tokens=1)
    return msgspec.structs.replace(job, sampling=sampling, pages_from=None)
