"""The connections of a worker to the workers with which it transfers KV chunks.

A connection over which a read has failed is not used again: the next read connects anew, and the failed one is closed
once the reads of other jobs over it have ended, since the other worker's memory stays mapped while it is open.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from redline.messages.channel import Outbox, SocketOutbox
from redline.messages.job import PagesFrom
from redline.transport.base import Peer
from redline.worker.kv_transfer.prompts import KvPath
from redline.worker.transfer_paths import connect


class KvConnection(NamedTuple):
    """A connection to one start of another worker."""

    peer: Peer | None  # None: not connected for reads
    outbox: Outbox
    way: str = ""  # the transport of `peer`


class KvConnections:
    """Opens connections as they are needed. outbox_of: opens an outbox to another worker's inbox, by its address."""

    def __init__(self, ways: Mapping[str, KvPath], outbox_of: Callable[[str], Outbox]) -> None:
        """ways: by their names, best first."""
        self.outbox_of = outbox_of
        self._ways = ways
        self._open: dict[tuple[str, int], KvConnection] = {}  # by name and epoch of the worker
        self._failed: list[Peer] = []  # to be closed once no read uses them

    def to(self, other: PagesFrom, *, reads: bool) -> KvConnection:
        """The connection to another worker, opened if needed. Raises TransferFailed if its area cannot be reached, or
        ConfigError."""
        of = (other.worker, other.epoch)
        known = self._open.get(of)
        if known is None:
            known = self._open[of] = KvConnection(None, self.outbox_of(other.inbox))
        if reads and known.peer is None:
            way, peer = connect(tuple(self._ways.values()), other.area, other.worker)
            known = self._open[of] = known._replace(peer=peer, way=way.name)
        return known

    def peer_of(self, other: PagesFrom) -> Peer | None:
        """The open connection for reads from a worker."""
        known = self._open.get((other.worker, other.epoch))
        return None if known is None else known.peer

    def failed(self, other: PagesFrom, peer: Peer | None) -> None:
        """A read over a connection has failed, perhaps permanently."""
        of = (other.worker, other.epoch)
        if peer is not None and (known := self._open.get(of)) is not None and known.peer is peer:
            self._open[of] = known._replace(peer=None)
            self._failed.append(peer)
            self.close_failed()

    def close_failed(self) -> None:
        """Closes failed connections that no read uses any more."""
        if self._failed:
            used = [arrival.peer for way in self._ways.values() for arrival in way.arrivals.under_way]
            for peer in [one for one in self._failed if all(one is not other for other in used)]:
                self._failed.remove(peer)
                peer.close()

    def drop(self, worker: str, epoch: int) -> None:
        """Closes the connection to a worker that went down."""
        if (known := self._open.pop((worker, epoch), None)) is not None:
            if known.peer is not None:
                known.peer.close()
            if isinstance(known.outbox, SocketOutbox):
                known.outbox.close()
        self.close_failed()

    def close(self) -> None:
        """Closes all connections."""
        for way in self._ways.values():
            way.transport.close()
        for known in self._open.values():
            if isinstance(known.outbox, SocketOutbox):
                known.outbox.close()
