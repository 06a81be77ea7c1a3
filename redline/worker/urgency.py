"""The scheduling priority (nice value) of a worker's process, which depends on its role.

A prefill worker on cores of its own competes only with the short event loop iterations of the API, for which answers
wait. With prefill running, the 99th percentile of inter-token latency is 1.2 times that without; at normal priority, it
is 1.6 times. A process that has lowered its priority may not be allowed to raise it again, so at run time it is lowered
only if it can be raised again.
"""

import contextlib
import logging
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path

from redline.messages.codec import Wire
from redline.messages.news import Role, TakeRole
from redline.worker.service import Service

PREFILL_NICE = 10
_CAP_SYS_NICE = 23  # bit of the capability that lets a process raise its priority (capabilities(7))
_MOST_NICE = 20  # RLIMIT_NICE is counted from here downwards (getrlimit(2))

_log = logging.getLogger(__name__)


class Urgency(Service):
    """The priority of this process. `take` is called with its first role before any thread is started."""

    def __init__(self, *, own_cores: bool, may_return: Callable[[int], bool] | None = None) -> None:
        """own_cores: whether the worker has cores of its own; if not, its priority never changes. may_return: whether
        the system lets this process return to a nice value after it has had a larger one."""
        self._own_cores = own_cores
        self._usual = os.getpriority(os.PRIO_PROCESS, 0)
        self._may_return = may_return or can_return_to
        self._role: Role | None = None

    def hear(self, message: Wire) -> None:
        if isinstance(message, TakeRole):
            self.take(message.role)

    def take(self, role: Role) -> None:
        """Set the priority of the role."""
        first, self._role = self._role is None, role
        wanted = self._usual + PREFILL_NICE * (role == "prefill")
        if not self._own_cores or wanted == os.getpriority(os.PRIO_PROCESS, 0):
            return
        if wanted > self._usual and not first and not self._may_return(self._usual):
            return  # the low priority would remain when the worker decodes again
        try:
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(ProcessLookupError):  # the thread has ended
                    os.setpriority(os.PRIO_PROCESS, int(thread), wanted)
        except PermissionError:
            _log.warning("the system does not let this worker raise its priority again (CAP_SYS_NICE, RLIMIT_NICE)")


def can_return_to(nice: int) -> bool:
    """Whether the system lets this process lower its nice value to `nice`."""
    allowed = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if allowed is not None and int(allowed[1], 16) >> _CAP_SYS_NICE & 1:
        return True
    limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
    return limit == resource.RLIM_INFINITY or _MOST_NICE - limit <= nice
