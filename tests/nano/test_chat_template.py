"""The chat template rendered by transformers' own Jinja: the same prompts and ids as our own template."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from redline.chat.conversation import Conversation, Message
from redline.chat.template import K2_6, encode, render, style_of
from redline.chat.tokenizer import Special, Tokenizer
from tests.nano.conversations import conversation

ROOT = Path(__file__).parents[2]
NANO = ROOT / "models" / "kimi-nano"
TEMPLATE = (ROOT / "nano" / "chat_template.jinja").read_text(encoding="utf-8")
GOLDEN: list[dict[str, Any]] = json.loads((ROOT / "tests" / "chat" / "golden.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.open(NANO)


@pytest.fixture(scope="module")
def theirs() -> Any:
    """Loaded without trust_remote_code: the folder contains no code."""
    return AutoTokenizer.from_pretrained(NANO)


def openai(message: Message) -> dict[str, Any]:
    """The message as a client sends it, without empty fields."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    fields = {"name": message.name, "reasoning_content": message.reasoning, "tool_calls": calls}
    fields |= {"tool_call_id": message.tool_call_id}
    return {"role": message.role, "content": message.content, **{key: one for key, one in fields.items() if one}}


def asked(of: Conversation) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages, and the other arguments of apply_chat_template."""
    tools = [{"type": "function", "function": msgspec.to_builtins(tool)} for tool in of.tools]
    options = {"thinking": of.thinking, "preserve_thinking": of.preserve_thinking, "tools": tools or None}
    return list(map(openai, of.messages)), {**options, "add_generation_prompt": of.add_generation_prompt}


def shown(of: Conversation) -> str:
    return "".join(piece.name if isinstance(piece, Special) else piece for piece in render(of, K2_6))


def rendered(of: Conversation, **changes: Any) -> str:
    messages, options = asked(of)
    return render_jinja_template([messages], chat_template=TEMPLATE, **{**options, **changes})[0][0]


def test_conversations_of_every_kind_are_rendered_as_here():
    for seed in range(600):
        assert rendered(conversation(seed)) == shown(conversation(seed)), seed


def test_hundreds_of_conversations_and_the_golden_ones_have_our_ids(ours: Tokenizer, theirs: Any):
    golden = [msgspec.convert(case["conversation"], Conversation) for case in GOLDEN if case["style"] == "K2.6"]
    assert len(golden) > 10
    for one in [*golden, *map(conversation, range(250))]:
        if spells_a_control_token(one) or not one.messages:  # transformers refuses an empty conversation
            continue
        messages, options = asked(one)
        ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        assert ids == encode(one, ours, K2_6), one
    for one in golden:
        assert rendered(one) == shown(one)


def spells_a_control_token(of: Conversation) -> bool:
    """Such text is encoded as text here, and as the control token there, as in Moonshot's own code."""
    return any("<|" in message.content for message in of.messages)


def test_the_committed_template_is_this_one_and_leaves_the_style_of_the_folder_what_it_was(theirs: Any):
    assert theirs.chat_template == (NANO / "chat_template.jinja").read_text(encoding="utf-8") == TEMPLATE
    assert style_of(NANO) == K2_6


ASK = Conversation(messages=(Message(role="user", content="q"),))


def test_both_spellings_of_thinking_are_read_and_what_is_left_out_thinks():
    assert rendered(ASK, thinking=None).endswith("<think>")
    assert rendered(ASK, thinking=None, enable_thinking=False).endswith("<think></think>")
    assert rendered(ASK, thinking=True, enable_thinking=False).endswith("<think>"), (
        "the template's own variable has priority"
    )


def test_messages_of_other_clients_are_read_as_our_api_reads_them():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Ås", "n": [1, None]}}}
    messages = [
        {"role": "developer", "content": parts},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "reasoning": "why", "tool_calls": [call]},
        {"role": "tool", "content": parts},
    ]
    text = render_jinja_template([messages], chat_template=TEMPLATE)[0][0]
    assert text == (
        "<|im_system|>system<|im_middle|>one two<|im_end|><|im_user|>user<|im_middle|>q<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>why</think><|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"city": "Ås", "n": [1, null]}<|tool_call_end|>'
        "<|tool_calls_section_end|><|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.f:0\none two<|im_end|>"
    )


def test_an_image_is_refused_by_name():
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(TemplateError, match="content of type image_url: text only"):
        render_jinja_template([messages], chat_template=TEMPLATE)
