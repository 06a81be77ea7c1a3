"""Builds the OpenAPI 3.1 document of the routes from the structs that their parsers decode and that their responses
encode.

Types, limits and required fields come from the structs by which msgspec validates and writes bodies, so that the
document always matches the server. What a struct cannot express (fields decoded from `Raw`) is in each `Operation`.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec

from redline import __version__
from redline.api.body import REF, ResponseBody
from redline.api.openapi.operation import Operation, Schema

_BODY_ERRORS = {
    "404": "The model is not served, or an object that the body refers to does not exist",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "504": "The answer was not complete before the deadline",
}
_POST_ERRORS = {
    "415": "The body is not declared as application/json, or its compression is not gzip",
    "503": "The server is loading, overloaded, draining or its worker is down; see Retry-After",
}
_ERRORS = {
    "400": "The request is invalid; the error names the field of the body that is wrong, if any",
    "403": "The request may come from a foreign web page",
    "408": "The headers did not arrive in time",
    "431": "The headers are too large",
    "500": "Internal server error while processing this request",
}
_KEY_ERRORS = {"401": "No API key, or an unknown one"}
_QUOTA_ERRORS = {"429": "The key has reached a rate limit; see Retry-After"}
_TIMEOUT: Schema = {
    "name": "X-Request-Timeout",
    "in": "header",
    "description": "Deadline in seconds for the complete answer; after it: 504.",
    "schema": {"type": "number", "minimum": 0.001, "maximum": 86400},
}


def openapi(operations: Sequence[Operation], open_paths: set[str], keys: bool) -> Schema:
    """The document. open_paths: paths without a key. keys: whether the other paths need one."""
    schemas: dict[str, Schema] = {}
    for module in dict.fromkeys(operation.body.__module__ for operation in operations if operation.body is not None):
        schemas |= _bodies(module, operations)
    written = _Written(operations)
    schemas |= written.schemas
    paths: dict[str, Schema] = {}
    for operation in operations:
        told = _operation(operation, written, keys=keys and operation.url not in open_paths)
        paths.setdefault(operation.url, {})[operation.method.lower()] = told
    document: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "Redline",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": group} for group in dict.fromkeys(operation.group for operation in operations)],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
            "schemas": schemas,
        },
    }
    return document


class _Written:
    """The schemas of responses."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        kinds: list[Any] = []
        for operation in operations:
            kinds += [operation.answers, operation.event, operation.unready, operation.errors.body]
        kinds = list(dict.fromkeys(kinds))
        told, self.schemas = msgspec.json.schema_components(kinds, ref_template=REF + "{name}")
        self._told = dict(zip(kinds, told, strict=True))
        named = {kind.__name__: kind for kind in _below(ResponseBody)}
        while some := _references(self.schemas) - self.schemas.keys():  # `OneOf` hides types from msgspec
            more = [named[name] for name in sorted(some)]
            self.schemas |= msgspec.json.schema_components(more, ref_template=REF + "{name}")[1]
        for schema in self.schemas.values():
            schema.pop("description", None)
            del schema["title"]
            always = [name for name, field in schema["properties"].items() if field.pop("default", field) is not field]
            schema["required"] += [name for name in always if name not in schema["required"]]

    def __getitem__(self, kind: Any) -> Schema:
        return self._told[kind]


def _below(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)


def _references(schemas: dict[str, Schema]) -> set[str]:
    return set(re.findall(f'"{REF}(\\w+)"', msgspec.json.encode(schemas).decode()))


def _bodies(module: str, operations: Sequence[Operation]) -> dict[str, Schema]:
    """The schemas of the bodies of one module, and of nested structs: `openai.Chat` for `_Chat` of
    openai/requests.py."""
    mine = [operation for operation in operations if operation.body and operation.body.__module__ == module]
    template = f"{REF}{_dialect(module)}.{{name}}"
    shapes: list[Any] = [operation.body for operation in mine]
    shapes += [kind for operation in mine for kind in operation.raw.values() if not isinstance(kind, dict)]
    _, schemas = msgspec.json.schema_components(shapes, ref_template=template)
    for operation in mine:
        _complete(schemas, operation, template)
    for schema in schemas.values():
        schema.pop("description", None)  # a struct's docstring is for developers
        del schema["title"]
    private, public = template.format(name="_").encode(), template.format(name="").encode()
    named = {f"{_dialect(module)}.{name.removeprefix('_')}": schema for name, schema in schemas.items()}
    return msgspec.json.decode(msgspec.json.encode(named).replace(private, public))


def _complete(schemas: dict[str, Schema], operation: Operation, template: str) -> None:
    """Complete the schemas of body fields that the struct leaves open."""
    assert operation.body is not None
    body = operation.body.__name__
    for field, passing in operation.refused.items():
        told = "Not supported: only values without effect are accepted."
        schemas[body]["properties"][field] = {"description": told, "enum": passing}
    for place, kind in operation.raw.items():
        struct, _, field = place.rpartition(".")
        properties: dict[str, Schema] = schemas[struct or body]["properties"]
        if isinstance(kind, dict):
            properties[field] = cast("Schema", kind)
        else:
            (properties[field],), _ = msgspec.json.schema_components([kind], ref_template=template)
    for field, keywords in operation.bounds.items():
        schemas[body]["properties"][field] |= keywords


def _operation(operation: Operation, written: _Written, keys: bool) -> Schema:
    content: Schema = {operation.text or "application/json": {"schema": written[operation.answers]}}
    said = "The answer"
    error = written[operation.errors.body]
    if operation.event is not None:
        said = f"The response; with `stream` true, server-sent events, {operation.framing}"
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": "Events; x-event is the schema of an event's JSON"},
            "x-event": {"anyOf": [written[operation.event], error]},
        }
    responses: Schema = {"200": {"description": said, "content": content}}
    for status, why in _statuses(operation, keys).items():
        schema = written[operation.unready] if status == "503" and operation.unready is not None else error
        status = str(operation.errors.busy) if status == "503" else status
        responses[status] = {"description": why, "content": {"application/json": {"schema": schema}}}
    told: Schema = {
        "operationId": f"{operation.method.lower()}{re.sub('[^a-z0-9]+', '_', operation.url.lower()).rstrip('_')}",
        "tags": [operation.group],
        "summary": operation.summary,
        "responses": dict(sorted(responses.items())),
    }
    if operation.notes:
        told["description"] = "\n".join(f"- {note}" for note in operation.notes)
    parameters: list[Schema] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "example": operation.example}
        for name in re.findall(r"{(\w+)}", operation.url)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()]
    if operation.body is not None:
        name = f"{_dialect(operation.body.__module__)}.{operation.body.__name__.removeprefix('_')}"
        body = {"schema": {"$ref": REF + name}, "example": operation.example}
        told["requestBody"] = {"required": True, "content": {"application/json": body}}
        parameters.append(_TIMEOUT)
    if parameters:
        told["parameters"] = parameters
    if keys:
        told["security"] = [{"bearer": []}, {"x-api-key": []}]
    return told


def _statuses(operation: Operation, keys: bool) -> dict[str, str]:
    """Descriptions of all statuses other than 200."""
    found = _ERRORS | (_KEY_ERRORS if keys else {})
    if operation.method == "POST":
        found |= _POST_ERRORS | (_QUOTA_ERRORS if keys else {})
    if operation.body is not None:
        found |= _BODY_ERRORS
    if operation.missing is not None:
        found["404"] = operation.missing
    if operation.unready is not None:
        found["503"] = "The model is loading or stalled, the server drains, or its worker is down"
    return found


def _dialect(module: str) -> str:
    """`openai` for `redline.api.openai.requests`, `admin` for `redline.api.admin`."""
    return module.removesuffix(".requests").rpartition(".")[2]
