"""The model's own text of a call's arguments, restored if a client has serialised the same JSON differently."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.chat.conversation import Conversation, Message, ToolCall
from redline.chat.said_calls import SaidCalls

OWN = '{"path": "a.py", "n": 1.0,\n "text": "\\u00e9"}'


def conversation(*arguments: str, name: str = "write") -> Conversation:
    calls = tuple(ToolCall(id=f"functions.{name}:{n}", name=name, arguments=one) for n, one in enumerate(arguments))
    return Conversation(messages=(Message(role="user", content="x"), Message(role="assistant", tool_calls=calls)))


def restored(said: SaidCalls, *arguments: str, salt: str = "", name: str = "write") -> list[str]:
    return [call.arguments for call in said.restored(salt, conversation(*arguments, name=name)).messages[1].tool_calls]


@pytest.fixture
def said() -> SaidCalls:
    kept = SaidCalls(1 << 20)
    kept.note("", "write", OWN)
    return kept


@pytest.mark.parametrize(
    "spelled",
    ['{"path":"a.py","n":1,"text":"é"}', '{"text":"é","n":1.0,"path":"a.py"}', OWN],
    ids=["as JavaScript has it", "in another order", "as it was"],
)
def test_equal_json_is_what_the_model_wrote(said: SaidCalls, spelled: str) -> None:
    assert restored(said, spelled, "{}") == [OWN, "{}"]


@pytest.mark.parametrize("other", ['{"path":"b.py","n":1,"text":"é"}', "[]", "no JSON", "", "[" * 100_000, "1" * 5000])
def test_all_else_stays_as_it_is(said: SaidCalls, other: str) -> None:
    assert restored(said, other) == [other]


def test_long_arguments_may_differ_in_white_space() -> None:
    own = '{"path": "a.py", "text": "' + "x" * 20_000 + '"}'
    said = SaidCalls(1 << 20)
    said.note("", "write", own)
    assert restored(said, own.replace(": ", ":").replace(", ", ",")) == [own]


def test_of_one_conversation_so_many_characters_are_read(said: SaidCalls) -> None:
    long = [json.dumps({"n": n, "text": "x" * 300_000}) for n in range(5)]
    spelled = '{"path":"a.py","n":1,"text":"é"}'
    assert restored(said, *long, spelled) == [*long, spelled]
    assert restored(said, spelled) == [OWN], "texts that were not read are not remembered as spellings"


def test_another_function_and_another_tenant_have_their_own(said: SaidCalls) -> None:
    spelled = '{"path":"a.py","n":1,"text":"é"}'
    assert restored(said, spelled, name="read") == [spelled]
    assert restored(said, spelled, salt="another") == [spelled]


def test_a_spelling_means_the_same_in_each_prompt_of_a_conversation(said: SaidCalls) -> None:
    """Even if the model spells that value differently in between."""
    first = '{"a":1}'
    assert restored(said, first) == [first]
    said.note("", "write", '{"a": 1}')
    assert restored(said, first, '{"a" :1}') == [first, '{"a": 1}']


def test_what_was_used_last_is_kept() -> None:
    said = SaidCalls(3000)
    for number in range(20):
        said.note("", "write", f'{{"n": {number}}}')
    assert restored(said, '{"n":19}', '{"n":0}') == ['{"n": 19}', '{"n":0}']
    SaidCalls(0).note("", "write", OWN)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(value=JSON, indent=st.sampled_from([None, 1, 4]), ascii=st.booleans())
def test_any_value_comes_back_whatever_its_spelling(value: Any, indent: int | None, ascii: bool) -> None:
    said = SaidCalls(1 << 20)
    own = json.dumps(value, indent=indent)
    said.note("", "write", own)
    assert restored(said, json.dumps(value, ensure_ascii=ascii, separators=(",", ":"))) == [own]
