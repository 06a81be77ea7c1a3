"""What the routes of OpenAI's dialect, vLLM's and ours say of themselves for `/openapi.json`: a record for each.

Bodies are the structs that `openai.py` decodes; here stand the fields that it reads raw, and what answers look like.
"""

from typing import Any

from redline.api import openai
from redline.api.config import Defaults, Limits
from redline.api.operation import COUNT, NUMBER, TEXT, Operation, Schema, listed, nullable, shape

_USAGE = shape(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=shape(cached_tokens=COUNT),
    completion_tokens_details=shape(
        reasoning_tokens=COUNT, accepted_prediction_tokens=COUNT, rejected_prediction_tokens=COUNT
    ),
)
_BYTES = listed({"type": "integer", "minimum": 0, "maximum": 255})
_CHAT_LOGPROBS = shape(
    content=listed(
        shape(
            token=TEXT,
            logprob=NUMBER,
            bytes=_BYTES,
            top_logprobs=listed(shape(token=TEXT, logprob=NUMBER, bytes=_BYTES)),
        )
    ),
    refusal={"type": "null"},
)
_COMPLETION_LOGPROBS = shape(
    tokens=listed(TEXT),
    token_logprobs=listed(nullable(NUMBER)),
    top_logprobs=listed(nullable({"type": "object", "additionalProperties": NUMBER})),
    text_offset=listed(COUNT),
)
_PROMPT_LOGPROBS = listed(
    nullable({"type": "object", "additionalProperties": shape(logprob=NUMBER, rank=COUNT, decoded_token=TEXT)})
)
_FINISH: Schema = {"enum": ["stop", "length", "tool_calls"]}
_STOPPED_BY: Schema = {"type": ["string", "integer", "null"]}
_FUNCTION = shape(name=TEXT, arguments=TEXT)
_CALL = shape(id=TEXT, type={"const": "function"}, function=_FUNCTION)
_MESSAGE = shape(
    optional=("reasoning", "reasoning_content", "tool_calls"),
    role={"const": "assistant"},
    content=nullable(TEXT),
    refusal={"type": "null"},
    reasoning=TEXT,
    reasoning_content=TEXT,
    tool_calls=listed(_CALL),
)
_DELTA = shape(
    optional=("role", "content", "reasoning", "reasoning_content", "tool_calls"),
    role={"const": "assistant"},
    content=TEXT,
    reasoning=TEXT,
    reasoning_content=TEXT,
    tool_calls=listed(
        shape(
            optional=("id", "type"),
            index=COUNT,
            id=TEXT,
            type={"const": "function"},
            function=shape(optional=("name",), name=TEXT, arguments=TEXT),
        )
    ),
)


def _envelope(kind: str, choice: Schema, usage: Schema, *optional: str) -> Schema:
    return shape(
        optional=("prompt_logprobs", *optional),
        id=TEXT,
        object={"const": kind},
        created=COUNT,
        model=TEXT,
        prompt_logprobs=_PROMPT_LOGPROBS,
        choices=listed(choice),
        usage=usage,
    )


def _choice(scored: Schema, streamed: bool, **said: Schema) -> Schema:
    """A choice that says `said`; while it streams, only its last piece has stop_reason."""
    return shape(
        optional=("stop_reason", "prompt_logprobs") if streamed else ("prompt_logprobs",),
        index=COUNT,
        **said,
        logprobs=nullable(scored),
        finish_reason=nullable(_FINISH) if streamed else _FINISH,
        stop_reason=_STOPPED_BY,
        prompt_logprobs=_PROMPT_LOGPROBS,
    )


_STATUS = shape(optional=("reason",), status=TEXT, reason=TEXT)
_CARD = shape(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT, max_model_len=nullable(COUNT))
_ARGUMENTS: Schema = {"anyOf": [TEXT, {"type": "object"}], "default": ""}
_PARAMETERS: Schema = {"type": ["object", "null"], "default": None}
_LOGIT_BIAS: Schema = {
    "type": ["object", "null"],
    "maxProperties": 300,
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
_CHOICE_OF_TOOL: Schema = {"enum": ["auto", "none", None], "default": "auto"}
_NESTED: dict[str, Any] = {"_Function.arguments": _ARGUMENTS, "_Declared.parameters": _PARAMETERS}


def operations(limits: Limits, defaults: Defaults) -> tuple[Operation, ...]:
    """A record for each route, with the bounds and defaults that this server is configured with."""
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 1 << 31}}
    prompts = {"minItems": 1, "maxItems": limits.prompts}
    common: dict[str, Any] = {
        "stop": openai.StopText | openai.StopTexts | None,
        "stop_token_ids": openai.StopIds | None,
        "logit_bias": _LOGIT_BIAS,
    }
    sampling: dict[str, Schema] = {
        "n": {"default": 1},
        **{
            field: {"default": getattr(defaults, field)}
            for field in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        },
        "presence_penalty": {"default": 0.0},
        "frequency_penalty": {"default": 0.0},
    }
    conversation: dict[str, Schema] = {
        "messages": {"maxItems": limits.messages},
        "tools": {"maxItems": limits.tools},
    }
    calls = {**_NESTED, "tool_choice": _CHOICE_OF_TOOL}
    return (
        Operation("GET", "/", "What this is, and its routes", _ROOT),
        Operation("GET", "/live", "This process answers", shape(status={"const": "live"})),
        Operation("GET", "/health", "The model answers", shape(status={"const": "ready"}), unready=_STATUS),
        Operation("GET", "/metrics", "Metrics in Prometheus's text format", TEXT, text="text/plain"),
        Operation("GET", "/version", "The server's version", shape(version=TEXT)),
        Operation("GET", "/openapi.json", "This document", {"type": "object"}),
        Operation("GET", "/docs", "This document as a page", TEXT, text="text/html"),
        Operation("GET", "/v1/models", "The served names", shape(object={"const": "list"}, data=listed(_CARD))),
        Operation(
            "POST",
            "/v1/chat/completions",
            "Answer a conversation",
            _envelope("chat.completion", _choice(_CHAT_LOGPROBS, False, message=_MESSAGE), _USAGE),
            body=openai.ChatBody,
            raw=common | calls,
            bounds=sampling | conversation,
            refused=openai.REFUSED,
            event=_envelope(
                "chat.completion.chunk", _choice(_CHAT_LOGPROBS, True, delta=_DELTA), nullable(_USAGE), "usage"
            ),
        ),
        Operation(
            "POST",
            "/v1/completions",
            "Continue a text",
            _envelope("text_completion", _choice(_COMPLETION_LOGPROBS, False, text=TEXT), _USAGE),
            body=openai.CompletionBody,
            raw={
                **common,
                "prompt": {
                    "anyOf": [TEXT, {**listed(TEXT), **prompts}, {**ids, "minItems": 1}, {**listed(ids), **prompts}]
                },
            },
            bounds=sampling,
            refused=openai.REFUSED,
            event=_envelope(
                "text_completion", _choice(_COMPLETION_LOGPROBS, True, text=TEXT), nullable(_USAGE), "usage"
            ),
        ),
        Operation(
            "POST",
            "/tokenize",
            "The token ids of a text or conversation: give either prompt or messages",
            shape(count=COUNT, max_model_len=COUNT, tokens=ids, token_strs=nullable(listed(TEXT))),
            body=openai.TokenizeBody,
            raw=calls,
            bounds=conversation,
            refused=openai.REFUSED_IN_PROMPT,
        ),
        Operation(
            "POST",
            "/detokenize",
            "The text of token ids",
            shape(prompt=TEXT),
            body=openai.DetokenizeBody,
            raw={"tokens": ids},
        ),
    )


_ROOT = shape(name={"const": "redline"}, version=TEXT, models=listed(TEXT), routes=listed(TEXT))
