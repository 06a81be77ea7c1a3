"""Compatibility with other clients and machines: the routes that they use, pages elsewhere, encoded bodies."""

import asyncio
import codecs
import gzip
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import AuthenticationError, BadRequestError, NotFoundError

from redline.api.config import Limits
from redline.errors import ConfigError, Overloaded, RequestError
from tests.api.test_bounds import text_ask
from tests.api.test_chat import HELLO, ask
from tests.api.world import MODEL, World, answer
from tests.waiting import eventually

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
BODY = {"messages": HELLO}
PAGE = "https://chat.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# -- routes


async def test_one_model_is_told_by_the_official_client() -> None:
    async with World(answer("a")) as world:
        model: Any = await world.client.models.retrieve(MODEL)
        assert (model.id, model.object, model.max_model_len) == (MODEL, "model", 4096)
        for name in ("gpt-5", "moonshotai/other"):
            with pytest.raises(NotFoundError) as refused:
                await world.client.models.retrieve(name)
            assert refused.value.code == "model_not_found"


async def test_ping_is_health_and_needs_no_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    async with World(answer("a"), keys_file=str(tmp_path / "keys")) as world:
        assert (await world.http.get("/ping")).status_code == (await world.http.post("/ping")).status_code == 200
        world.gateway.monitor.mark_down(world.link, "gone")
        assert (await world.http.get("/ping")).status_code == 503


async def test_load_counts_requests_not_choices() -> None:
    async with World(answer("a")) as world:
        assert (await world.http.get("/load")).json() == {"server_load": 0}
        world.engine.gate.clear()
        tasks = [asyncio.create_task(ask(world, n=n)) for n in (1, 3)]
        await eventually(lambda: len(world.engine.jobs) == 4)
        assert (await world.http.get("/load")).json() == {"server_load": 2}
        world.engine.gate.set()
        await asyncio.gather(*tasks)
        assert (await world.http.get("/load")).json() == {"server_load": 0}


async def test_who_has_no_key_is_told_how_to_give_one(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    async with World(answer("a"), keys_file=str(tmp_path / "keys")) as world:
        with pytest.raises(AuthenticationError) as refused:
            await ask(world)
        assert refused.value.response.headers["www-authenticate"] == "Bearer"


# -- pages elsewhere


@pytest.mark.parametrize("keys", [True, False])
async def test_pages_of_the_named_origins_may_ask_and_read(keys: bool, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    file = str(tmp_path / "keys") if keys else None
    async with World(answer("a"), keys_file=file, cors_origins=(PAGE, "http://localhost:3000")) as world:
        asked = await world.http.options(CHAT, headers=PREFLIGHT)
        assert asked.status_code == 204
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert asked.headers["access-control-allow-methods"] == "GET, POST, DELETE"
        assert asked.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        assert "access-control-allow-credentials" not in asked.headers
        said = await world.http.post(CHAT, json=BODY, headers={"origin": PAGE, "authorization": "Bearer secret"})
        assert (said.status_code, said.headers["access-control-allow-origin"]) == (200, PAGE)
        assert said.headers["vary"] == "origin"
        wrong = await world.http.post(CHAT, content=b"{", headers={"origin": PAGE, "authorization": "Bearer secret"})
        assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (400, PAGE)


@pytest.mark.parametrize("origin", ["https://evil.example", "https://chat.example.evil", "http://chat.example", "null"])
async def test_pages_of_other_origins_learn_nothing(origin: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    for file in (None, str(tmp_path / "keys")):
        async with World(answer("a"), keys_file=file, cors_origins=(PAGE,)) as world:
            asked = await world.http.options(CHAT, headers={**PREFLIGHT, "origin": origin})
            said = await world.http.post(CHAT, json=BODY, headers={"origin": origin})
            for response in (asked, said):
                assert response.status_code in (401, 403)
                assert not [name for name in response.headers if name.startswith("access-control")]


APPS = [
    "app://obsidian.md",
    "tauri://localhost",
    "http://tauri.localhost",
    "capacitor://localhost",
    "ionic://localhost",
    "vscode-webview://0fh3k2c9",
    "chrome-extension://dhdgffkkebhmkfjojejmpbldmpobfkfo",
    "moz-extension://6a1c2b6e-3f0b-4d5a-9a54-1f0f2c9d8e7b",
]


async def test_pages_of_apps_may_ask_and_read_where_their_origins_are_named() -> None:
    async with World(answer("a"), cors_origins=APPS, local=True) as world:
        for origin in APPS:
            for answered in (
                await world.http.options(CHAT, headers={**PREFLIGHT, "origin": origin, "host": "localhost"}),
                await world.http.post(CHAT, json=BODY, headers={"origin": origin, "host": "localhost"}),
            ):
                assert answered.status_code in (204, 200)
                assert answered.headers["access-control-allow-origin"] == origin
        other = await world.http.post(CHAT, json=BODY, headers={"origin": "app://evil.md", "host": "localhost"})
        assert other.status_code == 403


async def test_header_names_that_are_none_are_not_sent_back() -> None:
    async with World(answer("a"), cors_origins=(PAGE,)) as world:
        headers = {**PREFLIGHT, "access-control-request-headers": "x: y; z"}
        asked = await world.http.options(CHAT, headers=headers)
    assert asked.headers["access-control-allow-headers"] == "authorization, content-type"


NO_ORIGINS = ["*", "chat.example", "https://chat.example/", "https://Chat.example", "null", "", "://a", "app://"]
NO_ORIGINS += ["file://", "file:///a.html", "app:obsidian.md", "app://obsidian.md/", "app://*", "App://obsidian.md"]


@pytest.mark.parametrize("origin", NO_ORIGINS)
async def test_what_is_no_origin_is_the_operators_error(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins"):
        async with World(answer("a"), cors_origins=(origin,)):
            pass


# -- encodings of bodies


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 6.0}, {"max_completion_tokens": 6.0, "n": 1.0, "top_k": 4e1, "seed": -1.0, "min_tokens": 0.0}],
)
async def test_an_integer_may_be_written_as_a_float(fields: dict[str, Any]) -> None:
    async with World(answer("abcdefgh")) as world:
        assert (await ask(world, extra_body=fields)).choices[0].finish_reason == "length"
        raw = await world.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2.0, "logprobs": 1.0})
    assert raw.status_code == 200
    assert [job.sampling.max_tokens for job in world.engine.jobs] == [6, 2]
    assert all(type(job.sampling.max_tokens) is int for job in world.engine.jobs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 6.5}, "max_tokens"),
        ({"max_tokens": 1e300}, "max_tokens"),
        ({"n": 65.0}, "n"),
        ({"top_k": 0.5}, "top_k"),
        ({"max_tokens": 10**30}, "max_tokens"),
    ],
)
async def test_other_floats_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with World(answer("a")) as world:
        with pytest.raises(BadRequestError) as refused:
            await ask(world, extra_body=fields)
    assert refused.value.param == param


async def test_a_byte_order_mark_is_no_part_of_the_body() -> None:
    async with World(answer("a")) as world:
        good = await world.http.post(CHAT, content=codecs.BOM_UTF8 + json.dumps(BODY).encode())
        other = await world.http.post(CHAT, content=json.dumps(BODY).encode("utf-16"))
    assert good.status_code == 200
    assert (other.status_code, "UTF-8" in other.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("text", [r"\ud83d", r"x\udc00y", r"\\\ud800", r"\ud83d\ude00\ude00"])
async def test_half_a_surrogate_pair_is_named(text: str) -> None:
    body = '{"messages":[{"role":"user","content":"' + text + '"}]}'
    async with World(answer("a")) as world:
        response = await world.http.post(CHAT, content=body.encode())
    assert response.status_code == 400
    assert "surrogate" in response.json()["error"]["message"]


async def test_what_was_refused_before_is_read_as_what_was_said() -> None:
    part = {"type": "refusal", "refusal": "I will not."}
    async with World(answer("a")) as world:
        for message in ({"content": [part]}, {"content": None, "refusal": "I will not."}):
            await ask(world, messages=[*HELLO, {"role": "assistant", **message}, *HELLO])
        await ask(world, messages=[*HELLO, {"role": "assistant", "content": "I will not."}, *HELLO])
    first, second, third = world.engine.jobs
    assert first.tokens == second.tokens == third.tokens


async def test_a_gzip_body_is_unpacked() -> None:
    packed = gzip.compress(json.dumps(BODY).encode())
    headers = {"content-encoding": "gzip"}
    async with World(answer("a"), max_model_len=1 << 20) as world:
        assert (await world.http.post(CHAT, content=packed, headers=headers)).status_code == 200
        long = gzip.compress(json.dumps({"prompt": "the end " * 100_000}).encode())
        assert (await world.http.post("/v1/completions", content=long, headers=headers)).status_code == 200
        other = await world.http.post(CHAT, content=packed, headers={"content-encoding": "br"})
        assert other.status_code == 415
        for broken in (packed[:-1], b"{}", packed + b"{}"):
            refused = await world.http.post(CHAT, content=broken, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_gzip")
    assert len(world.engine.jobs) == 2


async def test_a_gzip_body_is_bounded_as_it_unpacks() -> None:
    bomb = gzip.compress(b" " * (64 << 20))
    headers = {"content-encoding": "gzip"}
    assert len(bomb) < 100_000
    async with World(answer("a"), limits=Limits(bodies_bytes=10 << 20)) as world:
        refused = await world.http.post(CHAT, content=bomb, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
        packed = gzip.compress(json.dumps({**BODY, "user": "x" * (7 << 20)}).encode())
        together: list[httpx2.Response] = await asyncio.gather(
            *(world.http.post(CHAT, content=packed, headers=headers) for _ in range(3))
        )
        assert sorted(response.status_code for response in together) == [200, 503, 503]
        # the bytes are released after each request
        assert (await world.http.post(CHAT, content=packed, headers=headers)).status_code == 200


# -- the queue


async def test_n_may_be_as_many_as_64() -> None:
    async with World(answer("a")) as world:
        assert len((await ask(world, n=64)).choices) == 64
        with pytest.raises(BadRequestError) as refused:
            await ask(world, n=65)
        assert refused.value.param == "n"
        with pytest.raises(BadRequestError) as refused:
            await world.client.completions.create(model=MODEL, prompt=["a"] * 5, n=64)
        assert refused.value.param == "n"


async def test_no_two_requests_fill_the_queue() -> None:
    limits = Limits()
    assert 2 * limits.choices < limits.waiting
    assert 2 * limits.tokens < limits.queue_tokens
    limits = Limits(choices=4, waiting=16, tokens=40, queue_tokens=160)
    async with World(answer("a"), limits=limits) as world:
        with pytest.raises(BadRequestError):
            await ask(world, n=5)
        with pytest.raises(RequestError, match="40 in one request"):
            await world.gateway.begin(text_ask("x" * 21, n=2))
        world.engine.gate.clear()
        for _ in range(4):
            await world.gateway.begin(text_ask("x" * 20, n=2))
        with pytest.raises(Overloaded):
            await world.gateway.begin(text_ask("x" * 20, n=2))
