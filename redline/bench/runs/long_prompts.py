"""What the front end adds to the first token of a prompt of 100,000 tokens that is in every cache already.

    python -m redline.bench.runs.long_prompts --tokenizer FOLDER [--rounds 20]

An agent's next turn: the same long conversation with one message more. The engine's first token comes at once, so the
whole time to the first token, over a real socket, is the front end's: reading, rendering, encoding, naming pages, the
job's bytes. Client and server are two processes. Beside it stand the single stages and one thread of tiktoken over the
same text; and the ids with known texts are held against those without, on texts that were made to be cut badly.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import tiktoken
import uvloop
from starlette.types import ASGIApp

from redline import clock
from redline.api.app import create_app
from redline.api.config import ApiConfig, Defaults, Limits
from redline.api.gateway import Gateway
from redline.api.metrics import Metrics
from redline.api.openai import read_chat
from redline.bench.program import count, output, program
from redline.bench.runs.frontend import MODEL, Server, commit, machine
from redline.chat.conversation import Conversation
from redline.chat.hashing import make_job
from redline.chat.known import KnownTexts
from redline.chat.template import K2_6, render
from redline.chat.tokenizer import SPLIT, Tokenizer, read_ranks
from redline.errors import ConfigError
from redline.route.links import Link
from redline.wire.codec import Wire, encode
from redline.wire.delta import Delta
from redline.wire.job import Job, JobId, Sampling
from redline.wire.news import Ready

ROOT = Path(__file__).parents[3]
TOKENS = 100_000
MESSAGES = 60  # of the conversation
FILES = ("docs/*.md", "redline/api/*.py", "redline/chat/*.py", "redline/wire/*.py")  # the conversation's text
TEXTS = 3000  # that are made at random and encoded twice, to hold the ids together
EVALUATION = "models/kimi-nano/eval/*.jsonl"  # encoded twice as well
PIECES = (
    "\n",
    "\r\n",
    " ",
    "  ",
    "\t",
    "\u3000",
    "\u0085",
    "\x1c",
    "the",
    " and",
    "I'll",
    "'S",
    "x",
    "12",
    "3456",
    "!",
    " --",
    "_",
)
MORE_PIECES = ("你好", "é", "e\u0301", "\u0301", "🙂", "ß", "Ǆ", "ʰ", '{"a": 1}', "</", "<|im_end|>", "\\n", "A", "Zb")

T = TypeVar("T")


class InstantEngine:
    """Writes a job's bytes, as the wire does, and answers with one token at once. gateway: has to be set first."""

    def __init__(self, token: int) -> None:
        self._token = token
        self.gateway: Gateway | None = None
        self.link: Link | None = None

    def put(self, message: Wire) -> None:
        """Takes a job. Raises AssertionError for any other message."""
        assert isinstance(message, Job)
        assert self.gateway is not None
        assert self.link is not None
        encode(message)
        delta = Delta(job=message.id, tokens=(self._token,), finish="length", cached_tokens=len(message.tokens))
        asyncio.get_running_loop().call_soon(self.gateway.deliver, self.link, delta)


def front_end(tokenizer: Path) -> ASGIApp:
    """The app that serves, over an InstantEngine and the tokenizer of a checkpoint's folder."""
    opened = Tokenizer.open(tokenizer)
    (token,) = opened.encode(" the")
    engine = InstantEngine(token)
    gateway = engine.gateway = Gateway(opened, K2_6, Metrics(MODEL))
    engine.link = gateway.join("worker", engine)
    gateway.deliver(engine.link, Ready(max_model_len=1 << 18, pages=1 << 14, fingerprint="fake", summary="fake"))
    return create_app(gateway, ApiConfig(served_model_names=(MODEL,)))


def conversation(tokenizer: Tokenizer) -> list[dict[str, str]]:
    """Messages of TOKENS tokens together, a few more for their heads. Raises ConfigError where FILES hold fewer."""
    text = "\n\n".join(path.read_text() for pattern in FILES for path in sorted(ROOT.glob(pattern)))
    ids = tokenizer.encode(text)
    if len(ids) < TOKENS:
        raise ConfigError(f"{ROOT} has files of {len(ids)} tokens; {TOKENS} are needed")
    text = tokenizer.decode_bytes(ids[:TOKENS]).decode(errors="ignore")
    size = len(text) // MESSAGES + 1
    roles = ("user", "assistant")
    return [{"role": roles[place % 2], "content": text[place * size : (place + 1) * size]} for place in range(MESSAGES)]


def body_of(messages: list[dict[str, str]]) -> bytes:
    """A request that streams one token, with thinking off."""
    asked = {"model": MODEL, "stream": True, "max_tokens": 1, "thinking": {"type": "disabled"}}
    return json.dumps({**asked, "messages": messages}).encode()


async def first_token(port: int, body: bytes) -> float:
    """Seconds from the request's first byte to the first chunk with text. Raises ConnectionError without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    began = clock.perf_counter()
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    seen = b""
    while b'"content":" the"' not in seen:
        data = await reader.read(1 << 16)
        if not data:
            raise ConnectionError(f"the server closed before the first token: {seen[:300]!r}")
        seen += data
    took = clock.perf_counter() - began
    writer.close()
    return took


def seconds(rounds: int, work: Callable[[], T]) -> tuple[dict[str, float], T]:
    """Milliseconds of processor time of this thread, the least and the median; and what `work` returned last."""
    times: list[float] = []
    results: list[T] = []
    for _ in range(rounds):
        began = clock.thread_time()
        results = [work()]
        times.append((clock.thread_time() - began) * 1000)
    return {"least_ms": round(min(times), 3), "median_ms": round(statistics.median(times), 3)}, results[0]


def stages(tokenizer: Tokenizer, folder: Path, body: bytes, rounds: int) -> dict[str, Any]:
    """The processor time of each stage between a body and the job's bytes, and of tiktoken over the same text."""
    shown: dict[str, Any] = {}
    shown["read"], request = seconds(rounds, lambda: read_chat(body, Limits(), Defaults()))
    (prompt,) = request.ask.prompts
    assert isinstance(prompt, Conversation)
    pieces = list(render(prompt, K2_6, 1 << 24))
    known = KnownTexts(Limits().known_bytes)
    shown["encode"], ids = seconds(rounds, lambda: tokenizer.encode_pieces(pieces))
    shown["encode_known"], same = seconds(rounds, lambda: tokenizer.encode_pieces(pieces, known=known, salt="a"))
    assert same == ids
    ranks = read_ranks(folder / "tiktoken.model")
    plain = tiktoken.Encoding("kimi", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})
    texts = [piece for piece in pieces if isinstance(piece, str)]
    joined = "".join(texts)
    shown["tiktoken_one_thread"], _ = seconds(rounds, lambda: plain.encode_ordinary(joined))
    tokens = tuple(ids)
    shown["name_pages"], job = seconds(rounds, partial(make_job, JobId("x"), tokens, Sampling(max_tokens=1), "fake"))
    shown["write_job"], _ = seconds(rounds, lambda: encode(job))
    ratio = shown["tiktoken_one_thread"]["least_ms"] / shown["encode_known"]["least_ms"]
    return {
        "prompt_tokens": len(ids),
        "pages": len(job.pages),
        "body_bytes": len(body),
        "known_bytes": known.bytes,
        "stages": shown,
        "known_over_tiktoken": round(ratio, 1),
    }


def hold_together(tokenizer: Tokenizer, texts: int) -> int:
    """Encodes random texts and those of the evaluation with and without known texts: -> how many there were.

    Raises AssertionError, with the text's beginning, where the ids differ.
    """
    draw = random.Random(15)
    known = KnownTexts(1 << 20)
    every = PIECES + MORE_PIECES
    given = [path.read_text() for path in sorted(ROOT.glob(EVALUATION))]
    for place in range(len(given) + texts):
        few = draw.sample(every, draw.randint(2, 8))
        text = given[place] if place < len(given) else "".join(draw.choices(few, k=draw.randint(4000, 9000)))
        ids = tokenizer.encode(text)
        if any(tokenizer.encode_pieces((text,), known=known) != ids for _ in range(2)):
            raise AssertionError(f"the ids of known parts differ: {text[:2000]!r}")
    return len(given) + texts


def main() -> None:
    """Measures the stages and the first token, holds the ids together, prints all, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a checkpoint's folder, with tiktoken.model")
    parser.add_argument("--rounds", type=count, default=20, help="runs of each")
    parser.add_argument("--save", type=output, default="runs/long-prompts-cpu.json")
    asked = parser.parse_args()
    tokenizer = Tokenizer.open(asked.tokenizer)
    messages = conversation(tokenizer)
    result = stages(
        tokenizer, asked.tokenizer, body_of([*messages, {"role": "user", "content": "and now?"}]), asked.rounds
    )
    server = Server(partial(front_end, asked.tokenizer))
    times: list[float] = []
    try:
        cold = uvloop.run(first_token(server.port, body_of(messages)))
        for turn in range(asked.rounds):
            body = body_of([*messages, {"role": "user", "content": f"and now, turn {turn}?"}])
            times.append(uvloop.run(first_token(server.port, body)))
    finally:
        server.stop()
    p50 = statistics.median(times)
    for name, stage in result["stages"].items():
        print(f"{name:20s} {stage['least_ms']:8.2f} ms")
    print(f"known over tiktoken's one thread: {result['known_over_tiktoken']}")
    print(
        f"first token: new {cold * 1000:.1f} ms; next turns p50 {p50 * 1000:.1f} ms, least {min(times) * 1000:.1f} ms"
    )
    held = hold_together(tokenizer, TEXTS)
    print(f"the ids of {held} texts are the same with known parts and without")
    packages = ("uvicorn", "uvloop", "httptools", "starlette", "msgspec", "tiktoken")
    document = {
        "what": "the front end's share of the first token of a prompt that is in every cache, tokenisation included",
        "machine": machine(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "rounds": asked.rounds,
        "load_average": round(os.getloadavg()[0], 1),
        **result,
        "first_token_new_ms": round(cold * 1000, 2),
        "first_token_p50_ms": round(p50 * 1000, 2),
        "first_token_least_ms": round(min(times) * 1000, 2),
        "texts_held_together": held,
    }
    asked.save.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    program(main)
