"""The vendor verifier's suite: which calls are correct, and the counts."""

import json
from pathlib import Path
from typing import Any

import pytest

from redline.bench.serving.records import LoadRequest, TimedAnswer
from redline.bench.verify.tool_calls import MAX_TOKENS, ToolCallRequest, judge, read_requests
from redline.errors import ConfigError

WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}, "day": {"type": "string", "format": "date"}},
    "required": ["city"],
    "$defs": {"name": {"type": "string"}},
}
REQUEST = ToolCallRequest(
    7,
    (),
    (
        {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
        {"type": "function", "function": {"name": "now"}},
        {"type": "function", "function": {"name": "broken", "parameters": {"$ref": "https://example.com/schema"}}},
    ),
    10,
    {},
)


def answer(*calls: tuple[str, str], finish: str | None = "tool_calls", **more: Any) -> TimedAnswer:
    made = tuple({"id": "", "name": name, "arguments": arguments} for name, arguments in calls)
    return TimedAnswer(index=0, ask=LoadRequest(max_tokens=1), planned=0.0, calls=made, finish=finish, **more)


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        (answer(("weather", '{"city": "Rome"}'), ("now", "{}")), []),
        (answer(finish="stop"), []),
        (answer(("weather", '{"city": "Ro'), finish="length"), []),
        (answer(("wether", "{}")), ["name is not declared"]),
        (answer(("weather", '{"city": "Ro')), ["arguments are no JSON"]),
        (answer(("weather", "{}")), ["arguments do not fit the schema"]),
        (answer(("weather", '{"city": 5}'), ("now", "[]")), ["arguments do not fit the schema"] * 2),
        (answer(("broken", "{}")), ["the declared schema cannot be used"]),
        (answer(), ["ended with tool_calls without a call"]),
        (answer(("now", "{}"), finish="stop"), ["calls, but ended otherwise"]),
        (answer(failure="http", error="status 500"), ["the request failed"]),
    ],
)
def test_what_is_wrong_with_an_answer(given: TimedAnswer, kinds: list[str]):
    found = judge(REQUEST, given)
    assert [wrong.kind for wrong in found] == kinds
    assert all(wrong.line == 7 and wrong.why for wrong in found)


def test_requests_are_read_as_the_suite_writes_them(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    messages = [{"role": "_input", "content": "x"}, {"role": "user", "content": "y"}]
    body = {"messages": messages, "model": "theirs", "stream": False, "temperature": 0.6}
    path.write_text(json.dumps(body) + "\n\n" + json.dumps({"messages": [], "tools": [{}], "max_tokens": 5}) + "\n")
    one, other = read_requests(path)
    assert [message["role"] for message in one.messages] == ["system", "user"]
    assert (one.line, one.max_tokens, one.extra) == (1, MAX_TOKENS, {"temperature": 0.6})
    assert (other.line, other.max_tokens, other.tools) == (3, 5, ({},))


@pytest.mark.parametrize("text", ["", "{}", "no JSON", '{"messages": 1}'])
def test_a_file_that_has_no_requests_is_one_line(tmp_path: Path, text: str):
    path = tmp_path / "samples.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"samples.jsonl(, line 1)?: .*expected "):
        read_requests(path)
