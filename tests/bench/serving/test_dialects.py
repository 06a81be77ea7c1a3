"""The requests that the dialects send, and their parsing of each event."""

from typing import Any

import msgspec
import pytest

from redline.bench.serving.dialects import BACKENDS, CallDelta, error_line
from redline.bench.serving.records import LoadRequest, Usage
from redline.bench.serving.target import ServerTarget
from redline.errors import ConfigError

CHAT, COMPLETIONS = BACKENDS["openai-chat"], BACKENDS["openai"]
TARGET = ServerTarget(base_url="http://127.0.0.1:1", model="m", body={"temperature": 0, "ignore_eos": True})


def _event(**choice: object) -> bytes:
    return msgspec.json.encode({"choices": [choice], "unknown": {"to": "us"}})


def test_a_chat_is_asked_with_its_messages_or_with_a_text_as_the_users():
    body = CHAT.body(LoadRequest(max_tokens=7, text="hi", extra={"temperature": 1}), TARGET)
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert body["max_completion_tokens"] == 7
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert (body["temperature"], body["ignore_eos"]) == (1, True)  # the request's own field wins
    messages = ({"role": "system", "content": "be short"},)
    assert CHAT.body(LoadRequest(max_tokens=7, messages=messages), TARGET)["messages"] == list(messages)


def test_completions_are_asked_with_text_or_ids():
    assert COMPLETIONS.body(LoadRequest(max_tokens=7, ids=(1, 2)), TARGET)["prompt"] == [1, 2]
    body = COMPLETIONS.body(LoadRequest(max_tokens=7, text="hi"), TARGET)
    assert (body["prompt"], body["max_tokens"]) == ("hi", 7)


@pytest.mark.parametrize(
    ("name", "ask"),
    [("openai-chat", LoadRequest(max_tokens=1, ids=(1,))), ("vllm", LoadRequest(max_tokens=1, messages=()))],
)
def test_what_a_dialect_cannot_ask_is_an_error_that_names_the_flag(name: str, ask: LoadRequest):
    with pytest.raises(ConfigError, match="--backend"):
        BACKENDS[name].body(ask, TARGET)


def test_thinking_under_both_names_is_taken_once():
    said = CHAT.read(_event(delta={"reasoning": "so", "reasoning_content": "so"}))
    assert (said.kind, said.thinking, said.text) == ("thinking", "so", "")
    assert CHAT.read(_event(delta={"reasoning_content": "so"})).thinking == "so"


def test_which_events_of_a_chat_are_chunks():
    assert CHAT.read(_event(delta={"content": "a"})).kind == "answer"
    assert CHAT.read(_event(delta={"content": ""})).kind == "answer"  # a token with no text yet
    assert CHAT.read(_event(delta={"role": "assistant", "content": ""})).kind is None
    assert CHAT.read(_event(delta={}, finish_reason="stop")).kind is None
    assert CHAT.read(_event(delta={"function_call": {"name": "f", "arguments": ""}})).kind == "tool"


def test_parts_of_tool_calls_are_told_apart_by_their_index():
    calls: list[dict[str, Any]] = [
        {"index": 1, "id": "x", "function": {"name": "f", "arguments": "{"}},
        {"index": 0, "function": {}},
    ]
    said = CHAT.read(_event(delta={"tool_calls": calls}))
    assert (said.kind, said.calls) == ("tool", (CallDelta(1, "x", "f", "{"), CallDelta(0, "", "", "")))


def test_every_choice_of_completions_is_a_chunk_and_its_tokens_are_counted_where_they_are_said():
    assert COMPLETIONS.read(_event(text="")).kind == "answer"
    assert COMPLETIONS.read(_event(text="ab", logprobs={"tokens": ["a", "b"]})).tokens == 2
    assert CHAT.read(_event(delta={"content": "ab"}, token_ids=[1, 2, 3])).tokens == 3
    assert CHAT.read(_event(delta={"content": "ab"}, logprobs=None)).tokens is None


def test_usage_is_read_with_its_details():
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}
    details = {"reasoning_tokens": 3, "accepted_prediction_tokens": 2}
    said = CHAT.read(msgspec.json.encode({"choices": [], "usage": {**usage, "completion_tokens_details": details}}))
    counted = Usage(prompt_tokens=9, completion_tokens=4, cached_tokens=8, reasoning_tokens=3, accepted_tokens=2)
    assert (said.usage, said.kind) == (counted, None)


@pytest.mark.parametrize(
    "data",
    [b'{"error":{"message":"out of\\n pages","code":500}}', b'{"error":"out of pages"}',
     b'{"object":"error","message":"out of pages","code":400}'],
)  # fmt: skip
def test_an_error_within_a_stream_is_one_line(data: bytes):
    assert CHAT.read(data).error == "out of pages"


def test_an_error_that_is_no_json_is_shown_as_it_is():
    assert error_line(b"<html>bad\n gateway</html>") == "<html>bad gateway</html>"
    assert error_line(b'{"detail":[{"loc":"body"}]}') == '[{"loc":"body"}]'


def test_what_is_no_event_is_refused():
    with pytest.raises(msgspec.DecodeError):
        CHAT.read(b'{"choices":[{"delta"')


@pytest.mark.parametrize("said", ["-5", "1" + 40 * "0"])
def test_a_count_that_can_be_none_is_taken_for_none(said: str):
    details = (
        f'"prompt_tokens_details":{{"cached_tokens":{said}}},"completion_tokens_details":{{"reasoning_tokens":{said}}}'
    )
    event = f'{{"choices":[],"usage":{{"prompt_tokens":{said},"completion_tokens":{said},{details}}}}}'
    assert BACKENDS["openai-chat"].read(event.encode()).usage == Usage()
