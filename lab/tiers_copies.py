"""Copies of pages of Kimi's size between a GPU and host memory, compared with a plain copy of the same size: the floor.

    python -m lab.tiers_copies [--shape kimi-k2.6] [--pages 1 8 64 128] [--repeats 7]
        [--device cuda] [--save FILE]

For each number of pages, in rotation: `read`, from host memory to their slots in the pool, verified, as a job waits for
it (`run/tiers/store.py`); `save`, out of the pool, until all are on the host with checksums; `in` and `out`, one copy
of the same bytes between pinned memory and one region of the GPU's, which is the floor. Medians, and the best. `parts`
lists the times of host threads: for `read` the store's thread, for `save` the caller and then the store's thread, and
how long the stream of steps waits (`until pages are free`); the run verifies that saved pages may be overwritten then.
`device` measures the pieces of work separately: gathering pages, copying them, placing them and computing checksums, in
milliseconds of the host to launch it and of the device to do it. `pinning` is the cost of new memory
(`tiers_pinning.py`). `seal_bytes_per_s` is the checksum rate of one host thread: for pages of a GPU the GPU computes
checksums. No weights are needed. Takes at most a minute on a GPU.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from lab.program import count, output, program
from lab.tiers_pinning import pinned
from redline import clock
from redline.bench.machine import device_name
from redline.bench.record import provenance
from redline.errors import RedlineError
from redline.kernels.by_chip import checksums
from redline.messages.job import PAGE_TOKENS, PageHash, PageId
from redline.model.k2.config import K2Config
from redline.model.k2.cpu import K2
from redline.model.k2.shapes import shape
from redline.run.fit import Layout
from redline.run.kv import KvPool
from redline.run.tiers.memory import SLAB_BYTES
from redline.run.tiers.pages import WholePages, seal, seed_of
from redline.run.tiers.parts import PartSpan, told
from redline.run.tiers.store import Saved, Store
from redline.worker.engine import pick_device

LIMIT_S = 75.0  # time limit of the program; results measured by then are printed
WAIT_S = 20.0  # timeout of one read
WARM = 2  # warm-up runs of each


class _Sizes(NamedTuple):
    """The sizes of a model that a pool of pages needs."""

    config: K2Config
    device: torch.device
    dtype: torch.dtype = torch.bfloat16


class Copies:
    """A pool of three times `most` pages, and a store for twice as many as are read or saved together.

    The store keeps the first third for ever. The second third is saved under new names each time; reads go into the
    last.
    """

    def __init__(self, config: K2Config, most: int, device: torch.device) -> None:
        self.most, self.device = most, device
        page_bytes = PAGE_TOKENS * config.kv_bytes_per_token(torch.bfloat16)
        layout = Layout(3 * most, PAGE_TOKENS * most, torch.bfloat16, page_bytes)
        kv = KvPool(cast(K2, _Sizes(config, device)), layout)
        kv.planes.view(torch.uint8).random_(0, 256)
        self._wait()
        self.pages = WholePages(kv)
        self._bytes_LPTB = kv.planes.view(torch.uint8)
        self.store = Store(self.pages, 2 * most * self.pages.size)
        self._spans = self.store.parts.kept = list[PartSpan]()
        self._names = itertools.count(1)
        self._kept = [Saved(self._name(), PageId(page), True, False) for page in range(most)]
        self._save(self._kept)
        self.save(most)  # all memory is pinned from here on
        gpu = device.type == "cuda"
        self._host = torch.empty(most * self.pages.size, dtype=torch.uint8, pin_memory=gpu).random_(0, 256)
        self._piece = torch.empty(most * self.pages.size, dtype=torch.uint8, device=device)

    def read(self, pages: int) -> float:
        """Seconds until `pages` saved pages are in their slots. Raises RedlineError if not all arrive, or with other
        contents.
        """
        hashes, first = [one.hash for one in self._kept[:pages]], 2 * self.most
        began = clock.perf_counter()
        reading = self.store.hold(hashes)
        assert reading is not None, "not all pages are stored"
        self.store.read(reading, [PageId(first + page) for page in range(pages)], WAIT_S)
        reading.ended.wait(WAIT_S)
        took = clock.perf_counter() - began
        came, were = self._bytes_LPTB[:, first : first + pages], self._bytes_LPTB[:, :pages]
        if len(reading.kept) < pages or not torch.equal(came, were):
            raise RedlineError(f"{len(reading.kept)} of {pages} pages were read, or not as they were saved")
        came.zero_()
        self._wait()
        return took

    def save(self, pages: int) -> float:
        """Seconds until `pages` pages are on the host, with checksums."""
        self.store.save(self._kept)  # marks them as used, so that others are evicted
        return self._save([Saved(self._name(), PageId(self.most + page), True, False) for page in range(pages)])

    def copy(self, pages: int, *, inwards: bool) -> float:
        """Seconds of one copy of the bytes of `pages` pages."""
        host, piece = (one[: pages * self.pages.size] for one in (self._host, self._piece))
        began = clock.perf_counter()
        (piece if inwards else host).copy_(host if inwards else piece, non_blocking=True)
        self._wait()
        return clock.perf_counter() - began

    def parts(self) -> dict[str, float]:
        """Milliseconds of each part since the last call."""
        spans = tuple(self._spans)
        self._spans.clear()
        return {part: one["ms"] for part, one in told(spans, 0.0, clock.perf_counter()).items()}

    def device_parts(self, pages: int) -> dict[str, tuple[float, float]]:
        """For each piece of the work alone: milliseconds until the host had launched it, and of the device."""
        size = self.pages.size
        host_PB, here_PB = (one[: pages * size].view(pages, size) for one in (self._host, self._piece))
        first = PageId(2 * self.most)
        some = self.pages.together

        def numbers(at: int) -> list[PageId]:
            return [PageId(first + page) for page in range(at, min(at + some, pages))]

        def take(at: int) -> object:
            return self.pages.take(numbers(at), list(here_PB[at : at + some]), [1] * len(numbers(at)))

        def put(at: int) -> object:
            return self.pages.put(numbers(at), list(here_PB[at : at + some]), [1] * len(numbers(at)))

        # The copies of the first and the last piece are within the device's memory, where they take a thirtieth of the
        # time.
        pieces: dict[str, tuple[int, Callable[[int], object]]] = {
            "gather and add up": (some, take),
            "copy out": (1, lambda at: host_PB[at].copy_(here_PB[at], non_blocking=True)),
            "copy in": (1, lambda at: here_PB[at].copy_(host_PB[at], non_blocking=True)),
            "add up": (some, lambda at: checksums(here_PB[at : at + some], (1,) * len(numbers(at)))),
            "place and add up": (some, put),
        }
        return {piece: self._timed(launch, range(0, pages, step)) for piece, (step, launch) in pieces.items()}

    def _timed(self, launch: Callable[[int], object], places: Sequence[int]) -> tuple[float, float]:
        self._wait()
        gpu, began = self.device.type == "cuda", clock.perf_counter()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if gpu else []
        for event in events[:1]:
            event.record()
        for at in places:
            launch(at)
        for event in events[1:]:
            event.record()
        launched_ms = 1e3 * (clock.perf_counter() - began)
        self._wait()
        took_ms = events[0].elapsed_time(events[1]) if gpu else launched_ms
        return launched_ms, took_ms

    def seal_bytes_per_s(self) -> float:
        """Bytes of a page per second for which a host thread computes the checksum, at best."""
        page = self._host[: self.pages.size]
        best = 0.0
        for _ in range(20):
            began = clock.perf_counter()
            seal(page, seed_of(self._kept[0].hash, 0))
            best = max(best, self.pages.size / (clock.perf_counter() - began))
        return best

    def prove(self, pages: int) -> None:
        """Check that pages overwritten directly after their save come back unchanged. Raises RedlineError if not."""
        theirs = self._bytes_LPTB[:, self.most : self.most + pages]
        were, names = theirs.clone(), [self._name() for _ in range(pages)]
        self.store.save(self._kept)
        self._wait()
        self.store.save([Saved(name, PageId(self.most + page), True, False) for page, name in enumerate(names)])
        theirs.zero_()
        first = 2 * self.most
        reading = self.store.hold(names)
        assert reading is not None, "the pages are not stored"
        self.store.read(reading, [PageId(first + page) for page in range(pages)], WAIT_S)
        reading.ended.wait(WAIT_S)
        if len(reading.kept) < pages or not torch.equal(self._bytes_LPTB[:, first : first + pages], were):
            raise RedlineError(f"{pages} pages that were overwritten once they were saved are not as they were")
        theirs.copy_(were)
        self._wait()

    def _save(self, pages: Sequence[Saved]) -> float:
        """Seconds until the pages are on the host, with checksums."""
        began = clock.perf_counter()
        with self.store.parts.of("until pages are free"):  # for work launched on the stream of steps
            self.store.save(pages)
            if self.device.type == "cuda":
                torch.cuda.default_stream(self.device).synchronize()
        if not self.store.settle(WAIT_S):
            raise RedlineError(f"{len(pages)} pages were not sealed in {WAIT_S} s")
        return clock.perf_counter() - began

    def _name(self) -> PageHash:
        return PageHash(next(self._names).to_bytes(16, "little"))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measured(copies: Copies, counts: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """For each number of pages: milliseconds, bytes/s, and the ratio to the floor."""
    until, found = clock.monotonic() + LIMIT_S, list[dict[str, Any]]()
    for pages in counts:
        ways: dict[str, Callable[[], float]] = {
            "read": partial(copies.read, pages),
            "in": partial(copies.copy, pages, inwards=True),
            "save": partial(copies.save, pages),
            "out": partial(copies.copy, pages, inwards=False),
        }
        took = {name: list[float]() for name in ways}
        parts = {name: list[dict[str, float]]() for name in ("read", "save")}
        device = list[dict[str, tuple[float, float]]]()
        for turn in range(WARM + repeats):
            for name, way in ways.items():
                copies.parts()
                seconds = way()
                if turn >= WARM:
                    took[name].append(seconds)
                    if name in parts:
                        parts[name].append(copies.parts())
            if turn >= WARM:
                device.append(copies.device_parts(pages))
            else:
                copies.device_parts(pages)
            if clock.monotonic() > until and turn >= WARM:
                break
        copies.prove(pages)
        size = pages * copies.pages.size
        one: dict[str, Any] = {"pages": pages, "bytes": size}
        for name, seconds in took.items():
            middle = statistics.median(seconds)
            one[name] = {
                "ms": round(1e3 * middle, 4),
                "best_ms": round(1e3 * min(seconds), 4),
                "gb_per_s": round(size / middle / 1e9, 2),
            }
        for name, floor in (("read", "in"), ("save", "out")):
            one[name]["of_floor"] = round(one[name]["ms"] / one[floor]["ms"], 2)
            one[name]["parts"] = _middle(parts[name])
        one["device"] = {
            piece: {
                "launched_ms": round(statistics.median(each[piece][0] for each in device), 4),
                "ms": round(statistics.median(each[piece][1] for each in device), 4),
            }
            for piece in device[0]
        }
        found.append(one)
        print(json.dumps(one), flush=True)
        if clock.monotonic() > until:
            break
    return found


def _middle(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians; a missing part counts as 0."""
    names = sorted({name for each in parts for name in each})
    return {name: round(statistics.median(each.get(name, 0.0) for each in parts), 4) for name in names}


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="kimi-k2.6", help="a model's sizes by name, as for `redline bench decode`")
    parser.add_argument("--pages", type=count, nargs="+", default=[1, 8, 64, 128])
    parser.add_argument("--repeats", type=count, default=7)
    parser.add_argument("--slab", type=count, default=SLAB_BYTES, help="bytes of memory that is pinned for `pinning`")
    parser.add_argument("--device", default=None, help="cpu or cuda (default: the GPU, if there is one)")
    parser.add_argument("--save", type=output, default=None)
    return parser


def main(said: Sequence[str] | None = None) -> None:
    """Runs the program with `said` instead of the command line's words. Raises RedlineError."""
    given = arguments().parse_args(said)
    config, device = shape(given.shape), pick_device(given.device)
    began = clock.monotonic()
    copies = Copies(config, max(given.pages), device)
    try:
        record: dict[str, Any] = {
            **provenance("torch", "triton"),
            "device": device_name(device),
            "shape": given.shape,
            "layers": config.num_hidden_layers,
            "page_bytes": copies.pages.size,
            "seal_bytes_per_s": round(copies.seal_bytes_per_s()),
            "runs": measured(copies, given.pages, given.repeats),
            "slab_bytes": given.slab,
            "pinning": pinned(device, given.slab),
        }
    finally:
        copies.store.close()
    record["wall_s"] = round(clock.monotonic() - began, 1)
    text = json.dumps(record, indent=1)
    print(text)
    if given.save is not None:
        Path(given.save).write_text(text + "\n")


if __name__ == "__main__":
    program(main)
