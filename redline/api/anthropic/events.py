"""Responses of Anthropic's Messages API: whole, streamed, and errors; and their dialect.

A message is a list of blocks: thinking, text, tool calls. In a stream each block is opened, extended and closed before
the next one is opened. Call ids are generated here, `toolu_` and random, so they are unique whatever ids the model
writes; when they return in a history, `chat.template.native_ids` replaces them by Kimi's ids.
"""

import uuid
from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from redline.api.anthropic.protocol import (
    BlockDelta,
    BlockDeltaEvent,
    BlockStart,
    BlockStop,
    ContentBlock,
    CountTokensResponse,
    ErrorKind,
    InputJsonDelta,
    MessageDelta,
    MessageEvent,
    MessageResponse,
    MessagesError,
    MessagesErrorDetail,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputTokensDetails,
    PingEvent,
    SignatureDelta,
    StopDelta,
    StopKind,
    TextBlock,
    TextBlockDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from redline.api.anthropic.requests import MessagesRequest, read_messages
from redline.api.body import MARK, around, encode
from redline.api.dialect import Dialect, Reply
from redline.api.errors import WholeResponse, tell
from redline.api.gateway.generation import ChoiceDelta
from redline.api.openai.answers import ChoiceOutput
from redline.api.responses.sealed import seal, sign
from redline.chat.events import CallArguments, CallBegin, End, Logprobs, Text, Thought
from redline.errors import PromptTooLong

OVERLOADED = 529  # instead of 503
KINDS: dict[int, ErrorKind] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def messages_error(error: Exception, request_id: str) -> WholeResponse:
    """The status and body for an exception, in Anthropic's format."""
    told = tell(error)
    if isinstance(error, PromptTooLong):
        told = told._replace(message=error.in_messages, param=None)
    status = OVERLOADED if told.status == 503 else told.status
    return WholeResponse(status, _error_body(status, told.message, request_id), told.headers)


def _error_body(status: int, message: str, request_id: str) -> bytes:
    kind = KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return encode(MessagesError(MessagesErrorDetail(kind, message), request_id or UNSET))


def count_answer(tokens: int) -> bytes:
    """The body of a response to /v1/messages/count_tokens."""
    return encode(CountTokensResponse(tokens))


def _event(event: MessageEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), encode(event))


def _call_id() -> str:
    return f"toolu_{uuid.uuid4().hex[:24]}"


class MessageStream:
    """The stream of one message."""

    def __init__(self, reply: Reply[MessagesRequest]) -> None:
        self._reply = reply
        self._index = -1  # index of the latest block
        self._kind = ""  # of the open block; empty: none is open
        self._thoughts: list[str] = []  # of the open block
        self._calls = 0
        self._around: list[bytes] = []  # an event with a text delta of the open block, before and after the text

    def open(self) -> bytes:
        """message_start, with the number of prompt tokens, and a ping."""
        prompt = len(self._reply.generation.prompts[0])
        message = _message(self._reply, [], None, None, _usage(prompt, 0, 0, 0))
        return _event(MessageStart(message)) + self.keepalive()

    def keepalive(self) -> bytes:
        """A ping."""
        return _event(PingEvent())

    def write(self, batches: Sequence[ChoiceDelta]) -> bytes:
        """The events of these batches; the last of them ends the message."""
        pieces: list[bytes] = []
        for batch in batches:
            for event in batch.events:
                match event:
                    case Text(text=text):
                        if self._kind != "text":
                            self._begin(pieces, "text", TextBlock(""))
                            head, tail = around(BlockDeltaEvent(self._index, TextBlockDelta(MARK)))
                            self._around = [b"event: content_block_delta\ndata: " + head, tail + b"\n\n"]
                        pieces.append(encode(text).join(self._around))
                    case Thought(text=text):
                        if self._kind != "thinking":
                            self._begin(pieces, "thinking", ThinkingBlock("", ""))
                        self._thoughts.append(text)
                        if not self._reply.asked.omits:
                            pieces.append(self._delta(ThinkingDelta(text)))
                    case CallBegin(name=name):
                        self._calls += 1
                        self._begin(pieces, "tool_use", ToolUseBlock(_call_id(), name, {}))
                    case CallArguments(text=text):
                        pieces.append(self._delta(InputJsonDelta(text)))
                    case Logprobs():
                        pass  # not available in this API
                    case End():
                        self._end(pieces)
                        stop, sequence = _stop_of(self._reply, event, self._calls)
                        pieces.append(_event(MessageDelta(StopDelta(stop, sequence), _usage_of(event))))
                        pieces.append(_event(MessageStop()))
        return b"".join(pieces)

    async def close(self) -> bytes:
        """Nothing: message_stop was sent at the answer's end."""
        return b""

    def fail(self, error: Exception) -> bytes:
        """The error as the last event."""
        return b"event: error\ndata: %b\n\n" % messages_error(error, "").body

    def _begin(self, pieces: list[bytes], kind: str, block: ContentBlock) -> None:
        self._end(pieces)
        self._index += 1
        self._kind = kind
        pieces.append(_event(BlockStart(self._index, block)))

    def _end(self, pieces: list[bytes]) -> None:
        if not self._kind:
            return
        if self._kind == "thinking":
            pieces.append(self._delta(SignatureDelta(_signature("".join(self._thoughts), self._reply))))
            self._thoughts.clear()
        self._kind = ""
        pieces.append(_event(BlockStop(self._index)))

    def _delta(self, delta: BlockDelta) -> bytes:
        return _event(BlockDeltaEvent(self._index, delta))


def message_answer(reply: Reply[MessagesRequest], choices: Sequence[ChoiceOutput]) -> bytes:
    """The body of a whole message. A tool call truncated by max_tokens is dropped, since its input is not a JSON
    object."""
    [choice] = choices
    end = choice.ended()
    content: list[ContentBlock] = []
    if thought := "".join(choice.thought):
        shown = "" if reply.asked.omits else thought
        content.append(ThinkingBlock(shown, _signature(thought, reply)))
    if text := "".join(choice.text):
        content.append(TextBlock(text))
    calls = 0
    for call, pieces in choice.calls:
        if (arguments := _object("".join(pieces))) is not None:
            calls += 1
            content.append(ToolUseBlock(_call_id(), call.name, arguments))
    stop, sequence = _stop_of(reply, end, calls)
    return encode(_message(reply, content, stop, sequence, _usage_of(end)))


def _object(text: str) -> msgspec.Raw | None:
    """The text as `Raw` if it is one JSON object, else None."""
    try:
        _OBJECT.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return msgspec.Raw(text.encode())


def _message(
    reply: Reply[MessagesRequest],
    content: list[ContentBlock],
    stop: StopKind | None,
    sequence: str | None,
    usage: MessageUsage,
) -> MessageResponse:
    return MessageResponse(
        id=f"msg_{uuid.uuid4().hex}",
        model=reply.asked.name or reply.model,
        content=content,
        stop_reason=stop,
        stop_sequence=sequence,
        usage=usage,
    )


def _signature(thought: str, reply: Reply[MessagesRequest]) -> str:
    return seal(thought) if reply.asked.omits else sign(thought)


def _usage_of(end: End) -> MessageUsage:
    return _usage(end.prompt_tokens, end.cached_tokens, end.completion_tokens, end.reasoning_tokens)


def _usage(prompt: int, cached: int, completion: int, thinking: int) -> MessageUsage:
    """thinking: part of `completion`."""
    return MessageUsage(
        input_tokens=prompt - cached,
        cache_creation_input_tokens=0,  # caching costs nothing extra
        cache_read_input_tokens=cached,
        output_tokens=completion,
        output_tokens_details=OutputTokensDetails(thinking),
    )


def _stop_of(reply: Reply[MessagesRequest], end: End, calls: int) -> tuple[StopKind, str | None]:
    """The fields stop_reason and stop_sequence."""
    if end.finish == "length":
        full = end.prompt_tokens + end.completion_tokens >= reply.max_model_len
        return "model_context_window_exceeded" if full else "max_tokens", None
    if isinstance(end.stop, str):
        return "stop_sequence", end.stop
    return "tool_use" if calls else "end_turn", None


MESSAGES = Dialect(read=read_messages, stream=MessageStream, answer=message_answer, error=messages_error)
