"""Several replicas of the API over the same workers: what they, the workers and whoever starts all of them say.

    supervisor -> worker     Replicas   those that there are: whom it tells what comes of their jobs
    supervisor -> replica    Roster     the workers and the replicas that there are
    replica -> supervisor    Use        what it has under way, four times a second; the others are handed it on
    either -> the other      Ask, Told  what an operator or a scraper wants to know, and what came of it
    supervisor -> replica    Drain      take nothing new; Stop (`wire.news`) ends it

A list is told whole whenever it changes: who has missed one, or begins, needs no other.
"""

from typing import Literal

from redline.wire.base import Message, Record
from redline.wire.news import Role


class Replica(Record, frozen=True):
    """One start of a replica, as a worker knows it."""

    name: str  # of the start: no two are alike, and a job says which has sent it
    writer: bytes  # what it numbers its messages under (`wire.channel`)
    inbox: str  # the address at which it hears this worker, and nobody else


class Replicas(Message, frozen=True):
    """All replicas that there are now. What others have sent is wanted by nobody any more."""

    replicas: tuple[Replica, ...] = ()


class Start(Record, frozen=True):
    """One start of a worker, as a replica knows it."""

    worker: str
    epoch: int
    role: Role
    inbox: str  # the address that it reads
    outbox: str  # the address that it writes to, for this replica alone
    draining: bool = False  # it is to be replaced: nothing new goes to it
    lost: str | None = None  # why it has ended
    asked: bool = False  # it was to end, which is none of its jobs' doing


class Roster(Message, frozen=True):
    """The newest start of each worker, and the replicas that there are now."""

    number: int  # grows with each
    starts: tuple[Start, ...] = ()
    replicas: tuple[str, ...] = ()  # names of their starts


class AtWorker(Record, frozen=True):
    """What a replica has sent to a worker that it has heard to be ready."""

    worker: str
    epoch: int
    jobs: int  # that have not ended
    tokens: int  # of their prompts, that are still to be computed there


class OfKey(Record, frozen=True):
    """What requests under one name have used at a replica since it began."""

    name: str
    running: int
    requests: int
    tokens: int
    left: dict[str, float]  # of each limit that fills with time, as far as the replica knows


class Use(Message, frozen=True):
    """What a replica has under way, and that it lives. Counts of now, but where it is said."""

    replica: str  # the name of its start
    roster: int  # the number of the newest that it has heard
    ready: bool = False  # a worker answers, as far as it knows
    draining: bool = False
    taken: int = 0  # connections that it has been handed, since it began
    connections: int = 0  # that are open
    busy: int = 0  # requests that are read or answered
    waiting: int = 0  # jobs without a first token
    waiting_tokens: int = 0  # of their prompts, and of those that are being made
    running: int = 0  # jobs behind their first token
    load: int = 0  # requests that are answered or wait
    workers: tuple[AtWorker, ...] = ()
    keys: tuple[OfKey, ...] = ()


class Ask(Message, frozen=True):
    """A question. `about` is what it is about: a request's id."""

    number: int  # of whoever asks
    what: Literal["metrics", "status", "request", "reload"]
    about: str = ""


class Told(Message, frozen=True):
    """The answer to a question, in the words of what was asked."""

    number: int
    body: bytes


class Drain(Message, frozen=True):
    """Take no new requests. What runs may end."""

    reason: str
