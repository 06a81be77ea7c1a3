"""OpenAPI descriptions of the routes of OpenAI's Responses API.

The body is the struct that `requests.py` decodes; those of responses are in
`protocol.py`; this file has the fields that are decoded from `Raw`.
"""

from typing import Any

from redline.api.config import Defaults, Limits
from redline.api.handlers import Handlers
from redline.api.openapi.operation import (
    Operation,
    Schema,
    always,
)
from redline.api.responses import protocol
from redline.api.responses import requests as responses
from redline.api.responses.events import KeptResponses
from redline.api.sampling import default_schemas
from redline.messages.sampling_option import Api

_FORMAT: Schema = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
        {
            "type": "object",
            "properties": {"type": always("json_schema"), "schema": {"type": "object"}},
            "required": ["type", "schema"],
        },
        {"type": "null"},
    ]
}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 256}
_NAMED: Schema = {
    "type": "object",
    "properties": {"type": {"enum": ["function", "namespace"]}, "name": _NAME, "namespace": _NAME},
    "required": ["type", "name"],
}
_ALLOWED: Schema = {
    "type": "object",
    "properties": {
        "type": always("allowed_tools"),
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "items": _NAMED, "minItems": 1},
    },
    "required": ["type", "mode", "tools"],
}
_UNKNOWN = "No response of that id is stored for this key"


def operations(limits: Limits, defaults: Defaults, stored: bool) -> tuple[Operation, ...]:
    """A record for each route. stored: whether the server stores responses."""
    parameters: Schema = {"type": ["object", "null"], "description": "A JSON schema."}
    parts = "a list of parts, each with its `type` and `text`"
    raw: dict[str, Any] = {
        "tools": responses.ToolList | None,
        "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required", None]}, _NAMED, _ALLOWED], "default": "auto"},
        "_Tool.parameters": parameters,
        "_Function.parameters": parameters,
        "_Input.content": {"description": f"In a message or reasoning: a string, or {parts}."},
        "_Input.summary": {"description": f"In reasoning: {parts}."},
        "_Input.arguments": {"description": "In a function_call: JSON as a string."},
        "_Input.output": {"description": f"In a function_call_output: a string, or {parts}."},
        "_Text.format": _FORMAT,
    }
    kept = "store defaults to true: responses are stored, and previous_response_id continues one."
    forgotten = "This server does not store responses: they have `store: false`, and previous_response_id is rejected."
    prompt: dict[str, Schema] = {
        "tools": {"maxItems": limits.tools},
        "truncation": {"enum": [None, "disabled"]},
        **({} if stored else {"previous_response_id": {"enum": [None]}}),
    }
    refused: dict[str, list[Any]] = {"conversation": [None], "prompt": [None]}
    respond = Operation(
        "POST",
        "/v1/responses",
        "Answers",
        "OpenAI's responses: answer a conversation",
        protocol.ResponseObject,
        notes=(kept if stored else forgotten, "tool_choice required, or one that names a function, needs tools."),
        body=responses.ResponsesBody,
        example={"input": "Hello!", "max_output_tokens": 16},
        raw=raw,
        bounds={
            **prompt,
            "background": {"enum": [None, False]},
            "top_logprobs": {"enum": [None, 0]},
            "include": {"items": {"not": always("message.output_text.logprobs")}},
            **default_schemas(Api.RESPONSES, defaults),
        },
        refused=refused,
        event=protocol.ResponseEvent,
        framing="each a line `event: NAME` and a line `data: JSON`; the last one is response.completed, "
        "response.incomplete or response.failed",
    )
    count = Operation(
        "POST",
        "/v1/responses/input_tokens",
        "Tokens",
        "OpenAI's count of the tokens of a response's input",
        protocol.InputTokensResponse,
        Handlers.count_input_tokens,
        notes=("One of input, instructions and previous_response_id is required.",),
        body=responses.InputTokensBody,
        example={"input": "Hello!"},
        raw=raw,
        bounds=prompt,
        refused=refused,
    )
    if not stored:
        return (respond, count)
    path, group = "/v1/responses/{id}", "Kept responses"
    stored_one: dict[str, Any] = {"example": "resp_0", "missing": _UNKNOWN}
    query: dict[str, Schema] = {
        "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
        "order": {"enum": ["asc", "desc"], "default": "desc"},
        "after": {"type": "string", "description": "The id of the item before the page."},
    }
    return (
        respond,
        count,
        Operation(
            *("GET", f"{path}/input_items", group, "The input items of a response"),
            *(protocol.InputItemPage, KeptResponses.input_items),
            query=query,
            **stored_one,
        ),
        Operation("GET", path, group, "A stored response", protocol.ResponseObject, KeptResponses.read, **stored_one),
        Operation(
            "DELETE", path, group, "Delete a response", protocol.DeletedResponse, KeptResponses.delete, **stored_one
        ),
    )
