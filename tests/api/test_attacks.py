"""Vulnerabilities of other servers (docs/security.md): those without another test, and that the page cites tests."""

import hashlib
import hmac
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redline.api.auth.access import check_key
from redline.api.errors import Refusal, answer_to
from redline.chat import parser
from redline.chat.events import Event
from redline.chat.stops import StopStrings
from tests.api.world import MODEL, TOKENIZER, World, answer, ids
from tests.work import costs

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
CALL_ID = parser._CALL_ID
ELSEWHERE = (
    "http://169.254.169.254/latest",
    "https://u@127.0.0.1:1\\@example.org/x.png",
    "file:///etc/passwd",
    "data:,x",
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("where", ELSEWHERE)
async def test_media_are_refused_and_nobody_is_asked_for_them(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: asked.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: asked.append(given) or [])
    chat = [{"type": "image_url", "image_url": {"url": where}}]
    block = [{"type": "image", "source": {"type": "url", "url": where}}]
    item = [{"type": "input_image", "image_url": where}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": chat}]},
        "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": block}]},
        "/v1/responses": {"input": [{"role": "user", "content": item}]},
    }
    async with World(answer("a")) as world:
        for path, body in bodies.items():
            told = await world.http.post(path, json={"model": MODEL, **body})
            assert told.status_code == 400, path
            assert "image" in told.text
        assert world.engine.jobs == []
    assert asked == []


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys are compared even after a match, so the first and the last take the same time."""
    compared: list[bytes] = []
    real = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(b)
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    known = [hashlib.sha256(b"%d" % number).digest() for number in range(5)]
    for number in (0, 4):
        compared.clear()
        assert check_key([(b"authorization", b"Bearer %d" % number)], known) == known[number]
        assert compared == known
    compared.clear()
    with pytest.raises(Refusal):
        check_key([(b"authorization", b"Bearer 5")], known)
    assert compared == known


@pytest.mark.parametrize(
    "piece",
    [
        "<|tool_call_begin|>",
        "functions.",
        "functions.a:",
        '{"a": [',
        "<|tool_calls_section_begin|><|tool_call_begin|>",
        "</th",
        " \n",
    ],
)
def test_an_answer_is_parsed_in_time_that_grows_with_its_length_alone(
    piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times the tokens execute four times the lines of Python, and copy four times the bytes; code that
    rescans the whole answer at each token would take sixteen times. A regular expression that may backtrack gets at
    most one header."""
    matched: list[str] = []

    class Watched:
        def fullmatch(self, text: str) -> re.Match[str] | None:
            matched.append(text)
            return CALL_ID.fullmatch(text)

    monkeypatch.setattr(parser, "_CALL_ID", Watched())

    def feed(times: int) -> tuple[int, int]:
        said = ids(piece) * times

        def read(part: Callable[[], object]) -> None:
            reader, events = parser.Parser(TOKENIZER, False, StopStrings(("never",)), frozenset()), list[Event]()
            for token in said:
                reader.push(token, events)
                events.clear()
                part()
            reader.finish(events, True)

        return costs(read)

    (lines_short, bytes_short), (lines_long, bytes_long) = feed(500), feed(2000)
    assert lines_long < 5 * lines_short
    assert bytes_long < 6 * bytes_short
    assert max(map(len, matched), default=0) <= parser._HEADER_CHARS


def test_an_error_that_nobody_foresaw_tells_a_client_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    told = answer_to(KeyError(f"{object()!r} of {ROOT}"))
    assert told.status == 500
    assert b"0x" not in told.body
    assert str(ROOT).encode() not in told.body
    assert "0x" in caplog.text, "the details are in the operator's log"


def test_every_attack_of_the_page_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    table = page.split("\n## Attacks that were tried\n")[1].split("\nRandom and long")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| Attack")]
    assert len(rows) >= 16
    written = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    known = set(re.findall(r"^(?:async )?def (test_\w+)", written, re.MULTILINE))
    for row in rows:
        cited = re.findall(r"`(test_\w+)`", row)
        assert cited, row
        assert not [name for name in cited if name not in known], row
