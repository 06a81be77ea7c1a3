"""Servers for tests of `redline chat`: one that answers correctly, and others that do not."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHUNKS = [
    {"choices": [{"delta": {"role": "assistant", "reasoning": "Two "}}]},
    {"choices": [{"delta": {"reasoning": "and two."}}]},
    {"choices": [{"delta": {"content": "It is "}}]},
    {"choices": [{"delta": {"content": "[4]."}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"completion_tokens": 7}},
]
MODELS = json.dumps({"data": [{"id": "fake"}]})
DONE = "data: [DONE]\n\n"

Answer = Callable[["Fake"], None]


class Fake(BaseHTTPRequestHandler):
    """`models` answers GET, `answer` answers POST; the request's body is `asked[-1]` then."""

    asked: list[dict[str, Any]]
    models: Answer
    answer: Answer

    def do_GET(self) -> None:
        type(self).models(self)

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        type(self).answer(self)

    def say(self, text: str | bytes, status: int = 200, kind: str = "application/json", length: int | None = None):
        """length: the Content-Length, if it is to be wrong."""
        data = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def says(text: str | bytes, status: int = 200, kind: str = "application/json", length: int | None = None) -> Answer:
    return lambda fake: fake.say(text, status, kind, length)


def streams(*chunks: dict[str, Any]) -> Answer:
    return says(stream(*chunks))


def stream(*chunks: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + DONE


def text(*pieces: str) -> list[dict[str, Any]]:
    """The chunks of a whole answer."""
    return [{"choices": [{"delta": {"content": piece}}]} for piece in pieces] + [
        {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    ]


_answer, _models = streams(*CHUNKS), says(MODELS)


@contextmanager
def server(answer: Answer = _answer, models: Answer = _models) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, and the bodies of the requests received."""
    asked: list[dict[str, Any]] = []
    kind = type("Server", (Fake,), {"asked": asked, "answer": staticmethod(answer), "models": staticmethod(models)})
    http = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", asked
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
