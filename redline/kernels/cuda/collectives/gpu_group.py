"""Tensor parallel ranks on the GPUs of one host: decode steps use peer memory access, prefill uses NCCL.

The creator of a group names a file that no earlier group has used; the ranks rendezvous through it.
"""

import contextlib
import datetime
import os
from collections.abc import Callable, Generator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from redline.errors import ConfigError, RankLost
from redline.kernels.cuda import driver
from redline.kernels.cuda.collectives.all_gather import all_gather
from redline.kernels.cuda.collectives.rank_links import GATHERED_ROWS, UNSENT, RankLinks, Rooms, new_control
from redline.kernels.group import START_S

# torch 2.13 deprecates these names, but older versions have no others.
_REDUCE_SCATTER, _ALL_GATHER = (
    ("reduce_scatter_single", "all_gather_single")
    if hasattr(dist, "all_gather_single")
    else ("reduce_scatter_tensor", "all_gather_into_tensor")
)
CLOSE_S = 10.0  # timeout for all ranks to unmap one another's memory


class GpuGroup:
    """A `Group` over CUDA devices of one host, one process per device. All ranks close theirs at the same time."""

    def __init__(self, file: str, rank: int, ranks: int, device: torch.device, rooms: Rooms) -> None:
        """Joins the other ranks, and maps their inboxes, which have the sizes `rooms`.

        Raises ConfigError if a GPU of the host has no peer access to another, or memory is short.
        """
        self.rank, self.ranks = rank, ranks
        self._lost: str | None = None
        self._peers: dict[int, int] = {}
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is not used
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are on this host
        wait = datetime.timedelta(seconds=START_S)
        self._store = FileStore(file, ranks)
        self._store.set_timeout(wait)
        with contextlib.ExitStack() as opened:
            dist.init_process_group(
                "nccl",
                store=PrefixStore("nccl", self._store),
                rank=rank,
                world_size=ranks,
                timeout=wait,
                device_id=device,
            )
            opened.callback(_leave)
            try:
                self._inbox = driver.SharedMemory(4 * ranks * rooms.words)
                opened.callback(self._inbox.free)
                self._inbox.fill(UNSENT)
                self._store.set(f"inbox {rank}", self._inbox.handle.hex())
                opened.callback(self._close_peers)
                for other in self._others():
                    handle = bytes.fromhex(self._store.get(f"inbox {other}").decode())
                    self._peers[other] = driver.open_shared(handle)
            except driver.CudaError as error:
                shared = f"this GPU and another cannot share memory ({error})"
                raise ConfigError(f"engine.ranks is {ranks}: {shared}") from error
            addresses = tuple(self._inbox.address if other == rank else self._peers[other] for other in range(ranks))
            turns = torch.zeros(2, dtype=torch.int32, device=device)
            control = new_control(START_S, pinned=True)
            self.links = RankLinks(rank, ranks, addresses, control, turns, rooms)
            opened.pop_all()

    def all_reduce(self, partial: Tensor) -> Tensor:
        """As `Group.all_reduce`, through NCCL, which has its own order of addition: for prefill."""
        return self.begin_all_reduce(partial)()

    def begin_all_reduce(self, partial: Tensor) -> Callable[[], Tensor]:
        """As `Group.begin_all_reduce`, on NCCL's stream; the current stream waits for it at the end."""
        return self._begun("all_reduce", partial)

    def begin_reduce_scatter(self, partial: Tensor) -> Callable[[], Tensor]:
        """As `Group.begin_reduce_scatter`, on NCCL's stream."""
        own = partial.new_empty(partial.shape[0] // self.ranks, *partial.shape[1:])
        return self._begun(_REDUCE_SCATTER, own, partial)

    def begin_all_gather_rows(self, own: Tensor, whole: Tensor) -> Callable[[], Tensor]:
        """As `Group.begin_all_gather_rows`, on NCCL's stream."""
        return self._begun(_ALL_GATHER, whole, own)

    def _begun(self, call: str, made: Tensor, *given: Tensor) -> Callable[[], Tensor]:
        """Begins a collective, and keeps its inputs alive until it is finished. -> finishes it and returns `made`."""
        with self._broken_off():
            work = getattr(dist, call)(made, *given, async_op=True)
        kept = [given]

        def end() -> Tensor:
            with self._broken_off():
                work.wait()
            kept.clear()
            return made

        return end

    @contextlib.contextmanager
    def _broken_off(self) -> Generator[None]:
        """Raises RankLost if a rank is lost, before a collective or if the collective was aborted for that reason."""
        if self._lost is not None:
            raise RankLost(self._lost)
        try:
            yield
        except RuntimeError as error:
            if self._lost is not None:
                raise RankLost(self._lost) from error
            raise

    def all_gather(self, part_RV: Tensor) -> Tensor:
        """As `Group.all_gather`; in pieces if there are more rows than a step has."""
        pieces = [all_gather(piece, self.links) for piece in part_RV.split(GATHERED_ROWS)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def set_timeout(self, seconds: float) -> None:
        """As `Group.set_timeout`, for decode steps; NCCL's timeout is always START_S."""
        self.links.control[0] = int(seconds * 1e9)
        if self._lost is not None:  # set by another thread in between
            self.links.control[0] = 0

    def abort(self, reason: str) -> None:
        """As `Group.abort`: waiting kernels give up when they next check the clock, and NCCL's are aborted."""
        self._lost = reason
        self.links.control[0] = 0
        _abort()

    def check(self) -> None:
        """As `Group.check`: a kernel whose wait timed out writes NaN, which propagates to all later results."""
        if self._lost is not None:
            raise RankLost(self._lost)
        if lost := int(self.links.control[1]):
            seconds = self.links.control[0].item() / 1e9
            raise RankLost(f"rank {lost - 1} has kept rank {self.rank} waiting for {seconds:.0f} s")

    def close(self) -> None:
        """Ends the group. Memory is freed once no other rank has it mapped, or after CLOSE_S seconds. If a rank is
        lost, it does not wait: all others must have ended."""
        if self._lost is None and int(self.links.control[1]):
            self.abort("a rank did not arrive")  # already reported by `check`; NCCL may be waiting for it too
        torch.cuda.synchronize()
        if self._lost is None:
            _leave()
        self._close_peers()
        if self._lost is None:
            self._store.set(f"let go {self.rank}", "1")
            with contextlib.suppress(RuntimeError):  # a rank that does not arrive has ended, or will soon
                self._store.wait([f"let go {other}" for other in self._others()], datetime.timedelta(seconds=CLOSE_S))
        self._inbox.free()

    def _others(self) -> list[int]:
        return [other for other in range(self.ranks) if other != self.rank]

    def _close_peers(self) -> None:
        while self._peers:
            driver.close_shared(self._peers.popitem()[1])


def _leave() -> None:
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


def _abort() -> None:
    """Aborts NCCL kernels that wait for a rank that will not arrive."""
    world = dist.group.WORLD
    if world is not None:
        with contextlib.suppress(RuntimeError):
            world.abort()
