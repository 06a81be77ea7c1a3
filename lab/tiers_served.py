"""Conversations of several turns over HTTP, more than the prefix cache holds: with and without host memory as offload
tier.

Two servers of the same model run side by side, and each request goes to both, one after the other, so that a
disturbance of the machine slows both. A conversation's next turn follows after a turn of all others, by when the cache
has evicted it. The answers of the two servers must be equal.
"""

import http.client
import json
import random
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lab.trees import ROOT, Server, Tree, commit_of
from redline import clock
from redline.errors import RedlineError
from redline.model.k2.config import K2Config
from redline.worker.engine import kv_dtype_of

CONVERSATIONS = 5
FIRST, TURN = 420, 60  # words of a conversation's first message, and of each further one
ANSWER = 16  # tokens
OF_A_WORD = 3  # maximum tokens per word, including the template's
HELD = 1.5  # conversations for which the cache has room
LIMIT_S = 90.0  # time limit of all turns; results until then are reported
REQUEST_S = 60.0
WORDS = ("river", "house", "sea", "mill", "bridge", "stone", "path", "wind", "rain", "tree", "bird", "hill", "field")


def served_turns(folder: Path, device: str, turns: int, seed: int) -> dict[str, Any]:
    """TTFT in ms of the first turns and of the returning ones, at each server. turns: of each conversation.

    Raises RedlineError if a server does not start, refuses a request, or gives another answer than the other one.
    """
    draw, words = random.Random(seed), FIRST + turns * TURN
    longest = OF_A_WORD * words + turns * (ANSWER + 32)
    of_token = K2Config.from_folder(folder).kv_bytes_per_token(kv_dtype_of("bf16"))
    flags = ["--device", device, "--max-model-len", str(longest), "--kv-memory", str(round(HELD * longest * of_token))]
    room = 2 * CONVERSATIONS * longest * of_token
    ways = {"none": flags, "host_memory": [*flags, "--set", f"engine.host_memory={room}"]}
    talks: list[list[dict[str, str]]] = [[] for _ in range(CONVERSATIONS)]
    first: dict[str, list[float]] = {name: [] for name in ways}
    returning: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(prefix="redline-served-") as name:
        servers: dict[str, Server] = {}
        try:
            for way, said in ways.items():
                servers[way] = Server(Tree(".", ROOT, commit_of(ROOT)), [str(folder), *said], Path(name))
            for server in servers.values():
                server.until_ready()
            until = clock.monotonic() + LIMIT_S
            for turn in range(turns):
                for talk in talks:
                    if clock.monotonic() > until:
                        break
                    talk.append({"role": "user", "content": _words(draw, FIRST if turn == 0 else TURN)})
                    answers: dict[str, str] = {}
                    for way, server in sorted(servers.items(), key=lambda _: draw.random()):
                        ms, answers[way] = _first_token(server.port, talk)
                        (returning if turn else first)[way].append(ms)
                    if len(set(answers.values())) > 1:
                        raise RedlineError(f"the servers answer differently: {answers}")
                    talk.append({"role": "assistant", "content": answers["none"]})
            metrics = _tier_metrics(servers["host_memory"].port)
        finally:
            for server in servers.values():
                server.close()
    ratios = [here / there for here, there in zip(returning["host_memory"], returning["none"], strict=True)]
    return {
        "conversations": CONVERSATIONS,
        "turns": turns,
        "cache_holds_conversations": HELD,
        **{f"first_{way}": _figures(ms) for way, ms in first.items()},
        **{f"returning_{way}": _figures(ms) for way, ms in returning.items()},
        "of_none": round(median(ratios), 4) if ratios else None,
        "worst_of_none": round(max(ratios), 4) if ratios else None,
        "metrics": metrics,
    }


def _words(draw: random.Random, number: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(number))


def _figures(ms: Sequence[float]) -> dict[str, Any]:
    return {"median_ms": round(median(ms), 1), "ms": [round(one, 1) for one in ms]} if ms else {"ms": []}


def _first_token(port: int, talk: Sequence[dict[str, str]]) -> tuple[float, str]:
    """Milliseconds to the first token of a chat, and its answer. Raises RedlineError if it is refused."""
    body = {
        "messages": list(talk),
        "max_tokens": ANSWER,
        "temperature": 0,
        "stream": True,
        "thinking": {"type": "disabled"},
    }
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_S)
    try:
        began, came, answer = clock.perf_counter(), 0.0, ""
        link.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = link.getresponse()
        if response.status != 200:
            raise RedlineError(f"a chat was refused: {response.read()[:500]!r}")
        for line in response:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if text := choice["delta"].get("content"):
                        came, answer = came or clock.perf_counter(), answer + text
    except (OSError, http.client.HTTPException) as error:
        raise RedlineError(f"a chat has failed: {error}") from None
    finally:
        link.close()
    return 1e3 * ((came or clock.perf_counter()) - began), answer


def _tier_metrics(port: int) -> dict[str, float]:
    """The server's metrics of its tiers, a second after the last answer, by when its worker has published them."""
    clock.sleep(1.0)
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_S)
    try:
        link.request("GET", "/metrics")
        text = link.getresponse().read().decode()
    finally:
        link.close()
    found = re.findall(r"^redline:(tier_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE)
    return {
        f"{name} {_labels(labels)}": float(f"{float(value):.5g}")
        for name, labels, value in found
        if not name.endswith("_created")
    }


def _labels(text: str) -> str:
    told = dict(re.findall(r'(\w+)="([^"]*)"', text))
    return " ".join(told[key] for key in ("tier", "of", "result") if key in told)
