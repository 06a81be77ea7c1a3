"""State shared by all routes of a server: its keys, whether it drains, and the format of its access log."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, cast

from redline import clock
from redline.api.auth.keys import SECRET, Keyring
from redline.api.config import ApiConfig
from redline.api.telemetry.metrics import Metrics
from redline.api.telemetry.request_span import Passages
from redline.errors import ConfigError, Overloaded

LOOK_S = 1.0  # seconds between two checks of the keys file
READ_S = 0.75  # seconds for reading the file, after which a reload is reported as pending
LAG_S = 0.25  # seconds between two measurements of the event loop

log = logging.getLogger("redline.api")


class AuthState:
    """Created by the process that starts the server; shared by the API and the admin routes.

    draining: the reason why no new requests are accepted; None: they are.
    """

    def __init__(self, config: ApiConfig, secret: bytes = SECRET) -> None:
        """secret: as in `keys.read_keys`. Raises ConfigError if the keys file cannot be read, is empty, or contains
        unknown words."""
        path = config.keys_file
        self.keyring = Keyring(Path(path), config.per_key, classes=config.sla, secret=secret) if path else None
        self.json_lines = config.json_lines
        self.drain_s = config.drain_s
        self.draining: str | None = None
        self.passages = Passages()
        self._reading: asyncio.Task[str | None] | None = None  # the latest read of the keys file
        self._slow_said = False  # a slow read has been logged
        self._asked: set[asyncio.Task[str]] = set()

    def check(self, method: str) -> None:
        """Raises Overloaded (503) for POST requests while the server drains; other methods are served."""
        if self.draining is not None and method == "POST":
            raise Overloaded(f"{self.draining}; use another server, or retry later", self.drain_s, "draining")

    async def reload(self) -> str:
        """Reload the keys. Returns the outcome, which is also logged. If the file is invalid, or has not been read
        within READ_S seconds, the previous keys stay in effect; in the second case until it has been read."""
        return "there is no keys_file to read" if self.keyring is None else await self._read(self.keyring) or ""

    def reload_soon(self) -> None:
        """Like `reload`, without waiting."""
        task = asyncio.create_task(self.reload())
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    async def follow_keys(self) -> None:
        """Reload the keys file whenever it changes, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self.keyring is not None:
                await self._read(self.keyring, changed=True)

    async def _read(self, keyring: Keyring, *, changed: bool = False) -> str | None:
        """Like `reload`. There is one read at a time, so a network share that does not respond blocks only one thread.

        changed: reload only if the file has changed; returns None if it has not.
        """
        while self._reading is not None and not self._reading.done():
            if await self._is_slow(self._reading):
                return self._slow(keyring)
        self._reading, self._slow_said = asyncio.create_task(self._take(keyring, changed)), False
        return self._slow(keyring) if await self._is_slow(self._reading) else self._reading.result()

    async def _take(self, keyring: Keyring, changed: bool) -> str | None:
        reading = await in_a_thread(lambda: keyring.read(changed=changed))
        if reading is None:
            return None
        try:
            said = f"{keyring.path}: {keyring.take(reading)} keys are in effect now"
        except ConfigError as error:
            said = f"{error}; the previous keys stay in effect"
            log.error("%s", said)
        else:
            log.info("%s", said)
        return said

    async def _is_slow(self, reading: "asyncio.Task[str | None]") -> bool:
        await asyncio.wait({reading}, timeout=READ_S)
        return not reading.done()

    def _slow(self, keyring: Keyring) -> str:
        said = f"{keyring.path}: not read within {READ_S:g} s; the previous keys stay in effect until then"
        if not self._slow_said:
            self._slow_said = True
            log.error("%s", said)
        return said


T = TypeVar("T")


async def in_a_thread(work: Callable[[], T]) -> T:
    """Run `work` in its own thread and return the result. It is a daemon thread, since the interpreter waits for
    others at exit, and a read from a dead network share never returns."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def told(result: T | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast("T", result))

    def run() -> None:
        result = error = None
        try:
            result = work()
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(told, result, error)

    threading.Thread(target=run, name="file", daemon=True).start()
    return await done


async def measure_lag(metrics: Metrics) -> None:
    """Record the event loop's lag, until cancelled."""
    while True:
        due = clock.perf_counter() + LAG_S
        await asyncio.sleep(LAG_S)
        metrics.loop_lag.observe(max(0.0, clock.perf_counter() - due))
