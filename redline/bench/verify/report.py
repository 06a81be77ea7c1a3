"""The JSON report of `redline verify FOLDER`."""

from typing import Any

from redline.bench.disk_rate import Read
from redline.messages.base import Record


class Problem(Record, frozen=True):
    """A problem of a file, or the same problem of several of its tensors.

    tensor   stored name of the first tensor, which `what` describes; empty: the problem is of the whole file
    tensors  number of tensors of the file with this problem
    """

    file: str
    tensor: str
    tensors: int
    what: str
    fix: str


class VerifiedShard(Record, frozen=True):
    """The result of reading a shard; a line of the progress file.

    job         a hash of everything that the result depends on, except the file's content
    bytes       size of the file; mtime_ns: time of its last change
    read_bytes  bytes read; holes are skipped
    codes       number of occurrences of each INT4 code; empty if the shard has none
    damaged     layers with a damaged tensor in this shard; -1: a tensor outside the layers
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


class VerifiedLayer(Record, frozen=True):
    """One layer, computed by the kernels of this machine and by the float32 references.

    bytes       stored size; load_s: seconds to load with an empty page cache into the kernels' layouts
    error       worst relative error (L2 norm) of the steps' outputs and of the latent KV they wrote; None: NaN or
                infinite
    limit       bound of the error
    tokens      compared tokens; near_ties: tokens left out, since two experts' scores are closer than rounding
    step_ms     milliseconds of one token at a context of 1,024 in this layer
    why_not     empty, or the reason why the layer was not computed; the numbers are then 0
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
    """The load rate of the layers, compared with plain reads of the same files; in GB/s.

    whole_load_s: seconds to load all bytes of the model at load_gb_per_s, by one process.
    """

    disk: tuple[Read, ...]
    load_gb_per_s: float
    of_disk: float
    whole_load_s: float


class Steps(Record, frozen=True):
    """A decode step of one token, extrapolated from the measured layers, and doctor's prediction; in ms.

    measured_ms   layers only, without the embedding and the head
    floor_ms      time to read a token's weights of the layers at this machine's measured bandwidth
    predicted_ms  whole step, as predicted by `redline doctor --on` for `on`; None: there is no prediction
    """

    measured_ms: float
    floor_ms: float
    predicted_ms: float | None
    on: str


class VerifyReport(Record, frozen=True):
    """The whole report.

    sound      no problem was found; checks that were not possible are in `unchecked`, each with its reason
    earlier    number of shards that an earlier run of the command has read and that have not changed since
    codes      number of occurrences of each INT4 code in all shards
    """

    folder: str
    sound: bool
    problems: tuple[Problem, ...]
    unchecked: tuple[str, ...]
    bytes: int
    tensors: int
    codes: tuple[int, ...]
    shards: tuple[VerifiedShard, ...]
    earlier: int
    layers: tuple[VerifiedLayer, ...]
    rates: Rates | None
    steps: Steps | None
    device: str
    seconds: float
    provenance: dict[str, Any]
