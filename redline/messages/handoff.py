"""Messages of disaggregated serving: a prefill worker computes a prompt, a decode worker generates the answer.

The gateway sends the job to both workers: to the decode worker as a `Job` with `pages_from`, to the prefill worker
within a `Prefill`. The two workers then exchange these messages directly:

    prefill -> decode   Queued    the prompt waits in the prefill worker's queue
    prefill -> decode   Begun     prefill has started; the decode worker should allocate pages
    decode  -> prefill  Want      request for the KV cache from a position on
    prefill -> decode   Offer     a parcel (KV chunk) is ready to be read, until its lease expires
    decode  -> prefill  Taken     the parcel was read and its checksum verified
    prefill -> decode   Handed    prefill is complete; contains the first token
    gateway -> workers  Gone      a worker is down; nothing more will come from it

The content of a parcel is defined in `run/kv_chunks.py`. The format has a name; workers with different formats do no KV
transfer.
"""

from redline.messages.base import Record, WireMessage
from redline.messages.delta import Note
from redline.messages.job import Job, JobId, PagesFrom
from redline.messages.parcel import Ticket
from redline.messages.step import TokenLogprobs


class Prefill(WireMessage, frozen=True):
    """Compute a prompt and sample the first token; the KV pages are for another worker."""

    job: Job  # the same as sent to the decode worker
    to: PagesFrom  # the decode worker


class Queued(WireMessage, frozen=True):
    """The prompt of a job waits in the prefill worker's queue. Sent periodically."""

    job: JobId


class PrefillStarted(WireMessage, frozen=True):
    """Prefill of a job has started. Sent once at the start, then periodically until the prompt is handed over."""

    job: JobId


class PullRequest(WireMessage, frozen=True):
    """Request for the KV pages of a job from position `first` on, which is a page boundary; the decode worker has
    the pages before it."""

    job: JobId
    first: int
    way: str  # name of the transport to read with, one of those in the prefill worker's `area`


class Piece(Record, frozen=True):
    """The part of a job's KV pages that a parcel contains."""

    layers: tuple[int, int]  # of the target model, [first, end)
    positions: tuple[int, int]  # [first, end); `first` is a page boundary
    draft: tuple[int, int] = (0, 0)  # places of the drafter's rows, [first, end); only with the last layers


class ChunkReady(WireMessage, frozen=True):
    """A parcel of a job is ready. It may be read until its lease expires; the decode worker waits no longer than
    that."""

    job: JobId
    number: int  # index among the job's parcels
    piece: Piece
    ticket: Ticket  # location and checksum of the parcel


class ChunkAck(WireMessage, frozen=True):
    """The parcel was read and its checksum verified, or it is no longer wanted: its buffer may be reused."""

    id: int
    epoch: int


class PrefillDone(WireMessage, frozen=True):
    """Prefill is complete, and all parcels were offered. With `error`, the prompt could not be computed."""

    job: JobId
    parcels: int = 0  # total number of the job's parcels
    tokens: tuple[int, ...] = ()  # the first of the answer
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    exact: bool = True  # the pages are bit-equal to those of a prefill
    drafting: bool = False  # the drafter has read the whole prompt
    cached_tokens: int = 0  # of the prompt, found in the prefill worker's prefix cache
    queued_s: float | None = None  # time in the prefill worker's queue
    noted: tuple[Note, ...] = ()  # the prefill worker's notes, the newest of each kind
    error: str | None = None


class WorkerDown(WireMessage, frozen=True):
    """A worker is down: one start of it (`epoch`) has ended or sends no heartbeats. Stop waiting for its messages."""

    worker: str
    epoch: int
