"""The configuration of engines, workers and ranks. It does not import torch, so the supervisor process can use it."""

from typing import Any

import msgspec

from redline.messages.base import Record
from redline.messages.news import Role
from redline.policy.synthetic import rates_of
from redline.transport.choice import TransportName

SUFFIX = "suffix"  # the value that a user gives in place of a drafter's folder, for suffix matching


class _Drafts(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The options that all kinds of speculation share."""

    tokens: int = 3  # draft tokens that a step verifies per row, at most 15; 0 disables drafting
    adaptive: bool = True  # fewer draft tokens if they do not save time; false: always `tokens`
    trace: str | None = None  # a file for a trace of acceptance; it contains users' text
    # For benchmarks only, since the answers become meaningless: an acceptance length (mean tokens per verification) or
    # acceptance rates, by which the number of accepted draft tokens is drawn (`tune.synthetic`).
    synthetic_acceptance: float | tuple[float, ...] | None = None


class Learned(_Drafts, frozen=True, kw_only=True, tag="learned"):
    """Speculation by a drafter that was trained for the model."""

    drafter: str  # the drafter's folder
    suffix: bool = True  # suffix matches in the request's own text take precedence if they are long
    head_bits: int = 16  # bits per weight of its head; 8 halves the largest part of a pass at lower precision


class Suffix(_Drafts, frozen=True, kw_only=True, tag="suffix"):
    """Speculation without a drafter: proposes the tokens that followed an earlier occurrence of the last tokens."""


DraftConfig = Learned | Suffix
HEAD_BITS = 16, 8  # supported bits per weight of a drafter's head


def drafts_of(source: str) -> DraftConfig:
    """The speculation that a user's value means: a drafter's folder, or SUFFIX."""
    return Suffix() if source == SUFFIX else Learned(drafter=source)


class EngineConfig(Record, frozen=True):
    """How an engine runs a checkpoint. Defaults that are None are derived from the machine; `redline doctor` prints
    them."""

    # Bytes for KV pages. Default: a quarter of the free memory, at most 4 GiB; on GPUs that no other worker of the
    # deployment uses, nine tenths, at most 2,097,152 tokens.
    kv_memory: int | None = None
    max_model_len: int | None = None  # most tokens of one job, prompt and answer; default: what fits in memory
    max_running: int = 64  # most jobs in one step
    admit_together: int = 1  # admit once this many slots are free: fewer prefill steps, later first tokens
    # Most tokens computed in one step. Default: 512 on a CPU; 8192 on a GPU, or 2048 if memory is short.
    step_tokens: int | None = None
    step_ms: float | None = None  # limit, in ms, on the predicted time of a mixed prefill/decode step; default: none
    kv_dtype: str = "bf16"  # number format of KV pages: bf16, fp8 (e4m3, half the bytes) or float32
    device: str | None = None  # cpu or cuda; default: the GPU, if there is one
    ranks: int = 1  # tensor parallel size: processes that share the model, each with its own GPU; 1, 2, 4 or 8
    host_memory: int | None = None  # bytes of host memory for pages evicted from the prefix cache; default: none
    disk: str | None = None  # a folder for pages evicted from the host memory tier; default: none
    disk_size: int | None = None  # most bytes of all files in `disk`; required with it
    speculation: Learned | Suffix | None = None  # speculative decoding; default: off
    # For benchmarks only, since the answers are meaningless: `weights` contains only config.json and a tokenizer, all
    # weights are random, and only this many layers are in memory, which all other layers share
    # (`model.k2.random_weights`).
    random_weights: int | None = None

    @property
    def draft_tokens(self) -> int:
        """Most draft tokens of a row in a step; 0: no speculation."""
        return 0 if self.speculation is None else self.speculation.tokens

    def synthetic_rates(self) -> tuple[float, ...]:
        """The rates of synthetic acceptance; () if draft tokens are really verified. Raises ConfigError if the
        configured value is not valid."""
        drafts = self.speculation
        if drafts is None or drafts.synthetic_acceptance is None:
            return ()
        return rates_of(drafts.synthetic_acceptance, drafts.tokens, "engine.speculation.synthetic_acceptance")


def new_spelling(key: str, value: Any, table: str = "engine") -> str | None:
    """The current spelling of a key that this record had in an earlier version; None for any other key.

    value: the key's value. table: the record's table name in the deployment file.
    """
    match key:
        case "draft" if value == SUFFIX:
            return f'[{table}.speculation] type = "suffix"'
        case "draft":
            folder = msgspec.json.encode(value if isinstance(value, str) else "FOLDER").decode()  # quoted as in TOML
            return f'[{table}.speculation] type = "learned", drafter = {folder}'
        case "draft_tokens" | "draft_trace" | "draft_adaptive" | "suffix":
            return f"{table}.speculation.{key.removeprefix('draft_')}"
        case _:
            return None


# Share of the steps' time that receiving KV chunks may take while steps run. It is larger on a CPU, where a first token
# would otherwise wait for many of a small model's short steps.
HANDOFF_SHARE = {"cpu": 0.1, "cuda": 0.02}
PEER_SHARE = 0.1  # the share over `peer`: the host only launches copies, while the next step already runs
AREA_BYTES = 64 << 20  # host memory for KV chunks that are offered and not read yet: one prompt rarely needs more

STAGING_BYTES = 512 << 20  # default host memory with a disk tier: a buffer for pages that are waiting to be written


class EventsConfig(Record, frozen=True):
    """Where a worker publishes its KV cache events, in vLLM's format (`worker.page_events`)."""

    endpoint: str
    number: int  # index of the worker in the deployment
    replay: str | None = None  # endpoint for the replay of missed events; None disables replay
    topic: str = ""


class WorkerConfig(Record, frozen=True):
    """The configuration of a worker process, one line of JSON on its standard input."""

    weights: str  # the checkpoint's folder
    engine: EngineConfig
    inbox: str  # the address from which the worker reads
    outbox: str  # the address to which it writes
    name: str = "worker"
    epoch: int = 1  # number of times that it has been started, including this time
    role: Role = "both"  # initial role; `wire.news.TakeRole` changes it
    cores: tuple[int, ...] = ()  # CPU cores that it may run on; empty: all
    tells_cache: bool = False  # report changes of its prefix cache; needed if requests are routed among several workers
    events: EventsConfig | None = None  # None disables KV cache events
    transport: TransportName | None = None  # transport of KV transfers; None disables them
    parcels: str | None = None  # for transports within a host: the folder of the areas of the host's workers
    key: str | None = None  # shared key of the deployment's machines, for TCP connections; None: one machine only
    alone: bool = False  # no other worker of the deployment uses its GPUs: all their memory is for its pages


class RankConfig(Record, frozen=True):
    """The configuration of a tensor parallel rank above 0 (`worker.rank`), one line of JSON on its standard input."""

    weights: str
    engine: EngineConfig
    rank: int
    folder: str  # rendezvous folder of the ranks
    inbox: str  # the address from which it reads commands
    memory: int  # inherited file descriptor of the memory that the ranks share (`worker.rank_memory`)
    alone: bool = False  # the same as on rank 0; all ranks use the least number of pages that any has room for
    aside: int = 0  # bytes of its GPU to leave free for other uses, the same as on rank 0
