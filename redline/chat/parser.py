"""Splits an answer's tokens into reasoning, visible text and tool calls.

A state machine over token ids, one token at a time, so that the result does not depend on the split into deltas:

    THOUGHT --</think>--> ANSWER --section or call begins--> SECTION --> HEADER --> ARGUMENTS --> SECTION ...
       \\-------section or call begins (the model often leaves </think> out)---^

Control tokens are recognized by id. Text that merely spells one is text.
"""

import re
from enum import Enum, auto
from typing import Protocol

from redline.chat.events import CallArguments, CallBegin, Event, Text, Thought
from redline.chat.stops import StopStrings
from redline.chat.tokenizer import TextStream, Tokenizer

_CALL_ID = re.compile(r"(?:functions\.)?(?P<name>.+):[0-9]+", re.DOTALL)

_HEADER_CHARS = 1024  # a longer header cannot name a function that a client may declare

# Some checkpoints write "call" instead of "calls" here. It is not a token of Kimi's, so it is spelled out as text.
_SPELLED = "<|tool_call_section_begin|>"


class _State(Enum):
    THOUGHT = auto()
    ANSWER = auto()
    SECTION = auto()  # in or after a tool-call section, outside of any call: text is ignored
    HEADER = auto()
    ARGUMENTS = auto()
    SKIPPED = auto()  # the arguments of a call with an invalid header


class _Mark(Enum):
    THINK = auto()
    END_THINK = auto()
    SECTION = auto()
    END_SECTION = auto()
    CALL = auto()
    ARGUMENTS = auto()
    END_CALL = auto()


_MARKS = {
    "<think>": _Mark.THINK,
    "</think>": _Mark.END_THINK,
    "<|tool_calls_section_begin|>": _Mark.SECTION,
    "<|tool_call_section_begin|>": _Mark.SECTION,
    "<|tool_calls_section_end|>": _Mark.END_SECTION,
    "<|tool_call_section_end|>": _Mark.END_SECTION,
    "<|tool_call_begin|>": _Mark.CALL,
    "<|tool_call_argument_begin|>": _Mark.ARGUMENTS,
    "<|tool_call_end|>": _Mark.END_CALL,
}


class AnswerReader(Protocol):
    """Turns tokens into events, one token at a time."""

    calls: int  # number of tool calls that have begun
    reasoning_tokens: int  # number of reasoning tokens so far
    over: bool  # whether the answer is complete; later tokens are not part of it

    def push(self, token: int, events: list[Event]) -> None:
        """Read one token; append the resulting visible output to `events`."""
        ...

    def steady(self) -> type[Text] | type[Thought] | None:
        """The kind of event that a plain-text token (`shown.py`) would make now, if each makes one event by itself and
        changes no state of this reader but the reasoning count; None if a token might be held back or do more."""
        ...

    def finish(self, events: list[Event], complete: bool) -> None:
        """The stream is over: append the text that was held back to `events`. complete: the model ended it, so an open
        call is complete."""
        ...


class PlainText:
    """Reads a raw completion: everything is text."""

    calls = 0
    reasoning_tokens = 0
    over = False

    def __init__(self, tokenizer: Tokenizer, stops: StopStrings, skipped: frozenset[int]) -> None:
        self._stream = TextStream(tokenizer, skipped)
        self._stops = stops

    def push(self, token: int, events: list[Event]) -> None:
        """Append the text that this token completes, except a possible start of a stop string, to `events`."""
        text = self._stream.push(token)
        if text:
            _show_text(self._stops.push(text), events)

    def steady(self) -> type[Text] | None:
        """Text, if no byte is held back and there are no stop strings; else None."""
        return Text if self._stream.whole and self._stops.none else None

    def finish(self, events: list[Event], complete: bool) -> None:
        """The stream is over: append the text that was held back to `events`. complete: ignored here."""
        _show_text(self._stops.push(self._stream.flush()) + self._stops.flush(), events)


class Parser:
    """Reads an answer in Kimi's chat format. Stop strings are searched in the visible text only."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        thinking: bool,
        stops: StopStrings,
        skipped: frozenset[int],
        most_calls: int | None = None,
    ) -> None:
        """`thinking`: the answer opens with reasoning. `skipped`: control tokens that have no text. `most_calls`: end
        the answer after this number of calls; 0: end it when a call begins, and do not show that call."""
        self._names = {tokenizer.specials[name]: name for name in _MARKS if name in tokenizer.specials}
        self._stream = TextStream(tokenizer, skipped - self._names.keys())
        self._stops = stops
        self._state = _State.THOUGHT if thinking else _State.ANSWER
        self._tail = _Tail()  # the end of this state's text that may be a spelled-out mark
        self._space: list[str] = []  # whitespace before the tail; part of the text only if more text follows
        self._shown = False  # whether any text of this answer, or of these arguments, has been shown
        self._header: list[str] = []
        self._header_chars = 0
        self._most_calls = most_calls
        self.calls = 0
        self.reasoning_tokens = 0
        self.over = False

    def push(self, token: int, events: list[Event]) -> None:
        """Read one token; append its output to `events`, merged with the last event if that has the same kind."""
        name = self._names.get(token)
        if name is None:
            if self._state is _State.THOUGHT:
                self.reasoning_tokens += 1
            text = self._stream.push(token)
            if text:
                self._text(text, events)
            return
        self._text(self._stream.flush(), events)
        mark = _MARKS[name]
        if self._state is _State.ARGUMENTS and mark in (_Mark.THINK, _Mark.END_THINK):
            self._text(name, events)  # a model that writes about tags, for example into a file, uses these same tokens
        else:
            self._turn(mark, events)
            if self._most_calls is not None and self.calls >= self._most_calls:
                self.over = self._state not in (_State.THOUGHT, _State.ANSWER, _State.ARGUMENTS)

    def steady(self) -> type[Text] | type[Thought] | None:
        """Thought during reasoning, Text once the answer has visible text; None while any text is held back."""
        if self._space or not (self._tail.empty and self._stream.whole):
            return None
        if self._state is _State.THOUGHT:
            return Thought
        return Text if self._state is _State.ANSWER and self._shown and self._stops.none else None

    def finish(self, events: list[Event], complete: bool) -> None:
        """The stream is over: append the text that was held back to `events`. complete: an open call is complete."""
        self._text(self._stream.flush(), events)
        self._leave(events, complete, for_tools=False)

    def _turn(self, mark: _Mark, events: list[Event]) -> None:
        in_tools = self._state not in (_State.THOUGHT, _State.ANSWER)
        match mark:
            case _Mark.THINK:
                pass  # the prompt already contains it, or it opens the current reasoning
            case _Mark.END_THINK:
                if self._state is _State.THOUGHT:
                    self._leave(events, complete=True, for_tools=False)
                    self._enter(_State.ANSWER)
            case _Mark.SECTION:
                self._leave(events, complete=True, for_tools=True)
                self._enter(_State.SECTION)
            case _Mark.CALL:
                self._leave(events, complete=True, for_tools=True)
                self._enter(_State.HEADER)
            case _Mark.ARGUMENTS:
                if self._state is _State.HEADER:
                    self._begin_call(events)
            case _Mark.END_CALL | _Mark.END_SECTION:
                if in_tools:
                    self._leave(events, complete=True, for_tools=True)
                    self._enter(_State.SECTION)

    def _enter(self, state: _State) -> None:
        self._state = state
        self._tail = _Tail()
        self._space, self._header, self._header_chars = [], [], 0
        self._shown = False

    def _leave(self, events: list[Event], complete: bool, for_tools: bool) -> None:
        """Show the held-back text of this state, as far as it is part of the output."""
        match self._state:
            case _State.THOUGHT:
                held = self._held()
                if not (for_tools and held.strip() == _SPELLED):
                    _show_thought(held.rstrip(), events)
            case _State.ANSWER:
                self._answer(self._stops.flush(), events)
                held = self._held()
                noise = for_tools and held.strip() in ("", _SPELLED)
                _show_text("" if noise else held, events)
            case _State.HEADER:
                if complete:
                    self._begin_call(events)
                    self._leave(events, complete, for_tools)
            case _State.ARGUMENTS:
                # Leave truncated arguments truncated: `{}` would look like a valid call.
                if complete and not self._shown:
                    _show_arguments(self.calls - 1, "{}", events)
            case _State.SECTION | _State.SKIPPED:
                pass

    def _begin_call(self, events: list[Event]) -> None:
        header = "".join(self._header).strip()
        match = _CALL_ID.fullmatch(header) if self._header_chars <= _HEADER_CHARS else None
        if match is None:
            return self._enter(_State.SKIPPED)
        events.append(CallBegin(index=self.calls, id=header, name=match["name"]))
        self.calls += 1
        self._enter(_State.ARGUMENTS)

    def _text(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        match self._state:
            case _State.THOUGHT:
                text = self._tail.push(text)
                if shown := text.rstrip():  # trailing whitespace is not part of the reasoning
                    _show_thought(self._take_space() + shown, events)
                if len(shown) < len(text):
                    self._space.append(text[len(shown) :])
            case _State.ANSWER:
                self._answer(self._stops.push(text), events)
            case _State.HEADER:
                self._header_chars += len(text)
                if self._header_chars <= _HEADER_CHARS:
                    self._header.append(text)
            case _State.ARGUMENTS:
                self._shown = self._shown or not text.isspace()
                if self._shown:
                    _show_arguments(self.calls - 1, self._take_space() + text, events)
                else:
                    self._space.append(text)
            case _State.SECTION | _State.SKIPPED:
                pass

    def _answer(self, text: str, events: list[Event]) -> None:
        text = self._tail.push(text)
        if not self._shown and not text.strip():
            self._space.append(text)  # whitespace is not an answer if tool calls follow
        elif text:
            self._shown = True
            _show_text(self._take_space() + text, events)

    def _take_space(self) -> str:
        """The held-back whitespace, now part of the text; clears it."""
        space = "".join(self._space)
        self._space.clear()
        return space

    def _held(self) -> str:
        """All text that this state has held back; clears it."""
        return self._take_space() + self._tail.flush()


class _Tail:
    """Holds back the end of a text that may be, or become, _SPELLED followed by whitespace."""

    def __init__(self) -> None:
        self._begun = ""  # a prefix of _SPELLED, or all of it
        self._behind: list[str] = []  # whitespace after the complete _SPELLED, in pieces that are joined once

    @property
    def empty(self) -> bool:
        """Whether no text is held back."""
        return not self._begun

    def push(self, text: str) -> str:
        """The longest part of the text so far that cannot belong to _SPELLED, whatever follows."""
        if self._begun == _SPELLED and not text.strip():
            self._behind.append(text)
            return ""
        text = self.flush() + text
        begin = text.rfind("<")
        if begin < 0:
            return text
        end = text[begin:]
        if end.startswith(_SPELLED) and not end[len(_SPELLED) :].strip():
            self._begun, self._behind = _SPELLED, [end[len(_SPELLED) :]]
        elif _SPELLED.startswith(end):
            self._begun = end
        else:
            return text
        return text[:begin]

    def flush(self) -> str:
        """No more text follows, so the held-back text is plain text."""
        held = self._begun + "".join(self._behind)
        self._begun, self._behind = "", []
        return held


def _show_text(text: str, events: list[Event]) -> None:
    if text and events and isinstance(last := events[-1], Text):
        events[-1] = Text(text=last.text + text)
    elif text:
        events.append(Text(text=text))


def _show_thought(text: str, events: list[Event]) -> None:
    if text and events and isinstance(last := events[-1], Thought):
        events[-1] = Thought(text=last.text + text)
    elif text:
        events.append(Thought(text=text))


def _show_arguments(index: int, text: str, events: list[Event]) -> None:
    if text and events and isinstance(last := events[-1], CallArguments) and last.index == index:
        events[-1] = CallArguments(index=index, text=last.text + text)
    elif text:
        events.append(CallArguments(index=index, text=text))
