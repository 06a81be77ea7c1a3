"""What the server and the agents of its machines tell one another (`redline agent`), and where a worker listens.

Both say again and again what holds, and not what has happened: an agent which workers run on its machine, the server
which are to run. So a message that is lost, comes twice or comes late does no harm, and whoever was started anew is
told everything.
"""

from redline.wire.base import Message, Record

SAY_S = 1.0  # between two words of either side


class Running(Record, frozen=True):
    """A worker's start on a machine, by the orders of one server."""

    name: str
    epoch: int
    ended: str | None = None  # how, once it has: "with code 1"


class Machine(Message, frozen=True):
    """An agent says that its machine is there, and what runs on it."""

    name: str  # of the machine, as [[workers]] at has it
    life: str  # drawn at random, once for each start of the agent
    inbox: str  # the address that the agent reads
    version: str  # of Redline
    server: str = ""  # whose orders it follows; empty: nobody's yet
    leaving: bool = False  # it starts no more workers, and ends once none of its own is left
    workers: tuple[Running, ...] = ()


class Order(Record, frozen=True):
    """A worker that is to run on a machine."""

    name: str
    epoch: int
    config: bytes  # a `WorkerConfig` as JSON, but for what only the machine knows
    devices: tuple[int, ...] = ()  # GPUs of that machine; none: all that are visible


class Orders(Message, frozen=True):
    """All workers that are to run on a machine; what else the agent has started, it ends."""

    server: str  # drawn at random, once for each start of the server
    workers: tuple[Order, ...] = ()


class Refused(Message, frozen=True):
    """An agent is not taken in. `reason` is one line for its operator."""

    reason: str


class Listening(Message, frozen=True):
    """Where a worker reads its jobs, as it says first of all where its inbox is a port that was free."""

    inbox: str
