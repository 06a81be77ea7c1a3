"""Many KV transfers under all kinds of faults, with each byte compared with the one sent.

    python -m lab.handoffs --transport memory --handoffs 1000000
    python -m lab.handoffs --transport shared --handoffs 10000
    python -m lab.handoffs --transport nixl --handoffs 10000
    UCX_TLS=tcp,self python -m lab.handoffs --transport nixl --handoffs 10000 --stops 0

`memory` is one process, tiny chunks and a simulated clock: reads that are slow, torn, dropped, failing or corrupted,
leases that expire during a read, regions that are reused during it, receivers that leave, and receivers that are
wrongly considered gone. `shared` and `nixl` are two processes, chunks up to 1 MiB, real time, and an owner that is
stopped several times for 0.7 s, longer than the timeout of a read (not over NIXL and TCP: docs/kv_transfer.md).

What must hold: no chunk with a wrong byte is accepted, every injected fault is detected, no chunk with right bytes is
refused, and every byte of every area is returned. Exits with 1 otherwise. The result is saved as JSON, with the speed
of reads of 4.5 MB, verified and not, compared with a plain copy of the same size measured in alternation.
"""

import argparse
import ctypes
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lab.handoff_lender import Ended, Gone, Lent, Lines, Taken, Told, lend, say
from lab.handoff_receiver import HARMS, LEAST, Content, Harm, Offered, Receiver, Tally
from lab.program import count, output, program
from redline import clock
from redline.bench.record import provenance
from redline.errors import ConfigError
from redline.kernels.cpu import native
from redline.kernels.cpu.checksum import of_memory
from redline.progress import Working
from redline.transport.base import RemoteRead, Transport
from redline.transport.choice import TransportName, open_transport
from redline.transport.ledger import KvChunk, TransferBufferPool
from redline.transport.memory import Disturbance, MemoryTransport, host_memory

RECEIVERS = 4
TICK_S = 0.001  # of the simulated clock within one process
PIECE = 61 * 73_728  # bytes: a page of 64 tokens of Kimi K2.6, all 61 layers, bf16
ROUNDS = 9
SILENCE_S = 30.0  # without a message of the lender, or the end of a chunk


def within_one_process(handoffs: int, seed: int, working: Working) -> tuple[Tally, dict[str, int]]:
    """-> the outcomes of the chunks, and the ledger's own counts. Raises AssertionError if a ledger is wrong."""
    draw, content, tally = random.Random(seed), Content(seed), Tally()
    now = 0.0
    link = _Link(draw, content)
    transport = MemoryTransport(link.disturb, lambda: now)
    area = transport.area(64 << 10)
    lender = TransferBufferPool(area.memory.size, lambda: now)

    def receiver() -> Receiver:
        return Receiver(transport, area.told, 64 << 10, content, tally, 40 * TICK_S, link.through)

    live = {f"receiver {n}": receiver() for n in range(RECEIVERS)}
    shadows: list[Receiver] = []  # considered gone, but still reading
    filling: list[tuple[KvChunk, int]] = []
    book = dict.fromkeys(("lent", "expired", "given up", "taken", "taken late", "no room", "dropped while filled"), 0)

    def taken(of: Receiver) -> None:
        for ticket in of.turn():
            book["taken" if lender.taken(ticket.id, ticket.epoch) else "taken late"] += 1

    ticks = 0
    while book["lent"] < handoffs or filling or shadows or any(one.busy for one in live.values()):
        ticks += 1
        now += TICK_S
        for _ in range(draw.randrange(12) if book["lent"] < handoffs else 0):
            size = int(LEAST * 256 ** draw.random())
            parcel = lender.lend(
                size, draw.choice([*live]), TICK_S * (draw.randrange(1, 6) if draw.random() < 0.1 else 60)
            )
            if parcel is None:
                book["no room"] += 1
                break
            content.write(area.memory.address + parcel.offset, book["lent"], size)
            filling.append((parcel, book["lent"]))
            book["lent"] += 1
        still: list[tuple[KvChunk, int]] = []
        for parcel, number in filling:
            if draw.random() < 0.3:
                still.append((parcel, number))
            elif draw.random() < 0.01:
                lender.drop(parcel)
                book["dropped while filled"] += 1
            else:
                address = area.memory.address + parcel.offset
                assert content.is_at(address, number, parcel.size), "two chunks overlap"
                ticket = lender.offer(parcel, of_memory(address, parcel.size, parcel.seed))
                if ticket is not None and parcel.to in live:
                    live[parcel.to].offer(Offered(ticket, number))
        filling = still
        for one in (*live.values(), *shadows):
            taken(one)
        book["expired"] += len(lender.expire(now))
        for gone in [one for one in shadows if not one.busy]:
            gone.close()
            shadows.remove(gone)
        if draw.random() < 0.02:
            name = draw.choice([*live])
            book["given up"] += len(lender.give_up(name))
            if draw.random() < 0.5:
                live[name].leave()
            else:
                shadows.append(live[name])
                live[name] = receiver()
        if ticks % 500 == 0:
            lender.check()
            working.show(min(book["lent"], handoffs), handoffs)
    now += 3600.0
    book["expired"] += len(lender.expire(now))
    for one in live.values():
        one.close()
    lender.check()
    transport.close()
    return tally, book | {"bytes of the area": lender.size, "bytes that came back": lender.free}


class _Link:
    """A link that adds faults to some reads, and tells each receiver which fault it adds to which."""

    def __init__(self, draw: random.Random, content: Content) -> None:
        self._draw, self._content = draw, content
        self._last: Harm | None = None

    def disturb(self, offset: int, count: int) -> Disturbance:
        """The fault of the read that begins."""
        draw, self._last = self._draw, None
        polls, torn, chance = draw.randrange(6), draw.random() < 0.3, draw.random()
        if chance < 0.01:
            self._last = Harm("dropped")
            return Disturbance(polls, torn, dropped=True)
        if chance < 0.02:
            self._last = Harm("failing")
            return Disturbance(polls, torn, failing=True)
        if chance > 0.07:
            return Disturbance(polls, torn)
        harm = self._last = Harm(draw.choice(HARMS))

        def change(address: int, count: int) -> None:
            harm.happened = self._content.harm(harm.kind, address, count, draw)

        return Disturbance(polls, torn, change=change)

    def through(self, begin: Callable[[], RemoteRead]) -> tuple[RemoteRead, Harm | None]:
        """Begins a read; -> the read and its fault."""
        reading = begin()
        return reading, self._last


def between_two(
    name: TransportName, handoffs: int, seed: int, stops: int, working: Working
) -> tuple[Tally, dict[str, int]]:
    """As `within_one_process`, with the lender in another process.

    Raises ConfigError if the transport is not available, and AssertionError if a ledger is wrong or a message does not
    arrive.
    """
    draw, content, tally = random.Random(seed), Content(seed), Tally()
    with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
        transport = open_transport(name, Path(folder) / "areas")
        numbers = 16 << 20, 1 << 20, handoffs, RECEIVERS, seed
        command = [sys.executable, "-m", lend.__module__, name, str(Path(folder) / "areas"), *map(str, numbers)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            heard, to = Lines(process.stdout.fileno(), Told | Lent | Ended), process.stdin.fileno()
            ended = _receive(transport, heard, to, process.pid, tally, content, draw, handoffs, stops, working)
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
            transport.close()
    book = {"lent": ended.lent, "expired": ended.expired, "given up": ended.given_up, "taken": ended.taken}
    counts = {"taken late": ended.taken_late, "bytes of the area": ended.size, "bytes that came back": ended.free}
    return tally, book | counts


def _receive(
    transport: Transport, heard: Lines, to: int, lender: int, tally: Tally, content: Content, draw: random.Random,
    handoffs: int, stops: int, working: Working,
) -> Ended:  # fmt: skip
    receivers: dict[str, Receiver] = {}
    ended: Ended | None = None
    stopped, quiet = 0, clock.monotonic()
    deadline_s = 0.5 if stops else 20.0
    lent = leaves = 0
    while ended is None or any(one.busy for one in receivers.values()):
        for message in heard.read(0.0 if any(one.busy for one in receivers.values()) else 0.05):
            quiet = clock.monotonic()
            match message:
                case Told(told):
                    for n in range(RECEIVERS):
                        receivers[f"receiver {n}"] = Receiver(transport, told, 2 << 20, content, tally, deadline_s)
                case Lent():
                    receivers[message.to].offer(message.offered)
                    lent += 1
                case Ended():
                    ended = message
                case _:
                    raise AssertionError(message)
        moved = False
        for one in receivers.values():
            for ticket in one.turn():
                say(to, Taken(ticket.id, ticket.epoch))
                moved = True
        if moved:
            quiet = clock.monotonic()
        else:
            clock.sleep(0.0002)
        if lent >= handoffs * (leaves + 1) // 201 and leaves < 200:
            leaves += 1
            name = draw.choice([*receivers])
            say(to, Gone(name))
            if draw.random() < 0.5:  # otherwise the lender does not know it
                receivers[name].leave()
        if ended is None and lent >= handoffs * (stopped + 1) // (stops + 1) and stopped < stops:
            stopped += 1
            os.kill(lender, signal.SIGSTOP)
            until = clock.monotonic() + 0.7
            while clock.monotonic() < until:  # reads continue without their source, as far as possible
                for one in receivers.values():
                    for ticket in one.turn():
                        say(to, Taken(ticket.id, ticket.epoch))
                clock.sleep(0.001)
            os.kill(lender, signal.SIGCONT)
        assert clock.monotonic() - quiet < SILENCE_S, "no chunk arrives and none ends"
        assert heard.open, "the lender has ended"
        working.show(lent, handoffs)
    for one in receivers.values():
        one.close()
    return ended


def speed(name: TransportName | Literal["memory"]) -> dict[str, float]:
    """GB/s of reads of 4.5 MB from memory that was just written, in sequence: medians of rounds in which each kind is
    measured once. Both ends are in this process. Raises ConfigError if the transport is not available.
    """
    into, source = host_memory(PIECE), host_memory(PIECE)
    content = Content(0)
    content.write(source.address, 0, PIECE)
    with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
        owner = MemoryTransport() if name == "memory" else open_transport(name, Path(folder) / "areas")
        ours = MemoryTransport() if name == "memory" else open_transport(name, Path(folder) / "areas")
        area = owner.area(PIECE)
        content.write(area.memory.address, 0, PIECE)
        ours.landing(into)
        peer = ours.connect(area.told)

        def read() -> None:
            reading = peer.read(0, into.address, PIECE, 20.0)
            while not reading.done():
                clock.sleep(0.0002)

        def verified() -> None:
            read()
            assert of_memory(into.address, PIECE, 1) == expected

        def checksum() -> None:
            of_memory(into.address, PIECE, 1)

        def copy() -> None:
            ctypes.memmove(into.address, source.address, PIECE)

        expected = of_memory(source.address, PIECE, 1)
        tried = {"read": read, "read and verified": verified, "checksum alone": checksum, "plain copy": copy}
        seconds: dict[str, list[float]] = {what: [] for what in tried}
        for _ in range(ROUNDS + 1):
            for what, work in tried.items():
                began = clock.perf_counter()
                for _ in range(8):
                    work()
                seconds[what].append((clock.perf_counter() - began) / 8)
        ours.close()
        owner.close()
    rates = {what: PIECE / statistics.median(each[1:]) / 1e9 for what, each in seconds.items()}
    ratio = statistics.median(c / r for r, c in zip(seconds["read"][1:], seconds["plain copy"][1:], strict=True))
    return {**{what: round(rate, 3) for what, rate in rates.items()}, "read / plain copy": round(ratio, 3)}


def main() -> int:
    """Runs with the arguments of the command line, and writes JSON. -> 1 if a check fails.

    Raises ConfigError without the CPU kernels, which compute the checksums, or without the transport.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("memory", "shared", "nixl"), default="memory")
    parser.add_argument("--handoffs", type=count, default=10_000)
    parser.add_argument("--stops", type=int, default=10, help="how often the owner's process is stopped")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=output, help="default: runs/handoffs-TRANSPORT.json")
    asked = parser.parse_args()
    if native.library() is None:
        raise ConfigError(f"checksums need the CPU kernels: {native.why_not()}")
    began = clock.perf_counter()
    with Working(f"handoffs over {asked.transport}") as working:
        if asked.transport == "memory":
            tally, book = within_one_process(asked.handoffs, asked.seed, working)
        else:
            tally, book = between_two(asked.transport, asked.handoffs, asked.seed, asked.stops, working)
    seconds = clock.perf_counter() - began
    problems = tally.problems()
    if book["bytes that came back"] != book["bytes of the area"]:
        problems.append("some of the area did not come back")
    outcome = {name: value for name, value in vars(tally).items() if isinstance(value, int)}
    result: dict[str, Any] = {
        "transport": asked.transport,
        "handoffs": book["lent"],
        "seed": asked.seed,
        "stops of the owner": asked.stops if asked.transport != "memory" else 0,
        "outcome": outcome,
        "faults put in": dict(sorted(tally.injected.items())),
        "faults caught": dict(sorted(tally.caught.items())),
        "book": book,
        "problems": problems,
        "seconds": round(seconds, 1),
        "GB/s of 4.5 MB": speed(asked.transport),
        **({"UCX_TLS": os.environ.get("UCX_TLS", "UCX's choice")} if asked.transport == "nixl" else {}),
        "from": provenance("msgspec", "numpy", *(["nixl"] if asked.transport == "nixl" else [])),
    }
    print(json.dumps({name: value for name, value in result.items() if name != "from"}, indent=1))
    save = asked.save or output(f"runs/handoffs-{asked.transport}.json")
    save.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if problems else 0


def _memory_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    program(main, heard=False)
