"""Bodies of responses of Anthropic's Messages API, and the events of its streams."""

from typing import Literal, TypeAlias

from msgspec import UNSET, UnsetType

from redline.api.body import Count, JsonObject, ResponseBody

ErrorKind = Literal[
    "api_error",
    "authentication_error",
    "invalid_request_error",
    "not_found_error",
    "overloaded_error",
    "permission_error",
    "rate_limit_error",
    "request_too_large",
    "timeout_error",
]
StopKind: TypeAlias = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class MessagesErrorDetail(ResponseBody):
    type: ErrorKind
    message: str


class MessagesError(ResponseBody, tag="error"):
    error: MessagesErrorDetail
    request_id: str | UnsetType = UNSET


class OutputTokensDetails(ResponseBody):
    thinking_tokens: Count


class MessageUsage(ResponseBody):
    """`input_tokens` does not include cached ones."""

    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: OutputTokensDetails


class TextBlock(ResponseBody, tag="text"):
    text: str


class ThinkingBlock(ResponseBody, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(ResponseBody, tag="tool_use"):
    id: str
    name: str
    input: JsonObject


ContentBlock: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock


class MessageResponse(ResponseBody, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopKind | None
    stop_sequence: str | None
    usage: MessageUsage


class CountTokensResponse(ResponseBody):
    input_tokens: Count


class TextBlockDelta(ResponseBody, tag="text_delta"):
    text: str


class ThinkingDelta(ResponseBody, tag="thinking_delta"):
    thinking: str


class SignatureDelta(ResponseBody, tag="signature_delta"):
    signature: str


class InputJsonDelta(ResponseBody, tag="input_json_delta"):
    partial_json: str


BlockDelta: TypeAlias = TextBlockDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class MessageStart(ResponseBody, tag="message_start"):
    message: MessageResponse


class PingEvent(ResponseBody, tag="ping"):
    pass


class BlockStart(ResponseBody, tag="content_block_start"):
    index: Count
    content_block: ContentBlock


class BlockDeltaEvent(ResponseBody, tag="content_block_delta"):
    index: Count
    delta: BlockDelta


class BlockStop(ResponseBody, tag="content_block_stop"):
    index: Count


class StopDelta(ResponseBody):
    stop_reason: StopKind | None
    stop_sequence: str | None


class MessageDelta(ResponseBody, tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage


class MessageStop(ResponseBody, tag="message_stop"):
    pass


MessageEvent: TypeAlias = (
    MessageStart | PingEvent | BlockStart | BlockDeltaEvent | BlockStop | MessageDelta | MessageStop
)
