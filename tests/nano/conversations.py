"""Random conversations with tools, plausible ones and odd ones, for readers that have to agree about them."""

import json
import random
from typing import Any

from redline.chat.conversation import Conversation, Message, Tool, ToolCall

TEXTS = (
    "", "Hello", " two  spaces ", "line\nline\n\n", "I'm he'll THEY'VE WE'D it's", "1234567 3.14", "你好，世界",
    "日本語 text",
    "Grüße из Москвы", '{"a": [1, 2]}', "tab\there",
    "{{ 7 * 7 }}{% if %}", "</think", "'", "\r\n \u00a0x",
    "e\u0301\u200d🙂👩‍👩‍👧",
)  # fmt: skip
NAMES = ("get_weather", "search-files", "f", "items", "get", "values", "Ünïcode", "a.b")
KEYS = ("city", "unit", "paths", "x", "items", "keys", "get", "update", "B", "a", "_z", "日")


def conversation(seed: int) -> Conversation:
    """The conversation of a seed, always the same."""
    random_ = random.Random(seed)
    messages: list[Message] = []
    if random_.random() < 0.5:
        messages.append(Message(role="system", content=random_.choice(TEXTS)))
    for _ in range(random_.randrange(5)):
        messages += _turns(random_)
    tools = tuple(
        Tool(name=random_.choice(NAMES), description=random_.choice(TEXTS), parameters=_parameters(random_))
        for _ in range(random_.choice((0, 0, 1, 1, 2, 4)))
    )
    return Conversation(
        messages=tuple(messages),
        tools=tools,
        thinking=random_.random() < 0.6,
        preserve_thinking=random_.random() < 0.3,
        add_generation_prompt=random_.random() < 0.8,
    )


def _turns(random_: random.Random) -> list[Message]:
    def name() -> str | None:
        return random_.choice((None, None, None, "ann", "o'Neil"))

    user = Message(role="user", content=random_.choice(TEXTS), name=name())
    if random_.random() < 0.2:
        return [user]
    calls = tuple(_call(random_) for _ in range(random_.choice((0, 0, 1, 2, 4))))
    answer = Message(
        role="assistant", content=random_.choice(TEXTS), reasoning=random_.choice(TEXTS), tool_calls=calls, name=name()
    )
    ids = [random_.choice((call.id, call.id, "", "call_9")) for call in calls]
    random_.shuffle(ids)
    results = [Message(role="tool", content=random_.choice(TEXTS), tool_call_id=id, name=name()) for id in ids]
    return [user, answer, *results[: random_.randrange(len(results) + 1)]]


def _call(random_: random.Random) -> ToolCall:
    name = random_.choice(NAMES)
    ids = (f"functions.{name}:{random_.randrange(4)}", "call_1", "call_2", "functions.f:1", "functions.f:²", "", "0")
    arguments = random_.choice(('{"city": "Oslo"}', '{"x":[1,2.5,null]}', "", "{}", '{"a": "é\\n"}', "not json"))
    return ToolCall(id=random_.choice(ids), name=name, arguments=arguments)


def _parameters(random_: random.Random) -> dict[str, Any]:
    """A JSON schema; one in five of them broken in some place."""
    schema = {"type": "object", **_object(random_, 3)}
    if random_.random() < 0.3:
        schema["$defs"] = {random_.choice(("node", "leaf", "A")): _schema(random_, 2) for _ in range(2)}
    if random_.random() < 0.2:
        return _broken(random_, schema)
    return schema if random_.random() < 0.9 else {}


def _object(random_: random.Random, depth: int) -> dict[str, Any]:
    keys = random_.sample(KEYS, random_.randrange(5))
    made: dict[str, Any] = {"properties": {key: _schema(random_, depth - 1) for key in keys}}
    if random_.random() < 0.6:
        made["required"] = random_.sample([*keys, "absent"], random_.randrange(len(keys) + 1))
    if random_.random() < 0.4:
        made["additionalProperties"] = random_.choice((True, False, None, {}, _schema(random_, depth - 1)))
    return made


def _schema(random_: random.Random, depth: int) -> Any:
    kinds = ["string", "number", "integer", "boolean", "null", "enum", "types", "any", "flag", "ref"]
    kind = random_.choice([*kinds, *(["object", "array", "anyOf"] * 2 if depth > 0 else [])])
    match kind:
        case "any":
            return {}
        case "flag":
            return random_.random() < 0.5
        case "ref":
            made: dict[str, Any] = {"$ref": random_.choice(("#", "#/$defs/node", "#/$defs/leaf", "#/$defs/node"))}
        case "enum":
            made = random_.choice((
                {"enum": ["a", "b c", None]}, {"type": "string", "enum": ["é", '"']},
                {"type": "integer", "enum": [1, -2]},
                {"type": "number", "enum": [1, 2.5, True, 1e30]}, {"type": ["string", "null"], "enum": ["x", None]},
                {"enum": [True, 1.5, [1, "a"]]}, {"type": ["null"], "enum": [None]},
            ))  # fmt: skip
        case "types":
            made = {"type": random_.sample(["string", "number", "null", "object", "array", "integer"], 2)}
        case "object":
            made = {"type": "object", **_object(random_, depth)}
        case "array":
            made = {"type": "array"}
            if random_.random() < 0.8:
                made["items"] = _schema(random_, depth - 1)
        case "anyOf":
            made = {"anyOf": [_schema(random_, depth - 1) for _ in range(random_.randrange(4))]}
        case _:
            made = {"type": kind}
    made = dict(made)
    if random_.random() < 0.4:
        made["description"] = random_.choice(("What it is.", "Two\n\nlines, 100 %", "{{ x }}", "", None))
    for key, value in (("minLength", 1), ("maxLength", 1.5), ("pattern", "^a|b$"), ("maximum", 2), ("minItems", None)):
        if random_.random() < 0.15:
            made[key] = value
    if random_.random() < 0.25:
        made["default"] = random_.choice(
            (None, True, 0, 1.5, -1e-7, "é\"'", [1, {"b": 1, "a": "ü"}], {"z": 0, "y": {}})
        )
    return made


def _broken(random_: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with one value, anywhere in it, replaced by one of a wrong type."""
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            visit(value[key])

    copy = json.loads(json.dumps(schema))
    visit(copy)
    holder, key = random_.choice(places)
    holder[key] = random_.choice((None, True, 0, 2.5, "", "text", [], ["a"], {}, {"a": 1}, [["a"]], {"type": "string"}))
    return copy
