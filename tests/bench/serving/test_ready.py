"""The wait for a server is bounded, and speculative decoding's figures are read from the server's own counters."""

import contextlib
import itertools
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from redline.bench.serving.ready import DraftCounters, counters, drafting, drafting_figures, models
from redline.bench.serving.target import ServerTarget
from redline.errors import ConfigError
from tests.waiting import LIMIT_S

PAGE = """# HELP vllm:spec_decode_num_drafts_total Steps
vllm:spec_decode_num_drafts_total{model_name="a b"} 100.0
vllm:spec_decode_num_drafts_created{model_name="a b"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{model_name="a b"} 300.0
vllm:spec_decode_num_accepted_tokens_total{model_name="a b"} 120.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="a b",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1",model_name="a b"} 3e1
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="a b",position="2"} 10.0
vllm:num_requests_running{model_name="position=\\"7\\""} 1.0
"""


@contextmanager
def server(*answers: tuple[int, bytes]) -> Generator[ServerTarget]:
    """A server that gives these answers in turn, and repeats the last one."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield ServerTarget(base_url=f"http://127.0.0.1:{http.server_address[1]}")
        http.shutdown()
        thread.join()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


def test_a_server_that_loads_is_waited_for_and_that_is_said_once():
    told: list[str] = []
    listed = (200, b'{"data": [{"id": "m", "object": "model"}]}')
    with server((503, b""), listed, (503, b"of /health"), listed) as target:
        assert models(target, None, told.append, wait=lambda _: None) == ("m",)
    assert len(told) == 1
    assert "is not ready (503); waiting up to 600 s" in told[0]


@pytest.mark.parametrize(("seconds", "waits"), [(None, 10), (0.0, 0), (3.0, 3)])
def test_where_nobody_listens_the_wait_has_an_end(seconds: float | None, waits: float):
    clock = Clock()
    target = ServerTarget(base_url="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"no server at http://127.0.0.1:9 .*check --base-url"):
        models(target, seconds, lambda _: None, clock=clock, wait=clock.wait)
    assert clock.now == waits


def test_a_server_without_a_list_of_models_is_ready_and_one_that_refuses_the_key_is_said():
    for status, body in ((404, b""), (200, b"<html>"), (200, b'{"data": 3}')):
        with server((status, body)) as target:
            assert models(target, 0.0, lambda _: None) == ()
    with server((401, b"")) as target, pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        models(target, 0.0, lambda _: None)


def test_the_counters_of_drafts_are_read_under_vllms_names():
    assert counters(PAGE) == DraftCounters(drafts=100, tokens=300, accepted=120, accepted_at=(80, 30, 10))
    assert counters("vllm:num_requests_running 1.0\n") is None
    with server((200, PAGE.encode())) as target:
        assert drafting(target) == counters(PAGE)
    with server((404, b"")) as target:
        assert drafting(target) is None
    assert drafting(ServerTarget(base_url="http://127.0.0.1:9")) is None


def test_what_drafts_did_is_the_difference_of_two_looks():
    before = DraftCounters(drafts=50, tokens=150, accepted=60, accepted_at=(40,))
    found = drafting_figures(before, counters(PAGE))
    assert found["spec_decode_acceptance_length"] == pytest.approx(1 + 60 / 50)
    assert found["spec_decode_acceptance_rate"] == pytest.approx(40.0)
    assert found["spec_decode_per_position_acceptance_rates"] == pytest.approx([0.8, 0.6, 0.2])
    assert drafting_figures(None, before) == drafting_figures(before, before) == {}


def test_a_list_of_models_that_never_ends_is_left(monkeypatch: pytest.MonkeyPatch):
    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while not over.wait(0.02):
                    self.wfile.write(b" " * 64)

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing."""

    over = threading.Event()
    seconds = itertools.count()  # a clock that advances by one second with each part of the answer
    monkeypatch.setattr("redline.bench.serving.ready.clock", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        found: list[object] = []
        target = ServerTarget(base_url=f"http://127.0.0.1:{listening.server_port}")
        asking = threading.Thread(
            target=lambda: found.append((models(target, 0, print), drafting(target))), daemon=True
        )
        asking.start()
        asking.join(LIMIT_S)
        over.set()
        listening.shutdown()
    assert found == [((), None)]


def test_a_counter_that_is_no_number_is_left_out():
    page = "vllm:spec_decode_num_drafts_total 1e999\nvllm:spec_decode_num_draft_tokens_total e.+\n"
    assert counters(page) is None
    assert counters(page + "vllm:spec_decode_num_drafts_total 4\n") == DraftCounters(drafts=4)
