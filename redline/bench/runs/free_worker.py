"""A worker's process without a model: it gives every running job one token a turn, always the same, at once.

It stands in a worker's place where the front end is measured (`replicas.py`): it reads its config as
`redline.worker.main` does, has that one's heart and hearers, and hears jobs and speaks deltas over the same sockets.
"""

import os
import signal
import sys
import threading

import msgspec

from redline.wire.channel import SocketInbox, SocketOutbox
from redline.wire.delta import Delta
from redline.wire.job import Abort, Job, JobId
from redline.wire.news import Beat, Knock, Ready, Stop
from redline.wire.replicas import Replicas
from redline.worker.config import WorkerConfig
from redline.worker.hearers import Hearers
from redline.worker.pulse import Heart, Pulse

STOP_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
TOKEN = 1000
READY = Ready(max_model_len=1 << 17, pages=1 << 14, fingerprint="free", summary="a worker without a model")


def serve(inbox: SocketInbox, hearers: Hearers, pulse: Pulse) -> None:
    """Answers jobs until a Stop comes. Raises AssertionError for a message that no such worker is sent."""
    left: dict[JobId, int] = {}  # tokens of each running job
    while True:
        pulse.waits = not left
        for message in inbox.drain(wait=not left):
            match message:
                case Job():
                    if hearers.takes(message):
                        left[message.id] = message.sampling.max_tokens
                case Abort():
                    left.pop(message.job, None)
                    hearers.forget(message.job)
                case Knock():
                    pulse.knocks[message.replica] = message.number
                    hearers.put_to(message.replica, message)
                case Replicas():
                    _, gone = hearers.follow(message.replicas)
                    for id in (id for replica in gone for id in hearers.jobs_of(replica)):
                        left.pop(id, None)
                        hearers.forget(id)
                    pulse.replicas = message.replicas
                case Stop():
                    return
                case other:
                    raise AssertionError(other)
        pulse.turns += 1
        for id, tokens in list(left.items()):
            if tokens > 1:
                left[id] = tokens - 1
                hearers.put(Delta(job=id, tokens=(TOKEN,)))
            else:
                del left[id]
                hearers.put(Delta(job=id, tokens=(TOKEN,), finish="length"))


def main() -> None:
    """The process: as long as its parent lives, and tells it not to stop."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    told = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    with (
        SocketInbox(told.inbox) as inbox,
        SocketOutbox(told.outbox) as outbox,
        SocketOutbox(told.outbox) as beats,
        Hearers(outbox) as hearers,
    ):
        pulse = Pulse()
        with Heart(pulse, beats, 1, sys.exit):
            hearers.put(READY)
            hearers.put(Beat())
            serve(inbox, hearers, pulse)


def _leave_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
