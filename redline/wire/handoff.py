"""A prompt that one worker computes and another goes on with: what they tell one another.

The gateway sends the job to both: as a `Job` whose `pages_from` names the first to the one that will answer, and within
a `Prefill` to the one that computes. These then talk directly:

    computes -> answers   Queued    the prompt waits behind others
    computes -> answers   Begun     the prompt is no longer queued: now its pages will be needed
    answers -> computes   Want      which positions it has not
    computes -> answers   Offer     a parcel lies ready, for a time
    answers -> computes   Taken     its bytes are verified and in their place
    computes -> answers   Handed    the prompt is computed, and this is its first token
    everybody             Gone      a worker has ended; nothing of it will come

What travels in a parcel is said by `run/handoff.py`, whose format has a name: workers of two formats hand nothing over.
"""

from redline.wire.base import Message, Record
from redline.wire.delta import Note
from redline.wire.job import Job, JobId, PagesFrom
from redline.wire.parcel import Ticket
from redline.wire.step import TokenLogprobs


class Prefill(Message, frozen=True):
    """Compute a prompt and choose the first token; the pages are for another worker."""

    job: Job  # as the other worker has it
    to: PagesFrom  # that worker


class Queued(Message, frozen=True):
    """The prompt of a job waits behind others where it is to be computed: said again and again."""

    job: JobId


class Begun(Message, frozen=True):
    """The prompt of a job is being computed: said at once, and again and again until it is handed over."""

    job: JobId


class Want(Message, frozen=True):
    """The pages of a job are wanted from position `first` on, which begins a page: those before are there already."""

    job: JobId
    first: int
    way: str  # by which they are read: the transport's name, among those that whoever computes has told of


class Piece(Record, frozen=True):
    """What of a job's pages a parcel holds."""

    layers: tuple[int, int]  # the target's, [first, end)
    positions: tuple[int, int]  # [first, end), whose first begins a page
    draft: tuple[int, int] = (
        0,
        0,
    )  # places of the drafter's rows, [first, end); with the last layers


class Offer(Message, frozen=True):
    """A parcel of a job, which may be read until its lease has run out; nobody waits for it longer."""

    job: JobId
    number: int  # among the job's parcels
    piece: Piece
    ticket: Ticket  # where the parcel lies, and how to tell that it is this one


class Taken(Message, frozen=True):
    """The parcel has been read and its checksum holds, or it is wanted no more: its space may be used again."""

    id: int
    epoch: int


class Handed(Message, frozen=True):
    """The prompt is computed, and all its parcels have been offered. `error`: it could not be."""

    job: JobId
    parcels: int = 0  # of the job in all
    tokens: tuple[int, ...] = ()  # the first of the answer
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    exact: bool = True  # its pages are those of a prefill, to the bit
    drafting: bool = False  # the drafter has read all of it
    cached_tokens: int = 0  # of the prompt, found in the prefix cache of the worker that computed
    queued_s: float | None = None  # there
    noted: tuple[Note, ...] = ()  # there, of each kind the newest
    error: str | None = None


class Gone(Message, frozen=True):
    """A start of a worker has ended, or nothing is heard of it: nothing is to be expected of it."""

    worker: str
    epoch: int
