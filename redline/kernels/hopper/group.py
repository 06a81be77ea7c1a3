"""The ranks of one model on the GPUs of one host: decode steps through one another's memory, prompts through NCCL.

Whoever opens a group names a file that none of its ranks has used before; the ranks find one another there.
"""

import contextlib
import datetime
import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from redline.errors import ConfigError, RankLost
from redline.kernels.group import START_S, STEP_S
from redline.kernels.hopper import driver
from redline.kernels.hopper.decode.gather_ranks import gather_ranks
from redline.kernels.hopper.layouts.tiled import PAD_K, padded
from redline.kernels.hopper.ranks import GATHERED_ROWS, MOST_TOKENS, UNSENT, Links, inbox_words, new_control, room_of


class GpuGroup:
    """A `Group` over CUDA devices of one host, one process for each. Close it when all ranks have ended their work."""

    def __init__(self, file: str, rank: int, ranks: int, device: torch.device, hidden: int, vocabulary: int) -> None:
        """Meets the other ranks, and opens their inboxes. hidden: D. vocabulary: V, a multiple of 4 x ranks.

        Raises ConfigError where a GPU of the host does not let another read its memory, or memory is short.
        """
        self.rank, self.ranks = rank, ranks
        self._lost: str | None = None
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is not used
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are on this host
        wait = datetime.timedelta(seconds=START_S)
        self._store = FileStore(file, ranks)
        self._store.set_timeout(wait)
        dist.init_process_group(
            "nccl",
            store=PrefixStore("nccl", self._store),
            rank=rank,
            world_size=ranks,
            timeout=wait,
            device_id=device,
        )
        room, gathered = room_of(padded(hidden, PAD_K), MOST_TOKENS), GATHERED_ROWS * (vocabulary // ranks)
        try:
            self._inbox = driver.SharedMemory(4 * inbox_words(ranks, room, gathered))
            self._inbox.fill(UNSENT)
            self._store.set(f"inbox {rank}", self._inbox.handle.hex())
            others = [other for other in range(ranks) if other != rank]
            handles = {other: bytes.fromhex(self._store.get(f"inbox {other}").decode()) for other in others}
            self._peers = {other: driver.open_shared(handle) for other, handle in handles.items()}
        except driver.CudaError as error:
            raise ConfigError(f"engine.ranks is {ranks}: this GPU and another cannot share memory ({error})") from error
        addresses = tuple(self._inbox.address if other == rank else self._peers[other] for other in range(ranks))
        turns = torch.zeros(2, dtype=torch.int32, device=device)
        control = new_control(START_S, pinned=True)
        self.links = Links(rank, ranks, addresses, control, turns, room, gathered)

    def add(self, partial: Tensor) -> Tensor:
        """As `Group.add`, through NCCL, whose order of adding is its own: for prompts."""
        dist.all_reduce(partial)
        return partial

    def gather(self, part_RV: Tensor) -> Tensor:
        """As `Group.gather`; in pieces where there are more rows than a step has."""
        pieces = [gather_ranks(piece, self.links) for piece in part_RV.split(GATHERED_ROWS)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def hurry(self) -> None:
        """As `Group.hurry`: STEP_S seconds."""
        self.links.control[0] = int(STEP_S * 1e9)

    def lose(self, reason: str) -> None:
        """As `Group.lose`: kernels that wait give up when they next look at the clock."""
        self._lost = reason
        self.links.control[0] = 0

    def check(self) -> None:
        """As `Group.check`: what a kernel computed that has waited in vain is NaN, and so is all that follows."""
        lost = int(self.links.control[1])
        if lost and self._lost is not None:
            raise RankLost(self._lost)
        if lost:
            seconds = self.links.control[0].item() / 1e9
            raise RankLost(f"rank {lost - 1} has kept rank {self.rank} waiting for {seconds:.0f} s")

    def close(self) -> None:
        """Ends the group, once every rank has come here or is known to be gone."""
        torch.cuda.synchronize()
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
        for address in self._peers.values():
            driver.close_shared(address)
        self._inbox.free()
