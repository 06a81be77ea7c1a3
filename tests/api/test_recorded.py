"""The bytes of responses of each API, whole and streamed, are those in `recorded/`.

`python -m tests.api.test_recorded` records them again, after a change that clients are meant to see.
"""

import asyncio
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.api.fake_engine import Script, say
from tests.api.world import CALLS, World, answer, ids

pytestmark = pytest.mark.anyio
FOLDER = Path(__file__).with_name("recorded")
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
PARAMETERS = {"type": "object"}
TOOLS = {"tools": [{"type": "function", "function": {"name": "get", "parameters": PARAMETERS}}]}
FLAT = [{"type": "function", "name": "get", "parameters": PARAMETERS}]
USAGE = {"stream_options": {"include_usage": True}}
NAMED = {"stream_options": {"include_proposers": True}}
EACH = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TALK = answer(f'say "\u00e9"\n{CALLS}', "a <thought>", per_delta=3, cached=2, drafts=2)
BRIEF = answer("ab \u00e9", "t")
RAW = say(ids("ab \u00e9<|im_end|>"))
SCORED = {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}
CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
THINKING = {"thinking": {"type": "enabled"}}

CASES: dict[str, tuple[str, dict[str, Any], Script]] = {
    "chat": (CHAT, HELLO, BRIEF),
    "chat-calls": (CHAT, HELLO | TOOLS, TALK),
    "chat-usage": (CHAT, HELLO | TOOLS | USAGE | {"n": 2}, TALK),
    "chat-scored": (CHAT, HELLO | SCORED | EACH | {"n": 2}, BRIEF),
    "chat-ids": (CHAT, HELLO | {"return_token_ids": True, "stop": "b"}, BRIEF),
    "chat-ids-length": (CHAT, HELLO | USAGE | {"return_token_ids": True, "max_tokens": 3, "logprobs": True}, BRIEF),
    "chat-proposers": (CHAT, HELLO | NAMED, TALK),
    "chat-failed": (CHAT, HELLO, say(ids("one two"), finish="error")),
    "chat-refused": (CHAT, HELLO | {"n": 0}, BRIEF),
    "chat-model": (CHAT, HELLO | {"model": "none"}, BRIEF),
    "completion": (TEXT, {"prompt": "a"}, RAW),
    "completion-many": (TEXT, {"prompt": ["a", "bc"], "n": 2, "model": "alias"} | USAGE, RAW),
    "completion-scored": (TEXT, {"prompt": "ab", "logprobs": 2, "echo": True, "stop": "never"} | EACH, RAW),
    "completion-ids": (TEXT, {"prompt": [65], "return_token_ids": True, "stop_token_ids": [98]}, RAW),
    "completion-prompt": (TEXT, {"prompt": "ab", "prompt_logprobs": 1, "return_token_ids": True}, RAW),
    "completion-proposers": (TEXT, {"prompt": "a"} | NAMED, RAW),
    "completion-failed": (TEXT, {"prompt": "a"}, say(ids("one two"), finish="error")),
    "message": (MESSAGES, HELLO | {"max_tokens": 9}, BRIEF),
    "message-calls": (
        MESSAGES,
        HELLO | THINKING | {"max_tokens": 200, "tools": [{"name": "get", "input_schema": PARAMETERS}]},
        TALK,
    ),
    "message-omits": (MESSAGES, HELLO | {"max_tokens": 4, "thinking": {"type": "enabled", "display": "omitted"}}, TALK),
    "message-stop": (MESSAGES, HELLO | {"max_tokens": 90, "stop_sequences": ["b"]}, BRIEF),
    "message-failed": (MESSAGES, HELLO | {"max_tokens": 9}, say(ids("one two"), finish="error")),
    "message-refused": (MESSAGES, HELLO, BRIEF),
    "response": (RESPONSES, {"input": "hello"}, BRIEF),
    "response-calls": (
        RESPONSES,
        {
            "input": "hello",
            "instructions": "i",
            "tools": FLAT,
            "include": ["reasoning.encrypted_content"],
            "metadata": {"k": "v"},
            "temperature": 0.5,
            "text": {"format": {"type": "text"}},
        },
        TALK,
    ),
    "response-summary": (RESPONSES, {"input": "hello", "reasoning": {"summary": "auto", "effort": "low"}}, TALK),
    "response-space": (
        RESPONSES,
        {"input": "hello", "tools": [{"type": "namespace", "name": "n", "description": "d", "tools": FLAT}]},
        answer(CALLS.replace("functions.get", "functions.n__get")),
    ),
    "response-length": (RESPONSES, {"input": "hello", "max_output_tokens": 3}, BRIEF),
    "response-failed": (RESPONSES, {"input": "hello"}, say(ids("one two"), finish="error")),
    "response-refused": (RESPONSES, {"input": "hello", "top_p": 3}, BRIEF),
}
POSTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tokenize": ("/tokenize", HELLO),
    "tokenize-texts": ("/tokenize", {"prompt": "h\u00e9", "return_token_strs": True}),
    "detokenize": ("/detokenize", {"tokens": [104, 105]}),
    "count-message": ("/v1/messages/count_tokens", HELLO),
    "count-response": ("/v1/responses/input_tokens", {"input": "hello"}),
}
GETS = ["/health", "/live", "/load", "/v1/models", "/v1/models/alias", "/v1/models?after_id=alias", "/v1/models/none"]


def without_chance(text: str) -> str:
    """The text without random ids and times."""
    text = re.sub(r"\b(chatcmpl-|cmpl-|(?:msg|resp|rs|fco?|toolu)_)[0-9a-f]{24,32}", r"\1ID", text)
    text = re.sub(r'("request_id":")[^"]+', r"\1ID", text)
    text = re.sub(r'("(?:created|created_at)":)(\d+|"[^"]+")', r"\1NOW", text)
    return re.sub(r'("elapsed_ms":)[0-9.e-]+', r"\1TIME", text)


async def of_case(name: str) -> str:
    path, body, script = CASES[name]
    whole = {key: value for key, value in body.items() if key != "stream_options"}
    async with World(script) as world:
        told = [await world.http.post(path, json=whole), await world.http.post(path, json=body | {"stream": True})]
    return "".join(f"{one.status_code} {without_chance(one.text.strip())}\n\n" for one in told)


async def of_others() -> str:
    lines: list[str] = []
    with TemporaryDirectory() as folder:
        async with World(TALK, responses_file=str(Path(folder) / "stored")) as world:
            for path, body in POSTS.values():
                lines.append((await world.http.post(path, json=body)).text)
            for path in GETS:
                lines.append((await world.http.get(path)).text)
            asked = {"input": "hello", "tools": FLAT}
            first = (await world.http.post(RESPONSES, json=asked)).json()["id"]
            output = {"type": "function_call_output", "call_id": "functions.get:0", "output": "sun"}
            asked |= {"input": [output], "previous_response_id": first}
            path = f"{RESPONSES}/{(await world.http.post(RESPONSES, json=asked)).json()['id']}"
            for one in (path, f"{path}/input_items", f"{path}/input_items?limit=2&order=asc"):
                lines.append((await world.http.get(one)).text)
            lines += [(await world.http.delete(path)).text for _ in range(2)]
    return "".join(f"{without_chance(line)}\n" for line in lines)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("name", CASES)
async def test_a_response_has_the_recorded_bytes(name: str) -> None:
    assert await of_case(name) == (FOLDER / f"{name}.txt").read_text()


async def test_responses_without_a_generation_have_the_recorded_bytes() -> None:
    assert await of_others() == (FOLDER / "others.txt").read_text()


async def _record() -> None:
    for name in CASES:
        (FOLDER / f"{name}.txt").write_text(await of_case(name))
    (FOLDER / "others.txt").write_text(await of_others())


if __name__ == "__main__":
    asyncio.run(_record())
