"""Bodies of responses of OpenAI's Responses API, and the events of its streams."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from redline.api.body import Count, JsonObject, OneOf, ResponseBody

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]
Nothing = Annotated[list[Any], msgspec.Meta(max_length=0)]


class InputTokensDetails(ResponseBody):
    cached_tokens: Count
    cache_write_tokens: Count


class ReasoningTokensDetails(ResponseBody):
    reasoning_tokens: Count


class ResponseUsage(ResponseBody):
    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: ReasoningTokensDetails
    total_tokens: Count


class ReasoningText(ResponseBody, tag="reasoning_text"):
    text: str


class SummaryText(ResponseBody, tag="summary_text"):
    text: str


class InputText(ResponseBody, tag="input_text"):
    text: str


class OutputText(ResponseBody, tag="output_text", kw_only=True):
    text: str
    annotations: Nothing = []
    logprobs: Nothing = []


class ReasoningItem(ResponseBody, kw_only=True):
    """An input item has no status."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    summary: list[SummaryText] = []
    status: ItemStatus | UnsetType = UNSET
    content: list[ReasoningText] = []
    encrypted_content: str | UnsetType = UNSET


class MessageItem(ResponseBody, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class FunctionCallItem(ResponseBody, kw_only=True):
    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str
    status: ItemStatus


class InputMessageItem(ResponseBody, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: str
    content: list[OutputText | InputText]
    status: ItemStatus = "completed"


class FunctionOutputItem(ResponseBody, kw_only=True):
    id: str
    type: Literal["function_call_output"] = "function_call_output"
    call_id: str
    output: str
    status: ItemStatus = "completed"


OutputItem: TypeAlias = OneOf[ReasoningItem | MessageItem | FunctionCallItem]
InputItem: TypeAlias = OneOf[ReasoningItem | InputMessageItem | FunctionCallItem | FunctionOutputItem]


class InputItemPage(ResponseBody, kw_only=True):
    object: Literal["list"] = "list"
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ReasoningOptions(ResponseBody):
    effort: str | None
    summary: str | None


class TextOptions(ResponseBody):
    format: JsonObject


class ResponseFailure(ResponseBody):
    code: str
    message: str


class IncompleteDetails(ResponseBody):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(ResponseBody, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: Count
    model: str
    background: Annotated[bool, msgspec.Meta(extra_json_schema={"const": False})] = False
    instructions: str | None
    max_output_tokens: Count | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningOptions
    store: bool
    temperature: float
    top_p: float
    text: TextOptions
    tool_choice: Annotated[Any, msgspec.Meta(extra_json_schema={"type": ["string", "object"]})]
    tools: Annotated[Any, msgspec.Meta(extra_json_schema={"type": "array", "items": {"type": "object"}})]
    truncation: Literal["disabled"] = "disabled"
    status: ResponseStatus = "in_progress"
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None


class DeletedResponse(ResponseBody, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Annotated[bool, msgspec.Meta(extra_json_schema={"const": True})] = True


class InputTokensResponse(ResponseBody, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: Count


class Keepalive(ResponseBody, tag="keepalive"):
    sequence_number: Count


class _OfResponse(ResponseBody):
    sequence_number: Count
    response: ResponseObject


class ResponseCreated(_OfResponse, tag="response.created"):
    pass


class ResponseInProgress(_OfResponse, tag="response.in_progress"):
    pass


class ResponseCompleted(_OfResponse, tag="response.completed"):
    pass


class ResponseIncomplete(_OfResponse, tag="response.incomplete"):
    pass


class ResponseFailed(_OfResponse, tag="response.failed"):
    pass


class _WithItem(ResponseBody):
    sequence_number: Count
    output_index: Count
    item: OutputItem


class ItemAdded(_WithItem, tag="response.output_item.added"):
    pass


class ItemDone(_WithItem, tag="response.output_item.done"):
    pass


class _OfItem(ResponseBody):
    sequence_number: Count
    output_index: Count
    item_id: str


class _WithPart(_OfItem):
    content_index: Count
    part: ReasoningText | OutputText


class PartAdded(_WithPart, tag="response.content_part.added"):
    pass


class PartDone(_WithPart, tag="response.content_part.done"):
    pass


class _WithSummary(_OfItem):
    summary_index: Count
    part: SummaryText


class SummaryPartAdded(_WithSummary, tag="response.reasoning_summary_part.added"):
    pass


class SummaryPartDone(_WithSummary, tag="response.reasoning_summary_part.done"):
    pass


class SummaryTextDone(_OfItem, tag="response.reasoning_summary_text.done"):
    summary_index: Count
    text: str


class ReasoningTextDone(_OfItem, tag="response.reasoning_text.done"):
    content_index: Count
    text: str


class OutputTextDone(_OfItem, tag="response.output_text.done"):
    content_index: Count
    text: str
    logprobs: Nothing


class ArgumentsDone(_OfItem, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class SummaryTextDelta(ResponseBody, tag="response.reasoning_summary_text.delta", kw_only=True):
    output_index: Count
    item_id: str
    summary_index: Count = 0
    sequence_number: Count
    delta: str


class ReasoningTextDelta(ResponseBody, tag="response.reasoning_text.delta", kw_only=True):
    output_index: Count
    item_id: str
    content_index: Count = 0
    sequence_number: Count
    delta: str


class OutputTextDelta(ResponseBody, tag="response.output_text.delta", kw_only=True):
    output_index: Count
    item_id: str
    content_index: Count = 0
    logprobs: Nothing = []
    sequence_number: Count
    delta: str


class ArgumentsDelta(ResponseBody, tag="response.function_call_arguments.delta", kw_only=True):
    output_index: Count
    item_id: str
    sequence_number: Count
    delta: str


PieceEvent: TypeAlias = SummaryTextDelta | ReasoningTextDelta | OutputTextDelta | ArgumentsDelta
ResponseEvent: TypeAlias = (
    Keepalive
    | ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | SummaryPartAdded
    | SummaryPartDone
    | SummaryTextDone
    | ReasoningTextDone
    | OutputTextDone
    | ArgumentsDone
    | PieceEvent
)
