"""The paths by which KV chunks are transferred between workers, best first: each is a transport and a kind of memory.

A worker publishes the descriptor of its area for each path. The decode worker uses the first path on which it can
connect, and names it in its request (`PullRequest.way`): two GPUs without peer access to each other use the next path.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec
import torch

from redline.errors import ConfigError
from redline.run.kv import KvPool
from redline.run.kv_chunks import KvChunkLayout
from redline.transport.base import Peer, TransferFailed, Transport
from redline.transport.choice import TransportName, open_transport
from redline.transport.peer import GpuDriver, PeerTransport
from redline.worker.config import PEER_SHARE
from redline.worker.exported_parcels import ExportedParcels
from redline.worker.kv_transfer.receiver import KvReceiver, ReceiveBudget
from redline.worker.kv_transfer.sender import KvSender
from redline.worker.parcel_memory import STAGED_BYTES, GpuParcels, HostParcels, ParcelMemory, PinnedParcels

Out = TypeVar("Out")  # the owner of a chunk that is sent
In = TypeVar("In")  # the owner of a chunk that is received

_log = logging.getLogger(__name__)


class Carrier(NamedTuple):
    """A transport, with its name and the kind of memory that it reads and writes."""

    name: str
    transport: Transport
    memory: ParcelMemory
    share: float | None = None  # share of the steps' time for receiving chunks; None: the device's default
    chip: GpuDriver | None = None  # the GPU that has the memory; None: host memory


class TransferPath(Generic[Out, In]):
    """A carrier, opened for the KV chunks of one worker. `departures`: None if the worker prefills for no other."""

    def __init__(
        self, carrier: Carrier, kv: KvPool, share: float, clock: Callable[[], float], area_bytes: int | None
    ) -> None:
        """area_bytes: size of the area for chunks; 0: the worker prefills for no other; None: the default of the
        memory. share: share of the steps' time, if the carrier has none. Raises ConfigError if there is no room."""
        self.name, self.transport = carrier.name, carrier.transport
        sizes = carrier.memory.sizes
        size = sizes.area if area_bytes is None else area_bytes
        self.parcels = KvChunkLayout(kv, min(sizes.parcel, (size or sizes.area) // 4))
        budget = ReceiveBudget(share if carrier.share is None else carrier.share, clock)
        self.arrivals: KvReceiver[In] = KvReceiver(self.parcels, self.transport, carrier.memory, budget, clock)
        self.departures: KvSender[Out] | None = None
        if size:
            self.departures = KvSender(self.parcels, self.transport, carrier.memory, size, clock)


def told_of(ways: Sequence[TransferPath[Out, In]]) -> bytes:
    """The descriptors of all areas, to be sent to other workers; empty if there are none."""
    told = {way.name: way.departures.area.told for way in ways if way.departures is not None}
    return msgspec.msgpack.encode(told) if told else b""


def connect(ways: Sequence[TransferPath[Out, In]], told: bytes, other: str) -> tuple[TransferPath[Out, In], Peer]:
    """Connects to the other worker's area on the first path that works; logs a warning if it is not the best one.

    Raises TransferFailed, with the reason of each path, if none works, and a transport's ConfigError.
    """
    try:
        areas = msgspec.msgpack.decode(told, type=dict[str, bytes])
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"the area descriptors of worker {other} cannot be decoded ({error})") from error
    failed: list[str] = []
    for way in ways:
        if way.name not in areas:
            failed.append(f"`{way.name}`: not offered by the other worker")
            continue
        try:
            peer = way.transport.connect(areas[way.name])
        except TransferFailed as error:
            failed.append(f"`{way.name}`: {error}")
            continue
        if failed:
            _log.warning("KV chunks of worker %s are read over `%s`: %s", other, way.name, "; ".join(failed))
        else:
            _log.info("KV chunks of worker %s are read over `%s`", other, way.name)
        return way, peer
    raise TransferFailed("; ".join(failed) or "the other worker has no area")


def carriers(name: TransportName, folder: Path | None, device: torch.device, ranks: int = 1) -> list[Carrier]:
    """The carriers for a worker's configuration, best first. folder: the folder of `shared`'s areas. device: the device
    of its KV pages. ranks: tensor parallel size.

    `peer` and `auto` mean `peer` on a GPU, with `shared` as the fallback. With several ranks, chunks are received into
    memory that all of them read: rank 0's GPU memory over `peer`, host memory over all others. `nixl` means GPU memory
    over NIXL with one rank, with host memory over NIXL as the fallback. Raises ConfigError if no carrier can be opened.
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
        from redline.kernels.cuda.peers import PeerGpu

        try:
            chip = PeerGpu(device)
            found.insert(0, Carrier("peer", PeerTransport(chip), GpuParcels(device), PEER_SHARE, chip))
        except (RuntimeError, OSError) as error:
            _log.warning("handoff.transport: `peer` is unavailable on this GPU (%s): falling back to `shared`", error)
    elif name == "peer":
        _log.warning("handoff.transport is `peer`, but the KV pages are in CPU memory: falling back to `shared`")
    return found


def _over_nixl(device: torch.device) -> list[Carrier]:
    """From GPU to GPU, with host to host as the fallback: for workers without GPU memory over NIXL, or NIXL without
    CUDA."""
    from redline.kernels.cuda.peers import PeerGpu
    from redline.transport.nixl import NixlTransport

    found = [Carrier("nixl", NixlTransport(), PinnedParcels(device), PEER_SHARE)]
    try:
        chip = PeerGpu(device)
        memory = ExportedParcels(device, chip)
    except (RuntimeError, OSError) as error:
        _log.warning("handoff.transport: `nixl` cannot use GPU memory (%s): falling back to host memory", error)
        return found
    transport = NixlTransport(make=memory.make, settle=memory.settle)
    return [Carrier("nixl-gpu", transport, memory, PEER_SHARE, chip), *found]


def aside(name: TransportName | None, device: torch.device, ranks: int) -> int:
    """Bytes of each rank's GPU that KV transfers need, in addition to the engine's memory. name: the transport; None:
    KV transfers are disabled."""
    if name is None or device.type != "cuda":
        return 0
    own = name in ("peer", "auto") or (name == "nixl" and ranks == 1)
    # Staging for copies from rank 0's GPU, or for pinned memory, which is copied to sum the checksum and to scatter.
    staged = max(STAGED_BYTES, 2 * PinnedParcels.sizes.landing) if ranks > 1 or name == "nixl" else 0
    return (GpuParcels.sizes.area + GpuParcels.sizes.landing if own else 0) + staged


def open_ways(
    found: Sequence[Carrier], kv: KvPool, share: float, clock: Callable[[], float], area_bytes: int | None
) -> list[TransferPath[Out, In]]:
    """Opens a worker's paths. A path without its memory is left out, with a warning, if another path is available.

    Raises ConfigError if none is left.
    """
    ways: list[TransferPath[Out, In]] = []
    for number, carrier in enumerate(found):
        try:
            ways.append(TransferPath(carrier, kv, share, clock, area_bytes))
        except (ConfigError, RuntimeError) as error:
            if not ways and number == len(found) - 1:
                raise
            _log.warning("handoff.transport: `%s` is unavailable (%s)", carrier.name, error)
    return ways
