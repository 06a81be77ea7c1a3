"""The configuration of engines, workers and ranks. It does not import torch, so the supervisor process can use it."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from redline.messages.base import Record, setting
from redline.messages.news import Role
from redline.policy.synthetic import rates_of
from redline.scheduler.config import MOST_STEP_TOKENS
from redline.transport.choice import TransportName

SUFFIX = "suffix"  # the value that a user gives in place of a drafter's folder, for suffix matching


DRAFTS = 3  # default of draft tokens
MOST_DRAFTS = 15  # draft tokens of one row in a step; more never pay
SYNTHETIC = (
    "For benchmarks: drafting and verification run in full, but acceptance is drawn at random. 0.83,0.6,0.45: the "
    "share of rounds in which the first 1, 2, 3 drafts are all accepted; 2.88: the mean tokens per round. Answers are "
    "not the model's, so the server listens on localhost only."
)


class _Drafts(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The options that all kinds of speculation share."""

    tokens: Annotated[
        Annotated[int, Meta(ge=0, le=MOST_DRAFTS)] | None,
        setting(
            "Draft tokens per step and request, 0 to 15 at most; fewer if they do not pay.",
            absent=f"{DRAFTS}, or all of a block drafter's block",
            example=DRAFTS,
        ),
    ] = None
    adaptive: Annotated[bool, setting("draft fewer tokens if they do not save time; false: always `tokens`")] = True
    trace: Annotated[
        str | None,
        setting(
            "Write a trace of accepted draft tokens, for `redline draft mine`. Contains users' text.",
            absent="nothing is written",
            example="accepted.jsonl",
        ),
    ] = None
    synthetic_acceptance: Annotated[
        float | tuple[float, ...] | None,
        setting(SYNTHETIC, absent="draft tokens are verified", example=(0.83, 0.6, 0.45)),
    ] = None


class Learned(_Drafts, frozen=True, kw_only=True, tag="learned"):
    """Speculation by a drafter that was trained for the model."""

    drafter: Annotated[
        str,
        setting(
            "learned only: folder of a drafter of this model: EAGLE-3, DFlash or DSpark",
            example="weights/kimi-k2.6-eagle3",
        ),
    ]
    suffix: Annotated[bool, setting("learned only: long matches of the text's own past take precedence")] = True
    head_bits: Annotated[
        int,
        setting(
            "Precision of the drafter's head: 8 halves the bytes of the largest part of a pass on a GPU; drafts are "
            "rounded a little."
        ),
    ] = 16


class Suffix(_Drafts, frozen=True, kw_only=True, tag="suffix"):
    """Speculation without a drafter: proposes the tokens that followed an earlier occurrence of the last tokens."""


DraftConfig = Learned | Suffix
HEAD_BITS = 16, 8  # supported bits per weight of a drafter's head


def drafts_of(source: str) -> DraftConfig:
    """The speculation that a user's value means: a drafter's folder, or SUFFIX."""
    return Suffix() if source == SUFFIX else Learned(drafter=source)


Size = Annotated[int, Meta(ge=1, le=2**50)]  # bytes


class EngineConfig(Record, frozen=True):
    """How an engine runs a checkpoint. Defaults that are None are derived from the machine; `redline doctor` prints
    them."""

    kv_memory: Annotated[
        Size | None,
        setting(
            "KV cache memory per GPU: 500MB, 2GB.",
            absent="a quarter of the free memory, at most 4 GiB; nine tenths of a GPU that is not shared with other "
            "workers, at most 2,097,152 tokens",
            example="8GB",
        ),
    ] = None
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1, le=2**31)] | None,
        setting("Maximum tokens of a request, prompt and answer.", absent="whatever fits", example=65536),
    ] = None
    max_running: Annotated[int, Meta(ge=1, le=4096), setting("Maximum batch size.")] = 64
    admit_together: Annotated[
        int,
        Meta(ge=1, le=4096),
        setting("Admit waiting requests once N can start: more throughput, later first token."),
    ] = 1
    step_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_STEP_TOKENS)] | None,
        setting("Maximum tokens per step.", absent="512; on a GPU 8192, or 2048 if memory is short", example=4096),
    ] = None
    step_ms: Annotated[
        Annotated[float, Meta(ge=0.1, le=60_000)] | None,
        setting("milliseconds that a step mixing prefill and decode may take", absent="no time limit", example=80),
    ] = None
    kv_dtype: Annotated[
        str,
        setting("Dtype of the KV cache: bf16, fp8 or float32. fp8 (e4m3): twice the tokens, 4 significant bits."),
    ] = "bf16"
    device: Annotated[str | None, setting("cpu or cuda.", absent="the GPU, if there is one", example="cpu")] = None
    kernels: Annotated[
        Literal["auto", "portable"],
        setting("for tests: portable makes a Hopper use the kernels of chips without wgmma"),
    ] = "auto"
    ranks: Annotated[
        int,
        Meta(ge=1, le=8),
        setting("Tensor parallel size: GPUs of this host (1, 2, 4 or 8); on a CPU, processes."),
    ] = 1
    host_memory: Annotated[
        Size | None,
        setting(
            "per worker: host memory for pages evicted from the prefix cache (KV offload)",
            absent="no host tier, evicted pages are dropped; with disk 512 MiB",
            example="32GB",
        ),
    ] = None
    disk: Annotated[
        str | None,
        setting(
            "KV offload to this folder, with one folder per worker in it; with disk_size",
            absent="no disk tier",
            example="pages",
        ),
    ] = None
    disk_size: Annotated[
        Annotated[int, Meta(ge=1, le=2**60)] | None,
        setting("maximum size of each worker's files in `disk`", absent="no disk tier", example="500GB"),
    ] = None
    speculation: Annotated[
        Learned | Suffix | None,
        setting(
            "Speculative decoding: the folder of an EAGLE-3 drafter for this model, or `suffix`, which repeats earlier "
            "parts of the text. Same answers, less time.",
            absent="no speculation",
        ),
    ] = None
    random_weights: Annotated[
        Annotated[int, Meta(ge=1, le=1000)] | None,
        setting(
            "benchmarks only: this many layers of random weights, repeated to the model's depth",
            absent="the weights of the folder",
            example=5,
        ),
    ] = None

    @property
    def draft_tokens(self) -> int:
        """Most draft tokens of a row in a step; 0: no speculation."""
        if self.speculation is None:
            return 0
        return DRAFTS if self.speculation.tokens is None else self.speculation.tokens

    def synthetic_rates(self) -> tuple[float, ...]:
        """The rates of synthetic acceptance; () if draft tokens are really verified. Raises ConfigError if the
        configured value is not valid."""
        drafts = self.speculation
        if drafts is None or drafts.synthetic_acceptance is None:
            return ()
        return rates_of(drafts.synthetic_acceptance, self.draft_tokens, "engine.speculation.synthetic_acceptance")


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
    role: Role = "both"  # initial role; `messages.news.TakeRole` changes it
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
