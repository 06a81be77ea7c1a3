"""Communication of decode kernels between ranks: an inbox per GPU, mapped by all ranks (blocks/all_reduce.cuh).

A step's all-reduces alternate between two sites: attention uses the first, the experts the second. Behind them in the
inbox are the two buffers of `all_gather`, the buffers in which context parallel ranks exchange queries and partial
results, and a third site for the all-reduce of `project_a`: between two of those both other sites are used.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from redline.kernels.cuda.layouts.tiled import padded

ATTENTION, EXPERTS = 0, 1  # sites of all-reduces
Site = Literal[0, 1]
Contexts = Literal["auto", "whole", "divided"]
Projection = Literal["auto", "whole", "divided"]
Shots = Literal[0, 1, 2]
UNSENT = 0x80000000  # marks a word that has not been received: minus zero
MOST_RANKS = 8
MOST_TOKENS = 64  # maximum tokens of a step that is all-reduced through inboxes
TWO_SHOTS = 3, 16  # minimum ranks and tokens for which two-shot all-reduce is used (blocks/all_reduce.cuh)
GATHERED_ROWS = 256  # maximum rows of one all-gather of logits; a step of more positions takes two


class Rooms(NamedTuple):
    """Words that each rank has for itself in every other rank's inbox, each a multiple of 4. See `rooms_of`."""

    sums: int  # at each of the two sites
    gathered: int  # in each of the two buffers of `all_gather`
    queries: int  # in the buffer of `all_gather_queries`
    latents: int  # in the buffer of `share_latents`
    projected: int  # at the site of `project_a`

    @property
    def words(self) -> int:
        """Total number of words per rank."""
        return 2 * (self.sums + self.gathered) + self.queries + self.latents + self.projected


@dataclass(frozen=True)
class RankLinks:
    """A rank's connections to all other ranks."""

    rank: int
    ranks: int
    inboxes: tuple[int, ...]  # the address of each rank's inbox on this GPU
    control: Tensor  # int64 [2], in host memory: timeout in nanoseconds; 1 + the rank that did not arrive
    turns: Tensor  # int32 [2]: launch counters of `all_gather`
    rooms: Rooms
    contexts: Contexts = "auto"  # context parallelism: whether each rank reads a part of every context, or all of it
    projection: Projection = "auto"  # whether each rank reads a part of `project_a`'s weight, or all of it
    shots: Shots = 0  # one-shot or two-shot all-reduce; 0: the faster one

    def all_reduce_fields(self, site: Site) -> dict[str, Any]:
        """The fields of a kernel's record for the all-reduce at this site."""
        return {**self._who(), "site": site * self.ranks * self.rooms.sums, "room": self.rooms.sums}

    def all_gather_fields(self) -> dict[str, Any]:
        """The record fields of `all_gather`."""
        site = 2 * self.ranks * self.rooms.sums
        return {**self._who(), "site": site, "room": self.rooms.gathered, "turns": self.turns}

    def query_fields(self) -> dict[str, Any]:
        """The record fields of `all_gather_queries`."""
        return {**self._who(), "site": self._behind, "room": self.rooms.queries, "turns": None}

    def latent_fields(self) -> dict[str, Any]:
        """The record fields of `share_latents`."""
        site = self._behind + self.ranks * self.rooms.queries
        return {**self._who(), "site": site, "room": self.rooms.latents}

    def projection_fields(self) -> dict[str, Any]:
        """The fields of a kernel's record for the all-reduce of `project_a`."""
        site = self._behind + self.ranks * (self.rooms.queries + self.rooms.latents)
        return {**self._who(), "site": site, "room": self.rooms.projected}

    @property
    def _behind(self) -> int:
        """Offset, in words, after the two sites and the buffers of `all_gather`."""
        return 2 * self.ranks * (self.rooms.sums + self.rooms.gathered)

    def _who(self) -> dict[str, Any]:
        return {**_inboxes(self.inboxes), "control": self.control.data_ptr(), "rank": self.rank}


def _inboxes(addresses: tuple[int, ...]) -> dict[str, Any]:
    return {f"inbox_{rank}": at for rank, at in enumerate((*addresses, *(0,) * (MOST_RANKS - len(addresses))))}


@runtime_checkable
class Linked(Protocol):
    """A group whose ranks have peer access to one another's memory."""

    @property
    def links(self) -> RankLinks:
        """This rank's connections."""
        ...


NO_LINKS: dict[str, Any] = {**_inboxes(()), "control": None, "site": 0, "rank": 0, "room": 0}
"""The fields of a kernel's record for one rank."""


def all_reduce_fields(links: RankLinks | None, site: Site) -> dict[str, Any]:
    """`RankLinks.all_reduce_fields`; the fields for one rank if there are no links."""
    return NO_LINKS if links is None else links.all_reduce_fields(site)


def ranks_of(links: RankLinks | None) -> int:
    """Number of ranks."""
    return 1 if links is None else links.ranks


def shots_of(links: RankLinks | None, tokens: int) -> int:
    """1 or 2: one-shot or two-shot all-reduce for `tokens` tokens. Two shots send less, one shot has lower latency."""
    if links is None or links.shots:
        return 1 if links is None else links.shots
    return 2 if links.ranks >= TWO_SHOTS[0] and tokens >= TWO_SHOTS[1] else 1


def rooms_of(hidden: int, vocabulary: int, heads: int, rank: int, rope: int, projected: int) -> Rooms:
    """The sizes for a step of MOST_TOKENS tokens.

    hidden: D, padded to 128. vocabulary: rows of the head per rank, a multiple of 4. heads: H per rank, with queries
    [latent R | rotated P]. projected: outputs of `project_a`, which is all-reduced for at most 8 tokens.
    """
    queries, latents = heads * (rank + rope) // 2, heads * (rank // 2 + 1)  # plus one word per latent: its log-sum-exp
    return Rooms(
        sums=hidden * MOST_TOKENS,
        gathered=GATHERED_ROWS * vocabulary,
        queries=MOST_TOKENS * queries,
        latents=MOST_TOKENS * latents,
        projected=8 * padded(projected, 2),
    )


def new_control(seconds: float, *, pinned: bool) -> Tensor:
    """The initial `RankLinks.control`. pinned: memory that a GPU can write."""
    return (
        torch.tensor([int(seconds * 1e9), 0], dtype=torch.int64).pin_memory()
        if pinned
        else torch.tensor([int(seconds * 1e9), 0], dtype=torch.int64)
    )
