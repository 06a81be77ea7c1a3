"""Two workers within this process, one that computes prompts and one that answers, driven turn by turn."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from redline.transport.base import Transport
from redline.transport.memory import MemoryTransport
from redline.wire.codec import Wire, decode, encode
from redline.wire.delta import Delta
from redline.wire.handoff import Gone, Prefill
from redline.wire.job import Job, PagesFrom
from redline.worker.engine import EngineCore
from redline.worker.exchange import Exchange
from redline.worker.loop import StepInFlight, turn
from redline.worker.parcel_memory import HostParcels
from redline.worker.ways import Carrier
from tests.tiny_model import Answer, joined


class Box:
    """The way to a worker: what is put arrives with its next turn."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def put(self, message: Wire) -> None:
        self.messages.append(encode(message))

    def take(self) -> list[Wire]:
        taken, self.messages = self.messages, []
        return [decode(message) for message in taken]


class Side:
    """A worker: its engine, its exchange, and the step that is in flight."""

    def __init__(
        self, name: str, engine: EngineCore, carriers: Sequence[Carrier], boxes: dict[str, Box], **how: Any
    ) -> None:
        self.engine = engine
        self.box = boxes.setdefault(name, Box())
        self.name = name
        self.exchange: Exchange = engine.exchange(
            carriers,
            outbox_of=lambda address: boxes.setdefault(address, Box()),
            **how,
        )
        self.flight: StepInFlight | None = None
        self.stopped = False

    @property
    def as_other(self) -> PagesFrom:
        name = self.name
        return PagesFrom(worker=name, epoch=1, inbox=name, area=self.exchange.told, format=self.exchange.format)

    @property
    def idle(self) -> bool:
        return self.flight is None and self.engine.planner.idle and self.exchange.idle and not self.box.messages

    def turn(self) -> list[Delta]:
        """As `worker.loop.lead` does."""
        if self.stopped:
            return []
        told: list[Delta] = []
        for message in self.box.take():
            match message:
                case Job(pages_from=None):
                    told += self.engine.planner.submit(message)
                case Job():
                    told += self.exchange.expect(message)
                case Prefill():
                    told += self.exchange.prefill(message)
                case _ if type(message).__name__ == "Abort":
                    self.exchange.abort(message.job)  # type: ignore[union-attr]
                    told += self.engine.planner.abort(message.job)  # type: ignore[union-attr]
                case _:
                    self.exchange.hear(message)
        self.flight, settled = turn(self.engine.planner, self.engine.runner, self.flight)
        told += self.exchange.keep(settled) + self.exchange.work()
        self.engine.planner.check()
        self.exchange.check()
        return told


class Pair:
    """A worker that computes prompts, and one that answers."""

    def __init__(
        self,
        computes: EngineCore,
        answers: EngineCore,
        transport: Transport | None = None,
        clock: Callable[[], float] | None = None,
        carriers: Callable[[], Sequence[Carrier]] | None = None,
        **how: Any,
    ) -> None:
        """transport: of both; None: `memory`. carriers: makes those of each in its place."""
        self.boxes: dict[str, Box] = {}
        timed: dict[str, Any] = {} if clock is None else {"clock": clock}
        self.transport = transport or MemoryTransport(**timed)
        made = carriers or (lambda: [Carrier("memory", self.transport, HostParcels())])
        self.computes = Side("prefill", computes, made(), self.boxes, lends=True, **timed, **how)
        self.answers = Side("decode", answers, made(), self.boxes, lends=False, **timed)
        self.deltas: dict[str, list[Delta]] = {}

    def send(self, jobs: Sequence[Job]) -> None:
        """As a gateway does."""
        for job in jobs:
            self.deltas[job.id] = []
            self.answers.box.put(msgspec.structs.replace(job, pages_from=self.computes.as_other))
            self.computes.box.put(Prefill(job=job, to=self.answers.as_other))

    def turn(self) -> None:
        """Each worker's turn."""
        assert not self.computes.turn(), "whoever computes tells a client nothing"
        for delta in self.answers.turn():
            self.deltas[delta.job].append(delta)

    def stop_computing(self) -> None:
        """The worker that computes is gone, as far as the other is told."""
        self.computes.stopped = True
        self.answers.box.put(Gone(worker="prefill", epoch=1))

    def run(self, *waves: Sequence[Job], every: int = 3, most: int = 5000) -> dict[str, Answer]:
        """All jobs to their ends; a wave of them comes every so many turns."""
        arriving, turns = list(waves), 0
        with torch.inference_mode():
            while arriving or not (self.answers.idle and (self.computes.stopped or self.computes.idle)):
                if arriving and turns % every == 0:
                    self.send(arriving.pop(0))
                self.turn()
                turns += 1
                assert turns < most, "no end"
        return {name: joined(parts) for name, parts in self.deltas.items()}

    def close_exchanges(self) -> None:
        """The engines may be others' from now on."""
        for side in (self.computes, self.answers):
            side.exchange.close()

    def close(self) -> None:
        self.close_exchanges()
        for side in (self.computes, self.answers):
            side.engine.runner.close()
