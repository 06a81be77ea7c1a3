"""Prompts from templates and from users' files."""

import json
from pathlib import Path
from typing import Any

import pytest

from redline.chat.lines import conversation
from redline.chat.template import encode
from redline.chat.tokenizer import Tokenizer
from redline.draft.corpus.prompts import DOMAINS, PromptLine, prompts, read_prompts
from redline.errors import ConfigError
from tests.tiny_tokenizer import write_tiny_tokenizer

SHORT = (200, 400)


def said(prompt: PromptLine) -> str:
    return prompt.messages[-1].content or ""


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_domain_has_two_thousand_prompts_that_differ_in_what_is_asked(domain: str):
    found = prompts([domain], 2000, long_characters=SHORT)
    assert len({prompt.id for prompt in found}) == 2000
    assert {prompt.domain for prompt in found} == {domain}
    assert len({said(prompt) for prompt in found}) > 1500
    assert len({prompt.kind for prompt in found}) >= 5
    systems = {prompt.messages[0].content for prompt in found if prompt.messages[0].role == "system"}
    assert len(systems) > 30
    assert {prompt.thinking for prompt in found} == {True, False}


def test_no_slot_is_left_empty():
    lists = {"topic", "name", "city", "language", "rule", "job", "concept", "goal", "matter", "part", "goods"}
    for prompt in prompts(DOMAINS, 300, long_characters=SHORT):
        text = " ".join(turn.content or "" for turn in prompt.messages)
        assert not [word for word in lists if f"{{{word}" in text], text
        assert ".." not in text.replace("...", ""), text


def test_prompts_are_the_same_for_the_same_seed_and_more_of_them_begin_alike():
    few, many, other = prompts(["chat"], 20, 1), prompts(["chat"], 50, 1), prompts(["chat"], 20, 2)
    assert few == many[:20]
    assert not {prompt.id for prompt in few} & {prompt.id for prompt in other}
    assert few[0].id == "chat-31a9e2827b335c70"  # on every machine


def test_several_languages_are_spoken():
    languages = [prompt.language for prompt in prompts(["multilingual"], 500)]
    assert len(set(languages)) >= 12
    assert min(map(languages.count, set(languages))) > 10


def test_an_agent_is_asked_before_a_call_and_after_its_result():
    found = prompts(["agent"], 200)
    assert {prompt.messages[-1].role for prompt in found} == {"user", "tool"}
    for prompt in found:
        names = {tool.function.name for tool in prompt.tools}
        assert len(names) == len(prompt.tools)
        for turn in prompt.messages:
            for call in turn.tool_calls:
                assert call.function.name in names
                declared = next(tool for tool in prompt.tools if tool.function.name == call.function.name)
                assert set(declared.function.parameters["required"]) <= set(json.loads(call.function.arguments))


def test_long_documents_have_the_length_that_is_asked_for():
    lengths = [len(said(prompt)) for prompt in prompts(["long"], 40, long_characters=(3_000, 9_000))]
    assert 3_000 <= min(lengths) < 5_000 < max(lengths) < 10_000


def test_every_prompt_has_tokens(tmp_path: Path):
    tokenizer = Tokenizer.open(write_tiny_tokenizer(tmp_path))
    for prompt in prompts(DOMAINS, 20, long_characters=SHORT):
        assert encode(conversation(prompt), tokenizer)


def test_a_domain_without_templates_is_refused():
    with pytest.raises(ConfigError, match="domain is 'law'; there are templates for code, math"):
        prompts(["law"], 1)


def test_users_lines_are_read_and_what_is_no_prompt_is_named(tmp_path: Path):
    path = tmp_path / "mine.jsonl"
    hello = {"domain": "law", "messages": [{"role": "user", "content": "Hello"}]}
    answered = {**hello, "messages": [*hello["messages"], {"role": "assistant", "content": "Hi!"}]}
    lines = [
        json.dumps({**hello, "id": "first", "language": "de", "thinking": False}),
        json.dumps(answered),
        "",
        '{"domain": "law"',
        json.dumps(hello),  # the same prompt as that of `answered`
        json.dumps({**hello, "messages": []}),
        json.dumps({**hello, "domain": ""}),
        json.dumps({**hello, "sampling": 1}),
        json.dumps({**hello, "id": "first"}),
    ]
    path.write_text("\n".join(lines))
    found = read_prompts(path)
    first, second = found.prompts
    assert (first.id, first.language, first.thinking) == ("first", "de", False)
    assert second.id.startswith("law-")
    assert [turn.role for turn in second.messages] == ["user"]
    assert [message.partition(": ")[0] for message in found.skipped] == [f"{path}, line {n}" for n in range(3, 10)]
    reasons = " ".join(found.skipped)
    for reason in (
        "the line is empty",
        "no message to answer",
        "domain is empty",
        "`sampling`",
        "duplicate id 'first'",
    ):
        assert reason in reasons


def test_each_answer_of_a_users_conversation_is_asked_for_with_what_stands_before_it(tmp_path: Path):
    def turn(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    talk = [turn("system", "Be brief."), turn("user", "A"), {**turn("assistant", "a"), "reasoning_content": "hm"}]
    talk += [turn("user", "B"), turn("assistant", "b"), turn("tool", "C"), turn("assistant", "c")]
    path = tmp_path / "talk.jsonl"
    grown = [{"domain": "law", "messages": talk[:2]}, {"domain": "law", "messages": talk}]  # a log of requests
    path.write_text("\n".join(map(json.dumps, [*grown, {"domain": "law", "id": "x", "messages": talk}])))
    found = read_prompts(path, turns="all")
    assert [said(prompt) for prompt in found.prompts] == ["A", "B", "C", "A", "B", "C"]
    assert [len(prompt.messages) for prompt in found.prompts] == [2, 4, 6, 2, 4, 6]
    assert [prompt.id for prompt in found.prompts[3:]] == ["x/1", "x/2", "x"]
    assert len({prompt.id for prompt in found.prompts}) == 6
    assert not found.skipped
    assert [said(prompt) for prompt in read_prompts(path).prompts] == ["A", "C", "C"]
    tokenizer = Tokenizer.open(write_tiny_tokenizer(tmp_path))
    assert b"hm" not in tokenizer.decode_bytes(encode(conversation(found.prompts[2]), tokenizer))


def test_a_conversation_that_the_assistant_opens_is_not_asked_for_its_greeting(tmp_path: Path):
    path = tmp_path / "talk.jsonl"
    turns = [("system", "S"), ("assistant", "Hello"), ("user", "A"), ("assistant", "a")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path.write_text(json.dumps({"domain": "law", "messages": messages}))
    assert [said(prompt) for prompt in read_prompts(path, turns="all").prompts] == ["A"]


def test_a_prompt_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read"):
        read_prompts(tmp_path / "none.jsonl")


def test_a_tool_that_is_nested_beyond_measure_is_no_prompt(tmp_path: Path):
    """The template would recurse through it until the stack overflows."""

    def line(depth: int) -> str:
        parameters: dict[str, Any] = {}
        for _ in range(depth - 1):
            parameters = {"items": parameters} if depth % 2 else {"anyOf": [parameters]}
        tool = {"function": {"name": "f", "parameters": parameters}}
        return json.dumps({"domain": "x", "messages": [{"role": "user", "content": f"{depth}"}], "tools": [tool]})

    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(line, (1, 63, 65, 400, 401))))
    found = read_prompts(path)
    assert [said(prompt) for prompt in found.prompts] == ["1", "63"]
    assert [message.partition(" - at")[0] for message in found.skipped] == [
        f"{path}, line {number}: parameters are nested {depth} deep; expected at most 64"
        for number, depth in ((3, 65), (4, 799), (5, 401))
    ]
