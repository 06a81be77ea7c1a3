"""What a worker tells about itself, and what it is told: Knock, TakeRole and Stop."""

from typing import Literal

from redline.wire.base import Message, Record
from redline.wire.job import PageHash

Role = Literal["both", "prefill", "decode"]
"""What a worker does. prefill: it computes prompts for others; decode: it answers, and computes a prompt itself where
nobody has done so; both: it does all alone."""


class Ready(Message, frozen=True):
    """The model is loaded; jobs may come. The api room checks requests against these limits."""

    max_model_len: int  # prompt + generated tokens of one job
    pages: int  # of PAGE_TOKENS tokens
    fingerprint: str  # of the model and its pages' number format: enters the page hashes
    summary: str  # one line for the operator: model, device, memory
    area: bytes = b""  # where others may read its parcels, in its transports' words; empty: it hands none over
    format: str = ""  # of its parcels
    step_tokens: int = 512  # positions of a step, at most
    slots: int = 64  # jobs at once, at most
    step_ms: float | None = None  # that its steps with prompts beside answers may take; None: any time
    read_bytes_per_s: float = 0.0  # of its device's memory, as measured before it was ready; 0: it was not
    ops_per_s: float = 0.0  # of its device's matrix products, as measured then
    experts_of: int = 0  # of a layer: routed experts, of which a token chooses so many; 0: there are none
    experts_chosen: int = 0


class TakeRole(Message, frozen=True):
    """What a worker is told to do from now on. It says `RoleTaken`; what it has begun in its role before, it ends."""

    role: Role


class RoleTaken(Message, frozen=True):
    """What a worker was told to do from now on has reached its loop."""

    role: Role


class Failed(Message, frozen=True):
    """The worker could not start, or has ended. `reason` is one line for the operator."""

    reason: str


class Beat(Message, frozen=True):
    """The worker's process runs: said four times a second once the model is loaded, whether jobs run or not."""

    turn_s: float = 0.0  # how long the loop has been in one step; 0 where it waits for jobs
    knock: int = 0  # the newest that has reached the loop


class Knock(Message, frozen=True):
    """What a worker is told now and then while it has jobs. Its next beat says that this has arrived; and the loop says
    it again among all else that it says, so that what was lost before it is missed."""

    number: int
    replica: str = ""  # of the API, that knocks; empty: there is but one


class Missed(Message, frozen=True):
    """So many messages of one writer were lost here, before the next: its connection was cut, and made again. A reader
    finds it among what it reads (`wire.channel`); a worker says it of what it was told."""

    messages: int
    writer: bytes = b""  # whose: as `wire.channel` names it


STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # positions of a step, upper bounds


class TimedStep(Record, frozen=True):
    """What a step computed, and how long it took, with what the host did before it while somebody waited."""

    number: int  # of the worker's steps
    prompt: int  # tokens of prompts
    pairs: float  # of these, times the positions that each attends to
    expanded: int  # positions whose keys and values were made anew for these tokens
    rows: int  # that decoded
    context: int  # tokens before them, of all rows together
    tokens: int  # of answers, that these rows gave
    ms: float


StepKind = Literal["decode", "prompts"]
"""Of a step: answers alone, or tokens of prompts too."""


class StepTimes(Record, frozen=True):
    """Steps of one kind that were timed since the worker's start: how long they took beside their floors."""

    kind: StepKind
    steps: int = 0
    seconds: float = 0.0  # that they took, together
    floor_s: float = 0.0  # that this machine takes at least for what they computed (`tune.floor`)


class TierLoad(Record, frozen=True):
    """One kind of memory below the prefix cache; "compute" is none: how well times of prompts are predicted."""

    name: str  # host, disk; compute
    pages: int = 0
    bytes: int = 0  # that they take
    most_bytes: int = 0
    counts: tuple[tuple[str, int], ...] = ()  # pages, by what has become of them
    hit_tokens: int = 0  # of prompts, that came from there
    read_bytes: int = 0
    read_s: float = 0.0  # from a reading's beginning until its job could go on; of "compute", what steps took
    predicted_s: float = 0.0  # of the same
    error_s: float = 0.0  # by how much the two differed, each time
    saved_s: float = 0.0  # what computing was predicted to take, less what reading took, where that was less
    lost_s: float = 0.0  # by how much reading took longer than computing was predicted to, where it did


class Load(Message, frozen=True):
    """Gauges of now (jobs, pages), and counters since the worker's start."""

    running: int  # jobs in a slot
    waiting: int  # jobs in the queue
    pages_used: int  # held by jobs
    pages_cached: int  # held by the prefix cache alone
    pages_total: int
    steps: int  # planned
    replayed: int  # steps that have ended, from recorded graphs
    led: int  # the others that have ended, led by the host
    preemptions: int  # jobs that lost their slot and pages and wait again
    prompt_tokens: int  # of admitted jobs, each counted once
    prompt_tokens_cached: int  # of these, found in the prefix cache
    generation_tokens: int
    drafts: int = 0  # rows that verified drafts
    draft_tokens: int = 0  # drafts that were verified
    accepted_tokens: int = 0  # drafts that were accepted
    suffix_draft_tokens: int = 0  # of those verified, what matches of the text's own past have made
    suffix_accepted_tokens: int = 0  # and of those accepted
    grammar_draft_tokens: int = 0  # of those verified, what a grammar has forced
    grammar_accepted_tokens: int = 0  # and of those accepted
    accepted_per_pos: tuple[int, ...] = ()  # how often the first, second ... draft of a row was accepted
    step_sizes: tuple[int, ...] = ()  # steps that have ended, by STEP_SIZES; the last counts what is larger
    step_positions: int = 0  # of all of them
    bounded: int = 0  # steps planned, whose prompts got less than there was room for, so that answers need not wait
    handoffs: tuple[tuple[str, int], ...] = ()  # prompts, by what has become of them
    kv_chunks: int = 0  # of KV transfers: lent to other workers, or on their way to this one
    timed: tuple[TimedStep, ...] = ()  # some of the newest steps, with prompts and without
    tiers: tuple[TierLoad, ...] = ()  # memory below the prefix cache; none: there is none
    step_times: tuple[StepTimes, ...] = ()  # of kinds that there were; none: the machine was not measured


class Cached(Message, frozen=True):
    """What has come into a worker's prefix cache, and what has left it, since it last said so.

    The first of a worker's start has number 1; a number that is left out was missed, and `Recall` asks for the whole.
    """

    number: int
    stored: tuple[PageHash, ...] = ()
    removed: tuple[PageHash, ...] = ()
    whole: bool = False  # `stored` is all that is there


class Recall(Message, frozen=True):
    """A worker is asked to tell of its whole prefix cache."""


class Stop(Message, frozen=True):
    """What a worker is told to end: abort what runs, give back every page, check that it is so, leave."""
