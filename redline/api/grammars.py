"""Whether a client's grammar can be used: tried in a process of its own before its job is admitted.

That process is killed where a trial takes too long, and may take so much memory and no more. What came of a trial is
kept, so that a schema that comes with every request costs nothing but the first time.
"""

import asyncio
import json
import logging
import re
import sys
from collections import OrderedDict
from hashlib import blake2b
from typing import Any, cast

import msgspec

from redline.api.config import Limits
from redline.api.grammar_child import LENGTH, Trial, Verdict, Vocabulary, framed
from redline.chat.constraint import Calls, Constraint, Part, compose
from redline.chat.conversation import Conversation
from redline.chat.tokenizer import RESERVED, Tokenizer
from redline.errors import Overloaded, RequestError
from redline.wire.job import Grammar

KEPT = 1024  # verdicts
KEPT_BYTES = 8 << 20  # of what they say, together: an error may quote its whole grammar, twice
START_S = 60.0  # for the process to read its vocabulary, on a machine that is busy loading a model
SHOWN_CHARS = 400  # of an error

log = logging.getLogger("redline.api")

_KEYS = re.compile(r"Unimplemented keys: (\[.*\])", re.DOTALL)


class Grammars:
    """Makes grammars of what requests ask for, and tries them. Everything runs in one event loop."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._bytes = 0  # of what they say
        self._process: asyncio.subprocess.Process | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def grammar(
        self, constraint: Constraint | None, calls: Calls, conversation: Conversation | None, *, thinks: bool
    ) -> Grammar | None:
        """The grammar of an answer; None where any token may come. thinks: the answer begins with reasoning.

        Raises RequestError, which names the field and the keyword, where it cannot be used, and Overloaded where too
        many wait to be tried. A tool that is not strict, and whose schema cannot be followed, takes any JSON object.
        """
        if constraint is not None and constraint.kind == "grammar" and "::=" in constraint.text:
            verdict = await self._verdict(Trial(text=constraint.text, converts=True))
            if verdict.error is not None:
                raise RequestError(verdict.error[:SHOWN_CHARS], constraint.param)
            constraint = msgspec.structs.replace(constraint, text=verdict.text)
        loose: frozenset[int] = frozenset()
        while True:
            composed = compose(constraint, calls, conversation, self._tokenizer, thinks=thinks, loose=loose)
            if composed is None:
                return None
            verdict = await self._verdict(Trial(text=composed.grammar.text))
            if verdict.error is None:
                return composed.grammar
            wrong: set[int] = set()
            for part in composed.parts:
                error = (await self._verdict(Trial(text=part.text))).error
                if error is not None and part.tool is None:
                    raise RequestError(_complaint(error, part), part.param)
                if error is not None and part.tool is not None:
                    wrong.add(part.tool)
            if wrong <= loose:  # each part can be used, and not all together
                param = constraint.param if constraint is not None else "tools"
                raise RequestError(f"the grammar cannot be used: {verdict.error}"[:SHOWN_CHARS], param)
            loose |= wrong

    def close(self) -> None:
        """Kill the process; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        ending = asyncio.get_running_loop().create_task(_end(process))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def ended(self) -> None:
        """Wait until every process that was killed has ended."""
        while self._ending:
            await asyncio.wait(self._ending)

    async def _verdict(self, trial: Trial) -> Verdict:
        size = len(trial.text.encode())
        if size > self._limits.grammar_bytes:
            return Verdict(error=f"it is {size} bytes; at most {self._limits.grammar_bytes} are read")
        key = blake2b(b"%d" % trial.converts + trial.text.encode(), digest_size=16).digest()
        if (known := self._verdicts.get(key)) is not None:
            self._verdicts.move_to_end(key)
            return known
        if self._waiting >= self._limits.grammars:
            raise Overloaded(f"{self._waiting} grammars wait to be compiled; try again later")
        self._waiting += 1
        try:
            async with self._turn:
                verdict = await self._try(trial)
        finally:
            self._waiting -= 1
        self._keep(key, verdict)
        return verdict

    def _keep(self, key: bytes, verdict: Verdict) -> None:
        if (before := self._verdicts.pop(key, None)) is not None:  # two have asked at once
            self._bytes -= _size(before)
        self._verdicts[key] = verdict
        self._bytes += _size(verdict)
        while len(self._verdicts) > KEPT or self._bytes > KEPT_BYTES:
            _, oldest = self._verdicts.popitem(last=False)
            self._bytes -= _size(oldest)

    async def _try(self, trial: Trial) -> Verdict:
        """Asks the process; one trial at a time. Where the caller leaves in the middle of it, the process ends."""
        if self._process is None:
            try:
                async with asyncio.timeout(START_S):
                    await self._start()
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                log.error("the process that compiles grammars cannot be started: %s", error)
                raise Overloaded("grammars cannot be compiled now; try again later") from None
        process, seconds = self._process, self._limits.grammar_seconds
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(framed(trial))
                await process.stdin.drain()
                head = await process.stdout.readexactly(LENGTH.size)
                data = await process.stdout.readexactly(LENGTH.unpack(head)[0])
        except TimeoutError:
            self.close()
            return Verdict(error=f"it takes more than {seconds:g} s to compile")
        except (asyncio.IncompleteReadError, ConnectionError):
            self.close()
            return Verdict(error="it takes more memory to compile than there is for it")
        except BaseException:
            self.close()
            raise
        return msgspec.msgpack.decode(data, type=Verdict)

    async def _start(self) -> None:
        """Starts the process, and waits until it has read the vocabulary."""
        pipe = asyncio.subprocess.PIPE
        command = sys.executable, "-m", "redline.api.grammar_child"
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(await asyncio.to_thread(_vocabulary, self._tokenizer, self._limits.grammar_memory))
            process.stdin.write(framed(Trial(text='{"grammars":[{"lark_grammar":"start: \\"a\\""}]}')))
            await process.stdin.drain()
            head = await process.stdout.readexactly(LENGTH.size)
            await process.stdout.readexactly(LENGTH.unpack(head)[0])
        except BaseException:
            self.close()
            raise


def _size(verdict: Verdict) -> int:
    return sys.getsizeof(verdict.text) + sys.getsizeof(verdict.error)


def _vocabulary(tokenizer: Tokenizer, memory_bytes: int) -> bytes:
    """The frame that comes first."""
    tokens = tuple(map(tokenizer.token_bytes, range(tokenizer.vocab_size - RESERVED)))
    names = {token: name for name, token in tokenizer.specials.items()}
    return framed(Vocabulary(tokens=tokens, names=names, memory_bytes=memory_bytes))


async def _end(process: asyncio.subprocess.Process) -> None:
    await process.wait()


def _complaint(error: str, part: Part) -> str:
    """What is wrong with a part, and where: llguidance names a keyword, not its place."""
    lines = error.strip().splitlines() or ["it cannot be compiled"]
    error = " ".join([lines[0], *(line for line in lines[1:] if line.startswith("error: "))])  # as of a regex
    schema, found = part.own.get("json_schema"), _KEYS.search(error)
    if schema is None or found is None:
        return f"it cannot be used: {error}"[:SHOWN_CHARS]
    keys = cast("list[str]", json.loads(found[1]))
    place = _place_of(schema, keys[0])
    return f"{', '.join(keys)} is not supported" + (f", at {place}" if place else "")


def _place_of(schema: Any, key: str) -> str:
    """A JSON pointer to the first object that has this key, nearest the root."""
    level: list[tuple[str, Any]] = [("#", schema)]
    while level:
        deeper: list[tuple[str, Any]] = []
        for path, value in level:
            if isinstance(value, dict):
                fields = cast("dict[str, Any]", value)
                if key in fields:
                    return f"{path}/{key}"[:SHOWN_CHARS]
                deeper += [(f"{path}/{name}", inner) for name, inner in fields.items()]
            elif isinstance(value, list):
                deeper += [(f"{path}/{index}", inner) for index, inner in enumerate(cast("list[Any]", value))]
        level = deeper
    return ""
