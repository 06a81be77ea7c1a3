"""Content other than plain text, and reasoning inside content, as clients and gateways send them."""

from typing import Any

import pytest

from tests.api.world import TOKENIZER, World, answer

pytestmark = pytest.mark.anyio
PNG = "iVBORw0KGgo="
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASKED = {"role": "user", "content": "What is in it?"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def prompt_of(path: str, history: list[Any], **fields: Any) -> str:
    """The prompt of a request that is answered."""
    async with World(answer("a")) as world:
        response = await world.http.post(path, json=body(path, history) | fields)
        assert response.status_code == 200, response.text
    return TOKENIZER.decode_bytes(world.engine.jobs[0].tokens).decode()


def body(path: str, history: list[Any]) -> dict[str, Any]:
    return {"input" if path == RESPONSES else "messages": history} | ({"max_tokens": 5} if path == MESSAGES else {})


IMAGES: dict[str, dict[str, Any]] = {
    CHAT: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
    MESSAGES: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
    RESPONSES: {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"},
}


def result(path: str, content: list[Any]) -> list[Any]:
    """A history in which a tool has returned this content."""
    match path:
        case "/v1/chat/completions":
            call = {"id": "functions.read:0", "function": {"name": "read", "arguments": "{}"}}
            said = {"role": "assistant", "content": None, "tool_calls": [call]}
            return [ASKED, said, {"role": "tool", "tool_call_id": call["id"], "content": content}]
        case "/v1/messages":
            use: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {}}
            told = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
            return [ASKED, {"role": "assistant", "content": [use]}, {"role": "user", "content": [told]}]
        case _:
            call = {"type": "function_call", "call_id": "a", "name": "read", "arguments": "{}"}
            return [ASKED, call, {"type": "function_call_output", "call_id": "a", "output": content}]


@pytest.mark.parametrize("path", IMAGES)
async def test_an_image_in_a_tools_result_is_a_line_in_its_place(path: str) -> None:
    """It is part of the history: refusing it would make the session unusable."""
    text = {"type": "input_text" if path == RESPONSES else "text", "text": "Read it."}
    prompt = await prompt_of(path, result(path, [text, IMAGES[path]]))
    assert "Read it." in prompt
    assert "[image left out: this server reads text only]" in prompt
    assert PNG not in prompt


@pytest.mark.parametrize("path", IMAGES)
async def test_an_image_of_the_user_is_refused_in_words_that_agents_know(path: str) -> None:
    async with World(answer("a")) as world:
        refused = await world.http.post(path, json=body(path, [{"role": "user", "content": [IMAGES[path]]}]))
    assert refused.status_code == 400
    assert "Could not process image" in refused.json()["error"]["message"]


async def test_an_image_in_a_document_of_a_tools_result_is_a_line_too() -> None:
    source = {"type": "content", "content": [{"type": "text", "text": "Look:"}, IMAGES[MESSAGES]]}
    prompt = await prompt_of(MESSAGES, result(MESSAGES, [{"type": "document", "source": source}]))
    assert "Look:\n[image left out" in prompt


async def test_a_pdf_in_a_tools_result_is_a_line_and_one_of_the_user_is_refused() -> None:
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
    assert "[document left out" in await prompt_of(MESSAGES, result(MESSAGES, [pdf]))
    async with World(answer("a")) as world:
        refused = await world.http.post(MESSAGES, json=body(MESSAGES, [{"role": "user", "content": [pdf]}]))
    assert "Could not process document" in refused.json()["error"]["message"]


TEXTS: dict[str, dict[str, Any]] = {
    "text": {
        "type": "document",
        "title": "Notes",
        "context": "Of today",
        "source": {"type": "text", "media_type": "text/plain", "data": "The word is Rome."},
    },
    "content": {
        "type": "document",
        "title": "Notes",
        "context": "Of today",
        "source": {"type": "content", "content": [{"type": "text", "text": "The word is Rome."}]},
    },
    "search result": {
        "type": "search_result",
        "title": "Notes",
        "source": "Of today",
        "content": [{"type": "text", "text": "The word is Rome."}],
    },
}


@pytest.mark.parametrize("block", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("of_tool", [False, True], ids=["of the user", "of a tool"])
async def test_blocks_that_hold_nothing_but_text_are_read(block: dict[str, Any], of_tool: bool) -> None:
    history = result(MESSAGES, [block]) if of_tool else [{"role": "user", "content": [block]}]
    assert "Notes\nOf today\nThe word is Rome." in await prompt_of(MESSAGES, history)


THOUGHTS: dict[str, dict[str, Any]] = {
    "thinking": {"type": "thinking", "thinking": "They greet me.", "signature": ""},
    "reasoning": {"type": "reasoning", "text": "They greet me."},
    "thinking in parts": {"type": "thinking", "thinking": [{"type": "text", "text": "They greet me."}]},
}


@pytest.mark.parametrize("part", THOUGHTS.values(), ids=THOUGHTS)
async def test_a_part_of_thinking_is_the_messages_reasoning(part: dict[str, Any]) -> None:
    said = [part, {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Hello!"}]
    history = [ASKED, {"role": "assistant", "content": said}, ASKED]
    prompt = await prompt_of(CHAT, history, chat_template_kwargs={"preserve_thinking": True})
    assert "<think>They greet me.</think>Hello!" in prompt
    async with World(answer("a")) as world:
        refused = await world.http.post(CHAT, json=body(CHAT, [{"role": "user", "content": [part]}]))
    assert refused.status_code == 400


@pytest.mark.parametrize("display", ["updates", "summarized", "a word of next year"])
async def test_a_display_of_thinking_that_nobody_knows_shows_it(display: str) -> None:
    asked = body(MESSAGES, [ASKED]) | {"max_tokens": 50, "thinking": {"type": "adaptive", "display": display}}
    async with World(answer("Yes.", thought="hm")) as world:
        said = (await world.http.post(MESSAGES, json=asked)).json()["content"]
    assert [block.get("thinking", block.get("text")) for block in said] == ["hm", "Yes."]


SAID = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>"
    '{"path": "a.py", "n": 1.0}'
)
END_CALL = "<|tool_call_end|><|tool_calls_section_end|>"
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}


def echoed(path: str, answered: dict[str, Any]) -> list[Any]:
    """The history of the next request; its arguments were parsed and serialised again."""
    match path:
        case "/v1/chat/completions":
            message = answered["choices"][0]["message"]
            [call] = message["tool_calls"]
            call["function"]["arguments"] = '{"path":"a.py","n":1}'
            told = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
            return [ASKED, message, told]
        case "/v1/messages":
            use = answered["content"][-1]
            use["input"] = {"path": "a.py", "n": 1}
            told = {"type": "tool_result", "tool_use_id": use["id"], "content": "done"}
            said = {"role": "assistant", "content": answered["content"]}
            return [ASKED, said, {"role": "user", "content": [told]}]
        case _:
            call = answered["output"][-1]
            call["arguments"] = '{"path":"a.py","n":1}'
            told = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
            return [ASKED, *answered["output"], told]


TOOLS: dict[str, dict[str, Any]] = {
    CHAT: {"type": "function", "function": {"name": "write", "parameters": PARAMETERS}},
    MESSAGES: {"name": "write", "input_schema": PARAMETERS},
    RESPONSES: {"type": "function", "name": "write", "parameters": PARAMETERS},
}


@pytest.mark.parametrize("path", TOOLS)
async def test_the_next_prompt_begins_with_all_that_was_said(path: str) -> None:
    """Its pages are then found in the prefix cache, however the client has rewritten the arguments."""
    asked = {"tools": [TOOLS[path]]} | ({"max_tokens": 200} if path == MESSAGES else {})
    async with World(answer(SAID + END_CALL, thought="" if path == MESSAGES else "hm")) as world:
        first = (await world.http.post(path, json=body(path, [ASKED]) | asked)).json()
        second = await world.http.post(path, json=body(path, echoed(path, first)) | asked)
        assert second.status_code == 200, second.text
    before, after = (TOKENIZER.decode_bytes(job.tokens).decode() for job in world.engine.jobs)
    thought = "" if path == MESSAGES else "hm</think>"
    assert after.startswith(before + thought + SAID + END_CALL)
