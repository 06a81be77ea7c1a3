"""What the edge of one server shares: its keys, whether it drains, and how it writes its access lines."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, cast

from redline import clock
from redline.api.config import ApiConfig
from redline.api.keys import SECRET, Keyring
from redline.api.metrics import Metrics
from redline.api.passage import Passages
from redline.errors import ConfigError, Overloaded

LOOK_S = 1.0  # between two looks at the file of keys
READ_S = 0.75  # for the file to be read, after which whoever asked is told that it has not been
LAG_S = 0.25  # between two measurements of the event loop

log = logging.getLogger("redline.api")


class Edge:
    """Made by whoever starts the server, and read by the API and the admin routes.

    draining: why no new request is taken; None: they are.
    """

    def __init__(self, config: ApiConfig, secret: bytes = SECRET) -> None:
        """secret: as in `keys.read_keys`. Raises ConfigError where the keys' file cannot be read, is empty, or says
        what nobody knows."""
        path = config.keys_file
        self.keyring = Keyring(Path(path), config.per_key, classes=config.sla, secret=secret) if path else None
        self.json_lines = config.json_lines
        self.drain_s = config.drain_s
        self.draining: str | None = None
        self.passages = Passages()
        self._reading: asyncio.Task[str | None] | None = None  # the newest of the file of keys
        self._slow_said = False  # that it takes long has been logged
        self._asked: set[asyncio.Task[str]] = set()

    def check(self, method: str) -> None:
        """Raises Overloaded (503) for new work while the server drains; what only looks is answered."""
        if self.draining is not None and method == "POST":
            raise Overloaded(f"{self.draining}; ask another server, or again later", self.drain_s, "draining")

    async def reload(self) -> str:
        """Read the keys again. Returns what came of it, which is logged too. Where the file is wrong, or has not been
        read within READ_S seconds, the keys that held before hold on; in the second case until it has been read."""
        return "there is no keys_file to read" if self.keyring is None else await self._read(self.keyring) or ""

    def reload_soon(self) -> None:
        """As `reload`, for whoever cannot wait."""
        task = asyncio.create_task(self.reload())
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    async def follow_keys(self) -> None:
        """Read the file of keys again whenever it has changed, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self.keyring is not None:
                await self._read(self.keyring, changed=True)

    async def _read(self, keyring: Keyring, *, changed: bool = False) -> str | None:
        """As `reload`. There is one reading at a time, so a share that does not answer keeps one thread waiting.

        changed: only where the file has changed; None where it has not."""
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
            said = f"{keyring.path}: {keyring.take(reading)} keys hold now"
        except ConfigError as error:
            said = f"{error}; the keys that held before hold on"
            log.error("%s", said)
        else:
            log.info("%s", said)
        return said

    async def _is_slow(self, reading: "asyncio.Task[str | None]") -> bool:
        await asyncio.wait({reading}, timeout=READ_S)
        return not reading.done()

    def _slow(self, keyring: Keyring) -> str:
        said = f"{keyring.path}: not read within {READ_S:g} s; the keys that held before hold on until it is"
        if not self._slow_said:
            self._slow_said = True
            log.error("%s", said)
        return said


T = TypeVar("T")


async def in_a_thread(work: Callable[[], T]) -> T:
    """What `work` returns, from a thread of its own. It is a daemon, since the interpreter waits for others as it ends,
    and what a dead share holds up never returns."""
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
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(told, result, error)

    threading.Thread(target=run, name="file", daemon=True).start()
    return await done


async def measure_lag(metrics: Metrics) -> None:
    """Observe by how much the event loop is late, until cancelled."""
    while True:
        due = clock.perf_counter() + LAG_S
        await asyncio.sleep(LAG_S)
        metrics.loop_lag.observe(max(0.0, clock.perf_counter() - due))
