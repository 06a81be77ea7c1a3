"""Worker status messages (Ready, Beat, Load, Cached ...) and control messages to workers (Knock, TakeRole, Recall,
Stop)."""

from typing import Literal

from redline.messages.base import Record, WireMessage
from redline.messages.job import PageHash

Role = Literal["both", "prefill", "decode"]
"""Role of a worker. prefill: it computes prompts for decode workers; decode: it generates answers, and computes a
prompt itself if no prefill worker does; both: it does prefill and decode of its own jobs."""


class Ready(WireMessage, frozen=True):
    """The model is loaded, and the worker accepts jobs. The api package checks requests against these limits."""

    max_model_len: int  # prompt + generated tokens of one job
    pages: int  # KV pages of PAGE_TOKENS tokens each
    fingerprint: str  # of the model and the number format of its pages: part of the page hashes
    summary: str  # one line for the operator: model, device, memory
    # Where other workers can read its parcels, encoded by its transports; empty: no KV transfer from it.
    area: bytes = b""
    format: str = ""  # name of its parcels' format
    step_tokens: int = 512  # maximum number of positions of a step
    slots: int = 64  # maximum number of running jobs
    step_ms: float | None = None  # limit on the time of steps that mix prefill and decode; None: no limit
    read_bytes_per_s: float = 0.0  # memory bandwidth of its device, measured at the start; 0: not measured
    ops_per_s: float = 0.0  # matrix multiplication rate of its device, measured at the start
    experts_of: int = 0  # routed experts per layer; 0: not a mixture of experts
    experts_chosen: int = 0  # routed experts per token
    image_tokens: int = 0  # of the images of one prompt, at most; 0: the model reads no images


class TakeRole(WireMessage, frozen=True):
    """Switch the worker's role. It replies with `RoleTaken`, and finishes the jobs of its previous role."""

    role: Role


class RoleTaken(WireMessage, frozen=True):
    """Reply to `TakeRole`: the new role has reached the worker's loop."""

    role: Role


class Failed(WireMessage, frozen=True):
    """The worker could not start, or has ended. `reason` is one line for the operator."""

    reason: str


class Heartbeat(WireMessage, frozen=True):
    """Heartbeat of a worker: sent four times a second once the model is loaded, with or without running jobs."""

    turn_s: float = 0.0  # seconds since the loop started its current step; 0 while it waits for jobs
    knock: int = 0  # number of the newest ping that has reached the loop


class Ping(WireMessage, frozen=True):
    """Ping, sent to a worker periodically while it has jobs. Its next heartbeat contains the number; and the loop
    sends the ping back among its other messages, so that a loss of earlier messages is detected."""

    number: int
    replica: str = ""  # the API replica that sent the ping; empty: there is only one


class Missed(WireMessage, frozen=True):
    """Number of messages from one writer that were lost at this point, because its connection was cut and made
    again. Produced by the reader (`messages.channel`); a worker sends it on if messages to it were lost."""

    messages: int
    writer: bytes = b""  # name of the writer, as in `messages.channel`


# Histogram of positions per step: upper bounds.
STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class TimedStep(Record, frozen=True):
    """The work in one step and its duration, including the host's work before it while a job was waiting."""

    number: int  # of the worker's steps
    prompt: int  # prompt tokens
    pairs: float  # sum over the prompt tokens of the positions that each attends to
    expanded: int  # positions expanded from latents to keys and values for these tokens
    rows: int  # decode rows
    context: int  # context tokens of all decode rows together
    tokens: int  # answer tokens from the decode rows
    ms: float


StepKind = Literal["decode", "prompts"]
"""Kind of a step: only decode rows, or with prompt tokens."""


class StepTimes(Record, frozen=True):
    """Sums over all timed steps of one kind since the worker's start: their durations, and their floors."""

    kind: StepKind
    steps: int = 0
    seconds: float = 0.0  # sum of the durations
    floor_s: float = 0.0  # sum of the minimum times on this machine (`policy.floor`)


class TierLoad(Record, frozen=True):
    """One KV offload tier. The entry "compute" is not a tier: it shows how well prefill times are predicted."""

    name: str  # host, disk; compute
    pages: int = 0
    bytes: int = 0  # size of these pages
    most_bytes: int = 0
    counts: tuple[tuple[str, int], ...] = ()  # pages by outcome
    hit_tokens: int = 0  # prompt tokens read from the tier
    read_bytes: int = 0
    read_s: float = 0.0  # from the start of a read until its job could proceed; for "compute", duration of the steps
    predicted_s: float = 0.0  # predicted value of `read_s`
    error_s: float = 0.0  # sum of the absolute prediction errors
    saved_s: float = 0.0  # predicted compute time minus read time, summed where reading was faster
    lost_s: float = 0.0  # read time minus predicted compute time, summed where reading was slower


class Load(WireMessage, frozen=True):
    """Current gauges (jobs, pages), and counters since the worker's start."""

    running: int  # running jobs, each in a slot
    waiting: int  # queued jobs
    pages_used: int  # held by jobs
    pages_cached: int  # held only by the prefix cache
    pages_total: int
    steps: int  # scheduled steps
    replayed: int  # completed steps with decode rows replayed as a CUDA graph
    led: int  # the other completed steps, run eagerly
    preemptions: int  # jobs that were preempted: they lost slot and pages, and were requeued
    prompt_tokens: int  # of admitted jobs, each counted once
    prompt_tokens_cached: int  # of these, found in the prefix cache
    generation_tokens: int
    drafts: int = 0  # rows that verified draft tokens
    draft_tokens: int = 0  # verified draft tokens
    accepted_tokens: int = 0  # accepted draft tokens
    suffix_draft_tokens: int = 0  # verified draft tokens from suffix matches (n-gram lookup in the job's own text)
    suffix_accepted_tokens: int = 0  # of these, accepted
    grammar_draft_tokens: int = 0  # verified draft tokens forced by a grammar
    grammar_accepted_tokens: int = 0  # of these, accepted
    accepted_per_pos: tuple[int, ...] = ()  # how often the first, second ... draft token of a row was accepted
    # Histogram of completed steps over STEP_SIZES; the last element counts larger steps.
    step_sizes: tuple[int, ...] = ()
    step_positions: int = 0  # total positions of these steps
    bounded: int = 0  # scheduled steps whose prefill budget was cut to keep decode latency low
    handoffs: tuple[tuple[str, int], ...] = ()  # KV transfers of prompts, by outcome
    kv_chunks: int = 0  # of KV transfers: lent to other workers, or on their way to this one
    timed: tuple[TimedStep, ...] = ()  # some of the newest steps, with and without prompts
    tiers: tuple[TierLoad, ...] = ()  # KV offload tiers; empty: there are none
    images_encoded: int = 0
    images_reused: int = 0  # times that a job found an image encoded
    encode_s: float = 0.0  # time of the vision encoder, as far as it is known
    step_times: tuple[StepTimes, ...] = ()  # of the kinds that occurred; empty: the machine was not measured


class Cached(WireMessage, frozen=True):
    """Pages that were added to a worker's prefix cache or evicted from it since its previous `Cached` message.

    The first message of a worker's start has number 1. A gap in the numbers means missed messages; `Recall` requests
    the whole content.
    """

    number: int
    stored: tuple[PageHash, ...] = ()
    removed: tuple[PageHash, ...] = ()
    whole: bool = False  # `stored` is the complete content of the cache


class Recall(WireMessage, frozen=True):
    """Request for the complete content of a worker's prefix cache."""


class Stop(WireMessage, frozen=True):
    """Shut down: abort running jobs, release all pages, check that all are free, exit."""
