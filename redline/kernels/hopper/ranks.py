"""How the kernels of several ranks reach one another's memory: an inbox on each chip, open to all (blocks/ranks.cuh).

A step's sums are at two sites, in turn: attention's at the first, the experts' at the second. Behind them lie the two
rooms of `gather_ranks`.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

ATTENTION, EXPERTS = 0, 1  # sites
Site = Literal[0, 1]
UNSENT = 0x80000000  # the word that nobody has sent: minus zero
MOST_RANKS = 8
MOST_TOKENS = 64  # of a step whose sums go through inboxes
GATHERED_ROWS = 256  # of logits that are gathered at once: the most positions of a recorded step


@dataclass(frozen=True)
class Links:
    """A rank's way to all others."""

    rank: int
    ranks: int
    inboxes: tuple[int, ...]  # the address of each rank's inbox, as this chip sees it
    control: Tensor  # int64 [2], the host's: nanoseconds that a rank may be waited for; 1 + the rank that did not come
    turns: Tensor  # int32 [2]: `gather_ranks` counts its launches there
    room: int  # words of a rank at a site
    gathered: int  # words of a rank in a room of `gather_ranks`

    def of_sums(self, site: Site) -> dict[str, Any]:
        """What a kernel's record takes to add up the ranks at this site."""
        return {**self._who(), "site": site * self.ranks * self.room, "room": self.room}

    def of_gather(self) -> dict[str, Any]:
        """What `gather_ranks` takes."""
        return {**self._who(), "site": 2 * self.ranks * self.room, "room": self.gathered, "turns": self.turns}

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


def inbox_words(ranks: int, room: int, gathered: int) -> int:
    """Words of an inbox: two sites and two rooms of `gather_ranks`, for each rank."""
    return 2 * ranks * (room + gathered)


def room_of(hidden: int, tokens: int) -> int:
    """Words of a rank at a site, for so many tokens at most. hidden: padded to 128."""
    return hidden * max(tokens, 8)


def new_control(seconds: float, *, pinned: bool) -> Tensor:
    """What `Links.control` begins with. pinned: memory that a GPU writes."""
    return (
        torch.tensor([int(seconds * 1e9), 0], dtype=torch.int64).pin_memory()
        if pinned
        else torch.tensor([int(seconds * 1e9), 0], dtype=torch.int64)
    )
