"""What a worker tells about itself."""

from redline.wire.base import Message


class Ready(Message, frozen=True):
    """The model is loaded; jobs may come. The limits are those that the api room checks against."""

    max_model_len: int  # prompt + generated tokens of one job
    pages: int  # of PAGE_TOKENS tokens
    fingerprint: str  # of the model and its pages' number format: enters the page hashes
    summary: str  # one line for the operator: model, device, memory


class Failed(Message, frozen=True):
    """The worker could not start, or has ended. `reason` is one line for the operator."""

    reason: str


class Beat(Message, frozen=True):
    """The worker's process runs: said every second once the model is loaded, whether jobs run or not."""

    turn_s: float = 0.0  # how long the loop has been in one step; 0 where it waits for jobs


class Load(Message, frozen=True):
    """Counters since the start, and gauges now."""

    running: int
    waiting: int
    pages_used: int  # owned by jobs
    pages_cached: int
    pages_total: int
    steps: int
    replayed: int  # steps that have ended, from recorded graphs
    led: int  # the others that have ended, led by the host
    preemptions: int
    prompt_tokens: int
    prompt_tokens_cached: int
    generation_tokens: int
    drafts: int = 0  # rows that verified drafts
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_pos: tuple[int, ...] = ()  # how often the first, second ... draft of a row was accepted


class Stop(Message, frozen=True):
    """End: abort what runs, give back every page, check, leave."""
