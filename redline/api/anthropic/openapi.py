"""OpenAPI descriptions of the routes of Anthropic's API.

Bodies are the structs that `requests.py` decodes; those of responses are in
`protocol.py`; this file has the fields that are decoded from `Raw`.
"""

from typing import Any

from redline.api.anthropic import protocol
from redline.api.anthropic import requests as anthropic
from redline.api.anthropic.events import OVERLOADED
from redline.api.config import Defaults, Limits
from redline.api.handlers import Handlers
from redline.api.openapi.operation import (
    ErrorFormat,
    Operation,
    Schema,
    always,
)
from redline.api.sampling import default_schemas
from redline.messages.sampling_option import Api

ERRORS = ErrorFormat(protocol.MessagesError, OVERLOADED)
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
            protocol.MessageResponse,
            notes=_NOTES,
            body=anthropic.MessagesBody,
            example={"max_tokens": 16, "messages": prompt},
            raw=_RAW | {"output_format": {**_FORMAT, "description": "The former name of output_config.format."}},
            bounds=common | default_schemas(Api.ANTHROPIC, defaults),
            refused=refused,
            event=protocol.MessageEvent,
            framing="each a line `event: NAME` and a line `data: JSON`; the last one is message_stop, or error",
            errors=ERRORS,
        ),
        Operation(
            "POST",
            "/v1/messages/count_tokens",
            "Tokens",
            "Anthropic's count of the tokens of a prompt",
            protocol.CountTokensResponse,
            Handlers.count_tokens,
            notes=_NOTES,
            body=anthropic.CountBody,
            example={"messages": prompt},
            raw=_RAW,
            bounds=common,
            refused=refused,
            errors=ERRORS,
        ),
    )
