"""The page in a real Chromium, at a served Kimi-Nano: `make test-browser`. Pictures are left in runs/page."""

import importlib.util
import itertools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests_browser.chromium import Tab, chromium

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "runs" / "page"
LOOKS = {"light": {}, "dark": {"dark": True}, "phone": {"width": 390, "height": 800, "dark": True}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    words = ["serve", "--nano", "--port", "0", "--log-level", "warning", "--kv-memory", "200MB"]
    server = subprocess.Popen([sys.executable, "-m", "redline", *words], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None
    stop = threading.Timer(600, server.kill)
    stop.start()
    try:
        found = next(filter(None, (re.search(r"ready at (http://\S+)", line) for line in server.stdout)))
        reader = threading.Thread(target=server.stdout.read)
        reader.start()
        yield found[1]
        server.terminate()
        assert server.wait(30) == 0
        reader.join(10)
    finally:
        stop.cancel()
        server.kill()
        server.stdout.close()


@pytest.fixture
def tab(url: str, tmp_path: Path) -> Iterator[Tab]:
    with chromium(tmp_path) as one:
        one.look()
        one.open(url)
        one.until("document.getElementById('model').textContent === 'kimi-nano'")
        yield one
        assert not one.errors


def ask(tab: Tab, question: str) -> None:
    tab.run(f"document.getElementById('question').value = {json.dumps(question)}")
    tab.run("document.getElementById('ask').requestSubmit()")
    tab.until("document.getElementById('send').hidden")
    tab.until("!document.getElementById('send').hidden")


def test_a_chat_is_answered_coloured_and_kept(tab: Tab):
    tab.run("document.getElementById('colours').click()")
    ask(tab, "What is 347 + 586?")
    answer = "[...document.querySelectorAll('article.assistant .text')].at(-1)"
    assert "933" in tab.run(f"{answer}.textContent")
    assert tab.run("CSS.highlights.get('by-learned').size") > 0
    assert "drafter" in tab.run("document.querySelector('article.assistant .rate').textContent")
    assert tab.run("document.querySelector('details').open") is False, "the thinking is folded"
    tab.picture(PICTURES / "chat-coloured.png")
    tab.run("document.getElementById('colours').click()")
    ask(tab, "Write a Python function that adds two numbers.")
    tab.until(f"{answer}.querySelector('pre code')")
    assert "def" in tab.run(f"{answer}.querySelector('pre code').textContent")
    assert tab.run(f"{answer}.querySelectorAll('.c-k').length") > 0, "code is highlighted"
    tab.picture(PICTURES / "chat.png")
    tab.run("location.reload()")
    tab.until("document.querySelectorAll('article.assistant').length === 2")


def test_a_model_without_a_vision_tower_is_offered_no_images(tab: Tab):
    assert tab.run("document.getElementById('add-image').hidden")
    taken = tab.run("""(() => {
        const clipboardData = new DataTransfer();
        clipboardData.items.add(new File(["x"], "a.png", { type: "image/png" }));
        const paste = new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true });
        document.getElementById("question").dispatchEvent(paste);
        return paste.defaultPrevented;
    })()""")
    assert not taken


def test_two_tabs_keep_each_others_chats(tab: Tab, url: str):
    other = tab.another()
    other.open(url)
    other.until("document.getElementById('model').textContent === 'kimi-nano'")
    titles = "[...document.querySelectorAll('#chat-list button:first-child')].map((one) => one.textContent)"
    ask(tab, "What is 1 + 1?")
    other.until(f"{titles}.includes('What is 1 + 1?')")
    ask(other, "What is 2 + 2?")
    ask(tab, "What is 3 + 3?")
    for one in (tab, other):
        one.open(url)
        assert sorted(one.run(titles)) == ["What is 1 + 1?", "What is 2 + 2?"]
    kept = "JSON.parse(localStorage['redline.chats']).map((one) => one.messages.length).sort()"
    assert tab.run(kept) == [2, 4]


def test_an_answer_is_stopped_and_a_question_edited(tab: Tab):
    tab.run("document.getElementById('question').value = 'Count from 1 to 400.'")
    tab.run("document.getElementById('ask').requestSubmit()")
    tab.until("(document.querySelector('article.assistant')?.textContent.length ?? 0) > 40")
    tab.run("document.getElementById('stop').click()")
    tab.until("!document.getElementById('send').hidden")
    assert tab.run("document.querySelector('article.assistant .ended').textContent") == "Stopped."
    edit = "document.querySelector('article.user .tools button').click()"
    field = "document.querySelector('article.user textarea')"
    for leave in (
        "[...document.querySelectorAll('article.user button')].at(-1).click()",
        f"{field}.dispatchEvent(new KeyboardEvent('keydown', {{ key: 'Escape', bubbles: true }}))",
    ):
        tab.run(edit)
        assert tab.run(f"document.activeElement === {field}")
        assert tab.run(f"{field}.value") == "Count from 1 to 400."
        tab.run(leave)
        assert tab.run(f"{field} === null")
        assert tab.run("document.querySelectorAll('article').length") == 2, "nothing is lost"
    tab.run(edit)
    tab.run(f"{field}.value = 'What is 12 + 30?'; {field}.form.requestSubmit()")
    tab.until("!document.getElementById('send').hidden")
    assert tab.run("document.querySelector('article.user .text').textContent") == "What is 12 + 30?"
    assert tab.run("document.querySelectorAll('article').length") == 2
    assert tab.run("document.querySelector('article.assistant .ended').hidden")


def test_colours_move_nothing(tab: Tab):
    ask(tab, "Write a Python function that adds two numbers.")
    tab.until("document.querySelector('.rendered pre')")
    places = """[...document.querySelectorAll('body *')].map((one) => {
        const box = one.getBoundingClientRect(); return [box.x, box.y, box.width, box.height].join(); }).join(' ')"""
    before = tab.run(places)
    tab.run("document.getElementById('colours').click()")
    assert tab.run("[...CSS.highlights.values()].reduce((sum, one) => sum + one.size, 0)") > 0
    assert tab.run(places) == before
    tab.run("document.getElementById('colours').click()")
    assert tab.run("[...CSS.highlights.values()].reduce((sum, one) => sum + one.size, 0)") == 0


def test_a_deleted_chat_comes_back(tab: Tab):
    ask(tab, "What is 12 + 30?")
    tab.run("document.querySelector('#chat-list [aria-label^=Delete]').click()")
    assert tab.run("document.querySelectorAll('article').length") == 0
    assert "What is 12 + 30?" in tab.run("document.getElementById('notice').textContent")
    tab.run("document.getElementById('undo').click()")
    assert tab.run("document.querySelectorAll('article').length") == 2
    assert tab.run("document.getElementById('notice').hidden")
    assert len(json.loads(tab.run("localStorage.getItem('redline.chats')"))) == 1


def test_settings_are_sent_and_kept_and_wrong_ones_are_named(tab: Tab):
    given = {"temperature": "0.5", "top_p": "0.9", "top_k": "7", "min_p": "0.1", "presence_penalty": "0.2"}
    given |= {"frequency_penalty": "0.3", "repetition_penalty": "1.1", "seed": "3", "max_tokens": "9", "stop": "a b\nc"}
    tab.run(f"""(() => {{
        const form = document.getElementById('settings-form');
        window.set = (name, value) => {{
            form.elements[name].value = value;
            form.elements[name].dispatchEvent(new Event('change', {{ bubbles: true }}));
        }};
        for (const [name, value] of Object.entries({json.dumps(given)})) set(name, value);
        const real = window.fetch;
        window.fetch = (path, how) => {{
            if (`${{path}}`.includes('completions')) window.sent = JSON.parse(how.body);
            return real(path, how);
        }};
    }})()""")
    ask(tab, "What is 12 + 30?")
    sent = tab.run("window.sent")
    assert {name: sent[name] for name in given} == {
        **{name: float(value) for name, value in given.items() if name != "stop"},
        "stop": ["a b", "c"],
    }
    tab.run("set('temperature', '5')")
    wrong = "document.querySelector('#settings-form .wrong').textContent"
    assert tab.run(wrong).startswith("Temperature: ")
    tab.run("set('temperature', '')")
    assert tab.run("document.querySelector('#settings-form .wrong') === null")
    tab.run("set('stop', 'x'.repeat(2000))")
    tab.run("document.getElementById('question').value = 'go'; document.getElementById('ask').requestSubmit()")
    tab.until("document.getElementById('status').classList.contains('wrong')")
    assert "stop" in tab.run("document.getElementById('status').textContent")
    assert "stop" in tab.run(wrong), "the server's error is at its field"
    tab.errors.clear()  # the browser logs the 400
    tab.run("window.before = true; location.reload()")
    tab.until("!window.before && document.getElementById('model')?.textContent === 'kimi-nano'")
    values = "[...document.getElementById('settings-form').elements].map(({ name, value }) => [name, value])"
    kept = dict(tab.run(values))
    assert {name: kept[name] for name in given} == given | {"temperature": "", "stop": "x" * 2000}


def test_chats_are_exported_and_imported(tab: Tab):
    ask(tab, "What is 12 + 30?")
    stored = json.loads(tab.run("localStorage.getItem('redline.chats')"))
    text = tab.run(
        "import('/page/store.js').then(({ exported }) => exported(JSON.parse(localStorage['redline.chats'])).text())"
    )
    assert json.loads(text)["chats"] == stored
    put = """((text) => {
        const files = new DataTransfer();
        files.items.add(new File([text], 'chats.json'));
        document.getElementById('notice').hidden = true;
        document.getElementById('import-file').files = files.files;
        document.getElementById('import-file').dispatchEvent(new Event('change'));
    })"""
    told = "document.getElementById('notice').firstElementChild.textContent"

    def import_(file: str) -> str:
        tab.run(f"{put}({json.dumps(file)})")
        tab.until("!document.getElementById('notice').hidden")
        return tab.run(told)

    assert import_(text) == "0 of 1 chats imported; 1 already existed."
    assert import_(text.replace(stored[0]["id"], "other")) == "1 of 1 chats imported."
    assert tab.run("document.querySelectorAll('#chat-list li').length") == 2
    assert "not JSON" in import_("{")
    assert 'format is not "redline.chats"' in import_("{}")
    wrong = json.loads(text)
    wrong["chats"][0]["messages"][1]["role"] = "system"
    assert "chats[0].messages[1].role is not" in import_(json.dumps(wrong))
    assert tab.run("document.querySelectorAll('#chat-list li').length") == 2


def test_an_answers_rate_is_that_of_the_servers_clock(tab: Tab):
    """Made-up streams that arrive at once: the rate is of the times that the server tells, and none is told of less
    than a second."""

    def rate(*pieces: tuple[int, float]) -> str:
        chunks = [
            {
                "choices": [{"index": 0, "proposer": "target", "elapsed_ms": ms, "delta": {"content": "a "}}],
                "usage": {"completion_tokens": tokens},
            }
            for tokens, ms in pieces
        ]
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        tab.run(f"""(() => {{
            const real = window.fetch;
            window.fetch = async (path, how) => {{
                if (!`${{path}}`.includes('completions')) return real(path, how);
                window.fetch = real;
                return new Response({json.dumps(body)});
            }};
        }})()""")
        tab.run("document.getElementById('question').value = 'go'; document.getElementById('ask').requestSubmit()")
        tab.until("!document.getElementById('send').hidden")
        return tab.run("[...document.querySelectorAll('.rate')].at(-1).textContent")

    assert "1,000 tokens in 0.05 s, first after" in rate((1, 40.0), (1000, 50.0))
    assert "201 tokens, 100 tokens/s, first after" in rate((1, 100.0), (50, 100.5), (201, 2100.0))


def test_a_block_is_text_until_it_is_finished(tab: Tab):
    """What the page takes for finished never changes with what follows."""
    text = (
        "# A\n\na *b*\n\n- c\n\n  ```\n  d\n\n  e\n  ```\n- f\n\n$$\nx\n\ny\n$$\n```py\nz\n\n```\n| g |\n|--|\n\nlast"
    )
    found = tab.run(f"""import('/page/markdown.js').then(({{ blocks }}) => {{
        const text = {json.dumps(text)};
        return Array.from({{ length: text.length + 1 }}, (_, end) =>
            blocks(text.slice(0, end), false).filter(({{ finished }}) => finished).map(({{ source }}) => source));
    }})""")
    for shorter, longer in itertools.pairwise(found):
        assert longer[: len(shorter)] == shorter
    assert found[-1] == [
        "# A", "a *b*", "- c\n\n  ```\n  d\n\n  e\n  ```\n- f", "$$\nx\n\ny\n$$", "```py\nz\n\n```", "| g |\n|--|"
    ]  # fmt: skip


def test_the_engine_is_watched(tab: Tab):
    ask(tab, "What is 12 + 30?")
    tab.run("document.getElementById('show-engine').click()")
    tab.until("document.querySelectorAll('#positions meter').length === 3")
    assert tab.run("document.querySelectorAll('#holders tr').length") == 3
    assert "Ready." in tab.run("document.getElementById('engine-status').textContent")
    tab.until("document.querySelectorAll('#steps tr').length === 2")
    said = tab.run("[...document.querySelectorAll('#steps tr')].map((one) => one.innerText)")
    assert all(re.search(r"step [\d.]+ ms, floor [\d.]+ ms, \d+ %, at [\d.]+ GB/s", line) for line in said), said
    assert {re.split(r"[:\t]", line)[1].strip() for line in said} == {"decode only", "with prefill"}
    tab.until("document.querySelectorAll('#charts path.line-0[d^=M]').length === 6")
    said = tab.run("[...document.querySelectorAll('#charts svg[role]')].map((one) => one.getAttribute('aria-label'))")
    assert [one.partition(":")[0] for one in said] == [
        "Tokens, per second", "Decode-only steps, ms", "Steps with prefill, ms", "Draft tokens accepted, %", "KV pages",
        "Queue, requests"
    ]  # fmt: skip
    tab.picture(PICTURES / "engine.png")


def test_steps_stand_beside_their_floor_live(tab: Tab):
    """A made-up stream: its first event tells all since the start, later ones the newest steps, and a worker that has
    started again begins anew."""
    sums = [(2, 0.020, 0.010), (4, 0.060, 0.042), (4, 0.060, 0.042), (1, 0.005, 0.004)]
    views = [
        {"at": 100.0 + at, "ready": True, "trouble": None, "queue": {"jobs": 0, "tokens": 0}, "running": 0, "workers": [
            {"name": "one", "role": "both", "ready": True, "read_bytes_per_s": 2e9, "load": {
                "accepted_per_pos": [], "pages_used": 0, "pages_cached": 0, "pages_total": 1, "generation_tokens": 0,
                "step_times": [{"kind": "decode", "steps": steps, "seconds": seconds, "floor_s": floor}]}}]}
        for at, (steps, seconds, floor) in enumerate(sums)
    ]  # fmt: skip
    tab.run(f"""(() => {{
        const real = window.fetch;
        window.seen = [];
        new MutationObserver(() => window.seen.push(document.querySelector('#steps td:last-child')?.textContent))
            .observe(document.querySelector('#steps tbody'), {{ childList: true }});
        window.fetch = async (path, how) => {{
            if (`${{path}}` !== "engine") return real(path, how);
            const views = {json.dumps(views)};
            return new Response(new ReadableStream({{ async start(to) {{
                for (const view of views) {{
                    to.enqueue(new TextEncoder().encode(`data: ${{JSON.stringify(view)}}\n\n`));
                    await new Promise((done) => setTimeout(done, 100));
                }}
            }} }}));
        }};
    }})()""")
    tab.run("document.getElementById('show-engine').click()")
    tab.run("window.seen.length = 0; document.dispatchEvent(new Event('visibilitychange'))")  # it asks anew
    tab.until("window.seen.length === 4")
    assert tab.run("window.seen") == [
        "step 10.0 ms, floor 5.0 ms, 50 %, at 2.0 GB/s",
        "step 20.0 ms, floor 16.0 ms, 80 %, at 2.0 GB/s",
        "step 20.0 ms, floor 16.0 ms, 80 %, at 2.0 GB/s",
        "step 5.0 ms, floor 4.0 ms, 80 %, at 2.0 GB/s",
    ]
    assert tab.run("document.querySelector('#steps meter').value") == pytest.approx(0.8)


RICH = (
    r"""## Two closed forms

The sum of the first $n$ numbers is $\frac{n(n+1)}{2}$, and of their squares:

$$
\sum_{k=1}^{n} k^2 = \frac{n(n+1)(2n+1)}{6}
$$

1. Write a function:
   - with **types**
     - and a *docstring*
   - as [the manual](https://docs.python.org/3/) has it
2. Test it.

> The second one was known to Archimedes.

| n | sum | squares |
|--:|----:|--------:|
| 10 | 55 | 385 |
| 100 | 5,050 | 338,350 |

```python
def squares(n: int) -> int:
    """
    + '"""The sum of k * k up to n."""'
    + r"""
    return n * (n + 1) * (2 * n + 1) // 6  # exact
```
"""
)
ANSWER = {"role": "assistant", "content": RICH, "reasoning": "A closed form."}
CHATS = [{"id": "rich", "messages": [{"role": "user", "content": "How do I add the first n squares?"}, ANSWER]}]
CUT = """[...document.querySelectorAll('body *')].filter((one) => one.checkVisibility() && !one.closest('aside, .wide')
    && one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).overflowX !== 'visible' && one.clientWidth > 1)
    .map((one) => one.outerHTML.slice(0, 200))"""
LOADED = """(async () => {
    for (let round = 1; round < 9; round += 1) {
        await Promise.all(["Tell me a story.", "Count from 1 to 100.", "Tell me a long story."].map((content) => fetch(
            "v1/chat/completions", { method: "POST", headers: { "Content-Type": "application/json" },
            body: JSON.stringify({ messages: [{ role: "user", content: `${content} ${round}` }],
            min_tokens: 60 * round, max_tokens: 600 }) }).then((answer) => answer.text())));
        await new Promise((done) => setTimeout(done, 700));
    }
})()"""


def test_nothing_is_cut_at_any_width(tab: Tab):
    """And the pictures of docs/metrics.md."""
    tab.run(f"localStorage.setItem('redline.chats', {json.dumps(json.dumps(CHATS))})")
    tab.run("window.before = true; location.reload()")
    tab.until("!window.before && document.querySelectorAll('.rendered').length > 6")
    tab.until("!document.querySelector('.plain')")
    tab.run(LOADED)
    for width, height in ((1280, 960), (390, 844)):
        tab.look(width=width, height=height)
        for view in ("chat", "settings", "engine"):
            tab.run(f"document.getElementById('show-{view}').click()")
            tab.until("document.getElementById('engine').hidden || document.querySelectorAll('#workers tr').length")
            assert tab.run("document.documentElement.scrollWidth <= innerWidth")
            assert tab.run(CUT) == []
            tab.run("document.getElementById('messages').scrollTop = 0")
            if view == "engine" and width < 500:
                tab.run("document.querySelector('#charts').scrollIntoView()")
            if view == "chat" and width < 500:
                tab.run("document.getElementById('messages').scrollTop = 170")
            tab.picture(PICTURES / f"{view}-{width}.png")


AXE = """axe.run().then(({ violations }) => violations.map(({ id, impact, nodes }) =>
    [id, impact, nodes.map(({ target, failureSummary }) => `${target} ${failureSummary}`)]))"""
HOSTILE = r"""<img src=x onerror="window.acted=1"> [a](javascript:window.acted=1) **<script>window.acted=1</script>**
[b](https://x.example/\"onclick=\"window.acted=1)

- <b onmouseover="window.acted=1">x</b>

```html
</code></pre><script>window.acted=1</script>
```"""


def test_hostile_markdown_is_text(tab: Tab):
    tab.run(f"""import('/page/markdown.js').then(({{ show }}) => {{
        window.box = document.createElement('div'); document.body.append(box); show(box, {json.dumps(HOSTILE)}, true);
    }})""")
    tab.until("box.childElementCount && !box.querySelector('.plain')")
    found = tab.run("""(() => {
        for (const one of box.querySelectorAll('*')) one.dispatchEvent(new MouseEvent('mouseover'));
        return [...box.querySelectorAll('*')].map((one) => [one.localName, one.getAttributeNames().join()]);
    })()""")
    names = {"p", "strong", "a", "ul", "li", "pre", "code", "br", "div", "span", "button"}
    assert {name for name, _ in found} <= names
    allowed = {"", "href", "rel", "target", "tabindex", "class", "data-language", "type", "aria-label"}
    assert all(set(names.split(",")) <= allowed for _, names in found)
    assert tab.run("window.acted") is None


@pytest.mark.parametrize("look", LOOKS)
def test_axe_finds_nothing_serious(tab: Tab, look: str):
    package = importlib.util.find_spec("axe_playwright_python")
    assert package is not None
    assert package.origin is not None
    tab.look(**LOOKS[look])
    ask(tab, "Write a Python function that adds two numbers.")
    tab.run((Path(package.origin).parent / "axe.min.js").read_text() + "; 1")
    for view in ("chat", "engine", "settings"):
        tab.run(f"document.getElementById('show-{view}').click()")
        tab.until("document.getElementById('engine').hidden || document.querySelectorAll('#workers tr').length")
        tab.picture(PICTURES / f"{view}-{look}.png")
        section = f"document.getElementById('{view}')"
        assert tab.run(f"{section}.scrollWidth <= {section}.clientWidth"), f"{view} is wider than its window"
        found = tab.run(AXE)
        assert not [one for one in found if one[1] in ("serious", "critical")], view


STREAM = """(async (bursts, size) => {
  const real = window.fetch;
  const encoder = new TextEncoder();
  const words = "one two **three** `four` five six seven eight nine ten\\n".split(/(?<= )/);
  let out = null;
  window.fetch = async (path, how) => !`${path}`.includes("completions") ? real(path, how)
    : new Response(new ReadableStream({ start: (control) => { out = control; } }));
  const frame = () => new Promise(requestAnimationFrame);
  document.getElementById("question").value = "go";
  document.getElementById("ask").requestSubmit();
  while (!out) await frame();
  window.fetch = real;

  const text = document.querySelector("article.assistant .text");
  const put = { chars: 0, paints: 0, marks: 0 };
  const seen = new MutationObserver((records) => {
    for (const { target, addedNodes, oldValue } of records) {
      if (oldValue !== null) put.chars += target.data.length - oldValue.length;
      for (const node of addedNodes) put.chars += node.textContent.length;
    }
    put.paints += 1;
  });
  seen.observe(text, { subtree: true, childList: true, characterData: true, characterDataOldValue: true });
  for (const name of ["add", "delete"]) {
    const known = Highlight.prototype[name];
    Highlight.prototype[name] = function (...all) { put.marks += 1; return known.apply(this, all); };
  }
  let sent = 0;
  for (let burst = 0; burst < bursts; burst += 1) {
    const before = text.textContent.length;
    for (let one = 0; one < size; one += 1, sent += 1) {
      const [proposer, content] = [sent % 3 ? "learned" : "target", words[sent % words.length]];
      const chunk = { choices: [{ index: 0, proposer, delta: { content } }], usage: { completion_tokens: sent + 1 } };
      out.enqueue(encoder.encode(`data: ${JSON.stringify(chunk)}\\n\\n`));
    }
    while (text.textContent.length === before) await frame();
    await frame();
  }
  seen.disconnect();
  const shown = { ...put, text: text.textContent.length };
  out.close();
  return shown;
})"""


@pytest.mark.parametrize("colours", [False, True])
def test_a_delta_costs_no_more_the_longer_the_answer_is(tab: Tab, colours: bool):
    """Counted, so that a busy machine sees the same: what drawings put into the document, lay out and colour. A drawing
    has 10 deltas at 200 tokens a second."""
    if colours:
        tab.run("document.getElementById('colours').click()")
    bursts, size = 150, 10
    before = tab.counts()
    put = tab.run(f"{STREAM}({bursts}, {size})")
    laid_out = tab.counts()["LayoutCount"] - before["LayoutCount"]
    print(json.dumps({"colours": colours, "layouts": laid_out, **put}))
    assert put["text"] > 5000
    assert put["paints"] < 3 * bursts, "deltas that come together are drawn together"
    assert put["chars"] < 1.5 * put["text"], "what is shown is not put into the document again"
    assert laid_out < 3 * bursts, "the page is not laid out for each delta"
    assert (bursts < put["marks"] < 2 * bursts * size) if colours else put["marks"] == 0, "only what is new is coloured"
