"""`redline role`: its request to the admin routes, and its output for their answers."""

import json

import pytest

from redline.cli.admin import PRINTED
from redline.cli.console import plain_console
from redline.cli.role import show, turn
from redline.errors import ConfigError
from tests.cli.servers import says, server


def test_a_role_is_asked_for_and_what_comes_of_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with server(says(json.dumps({"worker": "a", "role": "decode"}))) as (url, asked):
        turn("a", "decode", url, "sk-key")
    assert asked == [{"role": "decode"}]
    assert show("a", "decode", plain_console()) == 0
    assert "a becomes decode" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "status", "why"),
    [
        ({"error": {"message": "a is the last worker that answers"}}, 409, "a is the last worker that answers"),
        ({"error": {"message": "no such key"}}, 401, f"no such key; {PRINTED}"),
        ("not what was expected", 502, "no admin routes at"),
    ],
)
def test_why_a_worker_cannot_is_one_line(answer: object, status: int, why: str) -> None:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    with server(says(text, status)) as (url, _), pytest.raises(ConfigError) as raised:
        turn("a", "prefill", url, None)
    assert str(raised.value).startswith(why)


def test_without_a_server_at_the_default_address_the_error_tells_where_the_right_one_is_printed() -> None:
    with pytest.raises(
        ConfigError, match=r"no admin routes at http://127\.0\.0\.1:1 .*refused.*`redline explain \.\.\.`"
    ):
        turn("a", "prefill", "http://127.0.0.1:1", None)
