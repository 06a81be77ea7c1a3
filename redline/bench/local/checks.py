"""Decides whether an answer is right. A check is a small JSON object whose one key says how it is graded.

    {"number": 933}                                     the last number in the answer
    {"equals": "Paris"}                                 the whole answer, but for case and final punctuation
    {"contains": ["a", "b"]}                            all of them, in any case
    {"contains_any": ["a", "b"]}                        one of them
    {"json": {"schema": {...}, "value": ...}}           exactly one JSON value; each part is optional
    {"tool_calls": [{"name": ..., "arguments": {...}}]} these calls and no others, in any order
    {"no_tool_calls": true}                             none
    {"asserts": {"function": "f", "code": "assert ..."}} Python that must hold (run only where that is allowed)

Needs nothing but the standard library, so that training machines can import it too.
"""

import json
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, NoReturn, TypedDict

from redline.bench.local.json_schema import same, violation
from redline.bench.local.run_code import Candidate, run_asserts


class Call(TypedDict):
    name: str
    arguments: str  # JSON text, as the model wrote it


class Grade(NamedTuple):
    ok: bool | None  # None: not graded, since it needs code to be run
    why: str  # empty when right


def grade(check: dict[str, Any], content: str, tool_calls: Sequence[Call], run_code: bool = False) -> Grade:
    """Grades an answer (visible text and tool calls) by every key of the check.

    Raises ValueError for a check that is not one of the kinds above.
    """
    if unknown := check.keys() - _GRADERS.keys() - {"asserts"}:
        raise ValueError(f"no such check: {', '.join(sorted(unknown))}")
    if not check:
        raise ValueError("a check needs at least one key")
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
    if expected is not True:
        raise ValueError("no_tool_calls is true or absent")
    return f"called {calls[0]['name']}" if calls else ""


def _strict_json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


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
