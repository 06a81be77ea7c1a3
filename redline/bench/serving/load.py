"""Runs a load on a server: sends requests when they are due, and reports how well the load generator kept up.

With a schedule (a rate or a ramp) a request's planned time is the scheduled one, whatever delays it: if
`max_concurrency` delays it, `taken` of its answer is later than `planned`. A slow server therefore cannot hide the wait
of later requests (coordinated omission). Without a schedule, the planned time of a request is when max_concurrency
allows it.
"""

import asyncio
import contextlib
import gc
import resource
import signal
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import uvloop

from redline import clock
from redline.bench.serving.arrivals import planned as planned_times
from redline.bench.serving.client import LoadClient
from redline.bench.serving.records import GeneratorLoad, LoadRequest, LoadRun, TimedAnswer
from redline.bench.serving.target import LoadPace, ServerTarget

SAMPLE_S = 0.02  # seconds between two samples of the timer lag
SHOW_S = 0.25  # seconds between two calls of watch
LATE_S = 0.01  # seconds of delay after which a request counts as sent late
AHEAD_S = 0.05  # seconds before its due time at which a request's connection is opened
ENCODED_BYTES = 256 << 20  # maximum bytes of requests encoded before the run
OPENED = 1024  # maximum connections opened before the run


class Live(NamedTuple):
    """Progress of a run. tokens: chunks received; token counts are known at the end only. seconds: since its start."""

    done: int
    total: int
    failed: int
    running: int
    tokens: int
    seconds: float


class _Run:
    """The state of a run."""

    def __init__(
        self,
        client: LoadClient,
        asks: Sequence[LoadRequest],
        pace: LoadPace,
        watch: Callable[[Live], None] | None,
        stop: asyncio.Event,
    ) -> None:
        self._client, self._pace, self._watch, self._stop = client, pace, watch, stop
        self._warm, asks = asks[: pace.warmups], asks[pace.warmups :]
        self._asks = asks
        self._answers: list[TimedAnswer | None] = [None] * len(asks)
        self._times = planned_times(len(asks), pace)
        self._places = asyncio.Semaphore(pace.max_concurrency or max(len(asks), 1))
        # Encoding a long prompt blocks the event loop, so requests up to ENCODED_BYTES are encoded before the run.
        self._requests: dict[int, bytes] = {}
        held = 0
        for place, ask in enumerate(asks):
            request = client.request(ask)  # all are tried, so that errors are raised before the run
            if (held := held + len(request)) <= ENCODED_BYTES:
                self._requests[place] = request
        self._lags: list[float] = []
        self._done = self._failed = self._late = 0
        self._why = ""  # why the run ended before all requests were sent

    async def run(self) -> LoadRun:
        """Warms up, sends all requests, waits, and returns the answers."""
        pace, client = self._pace, self._client
        await self._warm_up()
        if self._stop.is_set():
            self._why = "the run was stopped"
        at_once = min(pace.max_concurrency or len(self._asks), len(self._asks), OPENED)
        await client.ready(at_once if self._times is None else min(at_once, 2))
        # Exclude existing objects from garbage collection during the measurement.
        gc.collect()
        gc.freeze()
        tasks: set[asyncio.Task[None]] = set()
        side = [asyncio.create_task(self._sample()), asyncio.create_task(self._until_stopped())]
        client.begin()
        began, processor = clock.now(), clock.process_time()
        if pace.deadline is not None:
            over = f"the run's deadline of {pace.deadline:g} s was reached"
            side.append(asyncio.create_task(self._at(pace.deadline, over)))
        try:
            for place in range(len(self._asks)):
                due, free = await self._due(place)
                if self._why:
                    break
                task = asyncio.create_task(self._one(place, due, free))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            if tasks:
                await asyncio.gather(*tasks)
        finally:
            for task in (*side, *tasks):
                task.cancel()
            await asyncio.gather(*side, *tasks, return_exceptions=True)
            gc.unfreeze()
        processor = clock.process_time() - processor
        wall = client.clock()
        answers = [answer or self._skipped(place) for place, answer in enumerate(self._answers)]
        sent = [answer for answer in answers if answer.failure != "skipped"]
        first = min((answer.planned for answer in sent), default=0.0)
        last = max((answer.end for answer in sent), default=first)
        self._show()
        return LoadRun(
            began=began,
            seconds=max(last - first, 0.0),
            answers=tuple(answers),
            generator=_generator(processor / wall if wall > 0 else 0.0, self._lags, self._late),
            stopped=bool(self._why),
        )

    async def _warm_up(self) -> None:
        """Sends the warm-up requests. Their prompts differ from the measured ones, so that those are not cached."""
        if not self._warm:
            return

        async def one(ask: LoadRequest) -> None:
            async with self._places:
                if not self._stop.is_set():
                    await self._client.ask(ask)

        work = asyncio.gather(*map(one, self._warm))
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                self._client.cut("the run was stopped")
            await work
        finally:
            stopped.cancel()
            work.cancel()
            self._client.chunks = 0

    async def _due(self, place: int) -> tuple[float, float]:
        """Waits until a request is due and max_concurrency allows it, or the run ends.

        Returns its planned time, and the time from which only this process delays it.
        """
        client = self._client
        due = None
        if self._times is not None:
            due = self._times[place]
            await self._sleep_until(due - AHEAD_S)
            if due - client.clock() > -AHEAD_S:
                client.spare()
            await self._sleep_until(due)
        await self._places.acquire()
        free = client.clock()
        return (free, free) if due is None else (due, max(free, due))

    async def _sleep_until(self, due: float) -> None:
        while not self._why and (wait := due - self._client.clock()) > 0:
            # Bounded, so that an ended run stops sleeping.
            await asyncio.sleep(min(wait, SHOW_S))

    async def _one(self, place: int, due: float, free: float) -> None:
        try:
            if self._why:
                return
            answer = await self._client.ask(self._asks[place], place, due, self._requests.pop(place, None))
        finally:
            self._places.release()
        if answer.sent is not None and answer.sent - free > LATE_S:
            self._late += 1
        self._answers[place] = answer
        self._done += 1
        self._failed += answer.failure is not None

    def _skipped(self, place: int) -> TimedAnswer:
        planned = self._times[place] if self._times is not None else self._client.clock()
        why = self._why or "it was never sent"
        return TimedAnswer(
            index=place,
            ask=self._asks[place],
            planned=planned,
            end=self._client.clock(),
            failure="skipped",
            error=f"not sent: {why}",
        )

    async def _until_stopped(self) -> None:
        await self._stop.wait()
        self._end("the run was stopped")

    async def _at(self, deadline: float, why: str) -> None:
        await asyncio.sleep(deadline)
        self._end(why)

    def _end(self, why: str) -> None:
        self._why = self._why or why
        self._client.cut(why)
        # Wakes the task that waits for max_concurrency; no further request is sent.
        self._places.release()

    async def _sample(self) -> None:
        """Samples the lag of the event loop and reports progress, until it is cancelled."""
        shown = clock.perf_counter()
        while True:
            due = clock.perf_counter() + SAMPLE_S
            await asyncio.sleep(SAMPLE_S)
            now = clock.perf_counter()
            self._lags.append(max(now - due, 0.0))
            if now - shown >= SHOW_S:
                shown = now
                self._show()

    def _show(self) -> None:
        if self._watch is not None:
            client = self._client
            self._watch(Live(self._done, len(self._asks), self._failed, client.running, client.chunks, client.clock()))


def _generator(cpu_share: float, lags: Sequence[float], late: int) -> GeneratorLoad:
    ordered = sorted(lags) or [0.0]

    def at(share: float) -> float:
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    return GeneratorLoad(cpu_share=cpu_share, lag_p50=at(0.5), lag_p99=at(0.99), lag_most=ordered[-1], late_sends=late)


async def load(
    target: ServerTarget, asks: Sequence[LoadRequest], pace: LoadPace, watch: Callable[[Live], None] | None = None
) -> LoadRun:
    """Sends all asks at this pace and waits for every answer. watch: called with the progress four times a second.

    The first `pace.warmups` asks are warm-ups, without answers in the run. Raises ConfigError if target or pace are
    invalid, or if the backend cannot express a request.
    """
    return await _load(target, asks, pace, watch, asyncio.Event())


async def _load(
    target: ServerTarget,
    asks: Sequence[LoadRequest],
    pace: LoadPace,
    watch: Callable[[Live], None] | None,
    stop: asyncio.Event,
) -> LoadRun:
    async with LoadClient(target) as client:
        return await _Run(client, asks, pace, watch, stop).run()


def run_load(
    target: ServerTarget, asks: Sequence[LoadRequest], pace: LoadPace, watch: Callable[[Live], None] | None = None
) -> LoadRun:
    """`load` in its own uvloop event loop. Ctrl-C ends the run, which returns the answers so far with `stopped` set.

    A second Ctrl-C raises KeyboardInterrupt. Raises the errors of `load`.
    """
    _raise_file_limit()

    async def stoppable() -> LoadRun:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def interrupted() -> None:
            stop.set()
            loop.remove_signal_handler(signal.SIGINT)

        main = threading.current_thread() is threading.main_thread()
        if main:
            loop.add_signal_handler(signal.SIGINT, interrupted)
        try:
            return await _load(target, asks, pace, watch, stop)
        finally:
            if main:
                loop.remove_signal_handler(signal.SIGINT)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(stoppable())


def _raise_file_limit() -> None:
    """Raises the soft limit of open files, usually 1024: every stream is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
