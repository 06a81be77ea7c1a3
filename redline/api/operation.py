"""What a route says of itself for the OpenAPI document: one `Operation`, written beside the reader of its body."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Schema = dict[str, Any]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ErrorShape(NamedTuple):
    """How a dialect tells errors. name: of the schema in the document. busy: the status that others call 503."""

    name: str
    schema: Schema
    busy: int = 503


class Operation(NamedTuple):
    """One route, as `/openapi.json` tells of it.

    - `group`: the heading under which the page has it. `notes`: rules between fields, which no schema says.
    - `body`: the msgspec struct that its reader decodes, None where it takes no body. `example`: a body that is
      answered, or the parameter of a path that has one.
    - `raw`: for each field of the body that is told otherwise than its struct has it, as the reader takes it as
      `msgspec.Raw` first, the type or JSON schema that it is read as later; `Struct.field` names a nested one.
    - `bounds`: keywords that narrow a field further. `refused`: fields that are known and not served, each with the
      values that pass.
    - `answer`: the schema of a 200. `text`: its media type, if not JSON. `event`: the schema of the data of a
      streamed answer's events, None where it never streams. `framing`: what an event looks like.
    - `errors`: their shape. `unready`: what a 503 has instead, where it does. `missing`: what a 404 says, where a route
      without a body has one. `query`: the parameters behind the path, none of which has to be there.
    """

    method: str
    path: str
    group: str
    summary: str
    answer: Schema
    notes: tuple[str, ...] = ()
    body: type | None = None
    example: Any = None
    raw: Mapping[str, Any] = _NOTHING
    bounds: Mapping[str, Schema] = _NOTHING
    refused: Mapping[str, list[Any]] = _NOTHING
    text: str | None = None
    event: Schema | None = None
    framing: str = ""
    errors: ErrorShape | None = None
    unready: Schema | None = None
    missing: str | None = None
    query: Mapping[str, Schema] = _NOTHING


def shape(*, optional: tuple[str, ...] = (), **members: Schema) -> Schema:
    """The schema of an object with exactly these members, of which the `optional` ones may be absent."""
    return {
        "type": "object",
        "properties": members,
        "required": [name for name in members if name not in optional],
        "additionalProperties": False,
    }


def listed(items: Schema) -> Schema:
    """The schema of an array of `items`."""
    return {"type": "array", "items": items}


def nullable(schema: Schema) -> Schema:
    """The schema of what fits `schema` or is null."""
    return {"anyOf": [schema, {"type": "null"}]}


def always(value: Any) -> Schema:
    """The schema of what is this value and no other."""
    return {"const": value}


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
YES: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}
OPENAI_ERROR = ErrorShape(
    "openai.Error", shape(error=shape(message=TEXT, type=TEXT, param=nullable(TEXT), code=nullable(TEXT)))
)
