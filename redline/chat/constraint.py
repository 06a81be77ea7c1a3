"""Compiles the required form of an answer into a grammar over the model's tokens.

A constraint (JSON, a regex, a list of choices, a grammar) defines the visible answer; `Calls` defines which tools may
or must be called. Thinking stays unconstrained: the grammar begins at the token that ends it, or at the start of a tool
call. Calls are in Kimi's own format, with declared names and arguments that match the declared schemas.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from redline.chat.conversation import Conversation, Tool
from redline.chat.tokenizer import Tokenizer
from redline.messages.base import Record
from redline.messages.job import Grammar, Thinking

# White space between the parts of a JSON text. Bounded, since some models would repeat it for ever.
WHITESPACE = r"\x20|\r?\n(\x20{0,16}|\t{0,8})"
ANY_OBJECT = '{"type":"object"}'
NO_ARGUMENTS = '{"type":"object","additionalProperties":false}'
MOST_KEPT = 4096  # limit of the tokens reserved for a constrained answer after thinking: a quarter of max_tokens
_INDEX = re.compile(r"functions\..+:([0-9]{1,9})", re.DOTALL)


class Constraint(Record, frozen=True):
    """The required form of the visible answer.

    text: a JSON schema, a regular expression, a JSON list of strings, or a grammar in Lark's syntax. param: the request
    field that it came from, for errors. white_space: whether it is allowed between the parts of JSON. closed: as in
    `schema.Written`.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    text: str
    param: str
    white_space: bool = True
    closed: bool = False


class Calls(Record, frozen=True):
    """The tools that may be called."""

    mode: Literal["auto", "required"] = "auto"
    names: frozenset[str] | None = None  # names of the tools that may be called; None: all
    parallel: bool = True  # whether one answer may contain several calls

    def allow(self, tool: Tool) -> bool:
        """Whether the answer may call this tool."""
        return self.names is None or tool.name in self.names


class Form(NamedTuple):
    """A JSON schema sent by the client."""

    name: str  # of its part of the grammar
    schema: Any
    param: str  # the request field
    strict: bool  # True: follow it exactly or refuse it; False: leave out unsupported keywords
    closed: bool = False  # as in `schema.Written`


class Part(NamedTuple):
    """A piece of a grammar that came from the client."""

    name: str  # of the form that it implements
    param: str  # the request field
    own: str  # a grammar of llguidance as JSON; equal schemas share one
    grammar: str  # its name


class Composed(NamedTuple):
    """A grammar, and for each of its parts the request field that it came from, for errors."""

    grammar: Grammar
    parts: tuple[Part, ...]


def forms(constraint: Constraint | None, calls: Calls, conversation: Conversation | None) -> tuple[Form, ...]:
    """The JSON schemas of an answer: of the content itself, and of the arguments of each tool that may be called."""
    found: list[Form] = []
    if constraint is not None and constraint.kind == "json_schema" and calls.mode == "auto":
        schema = json.loads(constraint.text)
        found.append(Form("content", schema, constraint.param, strict=True, closed=constraint.closed))
    for place, tool in enumerate(conversation.tools if conversation is not None else ()):
        if calls.allow(tool) and (schema := tool.parameters) is not None:
            if not tool.strict or "type" not in schema:
                schema = {**schema, "type": "object"}
            found.append(Form(f"arguments{place}", schema, tool.param, tool.strict))
    return tuple(found)


def compose(
    constraint: Constraint | None,
    calls: Calls,
    conversation: Conversation | None,
    tokenizer: Tokenizer,
    *,
    thinks: bool,
    schemas: Mapping[str, str] | None = None,
) -> Composed | None:
    """The grammar of an answer; None if the answer is unconstrained.

    conversation: None if the prompt is raw text, without thinking or tools. thinks: the answer begins with reasoning.
    schemas: JSON schemas that replace those of `forms`, by the form's name; None: no replacement.
    """
    tools = conversation.tools if conversation is not None else ()
    if constraint is None and not tools:
        return None
    if schemas is None:
        schemas = {form.name: dumped(form.schema) for form in forms(constraint, calls, conversation)}
    token = tokenizer.specials.__getitem__
    rules: list[str] = []
    parts: list[Part] = []
    starts: list[str] = []  # alternatives for the complete answer after the reasoning
    if constraint is not None and calls.mode == "auto":
        parts.append(Part("content", constraint.param, _content(constraint, schemas), "content"))
        starts.append("@content")
    marks = tokenizer.call_marks
    if tools:
        assert conversation is not None, "tools are declared in a conversation"
        rules += _call_rules(tools, calls, _first_index(conversation), tokenizer)
        named: dict[tuple[str, bool], str] = {}
        for place, tool in enumerate(tools):
            if calls.allow(tool):
                name, takes = f"arguments{place}", tool.parameters is not None
                text = schemas[name] if takes else NO_ARGUMENTS
                shared = named.setdefault((text, takes), name)
                parts.append(Part(name, tool.param, of_schema(shared, text, white_space=takes), shared))
                rules.append(f"call{place}: @{shared}")
        starts.append(f"<[{marks[0]}]> calls")
    others = list(dict.fromkeys(part.own for part in parts))
    whole = " | ".join(starts)
    if constraint is None and calls.mode == "auto":
        rules.insert(0, f"start: <[{marks[0]}]>? calls")
        return Composed(Grammar(text=_text(rules, others), after=marks), tuple(parts))
    if not thinks:
        rules.insert(0, f"start: {whole}")
        return Composed(Grammar(text=_text(rules, others)), tuple(parts))
    end_think = token("</think>")
    rules.insert(0, f"start: <[{end_think}]> ({whole})" + (f" | <[{marks[0]}]>? calls" if tools else ""))
    after, banned = ((end_think, *marks), ()) if tools else ((end_think,), marks)
    grammar = Grammar(text=_text(rules, others), after=after, banned=(*tokenizer.stop_ids, *banned))
    return Composed(grammar, tuple(parts))


def bound_thinking(
    budget: int | None, max_tokens: int | None, before: Sequence[int], tokenizer: Tokenizer
) -> Thinking | None:
    """The limit on thinking tokens; None: no limit.

    budget: the client's limit on thinking tokens. max_tokens: the limit on tokens of a constrained answer; a quarter of
    them, at most MOST_KEPT, is reserved for the visible part; None: the answer is unconstrained. before: the prompt, if
    the answer continues its thinking; those thinking tokens count.
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
    return Thinking(most=min(bounds), end=end, ends=(end, *tokenizer.call_marks))


def dumped(value: Any) -> str:
    """JSON in the form used in grammars."""
    return json.dumps(value, ensure_ascii=False)


def _content(constraint: Constraint, schemas: Mapping[str, str]) -> str:
    from llguidance import regex_to_lark

    match constraint.kind:
        case "json_schema":
            return of_schema("content", schemas["content"], white_space=constraint.white_space)
        case "regex":
            lark = f"start: /{regex_to_lark(constraint.text, 'd')}/"
        case "choice":
            choices: list[str] = json.loads(constraint.text)
            lark = f"start: {' | '.join(map(json.dumps, choices))}"
        case "grammar":
            lark = constraint.text
    return dumped({"name": "content", "lark_grammar": lark})


def of_schema(name: str, schema: str, *, white_space: bool = True) -> str:
    """A grammar of llguidance for a JSON schema (an object), with our bound on white space."""
    options: dict[str, Any] = {"coerce_one_of": True}  # treat a oneOf that is not provably disjoint as an anyOf
    options |= {"whitespace_pattern": WHITESPACE} if white_space else {"whitespace_flexible": False}
    head = f'{{"x-guidance":{dumped(options)}'
    return f'{{"name":"{name}","json_schema":{head}{"," if schema != "{}" else ""}{schema[1:]}}}'


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


def _first_index(conversation: Conversation) -> int:
    """The index of the answer's first call: the number of calls in the conversation, and above all indices in use."""
    ids = [call.id for message in conversation.messages for call in message.tool_calls]
    taken = [int(found[1]) + 1 for id in ids if (found := _INDEX.fullmatch(id))]
    return min(max([len(ids), *taken]), 9999)


def _text(rules: Sequence[str], others: Sequence[str]) -> str:
    return grammars([dumped({"name": "answer", "lark_grammar": "\n".join(rules)}), *others])


def grammars(own: Sequence[str]) -> str:
    """Joins grammars of llguidance into its input format; the first may refer to the others by name."""
    return f'{{"grammars":[{",".join(own)}]}}'


def any_of(parts: Sequence[Part]) -> str:
    """A grammar that accepts any one of these parts (their grammars differ), in llguidance's input format."""
    if len(parts) == 1:
        return grammars([parts[0].own])
    start = "start: " + " | ".join(f"@{part.grammar}" for part in parts)
    return grammars([dumped({"name": "any", "lark_grammar": start}), *(part.own for part in parts)])
