"""One process of a deployment through all its starts: started again when it ends, after longer and longer, or given up.

What a start is says who derives from it: a worker (`supervisor.py`) or a replica of the API (`replicas.py`).
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import NamedTuple, Protocol

from redline.errors import ConfigError

SILENCE_S = 60  # without a heartbeat, after which a worker is ended: nothing will come of the answers that wait
AGAIN_S, LONGEST_S = 0.5, 30.0  # before a second start in a row, doubled with each one more; and at most
WELL_S = 60.0  # of being ready, after which earlier ends do not count
MOST_ENDS = 5  # of one worker in a row, after which it is given up

log = logging.getLogger("redline.fleet")


class End(NamedTuple):
    """How one start of a worker has ended."""

    why: str
    ready: bool  # whether it had loaded its model
    seconds: float  # from there on
    excused: bool = False  # it was asked to, or its machine has gone: nothing follows for the next start

    @property
    def well(self) -> bool:
        """Whether it served for long enough that its end says nothing of the next start."""
        return self.ready and self.seconds >= WELL_S


class Kept(ABC):
    """One process of a deployment through all its starts. `given_up` is why there will be no other."""

    def __init__(self, name: str, *, again: bool, at_first: bool = False) -> None:
        """again: whether it is started again. at_first: also where it has never been ready, since what ends it then is
        none of the deployment's mistakes, which have been looked for before."""
        self.name = name
        self.given_up: str | None = None
        self.ready = asyncio.Event()  # set when it is ready for the first time
        self._again = again
        self._at_first = at_first
        self._stopping = asyncio.Event()
        self._wanted = asyncio.Event()  # set while it is to run
        self._wanted.set()
        self._in_a_row = 0

    async def live(self) -> None:
        """Start it, again and again, until it is given up or told to stop; then no process of it is left."""
        epoch = 0
        while await self._is_wanted():
            epoch += 1
            try:
                end = await self._start(epoch)
            except ConfigError as error:  # of the deployment: it would be so again
                self.given_up = str(error)
                return
            except Exception as error:  # no process, no socket: as good a reason as any to try again
                log.exception("%s could not be started", self.name)
                end = End(f"{self.name} could not be started: {error}", ready=False, seconds=0.0)
            if self._stopping.is_set():
                return
            if end.excused or not self._wanted.is_set() or (not end.ready and self._rests(end.why)):
                continue
            self._in_a_row = 1 if end.well else self._in_a_row + 1
            again = self._again and (self._at_first or self.ready.is_set())
            if not again or self._in_a_row >= MOST_ENDS:
                if self._rests(end.why):
                    continue
                if again or self._at_first:  # else the server ends, and says it
                    log.error("%s: %s; it is given up", self.name, end.why)
                self.given_up = end.why
                return
            pause = 0.0 if self._in_a_row == 1 else min(AGAIN_S * 2 ** (self._in_a_row - 2), LONGEST_S)
            after = f" in {pause:g} s" if pause else ""
            log.error("%s: %s; it is started again%s", self.name, end.why, after)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    def stop(self) -> None:
        """Have it end what it runs and leave; `live` returns once it has."""
        self._stopping.set()

    async def _is_wanted(self) -> bool:
        """Returns once it is to run; False where it is told to stop before."""
        if self._wanted.is_set():
            return not self._stopping.is_set()
        wanted = asyncio.create_task(self._wanted.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({wanted, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in (wanted, stopping):
            task.cancel()
        return not self._stopping.is_set()

    def _rests(self, why: str) -> bool:
        """Whether it is idle from now on, in the place of being given up. why: its last start has ended."""
        return False

    @abstractmethod
    async def _start(self, epoch: int) -> End:
        """One start, to its end."""
        ...


class Beating(Protocol):
    """What has a heart."""

    beats: int

    @property
    def ready(self) -> object:
        """None until it is to be heard of."""
        ...


async def until_silent(link: Beating) -> None:
    """Returns once no heartbeat has come for SILENCE_S. Seconds are counted by waking up in each: where this process is
    stopped together with its worker, none pass."""
    silent, beats = 0, link.beats
    while silent < SILENCE_S:
        await asyncio.sleep(1)
        silent, beats = silent + 1 if link.beats == beats and link.ready is not None else 0, link.beats
