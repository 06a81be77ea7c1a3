"""What a worker is told. Free of torch, so that the process that starts workers can read it."""

from typing import Any

import msgspec

from redline.transport.choice import TransportName
from redline.tune.synthetic import rates_of
from redline.wire.base import Record
from redline.wire.news import Role

SUFFIX = "suffix"  # what a person writes in the place of a drafter's folder


class _Drafts(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What is the same whoever drafts."""

    tokens: int = 3  # drafts that a step verifies per row, at most 15; 0: drafts nothing
    adaptive: bool = True  # fewer where they do not pay; false: always `tokens`
    trace: str | None = None  # a file for what was accepted where; it holds users' text
    # For benchmarks, and their answers are no model's: a length (mean tokens of a round) or rates, by which it is drawn
    # how many drafts hold (`tune.synthetic`).
    synthetic_acceptance: float | tuple[float, ...] | None = None


class Learned(_Drafts, frozen=True, kw_only=True, tag="learned"):
    """Speculation by a drafter that was trained for the model."""

    drafter: str  # its folder
    suffix: bool = True  # above it, matches of the text's own past where they are long
    head_bits: int = 16  # of a number of its head; 8: half the bytes of a pass's largest part, drafts rounded a little


class Suffix(_Drafts, frozen=True, kw_only=True, tag="suffix"):
    """Speculation without a drafter: what followed when the text's last tokens stood there before."""


DraftConfig = Learned | Suffix
HEAD_BITS = 16, 8  # what a drafter's head is kept in


def drafts_of(source: str) -> DraftConfig:
    """What a person means by a drafter's folder, or by SUFFIX."""
    return Suffix() if source == SUFFIX else Learned(drafter=source)


class EngineConfig(Record, frozen=True):
    """How an engine runs a checkpoint. What is None is derived from the machine, and printed by `redline doctor`."""

    # Bytes for the pages; absent: a quarter of the memory that is left, at most 4 GiB, and of GPUs that no other worker
    # of the deployment has, nine tenths, at most 2,097,152 tokens.
    kv_memory: int | None = None
    max_model_len: int | None = None  # tokens of one job, prompt and answer; absent: what fits
    max_running: int = 64  # jobs in one step
    admit_together: int = 1  # waiting jobs begin once so many can: fewer steps with prompts, later first tokens
    # Positions computed in one step; absent: 512, on a GPU 8192, or 2048 where memory is short.
    step_tokens: int | None = None
    step_ms: float | None = None  # that a step with prompts beside answers may take, by prediction; absent: any time
    kv_dtype: str = "bf16"  # of the pages: bf16, fp8 (e4m3, half the bytes) or float32
    device: str | None = None  # cpu or cuda; absent: the GPU, if there is one
    ranks: int = 1  # processes that share the model, each with a GPU of its own: 1, 2, 4 or 8
    host_memory: int | None = None  # bytes of the host's, for pages that the prefix cache forgets; absent: none
    disk: str | None = None  # a folder for pages that host memory gives up; absent: none
    disk_size: int | None = None  # bytes of all files there; with disk
    speculation: Learned | Suffix | None = None  # who drafts, and how; absent: no speculation
    # For benchmarks, and its answers are no model's: `weights` has a config.json and a tokenizer alone, all weights are
    # random, and so many layers lie in memory; every further one is one of these (`model.k2.random_weights`).
    random_weights: int | None = None

    @property
    def draft_tokens(self) -> int:
        """Drafts of a row in a step, at most; 0: there are none."""
        return 0 if self.speculation is None else self.speculation.tokens

    def synthetic_rates(self) -> tuple[float, ...]:
        """The rates of synthetic acceptance, () where drafts are verified. Raises ConfigError where they are none."""
        drafts = self.speculation
        if drafts is None or drafts.synthetic_acceptance is None:
            return ()
        return rates_of(drafts.synthetic_acceptance, drafts.tokens, "engine.speculation.synthetic_acceptance")


def new_spelling(key: str, value: Any, table: str = "engine") -> str | None:
    """What to write for a key that this record had once; None for any other.

    value: what the key was given. table: what the record is called in its file.
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


# Of the steps' time, that parcels which come in may take while steps run. On a CPU a first token would otherwise wait
# for many of a small model's short steps.
HANDOFF_SHARE = {"cpu": 0.1, "cuda": 0.02}
PEER_SHARE = 0.1  # over `peer`: the host only launches, while the next step runs already
AREA_BYTES = 64 << 20  # of parcels that are offered and not read yet, in the host's memory: seldom more than a prompt's

STAGING_BYTES = 512 << 20  # of host memory, where there is a disk and nothing is said: what waits to be written


class EventsConfig(Record, frozen=True):
    """Where a worker tells of its prefix cache as vLLM does (`worker.page_events`)."""

    endpoint: str
    number: int  # the worker's, among those of the deployment
    replay: str | None = None  # None: nothing is said again
    topic: str = ""


class WorkerConfig(Record, frozen=True):
    """One line of JSON on the worker's standard input."""

    weights: str  # the checkpoint's folder
    engine: EngineConfig
    inbox: str  # the address that the worker reads
    outbox: str  # the address that it writes
    name: str = "worker"
    epoch: int = 1  # how often it has been started, this time included
    role: Role = "both"  # at first: it may be told another (`wire.news.TakeRole`)
    cores: tuple[int, ...] = ()  # of a CPU, that it may run on; none: all
    tells_cache: bool = False  # what comes into its prefix cache and what leaves it: there are others to choose from
    events: EventsConfig | None = None  # None: it tells none
    transport: TransportName | None = None  # of what it hands over or takes over; None: nothing
    parcels: str | None = None  # of transports within a host: the folder of the areas that the workers of a host share
    key: str | None = None  # that the deployment's machines share, for what goes over TCP; None: all are on one
    alone: bool = False  # no other worker of the deployment has its GPUs: their memory is for its pages


class RankConfig(Record, frozen=True):
    """One line of JSON on the standard input of a rank that follows (`worker.rank`)."""

    weights: str
    engine: EngineConfig
    rank: int
    folder: str  # where the ranks meet
    inbox: str  # the address of the commands that it reads
    memory: int  # the file that it inherits, of memory that the ranks share (`worker.rank_memory`)
    alone: bool = False  # as rank 0 has it: all take the pages of the one that has room for the fewest
    aside: int = 0  # bytes of its GPU that are for others, likewise
