"""Foreign clients drive a served Kimi-Nano: `make test-clients`. They have an environment of their own (other pins).

Each is used as its own pages show it, with a base URL and a key: structured answers in every mode that it has, tools,
streams. What comes back has to be what the mode promises; whether it is true is not the question here.
"""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ConfigDict

ROOT = Path(__file__).parents[1]
MODEL = "kimi-nano"
PROMPT = "Give the city Oslo, which has 700000 people, as JSON with city and people."
START_S = 120
for name in ("LITELLM_LOCAL_MODEL_COST_MAP", "LANGSMITH_TRACING", "OPENAI_AGENTS_DISABLE_TRACING"):
    os.environ[name] = {"LANGSMITH_TRACING": "false"}.get(name, "True")
os.environ["OPENAI_API_KEY"] = os.environ["ANTHROPIC_API_KEY"] = "none"


class City(BaseModel):
    """A city."""

    city: str
    people: int


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The address of a server on loopback that ends with the tests."""
    python = os.environ.get("REDLINE_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
    command = [python, "-m", "redline", "serve", str(ROOT / "models" / MODEL), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        began, address = time.monotonic(), None
        while address is None and time.monotonic() - began < START_S and (line := server.stdout.readline()):
            address = re.search(r"http://127\.0\.0\.1:\d+", line) if "is ready at" in line else None
        assert address is not None, "the server did not come up"
        drained = subprocess.Popen(["cat"], stdin=server.stdout, stdout=subprocess.DEVNULL)
        try:
            yield address[0]
        finally:
            server.terminate()
            server.wait(30)
            drained.kill()
            drained.wait()


class Closed(City):
    """A city, and nothing else: where more may follow, nano goes on for as long as it may."""

    model_config = ConfigDict(extra="forbid")


def weather(city: str) -> str:
    """The weather in a city."""
    return f"It rains in {city}."


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


# ------------------------------------------------------------------------------------------------------------ litellm


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm(url: str, provider: str) -> None:
    import litellm

    base = f"{url}/v1" if provider == "openai" else url
    given: dict[str, Any] = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none", "max_tokens": 300}
    messages = [{"role": "user", "content": "Say hello."}]
    answer = litellm.completion(messages=messages, **given)
    assert answer.usage.completion_tokens > 0
    pieces = [
        piece.choices[0].delta for piece in litellm.completion(messages=messages, stream=True, **given) if piece.choices
    ]
    assert any(piece.content or getattr(piece, "reasoning_content", None) for piece in pieces)
    called = litellm.completion(
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        **given,
    )
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert "city" in call.function.arguments


# ---------------------------------------------------------------------------------------------------------- langchain


@pytest.mark.parametrize("method", ["function_calling", "json_mode", "json_schema"])
def test_langchain_openai_gives_structured_output(url: str, method: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", max_tokens=400, temperature=0)
    got = model.with_structured_output(City, method=method, include_raw=True).invoke(PROMPT)
    if method == "json_mode":  # any object is what it asks for; whether it is a City is the model's affair
        assert got["raw"].content.lstrip().startswith("{")
    else:
        assert isinstance(got["parsed"], City), got


def test_langchain_openai_streams_and_calls_tools(url: str) -> None:
    from langchain_core.messages import ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", max_tokens=300, temperature=0, stream_usage=True)
    pieces = list(model.stream("Say hello."))
    assert sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces) > 0
    asked = [("user", "What is the weather in Oslo?")]
    called = model.bind_tools([weather], tool_choice="weather").invoke(asked)
    (call,) = called.tool_calls
    assert set(call["args"]) == {"city"}
    told = model.bind_tools([weather]).invoke([*asked, called, ToolMessage(weather("Oslo"), tool_call_id=call["id"])])
    assert told.response_metadata["finish_reason"] in ("stop", "tool_calls", "length")


def test_langchain_anthropic(url: str) -> None:
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model=MODEL, base_url=url, max_tokens=400, temperature=0)
    assert isinstance(model.with_structured_output(City).invoke(PROMPT), City)
    assert "".join(str(piece.content) for piece in model.stream("Say hello."))


# -------------------------------------------------------------------------------------------------------- pydantic-ai


@pytest.mark.parametrize("way", ["tool", "native", "prompted"])
def test_pydantic_ai(url: str, way: str) -> None:
    from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    kind = {"tool": ToolOutput, "native": NativeOutput, "prompted": PromptedOutput}[way](City)
    agent = Agent(model, output_type=kind, retries=3, model_settings={"max_tokens": 500, "temperature": 0})
    assert isinstance(agent.run_sync(PROMPT).output, City)


# --------------------------------------------------------------------------------------------------------- instructor


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON"])
def test_instructor(url: str, mode: str) -> None:
    import instructor
    from openai import OpenAI

    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none"), mode=instructor.Mode[mode])
    got = client.chat.completions.create(
        model=MODEL,
        response_model=Closed if mode == "JSON_SCHEMA" else City,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=500,
        temperature=0,
        max_retries=3,
    )
    assert isinstance(got, City)


# ------------------------------------------------------------------------------------------------------- openai-agents


@pytest.mark.parametrize("over", ["chat", "responses"])
def test_openai_agents(url: str, over: str) -> None:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    kind = OpenAIChatCompletionsModel if over == "chat" else OpenAIResponsesModel
    model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key="none"))
    settings = ModelSettings(max_tokens=500, temperature=0)
    agent = Agent(name="cities", model=model, output_type=City, model_settings=settings)
    assert isinstance(asyncio.run(Runner.run(agent, PROMPT)).final_output, City)
    forced = ModelSettings(max_tokens=500, temperature=0, tool_choice="required")
    caller = Agent(name="weather", model=model, tools=[function_tool(weather)], model_settings=forced)
    told = asyncio.run(Runner.run(caller, "What is the weather in Oslo?", max_turns=4))
    assert any(item.type == "tool_call_output_item" for item in told.new_items)


# ----------------------------------------------------------------------------------------------- Vercel's AI, recorded


def test_what_generate_object_of_vercels_ai_sends(url: str) -> None:
    """The request of `generateObject` with a schema, as its OpenAI-compatible provider writes it."""
    body = {
        "model": MODEL,
        "max_tokens": 400,
        "temperature": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": City.model_json_schema(), "strict": True, "name": "response"},
        },
        "messages": [{"role": "system", "content": "JSON schema:"}, {"role": "user", "content": PROMPT}],
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    City.model_validate_json(answer.json()["choices"][0]["message"]["content"])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
