"""The state of a prompt that is transferred between two workers, on either side."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from redline.messages.channel import Outbox
from redline.messages.delta import Note
from redline.messages.handoff import Piece, PrefillDone
from redline.messages.job import Job, PagesFrom
from redline.messages.step import TokenLogprobs
from redline.worker.transfer_paths import TransferPath


@dataclass
class OutgoingPrompt:
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
class IncomingPrompt:
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


KvPath = TransferPath[OutgoingPrompt, IncomingPrompt]
KvPaths = Sequence[KvPath]
