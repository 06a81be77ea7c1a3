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

    def __init__(self, name: str, *, again: bool, proven: asyncio.Event) -> None:
        """again: whether it is started again. proven: set once any process of its kind has become ready. A start that
        fails before may have met a mistake in the deployment, on which every other start would fail too, so the next
        one waits for this event."""
        self.name = name
        self.given_up: str | None = None
        self.ready = asyncio.Event()  # set when it is ready for the first time
        self._again = again
        self._proven = proven
        self._waits: str | None = None  # why its last start has failed, while it waits for `proven`
        self._epoch = 0
        self._stopping = asyncio.Event()
        self._wanted = asyncio.Event()  # set while it is to run
        self._wanted.set()
        self._in_a_row = 0

    async def live(self) -> None:
        """Start it, again and again, until it is given up or told to stop; then no process of it is left."""
        while await self._is_wanted():
            self._epoch += 1
            try:
                end = await self._start(self._epoch)
            except ConfigError as error:  # of the deployment: it would be so again
                if self._proven.is_set():
                    log.error("%s: %s; it is given up", self.name, error)
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
            if not self._again or self._in_a_row >= MOST_ENDS:
                if self._rests(end.why):
                    continue
                if self._proven.is_set():  # else whoever waits for the first to be ready logs it
                    log.error("%s: %s; it is given up", self.name, end.why)
                self.given_up = end.why
                return
            if not await self._is_proven(end.why):
                return
            pause = 0.0 if self._in_a_row == 1 else min(AGAIN_S * 2 ** (self._in_a_row - 2), LONGEST_S)
            after = f" in {pause:g} s" if pause else ""
            log.error("%s: %s; it is started again%s", self.name, end.why, after)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    def begin_anew(self) -> None:
        """Forget why it is given up and how many starts have failed, so that `live` may be called again."""
        self.given_up, self._in_a_row = None, 0

    @property
    def has_failed(self) -> bool:
        """Whether its last start has failed."""
        return self.given_up is not None or self._in_a_row > 0

    @property
    def down(self) -> str | None:
        """Why no start of it is running or will follow, as far as that depends on itself; None: one is or will."""
        return self.given_up or (None if self._proven.is_set() else self._waits)

    def stop(self) -> None:
        """Have it end what it runs and leave; `live` returns once it has."""
        self._stopping.set()

    def _is_ready(self) -> None:
        """To be called by a start when it becomes ready."""
        self.ready.set()
        self._proven.set()

    async def _is_wanted(self) -> bool:
        """Returns once it is to run; False where it is told to stop before."""
        return await self._unless_stopped(self._wanted)

    async def _is_proven(self, why: str) -> bool:
        """Returns once any process of its kind has been ready; False where it is told to stop before. why: its last
        start has failed."""
        self._waits = why
        proven = await self._unless_stopped(self._proven)
        self._waits = None
        return proven

    async def _unless_stopped(self, event: asyncio.Event) -> bool:
        """Returns once `event` is set; False where it is told to stop before."""
        if not event.is_set():
            waiting = asyncio.create_task(event.wait())
            stopping = asyncio.create_task(self._stopping.wait())
            await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in (waiting, stopping):
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
