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
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from redline import clock
from redline.errors import RedlineError, WorkerLost
from redline.plan.planner import Computed, Planner
from redline.transport.base import Peer, TransferFailed
from redline.transport.ledger import Parcel
from redline.wire.channel import Outbox, SocketOutbox
from redline.wire.codec import Wire
from redline.wire.delta import Delta, Note
from redline.wire.handoff import Begun, Gone, Handed, Offer, Piece, Prefill, Queued, Taken, Want
from redline.wire.job import PAGE_TOKENS, Abort, Job, JobId, PagesFrom
from redline.wire.step import TokenLogprobs
from redline.worker.departures import Departures
from redline.worker.ways import Way, connect, told_of

WANT_S = 30.0  # behind the end of a prompt, for somebody to want it
ROOM_S = 2.0  # likewise, where others wait for its pages
SILENCE_S = 10.0  # without a word of the worker that computes: then the prompt is computed here
WORD_S = 1.0  # between two words of the worker that computes, while it has nothing else to say
LEAST = PAGE_TOKENS  # positions: fewer are computed where the answer is, which takes no longer than to wait for them
MOST_UNSENT = 10_000  # messages to another worker that does not read them: more than it says in a minute
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
    leaving: tuple[int, int] | None = None  # (to, layers): likewise so many layers of [end, to), which a step computes
    way: str = ""  # by which it is read, once it is wanted
    filling: int = 0  # parcels that are not offered yet
    parcels: int = 0  # all of them
    # Of all that was filled, as in `Computed`: a job may lose its pages after a part has left, and begin from others.
    exact: bool = True
    drafting: bool = True
    begun: bool = False  # the other side has been told that it is no longer queued
    said_at: float = 0.0  # when it was last told how far the prompt is
    handed: Handed | None = None  # once its first token is chosen
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    noted: dict[type, Note] = field(default_factory=dict)  # by its kind
    ended_at: float = 0.0


@dataclass(eq=False)
class _Incoming:
    """A prompt that another worker computes."""

    job: Job
    source: PagesFrom
    outbox: Outbox
    heard_at: float
    way: str  # by which it is read
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
    way: str = ""  # by which they are


Ways = Sequence[Way[_Outgoing, _Incoming]]


class Exchange:
    """Both sides of one worker's handoffs. The loop's thread uses it.

    `counts` has how many prompts were handed over, taken over, and computed here although another was to, by why.
    `changes` grows whenever the planner has been told something, so that it may have a step to plan.
    """

    def __init__(
        self,
        planner: Planner,
        ways: Ways,
        *,
        clock: Callable[[], float] = clock.monotonic,
        outbox_of: Callable[[str], Outbox] = partial(SocketOutbox, most=MOST_UNSENT),  # noqa: B008
    ) -> None:
        """ways: best first. outbox_of: to another worker's inbox, by its address."""
        self.counts: Counter[str] = Counter()
        self.changes = 0
        self._planner = planner
        self._ways = {way.name: way for way in ways}
        self._parcels = ways[0].parcels  # as far as all ways have the same
        self._clock = clock
        self._outbox_of = outbox_of
        self._out: dict[JobId, _Outgoing] = {}
        self._leases: dict[tuple[int, int], JobId] = {}  # whose parcel is lent, by the id and epoch of its ticket
        self._early: dict[JobId, tuple[Want | None, float]] = {}  # what was wanted before it was asked for, and when
        self._in: dict[JobId, _Incoming] = {}
        self._offers: deque[tuple[_Incoming, Offer]] = deque()
        self._listened_at = clock()  # when what others say had last been heard
        self._starved_at: float | None = None  # since when jobs wait for pages that handoffs have
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._failed: list[Peer] = []  # connections to be closed, once no read goes over them

    @property
    def told(self) -> bytes:
        """What others have to know of its areas; empty where it has none."""
        return told_of(tuple(self._ways.values()))

    @property
    def format(self) -> str:
        """Of the parcels."""
        return self._parcels.format

    @property
    def idle(self) -> bool:
        """Whether there is nothing under way."""
        return not (self._out or self._in or self._lent)

    @property
    def chunks(self) -> int:
        """KV chunks that are lent to other workers, or on their way to this one."""
        lent = sum(len(departures.lender.lent) for departures in self._departures)
        return lent + sum(len(way.arrivals.under_way) for way in self._ways.values())

    def due_in(self) -> float | None:
        """Seconds until `work` may have something to do without another message; None: never."""
        if self._offers or any(way.arrivals.under_way for way in self._ways.values()):
            return SOON_S
        return None if self.idle else 0.05

    # ------------------------------------------------------------------------------------- what the loop hands on

    def prefill(self, asked: Prefill) -> list[Delta]:
        """Computes a prompt for another worker. Its deltas are that worker's (`keep`)."""
        job, to = asked.job, asked.to
        out = _Outgoing(job, to, self._peer(to, reads=False).outbox)
        if job.id in self._early:  # the other worker was quicker than the gateway
            want, _ = self._early.pop(job.id)
            if want is None or want.way not in self._ways:
                return []
            out.end, out.way = want.first, want.way
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
            other = self._peer(source, reads=True)
        except RedlineError as error:
            _log.error("%s cannot be read: %s", source.worker, error)
            return self._submit_here(job, source, "no connection")
        deltas = self._planner.expect(job)
        if deltas:
            other.outbox.put(Abort(job=job.id))
        else:
            self._in[job.id] = _Incoming(job, source, other.outbox, self._clock(), other.way)
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
                        incoming.outbox.put(Want(job=id, first=incoming.first, way=incoming.way))
            case Want(job=id):
                if (out := self._out.get(id)) is None:
                    self._early[id] = message, self._clock()
                elif out.end is None and message.way in self._ways:
                    out.end, out.way = message.first, message.way
            case Offer(job=id):
                incoming = self._in.get(id)
                if incoming is not None:
                    incoming.heard_at, incoming.offered = self._clock(), True
                    self._offers.append((incoming, message))
            case Taken(id=id, epoch=epoch):
                self._taken(id, epoch)
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
            out.noted.update((type(note), note) for note in delta.noted)
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
                noted=tuple(out.noted.values()),
                error=delta.error if delta.finish in ("stop", "length") else delta.error or "it was given up there",
            )
        return others

    def abort(self, id: JobId) -> None:
        """Nobody wants a job any more, on this side or the other. The planner has to be told behind it."""
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
        """The jobs of one replica of the API whose prompts are computed here for other workers."""
        return [id for id, out in self._out.items() if out.job.replica == replica]

    def abort_all(self) -> None:
        """Nothing that is under way goes on, on this side or the other. The planner has to be told behind it."""
        for id in [*self._out, *self._in]:
            self.abort(id)

    @property
    def leaves(self) -> bool:
        """Whether the step that is settled next computes a prompt for another worker: then `depart` is worth calling
        while it runs."""
        return any(self._planner.computing(id) is not None for id in self._out)

    # ----------------------------------------------------------------------------------------------------- a turn

    def depart(self, layers: int) -> None:
        """Offers what is computed of prompts in these first layers, while the step runs that is settled next. The last
        layers go once it has ended: with them go the drafter's rows."""
        for out in self._out.values():
            if out.end is not None and (row := self._planner.computing(out.job.id)) is not None:
                self._fill_layers(out, out.end, row, min(layers, self._parcels.layers - 1))
        self._offer_filled()

    def work(self) -> list[Delta]:
        """Moves on what is under way: offers what there is room for, takes in what there is time for. The deltas to
        tell. The time between two calls is taken for that of a step, where one runs."""
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
        """Lets go of every connection and of the area. Whoever still waits for a parcel computes its prompt itself."""
        for way in self._ways.values():
            way.transport.close()
        for peer in self._peers.values():
            if isinstance(peer.outbox, SocketOutbox):
                peer.outbox.close()

    def check(self) -> None:
        """Raises AssertionError unless every byte of the areas is lent or free, and every lease has its parcel."""
        lent = {(parcel.id, parcel.epoch) for one in self._departures for parcel in one.lender.lent}
        assert self._leases.keys() <= lent, "a lease of a parcel that is not lent any more"
        for way in self._ways.values():
            way.arrivals.check()
            if way.departures is not None:
                way.departures.lender.check()

    # ------------------------------------------------------------------------------------ the side that computes

    @property
    def _departures(self) -> list[Departures[_Outgoing]]:
        return [way.departures for way in self._ways.values() if way.departures is not None]

    @property
    def _lent(self) -> bool:
        return any(departures.lender.lent for departures in self._departures)

    def _fill(self, out: _Outgoing, now: float) -> None:
        """Begins to fill parcels with what has been computed since, as far as there is room."""
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
        parcels, positions, prompt = self._ways[out.way].parcels, computed.positions, len(out.job.tokens)
        end = prompt if out.handed is not None else positions // PAGE_TOKENS * PAGE_TOKENS

        def more() -> Iterator[Piece] | None:
            """All layers of what is computed since, or those that have not left yet."""
            first, (to, left) = out.end, out.leaving or (end, 0)
            assert first is not None, "it is wanted"
            if end <= first or end < to:
                return None
            draft_end = to + (to == prompt and bool(prompt % PAGE_TOKENS))
            out.end, out.leaving = to, None
            return parcels.pieces(first, to, draft_end, (left, parcels.layers))

        self._fill_pieces(out, computed, more, lambda piece: piece.positions[1] <= positions)

    def _fill_layers(self, out: _Outgoing, first: int, row: tuple[int, int], layers: int) -> None:
        """Begins to fill parcels with the first layers of positions that a step computes now. first: where what has not
        left begins. row: the step's positions; what lies before them is computed in all layers."""
        computed, parcels = self._planner.computed(out.job.id), self._ways[out.way].parcels
        assert computed is not None, "a job that a step computes is there"
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
        """Begins to fill parcels as far as there is room. more: further pieces; None: there are none now. is_computed:
        of a piece that has waited for room the job may have lost the pages, and compute them again."""
        departures = self._ways[out.way].departures
        assert departures is not None, "whoever computes has an area"
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
        """Tells of parcels that have been filled."""
        for departures in self._departures:
            for out, piece, ticket in departures.filled():
                out.filling -= 1
                if ticket is None or self._out.get(out.job.id) is not out:
                    if ticket is not None:
                        departures.lender.taken(ticket.id, ticket.epoch)
                    continue
                out.outbox.put(Offer(job=out.job.id, number=out.parcels, piece=piece, ticket=ticket))
                out.parcels += 1
                self._leases[ticket.id, ticket.epoch] = out.job.id

    def _hand_over(self, out: _Outgoing) -> None:
        """The first token, once all parcels are offered."""
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
        for id, epoch in [lease for lease, of in self._leases.items() if of == job]:
            self._taken(id, epoch)

    def _taken(self, id: int, epoch: int) -> None:
        self._leases.pop((id, epoch), None)
        for departures in self._departures:  # no two parcels of a worker have the same epoch
            departures.lender.taken(id, epoch)

    def _end_leases(self, parcels: Sequence[Parcel]) -> None:
        for parcel in parcels:
            self._leases.pop((parcel.id, parcel.epoch), None)

    # ------------------------------------------------------------------------------------ the side that answers

    def _open(self, incoming: _Incoming) -> None:
        opened = self._planner.open(incoming.job.id)
        if opened is None:
            return
        incoming.first, incoming.pages = opened
        if len(incoming.job.tokens) - incoming.first <= LEAST:
            self._compute_here(incoming, "short")
            return
        incoming.outbox.put(Want(job=incoming.job.id, first=incoming.first, way=incoming.way))

    def _give_room(self) -> None:
        """Jobs wait for the pages of prompts that are still to come: the youngest of these is queued behind them."""
        opened = [one for one in self._in.values() if one.first is not None]
        if opened:
            self._compute_here(opened[-1], "room", "its pages were needed")
            self._starved_at = None

    def _receive(self) -> list[Delta]:
        """Takes in parcels that have come, begins to read others, and lets jobs go on of which all is there."""
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

    def _take(self, way: Way[_Outgoing, _Incoming]) -> None:
        for arrival in list(way.arrivals.under_way):
            if arrival in way.arrivals.under_way:  # and not given up, with its job, in the meantime
                incoming, offer = arrival.of, arrival.offer
                try:
                    if way.arrivals.take(arrival, incoming.pages):
                        self._count(incoming, offer)
                except TransferFailed as error:
                    self._lose(incoming, offer, arrival.peer, error)

    def _read_offered(self) -> None:
        while self._offers:
            incoming, offer = self._offers[0]
            if self._in.get(offer.job) is not incoming:  # wanted no more
                incoming.outbox.put(Taken(id=offer.ticket.id, epoch=offer.ticket.epoch))
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

    def _read(self, incoming: _Incoming, offer: Offer) -> bool:
        """Begins to read a parcel; False where it has to wait. Raises TransferFailed, or ConfigError."""
        piece, ticket = offer.piece, offer.ticket
        known = incoming.first is not None and piece.positions[0] >= incoming.first
        twice = offer.number in incoming.reads
        if not known or twice or not self._parcels.fits(piece, incoming.pages, ticket.size):
            raise TransferFailed(f"a parcel that nobody wants: {piece} of {ticket.size:,} bytes")
        other = self._peer(incoming.source, reads=True)
        if other.peer is None or other.way != incoming.way:
            raise TransferFailed(
                f"a parcel over `{incoming.way}`, which is no way to {incoming.source.worker} any more"
            )
        begun = self._ways[other.way].arrivals.read(incoming, offer, other.peer)
        if begun:
            incoming.reads.add(offer.number)
        return begun

    def _count(self, incoming: _Incoming, offer: Offer) -> None:
        """A parcel is in its place."""
        incoming.parcels += 1
        (layer, last), (at, to) = offer.piece.layers, offer.piece.positions
        incoming.rows += (last - layer) * (to - at)
        incoming.outbox.put(Taken(id=offer.ticket.id, epoch=offer.ticket.epoch))

    def _lose(self, incoming: _Incoming, offer: Offer, peer: Peer | None, error: RedlineError) -> None:
        """A parcel does not come: its job's prompt is computed here. A connection that has failed may have done so for
        ever: whoever reads next connects anew, and this one is closed once the reads of other jobs over it have ended.
        peer: over which it was read."""
        incoming.outbox.put(Taken(id=offer.ticket.id, epoch=offer.ticket.epoch))
        self._compute_here(incoming, "transfer", error)
        of = (incoming.source.worker, incoming.source.epoch)
        if peer is not None and (known := self._peers.get(of)) is not None and known.peer is peer:
            self._peers[of] = known._replace(peer=None)
            self._failed.append(peer)
            self._close_failed()

    def _close_failed(self) -> None:
        """Closes connections that have failed and that no read goes over any more: as long as one is open, memory of
        the other worker stays mapped."""
        if self._failed:
            used = [arrival.peer for way in self._ways.values() for arrival in way.arrivals.under_way]
            for peer in [one for one in self._failed if all(one is not other for other in used)]:
                self._failed.remove(peer)
                peer.close()

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
        for offer in self._ways[incoming.way].arrivals.cancel(incoming):
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
        """A connection to another worker. Raises TransferFailed where its area is not there, or ConfigError."""
        of = (other.worker, other.epoch)
        known = self._peers.get(of)
        if known is None:
            known = self._peers[of] = _Peer(None, self._outbox_of(other.inbox))
        if reads and known.peer is None:
            way, peer = connect(tuple(self._ways.values()), other.area, other.worker)
            known = self._peers[of] = known._replace(peer=peer, way=way.name)
        return known


def _for_another(job: Job) -> Job:
    """The job as it is computed for another worker: one token of its answer."""
    sampling = msgspec.structs.replace(job.sampling, max_tokens=1)
    return msgspec.structs.replace(job, sampling=sampling, pages_from=None)
