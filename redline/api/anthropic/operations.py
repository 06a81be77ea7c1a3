"""OpenAPI descriptions of the routes of Anthropic's API.

Bodies are the structs that `requests.py` decodes; this file has the fields that are decoded from `Raw`, and the
responses.
"""

from typing import Any

from redline.api.anthropic import requests as anthropic
from redline.api.anthropic.events import KINDS, OVERLOADED
from redline.api.config import Defaults, Limits
from redline.api.openapi.operation import (
    ANY_OBJECT,
    COUNT,
    TEXT,
    ErrorShape,
    Operation,
    Schema,
    always,
    listed,
    nullable,
    shape,
)
from redline.api.sampling import default_schemas
from redline.messages.sampling_option import Api

_KIND: Schema = {"enum": sorted({"api_error", "invalid_request_error", *KINDS.values()})}
ERROR = ErrorShape(
    "anthropic.Error",
    shape(optional=("request_id",), type=always("error"), error=shape(type=_KIND, message=TEXT), request_id=TEXT),
    OVERLOADED,
)
_USAGE = shape(
    input_tokens=COUNT,
    cache_creation_input_tokens=COUNT,
    cache_read_input_tokens=COUNT,
    output_tokens=COUNT,
    output_tokens_details=shape(thinking_tokens=COUNT),
)
_BLOCK: Schema = {
    "anyOf": [
        shape(type=always("text"), text=TEXT),
        shape(type=always("thinking"), thinking=TEXT, signature=TEXT),
        shape(type=always("tool_use"), id=TEXT, name=TEXT, input=ANY_OBJECT),
    ]
}
_STOP = nullable({"enum": ["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]})
_MESSAGE = shape(
    id=TEXT,
    type=always("message"),
    role=always("assistant"),
    model=TEXT,
    content=listed(_BLOCK),
    stop_reason=_STOP,
    stop_sequence=nullable(TEXT),
    usage=_USAGE,
)
_DELTA: Schema = {
    "anyOf": [
        shape(type=always("text_delta"), text=TEXT),
        shape(type=always("thinking_delta"), thinking=TEXT),
        shape(type=always("signature_delta"), signature=TEXT),
        shape(type=always("input_json_delta"), partial_json=TEXT),
    ]
}
_EVENT: Schema = {
    "anyOf": [
        shape(type=always("message_start"), message=_MESSAGE),
        shape(type=always("ping")),
        shape(type=always("content_block_start"), index=COUNT, content_block=_BLOCK),
        shape(type=always("content_block_delta"), index=COUNT, delta=_DELTA),
        shape(type=always("content_block_stop"), index=COUNT),
        shape(
            type=always("message_delta"),
            delta=shape(stop_reason=_STOP, stop_sequence=nullable(TEXT)),
            usage=_USAGE,
        ),
        shape(type=always("message_stop")),
    ]
}
_SCHEMA: Schema = {"type": ["object", "null"], "description": "A JSON schema."}
_FORMAT: Schema = {
    "type": ["object", "null"],
    "properties": {"type": always("json_schema"), "schema": {"type": "object", "description": "A JSON schema."}},
    "required": ["type", "schema"],
}
_RAW: dict[str, Any] = {
    "_Block.input": {"type": "object", "description": "Required in a block of type tool_use."},
    "_Block.content": {"description": "In a block of type tool_result: a string, or a list of blocks."},
    "_Tool.input_schema": _SCHEMA,
    "_OutputConfig.format": _FORMAT,
    "_Edit.keep": {"description": "`all`: the thinking of all past turns is kept."},
}
_NOTES = (
    "A model name that begins with `claude` selects the served model.",
    "If the last message is the assistant's, the answer continues it, without thinking, tool calls or an output "
    "format.",
    "tool_choice of type any or tool needs tools.",
)


def operations(limits: Limits, defaults: Defaults) -> tuple[Operation, ...]:
    """A record for each route, with the configured limits and defaults of this server."""
    common: dict[str, Schema] = {"messages": {"maxItems": limits.messages}, "tools": {"maxItems": limits.tools}}
    prompt = [{"role": "user", "content": "Hello!"}]
    refused: dict[str, list[Any]] = {"mcp_servers": [None, []], "container": [None, []]}
    return (
        Operation(
            "POST",
            "/v1/messages",
            "Answers",
            "Anthropic's messages: answer a conversation",
            _MESSAGE,
            notes=_NOTES,
            body=anthropic.MessagesBody,
            example={"max_tokens": 16, "messages": prompt},
            raw=_RAW | {"output_format": {**_FORMAT, "description": "The former name of output_config.format."}},
            bounds=common | default_schemas(Api.ANTHROPIC, defaults),
            refused=refused,
            event=_EVENT,
            framing="each a line `event: NAME` and a line `data: JSON`; the last one is message_stop, or error",
            errors=ERROR,
        ),
        Operation(
            "POST",
            "/v1/messages/count_tokens",
            "Tokens",
            "Anthropic's count of the tokens of a prompt",
            shape(input_tokens=COUNT),
            notes=_NOTES,
            body=anthropic.CountBody,
            example={"messages": prompt},
            raw=_RAW,
            bounds=common,
            refused=refused,
            errors=ERROR,
        ),
    )
