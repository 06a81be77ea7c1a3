"""`redline profile` against a running server: the trace is complete, nests, names its lanes, has every request."""

import gzip
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from redline.model.k2.write import random_checkpoint
from tests import forked
from tests.deploy.test_serve import Server, wait_for
from tests.deploy.test_several import KEY, address, said
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("one")
    random_checkpoint(folder / "tiny", kernel_config(vocab_size=TINY_VOCAB))
    write_tiny_tokenizer(folder / "tiny")
    (folder / "keys.txt").write_text(f"{KEY}\n")
    (folder / "one.toml").write_text(
        'weights = "tiny"\nport = 0\nadmin_port = 0\nadmin_keys_file = "keys.txt"\n[engine]\nkv_memory = "20MB"\n'
        '[engine.speculation]\ntype = "suffix"\n'
    )
    server = Server(folder / "one.toml")
    try:
        server.until_ready()
        yield server
    finally:
        server.close()


def profiled(server: Server, seconds: str, *words: str, key: str = KEY) -> "subprocess.CompletedProcess[str]":
    return forked.run(
        [sys.executable, "-m", "redline", "profile", seconds, "--url", address(server), *words],
        capture_output=True, text=True, timeout=120, env={**os.environ, "REDLINE_ADMIN_KEY": key, "COLUMNS": "160"},
    )  # fmt: skip


def check(trace: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Its slices by (process, lane). Checks that each lane nests, as Chrome's trace format requires."""
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    named = {(e["pid"], e["name"]): e["args"]["name"] for e in events if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(set(lanes.values())) <= len(lanes)
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0, event
            assert event["dur"] >= 0, event
            assert event["name"], event
            found[named[event["pid"], "process_name"], lanes[event["pid"], event["tid"]]].append(event)
        elif event["ph"] == "C":
            assert isinstance(event["args"]["ms"], int | float)
    for slices in found.values():
        open_until: list[float] = []
        for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= event["ts"] + 0.002:  # times are rounded to a nanosecond
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1] + 0.002, event
            open_until.append(end)
    return found


def test_a_trace_has_every_request_of_its_window(one: Server, tmp_path: Path) -> None:
    out, over, asked = tmp_path / "trace.json.gz", threading.Event(), list[str]()

    def ask() -> None:
        while not over.is_set():
            asked.append(f"request-{len(asked)}")
            said(one, f"say {len(asked)} things of pages " * 4, asked[-1])

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        wait_for(lambda: len(asked) > 2, one)
        for seconds in (2, 10, 60):  # until the window contains complete requests
            done = profiled(one, str(seconds), "--out", str(out))
            assert done.returncode == 0, done.stderr
            assert "requests in" in done.stdout
            trace = json.loads(gzip.decompress(out.read_bytes()))
            told = trace["otherData"]
            assert told["left_out"] == {}
            assert told["notes"] == []
            assert told["window_ms"] >= 1000 * seconds - 10
            if told["requests"] >= 4:  # one under way at the start, one at the end, and some between
                break
    finally:
        over.set()
        asking.join(LIMIT_S)
    lanes = check(trace)
    requests = [e for (process, _), slices in lanes.items() if process == "API" for e in slices if "id" in e["args"]]
    ids = [event["args"]["id"] for event in requests]
    assert len(ids) == len(set(ids)) == told["requests"]
    numbers = sorted(int(id.removeprefix("request-")) for id in ids)
    assert numbers == list(range(numbers[0], numbers[-1] + 1)), "one request is missing"
    assert len(numbers) >= 2
    whole = [event for event in requests if event["args"]["ended"]]
    assert all((event["args"]["status"], event["args"]["tokens"]) == (200, 40) for event in whole)
    names = [event["name"] for event in lanes["API", "requests 1"]]
    for part in ("read", "parse", "tokenise", "queue", "first token", "stream"):
        assert part in names, part
    assert lanes["API", "event loop: messages of workers"]
    steps = lanes["worker", "steps"]
    assert {"rows", "positions", "prompts", "shape", "waited_ms"} <= steps[0]["args"].keys()
    within = told["window_begins_ms"] * 1000
    assert all(within <= event["ts"] for event in steps), "both processes use one clock"
    # The step that prefilled a request lies between its arrival and its first token.
    fresh = [event for event in whole if event["ts"] > within]
    assert fresh
    for request in fresh:
        end = request["ts"] + request["dur"]
        stages = [e for (process, _), slices in lanes.items() if process == "API" for e in slices]
        stream = next(e for e in stages if e["name"] == "stream" and request["ts"] <= e["ts"] <= end)
        assert any(
            step["args"]["prompts"] and request["ts"] <= step["ts"] and step["ts"] + step["dur"] <= stream["ts"]
            for step in steps
        ), request
    for lane in ("planner", "loop", "runner", "kernels"):
        assert lanes["worker", lane], lane


def test_what_cannot_be_had_is_said_in_a_line(one: Server, tmp_path: Path) -> None:
    for seconds in ("0", "61", "nan"):
        done = profiled(one, seconds, "--out", str(tmp_path / "no"))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "error: seconds is not a number from 0.01 to 60\n"
    wrong = profiled(one, "1", "--out", str(tmp_path / "no"), key="sk-wrong")
    assert wrong.returncode == 1
    assert "Incorrect API key" in wrong.stderr
    assert profiled(one, "1", "--out", str(tmp_path)).stderr.endswith("is a folder; name a file in it\n")
    assert not (tmp_path / "no").exists()
