"""Queries between the processes of a deployment, and their answers (`messages.replicas`)."""

import asyncio
import itertools
from typing import Literal

from redline.messages.channel import Outbox
from redline.messages.replicas import ReplicaQuery, ReplicaReply

ASK_S = 2.0  # timeout of an answer: a process that sends none by then is stopped, or has ended


class Questions:
    """The pending queries of this process."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[bytes]] = {}

    async def ask(
        self, outbox: Outbox, what: Literal["metrics", "status", "request", "reload"], about: str = ""
    ) -> bytes | None:
        """Query the process at the other end of `outbox`. Returns its answer, or None after ASK_S seconds."""
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            outbox.put(ReplicaQuery(number=number, what=what, about=about))
            async with asyncio.timeout(ASK_S):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._open[number]

    def told(self, told: ReplicaReply) -> None:
        """Process an answer; one that arrives after the timeout is dropped."""
        answer = self._open.get(told.number)
        if answer is not None and not answer.done():
            answer.set_result(told.body)
