"""A prefill worker and a decode worker within this process, driven iteration by iteration."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from redline.messages.codec import Wire, decode, encode
from redline.messages.delta import Delta
from redline.messages.handoff import ChunkAck, Prefill, PullRequest, WorkerDown
from redline.messages.job import Job, PagesFrom
from redline.messages.step import Step, StepResult
from redline.run.layer_marks import Meanwhile
from redline.run.pending import Pending
from redline.transport.base import Transport
from redline.transport.memory import MemoryTransport
from redline.worker.engine import EngineCore
from redline.worker.kv_transfer.manager import KvTransferManager
from redline.worker.loop import WATCH_S
from redline.worker.parcel_memory import HostParcels
from redline.worker.ports import StepLauncher
from redline.worker.transfer_paths import Carrier
from redline.worker.turn import StepInFlight, turn
from tests.tiny_model import Answer, joined


class Box:
    """The channel to a worker: a message arrives with the worker's next iteration."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self._arrived = threading.Event()

    def put(self, message: Wire) -> None:
        self.messages.append(encode([message]))
        self._arrived.set()

    def wait(self, seconds: float) -> None:
        """Returns when a message is there, or after this time."""
        if not self.messages:
            self._arrived.clear()
            self._arrived.wait(seconds)

    def take(self) -> list[Wire]:
        taken, self.messages = self.messages, []
        return [message for data in taken for message in decode(data)]


class Layered:
    """A runner with steps that can be watched, as on a GPU: while a step runs, only the layers already computed have
    their final contents, and all others have garbage.
    """

    def __init__(self, engine: EngineCore) -> None:
        self._runner, self._planes = engine.runner, engine.runner.kv.planes
        self.recorded, self.begins = engine.runner.recorded, engine.runner.begins

    def record_more(self) -> bool:
        return self._runner.record_more()

    def launch(self, step: Step) -> Pending:
        return _LayeredStep(self._runner.launch(step), self._planes)


class _LayeredStep:
    def __init__(self, pending: Pending, planes: Tensor) -> None:
        self._pending, self._planes = pending, planes

    def watch(self, meanwhile: Meanwhile) -> None:
        before = self._planes.view(torch.uint8).clone()
        self._pending.wait()
        planes = self._planes.view(torch.uint8)
        whole = planes.clone()
        other = torch.where((whole != before).any(-1, keepdim=True), torch.randint_like(whole, 0, 256), whole)
        for layers in range(len(whole) + 1):
            planes[layers:] = other[layers:]
            meanwhile(layers)
            planes.copy_(whole)

    def wait(self) -> StepResult:
        return self._pending.wait()


class Side:
    """A worker: its engine, its KV transfers, and the step in flight."""

    def __init__(
        self,
        name: str,
        engine: EngineCore,
        carriers: Sequence[Carrier],
        boxes: dict[str, Box],
        *,
        layered: bool = False,
        **how: Any,
    ) -> None:
        """layered: the worker's steps are watched."""
        self.engine = engine
        self._layered = layered
        self.runner: StepLauncher = Layered(engine) if layered else engine.runner
        self.box = boxes.setdefault(name, Box())
        self.name = name
        self.exchange: KvTransferManager = engine.exchange(
            carriers,
            outbox_of=lambda address: boxes.setdefault(address, Box()),
            **how,
        )
        self.flight: StepInFlight | None = None
        self.stopped = False
        self._held: list[Wire] = []

    @property
    def as_other(self) -> PagesFrom:
        name = self.name
        return PagesFrom(worker=name, epoch=1, inbox=name, area=self.exchange.told, format=self.exchange.format)

    @property
    def idle(self) -> bool:
        return (
            self.flight is None
            and self.engine.planner.idle
            and self.exchange.idle
            and not self.box.messages
            and not self._held
        )

    def turn(self) -> list[Delta]:
        """One iteration, as in `worker.loop.lead`."""
        if self.stopped:
            return []
        told: list[Delta] = []
        held, self._held = self._held, []
        for message in [*held, *self.box.take()]:
            match message:
                case Job(pages_from=None):
                    told += self.engine.planner.submit(message)
                case Job():
                    told += self.exchange.hear(message) or []
                case Prefill():
                    told += self.exchange.hear(message) or []
                case _ if type(message).__name__ == "Abort":
                    self.exchange.abort(message.job)  # type: ignore[union-attr]
                    told += self.engine.planner.abort(message.job)  # type: ignore[union-attr]
                case _:
                    self.exchange.hear(message)
        self.flight, settled = turn(
            self.engine.planner,
            self.runner,
            self.flight,
            meanwhile=lambda: self._depart if self.exchange.leaves else None,
        )
        told += self.exchange.settled(settled)
        self.engine.planner.check()
        self.exchange.check()
        return told

    def _depart(self, layers: int) -> None:
        """Send computed layers, as in `worker.loop.lead`: it waits, so that the thread that launches the step runs."""
        self.exchange.depart(layers)
        if not self._layered:  # there the step has run
            self.box.wait(WATCH_S)
        for message in self.box.take():
            if isinstance(message, PullRequest | ChunkAck):
                self.exchange.hear(message)
            else:
                self._held.append(message)


class Pair:
    """A prefill worker and a decode worker."""

    def __init__(
        self,
        computes: EngineCore,
        answers: EngineCore,
        transport: Transport | None = None,
        clock: Callable[[], float] | None = None,
        carriers: Callable[[], Sequence[Carrier]] | None = None,
        *,
        layered: bool = False,
        **how: Any,
    ) -> None:
        """transport: of both workers; None: `memory`. carriers: creates the transports of each instead. layered:
        whether steps of the prefill worker are watched, on a CPU.
        """
        self.boxes: dict[str, Box] = {}
        timed: dict[str, Any] = {} if clock is None else {"clock": clock}
        self.transport = transport or MemoryTransport(**timed)
        made = carriers or (lambda: [Carrier("memory", self.transport, HostParcels())])
        self.computes = Side("prefill", computes, made(), self.boxes, lends=True, layered=layered, **timed, **how)
        self.answers = Side("decode", answers, made(), self.boxes, lends=False, **timed)
        self.deltas: dict[str, list[Delta]] = {}

    def send(self, jobs: Sequence[Job]) -> None:
        """Send the jobs to both workers, as a gateway does."""
        for job in jobs:
            self.deltas[job.id] = []
            self.answers.box.put(msgspec.structs.replace(job, pages_from=self.computes.as_other))
            self.computes.box.put(Prefill(job=job, to=self.answers.as_other))

    def turn(self) -> None:
        """One iteration of each worker."""
        assert not self.computes.turn(), "the prefill worker must not send deltas"
        for delta in self.answers.turn():
            self.deltas[delta.job].append(delta)

    def stop_computing(self) -> None:
        """End the prefill worker, and notify the decode worker."""
        self.computes.stopped = True
        self.answers.box.put(WorkerDown(worker="prefill", epoch=1))

    def run(self, *waves: Sequence[Job], every: int = 3, most: int = 5000) -> dict[str, Answer]:
        """Run all jobs to their ends; a wave of them arrives every `every` iterations."""
        arriving, turns = list(waves), 0
        with torch.inference_mode():
            while arriving or not (self.answers.idle and (self.computes.stopped or self.computes.idle)):
                if arriving and turns % every == 0:
                    self.send(arriving.pop(0))
                self.turn()
                turns += 1
                assert turns < most, "the jobs did not end"
        return {name: joined(parts) for name, parts in self.deltas.items()}

    def close_exchanges(self) -> None:
        """Close the KV transfers only: the engines may be reused by other tests."""
        for side in (self.computes, self.answers):
            side.exchange.close()

    def close(self) -> None:
        self.close_exchanges()
        for side in (self.computes, self.answers):
            side.engine.runner.close()
