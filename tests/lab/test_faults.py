"""The judge of the faults program: which answers are wrong, and which are late."""

import pytest

from lab.fault_requests import Answer, Asked, difference, mix
from lab.faults import Fault, late


def streamed(*events: dict[str, object], whole: bool = True) -> Answer:
    answer = Answer(whole=whole)
    for event in events:
        answer.read({"choices": [{"index": 0, **event}]})
    return answer


TRUTH = streamed(
    {"delta": {"content": "a"}, "token_ids": [1, 2]},
    {"delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]}, "token_ids": [3]},
    {
        "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        "token_ids": [4],
        "finish_reason": "stop",
    },
)
ASKED, LEAVES = Asked("one", "/", {}), Asked("one", "/", {}, leaves=2)


def test_an_answer_in_other_pieces_is_the_same() -> None:
    call = {"index": 0, "function": {"name": "f", "arguments": "{}"}}
    same = streamed(
        {"delta": {"content": "a", "tool_calls": [call]}, "token_ids": [1, 2, 3, 4], "finish_reason": "stop"}
    )
    assert difference(ASKED, TRUTH, same) == ""


@pytest.mark.parametrize(
    ("ids", "whole", "why"),
    [
        ([1, 2, 2, 3, 4], True, "the same up to 2"),
        ([1, 2, 4], True, "the same up to 2"),
        ([1, 2, 3, 4], False, "ended without its end"),
    ],
)
def test_a_token_that_comes_twice_or_not_at_all_is_wrong(ids: list[int], whole: bool, why: str) -> None:
    told = streamed({"delta": {"content": "a"}, "token_ids": ids}, whole=whole)
    told.choices[0] = {**TRUTH.choices[0], "ids": ids}
    assert why in difference(ASKED, TRUTH, told)


def test_a_client_that_left_has_a_beginning() -> None:
    assert difference(LEAVES, TRUTH, streamed({"delta": {}, "token_ids": [1, 2]}, whole=False)) == ""
    assert "are others" in difference(LEAVES, TRUTH, streamed({"delta": {}, "token_ids": [1, 3]}, whole=False))


def test_a_gap_is_late_where_one_fault_is_its_reason_and_the_server_itself_ran() -> None:
    kill, stop, api = Fault("kill", "a", 10, 20), Fault("stop", "b", 12, 20), Fault("api", "", 30, 31)
    gap = (3.0, 10.5, "x")
    assert len(late([gap], [kill], 2.0)) == 1
    assert late([gap], [kill], 4.0) == []
    assert late([gap], [kill, stop], 2.0) == []
    assert late([(3.0, 29.0, "x")], [kill, api], 2.0) == []


def test_requests_are_a_function_of_the_seed() -> None:
    assert mix(3, "m", 50, 1000) == mix(3, "m", 50, 1000) != mix(4, "m", 50, 1000)
