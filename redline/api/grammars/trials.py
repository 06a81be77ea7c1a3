"""Trial-compiles grammars in killable processes, so that an expensive grammar delays only its own key's trials.

Keys are served round-robin. There are two processes: one takes any grammar, the other only small ones, so that large
ones never occupy both. A key with a timed-out trial comes after all others for a while. If a client disconnects, its
trial is dropped if it has not started; else it runs to its end, and its verdict is cached.
"""

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from redline import clock
from redline.api.config import Limits
from redline.api.grammars.grammar_child import GrammarTrial, GrammarVerdict, Vocabulary
from redline.chat.tokenizer import RESERVED, Tokenizer
from redline.child_process import ChildProcess
from redline.errors import Overloaded
from redline.frames import framed

SMALL_BYTES = 16 << 10  # of a grammar for the second process: such a grammar compiles in some 50 ms
LATE_S = 30.0  # seconds for which a key comes after others, once one of its trials has timed out


class Child(Protocol):
    """Compiles grammars, one at a time. After any failure it can be used again, but not after `kill`."""

    async def ask(self, trial: GrammarTrial) -> GrammarVerdict:
        """Run a trial. Raises TimeoutError if it takes too long, ConnectionError if the process has exited, as it
        does when out of memory, and Overloaded if no process can be started."""
        ...

    def kill(self) -> None:
        """Kill the process; idempotent."""
        ...

    async def ended(self) -> None:
        """Wait until killed processes have exited."""
        ...


class _Asked:
    """A queued or running trial, and the callers that wait for its verdict."""

    __slots__ = ("callers", "key", "small", "tenant", "trial", "verdict")

    def __init__(self, trial: GrammarTrial, tenant: str, key: bytes, small: bool) -> None:
        self.trial = trial
        self.tenant = tenant
        self.key = key
        self.small = small
        self.callers = 0
        self.verdict: asyncio.Future[GrammarVerdict] = asyncio.get_running_loop().create_future()


class Trials:
    """The queue of trials, and the child processes that run them. Everything runs in one event loop."""

    def __init__(
        self, limits: Limits, children: Sequence[Child], keep: Callable[[bytes, GrammarVerdict], object]
    ) -> None:
        """children: the first runs all trials, the others small ones. keep: called with each key and verdict."""
        self._limits = limits
        self._keep = keep
        self._children = children
        self._serving: dict[int, asyncio.Task[None]] = {}  # by index of the child, while it is busy
        self._lines: dict[str, deque[_Asked]] = {}  # queued trials by tenant, in order of arrival
        self._known: dict[tuple[str, bytes], _Asked] = {}  # queued or running trials
        self._turn = 0
        self._turns: dict[str, int] = {}  # the turn in which each tenant was last served
        self._late_until: dict[str, float] = {}  # by tenant, if its trial timed out, in time of `clock.monotonic`

    @property
    def waiting(self) -> int:
        """Trials that have not started."""
        return sum(map(len, self._lines.values()))

    async def verdict(self, trial: GrammarTrial, tenant: str, key: bytes, size: int) -> GrammarVerdict:
        """Run a trial and return its verdict.

        tenant: the name of the client's key. key: of the trial; concurrent calls with the same key share one trial.
        size: bytes of the grammar text. Raises Overloaded if too many trials of this tenant are queued.
        """
        asked = self._known.get((tenant, key))
        if asked is None:
            line = self._lines.get(tenant, ())
            if len(line) >= self._limits.grammars:
                raise Overloaded(f"{len(line)} grammars are queued for compilation; try again later")
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
        """Kill the children; idempotent. Callers that wait for a verdict get Overloaded."""
        for task in self._serving.values():
            task.cancel()
        for child in self._children:
            child.kill()
        for asked in self._known.values():
            if not asked.verdict.done():
                asked.verdict.set_exception(Overloaded("the server is shutting down"))
                asked.verdict.exception()  # there may be no caller left to retrieve it
        self._known, self._lines = {}, {}

    async def ended(self) -> None:
        """Wait until every killed process has exited."""
        await asyncio.gather(*self._serving.values(), return_exceptions=True)
        for child in self._children:
            await child.ended()

    def _wake(self) -> None:
        """Start serving with the first idle child that may take a queued trial."""
        for place in range(len(self._children)):
            if place not in self._serving and self._due(place) is not None:
                task = asyncio.get_running_loop().create_task(self._serve(place))
                self._serving[place] = task
                return

    def _due(self, place: int) -> _Asked | None:
        """The next trial that a child may take."""
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
        """Run trials until none is queued that this child may take."""
        try:
            while (asked := self._due(place)) is not None:
                self._leaves(self._lines[asked.tenant], asked)
                self._turn += 1
                self._turns[asked.tenant] = self._turn
                await self._try(self._children[place], asked)
        finally:
            del self._serving[place]

    async def _try(self, child: Child, asked: _Asked) -> None:
        verdict: GrammarVerdict | Exception
        try:
            verdict = await child.ask(asked.trial)
        except TimeoutError:
            self._late_until[asked.tenant] = clock.monotonic() + LATE_S
            verdict = GrammarVerdict(
                error=f"compiling it takes more than {self._limits.grammar_seconds:g} s", timed=True
            )
        except ConnectionError:  # the process may have exited for another reason, so this verdict is not cached
            self._late_until[asked.tenant] = clock.monotonic() + LATE_S
            verdict = GrammarVerdict(error="compiling it takes more memory than allowed", timed=True)
        except Exception as error:
            verdict = error
        if isinstance(verdict, GrammarVerdict) and not verdict.timed:
            self._keep(asked.key, verdict)
        self._known.pop((asked.tenant, asked.key), None)
        if asked.verdict.done():
            return
        if isinstance(verdict, GrammarVerdict):
            asked.verdict.set_result(verdict)
        else:
            asked.verdict.set_exception(verdict)
            asked.verdict.exception()  # there may be no caller left to retrieve it


class GrammarProcess:
    """A process that compiles grammars: started at the first trial, killed if one takes too long, and restarted."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        first = functools.partial(_first, tokenizer, limits.grammar_memory)
        self.child = ChildProcess(
            "redline.api.grammars.grammar_child", unable="grammars cannot be compiled now", first=first
        )
        self._limits = limits

    async def ask(self, trial: GrammarTrial) -> GrammarVerdict:
        """See `Child.ask`."""
        reply = await self.child.ask(msgspec.msgpack.encode(trial), self._limits.grammar_seconds)
        return msgspec.msgpack.decode(reply, type=GrammarVerdict)

    def kill(self) -> None:
        """See `Child.kill`."""
        self.child.kill()

    async def ended(self) -> None:
        """See `Child.ended`."""
        await self.child.ended()


def _first(tokenizer: Tokenizer, memory_bytes: int) -> bytes:
    """The first frames sent to a process: its vocabulary, and a trial."""
    tokens = tuple(map(tokenizer.token_bytes, tokenizer.ordinary))
    controls = sorted(tokenizer.specials, key=tokenizer.specials.__getitem__)[:RESERVED]
    names = dict(enumerate(controls, len(tokens)))
    ends = tuple(str(tokenizer.name(token)) for token in tokenizer.stop_ids)
    vocabulary = Vocabulary(tokens=tokens, names=names, ends=ends, memory_bytes=memory_bytes)
    trial = GrammarTrial(text='{"grammars":[{"lark_grammar":"start: \\"a\\""}]}')
    return b"".join(framed(msgspec.msgpack.encode(one)) for one in (vocabulary, trial))
