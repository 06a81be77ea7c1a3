"""How the kernels of several ranks reach one another's memory: an inbox on each chip, open to all (blocks/ranks.cuh).

A step's sums are at two sites, in turn: attention's at the first, the experts' at the second. Behind them lie the two
rooms of `gather_ranks`, those in which ranks that divide contexts exchange queries and what came of them, and a third
site for the sums of `project_a`: between two of its sums lie both others.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from redline.kernels.hopper.layouts.tiled import padded

ATTENTION, EXPERTS = 0, 1  # sites
Site = Literal[0, 1]
Contexts = Literal["auto", "whole", "divided"]
Projection = Literal["auto", "whole", "divided"]
Shots = Literal[0, 1, 2]
UNSENT = 0x80000000  # the word that nobody has sent: minus zero
MOST_RANKS = 8
MOST_TOKENS = 64  # of a step whose sums go through inboxes
TWO_SHOTS = 3, 16  # so many ranks, and tokens, from which sums go in two shots (blocks/ranks.cuh)
GATHERED_ROWS = 256  # of logits that are gathered at once: the most positions of a recorded step


class Rooms(NamedTuple):
    """Words that a rank has for itself in every other's inbox, each a multiple of 4. See `rooms_of`."""

    sums: int  # at each of the two sites
    gathered: int  # in each of the two rooms of `gather_ranks`
    queries: int  # in the room of `gather_queries`
    latents: int  # in the room of `share_latents`
    projected: int  # at the site of `project_a`

    @property
    def words(self) -> int:
        """Of all."""
        return 2 * (self.sums + self.gathered) + self.queries + self.latents + self.projected


@dataclass(frozen=True)
class Links:
    """A rank's way to all others."""

    rank: int
    ranks: int
    inboxes: tuple[int, ...]  # the address of each rank's inbox, as this chip sees it
    control: Tensor  # int64 [2], the host's: nanoseconds that a rank may be waited for; 1 + the rank that did not come
    turns: Tensor  # int32 [2]: `gather_ranks` counts its launches there
    rooms: Rooms
    contexts: Contexts = "auto"  # whether ranks read a part of every context each, or all of it
    projection: Projection = "auto"  # whether ranks read a part of `project_a`'s weight each, or all of it
    shots: Shots = 0  # in how many shots words are added up; 0: as many as are faster

    def of_sums(self, site: Site) -> dict[str, Any]:
        """What a kernel's record takes to add up the ranks at this site."""
        return {**self._who(), "site": site * self.ranks * self.rooms.sums, "room": self.rooms.sums}

    def of_gather(self) -> dict[str, Any]:
        """What `gather_ranks` takes."""
        site = 2 * self.ranks * self.rooms.sums
        return {**self._who(), "site": site, "room": self.rooms.gathered, "turns": self.turns}

    def of_queries(self) -> dict[str, Any]:
        """What `gather_queries` takes."""
        return {**self._who(), "site": self._behind, "room": self.rooms.queries, "turns": None}

    def of_latents(self) -> dict[str, Any]:
        """What `share_latents` takes."""
        site = self._behind + self.ranks * self.rooms.queries
        return {**self._who(), "site": site, "room": self.rooms.latents}

    def of_projected(self) -> dict[str, Any]:
        """What a kernel's record takes to add up the ranks' parts of `project_a`."""
        site = self._behind + self.ranks * (self.rooms.queries + self.rooms.latents)
        return {**self._who(), "site": site, "room": self.rooms.projected}

    @property
    def _behind(self) -> int:
        """The first word behind what every group has."""
        return 2 * self.ranks * (self.rooms.sums + self.rooms.gathered)

    def _who(self) -> dict[str, Any]:
        return {**_inboxes(self.inboxes), "control": self.control.data_ptr(), "rank": self.rank}


def _inboxes(addresses: tuple[int, ...]) -> dict[str, Any]:
    return {f"inbox_{rank}": at for rank, at in enumerate((*addresses, *(0,) * (MOST_RANKS - len(addresses))))}


@runtime_checkable
class Linked(Protocol):
    """A group whose ranks reach one another's memory."""

    @property
    def links(self) -> Links:
        """This rank's."""
        ...


NO_LINKS: dict[str, Any] = {**_inboxes(()), "control": None, "site": 0, "rank": 0, "room": 0}
"""What a kernel's record takes where there is one rank."""


def sums_of(links: Links | None, site: Site) -> dict[str, Any]:
    """`Links.of_sums`; of one rank where there are no links."""
    return NO_LINKS if links is None else links.of_sums(site)


def ranks_of(links: Links | None) -> int:
    """How many ranks there are."""
    return 1 if links is None else links.ranks


def shots_of(links: Links | None, tokens: int) -> int:
    """In how many shots the words of so many tokens are added up: two send fewer, one arrives sooner."""
    if links is None or links.shots:
        return 1 if links is None else links.shots
    return 2 if links.ranks >= TWO_SHOTS[0] and tokens >= TWO_SHOTS[1] else 1


def rooms_of(hidden: int, vocabulary: int, heads: int, rank: int, rope: int, projected: int) -> Rooms:
    """What a step of MOST_TOKENS tokens needs.

    hidden: D, padded to 128. vocabulary: rows of the head that a rank has, a multiple of 4. heads: H of a rank, whose
    queries are [latent R | rotated P]. projected: outputs of `project_a`, of which 8 tokens are added up at most.
    """
    queries, latents = heads * (rank + rope) // 2, heads * (rank // 2 + 1)  # a latent's log-sum-exp is a word
    return Rooms(
        sums=hidden * MOST_TOKENS,
        gathered=GATHERED_ROWS * vocabulary,
        queries=MOST_TOKENS * queries,
        latents=MOST_TOKENS * latents,
        projected=8 * padded(projected, 2),
    )


def new_control(seconds: float, *, pinned: bool) -> Tensor:
    """What `Links.control` begins with. pinned: memory that a GPU writes."""
    return (
        torch.tensor([int(seconds * 1e9), 0], dtype=torch.int64).pin_memory()
        if pinned
        else torch.tensor([int(seconds * 1e9), 0], dtype=torch.int64)
    )
