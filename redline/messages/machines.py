"""Messages between the server and the agents of its machines (`redline agent`), and the address of a worker's inbox.

Both sides periodically send their whole state, not changes: an agent sends which workers run on its machine, the server
which workers should run there. So lost, duplicated and late messages are harmless, and a restarted side soon has the
whole state.
"""

from redline.messages.base import Record, WireMessage

SAY_S = 1.0  # interval of these messages, on both sides


class Running(Record, frozen=True):
    """One start of a worker on a machine, ordered by one server."""

    name: str
    epoch: int
    ended: str | None = None  # how it ended, such as "with code 1"; None while it runs


class Machine(WireMessage, frozen=True):
    """Heartbeat of an agent: its machine, and the workers that run there."""

    name: str  # of the machine, as in `at` of [[workers]]
    life: str  # random id of this start of the agent
    inbox: str  # the address at which the agent receives messages
    version: str  # of Redline
    server: str = ""  # id of the server that it follows; empty: none yet
    leaving: bool = False  # it starts no more workers, and exits when its last worker has ended
    workers: tuple[Running, ...] = ()


class Order(Record, frozen=True):
    """A worker that should run on a machine."""

    name: str
    epoch: int
    config: bytes  # a `WorkerConfig` as JSON, without the values that only the machine knows
    devices: tuple[int, ...] = ()  # GPUs of that machine; empty: all visible ones


class Orders(WireMessage, frozen=True):
    """All workers that should run on a machine; the agent ends all others that it has started."""

    server: str  # random id of this start of the server
    workers: tuple[Order, ...] = ()


class Refused(WireMessage, frozen=True):
    """The server rejects an agent. `reason` is one line for the agent's operator."""

    reason: str


class Listening(WireMessage, frozen=True):
    """The address of a worker's inbox. Sent as the first message by a worker that chose a free port."""

    inbox: str
