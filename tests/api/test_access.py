"""API keys; and, without keys, the checks that block requests from other sites' web pages."""

import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from redline.api.auth.access import is_loopback
from tests.api.world import World, answer, asked, openai_client, port_of
from tests.waiting import eventually

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
JSON = {"content-type": "application/json"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def ask(world: World, method: str = "POST", **headers: str) -> tuple[int, str | None]:
    """The status and the error's code of a chat request that only differs in its headers."""
    named = {"host": "localhost:8000", "content-type": "application/json"}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    content = json.dumps(HELLO).encode() if method == "POST" else None
    path = CHAT if method == "POST" else "/v1/models"
    response = await world.http.request(method, path, content=content, headers=named)
    if response.status_code == 200:
        return 200, None
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return response.status_code, error["code"]


# ------------------------------------------------------------------------ without keys, on loopback only


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_name_that_somebody_else_could_have_lead_here_is_refused(method: str) -> None:
    async with World(answer("a"), local=True) as world:
        for host in ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "10.1.2.3", "[::1]:8000", "[::1]", "0.0.0.0:1"):
            assert await ask(world, method, host=host) == (200, None), host
        for host in ("evil.example", "localhost.evil.example:8000", "127.0.0.1.nip.io", "evil:localhost", "a\x1b[31m"):
            assert await ask(world, method, host=host) == (403, "foreign_host"), host


async def test_a_page_from_elsewhere_is_refused() -> None:
    async with World(answer("a"), local=True) as world:
        for origin in ("http://localhost:3000", "http://127.0.0.1", "https://[::1]:8", "http://localhost:8000"):
            assert await ask(world, origin=origin) == (200, None), origin
        for origin in (
            "https://evil.example",
            "null",
            "http://10.1.2.3:80",
            "http://localhost.evil.example",
            "file://",
        ):
            assert await ask(world, origin=origin) == (403, "foreign_origin"), origin
        # The server's own page, reached through another address of this machine.
        assert await ask(world, host="10.1.2.3:80", origin="http://10.1.2.3:80") == (200, None)


async def test_a_body_that_is_not_json_is_refused() -> None:
    async with World(answer("a"), local=True) as world:
        for kind in ("application/json", "Application/JSON; charset=utf-8", "application/json;odata=verbose"):
            assert await ask(world, content_type=kind) == (200, None), kind
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "json"):
            assert await ask(world, content_type=kind) == (415, "not_json"), kind
        assert await ask(world, method="GET", content_type="text/plain") == (200, None)


async def test_a_browsers_question_whether_it_may_is_not_answered_with_yes() -> None:
    async with World(answer("a"), local=True) as world:
        asked = {"origin": "http://localhost:3000", "host": "localhost", "access-control-request-method": "POST"}
        refused = await world.http.request("OPTIONS", CHAT, headers=asked)
    assert refused.status_code == 405
    assert not [name for name in refused.headers if name.startswith("access-control")]


async def test_the_official_client_is_served() -> None:
    async with World(answer("fine"), local=True) as world, world.listening() as address:
        for url in (address, address.replace("127.0.0.1", "localhost")):
            client = openai_client(url)
            said = await client.chat.completions.create(model="kimi-nano", messages=HELLO["messages"])  # type: ignore
            assert said.choices[0].message.content == "fine"
            await client.close()


# ------------------------------------------------------------------------------------------- other networks, and keys


async def test_on_a_network_any_host_is_served_but_no_page_from_elsewhere() -> None:
    async with World(answer("a")) as world:
        assert await ask(world, host="models.example") == (200, None)
        assert await ask(world, host="models.example", origin="https://models.example") == (200, None)
        assert await ask(world, host="models.example", origin="https://evil.example") == (403, "foreign_origin")
        assert await ask(world, host="models.example", origin="http://localhost") == (403, "foreign_origin")
        assert await ask(world, host="models.example", content_type="text/plain") == (415, "not_json")


async def test_who_has_a_key_is_served_whatever_the_other_headers_say(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    async with World(answer("a"), keys_file=str(keys), local=True) as world:
        others = {"host": "models.example", "origin": "https://app.example", "content_type": "text/plain"}
        assert await ask(world, authorization="Bearer secret", **others) == (200, None)
        assert await ask(world, authorization="bearer  secret ", **others) == (200, None)


async def test_a_missing_key_is_not_called_incorrect(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")

    async def refused(**headers: Any) -> str:
        response = await world.http.get("/v1/models", headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        return response.json()["error"]["message"]

    async with World(answer("a"), keys_file=str(keys)) as world:
        for headers in ({}, {"authorization": ""}, {"authorization": "Bearer "}, {"authorization": "secret"}):
            assert await refused(**headers) == "no API key was given: send the header Authorization: Bearer KEY"
        assert await refused(authorization="Bearer wrong") == "Incorrect API key provided"


def test_what_only_this_machine_reaches() -> None:
    assert [is_loopback(host) for host in ("localhost", "127.0.0.1", "127.8.8.8", "::1")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "host.example", "")] == [False] * 5


# --------------------------------------------------------------------------------------------------------- access line


async def test_each_request_leaves_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "redline.access")
    async with World(answer("abc")) as world:
        whole = await world.http.post(CHAT, json=HELLO, headers={"x-request-id": "one"})
        usage = whole.json()["usage"]
        await world.http.post(CHAT, json={**HELLO, "stream": True, "n": 2}, headers={"x-request-id": "two"})
        await world.http.post(CHAT, content=b"{", headers={"x-request-id": "three"})
        await world.http.get("/v1/%1b[31m%0a%5bbold%5d" + "x" * 500, headers={"x-request-id": "four"})
        await world.http.get("/health", headers={"x-request-id": "five"})
    lines = [record for record in caplog.records if record.name == "redline.access"]
    first, second, third, fourth, fifth = (record.getMessage() for record in lines)
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    assert first.startswith("POST /v1/chat/completions 200, ")
    assert first.endswith(f" ms, tokens {prompt} + {completion}, id one")
    assert second.endswith(f" ms, tokens {prompt} + {2 * completion}, id two")
    assert third.startswith("POST /v1/chat/completions 400, ")
    assert third.endswith(" ms, id three")
    assert fourth.startswith("GET /v1/%1B%5B31m%0A%5Bbold%5Dxxx")
    assert "xxx... 404, " in fourth
    assert len(fourth) < 300
    assert fifth.startswith("GET /health 200, ")
    assert [record.levelno for record in lines] == [logging.INFO] * 4 + [logging.DEBUG]


async def test_a_client_that_left_is_told_in_the_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "redline.access")
    async with World(answer("abc")) as world, world.listening() as address:
        world.engine.gate.clear()
        with socket.create_connection(("127.0.0.1", port_of(address))) as client:
            client.sendall(asked())
            await eventually(lambda: world.engine.jobs)
        await eventually(lambda: "the client disconnected" in caplog.text)
    assert " -, " in caplog.text
