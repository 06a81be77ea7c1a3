"""OpenAPI descriptions of the routes of OpenAI's Responses API.

The body is the struct that `requests.py` decodes; this file has the fields that are decoded from `Raw`, and the
responses.
"""

from typing import Any

from redline.api.config import Defaults, Limits
from redline.api.openapi.operation import (
    ANY_OBJECT,
    COUNT,
    NUMBER,
    TEXT,
    YES,
    Operation,
    Schema,
    always,
    listed,
    nullable,
    shape,
)
from redline.api.responses import requests as responses
from redline.api.sampling import default_schemas
from redline.messages.sampling_option import Api

_USAGE = shape(
    input_tokens=COUNT,
    input_tokens_details=shape(cached_tokens=COUNT, cache_write_tokens=COUNT),
    output_tokens=COUNT,
    output_tokens_details=shape(reasoning_tokens=COUNT),
    total_tokens=COUNT,
)
_STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete"]}
_THOUGHT = shape(type=always("reasoning_text"), text=TEXT)
_SUMMARY = shape(type=always("summary_text"), text=TEXT)
_ASKED = shape(type=always("input_text"), text=TEXT)
_CALL = shape(
    optional=("namespace",),
    id=TEXT,
    type=always("function_call"),
    call_id=TEXT,
    name=TEXT,
    namespace=TEXT,
    arguments=TEXT,
    status=_STATUS,
)
_NOTHING: Schema = {"type": "array", "maxItems": 0}
_SAID = shape(type=always("output_text"), text=TEXT, annotations=_NOTHING, logprobs=_NOTHING)
_ITEM: Schema = {
    "anyOf": [
        shape(
            optional=("encrypted_content",),
            id=TEXT,
            type=always("reasoning"),
            summary=listed(_SUMMARY),
            status=_STATUS,
            content=listed(_THOUGHT),
            encrypted_content=TEXT,
        ),
        shape(id=TEXT, type=always("message"), role=always("assistant"), status=_STATUS, content=listed(_SAID)),
        _CALL,
    ]
}
_GIVEN: Schema = {
    "anyOf": [
        shape(id=TEXT, type=always("reasoning"), summary=_NOTHING, content=listed(_THOUGHT)),
        shape(id=TEXT, type=always("message"), role=TEXT, status=_STATUS, content=listed({"anyOf": [_SAID, _ASKED]})),
        _CALL,
        shape(id=TEXT, type=always("function_call_output"), call_id=TEXT, output=TEXT, status=_STATUS),
    ]
}
_RESPONSE = shape(
    id=TEXT,
    object=always("response"),
    created_at=COUNT,
    model=TEXT,
    background=always(False),
    instructions=nullable(TEXT),
    max_output_tokens=nullable(COUNT),
    metadata={"type": "object", "additionalProperties": TEXT},
    parallel_tool_calls=YES,
    previous_response_id=nullable(TEXT),
    reasoning=shape(effort=nullable(TEXT), summary=nullable(TEXT)),
    store=YES,
    temperature=NUMBER,
    top_p=NUMBER,
    text=shape(format=ANY_OBJECT),
    tool_choice={"type": ["string", "object"]},
    tools=listed(ANY_OBJECT),
    truncation=always("disabled"),
    status={"enum": ["in_progress", "completed", "incomplete", "failed"]},
    error=nullable(shape(code=TEXT, message=TEXT)),
    incomplete_details=nullable(shape(reason=always("max_output_tokens"))),
    output=listed(_ITEM),
    usage=nullable(_USAGE),
)


def _event(name: str, /, **members: Schema) -> Schema:
    return shape(optional=(), type=always(f"response.{name}"), sequence_number=COUNT, **members)


def _of_item(name: str, /, **members: Schema) -> Schema:
    return _event(name, output_index=COUNT, item_id=TEXT, **members)


def _of_part(name: str, /, **members: Schema) -> Schema:
    return _of_item(name, content_index=COUNT, **members)


def _of_summary(name: str, /, **members: Schema) -> Schema:
    return _of_item(f"reasoning_summary_{name}", summary_index=COUNT, **members)


_PART: Schema = {"anyOf": [_THOUGHT, _SAID]}
_EVENT: Schema = {
    "anyOf": [
        shape(type=always("keepalive"), sequence_number=COUNT),
        *(_event(name, response=_RESPONSE) for name in ("created", "in_progress", "completed", "incomplete", "failed")),
        *(_event(f"output_item.{name}", output_index=COUNT, item=_ITEM) for name in ("added", "done")),
        *(_of_part(f"content_part.{name}", part=_PART) for name in ("added", "done")),
        *(_of_summary(f"part.{name}", part=_SUMMARY) for name in ("added", "done")),
        _of_summary("text.delta", delta=TEXT),
        _of_summary("text.done", text=TEXT),
        _of_part("reasoning_text.delta", delta=TEXT),
        _of_part("reasoning_text.done", text=TEXT),
        _of_part("output_text.delta", delta=TEXT, logprobs=_NOTHING),
        _of_part("output_text.done", text=TEXT, logprobs=_NOTHING),
        _of_item("function_call_arguments.delta", delta=TEXT),
        _of_item("function_call_arguments.done", name=TEXT, arguments=TEXT),
    ]
}
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
        _RESPONSE,
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
        event=_EVENT,
        framing="each a line `event: NAME` and a line `data: JSON`; the last one is response.completed, "
        "response.incomplete or response.failed",
    )
    count = Operation(
        "POST",
        "/v1/responses/input_tokens",
        "Tokens",
        "OpenAI's count of the tokens of a response's input",
        shape(object=always("response.input_tokens"), input_tokens=COUNT),
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
    gone = shape(id=TEXT, object=always("response"), deleted=always(True))
    page = shape(
        object=always("list"),
        data=listed(_GIVEN),
        first_id=nullable(TEXT),
        last_id=nullable(TEXT),
        has_more=YES,
    )
    query: dict[str, Schema] = {
        "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
        "order": {"enum": ["asc", "desc"], "default": "desc"},
        "after": {"type": "string", "description": "The id of the item before the page."},
    }
    return (
        respond,
        count,
        Operation(
            *("GET", f"{path}/input_items", group, "The input items of a response", page),
            example="resp_0",
            missing=_UNKNOWN,
            query=query,
        ),
        Operation("GET", path, group, "A stored response", _RESPONSE, example="resp_0", missing=_UNKNOWN),
        Operation("DELETE", path, group, "Delete a response", gone, example="resp_0", missing=_UNKNOWN),
    )
