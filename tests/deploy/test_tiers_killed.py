"""A worker is killed while it writes pages to its disk: the next finds the complete ones, and answers the same."""

import os
import random
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

from openai import APIError, OpenAI

from tests.deploy.test_serve import Server, start, tiny, wait_for  # noqa: F401
from tests.waiting import LIMIT_S

PAGES = 12  # at least this many are on disk when it is killed


def answer(client: OpenAI, prompt: list[int]) -> str:
    done = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
    return done.choices[0].text


def counted(server: Server, series: str) -> float:
    """The sum of a series over the disk tier; 0 before the server reports it."""
    text = urlopen(f"{server.url}/metrics", timeout=LIMIT_S).read().decode()
    found = [line for line in text.splitlines() if re.match(f"redline:{series}", line) and 'tier="disk"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_a_worker_killed_while_it_writes_pages_leaves_those_that_were_whole(
    start: Callable[..., Server],  # noqa: F811
    tiny: Path,  # noqa: F811
    tmp_path: Path,
):
    engine = {"host_memory": "1MB", "disk": tmp_path / "pages", "disk_size": "64MB"}
    keys = [word for key, value in engine.items() for word in ("--set", f"engine.{key}={value}")]
    server = start(tiny, "--kv-memory", "1MB", "--max-model-len", "512", *keys).until_ready()
    client = server.client
    draw, done = random.Random(1), threading.Event()
    prompts = ([draw.randrange(200) for _ in range(400)] for _ in range(10_000))
    first = next(prompts)
    expected = answer(client, first)

    def fill() -> None:
        while not done.is_set():
            try:
                answer(client, next(prompts))
            except APIError:  # its worker was killed
                return

    filling = threading.Thread(target=fill)
    filling.start()
    try:
        wait_for(lambda: counted(server, r"tier_pages\{") >= PAGES, server)
        (killed,) = server.workers
        before = sizes(tmp_path / "pages")
        wait_for(lambda: sizes(tmp_path / "pages") > before, server)  # it writes pages
        os.kill(killed, signal.SIGKILL)
    finally:
        done.set()
        filling.join()
    wait_for(lambda: server.workers - {killed}, server)
    wait_for(lambda: counted(server, 'tier_pages_moved_total.*result="found"') >= PAGES, server)
    assert answer(client, first) == expected
    wait_for(lambda: counted(server, "tier_hit_tokens_total") > 0, server)


def sizes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.pages"))
