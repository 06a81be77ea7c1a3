"""Checks client grammars before their jobs are admitted: a separate process compiles them (`api/grammars/trials.py`).

Results of these trial compilations are cached, so that a schema that comes with every request is compiled only once
here.
"""

import sys
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from redline.api.config import Limits
from redline.api.grammars.grammar_child import GrammarTrial, GrammarVerdict, line_of
from redline.api.grammars.trials import GrammarProcess, Trials
from redline.chat.constraint import ANY_OBJECT, Calls, Constraint, Form, Part, any_of, compose, dumped, forms
from redline.chat.conversation import Conversation
from redline.chat.tokenizer import Tokenizer
from redline.errors import Overloaded, RequestError
from redline.messages.job import Grammar

KEPT = 8192  # cached verdicts: a request may have 1,024 tools
MOST_TRIES = 64  # trials of one request, to find which of its schemas cannot be used
KEPT_BYTES = 8 << 20  # of all cached verdicts: an error may quote its whole grammar, twice
SHOWN_CHARS = 400  # of an error message
NAMED = 4  # fields named in an error that may be about any of several fields


class Grammars:
    """Builds the grammars that requests ask for, and trial-compiles them. Everything runs in one event loop."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._verdicts: OrderedDict[bytes, GrammarVerdict] = OrderedDict()
        self._bytes = 0  # size of the cached verdicts
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
        """The grammar of an answer; None if any token is allowed.

        thinks: the answer begins with reasoning. tenant: the name of the client's key; trials of different keys are
        scheduled round-robin.

        Raises RequestError, which names the field, the keyword and its place, if the grammar cannot be used, and
        Overloaded if too many trials are queued. Of the schema of a tool that is not strict, keywords that cannot be
        enforced are left out; if finding them takes too long, the tool accepts any JSON object.
        """
        if constraint is not None and constraint.kind == "grammar" and "::=" in constraint.text:
            verdict = await self._verdict(GrammarTrial(text=constraint.text, kind="gbnf"), tenant)
            if verdict.error is not None:
                raise RequestError(verdict.error[:SHOWN_CHARS], constraint.param)
            constraint = msgspec.structs.replace(constraint, text=verdict.text)
        asked = {form.name: form for form in forms(constraint, calls, conversation)}
        tries = _Tries()
        schemas = {
            name: text if asked[name].strict else self._known_looser(text)
            for name, text in (await self._schemas(tuple(asked.values()), tenant, tries)).items()
        }
        while True:
            composed = compose(constraint, calls, conversation, self._tokenizer, thinks=thinks, schemas=schemas)
            if composed is None:
                return None
            verdict = await self._verdict(GrammarTrial(text=composed.grammar.text), tenant)
            if verdict.error is None:
                return composed.grammar
            looser = await self._loosened(composed.parts, asked, schemas, tenant, tries)
            if not looser:  # each part compiles alone, but not all of them together
                looser = {name: ANY_OBJECT for name, form in asked.items() if not form.strict}
            if all(schemas[name] == text for name, text in looser.items()):
                if verdict.timed:
                    raise Overloaded(f"the grammar of this answer cannot be compiled now: {verdict.error}")
                param = constraint.param if constraint is not None else "tools"
                raise RequestError(f"the grammar cannot be compiled: {verdict.error}"[:SHOWN_CHARS], param)
            schemas |= looser

    def close(self) -> None:
        """Kill the processes; idempotent."""
        self.trials.close()

    async def ended(self) -> None:
        """Wait until every killed process has exited."""
        await self.trials.ended()

    async def _schemas(self, asked: Sequence[Form], tenant: str, tries: "_Tries") -> dict[str, str]:
        """The enforceable part of each schema, by the name of its part. Raises RequestError as `grammar` does."""
        if not asked:
            return {}
        text = dumped([(form.schema, form.closed) for form in asked])
        verdict = await self._verdict(GrammarTrial(text=text, kind="schemas"), tenant)
        if verdict.error is not None and len(asked) > 1:  # one of them takes too long
            if tries.left():
                half = len(asked) // 2
                first = await self._schemas(asked[:half], tenant, tries)
                return first | await self._schemas(asked[half:], tenant, tries)
            strict = [form for form in asked if form.strict]
            if len(strict) == len(asked):
                raise _one_of([form.param for form in strict], verdict.error)
            return {form.name: ANY_OBJECT for form in asked} | await self._schemas(strict, tenant, tries)
        complaints = verdict.complaints or (verdict.error,) * len(asked)
        for form, complaint in zip(asked, complaints, strict=True):
            if form.strict and complaint is not None:
                raise RequestError(complaint[:SHOWN_CHARS], form.param)
        return dict(zip((form.name for form in asked), verdict.schemas or (ANY_OBJECT,) * len(asked), strict=True))

    async def _loosened(
        self, parts: Sequence[Part], asked: dict[str, Form], schemas: dict[str, str], tenant: str, tries: "_Tries"
    ) -> dict[str, str]:
        """Replacements for the schemas of parts that do not compile by themselves, by part name. Raises RequestError
        if such a part is strict."""
        own = {part.own: part for part in parts}
        found: dict[str, str] = {}
        for group, verdict in await self._failing(tuple(own.values()), tenant, tries):
            owns = {part.own for part in group}
            those = [part for part in parts if part.own in owns]
            if len(group) > 1:
                await self._check_together([part for part in those if _is_strict(part, asked)], tenant)
                found |= {part.name: ANY_OBJECT for part in those if not _is_strict(part, asked)}
                continue
            for part in those:
                found[part.name] = await self._looser_than(part, verdict, asked.get(part.name), schemas, tenant, tries)
        return found

    def _known_looser(self, schema: str) -> str:
        """The cached replacement of a schema that cannot be used; the schema itself if none is known."""
        key = _key("looser", schema.encode())
        if (known := self._verdicts.get(key)) is None:
            return schema
        self._verdicts.move_to_end(key)
        return known.text

    async def _failing(
        self, parts: Sequence[Part], tenant: str, tries: "_Tries"
    ) -> list[tuple[Sequence[Part], GrammarVerdict]]:
        """The parts that do not compile by themselves, each with its verdict; if there are too many to try one by
        one, groups that contain such a part. parts: with distinct grammars."""
        verdict = await self._verdict(GrammarTrial(text=any_of(parts)), tenant)
        if verdict.error is None:
            return []
        if len(parts) == 1 or not tries.left():
            return [(parts, verdict)]
        half = len(parts) // 2
        first = await self._failing(parts[:half], tenant, tries)
        return first + await self._failing(parts[half:], tenant, tries)

    async def _check_together(self, parts: Sequence[Part], tenant: str) -> None:
        """Raises RequestError if one of these strict parts does not compile."""
        own = {part.own: part for part in parts}
        if (
            own
            and (error := (await self._verdict(GrammarTrial(text=any_of(tuple(own.values()))), tenant)).error)
            is not None
        ):
            raise _one_of([part.param for part in parts], line_of(error))

    async def _looser_than(
        self,
        part: Part,
        alone: GrammarVerdict,
        form: Form | None,
        schemas: dict[str, str],
        tenant: str,
        tries: "_Tries",
    ) -> str:
        """The replacement for the schema of a part that does not compile. Raises RequestError if the part is strict.
        alone: the verdict on the part by itself."""
        error = f"it cannot be compiled: {line_of(alone.error or '')}"
        if form is None:
            raise RequestError(error[:SHOWN_CHARS], part.param)
        found = GrammarVerdict(timed=True)
        if not alone.timed and tries.left():
            found = await self._verdict(GrammarTrial(text=dumped((form.schema, form.closed)), kind="loosen"), tenant)
        if form.strict:
            raise RequestError((found.error or error)[:SHOWN_CHARS], form.param)
        text = found.text if found.text and schemas[part.name] not in (found.text, ANY_OBJECT) else ANY_OBJECT
        if not found.timed:  # else a later request may find more keywords that can be enforced
            self._keep(_key("looser", schemas[part.name].encode()), GrammarVerdict(text=text))
        return text

    async def _verdict(self, trial: GrammarTrial, tenant: str) -> GrammarVerdict:
        text = trial.text.encode()
        if len(text) > self._limits.grammar_bytes:
            return GrammarVerdict(error=f"it is {len(text)} bytes; at most {self._limits.grammar_bytes} are read")
        key = _key(trial.kind, text)
        if (known := self._verdicts.get(key)) is not None:
            self._verdicts.move_to_end(key)
            return known
        return await self.trials.verdict(trial, tenant, key, len(text))

    def _keep(self, key: bytes, verdict: GrammarVerdict) -> None:
        if (before := self._verdicts.pop(key, None)) is not None:  # two requests asked for it at the same time
            self._bytes -= _size(before)
        self._verdicts[key] = verdict
        self._bytes += _size(verdict)
        while len(self._verdicts) > KEPT or self._bytes > KEPT_BYTES:
            _, oldest = self._verdicts.popitem(last=False)
            self._bytes -= _size(oldest)


class _Tries:
    """Counts the trials that one request may still use to find the parts that fail."""

    def __init__(self) -> None:
        self._left = MOST_TRIES

    def left(self) -> bool:
        """Use one more trial; whether one was left."""
        self._left -= 1
        return self._left >= 0


def _is_strict(part: Part, asked: dict[str, Form]) -> bool:
    form = asked.get(part.name)
    return form is None or form.strict


def _one_of(params: Sequence[str], error: str) -> RequestError:
    """An error about one of these fields, which were only tried together."""
    params = tuple(dict.fromkeys(params))
    if len(params) == 1:
        return RequestError(f"it cannot be compiled: {error}"[:SHOWN_CHARS], params[0])
    more = f" and {len(params) - NAMED} more" if len(params) > NAMED else ""
    of_tools = all(param.startswith("tools") for param in params)
    return RequestError(
        f"one of {', '.join(params[:NAMED])}{more} fails to compile: {error}"[:SHOWN_CHARS],
        "tools" if of_tools else None,
    )


def _key(kind: str, text: bytes) -> bytes:
    return blake2b(kind.encode() + b" " + text, digest_size=16).digest()


def _size(verdict: GrammarVerdict) -> int:
    texts = (verdict.text, verdict.error, *verdict.schemas, *verdict.complaints)
    return sum(map(sys.getsizeof, texts))
