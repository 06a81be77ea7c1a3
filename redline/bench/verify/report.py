"""What `redline verify FOLDER` found, as its JSON report has it."""

from typing import Any

from redline.bench.disk_rate import Read
from redline.wire.base import Record


class Problem(Record, frozen=True):
    """What is wrong with a file, or with some of its tensors in the same way.

    tensor   the stored name of the first one, which `what` describes; empty: the whole file is wrong
    tensors  how many tensors of the file have this problem
    """

    file: str
    tensor: str
    tensors: int
    what: str
    fix: str


class Shard(Record, frozen=True):
    """What reading a shard found; a line of the progress file.

    job         a hash of all but the file's content that the result depends on
    bytes       of the file; mtime_ns: when it was last changed
    read_bytes  that were read: holes are skipped
    codes       how often each INT4 code occurs; empty if the shard has none
    damaged     layers that have a tensor with a problem here; -1: a tensor of no layer
    """

    job: str
    file: str
    bytes: int
    mtime_ns: int
    tensors: int
    read_bytes: int
    seconds: float
    codes: tuple[int, ...]
    problems: tuple[Problem, ...]
    damaged: tuple[int, ...]


class Layer(Record, frozen=True):
    """One layer, computed by the kernels of this machine and by the float32 references.

    bytes       as stored; load_s: from an empty page cache into the kernels' layouts
    error       relative, of norms: the worst of the steps' outputs and of the latents that they wrote; None: no number
    limit       of it
    tokens      that were compared; near_ties: left out, since two experts' scores are closer than rounding
    step_ms     one token at a context of 1,024 takes in this layer
    why_not     empty, or why the layer was not computed; then the numbers are 0
    """

    layer: int
    dense: bool
    bytes: int = 0
    load_s: float = 0.0
    error: float | None = 0.0
    limit: float = 0.0
    tokens: int = 0
    near_ties: int = 0
    step_ms: float = 0.0
    why_not: str = ""


class Rates(Record, frozen=True):
    """How fast the layers were loaded, compared with plain reads of the same files; GB/s.

    whole_load_s: all bytes of the model at load_gb_per_s, by one process.
    """

    disk: tuple[Read, ...]
    load_gb_per_s: float
    of_disk: float
    whole_load_s: float


class Steps(Record, frozen=True):
    """A decode step of one token, added up from the layers that were measured, and doctor's prediction; ms.

    measured_ms   layers alone: without the embedding and the head
    floor_ms      reading a token's weights of the layers at this machine's measured bandwidth
    predicted_ms  whole step, as `redline doctor --on` predicts it for `on`; None: it predicts none for this machine
    """

    measured_ms: float
    floor_ms: float
    predicted_ms: float | None
    on: str


class Report(Record, frozen=True):
    """All that was found.

    sound      there is no problem, though some checks may not have been made: `unchecked`, each with its reason
    earlier    of the shards, read by an earlier run of the command and not changed since
    codes      how often each INT4 code occurs in all shards
    """

    folder: str
    sound: bool
    problems: tuple[Problem, ...]
    unchecked: tuple[str, ...]
    bytes: int
    tensors: int
    codes: tuple[int, ...]
    shards: tuple[Shard, ...]
    earlier: int
    layers: tuple[Layer, ...]
    rates: Rates | None
    steps: Steps | None
    device: str
    seconds: float
    provenance: dict[str, Any]
