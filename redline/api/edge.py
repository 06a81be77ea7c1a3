"""What the edge of one server shares: its keys, whether it drains, and how it writes its access lines."""

import asyncio
import logging
from pathlib import Path

from redline import clock
from redline.api.config import ApiConfig
from redline.api.keys import SECRET, Keyring
from redline.api.metrics import Metrics
from redline.api.passage import Passages
from redline.errors import ConfigError, Overloaded

LOOK_S = 1.0  # between two looks at the file of keys
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

    def check(self, method: str) -> None:
        """Raises Overloaded (503) for new work while the server drains; what only looks is answered."""
        if self.draining is not None and method == "POST":
            raise Overloaded(f"{self.draining}; ask another server, or again later", self.drain_s, "draining")

    def reload(self) -> str:
        """Read the keys again: -> what there is to say of it, which is logged too. Where the file is wrong, what held
        before holds on."""
        if self.keyring is None:
            return "there is no keys_file to read"
        try:
            said = f"{self.keyring.path}: {self.keyring.reload()} keys hold now"
        except ConfigError as error:
            said = f"{error}; the keys that held before hold on"
            log.error("%s", said)
        else:
            log.info("%s", said)
        return said

    async def follow_keys(self) -> None:
        """Read the file of keys again whenever it has changed, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self.keyring is not None and self.keyring.changed:
                self.reload()


async def measure_lag(metrics: Metrics) -> None:
    """Observe by how much the event loop is late, until cancelled."""
    while True:
        due = clock.perf_counter() + LAG_S
        await asyncio.sleep(LAG_S)
        metrics.loop_lag.observe(max(0.0, clock.perf_counter() - due))
