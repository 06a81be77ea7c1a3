"""Checks a server's token counts: its usage against the stream of the same answer, and against the request.

Throughput, TPOT and bills are computed from a server's token counts, and only the server knows its tokens. A check that
tokenisation can affect therefore has a tolerance, and a comment that explains it.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from redline.bench.serving.metrics import TextEncoder, failure_of, texts
from redline.bench.serving.records import TimedAnswer
from redline.messages.base import Record

Check = Literal["usage", "output tokens", "text", "prompt tokens", "thinking tokens", "cached tokens", "length"]

# Counted tokens without text: the end of a turn; start and end of the thinking; and for a tool call its start, the end
# of its name, start and end of its arguments, and those of the section around all calls.
END, THINKING, CALL = 1, 2, 6
# Tokens of a chat template: around each message, and at the start of the answer.
TEMPLATE, MESSAGE = 64, 16
# A model may sample other tokens than the encoder would choose: more tokens, if it repeats pieces that the encoder
# would merge; fewer, if a token spans words that the encoder splits first. In one answer, above all in gibberish, the
# counts may differ by half; over many answers together a tenth is a large difference.
OFF_IN_ONE, OFF_IN_ALL = 2, 10
LOST = "\ufffd"  # replaces invalid UTF-8, of which the number of tokens is unknown


class Mismatch(Record, frozen=True):
    """One inconsistency in an answer, described by `text`. said: the server's count. seen: our count.

    index: of the request; None: over all answers together.
    """

    index: int | None
    check: Check
    said: int | None
    seen: int | None
    text: str


class Range(NamedTuple):
    """The range of counts that tokenisation can explain, both ends included."""

    least: int
    most: int


def usage_checks(answer: TimedAnswer, counts: TextEncoder | None = None) -> list[Mismatch]:
    """The mismatches of an answer's usage with its stream, its text or its request; none for a failed answer.

    counts: encodes with the model's own vocabulary; without it, the text is not checked.
    """
    if failure_of(answer) is not None:
        return []
    usage = answer.usage
    if usage is None or usage.completion_tokens is None:
        return [_mismatch(answer, "usage", None, None, "the server sent no usage")]
    found: list[Mismatch] = []
    said = usage.completion_tokens

    def expect(check: Check, value: int, seen: int, allowed: Range, text: str) -> None:
        if not allowed.least <= value <= allowed.most:
            found.append(_mismatch(answer, check, value, seen, text))

    silent = _silent(answer)
    tokens = [chunk.tokens for chunk in answer.chunks]
    if all(count is not None for count in tokens):
        total = sum(count or 0 for count in tokens)
        text = f"usage reports {said} output tokens, the events contained {total}"
        expect("output tokens", said, total, Range(total, total + silent), text)
    else:
        # One token may become two events, if it ends the thinking and starts the answer, or in a tool call.
        events = sum(chunk.kind != "tool" for chunk in answer.chunks)
        text = f"usage reports {said} output tokens, but {events} events contained text"
        expect("output tokens", said, events, Range(events - THINKING, max(said, events)), text)
    asked = answer.ask.max_tokens
    expect("length", said, asked, Range(0, asked), f"{said} output tokens, but max_tokens was {asked}")
    if answer.finish == "length":
        # The end of the context is another reason; a benchmark that reaches it should report it.
        text = f"finish_reason is length after {said} of {asked} tokens"
        expect("length", said, asked, Range(asked, max(said, asked)), text)
    if counts is not None:
        found += _text_checks(answer, said, counts)
    if usage.prompt_tokens is not None:
        found += _prompt_checks(answer, usage.prompt_tokens)
        if usage.cached_tokens is not None:
            text = f"usage reports {usage.cached_tokens} cached tokens for a prompt of {usage.prompt_tokens}"
            expect("cached tokens", usage.cached_tokens, usage.prompt_tokens, Range(0, usage.prompt_tokens), text)
    if usage.reasoning_tokens is not None:
        found += _thinking_checks(answer, usage.reasoning_tokens, said, counts)
    return found


def mismatches(answers: Sequence[TimedAnswer], counts: TextEncoder | None = None) -> list[Mismatch]:
    """`usage_checks` of all answers, in order, then the check over all answers together."""
    found = [mismatch for answer in answers for mismatch in usage_checks(answer, counts)]
    return found if counts is None else found + _whole_text_checks(answers, counts)


def _text_range(text: str, seen: int, silent: int, share: int) -> Range:
    off = max(8, seen // share)
    return Range(seen - off, min(seen + off, len(text.encode())) + silent)  # each token has at least one byte


def _silent(answer: TimedAnswer) -> int:
    """Maximum tokens of an answer that may be counted without text; with ignore_eos, max_tokens."""
    if answer.ask.extra.get("ignore_eos"):
        return answer.ask.max_tokens
    return END + (THINKING if answer.thinking else 0) + CALL * len(answer.calls)


def _text_checks(answer: TimedAnswer, said: int, counts: TextEncoder) -> list[Mismatch]:
    text = "".join(texts(answer))
    if LOST in text:
        return []
    seen = sum(len(counts.encode(part)) for part in texts(answer))
    allowed = _text_range(text, seen, _silent(answer), OFF_IN_ONE)
    if allowed.least <= said <= allowed.most:
        return []
    return [_mismatch(answer, "text", said, seen, f"usage reports {said} output tokens, its text encodes to {seen}")]


def _whole_text_checks(answers: Sequence[TimedAnswer], counts: TextEncoder) -> list[Mismatch]:
    said = seen = silent = 0
    whole: list[str] = []
    for answer in answers:
        parts = texts(answer)
        tokens = None if answer.usage is None else answer.usage.completion_tokens
        if failure_of(answer) is None and tokens is not None and LOST not in "".join(parts):
            said, silent = said + tokens, silent + _silent(answer)
            seen += sum(len(counts.encode(part)) for part in parts)
            whole += parts
    allowed = _text_range("".join(whole), seen, silent, OFF_IN_ALL)
    if allowed.least <= said <= allowed.most:
        return []
    text = f"usage reports {said:,} output tokens in total, their texts encode to {seen:,}"
    return [Mismatch(index=None, check="text", said=said, seen=seen, text=text)]


def _prompt_checks(answer: TimedAnswer, said: int) -> list[Mismatch]:
    ask = answer.ask
    if ask.prompt_tokens is None:
        return []
    if ask.ids is not None:
        allowed = Range(ask.prompt_tokens, ask.prompt_tokens + 1)  # a token that starts every text
    elif ask.text is not None:
        slack = max(1, ask.prompt_tokens // 50)  # decoding ids to text and encoding it again may change their number
        allowed = Range(ask.prompt_tokens - slack, ask.prompt_tokens + slack + 1)
    elif ask.tools:
        return []  # the server's template decides how tools are written
    else:
        around = TEMPLATE + MESSAGE * len(ask.messages or ())
        allowed = Range(ask.prompt_tokens - max(1, ask.prompt_tokens // 50), ask.prompt_tokens * 51 // 50 + around)
    if allowed.least <= said <= allowed.most:
        return []
    text = f"usage reports {said} prompt tokens, the tokenizer counts {ask.prompt_tokens}"
    return [_mismatch(answer, "prompt tokens", said, ask.prompt_tokens, text)]


def _thinking_checks(answer: TimedAnswer, said: int, whole: int, counts: TextEncoder | None) -> list[Mismatch]:
    if said > whole:
        text = f"usage reports {said} thinking tokens of {whole} output tokens"
        return [_mismatch(answer, "thinking tokens", said, whole, text)]
    tokens = [chunk.tokens for chunk in answer.chunks if chunk.kind == "thinking"]
    if tokens and all(count is not None for count in tokens):
        seen = sum(count or 0 for count in tokens)
        allowed = Range(seen, seen + THINKING)
    elif counts is not None and answer.thinking:
        seen = len(counts.encode(answer.thinking))
        allowed = None if LOST in answer.thinking else _text_range(answer.thinking, seen, THINKING, OFF_IN_ONE)
    elif not answer.thinking:
        seen, allowed = 0, Range(0, THINKING)
    else:
        return []
    if allowed is None or allowed.least <= said <= allowed.most:
        return []
    came = f"the stream contained {seen}" if answer.thinking else "the stream contained none"
    return [_mismatch(answer, "thinking tokens", said, seen, f"usage reports {said} thinking tokens, {came}")]


def _mismatch(answer: TimedAnswer, check: Check, said: int | None, seen: int | None, text: str) -> Mismatch:
    return Mismatch(index=answer.index, check=check, said=said, seen=seen, text=text)
