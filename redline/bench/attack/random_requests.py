"""Random requests, most of them nearly right: what a fuzzer that has read the documentation sends.

`requests(seed)` goes on for ever. A request is valid but for a field or two, or not at all; its client reads, leaves,
or is slow. Answers stay short, so that thousands are asked in minutes.
"""

import json
import random
import string
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from redline.bench.attack.raw_http import get, head, post

Draw = Callable[[random.Random], Any]

MOST_TOKENS = 24  # of most answers, at most


class Request(NamedTuple):
    """One request. data: all its bytes. how: keyword arguments for `raw_http.ask`, such as when the client leaves.

    shape: what the whole answer has to be where its status is 200.
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
    """A JSON value that hardly any field expects."""
    return rng.choice(ANYTHING)


def text(rng: random.Random) -> str:
    """A valid text of up to 1,200 characters: words, repeated words, any script, or what is awkward to tokenise."""
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
    """A field whose valid values are the integers from `low` to `high`, both included."""
    return Field(lambda rng: rng.randint(low, high), lambda rng: rng.choice([low - 1, high + 1, *ANYTHING]))


def number(low: float, high: float) -> Field:
    """A field whose valid values are the numbers from `low` to `high`; both ends are drawn often."""

    def good(rng: random.Random) -> float:
        return rng.choice([low, high, rng.uniform(low, high), rng.uniform(low, high)])

    return Field(good, lambda rng: rng.choice([low - 1, high + 1e-3, 1e308, *ANYTHING]))


def one_of(*values: Any, often: float = 0.1) -> Field:
    """A field whose valid values are just these."""
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
    "response_format": one_of({"type": "text"}, None),
    "suffix": one_of(None),
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


def _tools(rng: random.Random) -> Any:
    made: list[Any] = []
    for k in range(rng.choice([0, 1, 1, 3])):
        schema = _schema(rng)
        parameters = schema if isinstance(schema, dict) else {}
        made.append(
            {"type": "function", "function": {"name": f"f{k}", "description": text(rng), "parameters": parameters}}
        )
    return made


def _bad_tools(rng: random.Random) -> Any:
    return rng.choice(
        [[{"type": "function"}], [{"type": "x"}], [{"type": "function", "function": {"name": ""}}], *ANYTHING]
    )


CHAT = COMMON | {
    "messages": Field(_messages, lambda rng: rng.choice([[], [_bad_message(rng)], anything(rng)]), 1.0),
    "max_completion_tokens": integer(1, MOST_TOKENS)._replace(often=0.0),
    "tools": Field(_tools, _bad_tools, 0.2),
    "tool_choice": one_of("auto", "none", None),
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
    "/v1/chat/completions": (0.45, CHAT),
    "/v1/completions": (0.30, COMPLETION),
    "/tokenize": (0.08, TOKENIZE),
    "/detokenize": (0.05, DETOKENIZE),
}
READS = (
    "/",
    "/health",
    "/live",
    "/metrics",
    "/version",
    "/v1/models",
    "/v1/models/kimi-nano",
    "/docs",
    "/..",
    "/%00",
    "*",
)


def requests(seed: int) -> Iterator[Request]:
    """Yields requests without end. The nth is a function of (seed, n) alone."""
    number = 0
    while True:
        yield draw(random.Random(f"{seed},{number}"))
        number += 1


def draw(rng: random.Random) -> Request:
    """One request with its client's manners: 90 % to a POST route with a body of fields, the others odd ones."""
    how = _manners(rng)
    names = list(ROUTES)
    share = rng.random()
    if share > 0.97:
        path = rng.choice([*names, *READS])
        method = rng.choice(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
        return Request("other", head(method, path, 0), how, "any")
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
    asked = {name: field.good(rng) for name, field in fields.items() if rng.random() < field.often}
    streams = path.startswith("/v1/") and rng.random() < 0.5
    if path.startswith("/v1/"):
        asked["max_tokens"] = rng.choice([1, 2, 8, rng.randint(1, MOST_TOKENS)])
        asked["min_tokens"] = min(asked.get("min_tokens", 0), asked["max_tokens"])
        if streams:
            asked["stream"] = True
            asked["stream_options"] = rng.choice(
                [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
            )
    if rng.random() < 0.3:
        for _ in range(rng.choice([1, 1, 2])):
            name = rng.choice(list(fields))
            asked[name] = fields[name].bad(rng)
    if rng.random() < 0.03 and path.startswith("/v1/"):
        asked["max_tokens"] = rng.choice([0, -1, 2**31, 10**9, "7", 1.5, 2**70])
    data = json.dumps(asked, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    return Request(path, post(path, data), how, "stream" if streams else "json")


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
