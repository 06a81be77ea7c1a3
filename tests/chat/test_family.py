"""The protocol of each member of the family, chosen from its checkpoint: the content of its prompts, for every
spelling of the thinking options, and the parsing of its answers."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.api.config import Defaults, Limits
from redline.api.openai.requests import read_chat
from redline.chat.conversation import Conversation
from redline.chat.template import Style, render, style_of
from redline.chat.tokenizer import Special, Tokenizer
from tests.chat.streams import calls, pushed, text, thought, tokens_of

KIMI = "You are Kimi, an AI assistant created by Moonshot AI."
# The fields of a checkpoint that distinguish the members: config.json, chat template.
MEMBERS: dict[str, tuple[dict[str, Any], str]] = {
    "K2": ({"model_type": "kimi_k2", "quantization_config": {"quant_method": "fp8"}}, "You are a helpful assistant"),
    "K2-Thinking": (
        {"model_type": "kimi_k2", "quantization_config": {"quant_method": "compressed-tensors"}},
        f"{KIMI}<think></think>",
    ),
    "K2.5": ({"model_type": "kimi_k25", "eos_token_id": 163585}, f"{KIMI}<think>{{{{ thinking }}}}"),
    "K2.6": ({"model_type": "kimi_k25", "eos_token_id": 163586}, f"{KIMI}<think>{{{{ preserve_thinking }}}}"),
    "K2.7-Code": ({"model_type": "kimi_k25", "eos_token_id": 163586}, "<think>"),
}
OPEN = "<|im_assistant|>assistant<|im_middle|>"
HISTORY = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1", "reasoning_content": "past"},
    {"role": "user", "content": "two"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "now",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
]
OFF = [
    {"thinking": {"type": "disabled"}},
    {"enable_thinking": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": False}},
    {"reasoning_effort": "none"},
]
KEEP = [{"thinking": {"type": "enabled", "keep": "all"}}, {"chat_template_kwargs": {"preserve_thinking": True}}]


@pytest.fixture(scope="module")
def styles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Style]:
    found: dict[str, Style] = {}
    for member, (config, template) in MEMBERS.items():
        folder: Path = tmp_path_factory.mktemp(member)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text(template)
        found[member] = style_of(folder)
    return found


def conversation(messages: list[Any], **fields: Any) -> Conversation:
    body = msgspec.json.encode({"messages": messages, **fields})
    (prompt,) = read_chat(body, Limits(), Defaults()).ask.prompts
    assert isinstance(prompt, Conversation)
    return prompt


def shown(style: Style, messages: list[Any], **fields: Any) -> str:
    pieces = render(conversation(messages, **fields), style)
    return "".join(piece.name if isinstance(piece, Special) else piece for piece in pieces)


@pytest.mark.parametrize(
    ("member", "thinking", "instant"),
    [
        ("K2", "", ""),
        ("K2-Thinking", "", ""),
        ("K2.5", "<think>", "<think></think>"),
        ("K2.6", "<think>", "<think></think>"),
        ("K2.7-Code", "<think>", "<think>"),
    ],
)
def test_every_spelling_opens_the_answer_as_the_member_learned_it(
    styles: dict[str, Style], member: str, thinking: str, instant: str
):
    style = styles[member]
    for on in ({}, {"thinking": {"type": "enabled"}}, {"enable_thinking": True}, {"reasoning_effort": "high"}, *KEEP):
        assert shown(style, HISTORY, **on).endswith(OPEN + thinking), on
    for off in OFF:
        assert shown(style, HISTORY, **off).endswith(OPEN + instant), off


@pytest.mark.parametrize(
    ("member", "past", "now"),
    [
        ("K2", False, False),
        ("K2-Thinking", False, True),
        ("K2.5", False, True),
        ("K2.6", False, True),
        ("K2.7-Code", True, True),
    ],
)
def test_past_reasoning_is_kept_where_the_member_keeps_it_or_is_asked_to(
    styles: dict[str, Style], member: str, past: bool, now: bool
):
    style = styles[member]
    prompt = shown(style, HISTORY)
    assert ("past" in prompt, "now" in prompt) == (past, now)
    for keep in KEEP:
        prompt = shown(style, HISTORY, **keep)
        assert ("past" in prompt, "now" in prompt) == (style.thoughts, style.thoughts), keep
    if member in ("K2.5", "K2.6"):
        for off in OFF:
            assert "now" not in shown(style, HISTORY, **off), off
        off_and_kept = {"chat_template_kwargs": {"thinking": False, "preserve_thinking": True}}
        assert "<think>now</think>" in shown(style, HISTORY, **off_and_kept)


@pytest.mark.parametrize("member", MEMBERS)
def test_foreign_ids_are_made_native_for_every_member(styles: dict[str, Style], member: str):
    prompt = shown(styles[member], HISTORY)
    assert "call_1" not in prompt
    assert prompt.count("functions.f:0") == 2


@pytest.mark.parametrize("member", MEMBERS)
def test_the_default_system_message_is_the_members(styles: dict[str, Style], member: str):
    expected = {"K2": "You are a helpful assistant", "K2.7-Code": None}.get(member, KIMI)
    prompt = shown(styles[member], HISTORY)
    system = f"<|im_system|>system<|im_middle|>{expected}<|im_end|>"
    assert prompt.startswith(system if expected else "<|im_user|>")


CALL = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a":1}<|tool_call_end|>'
ANSWERS = [
    f"hm</think>Yes.<|tool_calls_section_begin|>{CALL}<|tool_calls_section_end|><|im_end|>",
    f"hm<|tool_calls_section_begin|>{CALL}<|tool_calls_section_end|><|im_end|>",  # without </think>
    "<think>hm</think>Yes. 👋<|im_end|>",
]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_chunking_of_an_answer_joins_to_the_same_for_every_member(
    tiny: Tokenizer, styles: dict[str, Style], data: st.DataObject
):
    """Several tokens per delta, as with speculative decoding."""
    member = data.draw(st.sampled_from(sorted(MEMBERS)))
    fields = data.draw(st.sampled_from([{}, *OFF, *KEEP]))
    thinks = styles[member].thinks(conversation(HISTORY, **fields))
    output = data.draw(st.sampled_from(ANSWERS))
    if not thinks:
        output = output.replace("<think>", "").replace("hm</think>", "").replace("hm", "")
    tokens = tokens_of(tiny, output)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=8)))
    parts = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    events = pushed(tiny, parts, thinks)
    assert events == pushed(tiny, [tokens], thinks)
    assert thought(events) == ("hm" if thinks else "")
    assert text(events) == ("" if output.startswith(("hm<|", "<|tool")) else "Yes." + " 👋" * ("👋" in output))
    assert calls(events) == ([("functions.f:0", "f", '{"a":1}')] if CALL in output else [])
