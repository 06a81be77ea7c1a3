"""Tries grammars in processes that can be killed, so that what a client's grammar costs, it costs its own key's trials.

Keys take turns. There are two processes: one takes whatever has its turn, the other small grammars alone, so that large
ones never fill both. A key whose trial has taken too long waits behind all others for a while. Where a client
leaves, its trial is dropped if it has not begun; else it ends as any other, and its verdict is kept.
"""

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from redline import clock
from redline.api.config import Limits
from redline.api.grammar_child import LENGTH, Trial, Verdict, Vocabulary, framed
from redline.chat.tokenizer import RESERVED, Tokenizer
from redline.errors import Overloaded

SMALL_BYTES = 16 << 10  # of a grammar that the second process takes: a compilation of some 50 ms
LATE_S = 30.0  # that a key waits behind others, once a trial of its own has taken too long
START_S = 60.0  # for a process to read its vocabulary, on a machine that is busy loading a model

log = logging.getLogger("redline.api")


class Child(Protocol):
    """One that tries grammars, one at a time. It may be asked again after anything but `kill`."""

    async def ask(self, trial: Trial) -> Verdict:
        """What comes of a trial. Raises TimeoutError where it takes too long, ConnectionError where the process has
        ended, which it does where it has no more memory, and Overloaded where none can be started."""
        ...

    def kill(self) -> None:
        """Ends what it has started; idempotent."""
        ...

    async def ended(self) -> None:
        """Waits until that has ended."""
        ...


class _Asked:
    """A trial that waits or is being tried, and whoever waits for its verdict."""

    __slots__ = ("callers", "key", "small", "tenant", "trial", "verdict")

    def __init__(self, trial: Trial, tenant: str, key: bytes, small: bool) -> None:
        self.trial = trial
        self.tenant = tenant
        self.key = key
        self.small = small
        self.callers = 0
        self.verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()


class Trials:
    """The queue of trials, and two children that take from it. Everything runs in one event loop."""

    def __init__(self, limits: Limits, children: Sequence[Child], keep: Callable[[bytes, Verdict], object]) -> None:
        """children: the first takes all trials, the others small ones. keep: is given each verdict, by its key."""
        self._limits = limits
        self._keep = keep
        self._children = children
        self._serving: dict[int, asyncio.Task[None]] = {}  # by a child's place, while it has something to do
        self._lines: dict[str, deque[_Asked]] = {}  # of keys with trials that wait, in the order in which they came
        self._known: dict[tuple[str, bytes], _Asked] = {}  # those that wait, or are being tried
        self._turn = 0
        self._turns: dict[str, int] = {}  # when each key had its last turn
        self._late_until: dict[str, float] = {}  # of keys whose trials took too long, by `clock.monotonic`

    @property
    def waiting(self) -> int:
        """Trials that have not begun."""
        return sum(map(len, self._lines.values()))

    async def verdict(self, trial: Trial, tenant: str, key: bytes, size: int) -> Verdict:
        """What comes of a trial.

        tenant: the name of the client's key. key: of the trial; who asks for the same meanwhile gets the same verdict.
        size: bytes of its text. Raises Overloaded where too many of this tenant wait already.
        """
        asked = self._known.get((tenant, key))
        if asked is None:
            line = self._lines.get(tenant, ())
            if len(line) >= self._limits.grammars:
                raise Overloaded(f"{len(line)} grammars wait to be compiled; try again later")
            asked = self._known[tenant, key] = _Asked(trial, tenant, key, size <= SMALL_BYTES)
            self._lines.setdefault(tenant, deque()).append(asked)
            self._wake()
        asked.callers += 1
        try:
            return await asyncio.shield(asked.verdict)
        finally:
            asked.callers -= 1
            if not asked.callers and asked in (line := self._lines.get(tenant, deque())):
                self._leaves(line, asked)
                del self._known[tenant, key]

    def close(self) -> None:
        """Kill the children; idempotent. Who waits for a verdict gets Overloaded."""
        for task in self._serving.values():
            task.cancel()
        for child in self._children:
            child.kill()
        for asked in self._known.values():
            if not asked.verdict.done():
                asked.verdict.set_exception(Overloaded("the server ends"))
                asked.verdict.exception()  # nobody may be left to look
        self._known, self._lines = {}, {}

    async def ended(self) -> None:
        """Wait until every process that was killed has ended."""
        await asyncio.gather(*self._serving.values(), return_exceptions=True)
        for child in self._children:
            await child.ended()

    def _wake(self) -> None:
        """Sets the first child to work that has nothing to do, and may take something that waits."""
        for place in range(len(self._children)):
            if place not in self._serving and self._due(place) is not None:
                task = asyncio.get_running_loop().create_task(self._serve(place))
                self._serving[place] = task
                return

    def _due(self, place: int) -> _Asked | None:
        """The trial whose turn it is among those that a child may take."""
        now = clock.monotonic()
        found: list[tuple[bool, int, int, _Asked]] = []
        for number, (tenant, line) in enumerate(self._lines.items()):
            if (asked := next((one for one in line if one.small or not place), None)) is not None:
                late = self._late_until.get(tenant, now) > now
                found.append((late, self._turns.get(tenant, 0), number, asked))
        return min(found)[-1] if found else None

    def _leaves(self, line: deque[_Asked], asked: _Asked) -> None:
        line.remove(asked)
        if not line:
            del self._lines[asked.tenant]

    async def _serve(self, place: int) -> None:
        """Until nothing waits that this child may take."""
        try:
            while (asked := self._due(place)) is not None:
                self._leaves(self._lines[asked.tenant], asked)
                self._turn += 1
                self._turns[asked.tenant] = self._turn
                await self._try(self._children[place], asked)
        finally:
            del self._serving[place]

    async def _try(self, child: Child, asked: _Asked) -> None:
        verdict: Verdict | Exception
        try:
            verdict = await child.ask(asked.trial)
        except TimeoutError:
            self._late_until[asked.tenant] = clock.monotonic() + LATE_S
            verdict = Verdict(error=f"it takes more than {self._limits.grammar_seconds:g} s to compile", timed=True)
        except ConnectionError:  # the process may have ended of something else, so this is not kept
            self._late_until[asked.tenant] = clock.monotonic() + LATE_S
            verdict = Verdict(error="it takes more memory to compile than there is for it", timed=True)
        except Exception as error:
            verdict = error
        if isinstance(verdict, Verdict) and not verdict.timed:
            self._keep(asked.key, verdict)
        self._known.pop((asked.tenant, asked.key), None)
        if asked.verdict.done():
            return
        if isinstance(verdict, Verdict):
            asked.verdict.set_result(verdict)
        else:
            asked.verdict.set_exception(verdict)
            asked.verdict.exception()  # nobody may be left to look


class GrammarProcess:
    """A process that tries grammars: started with the first, killed where one takes too long, and started again."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self.process: asyncio.subprocess.Process | None = None  # that can be asked
        self._killed: list[asyncio.subprocess.Process] = []

    async def ask(self, trial: Trial) -> Verdict:
        """As `Child.ask`."""
        if self.process is not None and self.process.returncode is not None:
            self.kill()  # it has ended since its last trial
        if self.process is None:
            try:
                async with asyncio.timeout(START_S):
                    await self._start()
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                log.error("the process that compiles grammars cannot be started: %s", error)
                raise Overloaded("grammars cannot be compiled now; try again later") from None
        assert self.process is not None
        try:
            async with asyncio.timeout(self._limits.grammar_seconds):
                return msgspec.msgpack.decode(await self._answer(self.process, framed(trial)), type=Verdict)
        except asyncio.IncompleteReadError as error:
            self.kill()
            raise ConnectionError("the process has ended") from error
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """As `Child.kill`."""
        process, self.process = self.process, None
        if process is not None:
            self._killed.append(process)
            if process.returncode is None:
                process.kill()

    async def ended(self) -> None:
        """As `Child.ended`."""
        while self._killed:
            await self._killed.pop().wait()

    async def _start(self) -> None:
        """Starts the process, and waits until it has read the vocabulary."""
        await self.ended()  # of the one before
        pipe = asyncio.subprocess.PIPE
        command = sys.executable, "-m", "redline.api.grammar_child"
        process = self.process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        try:
            first = framed(Trial(text='{"grammars":[{"lark_grammar":"start: \\"a\\""}]}'))
            vocabulary = await asyncio.to_thread(_vocabulary, self._tokenizer, self._limits.grammar_memory)
            await self._answer(process, vocabulary + first)
        except BaseException:
            self.kill()
            raise

    @staticmethod
    async def _answer(process: asyncio.subprocess.Process, frames: bytes) -> bytes:
        """What the process says to these frames, of which the last is a trial."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(frames)
        await process.stdin.drain()
        head = await process.stdout.readexactly(LENGTH.size)
        return await process.stdout.readexactly(LENGTH.unpack(head)[0])


def _vocabulary(tokenizer: Tokenizer, memory_bytes: int) -> bytes:
    """The frame that comes first."""
    tokens = tuple(map(tokenizer.token_bytes, range(tokenizer.vocab_size - RESERVED)))
    names = {token: name for name, token in tokenizer.specials.items()}
    return framed(Vocabulary(tokens=tokens, names=names, memory_bytes=memory_bytes))
