"""Parses constraints on the answer: OpenAI's response_format, and vLLM's structured_outputs.

Both are JSON objects; their size and depth have been checked before.
"""

import json
import re
from collections.abc import Callable
from typing import Any, cast

import msgspec

from redline.chat.constraint import Constraint
from redline.errors import RequestError

MOST_CHOICES = 1024
_HALF_PAIR = re.compile(r"[\ud800-\udfff]")  # JSON in a string may contain one, which messages cannot encode
# Fields of structured_outputs that are no constraint by themselves.
OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")
_NEUTRAL = (*OPTIONS, "backend", "_backend", "_backend_was_auto")


def of_response_format(value: dict[str, Any]) -> Constraint | None:
    """Parse response_format; None: no constraint. Raises RequestError, naming the place."""
    param = "response_format"
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_schema", "json_schema": {"schema": dict() | bool()}}:
            text = json.dumps(value["json_schema"]["schema"])
            return Constraint(kind="json_schema", text=text, param=f"{param}.json_schema.schema")
        case {"type": "json_object" | "json_schema", "schema": dict() | bool()}:
            return Constraint(kind="json_schema", text=json.dumps(value["schema"]), param=f"{param}.schema")
        case {"type": "json_object", "schema": schema} if schema is not None:
            raise RequestError("Expected a JSON schema, an object", f"{param}.schema")
        case {"type": "json_object"}:
            return Constraint(kind="json_schema", text='{"type": "object"}', param=param)
        case {"type": "json_schema"}:
            raise RequestError(
                "response_format of type json_schema needs a schema, an object", f"{param}.json_schema.schema"
            )
        case {"type": str() as kind}:
            raise RequestError(f"response_format of type {kind} is not supported", f"{param}.type")
        case _:
            raise RequestError("response_format needs a type: text, json_object or json_schema", f"{param}.type")


def of_structured_outputs(value: dict[str, Any]) -> Constraint | None:
    """Parse structured_outputs; None if it is empty. Raises RequestError, naming the place."""
    for option in OPTIONS:
        if not isinstance(value.get(option), bool | None):
            raise RequestError("Expected true or false", f"structured_outputs.{option}")
    if value.get("whitespace_pattern") is not None:
        raise RequestError(
            "whitespace_pattern is not supported, since the server limits white space in JSON: use "
            "disable_any_whitespace for none",
            "structured_outputs.whitespace_pattern",
        )
    asked = {key: one for key, one in value.items() if one not in (None, False) and key not in _NEUTRAL}
    if not asked:
        return None
    if len(asked) > 1:
        raise RequestError(f"give only one of: {', '.join(sorted(asked))[:200]}", "structured_outputs")
    [(kind, one)] = asked.items()
    param = f"structured_outputs.{kind[:64]}"
    if (read := _READ.get(kind)) is None:
        raise RequestError(f"{kind[:64]} is not supported", param)
    constraint = read(one, param)
    return msgspec.structs.replace(
        constraint,
        white_space=not value.get("disable_any_whitespace"),
        closed=bool(value.get("disable_additional_properties")),
    )


def _json(value: Any, param: str) -> Constraint:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the schema is not valid JSON: {error}", param) from None
    if not isinstance(value, dict):
        raise RequestError("Expected a JSON schema, an object", param)
    text = json.dumps(value)
    if _HALF_PAIR.search(json.dumps(value, ensure_ascii=False)):
        raise RequestError("a string in the schema has half of a surrogate pair, which is not a character", param)
    return Constraint(kind="json_schema", text=text, param=param)


def _json_object(value: Any, param: str) -> Constraint:
    return Constraint(kind="json_schema", text='{"type": "object"}', param=param)


def _regex(value: Any, param: str) -> Constraint:
    return Constraint(kind="regex", text=_text(value, param), param=param)


def _choice(value: Any, param: str) -> Constraint:
    if not isinstance(value, list):
        raise RequestError("Expected a list of strings, none of them empty", param)
    choices = cast("list[Any]", value)
    if not all(isinstance(choice, str) and choice for choice in choices) or not choices:
        raise RequestError("Expected a list of strings, none of them empty", param)
    if len(choices) > MOST_CHOICES:
        raise RequestError(f"at most {MOST_CHOICES} choices", param)
    return Constraint(kind="choice", text=json.dumps(choices), param=param)


def _grammar(value: Any, param: str) -> Constraint:
    return Constraint(kind="grammar", text=_text(value, param), param=param)


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError("Expected a string that is not empty", param)
    return value


_READ: dict[str, Callable[[Any, str], Constraint]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
