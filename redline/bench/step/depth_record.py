"""Saved records of measured steps: `benchmarks/results/decode-*.json`, from which docs/speed.md is generated.

Cases that were also measured with another engine include its time (`PEER`).
"""

from pathlib import Path
from types import GenericAlias
from typing import Any, TypeVar

import msgspec
import torch

from redline.bench.record import provenance
from redline.bench.step.depth import DepthCase, Timing
from redline.bench.step.rounds import RoundCase, RoundTiming, floors
from redline.disk import hold, save, written
from redline.errors import ConfigError
from redline.messages.base import Record
from redline.model.block.config import BlockConfig
from redline.ops.op import PeakRates

WAIT_S = 60.0  # timeout in seconds while another process appends to the same file
KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


class OpRecord(Record, frozen=True):
    """One op of a step. us, floor_us: microseconds of all `launches` in one step together."""

    name: str
    us: float
    floor_us: float
    launches: int


class DepthRecord(Record, frozen=True):
    """One measured case. Floors use bytes_per_s and flops_per_s, measured in the same run; ms is the median.

    context: tokens of each row before the step. expert_bytes: mean bytes of distinct routed experts read per step.
    machine, cores: the host's processor, and the number of cores available to the process; records from before
    2026-11-26 have neither.
    """

    shape: str
    gpu: str
    ranks: int
    layers: int
    physical_layers: int
    experts: int
    rows: int
    tokens_per_row: int
    context: int
    kv_dtype: str
    routing: str
    ms: float
    p10_ms: float
    p90_ms: float
    floor_ms: float
    expert_bytes: int
    bytes_per_s: float
    flops_per_s: float
    ops: tuple[OpRecord, ...]
    commit: str
    date: str
    versions: dict[str, str]
    machine: str | msgspec.UnsetType = msgspec.UNSET
    cores: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def tokens(self) -> int:
        """Tokens computed per step."""
        return self.rows * self.tokens_per_row

    @property
    def ops_ms(self) -> float:
        """Milliseconds of all ops of one step, the sum of separate measurements."""
        return sum(op.us for op in self.ops) / 1e3

    @property
    def peer_ms(self) -> float | None:
        """Milliseconds of the peer's step with the same tokens, if it was measured for this case on the same chip."""
        case = self.shape, self.layers, self.experts, self.context, self.kv_dtype, self.routing
        return PEER_MS.get((self.ranks, self.tokens)) if case == PEER_CASE and PEER_GPU in self.gpu else None


class RoundRecord(DepthRecord, frozen=True, kw_only=True):
    """A measured round of speculative decoding. ms: of the round. tokens_per_row: 1 + k. ops: verify and draft.

    accept          mean tokens per row and round, as configured
    verify_ms       from the start of the round to the accepted tokens
    draft_ms        of all drafts: a chain's k passes, a block's one
    baseline_ms     of a step without drafts, run between the rounds
    tokens_per_s    of all rows together
    idle_share      share of time in which the device was idle, from a trace; None on a CPU
    draft_head_bits bits per weight of the drafter's head
    drafter         eagle3, dflash or dspark
    """

    k: int
    accept: float
    verify_ms: float
    draft_ms: float
    baseline_ms: float
    tokens_per_s: float
    idle_share: float | None
    draft_head_bits: int = 16
    drafter: str = "eagle3"

    @property
    def times(self) -> float:
        """Speedup: tokens per second divided by those of steps without drafts."""
        return self.accept * self.baseline_ms / self.ms


R = TypeVar("R", bound=DepthRecord)


PEER = "vLLM 0.33"
PEER_DATE = "2026-11-28"
PEER_GPU = "H200"
PEER_CASE = "kimi-k2.6", 61, 384, 1024, "bf16", "uniform"  # shape, layers, experts, context, KV format, routing
PEER_MS = {  # ms by (ranks, rows), measured at 5 and 9 layers (two GPUs: 9 and 13), linearly extrapolated to 61
    (1, 1): 13.2,
    (1, 4): 22.5,
    (1, 8): 33.1,
    (1, 32): 90.0,
    (1, 64): 130.0,
    (1, 128): 163.0,
    (1, 256): 199.0,
    (2, 4): 14.1,
    (2, 8): 21.4,
    (2, 32): 50.3,
    (2, 64): 73.1,
    (2, 128): 89.2,
}


_WHAT = {DepthRecord: "measured steps", RoundRecord: "measured rounds"}


def record_of(depth: DepthCase, timing: Timing, machine: PeakRates) -> DepthRecord:
    """The record of a measured case, with the current machine, versions, commit and date.

    Raises StopIteration for a KV dtype that is not in KV_DTYPES.
    """
    origin: dict[str, Any] = provenance("torch")
    versions: dict[str, str] = origin["versions"]
    if torch.version.cuda is not None:
        versions = {**versions, "cuda": torch.version.cuda}
    return DepthRecord(
        shape=depth.shape,
        gpu=machine.name,
        ranks=depth.ranks,
        layers=depth.config.num_hidden_layers,
        physical_layers=depth.physical,
        experts=depth.config.n_routed_experts,
        rows=depth.rows,
        tokens_per_row=depth.tokens,
        context=depth.context,
        kv_dtype=next(name for name, dtype in KV_DTYPES.items() if dtype == depth.kv_dtype),
        routing=routing_name(depth.overlap),
        ms=timing.ms,
        p10_ms=timing.p10_ms,
        p90_ms=timing.p90_ms,
        floor_ms=1e3 * depth.cost(timing.experts).seconds(machine),
        expert_bytes=round(timing.experts * depth.expert_bytes),
        bytes_per_s=machine.bytes_per_s,
        flops_per_s=machine.flops_per_s,
        ops=tuple(
            OpRecord(
                name=op.name,
                us=op.us * op.launches,
                floor_us=1e6 * op.cost.seconds(machine) * op.launches,
                launches=op.launches,
            )
            for op in timing.ops
        ),
        commit=origin["commit"],
        date=origin["date"],
        versions=versions,
        machine=origin["machine"],
        cores=origin["cores"],
    )


def round_record(case: RoundCase, timing: RoundTiming, machine: PeakRates) -> RoundRecord:
    """The record of a measured round, like `record_of` for a step."""
    whole = Timing(timing.ms, timing.p10_ms, timing.p90_ms, timing.experts, ())
    step: dict[str, Any] = msgspec.structs.asdict(record_of(case.depth, whole, machine))
    verify_ms, draft_ms = floors(case, timing.experts, machine)
    passes = case.drafter.passes(case.k)
    parts = ("verify", timing.verify_ms, verify_ms, 1), ("draft", timing.draft_ms, draft_ms, passes)
    ops = tuple(OpRecord(name=name, us=1e3 * ms, floor_us=1e3 * floor, launches=n) for name, ms, floor, n in parts)
    step.update(floor_ms=verify_ms + draft_ms, ops=ops)
    return RoundRecord(
        **step,
        k=case.k,
        accept=case.accept,
        verify_ms=timing.verify_ms,
        draft_ms=timing.draft_ms,
        baseline_ms=timing.baseline_ms,
        tokens_per_s=1e3 * case.depth.rows * case.accept / timing.ms,
        idle_share=timing.idle_share,
        draft_head_bits=case.head_bits,
        drafter=case.drafter.kind if isinstance(case.drafter, BlockConfig) else "eagle3",
    )


def routing_name(overlap: float | None) -> str:
    """The name of the routing: "model", "uniform", or "correlated" with its probability."""
    if overlap is None:
        return "model"
    return f"correlated {overlap:g}" if overlap else "uniform"


def read(path: Path, kind: type[R]) -> list[R]:
    """The measured cases of a file. Raises ConfigError if it cannot be read, or contains records of another kind."""
    try:
        found: list[R] = msgspec.json.decode(path.read_bytes(), type=GenericAlias(list, kind))
        return found
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: expected a list of {_WHAT[kind]}: {error}") from None


def append(path: Path, record: DepthRecord) -> None:
    """Appends a case to the file's list; a missing file is created.

    Raises ConfigError if the file cannot be written, contains records of another kind, or is locked by another process
    for WAIT_S seconds. The file then stays as it is.
    """
    with written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        held = hold(path, wait_s=WAIT_S)
    try:
        records = [*(read(path, type(record)) if path.exists() else []), record]
        save(path, msgspec.json.format(msgspec.json.encode(records), indent=1) + b"\n")
    finally:
        held.release()
