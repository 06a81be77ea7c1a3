"""Whether a client's grammar can be used: tried in a process of its own before its job is admitted (`api/trials.py`).

What came of a trial is kept, so that a schema that comes with every request costs nothing but the first time.
"""

import json
import re
import sys
from collections import OrderedDict
from hashlib import blake2b
from typing import Any, cast

import msgspec

from redline.api.config import Limits
from redline.api.grammar_child import Trial, Verdict
from redline.api.trials import GrammarProcess, Trials
from redline.chat.constraint import Calls, Constraint, Part, compose
from redline.chat.conversation import Conversation
from redline.chat.tokenizer import Tokenizer
from redline.errors import RequestError
from redline.wire.job import Grammar

KEPT = 1024  # verdicts
KEPT_BYTES = 8 << 20  # of what they say, together: an error may quote its whole grammar, twice
SHOWN_CHARS = 400  # of an error

_KEYS = re.compile(r"Unimplemented keys: (\[.*\])", re.DOTALL)


class Grammars:
    """Makes grammars of what requests ask for, and tries them. Everything runs in one event loop."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._bytes = 0  # of what they say
        self.trials = Trials(limits, [GrammarProcess(tokenizer, limits) for _ in range(2)], self._keep)

    async def grammar(
        self,
        constraint: Constraint | None,
        calls: Calls,
        conversation: Conversation | None,
        *,
        thinks: bool,
        tenant: str = "",
    ) -> Grammar | None:
        """The grammar of an answer; None where any token may come.

        thinks: the answer begins with reasoning. tenant: the name of the client's key, whose trials take turns with
        those of others.

        Raises RequestError, which names the field and the keyword, where it cannot be used, and Overloaded where too
        many wait to be tried. A tool that is not strict, and whose schema cannot be followed, takes any JSON object.
        """
        if constraint is not None and constraint.kind == "grammar" and "::=" in constraint.text:
            verdict = await self._verdict(Trial(text=constraint.text, converts=True), tenant)
            if verdict.error is not None:
                raise RequestError(verdict.error[:SHOWN_CHARS], constraint.param)
            constraint = msgspec.structs.replace(constraint, text=verdict.text)
        loose: frozenset[int] = frozenset()
        while True:
            composed = compose(constraint, calls, conversation, self._tokenizer, thinks=thinks, loose=loose)
            if composed is None:
                return None
            verdict = await self._verdict(Trial(text=composed.grammar.text), tenant)
            if verdict.error is None:
                return composed.grammar
            wrong: set[int] = set()
            for part in composed.parts:
                error = (await self._verdict(Trial(text=part.text), tenant)).error
                if error is not None and part.tool is None:
                    raise RequestError(_complaint(error, part), part.param)
                if error is not None and part.tool is not None:
                    wrong.add(part.tool)
            if wrong <= loose:  # each part can be used, and not all together
                param = constraint.param if constraint is not None else "tools"
                raise RequestError(f"the grammar cannot be used: {verdict.error}"[:SHOWN_CHARS], param)
            loose |= wrong

    def close(self) -> None:
        """Kill the processes; idempotent."""
        self.trials.close()

    async def ended(self) -> None:
        """Wait until every process that was killed has ended."""
        await self.trials.ended()

    async def _verdict(self, trial: Trial, tenant: str) -> Verdict:
        text = trial.text.encode()
        if len(text) > self._limits.grammar_bytes:
            return Verdict(error=f"it is {len(text)} bytes; at most {self._limits.grammar_bytes} are read")
        key = blake2b(b"%d" % trial.converts + text, digest_size=16).digest()
        if (known := self._verdicts.get(key)) is not None:
            self._verdicts.move_to_end(key)
            return known
        return await self.trials.verdict(trial, tenant, key, len(text))

    def _keep(self, key: bytes, verdict: Verdict) -> None:
        if (before := self._verdicts.pop(key, None)) is not None:  # two have asked at once
            self._bytes -= _size(before)
        self._verdicts[key] = verdict
        self._bytes += _size(verdict)
        while len(self._verdicts) > KEPT or self._bytes > KEPT_BYTES:
            _, oldest = self._verdicts.popitem(last=False)
            self._bytes -= _size(oldest)


def _size(verdict: Verdict) -> int:
    return sys.getsizeof(verdict.text) + sys.getsizeof(verdict.error)


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
