"""The description of a route for the OpenAPI document: an `Operation`, defined next to the parser of its body."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, get_type_hints

from redline.api.errors import ErrorResponse

Schema = dict[str, Any]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ErrorFormat(NamedTuple):
    """The error format of an API. busy: its status where others use 503."""

    body: Any = ErrorResponse
    busy: int = 503


class Operation(NamedTuple):
    """One route, as described by `/openapi.json`.

    - `group`: its heading on the page. `notes`: rules between fields that the schema cannot express.
    - `body`: the msgspec struct that its parser decodes, None without a body. `example`: a valid body, or a value of
      the path's parameter.
    - `raw`: for each field that is decoded as `msgspec.Raw` first, the type or JSON schema as which it is decoded
      later; `Struct.field` names a nested field.
    - `bounds`: keywords that narrow a field further. `refused`: known but unsupported fields, each with the values that
      pass.
    - `handler`: the method that serves it; None: `create_app` serves it as a dialect, or as a page. A handler without a
      body gets the request; one with a body gets the body and the scope (`redline.api.handlers`).
    - `answer`: the type of the body of a 200 response; None: the one that the handler returns. `text`: its media type,
      if not JSON. `event`: the type of the
      data of a stream's events, None if it never streams. `framing`: the format of an event.
    - `errors`: their format. `unready`: a different body of a 503. `missing`: the description of a 404 of a route
      without a body. `query`: query parameters, all optional.
    """

    method: str
    path: str
    group: str
    summary: str
    answer: Any = None
    handler: Any = None
    notes: tuple[str, ...] = ()
    body: type | None = None
    example: Any = None
    raw: Mapping[str, Any] = _NOTHING
    bounds: Mapping[str, Schema] = _NOTHING
    refused: Mapping[str, list[Any]] = _NOTHING
    text: str | None = None
    event: Any = None
    framing: str = ""
    errors: ErrorFormat = ErrorFormat()
    unready: Any = None
    missing: str | None = None
    query: Mapping[str, Schema] = _NOTHING

    @property
    def url(self) -> str:
        """The path without Starlette's converters."""
        return self.path.replace(":path}", "}")

    @property
    def answers(self) -> Any:
        """The type of the body of a 200 response."""
        return get_type_hints(self.handler)["return"] if self.answer is None else self.answer


def listed(items: Schema) -> Schema:
    """The schema of an array of `items`."""
    return {"type": "array", "items": items}


def nullable(schema: Schema) -> Schema:
    """The schema of a value that matches `schema` or is null."""
    return {"anyOf": [schema, {"type": "null"}]}


def always(value: Any) -> Schema:
    """The schema of a constant."""
    return {"const": value}


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
YES: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}
