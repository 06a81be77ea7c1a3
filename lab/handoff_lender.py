"""The lending side of `lab.handoffs` as a separate process; it exchanges lines of JSON on stdin and stdout.

It also corrupts some chunks before it offers them, and lets some leases expire before they can be read.
"""

import argparse
import os
import random
import select
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lab.handoff_receiver import HARMS, LEAST, Content, Offered
from redline import clock
from redline.kernels.cpu.checksum import of_memory
from redline.messages.parcel import Ticket
from redline.transport.base import Transport
from redline.transport.choice import open_transport
from redline.transport.ledger import TransferBufferPool

OUTSTANDING = 64  # maximum chunks lent at once


class Taken(msgspec.Struct, frozen=True, tag=True):
    """A receiver has a verified copy."""

    id: int
    epoch: int


class Gone(msgspec.Struct, frozen=True, tag=True):
    """A receiver has left."""

    to: str


class Told(msgspec.Struct, frozen=True, tag=True):
    """The area is allocated."""

    told: bytes


class Lent(msgspec.Struct, frozen=True, tag=True):
    """A chunk is offered to this receiver."""

    ticket: Ticket
    number: int
    to: str
    harm: str | None

    @property
    def offered(self) -> Offered:
        """The offer in the receiver's format."""
        return Offered(self.ticket, self.number, self.harm)


class Ended(msgspec.Struct, frozen=True, tag=True):
    """All chunks have been lent and returned, or not: bytes of the area, and how many of them are free."""

    lent: int
    expired: int
    given_up: int
    taken: int
    taken_late: int  # acknowledgements received after the lease had ended
    size: int
    free: int


class Lines:
    """Messages of one union type, one per line, read as they arrive."""

    def __init__(self, file: int, kind: object) -> None:
        self._file, self._decoder = file, msgspec.json.Decoder(kind)
        self._rest = b""
        self.open = True

    def read(self, seconds: float) -> Iterator[object]:
        """The messages received; waits `seconds` for the first."""
        ready, _, _ = select.select([self._file], [], [], seconds)
        if ready:
            data = os.read(self._file, 1 << 16)
            self.open = bool(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from map(self._decoder.decode, lines)


def say(file: int, message: object) -> None:
    """Write one line."""
    data = msgspec.json.encode(message) + b"\n"
    while data:
        data = data[os.write(file, data) :]


def lend(out: int, transport: Transport, area_bytes: int, most: int, handoffs: int, receivers: int, seed: int) -> None:
    """Lends `handoffs` chunks, and writes messages about them to a file. Raises AssertionError if the
    ledger is wrong.
    """
    draw, content = random.Random(seed + 1), Content(seed)
    area = transport.area(area_bytes)
    lender = TransferBufferPool(area.memory.size)
    say(out, Told(area.told))
    heard = Lines(0, Taken | Gone)
    lent = expired = given_up = taken = late = 0
    while heard.open and (lent < handoffs or lender.lent):
        for message in heard.read(0.0 if lent < handoffs and len(lender.lent) < OUTSTANDING else 0.002):
            match message:
                case Taken(id, epoch):
                    returned = lender.taken(id, epoch)
                    taken, late = taken + returned, late + (not returned)
                case Gone(to):
                    given_up += len(lender.give_up(to))
                case _:
                    raise AssertionError(message)
        expired += len(lender.expire(clock.monotonic()))
        if lent < handoffs and len(lender.lent) < OUTSTANDING:
            size = int(LEAST * (most / LEAST) ** draw.random())
            to = f"receiver {draw.randrange(receivers)}"
            # Most chunks have enough time; some have less than a read takes.
            parcel = lender.lend(size, to, draw.uniform(0.0001, 0.01) if draw.random() < 0.1 else 1.0)
            if parcel is None:
                continue
            address = area.memory.address + parcel.offset
            content.write(address, lent, size)
            checksum = of_memory(address, size, parcel.seed)
            harm = draw.choice(HARMS) if draw.random() < 0.05 else None
            if harm is not None and not content.harm(harm, address, size, draw):
                harm = None
            ticket = lender.offer(parcel, checksum)
            assert ticket is not None
            say(out, Lent(ticket, lent, to, harm))
            lent += 1
            if lent % 500 == 0:
                lender.check()
    lender.check()
    say(out, Ended(lent, expired, given_up, taken, late, lender.size, lender.free))


def main() -> None:
    """One run with the arguments of the command line; it ends when all is done, or with stdin."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("transport", choices=("shared", "nixl"))
    parser.add_argument("folder", type=Path)
    for name in ("area_bytes", "most", "handoffs", "receivers", "seed"):
        parser.add_argument(name, type=int)
    asked = parser.parse_args()
    out = os.dup(1)
    os.dup2(2, 1)  # libraries write to stdout too
    transport = open_transport(asked.transport, asked.folder)
    try:
        lend(out, transport, asked.area_bytes, asked.most, asked.handoffs, asked.receivers, asked.seed)
        sys.stdin.buffer.read()  # the other side still reads offered chunks
    finally:
        transport.close()


if __name__ == "__main__":
    main()
