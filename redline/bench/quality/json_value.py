"""Validates JSON values against a JSON Schema (draft 2020-12) with the library `jsonschema`, within limits.

A schema may contain only keywords that are checked, and that can be checked quickly: no references (nothing is fetched,
no recursion), and no keywords that validators may ignore. Ignoring a constraint would grade wrong answers as right.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jsonschema

from redline.bench.quality.run_code import CodeCandidate, run_asserts

_LIBRARY: Any = jsonschema  # parts of its types are unknown
_DRAFT_2020: Any = jsonschema.Draft202012Validator
DRAFT = "https://json-schema.org/draft/2020-12/schema"
REFUSED = (
    # references
    "$ref", "$dynamicRef", "$anchor", "$dynamicAnchor", "$id", "$vocabulary",
    # annotations that some validators ignore
    "format", "contentEncoding", "contentMediaType", "contentSchema",
    # may take exponential time in their depth, or match a pattern per name
    "unevaluatedItems", "unevaluatedProperties", "patternProperties",
)  # fmt: skip

# The draft's own metaschema, without any other keyword at any depth: its self-references are dynamic.
_SCHEMA = {
    "$schema": DRAFT,
    "$id": "urn:redline:schema",
    "$dynamicAnchor": "meta",
    "$ref": DRAFT,
    "properties": {"$schema": {"const": DRAFT}},
    "propertyNames": {"not": {"enum": REFUSED}},
    "unevaluatedProperties": False,
}
_METASCHEMA = _DRAFT_2020(_SCHEMA, format_checker=_DRAFT_2020.FORMAT_CHECKER)


def check_schema(schema: dict[str, Any] | bool) -> None:
    """Raises ValueError, in one line, for an invalid schema, or one with unsupported keywords."""
    try:
        why = _schema_error(json.dumps(schema))
    except RecursionError:
        why = "it is nested too deeply"
    if why is not None:
        raise ValueError(f"unsupported schema: {why}")


@lru_cache(1024)
def _schema_error(text: str) -> str | None:
    # An error also invalidates all enclosing parts: report the deepest one.
    found = max(_METASCHEMA.iter_errors(json.loads(text)), key=_depth, default=None)
    if found is None:
        return None
    if found.validator == "not":
        return f"{found.json_path}: {found.instance} is not allowed here"
    return f"{found.json_path}: {found.message}"


def _depth(error: Any) -> int:
    return len(error.absolute_path)


def violation(value: Any, schema: dict[str, Any] | bool) -> str | None:
    """The most relevant violation of the schema by a JSON value, as one line with its place; None: the value fits.

    Raises ValueError for a schema that `check_schema` refuses.
    """
    check_schema(schema)
    try:
        found = _LIBRARY.exceptions.best_match(_Validator(schema).iter_errors(value))
    except (RecursionError, OverflowError) as error:
        return f"the value cannot be checked ({error})"
    return None if found is None else f"{found.json_path}: {found.message[:200]}"


def argument_violation(value: Any, schema: Any) -> str | None:
    """`violation` for the arguments of a call, by the schema that a client declares for the tool.

    Such a schema may have every keyword of the draft that it names (default: 2020-12) and internal references; `format`
    is ignored. Nothing is fetched. Raises ValueError for a schema that cannot be used.
    """
    draft = _LIBRARY.validators.validator_for(schema, default=_DRAFT_2020)
    try:
        draft.check_schema(schema)
        validator = _LIBRARY.validators.extend(draft, {"pattern": _pattern})
        errors = validator(schema, registry=_LIBRARY.validators.SPECIFICATIONS).iter_errors(value)
        found = _LIBRARY.exceptions.best_match(errors)
    except Exception as error:  # the library raises many: for schemas, references, recursion, patterns
        raise ValueError(" ".join(str(error).split())[:200]) from None
    return None if found is None else f"{found.json_path}: {found.message[:200]}"


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values: 1 equals 1.0, true equals only true, and objects have no order."""
    try:
        return _DRAFT_2020({"const": b}).is_valid(a)
    except RecursionError:
        return False


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Exception]:
    """Searches in a subprocess with a timeout, since a search may take exponential time in generated text."""
    if isinstance(value, str):
        code = f"import re\nfound = re.search({pattern!r}, {value!r})"
        passed, why = run_asserts(CodeCandidate(code=code, asserts="assert found"))
        if not passed:
            ended = "" if why.startswith("an assert failed") else f" ({why})"
            yield jsonschema.ValidationError(f"{value[:80]!r} does not match {pattern!r}{ended}")


_Validator: Any = _LIBRARY.validators.extend(_DRAFT_2020, {"pattern": _pattern})
