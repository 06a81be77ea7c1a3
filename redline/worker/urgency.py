"""How urgently the system runs a worker's process, which follows from its role.

On cores of its own a worker that computes prompts is in the way of the API's short turns alone, for which answers wait:
beside prompts the 99th percentile between two tokens is 1.2 times that without them, and 1.6 where it is as urgent as
all else. Whoever has made itself less urgent may not be allowed to take that back, so it is done at run time only where
it can be.
"""

import contextlib
import logging
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path

from redline.wire.news import Role

PREFILL_NICE = 10
_CAP_SYS_NICE = 23  # the bit of the capability that lets a process become more urgent again (capabilities(7))
_MOST_NICE = 20  # RLIMIT_NICE is counted from here downwards (getrlimit(2))

_log = logging.getLogger(__name__)


class Urgency:
    """The priority of this process. `take` is called with its first role before any thread is started."""

    def __init__(self, *, own_cores: bool, may_return: Callable[[int], bool] | None = None) -> None:
        """own_cores: where it has none, its priority stays as it is. may_return: whether the system lets this process
        come back to a nice value once it has a larger one."""
        self._own_cores = own_cores
        self._usual = os.getpriority(os.PRIO_PROCESS, 0)
        self._may_return = may_return or can_return_to
        self._role: Role | None = None

    def take(self, role: Role) -> None:
        """Be as urgent as the role asks for."""
        first, self._role = self._role is None, role
        wanted = self._usual + PREFILL_NICE * (role == "prefill")
        if not self._own_cores or wanted == os.getpriority(os.PRIO_PROCESS, 0):
            return
        if wanted > self._usual and not first and not self._may_return(self._usual):
            return  # it would stay so when it answers again
        try:
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.setpriority(os.PRIO_PROCESS, int(thread), wanted)
        except PermissionError:
            _log.warning("the system does not let this worker be as urgent again as before (CAP_SYS_NICE, RLIMIT_NICE)")


def can_return_to(nice: int) -> bool:
    """Whether the system lets this process have a nice value that is less than its own."""
    allowed = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if allowed is not None and int(allowed[1], 16) >> _CAP_SYS_NICE & 1:
        return True
    limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
    return limit == resource.RLIM_INFINITY or _MOST_NICE - limit <= nice
