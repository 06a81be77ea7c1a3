"""A round trip of Claude Code (2.1.197), recorded against a scripted engine: its requests, and the answers.

The texts are not published: in the record a text is `str[N]`, N its length, and a tool's schema is any object.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from redline.messages.delta import Delta
from redline.messages.job import Job
from tests.api.fake_engine import say
from tests.api.world import TOKENIZER, World, ids

pytestmark = pytest.mark.anyio
RECORD = [json.loads(line) for line in (Path(__file__).parent / "claude_code.jsonl").read_text().splitlines()]
CALL = (
    "I look.</think>Let me read it.<|tool_calls_section_begin|><|tool_call_begin|>functions.Read:0"
    '<|tool_call_argument_begin|>{"file_path": "note.txt"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def filled(value: Any) -> Any:
    """The record with placeholder texts of the recorded lengths."""
    match value:
        case dict():
            return {key: filled(inner) for key, inner in value.items()}
        case list():
            return [filled(inner) for inner in value]
        case str() if length := re.fullmatch(r"str\[(\d+)\]", value):
            return ("some words " * (int(length[1]) // 11 + 1))[: int(length[1])]
        case _:
            return value


def script(job: Job) -> Iterator[Delta]:
    prompt = TOKENIZER.decode_bytes(job.tokens).decode()
    yield from say(ids("</think>It says so.<|im_end|>" if "## Return of functions.Read:0" in prompt else CALL))(job)


def runs(stream: str) -> list[str]:
    """The names of a stream's events with their types; a run of equal events is listed once."""
    names: list[str] = []
    for line in stream.splitlines():
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            delta = event.get("delta", {})
            about = delta.get("type") or event.get("content_block", {}).get("type") or delta.get("stop_reason")
            name = " ".join(word for word in (event["type"], about) if word)
            if not names or names[-1] != name:
                names.append(name)
    return names


async def test_a_recorded_round_trip_is_served_as_it_was() -> None:
    async with World(script, max_model_len=1 << 20) as world:
        sent = [filled(line["sent"]) for line in RECORD if "sent" in line]
        answers = [await world.http.post("/v1/messages?beta=true", json=body) for body in sent]
        prompt = TOKENIZER.decode_bytes(world.engine.jobs[-1].tokens).decode()
    assert [answer.status_code for answer in answers] == [200] * len(sent)
    assert [runs(answer.text) for answer in answers] == [line["got"] for line in RECORD if "got" in line]
    # for a different model name it would not send thinking blocks back
    assert f'"model":"{sent[0]["model"]}"' in answers[0].text
    assert sent[1]["messages"][2]["content"][0]["type"] == "thinking"
    assert "toolu_" not in prompt
    assert all(body["model"].startswith("claude") and body["max_tokens"] == 64_000 for body in sent)
