"""Tensor parallel ranks of one model: rank 0 runs the scheduler, and every rank runs the same steps in the same order.

Rank 0 is the worker. It starts the other ranks (`worker.rank`), sends each command to them before it runs the command
itself, and never waits for their results: after the all-reduces every rank has the same logits, so each rank samples
the same tokens by itself, and compares them with the tokens that rank 0 has sampled (`worker.drawn`). The ranks wait
for one another only in the model's collectives, and with a timeout (`kernels.group`). KV pages of other workers reach
all ranks through shared memory (`worker.rank_memory`).
"""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from redline import clock
from redline.errors import ConfigError, RankLost
from redline.kernels.cpu import native
from redline.kernels.cpu.all_reduce import SharedMemoryGroup
from redline.kernels.cuda.collectives.gpu_group import GpuGroup
from redline.kernels.group import Group
from redline.messages.channel import SocketOutbox, ipc_address
from redline.messages.codec import Wire
from redline.messages.handoff import Piece
from redline.messages.job import Grammar, PageId
from redline.messages.media import ImageData
from redline.messages.news import Stop
from redline.messages.step import Compile, Forget, Hurry, Place, RecordMore, Step, StepResult
from redline.model.k2.config import K2Config
from redline.model.k2.load import why_not
from redline.model.k2.shard import check_ranks, rooms_of
from redline.run.layer_marks import Meanwhile
from redline.run.pending import Pending
from redline.run.runner import Runner
from redline.transport.base import MemoryRange
from redline.transport.peer import GpuDriver
from redline.worker.config import EngineConfig, RankConfig
from redline.worker.drawn import TokenDigest
from redline.worker.parcel_memory import Ended
from redline.worker.rank_memory import RankMemory

if TYPE_CHECKING:
    from llguidance import LLMatcher

FOLLOW = sys.executable, "-m", "redline.worker.rank"  # command line of the other ranks
END_S = 10.0  # timeout, in seconds, for the ranks to exit after a Stop
LOST_END_S = 0.5  # the same if a rank is down: the others may wait for it in a collective and read no commands
BEAT_S = 0.5  # heartbeat interval of a rank's process, in seconds: empty lines on its standard output
SILENT_BEATS = 10  # missed heartbeats, while rank 0 waits in one step, after which a rank is taken to be down
MEET = "meet"  # name of the rendezvous file in the ranks' folder

_log = logging.getLogger(__name__)


def check(config: K2Config, ranks: int, device: torch.device) -> None:
    """Raises ConfigError if the model cannot be sharded over `ranks` ranks, or if the host has too few GPUs."""
    check_ranks(config, ranks)
    if ranks > 1 and device.type == "cuda":
        if torch.cuda.device_count() < ranks:
            raise ConfigError(f"engine.ranks is {ranks}, but torch finds {torch.cuda.device_count()} GPUs")
        if reason := why_not(config, device):
            raise ConfigError(f"engine.ranks is {ranks}: several GPUs need the GPU kernels ({reason})")
    if ranks > 1 and device.type == "cpu" and native.find_compiler() is None:
        raise ConfigError(f"engine.ranks is {ranks}: ranks on a CPU need the CPU kernels, but no compiler is found")


def device_of(rank: int, device: torch.device) -> torch.device:
    """The device of a rank; also sets torch's current device."""
    if device.type == "cpu":
        return device
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def open_group(folder: Path, rank: int, ranks: int, device: torch.device, config: K2Config) -> Group:
    """This rank's side of the tensor parallel group, with a rendezvous in rank 0's folder."""
    file = folder / MEET
    if device.type == "cuda":
        return GpuGroup(str(file), rank, ranks, device, rooms_of(config, ranks))
    return SharedMemoryGroup(file, rank, ranks)


class Ranks:
    """The other tensor parallel ranks, as seen by this process, which is rank 0; and the group of all. `close` ends
    them."""

    def __init__(
        self,
        weights: str,
        engine: EngineConfig,
        device: torch.device,
        config: K2Config,
        lost: Callable[[str], object] | None = None,
        *,
        alone: bool = False,
        aside: int = 0,
    ) -> None:
        """Starts the ranks; they load their shards while the caller loads its own.

        lost: called once, in a thread of its own, with a one-line reason if a rank exits unexpectedly or hangs. None:
        the group is marked as lost instead. alone, aside: as in `EngineCore.load`. Raises ConfigError if the ranks
        cannot be started, RankLost if one has exited.
        """
        self.step = 0  # number of the last launched step
        self.waits: int | None = None  # number of the step that rank 0 waits for
        self.hurried = False  # whether every rank is ready for steps
        self.reason: str | None = None  # why the ranks are lost; None: they are running
        self._lost = lost
        self._ending = False
        self._telling = threading.Lock()
        self._commanding = threading.RLock()
        self._beats = [0] * engine.ranks
        self._over = threading.Event()
        self.memory = RankMemory(engine.ranks)
        self._folder = tempfile.TemporaryDirectory(prefix="redline-", dir=_memory_folder(device))
        folder, ranks = Path(self._folder.name), engine.ranks
        self._outboxes: list[SocketOutbox] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watching: list[threading.Thread] = []
        if device.type == "cpu":
            SharedMemoryGroup.create(folder / MEET, ranks)
            native.share_processors(ranks)
        try:
            for rank in range(1, ranks):
                inbox = ipc_address(folder, f"rank-{rank}")
                self._start(
                    RankConfig(
                        weights=weights,
                        engine=engine,
                        rank=rank,
                        folder=str(folder),
                        inbox=inbox,
                        memory=self.memory.file,
                        alone=alone,
                        aside=aside,
                    )
                )
            self.device = device_of(0, device)
            self.group = open_group(folder, 0, ranks, self.device, config)
            if self.reason is not None:
                self.group.abort(self.reason)  # a rank went down before the group existed
            watcher = threading.Thread(target=self._listen, name="beats", daemon=True)
            watcher.start()
            self._watching.append(watcher)
        except BaseException as error:
            self.close()
            if self.reason is not None and isinstance(error, Exception):
                raise RankLost(self.reason) from error
            raise

    def _start(self, told: RankConfig) -> None:
        # Signals are blocked as when a worker is started (fleet.serve): they reach the whole process group, and rank 0
        # alone decides when the other ranks stop.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        process = subprocess.Popen(FOLLOW, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(told.memory,))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._processes.append(process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has exited already; its watcher reports that
            process.stdin.write(msgspec.json.encode(told) + b"\n")
            process.stdin.flush()
        self._outboxes.append(SocketOutbox(told.inbox))
        watcher = threading.Thread(target=self._watch, args=(told.rank, process), name=f"rank {told.rank}", daemon=True)
        watcher.start()
        self._watching.append(watcher)

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        """Reads the rank's standard output until it exits. Empty lines are heartbeats; the last other line, if any, is
        the reason of its exit."""
        assert process.stdout is not None
        said = b""
        with process.stdout:
            for line in process.stdout:
                said = line.strip() or said
                self._beats[rank] += 1
        code = process.wait()
        why = said.decode(errors="replace") or f"it exited with code {code}"
        at = f" in step {self.step:,}" if self.step else " while it was loading"
        self._lose(f"rank {rank} failed{at}: {why}")

    def _listen(self) -> None:
        """Watchdog thread: detects that rank 0 waits for a rank that has stopped running. On a GPU nothing else detects
        that during prefill, where the all-reduces are NCCL's.

        It counts iterations of this thread and reads no clock: if all processes were suspended for a while, no rank is
        taken to be late.
        """
        group, heard, silent = self.group, list(self._beats), [0] * len(self._beats)
        waited: list[str | None] = [None] * len(self._beats)
        while not self._over.wait(BEAT_S):
            try:
                group.check()
            except RankLost as error:
                self._lose(f"{error} in step {self.step:,}")
            for rank in range(1, len(self._beats)):
                waits = self._waited_for(rank) if self.hurried else None
                same = waits is not None and waits == waited[rank]
                silent[rank] = silent[rank] + 1 if same and self._beats[rank] == heard[rank] else 0
                heard[rank], waited[rank] = self._beats[rank], waits
                if silent[rank] == SILENT_BEATS:
                    kept = f"rank {rank} has kept rank 0 waiting for {SILENT_BEATS * BEAT_S:.0f} s"
                    self._lose(f"{kept} {waits}: its process sends no heartbeats")

    def _waited_for(self, rank: int) -> str | None:
        """A phrase for the place at which rank 0 may be waiting for a rank; None: it is not waiting."""
        if (step := self.waits) is not None:
            return f"in step {step:,}"
        taken = self.memory.taken(rank)
        return f"with KV chunk {taken + 1:,}" if taken < self.memory.told else None

    def _lose(self, reason: str) -> None:
        """Reports why the ranks are lost; only the first call has an effect."""
        with self._telling:
            if self._ending or self.reason is not None:
                return
            self.reason = reason
        if self._lost is not None:
            shutil.rmtree(self._folder.name, ignore_errors=True)  # `_lost` ends the process without any cleanup
            self._lost(reason)
        elif (group := vars(self).get("group")) is not None:
            group.abort(reason)

    def tell(self, command: Wire) -> None:
        """Sends a command to all other ranks. Any thread may call this."""
        with self._commanding:
            for outbox in self._outboxes:
                outbox.put(command)

    def share(self, size: int) -> MemoryRange:
        """Allocates `size` zeroed bytes of host memory that every rank can read. Raises ConfigError if there is no
        room."""
        memory, grown = self.memory.grow(size)
        self.tell(grown)
        return memory

    def export(self, chip: GpuDriver, size: int) -> MemoryRange:
        """Allocates `size` zeroed bytes on this rank's GPU that every other rank maps. Raises ConfigError if there is
        no room."""
        memory, exported = self.memory.export(chip, size)
        self.tell(exported)
        return memory

    def scatter(self, piece: Piece, pages: Sequence[PageId], from_B: Tensor) -> Ended:
        """Makes the other ranks copy a KV chunk, which is in memory of `share` or `export`, into a job's pages, before
        all steps that are sent to them from now on. -> a function that returns whether all of them have copied it, so
        that its bytes may be reused; it raises RankLost if the ranks are down. Any thread may call this."""
        with self._commanding:
            self.tell(self.memory.scatter(piece, pages, from_B))
            number = self.memory.told

        def ended() -> bool:
            if self.reason is not None or self._ending:
                raise RankLost(self.reason or "the ranks are being stopped")
            return self.memory.all_have(number)

        return ended

    def close(self) -> None:
        """Stops the ranks: those that have not exited END_S seconds after the Stop are killed. Safe to call twice."""
        with self._telling:
            self._ending = True
        self._over.set()
        until = clock.monotonic() + (END_S if self.reason is None else LOST_END_S)
        with contextlib.suppress(RankLost, RuntimeError):
            self.tell(Stop())
        group: Group | None = vars(self).pop("group", None)
        if group is not None and self.reason is None:
            group.close()  # a collective call: the other ranks close it now, too
            group = None
        for process in self._processes:
            try:
                process.wait(max(0.0, until - clock.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for watcher in self._watching:
            watcher.join()
        for outbox in self._outboxes:
            outbox.close()
        self._outboxes = []
        self.memory.close()
        if group is not None:
            group.close()  # after the other ranks have exited
        self._folder.cleanup()


def _memory_folder(device: torch.device) -> str | None:
    """A folder in memory for the shared memory of CPU ranks; None: the default folder for temporary files."""
    return "/dev/shm" if device.type == "cpu" and os.access("/dev/shm", os.W_OK) else None


class Awaited:
    """A step in flight that all ranks run. `wait` may be called only once."""

    def __init__(self, number: int, pending: Pending, ranks: Ranks, account: TokenDigest) -> None:
        self._number = number
        self._pending = pending
        self._ranks = ranks
        self._account = account

    def watch(self, meanwhile: Meanwhile) -> None:
        """As `LaunchedStep.watch`."""
        self._ranks.waits = self._number
        try:
            self._pending.watch(meanwhile)
        finally:
            self._ranks.waits = None

    def wait(self) -> StepResult:
        """As `LaunchedStep.wait`."""
        self._ranks.waits = self._number
        try:
            result = self._pending.wait()
        except RankLost as error:
            self._ranks.reason = self._ranks.reason or str(error)
            raise
        finally:
            self._ranks.waits = None
        self._account.note(result)
        return result


class LeadingRunner(Runner):
    """Rank 0's runner: it sends each command to the other ranks before it runs the command itself."""

    def __init__(self, ranks: Ranks, *given: Any, **options: Any) -> None:
        """given, options: the arguments of Runner."""
        self._ranks = ranks
        self._account = TokenDigest()
        # Grammars that were sent to the other ranks for compilation, numbered in that order.
        self._numbers: weakref.WeakKeyDictionary[Future[LLMatcher], int] = weakref.WeakKeyDictionary()
        self._told = 0  # the last number
        self._forgotten: deque[int] = deque()  # grammars freed here that the other ranks do not know yet to be free
        super().__init__(*given, **options)

    def launch(self, step: Step) -> Awaited:
        """As `Runner.launch`, on every rank. The caller has to wait for each step, in the order of the launches."""
        self._ranks.step = step.number
        self._ranks.tell(msgspec.structs.replace(step, drawn=self._account.drawn))
        self._tell_forgotten()
        return Awaited(step.number, super().launch(step), self._ranks, self._account)

    def hurry(self) -> None:
        """As `Runner.hurry`, on every rank."""
        self._ranks.tell(Hurry())
        super().hurry()
        self._ranks.hurried = True

    def record_more(self) -> bool:
        """As `Runner.record_more`, on every rank."""
        if self.overlaps:
            self._ranks.tell(RecordMore())
        return super().record_more()

    def hold(self, grammar: Grammar) -> Callable[[], bool]:
        """As `Runner.hold`, on every rank."""
        if self._matchers is None or not grammar.text:
            return super().hold(grammar)
        compiled = self._matchers.hold(grammar.text)
        number = self._numbers.get(compiled)
        if number is None:
            self._told += 1
            number = self._numbers[compiled] = self._told
            # Any thread may drop the last reference, while it holds any locks, so `tell` is not called here but later.
            weakref.finalize(compiled, self._forgotten.append, number)
            self._ranks.tell(Compile(number=number, text=grammar.text))
        self._tell_forgotten()
        memory = self._ranks.memory
        return lambda: compiled.done() and memory.compiled(number)

    def put_image(self, image: ImageData) -> None:
        """As `Runner.put_image`, on every rank."""
        self._ranks.tell(image)
        super().put_image(image)

    def _tell_forgotten(self) -> None:
        """Makes the other ranks free the grammars that this rank has freed; they keep all others, because a job may
        begin only if no rank has to compile its grammar within the step."""
        if self._forgotten:
            self._ranks.tell(Forget(numbers=tuple(self._forgotten.popleft() for _ in range(len(self._forgotten)))))

    def place(self, number: int, length: int, drafts: Sequence[int]) -> None:
        """As `Runner.place`, on every rank."""
        self._ranks.tell(Place(slot=number, length=length, drafts=tuple(drafts)))
        super().place(number, length, drafts)

    def forget_text(self, number: int) -> None:
        """As `Runner.forget_text`, on every rank."""
        self._ranks.tell(Place(slot=number))
        super().forget_text(number)

    def close(self) -> None:
        """As `Runner.close`; then stops the other ranks."""
        super().close()
        self._ranks.close()
