"""The rate at which a second process's memory is read, by chunk size: over `peer` between two GPUs, over `shared` on a
CPU.

    python -m lab.peer_pieces [--devices 0 1] [--mib 1 4 16 64] [--layers 8] [--pages 448]
        [--transport auto] [--device cuda] [--save FILE]

An owner, a separate process, has random pages of Kimi's width, gathers them into KV chunks of each size, and
lends them; this process is the reader. For each size it measures, in GB/s, how fast the owner gathers chunks and
computes checksums; how fast chunks are read, all offered at once; and how fast they are read, verified and placed into
pages, as in a worker (`kv_transfer/receiver.py`), without other load. These are compared with one read of the whole
area and, between two GPUs that this process sees, torch's own peer copy of the same size. After each size all pages are
compared with the owner's.

devices: of owner and reader, by CUDA numbers; one number: both share it. transport: as `[handoff] transport`; the best
of its paths is measured. `nixl` between two GPUs is from GPU memory to GPU memory, and stops with NIXL's reason if that
is not possible.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import msgspec
import torch
from torch import Tensor

from lab.program import count, output, program
from redline import clock
from redline.bench.record import provenance
from redline.errors import RedlineError
from redline.messages.handoff import ChunkReady
from redline.messages.job import PAGE_TOKENS, JobId
from redline.run.kv import KvPool
from redline.run.kv_chunks import KvChunkLayout
from redline.transport.base import Peer
from redline.transport.choice import TransportName
from redline.worker.engine import pick_device
from redline.worker.kv_transfer.receiver import READ_S, KvReceiver, ReceiveBudget
from redline.worker.kv_transfer.sender import KvSender
from redline.worker.transfer_paths import Carrier, carriers

KV_WIDTH = 576  # bf16 numbers of a position in a layer, of Kimi
ROUNDS = 5  # of each measurement; the first is a warm-up and does not count
MIB = 1 << 20


class Lent(msgspec.Struct, frozen=True):
    """All pages, gathered into chunks of one size. area: the area's address. seconds: time of gathering."""

    area: bytes
    gpu: str
    offers: tuple[ChunkReady, ...]
    seconds: float


def pages_of(layers: int, pages: int, device: torch.device, seed: int | None) -> KvPool:
    """Pages of Kimi's width as in a worker, without a model. seed: of random contents; None: zeros."""
    planes = torch.zeros(layers, pages, PAGE_TOKENS, KV_WIDTH, dtype=torch.bfloat16)
    if seed is not None:  # drawn by the host, so that both processes have the same contents on any GPUs
        drawn = torch.Generator().manual_seed(seed)
        planes.view(torch.int16).random_(generator=drawn)
    nothing = torch.empty(pages, PAGE_TOKENS, 0, dtype=torch.bfloat16, device=device)
    tails = torch.empty(pages, 0, dtype=torch.bfloat16, device=device)
    return cast("KvPool", SimpleNamespace(planes=planes.to(device), draft=nothing, tails=tails))


def settle(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def owner(asked: argparse.Namespace) -> None:
    """The owner's process: for each number on its standard input it lends all pages in chunks of that many MiB."""
    device = pick_device(asked.device)
    carrier = carriers(asked.transport, asked.folder, device)[0]
    kv = pages_of(asked.layers, asked.pages, device, seed=1)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    for line in sys.stdin:
        parcels = KvChunkLayout(kv, int(line) * MIB)
        size = kv.planes.nbytes + 64 * MIB
        departures: KvSender[None] = KvSender(parcels, carrier.transport, carrier.memory, size, clock.monotonic)
        offers, seconds = tuple[ChunkReady, ...](), 0.0
        for _ in range(ROUNDS):
            for parcel in departures.lender.lent:
                departures.lender.taken(parcel.id, parcel.epoch)
            settle(device)
            began = clock.perf_counter()
            offers = gathered(departures, parcels, asked.pages)
            seconds = clock.perf_counter() - began
        lent = Lent(departures.area.told, gpu, offers, seconds)
        sys.stdout.buffer.write(msgspec.json.encode(lent) + b"\n")
        sys.stdout.buffer.flush()
    carrier.transport.close()


def gathered(departures: KvSender[None], parcels: KvChunkLayout, pages: int) -> tuple[ChunkReady, ...]:
    """Gathers all pages into chunks."""
    offers: list[ChunkReady] = []
    pieces = list(parcels.pieces(0, pages * PAGE_TOKENS, pages * PAGE_TOKENS))
    for piece in pieces:
        if not departures.fill(None, piece, range(pages), ""):
            raise RedlineError("the owner's area has no room for all pages: its numbers are wrong")
    while len(offers) < len(pieces):
        for _, piece, ticket in departures.filled():
            assert ticket is not None, "the reader must not have left"
            offers.append(ChunkReady(job=JobId("pages"), number=len(offers), piece=piece, ticket=ticket))
    return tuple(offers)


class Reader:
    """The reading side: its transport and its pages."""

    def __init__(self, carrier: Carrier, layers: int, pages: int, device: torch.device) -> None:
        self.carrier, self.device, self.pages = carrier, device, pages
        self.kv = pages_of(layers, pages, device, seed=None)
        self.right: Tensor = pages_of(layers, pages, device, seed=1).planes
        self.into = carrier.memory.make(self.right.nbytes + 64 * MIB)
        carrier.transport.landing(self.into)

    def read(self, peer: Peer, spans: Sequence[tuple[int, int]]) -> float:
        """Seconds until all spans of the area (offset, bytes) have been read, all requested at once."""
        settle(self.device)
        began = clock.perf_counter()
        readings = deque(peer.read(at, self.into.address + at, size, READ_S) for at, size in spans)
        while readings:
            if readings[0].done():
                readings.popleft()
        return clock.perf_counter() - began

    def place(self, peer: Peer, arrivals: KvReceiver[None], offers: Sequence[ChunkReady]) -> float:
        """Seconds until all chunks are verified and in their pages, which differ from the owner's pages."""
        waiting, pages = deque(offers), range(self.pages - 1, -1, -1)
        settle(self.device)
        began = clock.perf_counter()
        while waiting or arrivals.under_way:
            for arrival in list(arrivals.under_way):
                arrivals.take(arrival, pages)
            while waiting and arrivals.read(None, waiting[0], peer):
                waiting.popleft()
        settle(self.device)
        return clock.perf_counter() - began

    def row(self, mib: int, lent: Lent) -> dict[str, Any]:
        """The figures of one size."""
        transport, memory = self.carrier.transport, self.carrier.memory
        parcels, peer = KvChunkLayout(self.kv, mib * MIB), transport.connect(lent.area)
        budget = ReceiveBudget(1.0, clock.monotonic)
        arrivals: KvReceiver[None] = KvReceiver(parcels, transport, memory, budget, clock.monotonic)
        spans = [(offer.ticket.offset, offer.ticket.size) for offer in lent.offers]
        size = sum(each for _, each in spans)
        whole = several(lambda: self.read(peer, [(0, size)]), size)
        row: dict[str, Any] = {
            "most_mib": mib,
            "parcels": len(spans),
            "bytes_each": max(each for _, each in spans),
            "bytes": size,
            "gathered_gb_s": gb_s(size, lent.seconds),
            "whole_area_read_gb_s": whole,
            "read_gb_s": several(lambda: self.read(peer, spans), size),
            "placed_gb_s": several(lambda: self.place(peer, arrivals, lent.offers), size),
            "wrong_bytes": self.check(),
            "torch_copy_gb_s": torch_copy(size, self.device),
        }
        plain = (row["torch_copy_gb_s"] or whole)["median"]
        row["read_over_plain"] = round(row["read_gb_s"]["median"] / plain, 3)
        row["placed_over_plain"] = round(row["placed_gb_s"]["median"] / plain, 3)
        peer.close()
        return row

    def check(self) -> int:
        """Bytes of pages that differ from the owner's; the pages are set to zero afterwards."""
        there = self.kv.planes.flip(1).view(torch.int16)
        wrong = 2 * int((there != self.right.view(torch.int16)).sum())
        self.kv.planes.zero_()
        return wrong


def several(measure: Callable[[], float], size: int) -> dict[str, float]:
    """GB/s, the median and the best of several rounds after a warm-up round."""
    seconds = [measure() for _ in range(ROUNDS + 1)][1:]
    return {"median": gb_s(size, statistics.median(seconds)), "best": gb_s(size, min(seconds))}


def gb_s(size: int, seconds: float) -> float:
    """GB/s of `size` bytes in `seconds`."""
    return round(size / seconds / 1e9, 2)


def torch_copy(size: int, reader: torch.device) -> dict[str, float] | None:
    """Torch's copy of `size` bytes from the other GPU; None if this process does not see two."""
    if reader.type != "cuda" or torch.cuda.device_count() < 2:
        return None
    there = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", 1))
    here = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", 0))

    def copy() -> float:
        for device in (there.device, here.device):
            torch.cuda.synchronize(device)
        began = clock.perf_counter()
        here.copy_(there)
        torch.cuda.synchronize(here.device)
        return clock.perf_counter() - began

    return several(copy, size)


def measured(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The results of all sizes."""
    device = pick_device(asked.device)
    owning, reading = asked.devices[0], asked.devices[-1]
    environment = dict(os.environ)
    if device.type == "cuda":  # set before anything here uses CUDA: the reader's device is number 0, the owner's 1
        environment["CUDA_VISIBLE_DEVICES"] = str(owning)
    words = [
        "--owner",
        str(folder),
        "--device",
        device.type,
        "--layers",
        str(asked.layers),
        "--pages",
        str(asked.pages),
        "--transport",
        asked.transport,
    ]
    command = [sys.executable, "-m", "lab.peer_pieces", *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    assert process.stdout is not None
    result: dict[str, Any] = {"devices": [owning, reading], "layers": asked.layers, "pages": asked.pages, "pieces": []}
    try:
        carrier = carriers(asked.transport, folder, device)[0]
        result["transport"] = carrier.name
        reader = Reader(carrier, asked.layers, asked.pages, device)
        for mib in asked.mib:
            process.stdin.write(b"%d\n" % mib)
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise RedlineError(f"the owner of the pages has ended with code {process.wait()}: see its lines above")
            lent = msgspec.json.decode(line, type=Lent)
            result["owner"] = lent.gpu
            result["pieces"].append(reader.row(mib, lent))
            print(json.dumps(result["pieces"][-1]), file=sys.stderr, flush=True)
        carrier.transport.close()
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
    return result


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[0, 1], help="of owner and reader")
    parser.add_argument("--mib", type=count, nargs="+", default=[1, 4, 16, 64], help="maximum size of a chunk")
    parser.add_argument("--layers", type=count, default=8)
    parser.add_argument("--pages", type=count, default=448, help="of 64 tokens")
    parser.add_argument("--transport", choices=get_args(TransportName), default="auto")
    parser.add_argument("--device", default=None, help="cpu or cuda (default: the GPU, if there is one)")
    parser.add_argument("--save", type=output, default=None)
    parser.add_argument("--owner", type=Path, default=None, dest="folder", help=argparse.SUPPRESS)
    return parser


def main(said: Sequence[str] | None = None) -> None:
    """Runs the program with `said` instead of the command line's words.

    Raises RedlineError if the owner ends, TransferFailed if its area cannot be read.
    """
    asked = arguments().parse_args(said)
    if asked.folder is not None:
        owner(asked)
        return
    if asked.device != "cpu":  # before CUDA is initialised here
        order = dict.fromkeys([asked.devices[-1], asked.devices[0]])
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, order))
    with tempfile.TemporaryDirectory(prefix="redline-pieces-", dir="/dev/shm") as name:
        record = {**provenance("torch", "triton", "nixl"), **measured(asked, Path(name) / "areas")}
    text = json.dumps(record, indent=1) + "\n"
    if asked.save is not None:
        asked.save.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    program(main)
