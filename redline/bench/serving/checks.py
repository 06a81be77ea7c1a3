"""Whether a server counts what it sends: its usage against the stream that came with it, and against the request.

A server's token counts are what throughput, TPOT and bills are made of, and it alone knows its tokens. So nothing here
is an equation where tokenisation may be to blame: each check has a tolerance, and its comment says what explains it.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from redline.bench.serving.metrics import Counts, failure_of, texts
from redline.bench.serving.records import Answer
from redline.wire.base import Record

Check = Literal["usage", "output tokens", "text", "prompt tokens", "thinking tokens", "cached tokens", "length"]

# Tokens that are counted and carry no text: the end of a turn, the two ends of the thinking, and of a call its
# beginning, its name's end, the arguments' beginning and end, and those of the section around all calls.
END, THINKING, CALL = 1, 2, 6
# Of a chat: the tokens of a template around a message, and those that open the answer.
TEMPLATE, MESSAGE = 64, 16
# A model may sample other tokens than the encoder would choose: more of them where it says over and over what the
# encoder would merge, fewer where its tokens lie across the words into which the encoder cuts first. In one answer,
# gibberish above all, either may be by half; in many answers together a tenth is much.
OFF_IN_ONE, OFF_IN_ALL = 2, 10
LOST = "\ufffd"  # stands for bytes that made no character: how many tokens they were is lost


class Mismatch(Record, frozen=True):
    """One thing that does not add up in one answer, in words. said: by the server. seen: by us, what was counted.

    index: of the request; None: of all answers together.
    """

    index: int | None
    check: Check
    said: int | None
    seen: int | None
    text: str


class Range(NamedTuple):
    """Counts that tokenisation explains, both ends included."""

    least: int
    most: int


def usage_checks(answer: Answer, counts: Counts | None = None) -> list[Mismatch]:
    """What of an answer's usage does not fit its stream, its text or its request; nothing of a failed answer.

    counts: encodes with the model's own vocabulary; without it text is not encoded anew.
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
        text = f"usage says {said} output tokens, the events carried {total}"
        expect("output tokens", said, total, Range(total, total + silent), text)
    else:
        # One token may become two events, where it ends the thinking and begins the answer, or in a call.
        events = sum(chunk.kind != "tool" for chunk in answer.chunks)
        text = f"usage says {said} output tokens, and {events} events carried text"
        expect("output tokens", said, events, Range(events - THINKING, max(said, events)), text)
    asked = answer.ask.max_tokens
    expect("length", said, asked, Range(0, asked), f"{said} output tokens, though {asked} was the most asked for")
    if answer.finish == "length":
        # The context's end is another reason; whoever runs a benchmark at that end wants to know it.
        text = f"finish_reason is length after {said} of {asked} tokens"
        expect("length", said, asked, Range(asked, max(said, asked)), text)
    if counts is not None:
        found += _text_checks(answer, said, counts)
    if usage.prompt_tokens is not None:
        found += _prompt_checks(answer, usage.prompt_tokens)
        if usage.cached_tokens is not None:
            text = f"{usage.cached_tokens} tokens came from a cache, of a prompt of {usage.prompt_tokens}"
            expect("cached tokens", usage.cached_tokens, usage.prompt_tokens, Range(0, usage.prompt_tokens), text)
    if usage.reasoning_tokens is not None:
        found += _thinking_checks(answer, usage.reasoning_tokens, said, counts)
    return found


def mismatches(answers: Sequence[Answer], counts: Counts | None = None) -> list[Mismatch]:
    """`usage_checks` of all answers, in their order, and what shows only in all of them together."""
    found = [mismatch for answer in answers for mismatch in usage_checks(answer, counts)]
    return found if counts is None else found + _whole_text_checks(answers, counts)


def _text_range(text: str, seen: int, silent: int, share: int) -> Range:
    off = max(8, seen // share)
    return Range(seen - off, min(seen + off, len(text.encode())) + silent)  # each token is a byte at least


def _silent(answer: Answer) -> int:
    """Tokens of an answer that may be counted without text; any number where the end of its turn was to be ignored."""
    if answer.ask.extra.get("ignore_eos"):
        return answer.ask.max_tokens
    return END + (THINKING if answer.thinking else 0) + CALL * len(answer.calls)


def _text_checks(answer: Answer, said: int, counts: Counts) -> list[Mismatch]:
    text = "".join(texts(answer))
    if LOST in text:
        return []
    seen = sum(len(counts.encode(part)) for part in texts(answer))
    allowed = _text_range(text, seen, _silent(answer), OFF_IN_ONE)
    if allowed.least <= said <= allowed.most:
        return []
    return [_mismatch(answer, "text", said, seen, f"usage says {said} output tokens, its text encodes to {seen}")]


def _whole_text_checks(answers: Sequence[Answer], counts: Counts) -> list[Mismatch]:
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
    text = f"usage says {said:,} output tokens in all, their texts encode to {seen:,}"
    return [Mismatch(index=None, check="text", said=said, seen=seen, text=text)]


def _prompt_checks(answer: Answer, said: int) -> list[Mismatch]:
    ask = answer.ask
    if ask.prompt_tokens is None:
        return []
    if ask.ids is not None:
        allowed = Range(ask.prompt_tokens, ask.prompt_tokens + 1)  # a token that begins every text
    elif ask.text is not None:
        slack = max(1, ask.prompt_tokens // 50)  # ids that became text and ids again
        allowed = Range(ask.prompt_tokens - slack, ask.prompt_tokens + slack + 1)
    elif ask.tools:
        return []  # how a template writes tools is the server's own
    else:
        around = TEMPLATE + MESSAGE * len(ask.messages or ())
        allowed = Range(ask.prompt_tokens - max(1, ask.prompt_tokens // 50), ask.prompt_tokens * 51 // 50 + around)
    if allowed.least <= said <= allowed.most:
        return []
    text = f"usage says {said} prompt tokens, the tokenizer counts {ask.prompt_tokens}"
    return [_mismatch(answer, "prompt tokens", said, ask.prompt_tokens, text)]


def _thinking_checks(answer: Answer, said: int, whole: int, counts: Counts | None) -> list[Mismatch]:
    if said > whole:
        text = f"{said} thinking tokens of {whole} output tokens"
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
    came = f"what came of it is {seen}" if answer.thinking else "none of it came"
    return [_mismatch(answer, "thinking tokens", said, seen, f"usage says {said} thinking tokens, {came}")]


def _mismatch(answer: Answer, check: Check, said: int | None, seen: int | None, text: str) -> Mismatch:
    return Mismatch(index=answer.index, check=check, said=said, seen=seen, text=text)
