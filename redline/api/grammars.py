"""Whether a client's grammar can be used: tried in a process of its own before its job is admitted (`api/trials.py`).

What came of a trial is kept, so that a schema that comes with every request costs nothing but the first time.
"""

import sys
from collections import OrderedDict
from hashlib import blake2b

import msgspec

from redline.api.config import Limits
from redline.api.grammar_child import Trial, Verdict, line_of
from redline.api.trials import GrammarProcess, Trials
from redline.chat.constraint import ANY_OBJECT, Calls, Constraint, Form, Part, compose, dumped, forms
from redline.chat.conversation import Conversation
from redline.chat.tokenizer import Tokenizer
from redline.errors import RequestError
from redline.wire.job import Grammar

KEPT = 1024  # verdicts
KEPT_BYTES = 8 << 20  # of what they say, together: an error may quote its whole grammar, twice
SHOWN_CHARS = 400  # of an error


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

        Raises RequestError, which names the field, the keyword and its place, where it cannot be used, and Overloaded
        where too many wait to be tried. Of the schema of a tool that is not strict, what cannot be followed is left
        out; where it takes too long to find what that is, the tool takes any JSON object.
        """
        if constraint is not None and constraint.kind == "grammar" and "::=" in constraint.text:
            verdict = await self._verdict(Trial(text=constraint.text, kind="gbnf"), tenant)
            if verdict.error is not None:
                raise RequestError(verdict.error[:SHOWN_CHARS], constraint.param)
            constraint = msgspec.structs.replace(constraint, text=verdict.text)
        asked = {form.name: form for form in forms(constraint, calls, conversation)}
        schemas = await self._schemas(tuple(asked.values()), tenant)
        while True:
            composed = compose(constraint, calls, conversation, self._tokenizer, thinks=thinks, schemas=schemas)
            if composed is None:
                return None
            verdict = await self._verdict(Trial(text=composed.grammar.text), tenant)
            if verdict.error is None:
                return composed.grammar
            looser = {
                part.name: await self._looser(part, alone, asked.get(part.name), schemas, tenant)
                for part in composed.parts
                if (alone := await self._verdict(Trial(text=part.text), tenant)).error is not None
            }
            if all(schemas.get(name) == text for name, text in looser.items()):
                # Each part can be used, and not all together.
                param = constraint.param if constraint is not None else "tools"
                raise RequestError(f"the grammar cannot be used: {verdict.error}"[:SHOWN_CHARS], param)
            schemas |= looser

    def close(self) -> None:
        """Kill the processes; idempotent."""
        self.trials.close()

    async def ended(self) -> None:
        """Wait until every process that was killed has ended."""
        await self.trials.ended()

    async def _schemas(self, asked: tuple[Form, ...], tenant: str) -> dict[str, str]:
        """What is followed of each schema, by the name of its part. Raises RequestError as `grammar` does."""
        if not asked:
            return {}
        text = dumped([(form.schema, form.closed) for form in asked])
        verdict = await self._verdict(Trial(text=text, kind="schemas"), tenant)
        complaints = verdict.complaints or (verdict.error,) * len(asked)
        for form, complaint in zip(asked, complaints, strict=True):
            if form.strict and complaint is not None:
                raise RequestError(complaint[:SHOWN_CHARS], form.param)
        return dict(zip((form.name for form in asked), verdict.schemas or (ANY_OBJECT,) * len(asked), strict=True))

    async def _looser(self, part: Part, alone: Verdict, form: Form | None, schemas: dict[str, str], tenant: str) -> str:
        """What is followed instead of the schema of a part that cannot be used. Raises RequestError where all of it has
        to be. alone: what came of the part by itself."""
        error = f"it cannot be used: {line_of(alone.error or '')}"
        if form is None:
            raise RequestError(error[:SHOWN_CHARS], part.param)
        found = Verdict()
        if not alone.timed:
            found = await self._verdict(Trial(text=dumped((form.schema, form.closed)), kind="loosen"), tenant)
        if form.strict:
            raise RequestError((found.error or error)[:SHOWN_CHARS], form.param)
        return found.text if found.text and schemas[part.name] not in (found.text, ANY_OBJECT) else ANY_OBJECT

    async def _verdict(self, trial: Trial, tenant: str) -> Verdict:
        text = trial.text.encode()
        if len(text) > self._limits.grammar_bytes:
            return Verdict(error=f"it is {len(text)} bytes; at most {self._limits.grammar_bytes} are read")
        key = blake2b(trial.kind.encode() + b" " + text, digest_size=16).digest()
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
    texts = (verdict.text, verdict.error, *verdict.schemas, *verdict.complaints)
    return sum(map(sys.getsizeof, texts))
