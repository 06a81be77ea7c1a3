"""Images of questions in a real Chromium, at a served tiny model with a vision tower."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.test_images import picture, serving
from tests.deploy.test_serve import Server
from tests_browser.chromium import Tab, chromium
from tests_browser.test_page import LOOKS, PICTURES

SHORT = {"max_tokens": "4", "temperature": "0", "thinking": False}
FUNCTIONS = """
    window.files = (given) => {
        const transfer = new DataTransfer();
        for (const [name, type, data] of given) {
            transfer.items.add(new File([Uint8Array.from(atob(data), (one) => one.charCodeAt(0))], name, { type }));
        }
        return transfer;
    };
    window.puts = {
        paste: (at, clipboardData) => new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }),
        drop: (at, dataTransfer) => new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }),
    };
    window.real ??= window.fetch;
    window.fetch = (path, how) => {
        if (`${path}`.includes("completions")) window.sent = JSON.parse(how.body);
        return real(path, how);
    };
"""
File = tuple[str, str, str]
RED: File = ("red.png", "image/png", picture())
BLUE: File = ("blue.jpg", "image/jpeg", picture("blue", (640, 400), "JPEG"))
GREEN: File = ("green.webp", "image/webp", picture("green", (60, 90), "WEBP"))
DAMAGED: File = ("cut.png", "image/png", picture()[:200])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("page")) as served:
        yield served


@pytest.fixture
def tab(server: Server, tmp_path: Path) -> Iterator[Tab]:
    with chromium(tmp_path) as one:
        one.look()
        one.open(server.url)
        one.run(f"localStorage.setItem('redline.settings', {json.dumps(json.dumps(SHORT))})")
        reload(one)
        yield one
        assert not one.errors


def reload(tab: Tab) -> None:
    tab.open(tab.run("location.href"))
    tab.until("document.getElementById('add-image')?.hidden === false")
    tab.run(FUNCTIONS)


def put(tab: Tab, how: str, *given: File, at: str = "#question") -> None:
    tab.run(f"""(() => {{
        const box = document.querySelector({json.dumps(at)});
        box.dispatchEvent(puts.{how}(box, files({json.dumps(given)})));
    }})()""")


def choose(tab: Tab, *given: File) -> None:
    """As the file dialog does, which "Add an image" opens."""
    tab.run(f"""(() => {{
        const input = document.getElementById("image-file");
        input.click = () => {{
            input.files = files({json.dumps(given)}).files;
            input.dispatchEvent(new Event("change"));
        }};
        document.getElementById("add-image").click();
    }})()""")


def ask(tab: Tab, text: str) -> list[dict[str, Any]]:
    """Send the question; returns the messages of the request."""
    tab.run(f"document.getElementById('question').value = {json.dumps(text)}")
    tab.run("document.getElementById('ask').requestSubmit()")
    return answered(tab)


def answered(tab: Tab) -> list[dict[str, Any]]:
    tab.until("document.getElementById('send').hidden === false && window.sent")
    return tab.run("(() => { const { messages } = window.sent; window.sent = null; return messages; })()")


def url(file: File) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{file[1]};base64,{file[2]}"}}


def seen(box: str) -> str:
    """How many thumbnails in the element the browser has decoded, as an expression."""
    return f"[...document.querySelectorAll('{box} img')].filter((one) => one.naturalWidth).length"


STORED = """(async (wanted) => {
    const kept = (request) => new Promise((done) => (request.onsuccess = () => done(request.result)));
    const database = await kept(indexedDB.open("redline"));
    while (await kept(database.transaction("images").objectStore("images").count()) !== wanted) {
        await new Promise((done) => setTimeout(done, 20));
    }
    return true;
})"""
ASKED = "#messages article.user"


def test_images_are_chosen_pasted_dropped_sent_and_kept(tab: Tab):
    choose(tab, RED)
    put(tab, "paste", BLUE)
    put(tab, "drop", GREEN, at="#messages")
    tab.until(f"{seen('#images')} === 3")
    for look, how in LOOKS.items():
        tab.look(**how)
        assert tab.run("document.documentElement.scrollWidth <= innerWidth")
        tab.picture(PICTURES / f"images-{look}.png")
    tab.look()
    tab.run("document.querySelector('#images [aria-label=\"Remove image 3\"]').click()")
    assert ask(tab, "What is in them?") == [
        {"role": "user", "content": [url(RED), url(BLUE), {"type": "text", "text": "What is in them?"}]}
    ]
    assert tab.run("document.getElementById('images').hidden")
    tab.until(f"{seen(ASKED)} === 2")
    assert tab.run("document.querySelectorAll('article.assistant').length") == 1
    tab.picture(PICTURES / "images.png")
    reload(tab)
    tab.until(f"{seen(ASKED)} === 2")
    assert "data:" not in tab.run("localStorage['redline.chats']")
    tab.run("document.querySelector('article.assistant .tools button:last-child').click()")
    assert answered(tab)[0]["content"][:2] == [url(RED), url(BLUE)], "asked again"

    tab.run("document.querySelector('article.user .tools button').click()")
    assert tab.run(seen(".editor")) == 2
    put(tab, "paste", GREEN, at=".editor textarea")
    tab.until(f"{seen('.editor')} === 3")
    tab.picture(PICTURES / "images-edited.png")
    tab.run("document.querySelector('.editor [aria-label=\"Remove image 1\"]').click()")
    tab.run("document.querySelector('.editor').requestSubmit()")
    assert answered(tab)[0]["content"][:2] == [url(BLUE), url(GREEN)]
    assert tab.run("document.getElementById('images').hidden"), "what is dropped on an editor is the edited question's"


def test_a_deleted_chat_comes_back_with_its_images_and_exports_hold_them(tab: Tab):
    put(tab, "paste", RED)
    tab.until(f"{seen('#images')} === 1")
    assert ask(tab, "") == [{"role": "user", "content": [url(RED)]}]
    reload(tab)
    tab.run("document.querySelector('#chat-list [aria-label^=Delete]').click()")
    assert tab.run(f"{STORED}(0)")
    tab.run("document.getElementById('undo').click()")
    assert tab.run(f"{STORED}(1)")
    reload(tab)
    tab.until(f"{seen(ASKED)} === 1")
    text = tab.run("""new Promise((done) => {
        URL.createObjectURL = (blob) => (blob.text().then(done), "#");
        document.getElementById("export").click();
    })""")
    assert json.loads(text)["chats"][0]["messages"][0]["images"] == [url(RED)["image_url"]["url"]]
    found = tab.run(f"import('/page/store.js').then(({{ imported }}) => imported({json.dumps(text)}))")
    assert found[0]["messages"][0]["images"][0]["url"] == url(RED)["image_url"]["url"]
    wrong = text.replace("data:image/png", "https://a.example/")
    told = tab.run(f"""import('/page/store.js').then(({{ imported }}) => imported({json.dumps(wrong)}))
        .catch((error) => error.message)""")
    assert told.startswith("chats[0].messages[0].images")


def test_an_error_about_an_image_is_at_its_question(tab: Tab):
    put(tab, "paste", RED)
    tab.until("document.querySelectorAll('#images img').length === 1")
    put(tab, "paste", DAMAGED)
    tab.until("document.querySelectorAll('#images img').length === 2")
    ask(tab, "What is in them?")
    tab.until("document.querySelector('article.user .ended')")
    tab.picture(PICTURES / "images-refused.png")
    assert "messages[0].content[1].image_url" in tab.run("document.querySelector('article.user .ended').textContent")
    assert tab.run("document.querySelector('article.user .wrong img').alt") == "Image 2"
    tab.run("document.querySelector('article.user .tools button').click()")
    tab.run("document.querySelector('.editor [aria-label=\"Remove image 2\"]').click()")
    tab.run("document.querySelector('.editor').requestSubmit()")
    answered(tab)
    tab.until("document.querySelectorAll('article.assistant').length === 1")
    assert not tab.run("document.querySelector('article.user .ended')")
    put(tab, "drop", ("a.pdf", "application/pdf", "JVBERi0="))
    tab.until("document.getElementById('status').textContent.startsWith('a.pdf is not a PNG')")
    tab.errors.clear()  # the browser logs the 400


def test_the_oldest_images_are_dropped_beyond_the_bound(tab: Tab):
    put(tab, "paste", RED)
    tab.until(f"{seen('#images')} === 1")
    ask(tab, "red?")
    tab.run("""import('/page/images.js').then(({ MOST_BYTES }) => {
        const chats = JSON.parse(localStorage['redline.chats']);
        chats[0].messages[0].images[0].bytes = MOST_BYTES;
        localStorage['redline.chats'] = JSON.stringify(chats);
    })""")
    reload(tab)
    put(tab, "paste", BLUE)
    tab.until(f"{seen('#images')} === 1")
    messages = ask(tab, "blue?")
    assert (messages[0]["content"], messages[2]["content"][0]) == ("red?", url(BLUE))
    assert tab.run("document.getElementById('notice').textContent").startswith("1 of the oldest images dropped")
    assert tab.run("document.querySelector('article.user .ended').textContent") == "An image is not stored any more."
    assert tab.run(f"{STORED}(1)")


def test_a_browser_without_room_drops_the_oldest_image_and_keeps_the_newest(tab: Tab):
    tab.run("""(() => {
        const put = IDBObjectStore.prototype.put;
        IDBObjectStore.prototype.put = function (value, key) {
            window.full = (window.full ?? 0) + 1;
            if (full > 1 && full < 4) throw new DOMException("full", "QuotaExceededError");
            return put.call(this, value, key);
        };
    })()""")
    put(tab, "paste", RED)
    tab.until(f"{seen('#images')} === 1")
    ask(tab, "red?")
    put(tab, "paste", BLUE)
    tab.until(f"{seen('#images')} === 1")
    ask(tab, "blue?")
    tab.until("window.full === 4")
    ask(tab, "and?")
    assert tab.run(f"{STORED}(1)")
    reload(tab)
    tab.until(f"{seen(ASKED)} === 1")
    assert tab.run(f"document.querySelector('{ASKED} .ended').textContent") == "An image is not stored any more."
