"""The same read again and again: how much the reads differ, and how much of that is due to other work of the machine.

Pages of a model's size are read from host memory into the pages of a pool, each number of pages in rotation, together
with one copy of the same bytes. For each read the system reports how long its thread computed and how long it waited
for a core (`/proc/self/task/.../schedstat`). No prediction can be more accurate than the same work is constant.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from lab.tiers_copies import Copies
from redline.model.k2.config import K2Config

PAGES = 4, 16, 64
REPEATS = 24
WARM = 2  # warm-up runs of each


class Once(NamedTuple):
    """Milliseconds of one read: total, computing of its thread, waiting for a core, and of one copy."""

    all: float
    computed: float
    waited: float
    copy: float


def repeated(
    config: K2Config, device: torch.device, pages: Sequence[int] = PAGES, repeats: int = REPEATS
) -> dict[str, Any]:
    """For each number of pages: medians in ms, and the deviation of single reads from them. Raises RedlineError if
    pages do not come back unchanged.
    """
    copies = Copies(config, max(pages), device)
    try:
        [thread] = [one for one in threading.enumerate() if one.name == "tiers"]
        told = Path(f"/proc/self/task/{thread.native_id}/schedstat")
        found: dict[int, list[Once]] = {count: [] for count in pages}
        for turn in range(WARM + repeats):
            for count in pages:
                before = _schedule(told)
                all_s = copies.read(count)
                computed_s, waited_s = (b - a for a, b in zip(before, _schedule(told), strict=True))
                copy_s = copies.copy(count, inwards=True)
                if turn >= WARM:
                    found[count].append(Once(*(1e3 * each for each in (all_s, computed_s, waited_s, copy_s))))
    finally:
        copies.store.close()
    return {str(count): _told(all) for count, all in found.items()}


def _schedule(told: Path) -> tuple[float, float]:
    """Total seconds that a thread has computed, and that it has waited for a core."""
    computed, waited, _ = told.read_text().split()
    return int(computed) / 1e9, int(waited) / 1e9


def _told(all: Sequence[Once]) -> dict[str, Any]:
    middle = median(one.all for one in all)
    late = [one for one in all if one.all > 1.5 * middle]
    return {
        "count": len(all),
        "all": off([one.all for one in all]),
        "computed": off([one.computed for one in all]),
        "copy": off([one.copy for one in all]),
        "waited_of_all": round(sum(one.waited for one in all) / sum(one.all for one in all), 4),
        "late": len(late),
        "waited_of_late": round(sum(one.waited for one in late) / sum(one.all for one in late), 4) if late else None,
    }


def off(values: Sequence[float]) -> dict[str, float]:
    """The median, and of |value - median| / value the median and p90."""
    middle = median(values)
    away = sorted(abs(value - middle) / value for value in values)
    return {
        "ms": round(middle, 3),
        "off_median": round(median(away), 4),
        "off_p90": round(away[min(len(away) - 1, int(0.9 * len(away)))], 4),
    }
