"""The OpenAPI document: it contains every route and field, and every answer matches it."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
from jsonschema import Draft202012Validator

from redline.api.anthropic import requests as anthropic
from redline.api.config import ApiConfig, Limits
from redline.api.openai import requests as openai
from redline.api.openapi.operations import operations
from redline.api.responses import requests as responses
from tests.api.fake_engine import say
from tests.api.world import World, answer, ids

pytestmark = pytest.mark.anyio
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CLAUDE_TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]
FLAT_TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
OPERATIONS = operations(ApiConfig(served_model_names=("a",)))
BODIES = {operation.path: operation for operation in OPERATIONS if operation.body is not None}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    validator = cast("Any", Draft202012Validator({**schema, "components": document["components"]}))
    validator.validate(value)


def body_schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    name = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return document["components"]["schemas"][name.rpartition("/")[2]]


@pytest.mark.parametrize("stored", [False, True])
async def test_the_routes_of_the_server_and_the_operations_are_the_same(stored: bool, tmp_path: Path) -> None:
    async with World(answer("a"), responses_file=str(tmp_path / "kept") if stored else None) as world:
        document = (await world.http.get("/openapi.json")).json()
        routes = [one for one in cast("Any", world.app)._app.routes if not one.path.startswith("/page/")]
    served = {f"{method} {route.path_format}" for route in routes for method in route.methods - {"HEAD"}}
    assert served == {f"{method.upper()} {path}" for path, how in document["paths"].items() for method in how}
    names = [told["operationId"] for how in document["paths"].values() for told in how.values()]
    assert len(set(names)) == len(names)


async def test_every_field_has_a_type_or_a_description() -> None:
    async with World(answer("a")) as world:
        document = (await world.http.get("/openapi.json")).json()
    for name, schema in document["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        for field, said in schema["properties"].items():
            assert said, f"{name}.{field} has neither a type nor a description"


@pytest.mark.parametrize("path", BODIES)
async def test_what_a_reader_takes_and_what_is_told_are_the_same_struct(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[type] = []
    read = openai.read

    def spy(body: bytes, shape: type[Any]) -> Any:
        taken.append(shape)
        return read(body, shape)

    for module in (openai, anthropic, responses):
        monkeypatch.setattr(module, "read", spy)
    async with World(answer("a")) as world:
        document = (await world.http.get("/openapi.json")).json()
        told = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        check(document, told["schema"], told["example"])
        response = await world.http.post(path, json=told["example"])
    assert response.status_code == 200, response.text
    body: Any = BODIES[path].body
    assert taken[0] is body
    assert set(body_schema(document, path)["properties"]) == set(body.__struct_fields__)


@pytest.mark.parametrize("path", BODIES)
async def test_every_field_is_read_so_that_a_wrong_one_is_named(path: str) -> None:
    async with World(answer("a")) as world:
        document = (await world.http.get("/openapi.json")).json()
        told = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        for field in body_schema(document, path)["properties"]:
            wrong = {"type": 1, "echo": 1}
            refused = await world.http.post(path, json=told["example"] | {field: [[[wrong]]]})
            assert refused.status_code == 400, (field, refused.text)
            error = refused.json()["error"]
            assert field in (error.get("param") or error["message"]), (field, error)


async def test_bounds_and_defaults_are_those_of_the_server() -> None:
    async with World(answer("a")) as world:
        document = (await world.http.get("/openapi.json")).json()
    fields = body_schema(document, "/v1/chat/completions")["properties"]
    assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 64}
    assert fields["messages"]["maxItems"] == world.config.limits.messages
    assert fields["temperature"]["default"] == world.config.defaults.sampling.temperature
    assert "maximum" not in fields["max_completion_tokens"]


async def test_what_a_deployment_says_of_max_tokens_is_told() -> None:
    async with World(answer("a"), Limits(default_max_tokens=20, most_max_tokens=30)) as world:
        document = (await world.http.get("/openapi.json")).json()
    for path, field in (("/v1/chat/completions", "max_completion_tokens"), ("/v1/completions", "max_tokens")):
        told = body_schema(document, path)["properties"][field]
        assert (told.get("maximum"), told["default"]) == (None, 20)


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
        ("/v1/chat/completions", HELLO | {"return_token_ids": True, "n": 2}),
        ("/v1/completions", {"prompt": "a", "return_token_ids": True}),
        ("/v1/messages", HELLO | {"max_tokens": 200, "thinking": {"type": "enabled"}, "tools": CLAUDE_TOOLS}),
        ("/v1/messages", HELLO | {"max_tokens": 4, "stop_sequences": ["never"]}),
        ("/v1/messages", HELLO),
        ("/v1/messages", HELLO | {"max_tokens": 4, "model": "none"}),
        ("/v1/messages/count_tokens", HELLO | {"system": "s"}),
        ("/v1/responses", {"input": "hello", "tools": FLAT_TOOLS, "include": ["reasoning.encrypted_content"]}),
        ("/v1/responses", {"input": HELLO["messages"], "max_output_tokens": 4, "reasoning": {"effort": "low"}}),
        ("/v1/responses", {"input": "hello", "tools": FLAT_TOOLS, "reasoning": {"summary": "auto"}}),
        ("/v1/responses", {"input": "hello", "tools": [{"type": "namespace", "name": "n", "tools": FLAT_TOOLS}]}),
        ("/v1/responses", {"input": []}),
        ("/v1/responses/input_tokens", {"input": "hello", "tools": FLAT_TOOLS}),
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
        more: dict[str, Any] = {"stream": True}
        if path in ("/v1/chat/completions", "/v1/completions"):
            more["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        streamed = await world.http.post(path, json=body | more)
    lines = [line.removeprefix("data: ") for line in streamed.text.split("\n") if line.startswith("data: ")]
    if "stream_options" in more:
        assert lines.pop() == "[DONE]"
    assert len(lines) > 2
    for line in lines:
        check(document, event, json.loads(line))


async def test_a_stream_that_fails_tells_it_as_the_document_says() -> None:
    for path, operation in BODIES.items():
        if operation.event is None:
            continue
        async with World(say(ids("one two three"), finish="error")) as world:
            document = (await world.http.get("/openapi.json")).json()
            content = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
            streamed = await world.http.post(path, json=operation.example | {"stream": True})
        lines = [line.removeprefix("data: ") for line in streamed.text.split("\n") if line.startswith("data: ")]
        check(document, content["x-event"], json.loads(lines[-1]))


async def test_responses_that_are_kept_are_told_as_the_document_says(tmp_path: Path) -> None:
    async with World(answer("a"), responses_file=str(tmp_path / "kept")) as world:
        document = (await world.http.get("/openapi.json")).json()
        told = document["paths"]["/v1/responses/{id}"]
        id = (await world.http.post("/v1/responses", json={"input": "hello"})).json()["id"]
        page = await world.http.get(f"/v1/responses/{id}/input_items?limit=1")
        of_page = document["paths"]["/v1/responses/{id}/input_items"]["get"]
        check(document, of_page["responses"]["200"]["content"]["application/json"]["schema"], page.json())
        assert {one["name"] for one in of_page["parameters"] if one["in"] == "query"} == {"limit", "order", "after"}
        for method, status in (("get", 200), ("delete", 200), ("get", 404), ("delete", 404)):
            response = await world.http.request(method, f"/v1/responses/{id}")
            assert response.status_code == status
            schema = told[method]["responses"][str(status)]["content"]["application/json"]["schema"]
            check(document, schema, response.json())


async def test_statuses_are_those_of_the_dialect_and_of_the_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    async with World(answer("a"), keys_file=str(keys)) as world:
        how = {"authorization": "Bearer secret"}
        document = (await world.http.get("/openapi.json", headers=how)).json()
        refused = await world.http.post("/v1/messages", json={})
    paths = document["paths"]
    assert {"401", "429", "529"} <= set(paths["/v1/messages"]["post"]["responses"])
    assert "503" not in paths["/v1/messages"]["post"]["responses"]
    assert "security" in paths["/v1/models"]["get"]
    assert "security" not in paths["/health"]["get"]
    told = paths["/v1/messages"]["post"]["responses"][str(refused.status_code)]["content"]["application/json"]
    check(document, told["schema"], refused.json())


async def test_what_is_read_without_a_body_is_as_the_document_says() -> None:
    async with World(answer("a")) as world:
        document = (await world.http.get("/openapi.json")).json()
        for path, methods in document["paths"].items():
            if "get" not in methods:
                continue
            response = await world.http.get(path.format(id="alias") + ("?events=1" if path == "/engine" else ""))
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
