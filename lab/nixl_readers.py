"""Whether an owner of memory survives when processes that read it over NIXL are killed: memory of a GPU, or of the host
on a CPU.

    python -m lab.nixl_readers [--devices 0 1] [--owners 3] [--readers 4] [--device cuda] [--save FILE]

Over TCP some owners end (docs/kv_transfer.md). Here an owner, a separate process, has 64 MiB that may be read over
`nixl`. Readers, also processes, read all of it, count its wrong bytes, and read on in pieces of 4 MiB until they are
killed, one after another. Then one more reads all, and ends as a worker does. The test is repeated with further owners.
It takes about 20 s for each on GPUs, and every wait is bounded.

devices: of owners and readers, by CUDA numbers; one number: both share it.
"""

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import torch

from lab.program import count, output, program
from redline import clock
from redline.bench.record import provenance
from redline.errors import RedlineError
from redline.worker.engine import pick_device
from redline.worker.transfer_paths import Carrier, carriers

AREA = 64 << 20
PIECE = 4 << 20
AT_ONCE = 4  # reads in flight of one reader
BYTE = 7
READ_S = 10.0
LINE_S = 60.0  # timeout for a process's expected line
END_S = 20.0
BETWEEN_S = 0.05  # between the ends of two readers
NOTICED_S = 2.0  # within which an owner that does not survive its readers has ended: over TCP in less than one

Role = Literal["owner", "reader", "last"]


def best(device: str) -> Carrier:
    """The best transport path over NIXL that a worker has."""
    return carriers("nixl", None, pick_device(device))[0]


def own(device: str) -> None:
    """The owner's process: until its input ends."""
    carrier = best(device)
    area = carrier.transport.area(AREA)
    space_B = carrier.memory.tensor(area.memory)
    space_B.fill_(BYTE)
    assert int((space_B != BYTE).sum()) == 0
    print("on", torch.cuda.get_device_name() if space_B.is_cuda else "a CPU", flush=True)
    print("told", carrier.name, area.told.hex(), flush=True)
    sys.stdin.read()
    carrier.transport.close()


def read(device: str, told: bytes, *, last: bool) -> None:
    """A reader's process. last: it ends by itself."""
    carrier = best(device)
    into = carrier.memory.make(AREA)
    into_B = carrier.memory.tensor(into)
    carrier.transport.landing(into)
    peer = carrier.transport.connect(told)
    readings = deque([peer.read(0, into.address, AREA, READ_S)])
    while not readings[0].done():
        pass
    print("wrong", int((into_B != BYTE).sum()), flush=True)
    if last:
        carrier.transport.close()
        return
    for at in itertools.cycle(range(0, AREA, PIECE)):
        readings.append(peer.read(at, into.address + at, PIECE, READ_S))
        while len(readings) > AT_ONCE:
            if readings[0].done():
                readings.popleft()


class Process:
    """One of the processes. `device`: the only CUDA device that it sees."""

    def __init__(self, role: Role, asked: argparse.Namespace, device: int, told: str = "") -> None:
        environment = dict(os.environ)
        if asked.device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = str(device)
        words = ["--as", role, "--device", asked.device, "--told", told]
        command = [sys.executable, "-m", "lab.nixl_readers", *words]
        self.role = role
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def hear(self, word: str) -> list[str]:
        """The words after `word` in its output. Raises RedlineError if it ends before, or prints
        nothing for a minute.
        """
        timer = threading.Timer(LINE_S, self.process.kill)
        timer.start()
        assert self.process.stdout is not None
        for line in iter(self.process.stdout.readline, ""):  # NIXL may have printed other lines
            if line.startswith(word):
                timer.cancel()
                return line.split()[1:]
        timer.cancel()
        raise RedlineError(f"the {self.role} has ended with code {self.process.wait()}, and never said `{word}`")

    def end(self) -> dict[str, Any]:
        """Closes its input and waits: its exit code (None: it had to be killed) and the seconds that took."""
        assert self.process.stdin is not None
        began = clock.monotonic()
        self.process.stdin.close()
        try:
            code: int | None = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            code = None
            self.kill()
        return {"code": code, "seconds": round(clock.monotonic() - began, 2)}

    def kill(self) -> None:
        """Kill it at once (SIGKILL), if it has not ended."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def one_owner(asked: argparse.Namespace) -> dict[str, Any]:
    """One owner, its readers and the result."""
    owning, reading = asked.devices[0], asked.devices[-1]
    owner = Process("owner", asked, owning)
    processes = [owner]
    try:
        on = " ".join(owner.hear("on "))
        way, told = owner.hear("told")
        readers = [Process("reader", asked, reading, told) for _ in range(asked.readers)]
        processes += readers
        row: dict[str, Any] = {
            "on": on,
            "way": way,
            "wrong_bytes": [int(reader.hear("wrong")[0]) for reader in readers],
        }
        for reader in readers:
            if reader.process.poll() is not None:
                raise RedlineError(f"a reader has ended by itself with code {reader.process.returncode}")
            reader.kill()
            clock.sleep(BETWEEN_S)
        clock.sleep(NOTICED_S)
        row["owner_lives"] = owner.process.poll() is None
        if not row["owner_lives"]:
            return {**row, "owner_ended": {"code": owner.process.returncode}}
        last = Process("last", asked, reading, told)
        processes.append(last)
        row["wrong_bytes_of_the_last"] = int(last.hear("wrong")[0])
        row["last_ended"] = last.end()
        row["owner_ended"] = owner.end()
        return row
    finally:
        for process in processes:
            process.kill()


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[0, 1], help="of owners and readers")
    parser.add_argument("--owners", type=count, default=3)
    parser.add_argument("--readers", type=count, default=4, help="at each owner")
    parser.add_argument("--device", default=None, help="cpu or cuda (default: the GPU, if there is one)")
    parser.add_argument("--save", type=output, default=None)
    parser.add_argument("--as", dest="role", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--told", default="", help=argparse.SUPPRESS)
    return parser


def main(said: Sequence[str] | None = None) -> None:
    """Runs the program with `said` instead of the command line's words.

    Raises RedlineError if a process ends that was not killed, unless a reader's death explains it.
    """
    asked = arguments().parse_args(said)
    if asked.role == "owner":
        own(asked.device)
        return
    if asked.role is not None:
        read(asked.device, bytes.fromhex(asked.told), last=asked.role == "last")
        return
    asked.device = pick_device(asked.device).type
    rows: list[dict[str, Any]] = []
    for _ in range(asked.owners):
        rows.append(one_owner(asked))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    record = {
        **provenance("torch", "nixl"),
        "devices": asked.devices if asked.device == "cuda" else "CPU",
        "ucx_tls": os.environ.get("UCX_TLS"),
        "readers_killed_at_each": asked.readers,
        "owners": len(rows),
        "owners_that_live": sum(row["owner_lives"] for row in rows),
        "each": rows,
    }
    text = json.dumps(record, indent=1) + "\n"
    if asked.save is not None:
        asked.save.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    program(main, heard=False)  # each printed row shows progress
