"""The OpenAPI 3.1 document of the routes, made from what their readers decode, and a page that people can read.

Types, bounds and required fields come from the structs by which msgspec checks bodies, so that the document cannot say
other than the server does. What a struct cannot say (fields that are read raw, answers) stands in each `Operation`.
"""

from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from typing import Any, cast

import msgspec

from redline.api.operation import TEXT, Operation, Schema, nullable, shape

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}

_REF = "#/components/schemas/{name}"
_ERROR = shape(error=shape(message=TEXT, type=TEXT, param=nullable(TEXT), code=nullable(TEXT)))
_BODY_ERRORS = {
    "400": "The body is wrong: `param` names the field",
    "404": "The model is not served",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "415": "The body is not declared as application/json",
}
_ERRORS = {
    "401": "No key, or a wrong one, where the server has keys",
    "403": "The request may come from a web page of somebody else",
    "431": "The headers are too large",
    "500": "The server met an error with this request",
    "503": "The server is loading, overloaded, or has lost its worker; Retry-After says when to come again",
}


def openapi(operations: Sequence[Operation], open_paths: set[str], keys: bool) -> Schema:
    """The document. open_paths: those that need no key. keys: whether the others need one."""
    shapes: list[Any] = [operation.body for operation in operations if operation.body is not None]
    shapes += [kind for operation in operations for kind in operation.raw.values() if not isinstance(kind, dict)]
    _, schemas = msgspec.json.schema_components(shapes, ref_template=_REF)
    schemas["Error"] = _ERROR
    for operation in operations:
        if operation.body is not None:
            _complete(schemas, operation)
    for schema in schemas.values():
        schema.pop("description", None)  # a struct's docstring is for who reads the code
    paths: dict[str, Schema] = {}
    for operation in operations:
        told = _operation(operation)
        if keys and operation.path not in open_paths:
            told["security"] = [{"key": []}]
        paths.setdefault(operation.path, {})[operation.method.lower()] = told
    document: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "Redline", "version": version("redline"), "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    document["components"]["schemas"] = {name.removeprefix("_"): schema for name, schema in schemas.items()}
    private, public = _REF.format(name="_").encode(), _REF.format(name="").encode()
    return msgspec.json.decode(msgspec.json.encode(document).replace(private, public))


def _complete(schemas: dict[str, Schema], operation: Operation) -> None:
    """Say of the body's fields what its struct leaves open."""
    assert operation.body is not None
    body = operation.body.__name__
    for field, passing in operation.refused.items():
        told = "Not served: only what changes nothing passes."
        schemas[body]["properties"][field] = {"description": told, "enum": passing}
    for place, kind in operation.raw.items():
        struct, _, field = place.rpartition(".")
        properties: dict[str, Schema] = schemas[struct or body]["properties"]
        if isinstance(kind, dict):
            properties[field] = cast("Schema", kind)
        else:
            (properties[field],), _ = msgspec.json.schema_components([kind], ref_template=_REF)
    for field, keywords in operation.bounds.items():
        schemas[body]["properties"][field] |= keywords


def _operation(operation: Operation) -> Schema:
    content: Schema = {operation.text or "application/json": {"schema": operation.answer}}
    said = "The answer"
    if operation.event is not None:
        said = "The answer; with `stream` true, server-sent events, each a line `data: JSON`, at last `data: [DONE]`"
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": "Events; the schema of each one's JSON is x-event"},
            "x-event": {"anyOf": [operation.event, _ref("Error")]},
        }
    responses: Schema = {"200": {"description": said, "content": content}}
    for status, why in (_ERRORS if operation.body is None else _BODY_ERRORS | _ERRORS).items():
        schema = operation.unready if status == "503" and operation.unready is not None else _ref("Error")
        responses[status] = {"description": why, "content": {"application/json": {"schema": schema}}}
    told: Schema = {"summary": operation.summary, "responses": dict(sorted(responses.items()))}
    if operation.body is not None:
        body = {"application/json": {"schema": _ref(operation.body.__name__)}}
        told["requestBody"] = {"required": True, "content": body}
    return told


def _ref(name: str) -> Schema:
    return {"$ref": _REF.format(name=name)}


def page(document: Schema) -> str:
    """The document as one page of HTML that loads nothing."""
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Redline API</title><style>'
        "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "td,th{text-align:left;vertical-align:top;padding:.2em 1em .2em 0}code{white-space:pre-wrap}</style>"
        f"<h1>Redline {escape(document['info']['version'])}</h1>"
        '<p>The same for programs: <a href="/openapi.json">/openapi.json</a></p>'
    ]
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            parts.append(f"<h2>{escape(method.upper())} {escape(path)}</h2><p>{escape(told['summary'])}</p>")
            if "requestBody" in told:
                name = told["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                parts.append(f'<p>Body: <a href="#{escape(name)}">{escape(name)}</a></p>')
            rows = ((status, answer["description"]) for status, answer in told["responses"].items())
            parts.append(_table(("Status", "Meaning"), rows))
    for name, schema in document["components"]["schemas"].items():
        required = schema.get("required", ())
        rows = (
            (f"{field} (required)" if field in required else field, msgspec.json.encode(said).decode())
            for field, said in schema.get("properties", {}).items()
        )
        parts.append(f'<h2 id="{escape(name)}">{escape(name)}</h2>{_table(("Field", "Schema"), rows)}')
    return "".join(parts)


def _table(head: tuple[str, str], rows: Any) -> str:
    body = "".join(f"<tr><td>{escape(left)}<td><code>{escape(right)}</code>" for left, right in rows)
    return f"<table><tr><th>{head[0]}<th>{head[1]}{body}</table>"
