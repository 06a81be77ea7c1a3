"""What a worker is told. Free of torch, so that the process that starts workers can read it."""

from redline.wire.base import Record

SUFFIX = "suffix"  # in the place of a drafter's folder: drafts are what followed the text's last tokens before


class EngineConfig(Record, frozen=True):
    """How an engine runs a checkpoint. What is None is derived from the machine, and printed by `redline doctor`."""

    kv_memory: int | None = None  # bytes for the pages; absent: a quarter of the memory that is left, at most 4 GiB
    max_model_len: int | None = None  # tokens of one job, prompt and answer; absent: what fits
    max_running: int = 64  # jobs in one step
    step_tokens: int | None = None  # positions computed in one step; absent: 512, on a GPU 2048
    kv_dtype: str = "bf16"  # of the pages: bf16, fp8 (e4m3, half the bytes) or float32
    device: str | None = None  # cpu or cuda; absent: the GPU, if there is one
    draft: str | None = None  # a drafter's folder, or "suffix"; absent: no speculation
    draft_tokens: int | None = None  # drafts that a step verifies per row, at most; a deployment: 0 to 15; absent: 3
    draft_trace: str | None = None  # a file for what was accepted where; it holds users' text
    draft_adaptive: bool = True  # fewer drafts where they do not pay; false: always draft_tokens
    suffix: bool = True  # under a learned drafter, matches of the text's own past where they are long


class WorkerConfig(Record, frozen=True):
    """One line of JSON on the worker's standard input."""

    weights: str  # the checkpoint's folder
    engine: EngineConfig
    inbox: str  # the address that the worker reads
    outbox: str  # the address that it writes
