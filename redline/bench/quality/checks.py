"""Decides whether an answer is right. A check is a small JSON object whose keys say how it is graded; each has to hold.

    {"number": 933}                                     the last number in the answer
    {"equals": "Paris"}                                 the whole answer, but for case and final punctuation
    {"contains": ["a", "b"]}                            all of them, in any case
    {"contains_any": ["a", "b"]}                        one of them
    {"json": {"schema": {...}, "value": ...}}           exactly one JSON value; each part is optional
    {"tool_calls": [{"name": ..., "arguments": {...}}]} these calls and no others, in any order
    {"no_tool_calls": true}                             none
    {"asserts": {"function": "f", "code": "assert ..."}} Python that must hold (run only where that is allowed)

Needs no torch, so that training machines can import it without an engine.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Annotated, Any, NamedTuple, NoReturn, TypedDict

import msgspec

from redline.bench.quality.json_value import check_schema, same, violation
from redline.bench.quality.run_code import Candidate, run_asserts
from redline.wire.base import Record


class Call(TypedDict):
    """A tool call that a model has made."""

    name: str
    arguments: str  # JSON text, as the model wrote it


class Grade(NamedTuple):
    """Whether an answer is right, and in one line why not."""

    ok: bool | None  # None: not graded, since it needs code to be run
    why: str  # empty when right


_Strings = Annotated[list[str], msgspec.Meta(min_length=1)]


class _Json(Record, frozen=True):
    schema: dict[str, Any] | bool = True
    value: Any = None


class _Wanted(Record, frozen=True):
    name: str
    arguments: dict[str, Any]


class _Asserts(Record, frozen=True):
    code: str
    function: str | None = None


class _Check(Record, frozen=True):
    """What a check may say, all of it optional."""

    number: int | float = 0
    equals: str = ""
    contains: _Strings = msgspec.field(default_factory=list[str])
    contains_any: _Strings = msgspec.field(default_factory=list[str])
    json: _Json | None = None
    tool_calls: list[_Wanted] = msgspec.field(default_factory=list[_Wanted])
    no_tool_calls: bool = True
    asserts: _Asserts | None = None


def check_check(check: dict[str, Any]) -> None:
    """Raises ValueError, in one line, for a check that is not one of the kinds in this module's list."""
    if not check:
        raise ValueError("check: expected at least one key, such as number")
    try:
        read = msgspec.convert(check, _Check)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        raise ValueError(f"check{place.rstrip('`')}: {message}") from None
    for key in ("json", "asserts"):
        if key in check and check[key] is None:
            raise ValueError(f"check.{key}: Expected `object`, got `null`")
    if not read.no_tool_calls:
        raise ValueError("check.no_tool_calls: expected true, or nothing")
    if read.json is not None:
        try:
            check_schema(read.json.schema)
        except ValueError as error:
            raise ValueError(f"check.json: {error}") from None


def grade(check: dict[str, Any], content: str, tool_calls: Sequence[Call], run_code: bool = False) -> Grade:
    """Grades an answer (visible text and tool calls) by every key of the check; the first key that fails decides.

    run_code: without it, a check with `asserts` that nothing else fails is not graded. Raises ValueError for a check
    that is not one of the kinds in this module's list.
    """
    check_check(check)
    for kind in check.keys() - {"asserts"}:
        if why := _GRADERS[kind](check[kind], content, tool_calls):
            return Grade(False, why)
    if "asserts" not in check:
        return Grade(True, "")
    if not run_code:
        return Grade(None, "needs --run-code")
    passed, why = run_asserts(candidate(check["asserts"], content))
    return Grade(passed, why)


def candidate(asserts: dict[str, Any], content: str) -> Candidate:
    """The program in an answer (its first fenced block that defines the function, or else all of it) and its test."""
    function: str | None = asserts.get("function")
    blocks: list[str] = _FENCED.findall(content)
    named = [block for block in blocks if function and re.search(rf"^\s*def {re.escape(function)}\b", block, re.M)]
    return Candidate(code=[*named, *blocks, content][0], asserts=asserts["code"], function=function)


# The sign counts only where no number or word stands before it: "12-15" ends in 15, "x = -15" in minus 15.
_NUMBER = re.compile(r"(?:(?<![\w.)])[-−])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
_FENCED = re.compile(r"^```[^\n`]*\n(.*?)^```", re.M | re.S)


def _number(expected: float, content: str, _: Sequence[Call]) -> str:
    found: list[str] = _NUMBER.findall(content)
    if not found:
        return "no number in the answer"
    last = Decimal(found[-1].replace(",", "").replace("−", "-"))
    return "" if last == Decimal(str(expected)) else f"{last} instead of {expected}"


def _plain(text: str) -> str:
    return text.strip().rstrip(".!?。！？ ").casefold()


def _equals(expected: str, content: str, _: Sequence[Call]) -> str:
    return "" if _plain(content) == _plain(expected) else f"{content.strip()[:80]!r} instead of {expected!r}"


def _contains(expected: list[str], content: str, _: Sequence[Call]) -> str:
    missing = [part for part in expected if part.casefold() not in content.casefold()]
    return f"lacks {missing[0]!r}" if missing else ""


def _contains_any(expected: list[str], content: str, _: Sequence[Call]) -> str:
    found = any(part.casefold() in content.casefold() for part in expected)
    return "" if found else f"has none of {expected}"


def _json(expected: dict[str, Any], content: str, _: Sequence[Call]) -> str:
    try:
        value = _strict_json(content)
    except (ValueError, RecursionError):
        return f"not one JSON value: {content.strip()[:80]!r}"
    if "schema" in expected and (found := violation(value, expected["schema"])):
        return found
    return (
        f"{value!r} is not the value that was asked for"
        if "value" in expected and not same(value, expected["value"])
        else ""
    )


def _tool_calls(expected: list[dict[str, Any]], _: str, calls: Sequence[Call]) -> str:
    left = list(expected)
    for call in calls:
        try:
            arguments = _strict_json(call["arguments"])
        except (ValueError, RecursionError):
            return f"the arguments of {call['name']} are not JSON: {call['arguments'][:80]!r}"
        match = next(
            (want for want in left if want["name"] == call["name"] and same(want["arguments"], arguments)), None
        )
        if match is None:
            return f"unexpected call {call['name']}({call['arguments'][:200]})"
        left.remove(match)
    return f"no call {left[0]['name']}({json.dumps(left[0]['arguments'])})" if left else ""


def _no_tool_calls(expected: bool, _: str, calls: Sequence[Call]) -> str:
    return f"called {calls[0]['name']}" if calls else ""


def _strict_json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_GRADERS: dict[str, Callable[[Any, str, Sequence[Call]], str]] = {
    "number": _number,
    "equals": _equals,
    "contains": _contains,
    "contains_any": _contains_any,
    "json": _json,
    "tool_calls": _tool_calls,
    "no_tool_calls": _no_tool_calls,
}
