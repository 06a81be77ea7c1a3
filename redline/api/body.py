"""JSON bodies that the server sends: `ResponseBody` is the base of their types, from which `/openapi.json` has its
schemas (`redline.api.openapi.document`), and `encode` writes them."""

from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import msgspec

REF = "#/components/schemas/"
Count = Annotated[int, msgspec.Meta(ge=0)]
JsonObject = Annotated[Any, msgspec.Meta(extra_json_schema={"type": "object"})]
T = TypeVar("T")

encode = msgspec.json.Encoder().encode


class ResponseBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A JSON object that clients receive: all fields are sent, except those that are UNSET."""


if TYPE_CHECKING:
    OneOf = Annotated[T, "a union of structs"]
else:

    class OneOf:
        """`OneOf[A | B]` is A | B for bodies whose `type` is not their first field: msgspec knows unions of structs by
        a tag only, and a tag is the first field."""

        def __class_getitem__(cls, union: Any) -> Any:
            schema = {"anyOf": [{"$ref": REF + one.__name__} for one in get_args(union)]}
            return Annotated[Any, msgspec.Meta(extra_json_schema=schema)]


MARK: Any = msgspec.Raw(b"\0")  # no JSON has this byte


def around(body: msgspec.Struct) -> list[bytes]:
    """The pieces of the body's JSON text around its fields with the value MARK."""
    return encode(body).split(b"\0")
