"""The transport `nixl`, between processes and machines, through NIXL over UCX: RDMA, NVLink, shared memory or TCP, from
and to host or GPU memory.

Neither NIXL's release of a transfer nor the removal of a remote agent ends a read: over TCP, the bytes of a peer that
was paused arrived in the buffer after both (docs/kv_transfer.md). Only destroying the local agent that started the read
ends it for certain. So every peer has a local agent of its own here, and a read that can neither complete nor be
cancelled fails its peer. A copy that is already queued on a GPU continues without an agent: the owner of the GPU memory
passes a function that waits for it (`settle`).

Some links need the area's owner to make progress. NIXL's own progress thread takes a whole core while idle; ours polls
once a millisecond.
"""

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Generator
from importlib import import_module
from typing import Any
from weakref import WeakSet

import msgspec

from redline import clock
from redline.errors import ConfigError
from redline.transport.base import (
    AreaDescriptor,
    MemoryRange,
    Target,
    TransferFailed,
    address_of,
    heard,
    inside,
    landing_at,
)
from redline.transport.memory import host_memory

LOOK_S = 0.001  # progress interval, in seconds, of an area's owner: polling takes about 3 % of a core
GRACE_S = 0.1  # seconds that a cancelled read may take to end by itself before its peer is failed

_KIND = "redline-nixl-1"


class _NixlDescriptor(AreaDescriptor, frozen=True, array_like=True, forbid_unknown_fields=True):
    agent: str
    metadata: bytes  # NIXL's metadata of the agent that has registered the memory
    address: int
    size: int
    device: int | None


class _Nixl:
    """The NIXL library: creates its agents and names its exceptions."""

    def __init__(self, tls: str | None) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # the default logs a line for each agent
        os.environ.setdefault("UCX_LOG_LEVEL", "error")  # the default logs each read that an agent's end has ended
        # If UCX detects no NVLink, it reads from GPU to GPU over TCP by default, even between GPUs with peer access.
        os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
        if tls is not None:
            os.environ["UCX_TLS"] = tls
        try:
            api: Any = import_module("nixl._api")
            bindings: dict[str, Any] = vars(import_module("nixl._bindings"))
        except ImportError as error:
            raise ConfigError(f"transport: `nixl` needs its library: pip install 'redline[nixl]' ({error})") from error
        self._api = api
        names = [name for name in bindings if name.startswith("nixl") and name.endswith("Error")]
        self.errors: tuple[type[Exception], ...] = tuple(bindings[name] for name in names)

    def agent(self) -> Any:
        """A new agent without a progress thread. Raises ConfigError if UCX cannot be initialised."""
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            agent = self._api.nixl_agent(f"redline-{secrets.token_hex(12)}", config)
        except (*self.errors, RuntimeError) as error:
            raise ConfigError(
                f"transport: NIXL cannot be initialised here ({error}); UCX_TLS selects UCX's transports"
            ) from error
        if "UCX" not in agent.backends:
            raise ConfigError("transport: this NIXL has no UCX backend")
        return agent

    def register(self, agent: Any, memory: MemoryRange) -> Any:
        """Registers memory with the agent, which pins it if the link needs that. Raises ConfigError if NIXL refuses."""
        try:
            return agent.register_memory([(memory.address, memory.size, memory.device or 0, "")], _kind(memory))
        except self.errors as error:
            what, why = "the host", f"{error}"
            if memory.device is not None:  # NIXL has logged details on standard error
                what, why = f"GPU {memory.device}", f"{error}: UCX may lack CUDA here, or UCX_TLS may exclude it"
            raise ConfigError(f"transport: NIXL cannot register {memory.size:,} bytes of {what} ({why})") from error


class NixlArea:
    """Memory that is registered with an agent of its own."""

    def __init__(self, nixl: _Nixl, memory: MemoryRange) -> None:
        """Raises ConfigError if NIXL cannot register the memory."""
        self.memory = memory
        self._agent: Any = nixl.agent()
        # Registration comes first: an agent's metadata contains only the memory that is registered by then.
        nixl.register(self._agent, memory)
        told = _NixlDescriptor(
            _KIND, self._agent.name, self._agent.get_agent_metadata(), memory.address, memory.size, memory.device
        )
        self.told = msgspec.msgpack.encode(told)
        self._lock = threading.Lock()

    def help_on(self) -> None:
        """Makes progress on peers' reads, for links that need the owner's help."""
        with self._lock:
            if self._agent is not None:
                self._agent.get_new_notifs()

    def close(self) -> None:
        """As `Area.close`: peers' reads fail."""
        with self._lock:
            self._agent = None


class NixlLanding:
    """Memory that is registered with every peer's agent as the target of reads."""

    def __init__(self, transport: "NixlTransport", memory: MemoryRange) -> None:
        self.memory = memory
        self._transport = transport

    def close(self) -> None:
        """As `Landing.close`."""
        self._transport.forget(self)


class NixlRead:
    """A NIXL transfer in progress."""

    def __init__(self, peer: "NixlPeer", into: NixlLanding, handle: Any, held: object, seconds: float) -> None:
        self.into = into
        self._peer, self._handle, self._held = peer, handle, held
        self._seconds, self._until = seconds, clock.monotonic() + seconds
        self._failed: str | None = None

    def done(self) -> bool:
        """As `RemoteRead.done`."""
        if self._failed is not None:
            raise TransferFailed(self._failed)
        if self._handle is None:
            return True
        if self._peer.ended(self._handle):
            self._end()
            return True
        if self._failed is not None:  # `ended` has failed the peer and all its readings
            raise TransferFailed(self._failed)
        if clock.monotonic() >= self._until:
            self._give_up(f"the read timed out after {self._seconds:g} s")
            return self.done()
        return False

    def cancel(self) -> None:
        """As `RemoteRead.cancel`. A read that does not end within `GRACE_S`, 0.1 s, fails its peer and the
        peer's other reads."""
        self._give_up("the read was cancelled")

    def fail(self, reason: str) -> None:
        """Marks the read as failed and releases its handle, since its peer's agent is about to end."""
        self._failed = reason
        self._end()

    def _give_up(self, reason: str) -> None:
        until = clock.monotonic() + GRACE_S
        while self._handle is not None:
            if self._peer.ended(self._handle):
                self._end()
            elif clock.monotonic() >= until:
                self._peer.fail(reason)
            else:
                clock.sleep(LOOK_S)

    def _end(self) -> None:
        handle, self._handle, self._held = self._handle, None, None
        self._peer.readings.discard(self)
        self._peer.release(handle)


class NixlPeer:
    """A connection to an area of another process. A peer that has failed stays failed; the caller has to reconnect."""

    def __init__(self, transport: "NixlTransport", nixl: _Nixl, told: _NixlDescriptor) -> None:
        """Raises TransferFailed if NIXL cannot reach the peer."""
        self.size = told.size
        self.readings: set[NixlRead] = set()
        self._transport, self._nixl, self._told = transport, nixl, told
        self._agent: Any = nixl.agent()
        self._registered: dict[NixlLanding, Any] = {}
        self._failed: str | None = None
        for landing in transport.landings:
            self.register(landing)
        try:
            self._agent.add_remote_agent(told.metadata)
        except nixl.errors as error:
            self._agent = None
            raise TransferFailed(f"NIXL cannot reach the peer ({error})") from error

    def read(self, source_offset: int, into: Target, count: int, seconds: float) -> NixlRead:
        """As `Peer.read`. Over shared memory the read may be complete before this returns."""
        inside(source_offset, count, self.size)
        address, held = address_of(into, count)
        landing = landing_at(self._transport.landings, address, count)
        if self._failed is None:
            with self._failing():
                here = [(address, count, landing.memory.device or 0)]
                there = [(self._told.address + source_offset, count, self._told.device or 0)]
                agent = self._agent
                handle = agent.initialize_xfer(
                    "READ",
                    agent.get_xfer_descs(here, _kind(landing.memory)),
                    agent.get_xfer_descs(there, "DRAM" if self._told.device is None else "VRAM"),
                    self._told.agent,
                )
                reading = NixlRead(self, landing, handle, held, seconds)
                self.readings.add(reading)
                agent.transfer(handle)  # its status is ignored: `ended` polls it
                return reading
        reading = NixlRead(self, landing, None, None, seconds)
        reading.fail(self._failed or "the peer is unreachable")
        return reading

    def ended(self, handle: Any) -> bool:
        """Whether all bytes have arrived. A failed transfer fails the peer: its readings raise from now on."""
        with self._failing():
            state = self._agent.check_xfer_state(handle)
            if state == "ERR":
                self.fail("the transfer failed")
            return state == "DONE"
        return False

    def release(self, handle: Any) -> None:
        """Releases the handle of a transfer that has ended, or that ends with its agent."""
        if handle is not None:
            with contextlib.suppress(*self._nixl.errors):
                handle.release()

    def register(self, landing: NixlLanding) -> None:
        """Registers memory as a target of reads."""
        if self._agent is not None:
            self._registered[landing] = self._nixl.register(self._agent, landing.memory)

    def deregister(self, landing: NixlLanding) -> None:
        """Deregisters a target of reads."""
        registered = self._registered.pop(landing, None)
        if registered is not None and self._agent is not None:
            self._agent.deregister_memory(registered)

    def fail(self, reason: str) -> None:
        """Destroys the agent, and with it all transfers in progress."""
        if self._failed is None:
            self._failed = reason
        on_gpu = any(reading.into.memory.device is not None for reading in self.readings)
        for reading in tuple(self.readings):
            reading.fail(reason)
        self._registered.clear()
        self._agent = None  # the last reference
        if on_gpu:
            self._transport.settle()

    def close(self) -> None:
        """As `Peer.close`."""
        self.fail("the peer was closed")

    @contextlib.contextmanager
    def _failing(self) -> Generator[None]:
        """Fails the peer on any NIXL error that is raised inside."""
        try:
            yield
        except self._nixl.errors as error:
            self.fail(f"the peer is unreachable ({error})")


class NixlTransport:
    """Areas and peers over NIXL.

    tls: value of `UCX_TLS` for the whole process, the transports that UCX may use (`tcp,self` for TCP only); None: the
    environment's value, by default the transports that UCX prefers. make: allocates memory of a given size in bytes,
    for areas. settle: returns once the GPU that reads go to has completed all queued copies; needed only with a GPU.
    Raises ConfigError if the library is not installed.
    """

    def __init__(
        self,
        tls: str | None = None,
        make: Callable[[int], MemoryRange] = host_memory,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._nixl = _Nixl(tls)
        self._make, self.settle = make, settle
        self.landings: list[NixlLanding] = []
        self._areas: list[NixlArea] = []
        self._peers: WeakSet[NixlPeer] = WeakSet()
        self._helper: threading.Thread | None = None
        self._closed = threading.Event()

    def area(self, memory: MemoryRange | int) -> NixlArea:
        """As `Transport.area`: of host or GPU memory."""
        area = NixlArea(self._nixl, self._make(memory) if isinstance(memory, int) else memory)
        self._areas.append(area)
        if self._helper is None:
            self._helper = threading.Thread(target=self._help, name="nixl", daemon=True)
            self._helper.start()
        return area

    def landing(self, memory: MemoryRange) -> NixlLanding:
        """As `Transport.landing`: host memory, or GPU memory, for which registration is tried immediately."""
        if memory.device is not None:
            self._nixl.register(self._nixl.agent(), memory)
        landing = NixlLanding(self, memory)
        for peer in self._peers:
            peer.register(landing)
        self.landings.append(landing)
        return landing

    def forget(self, landing: NixlLanding) -> None:
        """Deregisters a landing. Raises ValueError while a reading into it is in progress."""
        if any(reading.into is landing for peer in self._peers for reading in peer.readings):
            raise ValueError("a landing is closed while a reading into it is in progress")
        for peer in self._peers:
            peer.deregister(landing)
        self.landings.remove(landing)

    def connect(self, told: bytes) -> NixlPeer:
        """As `Transport.connect`. That a peer is unreachable may be detected only by the first read."""
        facts = heard(told, _NixlDescriptor, _KIND, "nixl")
        peer = NixlPeer(self, self._nixl, facts)
        self._peers.add(peer)
        return peer

    def close(self) -> None:
        """As `Transport.close`."""
        self._closed.set()
        if self._helper is not None:
            self._helper.join()
        for made in (*self._peers, *self._areas):
            made.close()

    def _help(self) -> None:
        while not self._closed.wait(LOOK_S):
            for area in tuple(self._areas):
                area.help_on()


def _kind(memory: MemoryRange) -> str:
    return "DRAM" if memory.device is None else "VRAM"
