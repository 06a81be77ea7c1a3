"""Renders a conversation in a model's chat format: control tokens with text in between. Here is Kimi's; DeepSeek's is
in `chat.deepseek`.

Every message is <|im_ROLE|> name <|im_middle|> body <|im_end|>, with nothing between messages. The models of the family
differ in four facts, held by `KimiStyle`: the default system message, the format of tool declarations, whether
assistant turns contain <think> blocks, and the opening of an answer.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from redline.chat.conversation import Conversation, Message, ToolCall
from redline.chat.deepseek import ASSISTANT, DEEPSEEK_R1, DEEPSEEK_V3
from redline.chat.style import Style
from redline.chat.tokenizer import Pad, Piece, Special, Tokenizer
from redline.chat.tools import declare_json, declare_typescript
from redline.errors import CheckpointError, ContextTooLong

_KIMI = "You are Kimi, an AI assistant created by Moonshot AI."


@dataclass(frozen=True, slots=True)
class KimiStyle(Style):
    """The template differences between models of the family."""

    system: str | None  # default for a conversation that does not begin with a system message
    tools: Literal["json", "typescript"]
    thoughts: bool  # assistant turns contain <think>...</think>
    prefill: Literal[
        "none", "think", "either"
    ]  # the opening of an answer in the prompt; either: <think> or <think></think>
    keeps_thoughts: bool = False  # behave as if preserve_thinking were always set

    def thinks(self, conversation: Conversation) -> bool:
        """Whether the answer begins with reasoning, or continues it."""
        if conversation.continues and conversation.messages[-1].content:
            return False
        return self.thoughts and (conversation.thinking or self.prefill != "either")

    def pieces(self, conversation: Conversation, most: int) -> Iterator[Piece]:
        return _pieces(conversation, self, most)


K2 = KimiStyle(system="You are a helpful assistant", tools="json", thoughts=False, prefill="none")
K2_THINKING = KimiStyle(system=_KIMI, tools="json", thoughts=True, prefill="none")
K2_6 = KimiStyle(system=_KIMI, tools="typescript", thoughts=True, prefill="either")  # K2.5 too
K2_7 = KimiStyle(system=None, tools="typescript", thoughts=True, prefill="think", keeps_thoughts=True)


def style_of(folder: Path, chat: str = "kimi") -> Style:
    """The style of a checkpoint folder, from `config.json` and, if present, the chat template.

    chat: the name of the format, one of FORMATS (`ModelSpec.chat`). Templates are searched for words, never run. Raises
    CheckpointError for other models.
    """
    return FORMATS[chat](folder / "config.json", _read_json(folder / "config.json"), _template_text(folder))


def _kimi_style(path: Path, config: Mapping[str, Any], template: str) -> Style:
    """`model_type` kimi_k25 covers K2.5, K2.6 and K2.7 with equal configs: it is K2.7 only if there is a template
    without the default system message (K2.7 inserts none). Text-only kimi_k2 and deepseek_v3 are K2-Thinking if the
    template contains <think>, or, without a template, if the weights are compressed-tensors (K2-Instruct is fp8)."""
    match config.get("model_type"):
        case "kimi_k25":
            return K2_7 if template and _KIMI not in template else K2_6
        case "kimi_k2" | "deepseek_v3":
            match config.get("quantization_config"):
                case {"quant_method": "compressed-tensors"}:
                    compressed = True
                case _:
                    compressed = False
            if "<think>" in template if template else compressed:
                return K2_THINKING
            return replace(K2, system=_KIMI) if _KIMI in template else K2
        case other:
            raise CheckpointError(f"{path}: model_type is {other!r}; expected kimi_k25 or kimi_k2")


def _deepseek_style(path: Path, config: Mapping[str, Any], template: str) -> Style:
    """R1 opens an answer with <think>, V3 does not; V3.1's format is another one."""
    if "thinking is defined" in template:
        raise CheckpointError(
            f"{path.parent}: chat template of DeepSeek-V3.1 or later; supported: those of DeepSeek-V3, V3-0324 and R1"
        )
    style = DEEPSEEK_R1 if f"{ASSISTANT}<think>" in template else DEEPSEEK_V3
    separates = not template or r"\n<｜tool▁output▁begin｜>" in template
    return style if separates else replace(style, separator="")


# The chat formats by name: (config.json's path, its content, the template's text) -> style
FORMATS: Mapping[str, Callable[[Path, Mapping[str, Any], str], Style]] = {
    "kimi": _kimi_style,
    "deepseek": _deepseek_style,
}


def encode(conversation: Conversation, tokenizer: Tokenizer, style: Style = K2_6) -> list[int]:
    """The token ids of a conversation's prompt. Raises ConfigError if the tokenizer lacks a control token for it."""
    return tokenizer.encode_pieces(render(conversation, style))


def render(conversation: Conversation, style: Style = K2_6, most: int = sys.maxsize) -> list[Piece]:
    """The prompt in pieces; adjacent texts are joined, so each is encoded as a whole.

    Raises ContextTooLong as soon as the texts exceed `most` characters.
    """
    pieces: list[Piece] = []
    left = most
    for piece in style.pieces(conversation, most):
        left -= len(piece) if isinstance(piece, str) else 0
        if left < 0:
            raise ContextTooLong(f"more than {most} characters")
        if isinstance(piece, str) and pieces and isinstance(pieces[-1], str):
            pieces[-1] += piece
        elif piece:
            pieces.append(piece)
    return pieces


def _pieces(conversation: Conversation, style: KimiStyle, most: int) -> Iterator[Piece]:
    messages = native_ids(conversation.messages)
    declare = declare_json if style.tools == "json" else declare_typescript
    if declared := [tool for tool in conversation.tools if not tool.deferred]:
        yield from _turn("system", "tool_declare", declare(declared, most))
    if style.system is not None and (not messages or messages[0].role != "system"):
        yield from _turn("system", "system", style.system)

    # Reasoning is kept only after the last final answer, that is, within the current tool loop.
    keep_all = conversation.preserve_thinking or style.keeps_thoughts
    ended = messages[:-1] if conversation.continues else messages
    finals = (i for i, message in enumerate(ended) if message.role == "assistant" and not message.tool_calls)
    history = 0 if keep_all else max(finals, default=-1) + 1
    forget = style.prefill == "either" and not conversation.thinking and not keep_all
    for index, message in enumerate(messages):
        name = message.name or message.role
        match message.role:
            case "user":
                yield from _turn("user", name, *_content(message))
            case "assistant":
                reasoning = "" if index < history or forget else message.reasoning
                turn = _turn("assistant", name, *_answer(message, reasoning, style))
                if conversation.continues and index == len(messages) - 1:
                    turn = _unfinished(name, message.content, reasoning, style, thinks=style.thinks(conversation))
                yield from turn
            case "tool":
                known = ("\n", declare(message.declares, most)) if message.declares else ()
                returned = f"## Return of {message.tool_call_id}\n"
                yield from _turn("system", name, returned, *_content(message), *known)
            case _:
                yield from _turn("system", name, message.content)

    if conversation.add_generation_prompt and not conversation.continues:
        yield from (Special("<|im_assistant|>"), "assistant", Special("<|im_middle|>"))
        if style.prefill != "none":
            yield Special("<think>")
        if style.prefill == "either" and not conversation.thinking:
            yield Special("</think>")


def _turn(marker: str, name: str, *body: Piece) -> Iterator[Piece]:
    yield from (Special(f"<|im_{marker}|>"), name, Special("<|im_middle|>"), *body, Special("<|im_end|>"))


def _content(message: Message) -> Iterator[Piece]:
    """The text of a message with its images and videos in their places. K2.5's template ends the line after each; the
    chunks of a video follow each other, with their times."""
    before = 0
    for picture in message.pictures:
        yield message.content[before : picture.at]
        kind = "video" if picture.video else "image"
        yield from (picture.time, Special("<|media_begin|>"), kind, Special("<|media_content|>"))
        yield from (Pad("<|media_pad|>", picture), Special("<|media_end|>"), "\n" if picture.ends else "")
        before = picture.at
    yield message.content[before:]


def _answer(message: Message, reasoning: str, style: KimiStyle) -> Iterator[Piece]:
    if style.thoughts:
        yield from (Special("<think>"), reasoning, Special("</think>"))
    yield message.content
    if message.tool_calls:
        yield Special("<|tool_calls_section_begin|>")
        for call in message.tool_calls:
            yield from (Special("<|tool_call_begin|>"), call.id, Special("<|tool_call_argument_begin|>"))
            yield from (call.arguments, Special("<|tool_call_end|>"))
        yield Special("<|tool_calls_section_end|>")


def _unfinished(name: str, content: str, reasoning: str, style: KimiStyle, *, thinks: bool) -> Iterator[Piece]:
    """An assistant turn that the answer continues: its text, or, if it has no text yet, its reasoning."""
    yield from (Special("<|im_assistant|>"), name, Special("<|im_middle|>"))
    if style.thoughts:
        yield from (Special("<think>"), reasoning)
        if not thinks:
            yield Special("</think>")
    yield content


def native_ids(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Messages in which all tool calls have Kimi's own ids, `functions.NAME:IDX`; tool results follow their calls.

    The id is the only place in the prompt that names the function, and with foreign ids the model tends to end its turn
    at once. IDX counts the calls of the whole conversation from 0. Native ids stay as they are. A result belongs to the
    latest call with its id (clients reuse ids); a result without an id belongs to the next call without a result.
    """
    every = [call for message in messages for call in message.tool_calls]
    taken = {call.id for call in every if _is_native(call)}
    spare = len(every)  # the next index to try if IDX is taken: keeps the search linear for any input
    current: dict[str, str] = {}  # client id -> native id of the latest call
    waiting: list[tuple[str, str]] = []  # (client id, native id) of calls without a result yet
    count = 0
    result: list[Message] = []
    for message in messages:
        if message.role == "assistant" and message.tool_calls:
            calls: list[ToolCall] = []
            for call in message.tool_calls:
                native = call.id if _is_native(call) else f"functions.{call.name}:{count}"
                while native in taken and native != call.id:
                    native = f"functions.{call.name}:{spare}"
                    spare += 1
                taken.add(native)
                current[call.id] = native
                calls.append(ToolCall(id=native, name=call.name, arguments=call.arguments))
                count += 1
            waiting = [(old.id, new.id) for old, new in zip(message.tool_calls, calls, strict=True)]
            message = msgspec.structs.replace(message, tool_calls=tuple(calls))
        elif message.role == "tool":
            wanted = message.tool_call_id
            answered = next((pair for pair in waiting if pair[0] == wanted or not wanted), None)
            if answered:
                waiting.remove(answered)
            native = answered[1] if answered else current.get(wanted, wanted)
            message = msgspec.structs.replace(message, tool_call_id=native)
        result.append(message)
    return tuple(result)


def _is_native(call: ToolCall) -> bool:
    prefix = f"functions.{call.name}:"
    index = call.id.removeprefix(prefix)
    return call.id.startswith(prefix) and index.isascii() and index.isdigit()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); expected the model's config") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a JSON object ({error})") from None
    return content


def _template_text(folder: Path) -> str:
    """The text of the checkpoint's own chat template, from either of its two places; empty if there is none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    config = folder / "tokenizer_config.json"
    return str(_read_json(config).get("chat_template") or "") if config.is_file() else ""
