"""What a route says of itself for the OpenAPI document: one `Operation`, written beside the reader of its body."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Schema = dict[str, Any]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Operation(NamedTuple):
    """One route, as `/openapi.json` tells of it.

    body: the msgspec struct that its reader decodes, None where it takes no body. raw: for each field of it that the
    reader takes as `msgspec.Raw`, the type or JSON schema that it is read as later. bounds: keywords that narrow a
    field further. refused: fields that are known and not served, each
    with the values that pass. answer: the schema of a 200. event: the schema of the
    data of a streamed answer's events, None where it never streams. text: the media type of an answer that is not JSON.
    unready: what a 503 has instead of an error, where it does.
    """

    method: str
    path: str
    summary: str
    answer: Schema
    body: type | None = None
    raw: Mapping[str, Any] = _NOTHING
    bounds: Mapping[str, Schema] = _NOTHING
    refused: Mapping[str, list[Any]] = _NOTHING
    event: Schema | None = None
    text: str | None = None
    unready: Schema | None = None


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


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
