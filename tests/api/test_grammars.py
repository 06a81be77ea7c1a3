"""Grammars before their jobs are admitted: supported ones, refused ones with their messages, and their cost."""

import asyncio
import json
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from lab.attack.schemas import schemas
from redline.api.anthropic.requests import read_messages
from redline.api.ask import Ask
from redline.api.config import Defaults, Limits
from redline.api.grammars.grammar_child import GrammarTrial, GrammarVerdict, verdict_of
from redline.api.grammars.grammars import Grammars
from redline.api.grammars.trials import GrammarProcess
from redline.api.openai.requests import read_chat, read_completion
from redline.api.responses.requests import read_responses
from redline.chat.constraint import Calls, Constraint
from redline.chat.conversation import Conversation, Message, Tool, ToolCall
from redline.chat.vocabulary import grammar_tokens
from redline.errors import Overloaded, RequestError
from redline.messages.job import Grammar
from redline.policy.grammar import parser_limits
from tests.api.world import Here
from tests.clocks import FakeClock
from tests.tiny_tokenizer import tokenizer
from tests.waiting import eventually, turns

pytestmark = pytest.mark.anyio
SPECIAL = tokenizer().special
NESTED = {"type": "object", "properties": {"a": {"items": {"uniqueItems": True}}}}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def opened(*, apart: bool = False, **limits: Any) -> AsyncIterator[Grammars]:
    """apart: compile grammars in separate processes, as a server does; otherwise in this process."""
    grammars = Grammars(tokenizer(), Limits(**{"grammar_seconds": 600.0, **limits}))
    if not apart:
        grammars.trials._children = [Here(tokenizer()), Here(tokenizer())]
    try:
        yield grammars
    finally:
        grammars.close()
        await grammars.ended()


def process_of(grammars: Grammars) -> asyncio.subprocess.Process | None:
    """The first of the two."""
    child = grammars.trials._children[0]
    assert isinstance(child, GrammarProcess)
    return child.child.process


async def killed(grammars: Grammars) -> None:
    """Kill the first process; its parent has not noticed yet."""
    process = process_of(grammars)
    assert process is not None
    process.kill()
    await process.wait()


def schema(value: Any) -> Constraint:
    return Constraint(kind="json_schema", text=json.dumps(value), param="schema")


async def grammar_of(grammars: Grammars, asked: Constraint | Conversation, **how: Any) -> Grammar | None:
    conversation = asked if isinstance(asked, Conversation) else None
    constraint = asked if isinstance(asked, Constraint) else None
    thinks = bool(how.pop("thinks", False))
    return await grammars.grammar(constraint, Calls(**how), conversation, thinks=thinks)


def tools(*declared: Tool, calls: tuple[str, ...] = ()) -> Conversation:
    made = tuple(ToolCall(id=id, name="f", arguments="{}") for id in calls)
    return Conversation(messages=(Message(role="assistant", tool_calls=made),), tools=declared)


async def test_where_nothing_is_asked_for_there_is_no_grammar_and_no_process():
    async with opened(apart=True) as grammars:
        assert await grammars.grammar(None, Calls(), None, thinks=True) is None
        assert await grammars.grammar(None, Calls(), tools(), thinks=True) is None
        assert process_of(grammars) is None


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (schema(NESTED), "uniqueItems is not supported, at #/properties/a/items/uniqueItems"),
        (schema({"type": "text"}), "Invalid type: text"),
        (schema({"$ref": "#/$defs/x"}), "Pointer '/$defs/x' does not exist"),
        (schema(False), "no value fits the schema false, at #"),
        (
            schema({"$ref": "https://x.example/y"}),
            "'https://x.example/y' is not supported: only to places in the schema",
        ),
        (schema({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"pattern": "(?=a)b"}}}), "at #/$defs/a/pattern"),
        (
            schema({"allOf": [{"type": "string"}, {"type": "integer"}]}),
            "incompatible types, at #/allOf/1/type",
        ),
        (Constraint(kind="regex", text="(?=a)b", param="schema"), "look-ahead"),
        (Constraint(kind="regex", text="a(", param="schema"), "unclosed group"),
        (Constraint(kind="grammar", text="start: nobody", param="schema"), "unknown name"),
        (Constraint(kind="grammar", text="root ::= (", param="schema"), "GBNF"),
        (schema({"enum": ["x" * (1 << 20)]}), "at most 1048576 are read"),
    ],
)
async def test_what_cannot_be_used_is_refused_in_these_words(constraint: Constraint, words: str):
    async with opened() as grammars:
        for thinks in (False, True):
            with pytest.raises(RequestError) as refused:
                await grammar_of(grammars, constraint, thinks=thinks)
            assert words in str(refused.value)
            assert refused.value.param == "schema"


AMBIGUOUS = "start: a+\na: A | a a | a A a\nA: /[a-z ]/"
OPTIONAL = {"type": "object", "properties": {f"key {n}": {"type": "string"} for n in range(300)}}


@pytest.mark.parametrize("text", [AMBIGUOUS, f"start: %json {json.dumps(OPTIONAL)}"], ids=["ambiguous", "properties"])
def test_a_trial_follows_a_grammar_beyond_its_first_mask(text: str, monkeypatch: pytest.MonkeyPatch):
    """With a tiny vocabulary masks have few items, so the limit is lower here."""
    monkeypatch.setattr("redline.clock.thread_time", FakeClock())
    tokens, inward = grammar_tokens(tokenizer()), [tokenizer().encode(one)[0] for one in '{[":,']
    trial = GrammarTrial(text=text)
    assert verdict_of(trial, tokens, inward) == GrammarVerdict()
    monkeypatch.setattr("redline.policy.grammar.STEP_ITEMS", 300)
    masks = LLMatcher(tokens, text, log_level=0, limits=parser_limits())
    masks.compute_bitmask()
    assert not masks.is_error()
    assert "Too many items" in str(verdict_of(trial, tokens, inward).error)


@pytest.mark.parametrize("asked", schemas(50), ids=map(str, range(50)))
def test_a_trial_takes_what_a_worker_can_follow(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("redline.clock.thread_time", FakeClock())
    tokens, inward = grammar_tokens(tokenizer()), [tokenizer().encode(one)[0] for one in '{[":,']
    error = verdict_of(GrammarTrial(text=f"start: %json {json.dumps(asked)}"), tokens, inward).error
    assert error is None or "Unimplemented keys" in error


def test_a_trial_takes_no_more_time_than_an_answer_has():
    clock = FakeClock()

    def read() -> float:
        clock.advance(0.26)
        return clock()

    with clock.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("redline.clock.thread_time", read)
        verdict = verdict_of(GrammarTrial(text='start: "abcdef"'), grammar_tokens(tokenizer()), ())
    assert verdict.error == "it takes too long: one token took 260 ms to process; at most 250 ms are allowed"


async def test_a_process_that_takes_too_long_is_killed_and_another_takes_its_place():
    """The first process is stopped, so it does not answer."""
    child, trial = GrammarProcess(tokenizer(), Limits()), GrammarTrial(text='start: "a"')
    with FakeClock().drives(asyncio.get_running_loop()) as clock:
        try:
            assert await child.ask(trial) == GrammarVerdict()
            first = child.child.process
            assert first is not None
            first.send_signal(signal.SIGSTOP)
            asked = asyncio.create_task(child.ask(trial))
            await eventually(lambda: clock.advance(0.5) or asked.done())
            with pytest.raises(TimeoutError):
                await asked
            assert child.child.process is None
            assert await first.wait() == -signal.SIGKILL
            assert await child.ask(trial) == GrammarVerdict()
            assert child.child.process not in (None, first)
        finally:
            child.kill()
            await child.ended()


async def test_where_no_process_can_be_started_a_client_may_try_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    async with opened(apart=True) as grammars:
        with pytest.raises(Overloaded):
            await grammar_of(grammars, schema({}))
    monkeypatch.undo()
    async with opened(apart=True, grammar_memory=1 << 20) as grammars:
        with pytest.raises(Overloaded):
            await grammar_of(grammars, schema({}))


async def test_a_process_that_has_ended_since_its_last_trial_refuses_nothing():
    async with opened(apart=True) as grammars:
        assert await grammar_of(grammars, schema({})) is not None
        await killed(grammars)
        assert await grammar_of(grammars, schema({"type": "string"})) is not None


async def test_a_process_that_ends_in_the_middle_refuses_one_grammar_once():
    """The process may have ended for another reason, so the refusal is not cached."""
    async with opened(apart=True) as grammars:
        assert await grammar_of(grammars, schema({})) is not None
        process = process_of(grammars)
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        asked = asyncio.create_task(grammar_of(grammars, schema({"type": "string"})))
        await turns(100)  # the trial has been sent, and is not answered
        process.kill()
        with pytest.raises(RequestError, match="memory"):
            await asked
        assert await grammar_of(grammars, schema({"type": "string"})) is not None
        assert await grammar_of(grammars, schema({"type": "integer"})) is not None


async def test_the_process_may_take_so_much_memory_and_no_more():
    async with opened(apart=True, grammar_memory=333 << 20) as grammars:
        assert await grammar_of(grammars, schema({"type": "integer"})) is not None
        process = process_of(grammars)
        assert process is not None
        assert resource.prlimit(process.pid, resource.RLIMIT_AS) == (333 << 20, 333 << 20)


async def test_a_verdict_is_kept():
    async with opened(apart=True) as grammars:
        first = await grammar_of(grammars, schema({"type": "integer"}))
        await killed(grammars)
        assert await grammar_of(grammars, schema({"type": "integer"})) == first


async def test_verdicts_are_bounded_in_bytes_since_an_error_may_quote_a_whole_grammar(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("redline.api.grammars.grammars.KEPT_BYTES", 1_000_000)
    async with opened() as grammars:
        for letter in "abcde":
            with pytest.raises(RequestError, match="unknown name"):
                await grammar_of(grammars, Constraint(kind="grammar", text=f"start: {letter * 200_000}", param="g"))
            assert 0 < sum(len(kept.error or "") for kept in grammars._verdicts.values()) < 1_000_000
        assert grammars._bytes < 1_000_000


async def test_too_many_that_wait_are_told_to_come_later():
    async with opened(apart=True, grammars=2) as grammars:
        asked = (grammar_of(grammars, schema({"maxLength": n})) for n in range(5))
        came = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(one) for one in came] == [Grammar, Grammar, *[Overloaded] * 3]
        assert grammars.trials.waiting == 0


async def test_a_client_that_leaves_during_its_trial_costs_no_process_and_its_verdict_is_kept():
    async with opened(apart=True) as grammars:
        await grammar_of(grammars, schema({}))
        process = process_of(grammars)
        leaving = asyncio.create_task(grammar_of(grammars, schema({"enum": list(range(1000))})))
        await eventually(lambda: grammars.trials._serving)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        with pytest.raises(RequestError, match="Invalid type"):
            await grammar_of(grammars, schema({"type": "nothing"}))
        assert process_of(grammars) is process
        assert len(grammars._verdicts) == 4  # the last grammar and its part


async def test_of_a_tool_that_is_not_strict_what_cannot_be_followed_is_left_out():
    async with opened() as grammars:
        sound = Tool(name="f", parameters={"properties": {"n": {"type": "integer"}}})
        late = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b", "maxLength": 3}}}
        given = await grammar_of(grammars, tools(sound, *(Tool(name="g", parameters=one) for one in (NESTED, late))))
        assert given is not None
        texts = {one["name"]: one.get("json_schema") for one in json.loads(given.text)["grammars"]}
        assert texts["arguments0"]["properties"] == {"n": {"type": "integer"}}
        assert texts["arguments1"]["properties"] == {"a": {"items": {}}}
        assert texts["arguments2"]["properties"] == {"a": {"type": "string", "maxLength": 3}}
        for parameters, words in ((NESTED, "uniqueItems"), (late, "look-ahead.*, at #/properties/a/pattern")):
            with pytest.raises(RequestError, match=words) as refused:
                await grammar_of(grammars, tools(sound, Tool(name="g", parameters=parameters, strict=True, param="x")))
            assert refused.value.param == "x"


async def test_a_tool_whose_schema_is_too_long_takes_any_object():
    async with opened(grammar_bytes=2000) as grammars:
        wide = {"properties": {f"key {n}": {"maxLength": n} for n in range(100)}}
        given = await grammar_of(grammars, tools(Tool(name="f", parameters=wide)))
        assert given is not None
        assert _schemas_of(given)["arguments0"] == {"type": "object"}
        with pytest.raises(RequestError, match="at most 2000 are read"):
            await grammar_of(grammars, tools(Tool(name="f", parameters=wide, strict=True)))


async def test_arguments_are_an_object_whatever_cannot_be_followed():
    async with opened() as grammars:
        for parameters in ({"type": "text", "maxLength": 3}, {"type": ["object", "null"]}, {"enum": []}, {"not": {}}):
            given = await grammar_of(grammars, tools(Tool(name="f", parameters=parameters)))
            assert given is not None
            assert _schemas_of(given)["arguments0"]["type"] == "object"


def _schemas_of(grammar: Grammar) -> dict[str, Any]:
    found = {one["name"]: one.get("json_schema") for one in json.loads(grammar.text)["grammars"]}
    return {name: {k: v for k, v in schema.items() if k != "x-guidance"} for name, schema in found.items() if schema}


def takes(grammar: Grammar | None, text: str) -> bool:
    """Whether the text is accepted as an answer, or as the arguments of the first tool."""
    assert grammar is not None
    matcher = LLMatcher(grammar_tokens(tokenizer()), grammar.text, log_level=0, limits=parser_limits())
    ids = list(tokenizer().encode(text))
    return matcher.validate_tokens(ids) == len(ids) and all(map(matcher.consume_token, ids)) and matcher.is_accepting()


PRETTY = """{
    "a": 1,
    "b": [
        true, { "c": [] }
    ]
}"""
TABBED = PRETTY.replace("    ", "\t").replace("\n", "\r\n")


async def test_white_space_is_a_space_or_the_end_of_a_line_with_its_indentation():
    async with opened() as grammars:
        for asked in (schema({}), schema({"type": "object", "properties": {"a": {}, "b": {}}})):
            grammar = await grammar_of(grammars, asked)
            for text in (PRETTY, TABBED, '{"a": 1, "b": []}', '{"a":1,"b":[ ]}', '{\n"a" : 1 }'):
                assert takes(grammar, text), text
            for parts in ("{", '"a"', ":", "1", ",", '"b"', "2", "}"):
                for run in ("  ", "\n\n", " \n", "\n" + " " * 17, "\n \t"):
                    for text in (f"{run}{parts}", f"{parts}{run}"):
                        assert not takes(grammar, '{"a":1,"b":2}'.replace(parts, text)), text
            for run in (" ", "\n"):
                assert not takes(grammar, f'{run}{{"a":1}}')
                assert not takes(grammar, f'{{"a":1}}{run}')


async def test_json_can_be_asked_for_without_white_space_and_with_no_members_but_those_named():
    asked = {"properties": {"a": {"properties": {"b": {}}}}, "type": "object"}
    async with opened() as grammars:
        for kind in ({"json": asked}, {"json": json.dumps(asked)}, {"json_object": True}):
            grammar = await grammar_of(
                grammars, constraint(structured_outputs={**kind, "disable_any_whitespace": True})
            )
            assert takes(grammar, '{"a":{"b":1,"c":[1,2]}}')
            for text in ('{"a": {"b":1}}', '{"a":{"b":1}, "c":2}', '{ "a":{}}', '{"a":{}\n}'):
                assert not takes(grammar, text)
        fields = {"json": asked, "disable_additional_properties": True, "disable_fallback": True}
        grammar = await grammar_of(grammars, constraint(structured_outputs=fields))
        assert takes(grammar, '{"a": {"b": 1}}')
        assert not takes(grammar, '{"c":1}')
        assert not takes(grammar, '{"a":{"c":1}}')


def _bodies(**tool: Any) -> dict[str, Conversation]:
    """A tool in every dialect."""
    named = {"description": "The time", "name": "now"}
    schema = {"input_schema": tool["parameters"]} if "parameters" in tool else {}
    said = {"messages": [{"role": "user", "content": "x"}]}
    asked = (
        read_chat(_body(**said, tools=[{"type": "function", "function": {**named, **tool}}]), Limits(), Defaults()),
        read_messages(_body(**said, max_tokens=9, tools=[{**named, **schema}]), Limits(), Defaults()),
        read_responses(_body(input="x", tools=[{"type": "function", **named, **tool}]), Limits(), Defaults()),
    )
    found = [one.ask.prompts[0] for one in asked]
    return {str(n): one for n, one in enumerate(found) if isinstance(one, Conversation)}


def _body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


async def test_a_function_without_parameters_takes_none_in_every_dialect():
    async with opened() as grammars:
        for tool in ({}, {"parameters": None}):
            for conversation in _bodies(**tool).values():
                [declared] = conversation.tools
                assert declared.parameters is None
                grammar = await grammar_of(grammars, conversation, mode="required")
                assert grammar is not None
                begun = _until_arguments(grammar)
                assert begun.compute_ff_tokens()[0] == tokenizer().encode("{")[0]
                assert begun.validate_tokens(list(tokenizer().encode("{}"))) == 2
                assert begun.validate_tokens(list(tokenizer().encode('{"'))) == 1
        for parameters in ({}, {"type": "object"}):  # JSON Schema allows any object for these
            for conversation in _bodies(parameters=parameters).values():
                grammar = await grammar_of(grammars, conversation, mode="required")
                assert grammar is not None
                assert _until_arguments(grammar).validate_tokens(list(tokenizer().encode('{"a":1}'))) == 7


def _until_arguments(grammar: Grammar) -> LLMatcher:
    """A matcher of a call of the only tool, advanced to the start of the arguments."""
    matcher = LLMatcher(grammar_tokens(tokenizer()), grammar.text, log_level=0, limits=parser_limits())
    marks = map(SPECIAL, ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"))
    name = tokenizer().encode("functions.now:0")
    assert all(map(matcher.consume_token, (*marks, *name, SPECIAL("<|tool_call_argument_begin|>"))))
    return matcher


async def test_only_the_tools_that_may_be_called_have_a_place_in_the_grammar():
    declared = tools(*(Tool(name=name) for name in ("f", "g", "h")))
    async with opened() as grammars:
        for mode in ("auto", "required"):
            given = await grammar_of(grammars, declared, mode=mode, names=frozenset({"f", "h"}))
            assert given is not None
            text = json.loads(given.text)["grammars"][0]["lark_grammar"]
            assert ["functions.f:" in text, "functions.g:" in text, "functions.h:" in text] == [True, False, True]


async def test_when_a_grammar_begins_and_what_cannot_come_before():
    end, section, call = map(SPECIAL, ("</think>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"))
    stops = tokenizer().stop_ids
    tool = tools(Tool(name="f"))
    async with opened() as grammars:

        async def places(asked: Constraint | Conversation, **how: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
            given = await grammar_of(grammars, asked, **how)
            assert given is not None
            return given.after, given.banned

        assert await places(schema({})) == ((), ())
        assert await places(schema({}), thinks=True) == ((end,), (*stops, section, call))
        assert await places(tool, thinks=True) == await places(tool) == ((section, call), ())
        assert await places(tool, mode="required") == ((), ())
        assert await places(tool, mode="required", thinks=True) == ((end, section, call), stops)


async def test_the_first_call_has_the_next_index_of_the_conversation():
    async with opened() as grammars:
        for calls, index in (((), 0), (("x", "y"), 2), (("functions.f:7",), 8), (("functions.f:0", "z"), 2)):
            given = await grammar_of(grammars, tools(Tool(name="f"), calls=calls))
            assert given is not None
            assert f'"functions.f:{index}"' in json.loads(given.text)["grammars"][0]["lark_grammar"]


def read(**fields: Any) -> Ask:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return read_chat(json.dumps(body).encode(), Limits(), Defaults()).ask


def constraint(**fields: Any) -> Constraint:
    found = read(**fields).constraint
    assert found is not None
    whole = _body(prompt="x", **fields)
    assert read_completion(whole, Limits(), Defaults()).ask.constraint == found
    return found


TOOLS = [{"type": "function", "function": {"name": name, "strict": name == "g"}} for name in ("f", "g")]


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"regex": None, "disable_fallback": True}}, None),
        ({"response_format": {"type": "json_object"}}, ("json_schema", {"type": "object"}, "response_format")),
        (
            {"response_format": {"type": "json_object", "schema": None}},
            ("json_schema", {"type": "object"}, "response_format"),
        ),
        *(
            ({"response_format": {"type": kind, "schema": asked}}, ("json_schema", asked, "response_format.schema"))
            for kind in ("json_object", "json_schema")
            for asked in ({"const": 1}, True)
        ),
        (
            {"structured_outputs": {"json": {"const": 1}, "disable_any_whitespace": False, "backend": "guidance"}},
            ("json_schema", {"const": 1}, "structured_outputs.json"),
        ),
        ({"structured_outputs": {"disable_any_whitespace": True, "whitespace_pattern": None}}, None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
            ("json_schema", {"type": "null"}, "response_format.json_schema.schema"),
        ),
        ({"structured_outputs": {"json": {"const": 1}}}, ("json_schema", {"const": 1}, "structured_outputs.json")),
        ({"structured_outputs": {"json": '{"const": 1}'}}, ("json_schema", {"const": 1}, "structured_outputs.json")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, ("choice", ["a", "b"], "structured_outputs.choice")),
    ],
)
def test_what_a_request_says_of_its_answer(fields: dict[str, Any], constraint: tuple[str, Any, str] | None):
    given = read(**fields).constraint
    assert (given and (given.kind, json.loads(given.text), given.param)) == constraint


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object", "schema": "x"}}, "response_format.schema"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": {}, "disable_fallback": 1}}, "structured_outputs.disable_fallback"),
        ({"structured_outputs": {"json": {}, "regex": "a", "disable_fallback": True}}, "structured_outputs"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str):
    with pytest.raises(RequestError) as refused:
        read(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({}, Calls()),
        ({"tools": TOOLS, "parallel_tool_calls": False}, Calls(parallel=False)),
        ({"tools": TOOLS, "tool_choice": "required"}, Calls(mode="required")),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            Calls(mode="required", names=frozenset({"g"})),
        ),
    ],
)
def test_which_tools_a_request_lets_be_called(fields: dict[str, Any], calls: Calls):
    asked = read(**fields)
    assert asked.calls == calls
    [conversation] = asked.prompts
    assert isinstance(conversation, Conversation)
    assert [tool.strict for tool in conversation.tools] == ([False, True] if fields else [])


@pytest.mark.parametrize("field", ["json", "regex", "choice", "grammar"])
def test_the_old_names_are_refused_with_the_new_ones(field: str):
    with pytest.raises(RequestError, match=f"structured_outputs.{field}"):
        read(**{f"guided_{field}": "x"})


LATE: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y", "maxLength": 3}}}
HUGE: dict[str, Any] = {"anyOf": [{}] * 50_001}  # more schemas than the parser accepts


def _counted(grammars: Grammars, patch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the trials from now on."""
    tried: list[str] = []
    verdict = grammars.trials.verdict

    async def counted(trial: GrammarTrial, *rest: Any) -> GrammarVerdict:
        tried.append(trial.kind)
        return await verdict(trial, *rest)

    patch.setattr(grammars.trials, "verdict", counted)
    return tried


async def test_a_schema_that_cannot_be_read_is_no_others_fault():
    sound = {"type": "object", "properties": {"n": {"type": "integer"}}}
    async with opened() as grammars:
        given = await grammar_of(
            grammars, tools(Tool(name="f", parameters=sound, strict=True), Tool(name="g", parameters=HUGE))
        )
        assert given is not None
        assert _schemas_of(given)["arguments0"]["properties"] == {"n": {"type": "integer"}}
        assert _schemas_of(given)["arguments1"] == {"type": "object"}
        with pytest.raises(RequestError, match="more than 50000 schemas") as refused:
            await grammar_of(
                grammars,
                tools(Tool(name="f", parameters=sound), Tool(name="g", parameters=HUGE, strict=True, param="tools[1]")),
            )
        assert refused.value.param == "tools[1]"


async def test_of_many_tools_the_one_that_cannot_be_followed_is_found_in_few_trials_and_once(
    monkeypatch: pytest.MonkeyPatch,
):
    many = [Tool(name=f"f{n}", parameters={"properties": {f"p{n}": {"maxLength": 9}}}) for n in range(99)]
    async with opened() as grammars:
        tried = _counted(grammars, monkeypatch)
        asked = tools(*many[:40], Tool(name="g", parameters=LATE), *many[40:])
        given = await grammar_of(grammars, asked)
        assert given is not None
        assert _schemas_of(given)["arguments40"]["properties"] == {"a": {"type": "string", "maxLength": 3}}
        assert _schemas_of(given)["arguments41"]["properties"] == {"p40": {"maxLength": 9}}
        assert len(tried) < 30
        again = len(tried)
        assert await grammar_of(grammars, asked) == given
        assert len(tried) == again, "all verdicts are cached"
        assert await grammar_of(grammars, tools(many[3], Tool(name="g", parameters=LATE))) is not None
        assert len(tried) - again <= 2, "the replacement grammar is also cached when other tools are present"


async def test_where_nearly_all_tools_cannot_be_followed_trials_end_and_the_rest_take_any_object(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("redline.api.grammars.grammars.MOST_TRIES", 12)
    bad = [Tool(name=f"f{n}", parameters={"properties": {"a": {"pattern": f"(?={n})y"}}}) for n in range(40)]
    async with opened() as grammars:
        tried = _counted(grammars, monkeypatch)
        given = await grammar_of(grammars, tools(*bad))
        assert given is not None
        assert len(tried) < 40
        assert all(schema["type"] == "object" for schema in _schemas_of(given).values())


@pytest.mark.parametrize("part", ["grammar", "schemas"])
async def test_an_error_names_no_field_that_was_not_tried_alone(part: str, monkeypatch: pytest.MonkeyPatch):
    """If the trials run out before the unsupported one is found, the strict tools are tried together."""
    monkeypatch.setattr("redline.api.grammars.grammars.MOST_TRIES", 3)
    bad = [
        {"properties": {"a": {"pattern": f"(?={n})y"}}} if part == "grammar" else {"anyOf": [{}] * 11_000}
        for n in range(16)
    ]
    limits = {} if part == "grammar" else {"grammar_bytes": 40_000}
    async with opened(**limits) as grammars:
        loose = [Tool(name=f"f{n}", parameters=schema, param=f"tools[{n}]") for n, schema in enumerate(bad)]
        sound = {"type": "object", "properties": {"n": {"type": "integer"}}}
        given = await grammar_of(
            grammars,
            tools(
                *loose[:1],
                *(msgspec.structs.replace(loose[n], parameters=sound, strict=True) for n in (1, 9)),
                *loose[2:],
            ),
        )
        assert given is not None, "no strict tool is refused because of another one"
        assert _schemas_of(given)["arguments1"]["properties"] == {"n": {"type": "integer"}}
        strict = [msgspec.structs.replace(tool, strict=True) for tool in loose[9:15]]
        with pytest.raises(RequestError, match=r"one of tools\[\d+\], tools\[\d+\].* fails to compile: .") as refused:
            await grammar_of(grammars, tools(*loose[:9], *strict, loose[15]))
        assert refused.value.param == "tools"
        with pytest.raises(RequestError) as refused:
            await grammar_of(grammars, tools(*loose[:9], strict[0], *loose[10:]))
        assert refused.value.param == "tools[9]"


async def test_a_schema_that_was_not_tried_alone_is_followed_in_the_next_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("redline.api.grammars.grammars.MOST_TRIES", 3)
    sound = {"type": "object", "properties": {"n": {"type": "integer"}}}
    bad = [Tool(name=f"f{n}", parameters={"properties": {"a": {"pattern": f"(?={n})y"}}}) for n in range(15)]
    async with opened() as grammars:
        given = await grammar_of(grammars, tools(*bad, Tool(name="g", parameters=sound)))
        assert given is not None
        assert "arguments15" not in _schemas_of(given), "it accepts any object in this request, like the others"
        given = await grammar_of(grammars, tools(Tool(name="g", parameters=sound)))
        assert given is not None
        assert _schemas_of(given)["arguments0"]["properties"] == {"n": {"type": "integer"}}


async def test_tools_of_one_schema_share_a_grammar():
    async with opened() as grammars:
        given = await grammar_of(grammars, tools(*(Tool(name=f"f{n}", parameters={}) for n in range(9))))
        assert given is not None
        assert list(_schemas_of(given)) == ["arguments0"]
