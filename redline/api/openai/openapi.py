"""OpenAPI descriptions of OpenAI's chat and completions routes and of vLLM's token routes.

Bodies are the structs that `requests.py` decodes; those of responses are in
`protocol.py`; this file has the fields that are decoded from `Raw`.
"""

from typing import Any

from redline.api.ask import MOST_BIASES
from redline.api.config import Defaults, Limits
from redline.api.handlers import Handlers
from redline.api.openai import constraints, protocol
from redline.api.openai import requests as openai
from redline.api.openapi.operation import (
    ANY_OBJECT,
    TEXT,
    YES,
    Operation,
    Schema,
    always,
    listed,
    nullable,
)
from redline.api.sampling import default_schemas
from redline.messages.sampling_option import Api

_ARGUMENTS: Schema = {"anyOf": [TEXT, ANY_OBJECT], "default": ""}
_PARAMETERS: Schema = {"type": ["object", "null"], "default": None, "description": "A JSON schema."}
_LOGIT_BIAS: Schema = {
    "type": ["object", "null"],
    "maxProperties": MOST_BIASES,
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
_NAMED: Schema = {
    "type": "object",
    "properties": {
        "type": always("function"),
        "function": {"type": "object", "properties": {"name": TEXT}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_ALLOWED: Schema = {
    "type": "object",
    "properties": {
        "type": always("allowed_tools"),
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": _NAMED, "minItems": 1},
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
_CHOICE_OF_TOOL: Schema = {
    "anyOf": [{"enum": ["auto", "none", "required", None]}, _NAMED, _ALLOWED],
    "default": "auto",
}
_FORMATTED: Schema = {
    "type": "object",
    "properties": {
        "type": always("json_schema"),
        "json_schema": {
            "type": "object",
            "properties": {"schema": {"type": ["object", "boolean"]}},
            "required": ["schema"],
        },
    },
    "required": ["type", "json_schema"],
}
_SCHEMA: Schema = {"type": ["object", "boolean"], "description": "A JSON schema."}
_FLAT: Schema = {
    "type": "object",
    "properties": {"type": always("json_schema"), "schema": _SCHEMA},
    "required": ["type", "schema"],
}
_RESPONSE_FORMAT: Schema = {
    "anyOf": [
        {"type": "object", "properties": {"type": always("text")}, "required": ["type"]},
        {
            "type": "object",
            "properties": {"type": always("json_object"), "schema": nullable(_SCHEMA)},
            "required": ["type"],
        },
        _FORMATTED,
        _FLAT,
        {"type": "null"},
    ]
}
_STRUCTURED: Schema = {
    "type": ["object", "null"],
    "properties": {
        "json": {"type": ["object", "string"], "description": "A JSON schema."},
        "json_object": YES,
        "regex": {"type": "string", "minLength": 1},
        "choice": {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "minItems": 1,
            "maxItems": constraints.MOST_CHOICES,
        },
        "grammar": {"type": "string", "minLength": 1, "description": "In Lark syntax."},
        **dict.fromkeys(constraints.OPTIONS, YES),
        "whitespace_pattern": {"type": "null"},
    },
    "description": "One constraint, and options: with disable_any_whitespace JSON has no white space.",
}
_CALLS: dict[str, Any] = {
    "_Function.arguments": _ARGUMENTS,
    "_Declared.parameters": _PARAMETERS,
    "tool_choice": _CHOICE_OF_TOOL,
}
_FRAMING = "each a line `data: JSON`, the last one `data: [DONE]`; after 9 s without data a comment, `: keepalive`"
_NOTES = (
    "stream_options needs stream to be true.",
    "min_tokens is at most max_tokens.",
    "best_of may only equal n.",
    f"All stop strings have at most {openai.MOST_STOP_CHARS} characters in total.",
    "Either response_format or structured_outputs; with one of them, neither min_tokens nor ignore_eos.",
)
HELLO = [{"role": "user", "content": "Hello!"}]


def operations(limits: Limits, defaults: Defaults) -> tuple[Operation, ...]:
    """A record for each route, with the configured limits and defaults of this server."""
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 1 << 31}}
    prompts = {"minItems": 1, "maxItems": limits.prompts}
    common: dict[str, Any] = {
        "stop": openai.StopText | openai.StopTexts | None,
        "stop_token_ids": openai.StopIds | None,
        "logit_bias": _LOGIT_BIAS,
        "response_format": _RESPONSE_FORMAT,
        "structured_outputs": _STRUCTURED,
    }
    sampling: dict[str, Schema] = {
        "n": {"default": 1},
        **default_schemas(Api.OPENAI, defaults),
    }
    asked = min((one for one in (limits.default_max_tokens, limits.most_max_tokens) if one is not None), default=None)
    silent = {} if asked is None else {"default": asked}
    conversation: dict[str, Schema] = {
        "messages": {"maxItems": limits.messages},
        "tools": {"maxItems": limits.tools},
    }
    return (
        Operation(
            "POST",
            "/v1/chat/completions",
            "Answers",
            "OpenAI's chat: answer a conversation",
            protocol.ChatCompletion,
            notes=(
                *_NOTES,
                "top_logprobs needs logprobs to be true.",
                "max_completion_tokens is the newer name of max_tokens; if both are given, it takes precedence.",
                "add_generation_prompt is false only together with continue_final_message.",
            ),
            body=openai.ChatBody,
            example={"messages": HELLO, "max_completion_tokens": 16},
            raw=openai.whole(openai.ChatBody) | common | _CALLS,
            bounds=sampling
            | conversation
            | {"max_completion_tokens": silent, "max_tokens": {"minimum": 1}, "echo": {"enum": [None, False]}},
            refused=openai.REFUSED,
            event=protocol.ChatCompletionChunk,
            framing=_FRAMING,
        ),
        Operation(
            "POST",
            "/v1/completions",
            "Answers",
            "OpenAI's completions: continue a text",
            protocol.TextCompletion,
            notes=(*_NOTES, "max_tokens is 0 only together with echo."),
            body=openai.CompletionBody,
            example={"prompt": "Once upon a time", "max_tokens": 16},
            raw={
                **openai.whole(openai.CompletionBody),
                **common,
                "prompt": {
                    "anyOf": [TEXT, {**listed(TEXT), **prompts}, {**ids, "minItems": 1}, {**listed(ids), **prompts}]
                },
            },
            bounds=sampling | {"max_tokens": silent},
            refused=openai.REFUSED,
            event=protocol.TextCompletionChunk,
            framing=_FRAMING,
        ),
        Operation(
            "POST",
            "/tokenize",
            "Tokens",
            "The token ids of a text or a conversation",
            protocol.TokenizeResponse,
            Handlers.tokenize,
            notes=("Either prompt or messages.",),
            body=openai.TokenizeBody,
            example={"messages": HELLO},
            raw=_CALLS,
            bounds=conversation,
            refused=openai.REFUSED_IN_PROMPT,
        ),
        Operation(
            "POST",
            "/detokenize",
            "Tokens",
            "The text of token ids",
            protocol.DetokenizeResponse,
            Handlers.detokenize,
            body=openai.DetokenizeBody,
            example={"tokens": [72, 105]},
            raw={"tokens": ids},
        ),
    )
