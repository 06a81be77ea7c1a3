"""The page in a real Chromium, at a served Kimi-Nano: `make test-browser`. Pictures are left in runs/page."""

import importlib.util
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
    assert tab.run("document.querySelectorAll('article.assistant .by-learned').length") > 0
    assert "drafter" in tab.run("document.querySelector('article.assistant .rate').textContent")
    assert tab.run("document.querySelector('details').open") is False, "the thinking is folded"
    tab.picture(PICTURES / "chat-coloured.png")
    tab.run("document.getElementById('colours').click()")
    ask(tab, "Write a Python function that adds two numbers.")
    assert "def" in tab.run(f"{answer}.querySelector('pre code').textContent")
    tab.picture(PICTURES / "chat.png")
    tab.run("location.reload()")
    tab.until("document.querySelectorAll('article.assistant').length === 2")


def test_an_answer_is_stopped_and_a_question_edited(tab: Tab):
    tab.run("document.getElementById('question').value = 'Count from 1 to 400.'")
    tab.run("document.getElementById('ask').requestSubmit()")
    tab.until("(document.querySelector('article.assistant')?.textContent.length ?? 0) > 40")
    tab.run("document.getElementById('stop').click()")
    tab.until("!document.getElementById('send').hidden")
    tab.run("document.querySelector('article.user .tools button').click()")
    assert tab.run("document.getElementById('question').value") == "Count from 1 to 400."
    assert tab.run("document.querySelectorAll('article').length") == 0


def test_the_engine_is_watched(tab: Tab):
    ask(tab, "What is 12 + 30?")
    tab.run("document.getElementById('show-engine').click()")
    tab.until("document.querySelectorAll('#positions meter').length === 3")
    assert tab.run("document.querySelectorAll('#holders tr').length") == 3
    assert "Ready." in tab.run("document.getElementById('engine-status').textContent")
    tab.until("document.querySelectorAll('#steps tr').length === 2")
    said = tab.run("[...document.querySelectorAll('#steps tr')].map((one) => one.innerText)")
    assert all(re.search(r"step [\d.]+ ms, floor [\d.]+ ms, \d+ %, at [\d.]+ GB/s", line) for line in said), said
    assert {re.split(r"[:\t]", line)[1].strip() for line in said} == {"answers alone", "with prompts"}
    tab.picture(PICTURES / "engine.png")


def test_steps_stand_beside_their_floor_live(tab: Tab):
    """A made-up stream: its first event tells all since the start, later ones the newest steps, and a worker that has
    started again begins anew."""
    sums = [(2, 0.020, 0.010), (4, 0.060, 0.042), (4, 0.060, 0.042), (1, 0.005, 0.004)]
    views = [
        {"ready": True, "trouble": None, "queue": {"jobs": 0, "tokens": 0}, "running": 0, "workers": [
            {"name": "one", "role": "both", "ready": True, "read_bytes_per_s": 2e9, "load": {
                "accepted_per_pos": [], "pages_used": 0, "pages_cached": 0, "pages_total": 1, "generation_tokens": 0,
                "step_times": [{"kind": "decode", "steps": steps, "seconds": seconds, "floor_s": floor}]}}]}
        for steps, seconds, floor in sums
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
    tab.until("window.seen.length === 4")
    assert tab.run("window.seen") == [
        "step 10.0 ms, floor 5.0 ms, 50 %, at 2.0 GB/s",
        "step 20.0 ms, floor 16.0 ms, 80 %, at 2.0 GB/s",
        "step 20.0 ms, floor 16.0 ms, 80 %, at 2.0 GB/s",
        "step 5.0 ms, floor 4.0 ms, 80 %, at 2.0 GB/s",
    ]
    assert tab.run("document.querySelector('#steps meter').value") == pytest.approx(0.8)


AXE = """axe.run().then(({ violations }) => violations.map(({ id, impact, nodes }) =>
    [id, impact, nodes.map(({ target, failureSummary }) => `${target} ${failureSummary}`)]))"""
HOSTILE = r"""<img src=x onerror="window.acted=1"> [a](javascript:window.acted=1) **<script>window.acted=1</script>**
[b](https://x.example/\"onclick=\"window.acted=1)

- <b onmouseover="window.acted=1">x</b>

```html
</code></pre><script>window.acted=1</script>
```"""


def test_hostile_markdown_is_text(tab: Tab):
    script = f"""import('/page/markdown.js').then(({{show}}) => {{
        const box = document.createElement('div'); document.body.append(box); show(box, {json.dumps(HOSTILE)});
        for (const one of box.querySelectorAll('*')) one.dispatchEvent(new MouseEvent('mouseover'));
        return [...box.querySelectorAll('*')].map((one) => [one.localName, one.getAttributeNames().join()]);
    }})"""
    found = tab.run(script)
    assert {name for name, _ in found} <= {"p", "strong", "a", "ul", "li", "pre", "code", "br"}
    assert all(set(names.split(",")) <= {"", "href", "rel", "target", "tabindex"} for _, names in found)
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


STREAM = """(async (rate, seconds) => {
  const real = window.fetch;
  const encoder = new TextEncoder();
  const words = "one two **three** `four` five six seven eight nine ten\\n".split(/(?<= )/);
  const answers = (path) => `${path}`.includes("completions");
  window.fetch = async (path, how) => !answers(path) ? real(path, how) : new Response(new ReadableStream({
    start(out) {
      const began = performance.now();
      let sent = 0;
      const timer = setInterval(() => {
        const due = Math.min(rate * seconds, Math.floor((performance.now() - began) * rate / 1000));
        for (; sent < due; sent += 1) {
          const [proposer, content] = [sent % 3 ? "learned" : "target", words[sent % words.length]];
          const usage = { completion_tokens: sent + 1 };
          const chunk = { choices: [{ index: 0, proposer, delta: { content } }], usage };
          out.enqueue(encoder.encode(`data: ${JSON.stringify(chunk)}\\n\\n`));
        }
        if (sent >= rate * seconds) { clearInterval(timer); out.close(); }
      }, 5);
    },
  }));
  const gaps = [];
  let last = performance.now();
  let go = true;
  const frame = (now) => { gaps.push(now - last); last = now; if (go) requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
  if (rate) {
    document.getElementById("question").value = "go";
    document.getElementById("ask").requestSubmit();
  }
  await new Promise((done) => setTimeout(done, seconds * 1000 + 500));
  go = false;
  window.fetch = real;
  const sorted = gaps.slice(2).sort((a, b) => a - b);
  const at = (share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
  return { frames: sorted.length, median: at(0.5), p99: at(0.99), longest: sorted.at(-1),
           late: sorted.filter((gap) => gap > 25).length / sorted.length };
})"""


@pytest.mark.parametrize("colours", [False, True])
def test_two_hundred_tokens_a_second_drop_no_frames(tab: Tab, colours: bool):
    """By the browser's own clock, beside the same page at rest. A frame is late where it comes 25 ms after the last."""
    if colours:
        tab.run("document.getElementById('colours').click()")
    rest = tab.run(f"{STREAM}(0, 4)")
    busy = tab.run(f"{STREAM}(200, 8)")
    print(json.dumps({"colours": colours, "at rest": rest, "at 200 tokens/s": busy}))
    assert tab.run("document.querySelector('article.assistant .text').textContent.length") > 5000
    assert busy["late"] <= rest["late"] + 0.01
