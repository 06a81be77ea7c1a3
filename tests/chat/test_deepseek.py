"""DeepSeek-V3's and -R1's prompts and vocabulary. The expected prompts are the output of R1's published template."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from redline.chat.conversation import Conversation, Message, ToolCall
from redline.chat.deepseek import DEEPSEEK_R1, DEEPSEEK_V3, DeepseekStyle
from redline.chat.known import KnownTexts
from redline.chat.template import encode, render, style_of
from redline.chat.tokenizer import Special, Tokenizer
from redline.errors import CheckpointError, RequestError
from tests.tiny_tokenizer import DEEPSEEK_VOCAB, write_tiny_deepseek_tokenizer

BEGIN, END, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
TEXTS = [
    "hello and the functions\n\n  12345 你好 🙂 é\u0301 <|im_end|>",
    "a  b   1\r\n 中文abc中文 !hello ...  \n",
    f"{USER}hello{ASSISTANT}<think>\n",
]


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str, *calls: str, reasoning: str = "") -> Message:
    return Message(
        "assistant", text, reasoning=reasoning, tool_calls=tuple(ToolCall("id", name, "{}") for name in calls)
    )


def shown(*messages: Message, style: DeepseekStyle = DEEPSEEK_R1, **how: Any) -> str:
    pieces = render(Conversation(messages, **how), style)
    return "".join(piece.name if isinstance(piece, Special) else piece for piece in pieces)


def call(name: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{{}}\n```<｜tool▁call▁end｜>"


def calls(*names: str) -> str:
    return "<｜tool▁calls▁begin｜>" + "\n".join(map(call, names)) + f"<｜tool▁calls▁end｜>{END}"


def results(*texts: str, separator: str = "\n") -> str:
    each = separator.join(f"<｜tool▁output▁begin｜>{text}<｜tool▁output▁end｜>" for text in texts)
    return f"<｜tool▁outputs▁begin｜>{each}"


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([user("hi")], f"{USER}hi{ASSISTANT}<think>\n"),
        (
            [
                Message("system", "a"),
                user("hi"),
                assistant("<think>x</think>yo", reasoning="r"),
                Message("system", "b"),
            ],
            f"a\n\nb{USER}hi{ASSISTANT}yo{END}{ASSISTANT}<think>\n",
        ),
        (
            [user("q"), assistant("", "f"), Message("tool", "1")],
            f"{USER}q{ASSISTANT}{calls('f')}{results('1')}<｜tool▁outputs▁end｜>",
        ),
        (
            [
                user("q"),
                assistant("", "f", "g"),
                Message("tool", "1"),
                Message("tool", "2"),
                assistant("done"),
                user("z"),
            ],
            f"{USER}q{ASSISTANT}{calls('f', 'g')}{results('1', '2')}<｜tool▁outputs▁end｜>done{END}{USER}z"
            f"{ASSISTANT}<think>\n",
        ),
    ],
)
def test_r1s_prompt(messages: list[Message], prompt: str):
    assert shown(*messages) == BEGIN + prompt


def test_v3_does_not_think():
    assert shown(user("hi"), style=DEEPSEEK_V3) == f"{BEGIN}{USER}hi{ASSISTANT}"
    assert not DEEPSEEK_V3.thinks(Conversation((user("hi"),)))


def test_an_answer_is_continued():
    begun = user("hi"), assistant("yo", reasoning="hm")
    assert shown(*begun, continues=True) == f"{BEGIN}{USER}hi{ASSISTANT}<think>\nhm\n</think>\n\nyo"
    assert shown(*begun, continues=True, style=DEEPSEEK_V3) == f"{BEGIN}{USER}hi{ASSISTANT}yo"
    thought = user("hi"), assistant("", reasoning="hm")
    assert shown(*thought, continues=True) == f"{BEGIN}{USER}hi{ASSISTANT}<think>\nhm"
    assert [DEEPSEEK_R1.thinks(Conversation(each, continues=True)) for each in (begun, thought)] == [False, True]


def test_an_answer_after_a_tools_result_does_not_think():
    assert not DEEPSEEK_R1.thinks(Conversation((user("q"), assistant("", "f"), Message("tool", "1"))))


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("", DEEPSEEK_V3),
        (r"'\n<｜tool▁output▁begin｜>' {{'<｜Assistant｜>'}}", DEEPSEEK_V3),
        (r"'\n<｜tool▁output▁begin｜>' {{'<｜Assistant｜><think>\n'}}", DEEPSEEK_R1),
        (r"'<｜tool▁output▁begin｜>' {{'<｜Assistant｜><think>\n'}}", DeepseekStyle(thoughts=True, separator="")),
    ],
)
def test_the_template_tells_r1_from_v3(tmp_path: Path, template: str, style: DeepseekStyle):
    write_tiny_deepseek_tokenizer(tmp_path, template)
    (tmp_path / "config.json").write_text("{}")
    assert style_of(tmp_path, "deepseek") == style


def test_the_format_of_later_models_is_refused(tmp_path: Path):
    write_tiny_deepseek_tokenizer(tmp_path, "{% if not thinking is defined %}")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"chat template of DeepSeek-V3.1 or later"):
        style_of(tmp_path, "deepseek")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_deepseek_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": DEEPSEEK_VOCAB}))
    return folder


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_library(folder: Path, text: str):
    ours, theirs = Tokenizer.open(folder), Library.from_file(str(folder / "tokenizer.json"))
    assert ours.encode_with_specials(text) == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode_bytes(ours.encode(text)).decode() == text
    assert not set(ours.encode(text)) & set(ours.specials.values()), "text never becomes a control token"
    assert ours.encode_pieces((text,), known=KnownTexts(1000)) == ours.encode(text)


def test_a_prompt_is_control_tokens_with_text_in_between(folder: Path):
    ours = Tokenizer.open(folder)
    prompt = Conversation((user("hello <think>"),))
    special = ours.special
    text = ours.encode("hello <think>")
    assert encode(prompt, ours, DEEPSEEK_V3) == [special(BEGIN), special(USER), *text, special(ASSISTANT)]


def test_ids_without_a_token_are_reserved(folder: Path):
    ours = Tokenizer.open(folder)
    assert ours.vocab_size == DEEPSEEK_VOCAB
    assert ours.name(DEEPSEEK_VOCAB - 1) == f"<|reserved_token_{DEEPSEEK_VOCAB - 1}|>"
    assert ours.stop_ids == (ours.special(END),)
    assert ours.special("<think>") not in ours.skipped
    with pytest.raises(RequestError):
        ours.token_bytes(DEEPSEEK_VOCAB)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"model": {"type": "WordPiece", "vocab": {}}}, "expected a byte-level BPE vocabulary"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}, "single bytes are missing"),
    ],
)
def test_another_vocabulary_is_refused(folder: Path, tmp_path: Path, change: dict[str, Any], refused: str):
    for name in ("tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    content = json.loads((folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(CheckpointError, match=refused):
        Tokenizer.open(tmp_path)


def test_the_end_of_an_answer_must_be_a_control_token(tmp_path: Path):
    write_tiny_deepseek_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: eos_token: .* no control token <end>"):
        Tokenizer.open(tmp_path)
