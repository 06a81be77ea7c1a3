"""Several ranks of one model: rank 0 plans, and every rank does the same steps in the same order.

Rank 0 is the worker. It starts the others (`worker.rank`), tells each what it does with its own runner before it does
it, and never waits for their results: all ranks add up the same sums, so each comes to the same tokens by itself, and
compares them with what rank 0 has drawn (`worker.drawn`). They wait for one another in the model's sums alone, and not
for long (`kernels.group`). What comes from outside, pages of another worker, reaches all through memory that they share
(`worker.rank_memory`).
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
from redline.kernels.cpu.ranks import SharedMemoryGroup
from redline.kernels.group import Group
from redline.kernels.hopper.group import GpuGroup
from redline.model.k2.config import K2Config
from redline.model.k2.load import why_not
from redline.model.k2.shard import check_ranks, rooms_of
from redline.run.layer_marks import Meanwhile
from redline.run.runner import Pending, Runner
from redline.transport.base import Memory
from redline.transport.peer import Chip
from redline.wire.channel import SocketOutbox, ipc_address
from redline.wire.codec import Wire
from redline.wire.handoff import Piece
from redline.wire.job import Grammar, PageId
from redline.wire.news import Stop
from redline.wire.step import Compile, Forget, Hurry, Place, RecordMore, Step, StepResult
from redline.worker.config import EngineConfig, RankConfig
from redline.worker.drawn import Account
from redline.worker.parcel_memory import Ended
from redline.worker.rank_memory import RankMemory

if TYPE_CHECKING:
    from llguidance import LLMatcher

FOLLOW = sys.executable, "-m", "redline.worker.rank"  # the command of a rank that follows
END_S = 10.0  # for the ranks to end that were told to
LOST_END_S = 0.5  # where one is lost: the others may wait for it, and hear nothing
BEAT_S = 0.5  # between two signs that a rank's process runs: empty lines on its standard output
SILENT_BEATS = 10  # that fail to come, while rank 0 waits in one step, of a process that is stopped or hangs
MEET = "meet"  # the file, of their folder, through which ranks find one another

_log = logging.getLogger(__name__)


def check(config: K2Config, ranks: int, device: torch.device) -> None:
    """Raises ConfigError where the model does not come apart into so many ranks, or the host has too few GPUs."""
    check_ranks(config, ranks)
    if ranks > 1 and device.type == "cuda":
        if torch.cuda.device_count() < ranks:
            raise ConfigError(f"engine.ranks is {ranks}, and torch sees {torch.cuda.device_count()} GPUs")
        if reason := why_not(config, device):
            raise ConfigError(f"engine.ranks is {ranks}: several GPUs need the GPU's own kernels ({reason})")
    if ranks > 1 and device.type == "cpu" and native.find_compiler() is None:
        raise ConfigError(f"engine.ranks is {ranks}: ranks on a CPU need the CPU's kernels, and there is no compiler")


def device_of(rank: int, device: torch.device) -> torch.device:
    """The device of a rank, which is torch's current one from then on."""
    if device.type == "cpu":
        return device
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def open_group(folder: Path, rank: int, ranks: int, device: torch.device, config: K2Config) -> Group:
    """This rank's end of what they share, where all meet in a folder of rank 0's."""
    file = folder / MEET
    if device.type == "cuda":
        return GpuGroup(str(file), rank, ranks, device, rooms_of(config, ranks))
    return SharedMemoryGroup(file, rank, ranks)


class Ranks:
    """The ranks that follow this process, which is rank 0, and the group of all. Close it, and they end."""

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
        """Starts them; they load while the caller does.

        lost: called once, in a thread of its own, with one line where a rank has ended that should not, or does not
        run. None: the group is told. alone, aside: as `EngineCore.load` has them. Raises ConfigError where they cannot
        be started, RankLost where one has ended.
        """
        self.step = 0  # the number of the last one
        self.waits: int | None = None  # the number of the step that rank 0 waits for
        self.hurried = False  # whether every rank is ready for steps
        self.reason: str | None = None  # why the ranks are lost, once they are
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
                self.group.lose(self.reason)  # before there was a group to be told
            watcher = threading.Thread(target=self._listen, name="beats", daemon=True)
            watcher.start()
            self._watching.append(watcher)
        except BaseException as error:
            self.close()
            if self.reason is not None and isinstance(error, Exception):
                raise RankLost(self.reason) from error
            raise

    def _start(self, told: RankConfig) -> None:
        # As the worker is started (fleet.serve): what stops a group of processes is for rank 0 to pass on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        process = subprocess.Popen(FOLLOW, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(told.memory,))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._processes.append(process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, which its watcher tells
            process.stdin.write(msgspec.json.encode(told) + b"\n")
            process.stdin.flush()
        self._outboxes.append(SocketOutbox(told.inbox))
        watcher = threading.Thread(target=self._watch, args=(told.rank, process), name=f"rank {told.rank}", daemon=True)
        watcher.start()
        self._watching.append(watcher)

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        """Until the rank ends: its last line says why, where it could say so. Empty lines are its beats."""
        assert process.stdout is not None
        said = b""
        with process.stdout:
            for line in process.stdout:
                said = line.strip() or said
                self._beats[rank] += 1
        code = process.wait()
        why = said.decode(errors="replace") or f"it has ended with code {code}"
        at = f" in step {self.step:,}" if self.step else " while it was loading"
        self._lose(f"rank {rank} is lost{at}: {why}")

    def _listen(self) -> None:
        """Until the end: whether rank 0 waits for a rank whose process does not run. On a GPU nothing else sees that in
        a prompt, whose sums are NCCL's.

        It is counted in turns of this thread, and no clock is read: where all were stopped for a while, nobody is late.
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
                    self._lose(f"{kept} {waits}: its process does not run")

    def _waited_for(self, rank: int) -> str | None:
        """Where rank 0 may be waiting for a rank; None: nowhere."""
        if (step := self.waits) is not None:
            return f"in step {step:,}"
        taken = self.memory.taken(rank)
        return f"with parcel {taken + 1:,}" if taken < self.memory.told else None

    def _lose(self, reason: str) -> None:
        """Tells why the ranks are lost, the first time."""
        with self._telling:
            if self._ending or self.reason is not None:
                return
            self.reason = reason
        if self._lost is not None:
            shutil.rmtree(self._folder.name, ignore_errors=True)  # it ends the process, which takes nothing with it
            self._lost(reason)
        elif (group := vars(self).get("group")) is not None:
            group.lose(reason)

    def tell(self, command: Wire) -> None:
        """Every rank does what this one is about to do. Any thread may call this."""
        with self._commanding:
            for outbox in self._outboxes:
                outbox.put(command)

    def share(self, size: int) -> Memory:
        """So many bytes, zeros, that every rank can read. Raises ConfigError where they are not there."""
        memory, grown = self.memory.grow(size)
        self.tell(grown)
        return memory

    def export(self, chip: Chip, size: int) -> Memory:
        """So many bytes of this rank's GPU, zeros, that every other can map. Raises ConfigError where they are not
        there."""
        memory, exported = self.memory.export(chip, size)
        self.tell(exported)
        return memory

    def scatter(self, piece: Piece, pages: Sequence[PageId], from_B: Tensor) -> Ended:
        """Has the others put a parcel, which lies in what `share` or `export` gave, into a job's pages: steps that they
        are told of from now on find it there. -> whether they need its bytes no more, which raises RankLost where they
        never will say so. Any thread may call this."""
        with self._commanding:
            self.tell(self.memory.scatter(piece, pages, from_B))
            number = self.memory.told

        def ended() -> bool:
            if self.reason is not None or self._ending:
                raise RankLost(self.reason or "the ranks have been told to end")
            return self.memory.all_have(number)

        return ended

    def close(self) -> None:
        """Ends them: those that have not ended END_S after they were told to are killed. Safe to call twice."""
        with self._telling:
            self._ending = True
        self._over.set()
        until = clock.monotonic() + (END_S if self.reason is None else LOST_END_S)
        with contextlib.suppress(RankLost, RuntimeError):
            self.tell(Stop())
        group: Group | None = vars(self).pop("group", None)
        if group is not None and self.reason is None:
            group.close()  # as the others do now
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
            group.close()  # once the others are gone
        self._folder.cleanup()


def _memory_folder(device: torch.device) -> str | None:
    """A folder in memory, for what a CPU's ranks share; None: any."""
    return "/dev/shm" if device.type == "cpu" and os.access("/dev/shm", os.W_OK) else None


class Awaited:
    """A step that all ranks run, launched here: it is waited for once."""

    def __init__(self, number: int, pending: Pending, ranks: Ranks, account: Account) -> None:
        self._number = number
        self._pending = pending
        self._ranks = ranks
        self._account = account

    def watch(self, meanwhile: Meanwhile) -> None:
        """As `Launched.watch`."""
        self._ranks.waits = self._number
        try:
            self._pending.watch(meanwhile)
        finally:
            self._ranks.waits = None

    def wait(self) -> StepResult:
        """As `Launched.wait`."""
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
    """Rank 0's runner: whatever is done with it, the others are told first."""

    def __init__(self, ranks: Ranks, *given: Any, **options: Any) -> None:
        """given, options: a Runner's."""
        self._ranks = ranks
        self._account = Account()
        # Grammars that the others were told to compile, each with its number among all that they were told of.
        self._numbers: weakref.WeakKeyDictionary[Future[LLMatcher], int] = weakref.WeakKeyDictionary()
        self._told = 0  # the last number
        self._forgotten: deque[int] = deque()  # grammars of which the others have not been told that they may go
        super().__init__(*given, **options)

    def launch(self, step: Step) -> Awaited:
        """As `Runner.launch`, on every rank. Each step is waited for, in the order of their launches."""
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
            # Any thread may be the last to need it, with whatever locks: so `tell` is called later.
            weakref.finalize(compiled, self._forgotten.append, number)
            self._ranks.tell(Compile(number=number, text=grammar.text))
        self._tell_forgotten()
        memory = self._ranks.memory
        return lambda: compiled.done() and memory.compiled(number)

    def _tell_forgotten(self) -> None:
        """The others let go of grammars that this rank has forgotten, and keep all others: a job begins only where no
        rank has to compile its grammar within the step."""
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
        """As `Runner.close`; then the other ranks end."""
        super().close()
        self._ranks.close()
