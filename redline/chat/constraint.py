"""What an answer has to look like, made into a grammar over the model's tokens.

A constraint (JSON, a regex, some choices, a grammar) says what the visible answer is; calls say whether tools may or
must be called. Thinking stays free: the grammar begins with the token that ends it, or where a tool call begins. Calls
are in Kimi's own format, with declared names and arguments that fit the declared schemas.
"""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from redline.chat.conversation import Conversation, Tool
from redline.chat.tokenizer import Tokenizer
from redline.wire.base import Record
from redline.wire.job import Grammar, Thinking

# Between the parts of a JSON text. Bounded, since some models would go on with it for ever.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
MOST_KEPT = 4096  # tokens of max_tokens that thinking leaves to an answer that has to be something; else a quarter
_INDEX = re.compile(r"functions\..+:([0-9]{1,9})", re.DOTALL)


class Constraint(Record, frozen=True):
    """What the visible answer has to be.

    text: a JSON schema, a regular expression, a JSON list of strings, or a grammar in Lark's syntax. param: the field
    that it came from, for errors.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    text: str
    param: str


class Calls(Record, frozen=True):
    """Which tools may be called."""

    mode: Literal["auto", "required"] = "auto"
    names: frozenset[str] | None = None  # of those that may be; None: all
    parallel: bool = True  # several in one answer

    def allow(self, tool: Tool) -> bool:
        """Whether the answer may call this tool."""
        return self.names is None or tool.name in self.names


class Part(NamedTuple):
    """A piece of a grammar that came from the client."""

    param: str  # the field
    own: dict[str, Any]  # one of llguidance's grammars
    tool: int | None  # the tool whose schema may be left out where it cannot be followed; None: it has to be

    @property
    def text(self) -> str:
        """A grammar by itself, as llguidance reads it."""
        return _grammars([self.own])


class Composed(NamedTuple):
    """A grammar, and what a client can be told about where it came from."""

    grammar: Grammar
    parts: tuple[Part, ...]


def compose(
    constraint: Constraint | None,
    calls: Calls,
    conversation: Conversation | None,
    tokenizer: Tokenizer,
    *,
    thinks: bool,
    loose: frozenset[int] = frozenset(),
) -> Composed | None:
    """The grammar of an answer; None where any token may come at any time.

    conversation: None: the prompt is raw text, and there is no thinking and no tool. thinks: the answer begins with
    reasoning. loose: tools, by their place, whose arguments may be any JSON object.
    """
    tools = conversation.tools if conversation is not None else ()
    if constraint is None and not tools:
        return None
    token = tokenizer.specials.__getitem__
    rules: list[str] = []
    others: list[dict[str, Any]] = []
    parts: list[Part] = []
    starts: list[str] = []  # what a complete answer is, behind the reasoning
    if constraint is not None and calls.mode == "auto":
        others.append({"name": "content", **_content(constraint)})
        parts.append(Part(constraint.param, others[-1], None))
        starts.append("@content")
    marks: tuple[int, ...] = token("<|tool_calls_section_begin|>"), token("<|tool_call_begin|>")
    section = marks[0]
    if tools:
        assert conversation is not None, "tools are declared in a conversation"
        rules += _call_rules(tools, calls, _first_index(conversation), tokenizer)
        for place, tool in enumerate(tools):
            if calls.allow(tool):
                others.append({"name": f"arguments{place}", "json_schema": _arguments(tool, loose=place in loose)})
                parts.append(Part(tool.param, others[-1], None if tool.strict else place))
        starts.append(f"<[{section}]> calls")
    whole = " | ".join(starts)
    if constraint is None and calls.mode == "auto":
        rules.insert(0, f"start: <[{section}]>? calls")
        return Composed(Grammar(text=_text(rules, others), after=marks), tuple(parts))
    if not thinks:
        rules.insert(0, f"start: {whole}")
        return Composed(Grammar(text=_text(rules, others)), tuple(parts))
    end_think = token("</think>")
    rules.insert(0, f"start: <[{end_think}]> ({whole})" + (f" | <[{section}]>? calls" if tools else ""))
    after, banned = ((end_think, *marks), ()) if tools else ((end_think,), marks)
    grammar = Grammar(text=_text(rules, others), after=after, banned=(*tokenizer.stop_ids, *banned))
    return Composed(grammar, tuple(parts))


def bound_thinking(
    budget: int | None, max_tokens: int | None, before: Sequence[int], tokenizer: Tokenizer
) -> Thinking | None:
    """How much an answer may think; None: as much as it will.

    budget: tokens of thinking, at most, as the client says. max_tokens: of an answer that has to be something, which
    keeps a quarter of them, MOST_KEPT at most; None: it may be anything. before: the prompt, where the answer goes on
    with its thinking, which counts.
    """
    token = tokenizer.specials.__getitem__
    bounds: list[int] = []
    if budget is not None:
        begun = token("<think>")
        spent = next((place for place, one in enumerate(reversed(before)) if one == begun), 0)
        bounds.append(max(0, budget - spent))
    if max_tokens is not None:
        bounds.append(max(0, max_tokens - 1 - min(MOST_KEPT, -(-max_tokens // 4))))
    if not bounds:
        return None
    end = token("</think>")
    return Thinking(
        most=min(bounds), end=end, ends=(end, token("<|tool_calls_section_begin|>"), token("<|tool_call_begin|>"))
    )


def _content(constraint: Constraint) -> dict[str, Any]:
    from llguidance import regex_to_lark

    match constraint.kind:
        case "json_schema":
            return {"json_schema": _schema(json.loads(constraint.text))}
        case "regex":
            return {"lark_grammar": f"start: /{regex_to_lark(constraint.text, 'd')}/"}
        case "choice":
            choices: list[str] = json.loads(constraint.text)
            return {"lark_grammar": f"start: {' | '.join(map(json.dumps, choices))}"}
        case "grammar":
            return {"lark_grammar": constraint.text}


def _schema(schema: Any) -> dict[str, Any]:
    """A JSON schema as llguidance takes it, with our bound on whitespace."""
    own: dict[str, Any] = {} if schema is True else {"not": {}} if schema is False else schema
    return {**own, "x-guidance": {"whitespace_pattern": WHITESPACE}}


def _arguments(tool: Tool, *, loose: bool) -> dict[str, Any]:
    schema = {} if loose else tool.parameters
    return _schema(schema if "type" in schema else {"type": "object", **schema})


def _call_rules(tools: Sequence[Tool], calls: Calls, first: int, tokenizer: Tokenizer) -> Iterable[str]:
    token = tokenizer.specials.__getitem__
    begin, arguments = token("<|tool_call_begin|>"), token("<|tool_call_argument_begin|>")
    end, section_end = token("<|tool_call_end|>"), token("<|tool_calls_section_end|>")
    callable_tools = [(place, tool) for place, tool in enumerate(tools) if calls.allow(tool)]
    yield f"calls: <[{begin}]> (first) <[{end}]> {'next* ' if calls.parallel else ''}<[{section_end}]>"
    heads = {place: json.dumps(f"functions.{tool.name}:") for place, tool in callable_tools}
    rest = {place: f"<[{arguments}]> call{place}" for place, _ in callable_tools}
    yield "first: " + " | ".join(f'{heads[place][:-1]}{first}" {rest[place]}' for place, _ in callable_tools)
    if calls.parallel:
        yield f"next: <[{begin}]> (later) <[{end}]>"
        yield "later: " + " | ".join(f"{heads[place]} INDEX {rest[place]}" for place, _ in callable_tools)
        yield "INDEX: /[1-9][0-9]{0,3}/"
    for place, _ in callable_tools:
        yield f"call{place}: @arguments{place}"


def _first_index(conversation: Conversation) -> int:
    """The index of the answer's first call: how many calls the conversation has, and none that is taken."""
    ids = [call.id for message in conversation.messages for call in message.tool_calls]
    taken = [int(found[1]) + 1 for id in ids if (found := _INDEX.fullmatch(id))]
    return min(max([len(ids), *taken]), 9999)


def _text(rules: Sequence[str], others: Sequence[dict[str, Any]]) -> str:
    return _grammars([{"name": "answer", "lark_grammar": "\n".join(rules)}, *others])


def _grammars(grammars: Sequence[dict[str, Any]]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False)
