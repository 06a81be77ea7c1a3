"""What one process of a deployment asks another, and waits for (`wire.replicas.Ask`, `Told`)."""

import asyncio
import itertools
from typing import Literal

from redline.wire.channel import Outbox
from redline.wire.replicas import Ask, Told

ASK_S = 2.0  # for an answer: who gives none in that time is stopped, or has ended


class Questions:
    """Those of this process that have not been answered."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[bytes]] = {}

    async def ask(
        self, outbox: Outbox, what: Literal["metrics", "status", "request", "reload"], about: str = ""
    ) -> bytes | None:
        """What the process that an outbox leads to answers; None where it does not within ASK_S seconds."""
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            outbox.put(Ask(number=number, what=what, about=about))
            async with asyncio.timeout(ASK_S):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._open[number]

    def told(self, told: Told) -> None:
        """Take in an answer; one that came too late is nobody's."""
        answer = self._open.get(told.number)
        if answer is not None and not answer.done():
            answer.set_result(told.body)
