"""The process that trial-compiles grammars: a client's expensive schema blocks only this process, which can be killed.

Standard input is a sequence of frames, each a length (4 bytes, little-endian) and msgpack data: first the vocabulary,
then trials. Each trial is answered by a frame on standard output.
"""

import json
import random
import resource
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from redline import clock
from redline.chat.constraint import ANY_OBJECT, dumped, grammars, of_schema
from redline.chat.schema import Written, loosen
from redline.chat.tokenizer import Tokenizer
from redline.chat.vocabulary import grammar_tokens
from redline.frames import read_frame, write_frame
from redline.messages.base import Record
from redline.policy.grammar import NOT_TOLD, GrammarBudget, parser_limits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WALKS = 2  # random texts of a grammar that a trial follows
WALKED = 48  # most tokens of each text
TOO_LONG = "it takes too long"
LOOSEN_S = 0.4  # seconds of CPU time to find the parts of a schema that cannot be enforced
_INWARD = b'{[":,'  # bytes that continue or open nested JSON values


class Vocabulary(Record, frozen=True):
    """The first frame: tokens by id, names of control tokens, which of them end an answer, and the memory limit."""

    tokens: tuple[bytes, ...]
    names: dict[int, str]
    ends: tuple[str, ...]
    memory_bytes: int


class GrammarTrial(Record, frozen=True):
    """A trial, by kind.

    grammar: compile it. gbnf: convert a GBNF grammar to Lark's syntax. schemas: a JSON list of pairs of a client's
    schema and whether it is `closed`; convert them to a form that llguidance accepts. loosen: one such pair, whose
    schema cannot be compiled; remove the parts that cannot be enforced.
    """

    text: str
    kind: Literal["grammar", "gbnf", "schemas", "loosen"] = "grammar"


class GrammarVerdict(Record, frozen=True):
    """The result of a trial. error: why the grammar cannot be used; None: it can. text: the converted grammar, or the
    looser schema.

    schemas: the converted schemas, as JSON. complaints: for each of them the parts that were removed, or None. timed:
    the result depends on the machine's load, so another trial may end differently, and it is not cached.
    """

    error: str | None = None
    text: str = ""
    schemas: tuple[str, ...] = ()
    complaints: tuple[str | None, ...] = ()
    timed: bool = False


def main() -> None:
    """Answer trials until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # SIGINT reaches the whole group; the end of stdin ends this process
    inlet, outlet = sys.stdin.buffer, sys.stdout.buffer
    data = read_frame(inlet)
    if data is None:
        return
    vocabulary = msgspec.msgpack.decode(data, type=Vocabulary)
    resource.setrlimit(resource.RLIMIT_AS, (vocabulary.memory_bytes, vocabulary.memory_bytes))
    ranks = {token: rank for rank, token in enumerate(vocabulary.tokens)}
    tokens = grammar_tokens(Tokenizer(ranks, vocabulary.names, ends=vocabulary.ends))
    inward = [ranks[bytes([byte])] for byte in _INWARD if bytes([byte]) in ranks]
    while (data := read_frame(inlet)) is not None:
        verdict = verdict_of(msgspec.msgpack.decode(data, type=GrammarTrial), tokens, inward)
        write_frame(outlet, msgspec.msgpack.encode(verdict))


def verdict_of(trial: GrammarTrial, tokens: "LLTokenizer", inward: Sequence[int]) -> GrammarVerdict:
    """Run a trial. inward: tokens that continue or open nested JSON values."""
    try:
        match trial.kind:
            case "grammar":
                return _tried(trial.text, tokens, inward)
            case "gbnf":
                return _converted(trial.text)
            case "schemas":
                written = [_written(schema, closed=closed) for schema, closed in json.loads(trial.text)]
                return GrammarVerdict(
                    schemas=tuple(one for one, _ in written), complaints=tuple(one for _, one in written)
                )
            case "loosen":
                schema, closed = json.loads(trial.text)
                return _loosened(Written(schema, closed=closed), tokens, inward)
    except (ValueError, RecursionError) as error:
        return GrammarVerdict(error=f"the schema cannot be parsed: {error}")


def _written(schema: Any, *, closed: bool) -> tuple[str, str | None]:
    """The enforceable form of a schema, as JSON, and the removed parts; any object if it cannot be parsed."""
    try:
        written = Written(schema, closed=closed)
        return dumped(written.schema), written.complaint
    except (ValueError, RecursionError) as error:
        return ANY_OBJECT, f"the schema cannot be parsed: {error}"


def _converted(text: str) -> GrammarVerdict:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return GrammarVerdict(text=gbnf_to_lark(text))
    except Exception as error:  # any exception of the parser for a malformed grammar
        return GrammarVerdict(error=f"it cannot be parsed as GBNF: {error}")


def _loosened(written: Written, tokens: "LLTokenizer", inward: Sequence[int]) -> GrammarVerdict:
    def error_of(schema: dict[str, Any]) -> str | None:
        return _tried(grammars([of_schema("schema", dumped(schema))]), tokens, inward).error

    if (error := error_of(written.schema)) is None:
        return GrammarVerdict(text=dumped(written.schema))
    schema, place = loosen(written, lambda schema: error_of(schema) is None, LOOSEN_S)
    return GrammarVerdict(error=f"{line_of(error)}, at {place}" if place else line_of(error), text=dumped(schema))


def _tried(text: str, tokens: "LLTokenizer", inward: Sequence[int]) -> GrammarVerdict:
    from llguidance import LLMatcher

    matcher = LLMatcher(tokens, text, log_level=0, limits=parser_limits())
    if matcher.is_error():
        return GrammarVerdict(error=_error(matcher))
    draw = random.Random(text)
    for number in range(WALKS):
        if (error := _walk(matcher.deep_copy(), draw, inward if number else ())) is not None:
            return GrammarVerdict(error=error, timed=error.startswith(TOO_LONG))
    return GrammarVerdict()


def line_of(error: str) -> str:
    """An error of llguidance as one line: for a regex, it begins with the regex."""
    lines = error.strip().splitlines() or ["it cannot be compiled"]
    return " ".join([lines[0], *(line for line in lines[1:] if line.startswith("error: "))])


def _walk(matcher: "LLMatcher", draw: random.Random, rather: Sequence[int]) -> str | None:
    """Follow the grammar along randomly drawn allowed tokens, as a worker would. Returns why that fails or takes too
    long; None: no problem was found. rather: tokens that are drawn half the time if they are allowed."""
    budget, began = GrammarBudget(), clock.thread_time()
    for _ in range(WALKED):
        forced = matcher.compute_ff_tokens()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or not mask:
            return _error(matcher) or "it allows no token"
        those = [token for token in rather if mask >> token & 1] if draw.random() < 0.5 else []
        token = forced[0] if forced else draw.choice(those) if those else _drawn(mask, draw)
        followed = matcher.consume_token(token)
        began, took = (now := clock.thread_time()), now - began
        if (why := budget.spend(took)) is not None:
            return f"{TOO_LONG}: {why}"
        if matcher.is_error():
            return _error(matcher)
        if not followed or matcher.is_stopped():
            return None
    return None


def _error(matcher: "LLMatcher") -> str:
    return matcher.get_error().replace(NOT_TOLD, "").strip()


def _drawn(mask: int, draw: random.Random) -> int:
    """A random set bit: the next one from a random position, cyclically."""
    place = draw.randrange(mask.bit_length())
    above = mask >> place
    return place + (above & -above).bit_length() - 1


if __name__ == "__main__":
    main()
