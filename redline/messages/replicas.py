"""Messages between API replicas over the same workers, the supervisor that starts them, and the workers.

    supervisor -> worker     Replicas   all replicas: where to send deltas
    supervisor -> replica    Roster     all workers and replicas
    replica -> supervisor    Use        heartbeat and usage, four times a second; forwarded to the other replicas
    either -> the other      Ask, Told  a query of an operator or a scraper, and its reply
    supervisor -> replica    Drain      accept no new requests; Stop (`messages.news`) ends the replica

Lists are sent whole whenever they change, so a replica that missed one, or has just started, needs only the newest.
"""

from typing import Literal

from redline.messages.base import Record, WireMessage
from redline.messages.news import Role


class Replica(Record, frozen=True):
    """One start of a replica, as a worker knows it."""

    name: str  # unique for each start; a job contains the name of the replica that sent it
    writer: bytes  # the name under which it numbers its messages (`messages.channel`)
    inbox: str  # the address at which it receives this worker's messages, and no other's


class Replicas(WireMessage, frozen=True):
    """All replicas that exist now. Jobs of other replicas are to be dropped."""

    replicas: tuple[Replica, ...] = ()


class Start(Record, frozen=True):
    """One start of a worker, as a replica knows it."""

    worker: str
    epoch: int
    role: Role
    inbox: str  # the address at which it receives messages
    outbox: str  # the address to which it sends its messages for this replica
    draining: bool = False  # it is about to be replaced: send it no new jobs
    lost: str | None = None  # why it ended; None while it runs
    asked: bool = False  # its end was requested, so none of its jobs caused it


class Roster(WireMessage, frozen=True):
    """The newest start of each worker, and the replicas that exist now."""

    number: int  # increases with each roster
    starts: tuple[Start, ...] = ()
    replicas: tuple[str, ...] = ()  # names of their starts


class AtWorker(Record, frozen=True):
    """A replica's unfinished jobs at a worker that is ready."""

    worker: str
    epoch: int
    jobs: int  # unfinished jobs
    tokens: int  # tokens of their prompts that are still to be computed there


class OfKey(Record, frozen=True):
    """Usage of one API key at a replica since its start."""

    name: str
    running: int
    requests: int
    tokens: int
    left: dict[str, float]  # what is left of each rate limit, as far as the replica knows


class Use(WireMessage, frozen=True):
    """Heartbeat of a replica, with its current usage. Gauges, unless noted."""

    replica: str  # the name of its start
    roster: int  # number of the newest roster that it has received
    ready: bool = False  # a worker serves requests, as far as it knows
    draining: bool = False
    taken: int = 0  # connections handed to it since its start (counter)
    connections: int = 0  # open connections
    busy: int = 0  # requests being read or answered
    waiting: int = 0  # jobs without a first token
    waiting_tokens: int = 0  # of their prompts, and of prompts being tokenized
    running: int = 0  # jobs after their first token
    load: int = 0  # requests that run or wait
    workers: tuple[AtWorker, ...] = ()
    keys: tuple[OfKey, ...] = ()


class ReplicaQuery(WireMessage, frozen=True):
    """A query. `about` is its subject: a request's id."""

    number: int  # chosen by the sender; the reply has the same
    what: Literal["metrics", "status", "request", "reload"]
    about: str = ""


class ReplicaReply(WireMessage, frozen=True):
    """The reply to an `ReplicaQuery`, in the format that its `what` implies."""

    number: int
    body: bytes


class Drain(WireMessage, frozen=True):
    """Accept no new requests. Running requests may finish."""

    reason: str
