"""The document of the routes: it names every route and field, and every answer is as it says."""

import json
from typing import Any, cast

import pytest
from jsonschema import Draft202012Validator

from redline.api import openai
from tests.api.world import World, answer

pytestmark = pytest.mark.anyio
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
BODIES = {
    "/v1/chat/completions": openai.ChatBody,
    "/v1/completions": openai.CompletionBody,
    "/tokenize": openai.TokenizeBody,
    "/detokenize": openai.DetokenizeBody,
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    validator = cast("Any", Draft202012Validator({**schema, "components": document["components"]}))
    validator.validate(value)


def body_schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    name = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return document["components"]["schemas"][name.rpartition("/")[2]]


async def test_every_route_and_every_field_is_in_the_document() -> None:
    async with World(answer("a")) as world:
        document = (await world.http.get("/openapi.json")).json()
        listed = (await world.http.get("/")).json()["routes"]
    told = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert told == set(listed)
    for path, body in BODIES.items():
        assert set(body_schema(document, path)["properties"]) == set(body.__struct_fields__)
    for name, schema in document["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        for field, said in schema["properties"].items():
            assert said, f"{name}.{field} has neither a type nor a description"


async def test_bounds_and_defaults_are_those_of_the_server() -> None:
    async with World(answer("a")) as world:
        document = (await world.http.get("/openapi.json")).json()
    fields = body_schema(document, "/v1/chat/completions")["properties"]
    assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 8}
    assert fields["messages"]["maxItems"] == world.config.limits.messages
    assert fields["temperature"]["default"] == world.config.defaults.temperature


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", HELLO),
        ("/v1/chat/completions", HELLO | {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "n": 2}),
        ("/v1/chat/completions", HELLO | {"tools": TOOLS, "stop": ["never"]}),
        ("/v1/chat/completions", HELLO | {"stop": "an", "max_tokens": 200, "logit_bias": {"5": 1}}),
        ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "echo": True}),
        ("/v1/completions", {"prompt": [65, 66], "stop_token_ids": [66]}),
        ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
        ("/tokenize", HELLO),
        ("/detokenize", {"tokens": [65]}),
        ("/v1/chat/completions", {}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/v1/completions", {"prompt": "a", "model": "none"}),
    ],
)
async def test_answers_whole_and_streamed_are_as_the_document_says(path: str, body: dict[str, Any]) -> None:
    async with World(answer(f"an answer{CALL}", "a thought")) as world:
        document = (await world.http.get("/openapi.json")).json()
        told = document["paths"][path]["post"]
        whole = await world.http.post(path, json=body)
        check(
            document, told["responses"][str(whole.status_code)]["content"]["application/json"]["schema"], whole.json()
        )
        if whole.status_code != 200 or "text/event-stream" not in told["responses"]["200"]["content"]:
            return
        check(document, body_schema(document, path), body)
        event = told["responses"]["200"]["content"]["text/event-stream"]["x-event"]
        options = {"include_usage": True, "continuous_usage_stats": True}
        streamed = await world.http.post(path, json=body | {"stream": True, "stream_options": options})
    lines = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    assert len(lines) > 2
    for line in lines:
        check(document, event, json.loads(line))


async def test_what_is_read_without_a_body_is_as_the_document_says() -> None:
    async with World(answer("a")) as world:
        document = (await world.http.get("/openapi.json")).json()
        for path, methods in document["paths"].items():
            if "get" not in methods:
                continue
            response = await world.http.get(path)
            ((kind, content),) = methods["get"]["responses"]["200"]["content"].items()
            assert response.headers["content-type"].startswith(kind), path
            check(document, content["schema"], response.json() if kind == "application/json" else response.text)


async def test_the_page_tells_every_route_and_loads_nothing() -> None:
    async with World(answer("a")) as world:
        document = (await world.http.get("/openapi.json")).json()
        page = await world.http.get("/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert all(f"{method.upper()} {path}<" in page.text for path, how in document["paths"].items() for method in how)
    assert "<script" not in page.text
    assert "src=" not in page.text
