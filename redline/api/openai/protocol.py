"""Bodies of responses in OpenAI's chat and completions formats with vLLM's fields, and of vLLM's token routes."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from redline.api.body import Count, ResponseBody
from redline.messages.step import Proposer

FinishReason = Literal["stop", "length", "tool_calls"]
StopReason: TypeAlias = str | int | None  # vLLM's: the stop string or token that ended the answer
Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]


class PromptTokensDetails(ResponseBody):
    cached_tokens: Count
    image_tokens: Count | UnsetType = UNSET


class CompletionTokensDetails(ResponseBody):
    """OpenAI calls draft tokens prediction tokens; rejected ones are not part of any other count."""

    reasoning_tokens: Count
    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count


class CompletionUsage(ResponseBody):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(ResponseBody):
    token: str
    logprob: float
    bytes: list[Byte]


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseBody):
    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(ResponseBody):
    """Parallel lists, an entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class PromptLogprob(ResponseBody):
    logprob: float
    rank: Count
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]  # per prompt token, by token id


class ChatFunction(ResponseBody):
    name: str
    arguments: str


class ChatToolCall(ResponseBody, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: ChatFunction


class ChatMessage(ResponseBody, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(ResponseBody, kw_only=True):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: list[Count] | UnsetType = UNSET


class ChatCompletion(ResponseBody, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: Count
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_token_ids: list[Count] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(ResponseBody, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(ResponseBody, kw_only=True):
    index: Count
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(ResponseBody, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(ResponseBody, kw_only=True):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[Count] | UnsetType = UNSET
    proposer: Proposer | UnsetType = UNSET
    elapsed_ms: float | UnsetType = UNSET


class ChatCompletionChunk(ResponseBody, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: Count
    model: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[Count] | UnsetType = UNSET
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET


class CompletionChoice(ResponseBody, kw_only=True):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[Count] | UnsetType = UNSET
    token_ids: list[Count] | UnsetType = UNSET


class TextCompletion(ResponseBody, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: Count
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage


class CompletionChunkChoice(ResponseBody, kw_only=True):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[Count] | UnsetType = UNSET
    token_ids: list[Count] | UnsetType = UNSET
    proposer: Proposer | UnsetType = UNSET
    elapsed_ms: float | UnsetType = UNSET


class TextCompletionChunk(ResponseBody, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: Count
    model: str
    choices: list[CompletionChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET


class TokenizeResponse(ResponseBody):
    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class DetokenizeResponse(ResponseBody):
    prompt: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """With all other fields of tokenizer_config.json, which `answers.tokenizer_info` writes."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    model_max_length: int
    tokenizer_class: str | UnsetType = UNSET
    chat_template: Annotated[Any, msgspec.Meta(description="In Jinja's syntax, or null.")]
