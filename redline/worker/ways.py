"""The ways by which parcels travel between workers, best first: each a transport, and the memory that it moves.

A worker tells others of its area on each way. Whoever reads takes the first way on which it can connect, and says which
(`Want.way`): two GPUs that do not reach each other's memory meet on the next one.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec
import torch

from redline.errors import ConfigError
from redline.run.handoff import Parcels
from redline.run.kv import KvPool
from redline.transport.base import Peer, TransferFailed, Transport
from redline.transport.choice import TransportName, open_transport
from redline.transport.peer import Chip, PeerTransport
from redline.worker.arrivals import Arrivals, Budget
from redline.worker.config import PEER_SHARE
from redline.worker.departures import Departures
from redline.worker.exported_parcels import ExportedParcels
from redline.worker.parcel_memory import STAGED_BYTES, GpuParcels, HostParcels, ParcelMemory, PinnedParcels

Out = TypeVar("Out")  # whatever a parcel that leaves is for
In = TypeVar("In")  # whatever one that comes is for

_log = logging.getLogger(__name__)


class Carrier(NamedTuple):
    """A transport by its name, and the memory that it moves."""

    name: str
    transport: Transport
    memory: ParcelMemory
    share: float | None = None  # of the steps' time, that may go to parcels which come; None: as the device has it
    chip: Chip | None = None  # whose memory it is; None: it is the host's


class Way(Generic[Out, In]):
    """A carrier with the parcels of one worker's pages. `departures`: None where it computes for nobody."""

    def __init__(
        self, carrier: Carrier, kv: KvPool, share: float, clock: Callable[[], float], area_bytes: int | None
    ) -> None:
        """area_bytes: for parcels; 0: it computes for nobody; None: as many as suit the memory. share: of the steps'
        time, where the carrier says none. Raises ConfigError where there is no room for them."""
        self.name, self.transport = carrier.name, carrier.transport
        sizes = carrier.memory.sizes
        size = sizes.area if area_bytes is None else area_bytes
        self.parcels = Parcels(kv, min(sizes.parcel, (size or sizes.area) // 4))
        budget = Budget(share if carrier.share is None else carrier.share, clock)
        self.arrivals: Arrivals[In] = Arrivals(self.parcels, self.transport, carrier.memory, budget, clock)
        self.departures: Departures[Out] | None = None
        if size:
            self.departures = Departures(self.parcels, self.transport, carrier.memory, size, clock)


def told_of(ways: Sequence[Way[Out, In]]) -> bytes:
    """What others have to know of all areas; empty where there are none."""
    told = {way.name: way.departures.area.told for way in ways if way.departures is not None}
    return msgspec.msgpack.encode(told) if told else b""


def connect(ways: Sequence[Way[Out, In]], told: bytes, other: str) -> tuple[Way[Out, In], Peer]:
    """The first way on which the other worker's area can be read, and a warning where that is not the best.

    Raises TransferFailed, with each way's reason, where there is none, and ConfigError as a transport does.
    """
    try:
        areas = msgspec.msgpack.decode(told, type=dict[str, bytes])
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"what {other} tells of its areas cannot be read ({error})") from error
    failed: list[str] = []
    for way in ways:
        if way.name not in areas:
            failed.append(f"`{way.name}`: it has none")
            continue
        try:
            peer = way.transport.connect(areas[way.name])
        except TransferFailed as error:
            failed.append(f"`{way.name}`: {error}")
            continue
        if failed:
            _log.warning("parcels of %s travel over `%s`: %s", other, way.name, "; ".join(failed))
        else:
            _log.info("parcels of %s travel over `%s`", other, way.name)
        return way, peer
    raise TransferFailed("; ".join(failed) or "it has no area")


def carriers(name: TransportName, folder: Path | None, device: torch.device, ranks: int = 1) -> list[Carrier]:
    """What a worker's configuration asks for. folder: of `shared`'s areas. device: that has its pages. ranks: that
    share the model.

    `peer` and `auto` are `peer` on a GPU, and behind it `shared`. What comes to several ranks lies in memory that all
    of them read: of rank 0's GPU over `peer`, of the host over all others. `nixl` is the GPU's memory over NIXL where
    one rank has the pages, and behind it the host's. Raises ConfigError where no way can be had.
    """
    if name == "nixl" and device.type == "cuda" and ranks == 1:
        return _over_nixl(device)
    host = "shared" if name in ("peer", "auto") else name
    if ranks > 1 and device.type == "cuda":
        found = [Carrier(host, open_transport(host, folder), PinnedParcels(device), PEER_SHARE)]
    else:
        found = [Carrier(host, open_transport(host, folder), HostParcels())]
    if host == name:
        return found
    if device.type == "cuda":
        from redline.kernels.hopper.peers import PeerGpu

        try:
            chip = PeerGpu(device)
            found.insert(0, Carrier("peer", PeerTransport(chip), GpuParcels(device), PEER_SHARE, chip))
        except (RuntimeError, OSError) as error:
            _log.warning("handoff.transport: this GPU has no way `peer` (%s): `shared` stands in", error)
    elif name == "peer":
        _log.warning("handoff.transport is `peer`, and the pages are in a CPU's memory: `shared` stands in")
    return found


def _over_nixl(device: torch.device) -> list[Carrier]:
    """From GPU to GPU, and behind it from host to host: to workers that have no other, and where NIXL lacks CUDA."""
    from redline.kernels.hopper.peers import PeerGpu
    from redline.transport.nixl import NixlTransport

    found = [Carrier("nixl", NixlTransport(), PinnedParcels(device), PEER_SHARE)]
    try:
        chip = PeerGpu(device)
        memory = ExportedParcels(device, chip)
    except (RuntimeError, OSError) as error:
        _log.warning("handoff.transport: `nixl` has no way from GPU to GPU (%s): the host's memory stands in", error)
        return found
    transport = NixlTransport(make=memory.make, settle=memory.settle)
    return [Carrier("nixl-gpu", transport, memory, PEER_SHARE, chip), *found]


def aside(name: TransportName | None, device: torch.device, ranks: int) -> int:
    """Bytes of each rank's GPU that handoffs take, beside what its engine does. name: None: it hands nothing over."""
    if name is None or device.type != "cuda":
        return 0
    own = name in ("peer", "auto") or (name == "nixl" and ranks == 1)
    # What a follower copies from rank 0, and what goes through pinned memory: to be added up, and again to be placed.
    staged = max(STAGED_BYTES, 2 * PinnedParcels.sizes.landing) if ranks > 1 or name == "nixl" else 0
    return (GpuParcels.sizes.area + GpuParcels.sizes.landing if own else 0) + staged


def open_ways(
    found: Sequence[Carrier], kv: KvPool, share: float, clock: Callable[[], float], area_bytes: int | None
) -> list[Way[Out, In]]:
    """A worker's ways. One whose memory cannot be had is left out, with a warning, where another is there.

    Raises ConfigError where none is left.
    """
    ways: list[Way[Out, In]] = []
    for number, carrier in enumerate(found):
        try:
            ways.append(Way(carrier, kv, share, clock, area_bytes))
        except (ConfigError, RuntimeError) as error:
            if not ways and number == len(found) - 1:
                raise
            _log.warning("handoff.transport: `%s` cannot be had here (%s)", carrier.name, error)
    return ways
