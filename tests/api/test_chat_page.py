"""The page at /: its files, its content security policy, who may load it, and its parser of the event stream."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from redline import child_process
from redline.api.config import KeyLimits
from redline.api.page import chat_page, render_child
from redline.api.page.chat_page import FILES
from redline.api.page.render import BLOCKS_BYTES, WAITING, Renderer
from redline.api.page.render_child import rendered
from redline.errors import Overloaded, RequestError
from tests.api.world import MODEL, World, answer
from tests.waiting import turns

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
            assert "img-src data:;" in policy, "images of questions, and none of another server"
            assert given.headers["x-content-type-options"] == "nosniff"
            named = re.findall(r"""(?:src|href|from)\s*=?\s*"([^"#]+)""", given.text)
            assert all(f"/{name.removeprefix('./')}" in FILES or f"/page/{name[2:]}" in FILES for name in named), named
            assert "innerHTML" not in given.text
            assert not re.search(r"<[^>]* (style|on[a-z]+)=", given.text), "the content security policy would block it"


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
        assert events[0]["at"] <= events[1]["at"]
        assert [worker["role"] for worker in events[0]["workers"]] == ["both"]
        for wrong in ("0", "-1", "x", "9999999999"):
            assert (await world.http.get(f"/engine?events={wrong}")).status_code == 400
        assert MODEL in (await world.http.get("/version")).json()["models"]


# ------------------------------------------------------------------------------------------------- rendered Markdown


LINK = 'target="_blank" rel="noopener noreferrer"'


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("# A *b*", "<h3>A <em>b</em></h3>\n"),
        ("###### A", "<h6>A</h6>\n"),
        ("- a\n  - b", "<ul>\n<li>a\n<ul>\n<li>b</li>\n</ul>\n</li>\n</ul>\n"),
        ("> c", "<blockquote>\n<p>c</p>\n</blockquote>\n"),
        ("3. a", '<ol start="3">\n<li>a</li>\n</ol>\n'),
        ("~~a~~ `b`", "<p><s>a</s> <code>b</code></p>\n"),
        ("```none\n<a> `\n```", '<pre data-language="none"><code>&lt;a&gt; `\n</code></pre>'),
        ("```json\n1\n```", '<pre data-language="json"><code><span class="c-mi">1</span>\n</code></pre>'),
        ("$5 and $10, \\\\$6 or $ 7 $", "<p>$5 and $10, \\$6 or $ 7 $</p>\n"),
        ("![a](https://x.example)", f'<p><a href="https://x.example" {LINK}>a</a></p>\n'),
    ],
)  # fmt: skip
def test_markdown_is_rendered(text: str, html: str) -> None:
    assert rendered(text) == html


def test_a_table_keeps_how_its_columns_are_aligned() -> None:
    html = rendered("| a | b |\n|:--|--:|\n| 1 | 2 |")
    assert '<th data-align="left">a</th>' in html
    assert '<td data-align="right">2</td>' in html


X = "<mrow><mi>x</mi></mrow></math>"


@pytest.mark.parametrize("text", ["a $x$ b", "a \\(x\\) b", "| a |\n|--|\n| $x$ |", "- $x$", "$c\n\n$x$"])
def test_a_formula_in_a_line_becomes_mathml(text: str) -> None:
    assert f'<math display="inline">{X}' in rendered(text)


@pytest.mark.parametrize(
    "text", ["$$\nx\n$$", "a\n\\[\nx\n\\].", "- a\n  $$x$$", "> $$\n> x\n> $$", "so $$x$$ is", "\\[x\\]"]
)
def test_a_formula_of_its_own_becomes_mathml(text: str) -> None:
    assert f'<math display="block">{X}' in rendered(text)


def test_lines_of_a_formula_are_no_markdown() -> None:
    assert "<ul>" not in rendered("\\[\na\n- b\n= c\n\\]")
    assert "<em>" not in rendered("$a_1 b_2$ and $c*d*e$")


@pytest.mark.parametrize("text", [r"$\frac{$", "$" + "x" * 5000 + "$"])
def test_what_is_no_formula_stays_as_it_is(text: str) -> None:
    assert rendered(text) == f"<p><code>{text[1:-1]}</code></p>\n"


@pytest.mark.parametrize(
    "text",
    [
        "<script>acted()</script>",
        '<img src=x onerror="acted()"> <b onclick="acted()">b</b>',
        "[a](javascript:acted()) [b](data:text/html,acted()) [c](vbscript:acted())",
        '[a](https://x.example/"onclick="acted() "t\\"onclick=\\"acted()")',
        "```html\n</code></pre><script>acted()</script>\n```",
        '```"><script>acted()</script>\nx\n```',
        r"$\text{<script>acted()</script>}$ $\href{javascript:acted()}{x}$ $\style{x:y}{z}$ $\class{a}{b}$",
        r"$\text{<style><!--</style><img title='--><img src=1 onerror=acted()>'>}$",
        "| <svg onload=acted()> |\n|--|\n| <iframe src=javascript:acted()> |",
        "![a](javascript:acted()) ![<script>](https://x.example/)",
    ],
)
def test_what_is_rendered_cannot_act(text: str) -> None:
    html = rendered(text)
    tags = re.findall(r"<([a-z0-9]+)((?: [^<>]*)?)>", html)
    assert not {name for name, _ in tags} & {"script", "img", "svg", "iframe", "style", "b", "object", "form", "input"}
    for _, attributes in tags:
        found = re.sub(r'"[^"]*"', "", attributes)
        assert set(re.findall(r"[\w-]+", found)) <= {
            *("href", "title", "target", "rel", "class", "start", "data-language", "data-align", "display"),
            *("mathvariant", "stretchy", "fence", "form", "linethickness", "columnalign", "width"),
        }
        assert not re.search(r'href="(?!https?:|mailto:)', attributes)


async def test_blocks_are_rendered_for_who_has_a_key_and_count_as_no_request(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    per_key = KeyLimits(requests_per_s=0.001)
    async with World(answer("a"), keys_file=str(tmp_path / "keys"), per_key=per_key) as world:
        body = {"blocks": ["*a*", "`b`"]}
        assert (await world.http.post("/page/render", json=body)).status_code == 401
        for _ in range(2):
            given = await world.http.post("/page/render", json=body, headers={"authorization": "Bearer secret"})
            assert given.json() == {"blocks": ["<p><em>a</em></p>\n", "<p><code>b</code></p>\n"]}


async def test_what_is_not_rendered_is_refused_by_its_field() -> None:
    async with World(answer("a")) as world:
        for body, status in (
            ({}, 400),
            ({"blocks": []}, 400),
            ({"blocks": [1]}, 400),
            ({"blocks": ["a"], "more": 1}, 400),
            ({"blocks": ["a"] * 257}, 400),
            ({"blocks": ["a" * (BLOCKS_BYTES + 1)]}, 413),
            ({"blocks": ["a" * (2 * BLOCKS_BYTES)]}, 413),
        ):
            given = await world.http.post("/page/render", json=body)
            assert given.status_code == status, given.text
            assert "more" in given.text or "blocks" in given.text or "body" in given.text
        assert (await world.http.get("/page/render")).status_code == 405
    async with World(answer("a"), page=False) as world:
        assert (await world.http.post("/page/render", json={"blocks": ["a"]})).status_code == 404


async def test_a_block_that_takes_too_long_ends_its_process_and_no_more() -> None:
    renderer = Renderer(render_s=0.0)
    try:
        with pytest.raises(RequestError, match="rendering the blocks takes more than 0 s"):
            await renderer.answer(b'{"blocks":["a"]}')
        renderer.render_s = 600.0
        assert await renderer.answer(b'{"blocks":["a"]}') == b'{"blocks":["<p>a</p>\\n"]}'
    finally:
        await renderer.ended()


async def test_a_process_that_ends_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real = child_process.exchange
    renderer = Renderer(render_s=600.0)

    async def asked(process: asyncio.subprocess.Process, line: bytes, *most: int) -> bytes:
        if b"deadly" in line:
            process.kill()
        return await real(process, line, *most)

    monkeypatch.setattr(child_process, "exchange", asked)
    try:
        with pytest.raises(RequestError, match="rendering the blocks takes more memory"):
            await renderer.answer(b'{"blocks":["deadly"]}')
        assert b"<p>next</p>" in await renderer.answer(b'{"blocks":["next"]}')
        monkeypatch.setattr("sys.executable", "/nowhere/python")
        await renderer.ended()
        with pytest.raises(Overloaded, match="blocks cannot be rendered now"):
            await renderer.answer(b'{"blocks":["next"]}')
    finally:
        await renderer.ended()


def test_a_block_that_no_library_can_read_has_no_html(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(text: str) -> str:
        raise RecursionError

    monkeypatch.setattr(render_child, "rendered", fails)
    assert render_child.attempted("a") is None


async def test_who_leaves_does_not_get_another_ones_blocks() -> None:
    renderer = Renderer(render_s=600.0)
    try:
        await renderer.answer(b'{"blocks":["a"]}')
        left = asyncio.create_task(renderer.answer(b'{"blocks":["left"]}'))
        await turns(2)
        left.cancel()
        assert b"<p>next</p>" in await renderer.answer(b'{"blocks":["next"]}')
        assert left.cancelled()
    finally:
        await renderer.ended()


async def test_requests_that_wait_to_be_rendered_are_bounded() -> None:
    renderer = Renderer(render_s=600.0)
    try:
        waiting = [asyncio.create_task(renderer.answer(b'{"blocks":["a"]}')) for _ in range(WAITING)]
        await turns(2)
        with pytest.raises(Overloaded):
            await renderer.answer(b'{"blocks":["a"]}')
        assert len(set(await asyncio.gather(*waiting))) == 1
    finally:
        await renderer.ended()


def test_the_server_imports_nothing_that_renders() -> None:
    program = "import sys, redline.api.app, redline.cli; print({'nh3', 'latex2mathml'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout == "set()\n"
