"""A supervised process of a deployment: restarted when it ends, with exponential backoff, or given up.

Subclasses define one start: of a worker (`supervisor.py`) or of an API replica (`replicas.py`).
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import NamedTuple, Protocol

from redline.errors import ConfigError

SILENCE_S = 60  # without a heartbeat, after which a process is killed: its pending answers will not complete
AGAIN_S, LONGEST_S = 0.5, 30.0  # pause before a second restart in a row, doubled with each further one; its maximum
WELL_S = 60.0  # of being ready, after which earlier failures no longer count
MOST_ENDS = 5  # failures in a row, after which a process is given up

log = logging.getLogger("redline.deploy")


class ProcessEnd(NamedTuple):
    """How one start of a process has ended."""

    why: str
    ready: bool  # whether it had become ready (a worker: had loaded its model)
    seconds: float  # that it was ready
    excused: bool = False  # it ended on request, or its machine is down: it does not count as a failure

    @property
    def well(self) -> bool:
        """Whether it served for long enough that its end predicts nothing about the next start."""
        return self.ready and self.seconds >= WELL_S


class SupervisedProcess(ABC):
    """A supervised process through all its starts. `given_up` is the reason why it is not restarted any more."""

    def __init__(self, name: str, *, again: bool, proven: asyncio.Event) -> None:
        """again: whether it is restarted. proven: set once any process of its kind has become ready. A start that fails
        before may be due to a mistake in the deployment, which would make every start fail, so the next start waits for
        this event."""
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
        """Start it, and restart it until it is given up or stopped; returns when its process has ended."""
        while await self._is_wanted():
            self._epoch += 1
            try:
                end = await self._start(self._epoch)
            except ConfigError as error:  # a mistake in the deployment: a restart would fail in the same way
                if self._proven.is_set():
                    log.error("%s: %s; it is given up", self.name, error)
                self.given_up = str(error)
                return
            except Exception as error:  # no process or no socket: worth a retry
                log.exception("%s could not be started", self.name)
                end = ProcessEnd(f"{self.name} could not be started: {error}", ready=False, seconds=0.0)
            if self._stopping.is_set():
                return
            if end.excused or not self._wanted.is_set() or (not end.ready and self._rests(end.why)):
                continue
            self._in_a_row = 1 if end.well else self._in_a_row + 1
            if not self._again or self._in_a_row >= MOST_ENDS:
                if self._rests(end.why):
                    continue
                if self._proven.is_set():  # else `Supervisor.start` logs it
                    log.error("%s: %s; it is given up", self.name, end.why)
                self.given_up = end.why
                return
            if not await self._is_proven(end.why):
                return
            pause = 0.0 if self._in_a_row == 1 else min(AGAIN_S * 2 ** (self._in_a_row - 2), LONGEST_S)
            after = f" in {pause:g} s" if pause else ""
            log.error("%s: %s; it is restarted%s", self.name, end.why, after)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    def begin_anew(self) -> None:
        """Reset `given_up` and the count of failures, so that `live` may be called again."""
        self.given_up, self._in_a_row = None, 0

    @property
    def has_failed(self) -> bool:
        """Whether its last start has failed."""
        return self.given_up is not None or self._in_a_row > 0

    @property
    def down(self) -> str | None:
        """Why it neither runs nor will be restarted unless another process proves the deployment; None if it does."""
        return self.given_up or (None if self._proven.is_set() else self._waits)

    def stop(self) -> None:
        """Have it shut down; `live` returns once it has."""
        self._stopping.set()

    def _is_ready(self) -> None:
        """Called by `_start` when the process becomes ready."""
        self.ready.set()
        self._proven.set()

    async def _is_wanted(self) -> bool:
        """Returns once it is wanted; False if it is stopped before."""
        return await self._unless_stopped(self._wanted)

    async def _is_proven(self, why: str) -> bool:
        """Returns once any process of its kind has been ready; False if it is stopped before. why: the reason for which
        its last start failed."""
        self._waits = why
        proven = await self._unless_stopped(self._proven)
        self._waits = None
        return proven

    async def _unless_stopped(self, event: asyncio.Event) -> bool:
        """Returns once `event` is set; False if it is stopped before."""
        if not event.is_set():
            waiting = asyncio.create_task(event.wait())
            stopping = asyncio.create_task(self._stopping.wait())
            await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in (waiting, stopping):
                task.cancel()
        return not self._stopping.is_set()

    def _rests(self, why: str) -> bool:
        """Whether it becomes idle instead of being given up. why: the reason for which its last start ended."""
        return False

    @abstractmethod
    async def _start(self, epoch: int) -> ProcessEnd:
        """Run one start until it ends."""
        ...


class Beating(Protocol):
    """A process that sends heartbeats."""

    beats: int

    @property
    def ready(self) -> object:
        """None until heartbeats are due."""
        ...


async def until_silent(link: Beating) -> None:
    """Returns once no heartbeat has arrived for SILENCE_S. Seconds are counted by wake-ups, one each second, so that
    time does not count in which this process is stopped together with its worker."""
    silent, beats = 0, link.beats
    while silent < SILENCE_S:
        await asyncio.sleep(1)
        silent, beats = silent + 1 if link.beats == beats and link.ready is not None else 0, link.beats
