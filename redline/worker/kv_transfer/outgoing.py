"""The prompts that a prefill worker computes for other workers: their pages are offered as KV chunks, under leases.

A prompt belongs to this side from its `Prefill` message until its first token is sent (`PrefillDone`), which happens
once all its chunks are offered. Its pages stay lent in the planner until then; each offered chunk has its own lease,
and a chunk that is read after it fails its checksum.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from redline.messages.delta import Delta
from redline.messages.handoff import ChunkReady, Piece, Prefill, PrefillDone, PrefillStarted, PullRequest, Queued
from redline.messages.job import PAGE_TOKENS, Job, JobId
from redline.scheduler.active import Computed
from redline.scheduler.planner import Planner
from redline.transport.ledger import KvChunk
from redline.worker.kv_transfer.connections import KvConnections
from redline.worker.kv_transfer.prompts import KvPath, OutgoingPrompt
from redline.worker.kv_transfer.sender import KvSender

WANT_S = 30.0  # timeout, in seconds from the end of a prefill, for the decode worker to request the prompt's pages
ROOM_S = 2.0  # the same timeout while other jobs wait for pages
WORD_S = 1.0  # heartbeat interval of the prefill worker, in seconds, while it has no other message to send


class OutgoingTransfers:
    """prompts: those that are not handed over, by job. changes: incremented whenever the planner's state is changed.

    counts: the number of prompts that were handed over is added here.
    """

    def __init__(
        self,
        planner: Planner,
        ways: Mapping[str, KvPath],
        connections: KvConnections,
        counts: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self.prompts: dict[JobId, OutgoingPrompt] = {}
        self.changes = 0
        self._planner = planner
        self._ways = ways
        self._connections = connections
        self._counts = counts
        self._clock = clock
        self._leases: dict[tuple[int, int], JobId] = {}  # jobs of the leased chunks, by id and epoch of their tickets
        # `PullRequest`s (None: aborts) that arrived before the `Prefill` of their job, and when.
        self._early: dict[JobId, tuple[PullRequest | None, float]] = {}

    @property
    def lent(self) -> int:
        """Number of KV chunks that are leased to other workers."""
        return sum(len(departures.lender.lent) for departures in self._departures)

    @property
    def leaves(self) -> bool:
        """Whether the step that is settled next prefills a prompt for another worker: then the loop should call
        `depart` while the step runs."""
        return any(self._planner.transfers.computing(id) is not None for id in self.prompts)

    def prefill(self, asked: Prefill) -> list[Delta]:
        """Prefills a prompt for another worker. `keep` turns its deltas into messages to that worker."""
        job, to = asked.job, asked.to
        out = OutgoingPrompt(job, to, self._connections.to(to, reads=False).outbox)
        if job.id in self._early:  # the decode worker's message arrived before the gateway's
            want, _ = self._early.pop(job.id)
            if want is None or want.way not in self._ways:
                return []
            out.end, out.way = want.first, want.way
        self.prompts[job.id] = out
        return self.keep(self._planner.submit(_for_another(job), lends=True))

    def request(self, asked: PullRequest) -> None:
        """The decode worker has pages for a prompt: its chunks are wanted from now on."""
        if (out := self.prompts.get(asked.job)) is None:
            self._early[asked.job] = asked, self._clock()
        elif out.end is None and asked.way in self._ways:
            out.end, out.way = asked.first, asked.way

    def keep(self, deltas: list[Delta]) -> list[Delta]:
        """Removes the deltas of prompts that are prefilled for other workers from a step's deltas. -> the rest."""
        if not self.prompts:
            return deltas
        others: list[Delta] = []
        for delta in deltas:
            if (out := self.prompts.get(delta.job)) is None:
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
        """Drops a prompt, or the chunks of one that was handed over, or refuses one that is still to come."""
        if (out := self.prompts.pop(id, None)) is not None:
            self._drop(out)
        elif id in self._leases.values():
            self._take_back(id)
        elif self._departures:
            self._early[id] = None, self._clock()

    def depart(self, layers: int) -> None:
        """Offers the first `layers` layers of prompts while the step that computes them (and is settled next) is still
        running. The last layer is sent after the step has ended, together with the drafter's rows."""
        for out in self.prompts.values():
            if out.end is not None and (row := self._planner.transfers.computing(out.job.id)) is not None:
                self._fill_layers(out, out.end, row, min(layers, self._ways[out.way].parcels.layers - 1))
        self._offer_filled()

    def advance(self, now: float) -> None:
        """Offers chunks as far as there is room, and hands over the prompts that are complete."""
        for departures in self._departures:
            self._end_leases(departures.lender.expire(now))
        while self._early and now - next(iter(self._early.values()))[1] > WANT_S:
            del self._early[next(iter(self._early))]
        for out in list(self.prompts.values()):
            self._fill(out, now)
        self._offer_filled()
        for out in [one for one in self.prompts.values() if one.handed is not None]:
            self._hand_over(out)

    def make_room(self, now: float) -> None:
        """Drops the oldest prefilled prompt that no worker has requested yet, because other prompts wait for pages: the
        decode worker may have no room for the former before it receives the latter. Its cached pages stay cached."""
        for out in self.prompts.values():
            if out.handed is not None and out.end is None and now - out.ended_at > ROOM_S:
                del self.prompts[out.job.id]
                out.outbox.put(msgspec.structs.replace(out.handed, error="its pages were needed"))
                self._drop(out)
                return

    def gone(self, worker: str, epoch: int) -> None:
        """A worker went down: the prompts and the KV chunks for it are dropped."""
        for out in [one for one in self.prompts.values() if (one.to.worker, one.to.epoch) == (worker, epoch)]:
            del self.prompts[out.job.id]
            # The worker may be alive and only have missed heartbeats: it is informed in any case.
            handed = out.handed or PrefillDone(job=out.job.id)
            out.outbox.put(msgspec.structs.replace(handed, error=f"worker {worker} was reported down"))
            self._drop(out)
        for departures in self._departures:
            self._end_leases(departures.lender.give_up(f"{worker}.{epoch}"))

    def taken(self, id: int, epoch: int) -> None:
        """A chunk was read: its lease ends."""
        self._leases.pop((id, epoch), None)
        for departures in self._departures:  # epochs are unique among all chunks of a worker
            departures.lender.taken(id, epoch)

    def check(self) -> None:
        """Raises AssertionError unless every byte of the areas is lent or free, and every lease has its chunk."""
        lent = {(parcel.id, parcel.epoch) for one in self._departures for parcel in one.lender.lent}
        assert self._leases.keys() <= lent, "a lease of a KV chunk that is no longer lent"
        for departures in self._departures:
            departures.lender.check()

    @property
    def _departures(self) -> list[KvSender[OutgoingPrompt]]:
        return [way.departures for way in self._ways.values() if way.departures is not None]

    def _fill(self, out: OutgoingPrompt, now: float) -> None:
        """Begins to fill chunks with the newly computed positions, as far as there is room."""
        computed = self._planner.transfers.computed(out.job.id)
        if computed is None:  # the prefill has failed
            if out.handed is not None:
                out.outbox.put(out.handed)
            del self.prompts[out.job.id]
            return
        begins = not out.begun and bool(computed.pages)
        out.begun |= begins
        if begins or now - out.said_at >= WORD_S:
            out.said_at = now
            out.outbox.put(PrefillStarted(job=out.job.id) if out.begun else Queued(job=out.job.id))
        if out.end is None:
            if out.handed is not None and now - out.ended_at > WANT_S:
                del self.prompts[out.job.id]
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

    def _fill_layers(self, out: OutgoingPrompt, first: int, row: tuple[int, int], layers: int) -> None:
        """Begins to fill chunks with the first layers of the positions that the running step computes. first: the first
        position that has not been sent. row: the step's positions; earlier positions are computed in all layers."""
        computed, parcels = self._planner.transfers.computed(out.job.id), self._ways[out.way].parcels
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
        out: OutgoingPrompt,
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
                if ticket is None or self.prompts.get(out.job.id) is not out:
                    if ticket is not None:
                        departures.lender.taken(ticket.id, ticket.epoch)
                    continue
                out.outbox.put(ChunkReady(job=out.job.id, number=out.parcels, piece=piece, ticket=ticket))
                out.parcels += 1
                self._leases[ticket.id, ticket.epoch] = out.job.id

    def _hand_over(self, out: OutgoingPrompt) -> None:
        """Sends the first token, once all chunks are offered."""
        computed, left = self._planner.transfers.computed(out.job.id), out.pieces is not None or out.filling
        if computed is None or out.handed is None or out.end is None or out.end < len(out.job.tokens) or left:
            return
        exact, drafting = computed.exact and out.exact, computed.drafting and out.drafting
        handed = msgspec.structs.replace(out.handed, parcels=out.parcels, exact=exact, drafting=drafting)
        out.outbox.put(handed)
        self._counts["handed over"] += 1
        del self.prompts[out.job.id]
        self._planner.transfers.give_back(out.job.id)
        self.changes += 1

    def _drop(self, out: OutgoingPrompt) -> None:
        """Frees the chunks and the pages of a prompt that is no longer needed."""
        self.changes += 1
        self._take_back(out.job.id)
        self._planner.abort(out.job.id)
        if self._planner.transfers.computed(out.job.id) is not None:
            self._planner.transfers.give_back(out.job.id)

    def _take_back(self, job: JobId) -> None:
        for id, epoch in [lease for lease, of in self._leases.items() if of == job]:
            self.taken(id, epoch)

    def _end_leases(self, parcels: Sequence[KvChunk]) -> None:
        for parcel in parcels:
            self._leases.pop((parcel.id, parcel.epoch), None)


def _for_another(job: Job) -> Job:
    """The job as it is submitted on a prefill worker: only one token of its answer is computed."""
    sampling = msgspec.structs.replace(job.sampling, max_tokens=1)
    return msgspec.structs.replace(job, sampling=sampling, pages_from=None)
