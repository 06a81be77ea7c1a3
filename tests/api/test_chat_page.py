"""The page at /: its files, what they may do, who gets them, and the engine's stream of events."""

import json
import re
from pathlib import Path

import pytest

from redline.api import chat_page
from redline.api.chat_page import FILES
from tests.api.world import MODEL, World, answer

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_the_page_loads_nothing_but_its_own_files() -> None:
    async with World(answer("a")) as world:
        for path, (_, kind) in FILES.items():
            given = await world.http.get(path)
            assert (given.status_code, given.headers["content-type"].partition(";")[0]) == (200, kind)
            policy = given.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
            assert "unsafe" not in policy
            assert given.headers["x-content-type-options"] == "nosniff"
            named = re.findall(r"""(?:src|href|from)\s*=?\s*"([^"#]+)""", given.text)
            assert all(f"/{name.removeprefix('./')}" in FILES or f"/page/{name[2:]}" in FILES for name in named), named
            assert "innerHTML" not in given.text
            assert not re.search(r"<[^>]* (style|on[a-z]+)=", given.text), "the policy would not let it act"


async def test_who_has_a_file_already_is_sent_no_byte_of_it() -> None:
    async with World(answer("a")) as world:
        first = await world.http.get("/page/page.js")
        again = await world.http.get("/page/page.js", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert (await world.http.post("/page/page.js", json={})).status_code == 405


async def test_keys_guard_what_the_page_asks_for_and_not_the_page(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    async with World(answer("a"), keys_file=str(tmp_path / "keys")) as world:
        for path in FILES:
            assert (await world.http.get(path)).status_code == 200
        assert (await world.http.get("/engine?events=1")).status_code == 401
        given = await world.http.get("/engine?events=1", headers={"authorization": "Bearer secret"})
        assert given.status_code == 200


async def test_it_can_be_left_out() -> None:
    async with World(answer("a"), page=False) as world:
        assert (await world.http.get("/")).json() == (await world.http.get("/version")).json()
        assert (await world.http.get("/page/page.js")).status_code == 404


async def test_the_engine_is_told_each_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_page, "EVERY_S", 0.01)
    async with World(answer("a")) as world:
        given = await world.http.get("/engine?events=2")
        assert given.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix("data: ")) for line in given.text.split("\n\n") if line]
        assert len(events) == 2
        assert events[0]["ready"] is True
        assert set(events[0]["queue"]) == {"jobs", "tokens"}
        assert [worker["role"] for worker in events[0]["workers"]] == ["both"]
        for wrong in ("0", "-1", "x", "9999999999"):
            assert (await world.http.get(f"/engine?events={wrong}")).status_code == 400
        assert MODEL in (await world.http.get("/version")).json()["models"]
