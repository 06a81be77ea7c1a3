"""Random requests, most of them nearly valid, as from a fuzzer that has read the documentation.

`requests(seed)` is endless, in all three dialects. A request is valid except for a field, a header or a few bytes, or
entirely invalid; its client reads the answer, disconnects, or is slow. Answers are short, so that thousands can be
requested in minutes. `requests(seed, wild=False)` has the same kinds and sizes, all valid, from clients that read to
the end.
"""

import gzip
import json
import random
import string
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lab.attack.raw_http import get, head, post
from lab.attack.schemas import schema as plain_schema

Draw = Callable[[random.Random], Any]

MOST_TOKENS = 24  # maximum tokens of most answers


class Request(NamedTuple):
    """One request. data: all its bytes. how: keyword arguments for `raw_http.ask`, such as when the client disconnects.

    shape: the required format of the whole answer if its status is 200.
    """

    route: str
    data: bytes
    how: dict[str, Any]
    shape: str  # json, stream or any


class Field(NamedTuple):
    """How a field of a body is drawn: `good` gives a valid value, `bad` often an invalid one.

    often: the share of requests that have the field.
    """

    good: Draw
    bad: Draw
    often: float = 0.1


ANYTHING: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, -1e308, "", "x", "0",
    "\x00", "\ud83d\ude00", "a" * 600, [], [None], [[]], [[[]]], {}, {"": {}}, {"type": "x"}, ["a", 1], [1.5],
    "<|im_end|>",
)  # fmt: skip


def anything(rng: random.Random) -> Any:
    """A JSON value that hardly any field accepts."""
    return rng.choice(ANYTHING)


def text(rng: random.Random) -> str:
    """A valid text of up to 1,200 characters: words, repeated words, any script, or text that is hard to tokenise."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(
            ["", " ", "\n\n", "\x00", "\u202e", "e\u0301" * 9, "\U0001f468\u200d\U0001f469", "<|im_end|>"]
        )
    if kind == 1:
        return "".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(0xA0, 0xD7FF)])) for _ in range(60))
    words = "".join(rng.choice(string.ascii_lowercase + " ") for _ in range(rng.choice([5, 20, 60, 120])))
    return words if kind != 2 else words * rng.choice([1, 1, 1, 10])


def ids(rng: random.Random) -> list[int]:
    """A prompt of 1 to 400 token ids of Kimi-Nano's vocabulary."""
    return [rng.randrange(4096) for _ in range(rng.choice([1, 5, 70, 400]))]


def integer(low: int, high: int) -> Field:
    """A field with these valid values: the integers from `low` to `high`, both included."""
    return Field(lambda rng: rng.randint(low, high), lambda rng: rng.choice([low - 1, high + 1, *ANYTHING]))


def number(low: float, high: float) -> Field:
    """A field with these valid values: the numbers from `low` to `high`; both ends are drawn often."""

    def good(rng: random.Random) -> float:
        return rng.choice([low, high, rng.uniform(low, high), rng.uniform(low, high)])

    return Field(good, lambda rng: rng.choice([low - 1, high + 1e-3, 1e308, *ANYTHING]))


def one_of(*values: Any, often: float = 0.1) -> Field:
    """A field with exactly these valid values."""
    return Field(lambda rng: rng.choice(values), anything, often)


def _stop(rng: random.Random) -> Any:
    strings = [rng.choice(["a", " the", "\n", ".", "e" * 40, "\u00e9"]) for _ in range(rng.randint(1, 16))]
    return rng.choice([strings[0], strings])


def _bias(rng: random.Random) -> Any:
    return {str(rng.randrange(4096)): rng.uniform(-100, 100) for _ in range(rng.choice([1, 5, 300]))}


def _bad_bias(rng: random.Random) -> Any:
    return rng.choice([{"-1": 1}, {"4096": 1}, {"a": 1}, {"1": 101}, {"1": "1"}, {str(k): 0 for k in range(301)}, [1]])


COMMON = {
    "model": Field(lambda _: "kimi-nano", lambda rng: rng.choice(["gpt-4", "", "x" * 300, *ANYTHING]), 0.5),
    "n": integer(1, 8)._replace(good=lambda rng: rng.choice([1, 2, 2, 8])),
    "best_of": one_of(1),
    "temperature": number(0, 2)._replace(often=0.5),
    "top_p": number(1e-6, 1),
    "top_k": integer(-1, 1 << 20),
    "min_p": number(0, 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0.1, 10),
    "seed": integer(-(1 << 63), (1 << 63) - 1),
    "stop": Field(_stop, lambda rng: rng.choice([["a"] * 17, ["x" * 1025], [""], *ANYTHING])),
    "stop_token_ids": Field(lambda rng: [rng.randrange(4096)] * rng.randint(0, 64), lambda _: [1] * 65),
    "min_tokens": integer(0, 8),
    "ignore_eos": one_of(True, False),
    "include_stop_str_in_output": one_of(True, False),
    "skip_special_tokens": one_of(True, False),
    "logit_bias": Field(_bias, _bad_bias),
    "prompt_logprobs": integer(0, 20)._replace(often=0.05),
    "cache_salt": Field(text, anything),
    "user": Field(anything, anything),
    "suffix": one_of(None),
    "timeout": Field(lambda rng: rng.choice([30, 60.5]), lambda rng: rng.choice([0, -1, 0.001, 86401, *ANYTHING])),
}


def _message(rng: random.Random) -> Any:
    role = rng.choice(["user", "user", "user", "system", "developer", "assistant", "tool"])
    said: dict[str, Any] = {"role": role, "content": text(rng)}
    if rng.random() < 0.2:
        said["content"] = [{"type": "text", "text": text(rng)} for _ in range(rng.randint(0, 4))]
    if role == "tool":
        said["tool_call_id"] = rng.choice(["functions.f:0", "x", ""])
    if role == "assistant" and rng.random() < 0.5:
        said["reasoning_content"] = text(rng)
        arguments = rng.choice(["{}", '{"a": 1}', "not json", {}, {"a": [1, {"b": None}]}, text(rng)])
        said["tool_calls"] = [{"id": "functions.f:0", "function": {"name": "f", "arguments": arguments}}]
    return said


def _bad_message(rng: random.Random) -> Any:
    wrong = [
        {"role": "user"},
        {"role": "nobody", "content": "a"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": ""}}]},
    ]
    return rng.choice([*wrong, *ANYTHING])


def _messages(rng: random.Random) -> Any:
    return [_message(rng) for _ in range(rng.choice([1, 1, 2, 5]))]


def _schema(rng: random.Random, depth: int = 0) -> Any:
    if depth > 3 or rng.random() < 0.3:
        return rng.choice(
            [{"type": "string"}, {"type": "integer", "minimum": 0}, {"enum": ["a", 1, None]}, {}, *ANYTHING]
        )
    names = [rng.choice(["a", "b", "", "\u00e9", "a b", "$ref"]) for _ in range(3)]
    return {"type": "object", "properties": {name: _schema(rng, depth + 1) for name in names}, "required": names}


def _steep_schema(rng: random.Random) -> Any:
    """A schema that is expensive for a grammar compiler, or leads it into rare cases."""
    word = rng.choice(["a", "\u00e9", '"', "\\", "x" * 200])
    match rng.randrange(8):
        case 0:
            return {
                "type": "string",
                "pattern": rng.choice(["(a+)+$", "(", "a{1,99999}", "(?=a)b", "^(a|aa)+$", "[" * 99]),
            }
        case 1:
            inner: Any = {"type": "integer"}
            for _ in range(rng.choice([5, 60, 65])):
                inner = rng.choice(
                    [{"type": "array", "items": inner}, {"properties": {word: inner}, "required": [word]}]
                )
            return inner
        case 2:
            return {"$ref": rng.choice(["#", "#/$defs/a", "http://127.0.0.1:1/a.json", "file:///etc/passwd", "#/x/0"])}
        case 3:
            return {"enum": [f"{word}{k}" for k in range(rng.choice([1, 300, 3000]))]}
        case 4:
            return {"type": "array", "items": {}, "minItems": rng.choice([0, 100, 2**31]), "maxItems": 2**40}
        case 5:
            return {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"}
        case 6:
            return {"type": "object", "properties": {f"p{k}": {"type": "string"} for k in range(200)}}
        case _:
            return {"type": rng.choice(["number", "integer"]), "minimum": rng.choice([1e308, 5]), "maximum": 4}


def _wild_schema(rng: random.Random) -> Any:
    return rng.choice([_steep_schema, _schema, plain_schema, anything])(rng)


def _format(rng: random.Random) -> Any:
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": plain_schema(rng), "strict": True}}
    return rng.choice([{"type": "text"}, {"type": "json_object"}, named])


def _bad_format(rng: random.Random) -> Any:
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": _wild_schema(rng)}}
    return rng.choice([named, named, {"type": "json_schema"}, {"type": "xml"}, anything(rng)])


def _structured(rng: random.Random) -> Any:
    return rng.choice(
        [
            {"json": plain_schema(rng)},
            {"json_object": True},
            {"regex": rng.choice(["[a-c]{1,9}", "yes|no", r"\d{4}-\d{2}"])},
            {"choice": ["red", "green", "\u00e9"]},
            {"grammar": rng.choice(['start: "a"+', 'root ::= "a" | "b" root'])},
        ]
    )


def _bad_structured(rng: random.Random) -> Any:
    return rng.choice(
        [
            {"json": _wild_schema(rng)},
            {"regex": rng.choice(["(", "(a+)+$", "a{99999}", "(?=a)", "[" * 600, "", "\x00"])},
            {"choice": [rng.choice(["", "a"])] * rng.choice([0, 1, 5000])},
            {
                "grammar": rng.choice(
                    ["start:", "start: start", 'root ::= "', "%import x", "a" * 9000, 'start: "a" ~ 99999']
                )
            },
            {"regex": "a", "json": {}},
            anything(rng),
        ]
    )


def _tools(rng: random.Random) -> Any:
    made: list[Any] = []
    for k in range(rng.choice([0, 1, 1, 3])):
        schema = rng.choice([_schema, plain_schema])(rng)
        parameters = schema if isinstance(schema, dict) else {}
        made.append(
            {"type": "function", "function": {"name": f"f{k}", "description": text(rng), "parameters": parameters}}
        )
    return made


def _bad_tools(rng: random.Random) -> Any:
    strict = {"type": "function", "function": {"name": "f0", "strict": True, "parameters": _wild_schema(rng)}}
    wrong = [[{"type": "function"}], [{"type": "x"}], [{"type": "function", "function": {"name": ""}}]]
    return rng.choice([[strict], [strict], *wrong, *ANYTHING])


CHAT = COMMON | {
    "messages": Field(_messages, lambda rng: rng.choice([[], [_bad_message(rng)], anything(rng)]), 1.0),
    "max_completion_tokens": integer(1, MOST_TOKENS)._replace(often=0.0),
    "tools": Field(_tools, _bad_tools, 0.2),
    "tool_choice": one_of("auto", "none", None, "required", {"type": "function", "function": {"name": "f0"}}),
    "parallel_tool_calls": one_of(True, False),
    "response_format": Field(_format, _bad_format),
    "structured_outputs": Field(_structured, _bad_structured, 0.05),
    "logprobs": one_of(True, often=0.15),
    "chat_template_kwargs": one_of({"thinking": False}, {"enable_thinking": True}, {"preserve_thinking": True}, {}),
    "thinking": one_of({"type": "disabled"}, {"type": "enabled", "keep": "all"}),
    "reasoning_effort": one_of("none", "low", "high"),
    "stream_options": one_of(None),
}


def _prompt(rng: random.Random) -> Any:
    return rng.choice([text(rng) or "a", ids(rng), [text(rng) or "a" for _ in range(3)], [ids(rng) for _ in range(3)]])


COMPLETION = COMMON | {
    "prompt": Field(_prompt, lambda rng: rng.choice([[1, "a"], [4096], [-1], [[]], ["a"] * 65, *ANYTHING]), 1.0),
    "logprobs": integer(0, 20)._replace(often=0.15),
    "echo": one_of(True, False, often=0.2),
    "structured_outputs": Field(_structured, _bad_structured, 0.05),
}


def _block(rng: random.Random) -> Any:
    words = text(rng)
    return rng.choice(
        [
            {"type": "text", "text": words or "a"},
            {"type": "text", "text": words or "a", "cache_control": {"type": "ephemeral"}},
            {"type": "tool_use", "id": "toolu_1", "name": "f0", "input": {"a": words}},
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": words},
            {"type": "thinking", "thinking": words, "signature": rng.choice(["", "c2lnbmVk", words])},
        ]
    )


def _turns(rng: random.Random) -> Any:
    """Messages of Anthropic's dialect."""
    return [
        {
            "role": "user" if k % 2 == 0 else "assistant",
            "content": rng.choice([text(rng) or "a", [{"type": "text", "text": text(rng) or "a"}]]),
        }
        for k in range(rng.choice([1, 1, 3, 5]))
    ]


def _bad_turns(rng: random.Random) -> Any:
    wrong = [
        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/"}}]},
        {"role": "tool", "content": "a"},
        {"role": "user", "content": [{"type": "tool_use", "input": 7}]},
        {"role": rng.choice(["user", "assistant"]), "content": [_block(rng) for _ in range(rng.randint(0, 4))]},
    ]
    return rng.choice([[rng.choice(wrong)], [rng.choice(wrong)], [], anything(rng)])


def _own_tools(rng: random.Random, key: str, **more: Any) -> Any:
    """Tools of the newer dialects, with the schema under `key`."""
    return [
        {"name": f"f{k}", "description": text(rng), key: plain_schema(rng), **more} for k in range(rng.randint(1, 3))
    ]


def _bad_own_tools(rng: random.Random, key: str) -> Any:
    strict = {"type": "function" if key == "parameters" else "custom", "name": "f0", "strict": True}
    return rng.choice([[{**strict, key: _wild_schema(rng)}], [{"type": "web_search"}], [{"name": ""}], *ANYTHING])


ASKED_OF_CLAUDE = {
    "model": COMMON["model"]._replace(good=lambda rng: rng.choice(["kimi-nano", "claude-sonnet-4"])),
    "messages": Field(_turns, _bad_turns, 1.0),
    "system": Field(lambda rng: rng.choice([text(rng), [{"type": "text", "text": text(rng)}]]), anything, 0.3),
    "tools": Field(lambda rng: _own_tools(rng, "input_schema"), lambda rng: _bad_own_tools(rng, "input_schema"), 0.2),
    "thinking": one_of({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}),
}
MESSAGES = ASKED_OF_CLAUDE | {
    "tool_choice": one_of({"type": "auto"}, {"type": "none"}, often=0.05),
    "stop_sequences": Field(lambda rng: [text(rng)[:9] or "a"], lambda rng: rng.choice([["a"] * 17, [""], *ANYTHING])),
    "temperature": number(0, 2)._replace(often=0.5),
    "top_p": number(1e-6, 1),
    "top_k": integer(0, 1 << 20),
    "metadata": one_of({"user_id": "somebody"}),
    "output_config": Field(
        lambda rng: {"format": {"type": "json_schema", "schema": plain_schema(rng)}},
        lambda rng: rng.choice([{"format": {"type": "json_schema", "schema": _wild_schema(rng)}}, anything(rng)]),
    ),
    "context_management": one_of({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
}


def _items(rng: random.Random) -> Any:
    """The input of a Responses request."""
    message = {
        "type": "message",
        "role": rng.choice(["user", "system", "developer", "assistant"]),
        "content": text(rng),
    }
    call = {"type": "function_call", "call_id": "functions.f0:0", "name": "f0", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "functions.f0:0", "output": text(rng)}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text(rng)}]}
    asked = {"role": "user", "content": [{"type": "input_text", "text": text(rng) or "a"}]}
    return rng.choice(
        [text(rng) or "a", [asked], [message, asked], [asked, thought, call, result], [asked, call, result]]
    )


def _bad_items(rng: random.Random) -> Any:
    wrong = [
        {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]},
        {"type": "item_reference", "id": "msg_1"},
        {"type": "function_call", "name": "f"},
        {"type": "reasoning", "encrypted_content": text(rng)},
    ]
    return rng.choice([[rng.choice(wrong)], [rng.choice(wrong)], [], anything(rng)])


def _bad_text(rng: random.Random) -> Any:
    return rng.choice([{"format": {"type": "json_schema", "name": "a", "schema": _wild_schema(rng)}}, anything(rng)])


RESPONSES = {
    "model": COMMON["model"],
    "input": Field(_items, _bad_items, 1.0),
    "instructions": Field(text, anything, 0.3),
    "tools": Field(
        lambda rng: _own_tools(rng, "parameters", type="function"), lambda rng: _bad_own_tools(rng, "parameters"), 0.2
    ),
    "tool_choice": one_of("auto", "none", often=0.05),
    "parallel_tool_calls": one_of(True, False),
    "temperature": number(0, 2)._replace(often=0.5),
    "top_p": number(1e-6, 1),
    "reasoning": one_of({"effort": "none"}, {"effort": "high", "summary": "auto"}, {"effort": None}),
    "text": Field(
        lambda rng: {"format": {"type": "json_schema", "name": "a", "schema": plain_schema(rng)}}, _bad_text, 0.1
    ),
    "include": one_of(["reasoning.encrypted_content"], []),
    "metadata": one_of({"a": "b"}),
    "store": one_of(False, True),
    "previous_response_id": Field(
        lambda _: None, lambda rng: rng.choice(["resp_1", "../x", "' OR 1=1", *ANYTHING]), 0.02
    ),
}
TOKENIZE = {
    "prompt": Field(text, anything, 0.6),
    "messages": Field(_messages, lambda rng: [_bad_message(rng)], 0.4),
    "tools": Field(_tools, _bad_tools, 0.1),
    "return_token_strs": one_of(True, False, often=0.4),
    "add_generation_prompt": one_of(True, False),
}
DETOKENIZE = {"tokens": Field(ids, lambda rng: rng.choice([[4096], [2**31], [-1], *ANYTHING]), 1.0)}

ROUTES: dict[str, tuple[float, dict[str, Field]]] = {
    "/v1/chat/completions": (0.30, CHAT),
    "/v1/completions": (0.20, COMPLETION),
    "/v1/messages": (0.20, MESSAGES),
    "/v1/responses": (0.20, RESPONSES),
    "/v1/messages/count_tokens": (0.04, ASKED_OF_CLAUDE),
    "/tokenize": (0.04, TOKENIZE),
    "/detokenize": (0.02, DETOKENIZE),
}
LONGEST = {"/v1/responses": "max_output_tokens"}  # max_tokens elsewhere
ANSWERS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
READS = (
    "/",
    "/health",
    "/live",
    "/metrics",
    "/version",
    "/v1/models",
    "/v1/models/kimi-nano",
    "/v1/responses/resp_1",
    "/v1/responses/..%2f..%2fetc%2fpasswd",
    "/openapi.json",
    "/load",
    "/ping",
    "/docs",
    "/..",
    "/%00",
    "*",
)


def requests(seed: int, *, wild: bool = True) -> Iterator[Request]:
    """Yields requests without end. The nth is a function of (seed, n) alone. wild: most of them are
    not entirely valid.
    """
    number = 0
    while True:
        yield (draw if wild else ordinary)(random.Random(f"{seed},{number}"))
        number += 1


def ordinary(rng: random.Random) -> Request:
    """A valid request for an answer, from a client that reads it to its end."""
    path = rng.choice(sorted(ANSWERS))
    asked, streams = _asked(rng, path)
    return Request(path, post(path, json.dumps(asked).encode()), {}, "stream" if streams else "json")


def light(rng: random.Random) -> Request:
    """A request of a soak test: mostly valid, one prompt of up to 60 words, one short answer, and some clients
    disconnect.

    One in ten is drawn by `draw`.
    """
    if rng.random() < 0.1:
        return draw(rng)
    path = rng.choice(sorted(ANSWERS))
    asked, streams = _asked(rng, path)
    for name in ("n", "prompt_logprobs"):
        asked.pop(name, None)
    if "prompt" in asked:
        asked["prompt"] = text(rng)[:300] or "a"
    how = {"leave_s": rng.uniform(0, 0.3)} if rng.random() < 0.15 else {}
    return Request(path, post(path, json.dumps(asked).encode()), how, "stream" if streams else "json")


def draw(rng: random.Random) -> Request:
    """One request with its client's behaviour: 90 % are to a POST route with a body of fields, the
    others are unusual.
    """
    how = _manners(rng)
    names = list(ROUTES)
    share = rng.random()
    if share > 0.97:
        path = rng.choice([*names, *READS])
        method = rng.choice(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
        return Request("other", head(method, path, 0, _headers(rng)), how, "any")
    if share > 0.94:
        junk = rng.choice(
            [b"", b"null", b"[]", b"{", b"\xff\xfe", b'{"prompt": "a"} x', rng.randbytes(300), b"0" * 5000]
        )
        path = rng.choice(names)
        return Request(path, post(path, junk), how, "any")
    if share > 0.90:
        path = rng.choice(READS)
        return Request("GET", get(path), how, "any")
    path = rng.choices(names, [ROUTES[name][0] for name in names])[0]
    fields = ROUTES[path][1]
    asked, streams = _asked(rng, path)
    if rng.random() < 0.3:
        for _ in range(rng.choice([1, 1, 2])):
            name = rng.choice(list(fields))
            asked[name] = fields[name].bad(rng)
    if rng.random() < 0.03 and path in ANSWERS:
        asked[LONGEST.get(path, "max_tokens")] = rng.choice([0, -1, 2**31, 10**9, "7", 1.5, 2**70])
    data = json.dumps(asked, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    shape = "stream" if streams else "json"
    match rng.random():
        case lot if lot < 0.05:
            return Request(path, post(path, _damaged(rng, data)), how, "any")
        case lot if lot < 0.10:
            return Request(path, post(path, data, _headers(rng)), how, "any")
        case lot if lot < 0.13:
            return Request(
                path, post(path, gzip.compress(data, 1, mtime=0), [("Content-Encoding", "gzip")]), how, shape
            )
        case lot if lot < 0.16:
            size = rng.choice([1, 7, 4096])
            parts = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in _cut(data, size))
            return Request(
                path, head("POST", path, None, [("Transfer-Encoding", "chunked")]) + parts + b"0\r\n\r\n", how, shape
            )
        case _:
            return Request(path, post(path, data), how, shape)


def _asked(rng: random.Random, path: str) -> tuple[dict[str, Any], bool]:
    """The fields of a valid body for `path`, and whether its answer is a stream."""
    asked = {name: field.good(rng) for name, field in ROUTES[path][1].items() if rng.random() < field.often}
    if path not in ANSWERS:
        return asked, False
    longest = rng.choice([1, 2, 8, rng.randint(1, MOST_TOKENS)])
    asked[LONGEST.get(path, "max_tokens")] = longest
    if "min_tokens" in asked:
        asked["min_tokens"] = min(asked["min_tokens"], longest)
    streams = rng.random() < 0.5
    if streams:
        asked["stream"] = True
        if path in ("/v1/chat/completions", "/v1/completions"):
            asked["stream_options"] = rng.choice(
                [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
            )
    return asked, streams


def _cut(data: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def _damaged(rng: random.Random, data: bytes) -> bytes:
    """The bytes with a few of them changed, lost, doubled, or replaced by sequences that are hard for a JSON parser."""
    damaged = bytearray(data)
    for _ in range(rng.choice([1, 1, 3, 20])):
        at = rng.randrange(len(damaged) + 1)
        match rng.randrange(4):
            case 0:
                damaged[at : at + 1] = rng.randbytes(1)
            case 1:
                del damaged[at : at + rng.randint(1, 9)]
            case 2:
                damaged[at:at] = damaged[at : at + rng.randint(1, 40)]
            case _:
                damaged[at:at] = rng.choice(
                    [
                        b"NaN",
                        b"-Infinity",
                        b"1e999",
                        b"\\ud800",
                        b"\\u0000",
                        b"\xc0\x80",
                        b"[" * 200,
                        b"//",
                        b"'",
                        b"\x00",
                    ]
                )
    return bytes(damaged)


def _headers(rng: random.Random) -> list[tuple[str, str]]:
    """One to three headers that are rare, or have invalid values."""
    odd = [
        ("X-Request-Timeout", rng.choice(["30", "0", "-1", "nan", "1e400", "x", "0.001"])),
        ("X-Request-Id", rng.choice(["a" * 128, "a" * 129, "\x1b[31m", "", "\u00e9"])),
        ("Authorization", rng.choice(["Bearer", "Bearer x", "Basic eDp4", "Bearer " + "k" * 5000, "\u00e9"])),
        ("x-api-key", rng.choice(["", "none", "k" * 5000])),
        ("anthropic-version", rng.choice(["2023-06-01", "x", "9" * 300])),
        ("anthropic-beta", "interleaved-thinking-2025-05-14," * rng.choice([1, 50])),
        (
            "Content-Type",
            rng.choice(["text/plain", "application/json; charset=utf-16", "", "application/xml", "a" * 999]),
        ),
        ("Content-Encoding", rng.choice(["gzip", "br", "deflate", "gzip, gzip", "identity"])),
        ("Content-Length", rng.choice(["0", "-1", "1", "+5", "1e3", "99999999999999999999", "x", "5, 5"])),
        ("Transfer-Encoding", rng.choice(["chunked", "gzip, chunked", "x", "chunked, chunked"])),
        ("Origin", rng.choice(["http://attacker.example", "null", "http://127.0.0.1"])),
        ("Host", rng.choice(["attacker.example", "", "localhost", "127.0.0.1:99999", "[::1]"])),
        ("Expect", rng.choice(["100-continue", "x"])),
        ("Upgrade", rng.choice(["websocket", "h2c"])),
        ("Accept", rng.choice(["text/event-stream", "image/png", "*/*"])),
        ("Accept-Encoding", "gzip, br, zstd"),
        ("X-Forwarded-For", "10.0.0.1, " * rng.choice([1, 900])),
        ("Cookie", "a=b; " * rng.choice([1, 2000])),
        ("Range", "bytes=0-1"),
        ("X-\u00e9", "a"),
        ("A" * rng.choice([1, 9000]), "b" * rng.choice([1, 70_000])),
    ]
    return rng.sample(odd, rng.randint(1, 3))


def _manners(rng: random.Random) -> dict[str, Any]:
    match rng.random():
        case share if share < 0.10:
            return {"leave_s": rng.uniform(0, 0.4)}
        case share if share < 0.15:
            return {"pause_s": 0.05}
        case share if share < 0.20:
            return {"pieces": rng.choice([2, 5, 20]), "pause_s": 0.02}
        case _:
            return {}
