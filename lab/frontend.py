"""How many tokens per second one core of the front end streams, with an engine that takes no time.

    python -m lab.frontend [--rounds 3]

Server and client are two processes. The fake engine sends every running job a delta of one token per iteration of the
event loop, as bytes through the wire codec, so each token includes the cost of: decode, dispatch, metrics, detokenise,
parse, frame, send. The floor is a bare ASGI app under the same uvicorn that sends the same chunks, built beforehand,
one per iteration. Tokens per second per core divide by the server's own processor time, so other users of the machine
matter little.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import socket
import statistics
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lab.program import output, program
from redline import clock
from redline.api.app import create_app
from redline.api.config import ApiConfig, Limits
from redline.api.gateway.gateway import Gateway
from redline.api.gateway.generation import ChoiceDelta
from redline.api.handlers import STREAM_START
from redline.api.http.server import uvicorn_config
from redline.api.http.stream_flusher import DIRECT, ImmediateWriter
from redline.api.openai.requests import Streaming
from redline.api.openai.sse import DONE, ChatStream
from redline.api.telemetry.metrics import Metrics
from redline.chat.events import Text
from redline.chat.template import K2_6
from redline.chat.tokenizer import Tokenizer
from redline.messages.codec import Wire, decode, encode
from redline.messages.delta import Delta
from redline.messages.job import Abort, Job, JobId
from redline.messages.news import Ready
from redline.router.worker_registry import WorkerHandle
from tests.tiny_tokenizer import write_tiny_tokenizer

MODEL = "fake"
CASES = ((1, 20_000), (64, 1500), (512, 400))  # concurrent streams, tokens of each
WORD = " the"


class FreeEngine:
    """Gives every running job one more token, always the same, per iteration of the event loop.

    gateway: must be set first.
    """

    def __init__(self, token: int) -> None:
        self._token = token
        self._left: dict[JobId, int] = {}
        self._more: dict[JobId, bytes] = {}  # the same delta every time
        self._task: asyncio.Task[None] | None = None
        self.gateway: Gateway | None = None
        self.link: WorkerHandle | None = None

    def put(self, message: Wire) -> None:
        """Takes a job or an abort, in place of a worker's inbox.

        Raises AssertionError for any other message.
        """
        match message:
            case Job(id=id):
                self._left[id] = message.sampling.max_tokens
                self._more[id] = encode([Delta(job=id, tokens=(self._token,))])
                if self._task is None or self._task.done():
                    self._task = asyncio.get_running_loop().create_task(self._run())
            case Abort(job=id):
                self._left.pop(id, None)
            case other:
                raise AssertionError(other)

    async def _run(self) -> None:
        assert self.gateway is not None
        assert self.link is not None
        while self._left:
            messages: list[Wire] = []
            for id, left in list(self._left.items()):
                if left > 1:
                    self._left[id] = left - 1
                    messages += decode(self._more[id])
                else:
                    del self._left[id]
                    messages.append(Delta(job=id, tokens=(self._token,), finish="length"))
            self.gateway.monitor.receive(self.link, messages)
            await asyncio.sleep(0)


def free_gateway() -> Gateway:
    """A gateway with a FreeEngine as its only worker, and a tiny tokenizer."""
    with TemporaryDirectory() as folder:
        tokenizer = Tokenizer.open(write_tiny_tokenizer(Path(folder)))
    (token,) = tokenizer.encode(WORD)
    engine = FreeEngine(token)
    gateway = engine.gateway = Gateway(tokenizer, K2_6, Metrics(MODEL))
    engine.link = gateway.monitor.join("worker", engine)
    gateway.monitor.receive(
        engine.link, [Ready(max_model_len=1 << 20, pages=1 << 14, fingerprint="fake", summary="fake")]
    )
    return gateway


def front_end() -> ASGIApp:
    """The served app, with `free_gateway`."""
    return create_app(free_gateway(), ApiConfig(served_model_names=(MODEL,)))


def bare() -> ASGIApp:
    """The floor: an app that only sends the same chunks."""
    stream = ChatStream(
        "chatcmpl-" + "0" * 32, int(clock.now()), MODEL, [20], 1, Streaming(), False, lambda _: b"", "reasoning_content"
    )
    chunk = stream.write([ChoiceDelta(0, [Text(text=WORD)], 1)])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = json.loads((await receive())["body"])
        await send(dict(STREAM_START))
        for _ in range(body["max_tokens"]):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    return app


class _CountedDirect:
    """A connection that counts direct writes together with the app's own."""

    def __init__(self, direct: ImmediateWriter, counted: "Counted") -> None:
        self._direct = direct
        self._counted = counted

    def write_part(self, body: bytes) -> bool:
        self._counted.writes += 1
        return self._direct.write_part(body)


class Counted:
    """An app with counted writes: more tokens than writes means that deltas were merged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.writes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request to the app, and counts everything that the app sends, also past `send`."""
        scope["extensions"][DIRECT] = _CountedDirect(scope["extensions"][DIRECT], self)

        async def counting(message: Message) -> None:
            self.writes += 1
            await send(message)

        await self._app(scope, receive, counting)


def serve(make: Callable[[], ASGIApp], listener: socket.socket, control: Connection) -> None:
    """The main function of a server process.

    Every message on `control` is answered with (processor seconds, writes) so far. make: builds the app. listener: the
    socket that it serves.
    """
    app = Counted(make())
    server = uvicorn.Server(uvicorn_config(app, Limits(), "127.0.0.1", 0))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(
            control.fileno(), lambda: control.send((clock.process_time(), app.writes)) if control.recv() else None
        )
        await server.serve(sockets=[listener])

    uvloop.run(main())


async def read_stream(port: int, tokens: int) -> None:
    """Requests one chat stream of `tokens` tokens, and reads it to its end.

    Raises ConnectionError if the server closes before that, and AssertionError for another number of tokens.
    """
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "hello"}],
            "stream": True,
            "max_tokens": tokens,
            "ignore_eos": True,
            "thinking": {"type": "disabled"},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    seen, tail = 0, b""
    while not tail.endswith(b"0\r\n\r\n"):
        data = await reader.read(1 << 18)
        if not data:
            raise ConnectionError("the server closed a stream before its end")
        seen += (tail + data).count(b'"content":" the"') - tail.count(b'"content":" the"')
        tail = (tail + data)[-64:]
    writer.close()
    if seen != tokens:
        raise AssertionError(f"{seen} tokens came; {tokens} were asked for")


class Server:
    """A server in a separate process, listening on `port` after construction. make: builds its app, in that process."""

    def __init__(self, make: Callable[[], ASGIApp]) -> None:
        context = multiprocessing.get_context("spawn")
        self._control, theirs = context.Pipe()
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = listener.getsockname()[1]
        self._process = context.Process(target=serve, args=(make, listener, theirs), daemon=True)
        self._process.start()
        listener.close()
        self._counts()  # returns when the server is up

    def _counts(self) -> tuple[float, int]:
        self._control.send(True)
        return self._control.recv()

    def cpu_s(self) -> float:
        """Seconds of processor time that the server has taken so far."""
        return self._counts()[0]

    def measure(self, streams: int, tokens: int) -> dict[str, float]:
        """Runs `streams` streams of `tokens` tokens each at once; returns seconds, tokens/s, and tokens per write.

        cpu_s and tokens_per_s_per_core are of the server's own processor time. Raises as `read_stream` does.
        """

        async def all_streams() -> None:
            await asyncio.gather(*(read_stream(self.port, tokens) for _ in range(streams)))

        cpu, writes = self._counts()
        began = clock.perf_counter()
        uvloop.run(all_streams())
        wall = clock.perf_counter() - began
        cpu_after, writes_after = self._counts()
        total = streams * tokens
        return {
            "wall_s": wall,
            "cpu_s": cpu_after - cpu,
            "tokens_per_s": total / wall,
            "tokens_per_s_per_core": total / (cpu_after - cpu),
            "tokens_per_write": total / (writes_after - writes),
        }

    def stop(self) -> None:
        """Ends the process with SIGTERM, and waits for it."""
        self._process.terminate()
        self._process.join()


def median(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median over the runs of each figure, rounded to five digits."""
    return {key: float(f"{statistics.median(run[key] for run in runs):.5g}") for key in runs[0]}


def machine() -> str:
    """The processor's name and how many cores it has."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{names[0].split(':')[1].strip() if names else platform.processor()}, {os.cpu_count()} cores"


def commit() -> str:
    """The short hash of HEAD. Raises CalledProcessError if git fails."""
    shown = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return shown.stdout.strip()


def main() -> None:
    """Measures every case against the floor, prints each, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, alternating; the median counts")
    parser.add_argument("--save", type=output, default="runs/frontend-cpu.json")
    asked = parser.parse_args()
    rounds: int = asked.rounds
    servers = {"front end": Server(front_end), "floor": Server(bare)}
    cases: list[dict[str, Any]] = []
    for streams, tokens in CASES:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for _ in range(rounds):
            for name, server in servers.items():
                runs[name].append(server.measure(streams, tokens))
        ours, floor = median(runs["front end"]), median(runs["floor"])
        ratio = ours["tokens_per_s_per_core"] / floor["tokens_per_s_per_core"]
        cases.append(
            {"streams": streams, "tokens_each": tokens, "front_end": ours, "floor": floor, "ratio": round(ratio, 3)}
        )
        print(
            f"{streams:3d} streams  {ours['tokens_per_s_per_core']:9,.0f} tokens/s per core   "
            f"floor {floor['tokens_per_s_per_core']:9,.0f}   {ratio:4.0%}   "
            f"({ours['tokens_per_write']:.2f} tokens per write)"
        )
    for server in servers.values():
        server.stop()
    packages = ("uvicorn", "uvloop", "httptools", "starlette", "msgspec", "prometheus-client", "tiktoken")
    result = {
        "what": "streaming front end with a zero-cost engine; chat stream, one token per delta, one chunk per token",
        "machine": machine(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "rounds": rounds,
        "load_average": round(os.getloadavg()[0], 1),
        "cases": cases,
    }
    asked.save.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    program(main)
