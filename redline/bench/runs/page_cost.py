"""What watching the page costs the server: processor time per token with the page's event stream open, and without.

    python -m redline.bench.runs.page_cost [--rounds 5] [--pages 100] [--seconds 4] [--save FILE]

The front end of `bench.runs.frontend`, whose engine costs nothing, streams as fast as one core can. Rounds alternate:
nobody watches, one page does; their ratio is stored with all of its spread, which on a shared machine is larger than
what it is to show. So the share is measured apart: many pages watch a server that does nothing else, and its processor
time by page and second is what a page takes of a full core. The goal is one percent.
"""

import argparse
import json
import os
import socket
import statistics
from typing import Any

from starlette.types import ASGIApp

from redline import clock
from redline.api.app import create_app
from redline.api.chat_page import EVERY_S
from redline.api.config import ApiConfig
from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.bench.runs.frontend import MODEL, Server, free_gateway
from redline.disk import save
from redline.wire.news import Load, StepTimes

STREAMS, TOKENS = 64, 2000  # tokens of each: some seconds, since the page hears once a second
GOAL = 0.01

# A worker that has drafted and handed over: the longest that a view becomes.
LOAD = Load(
    running=64, waiting=3, pages_used=9000, pages_cached=4000, pages_total=16384, steps=1_000_000, replayed=900_000,
    led=100_000, preemptions=12, prompt_tokens=90_000_000, prompt_tokens_cached=40_000_000,
    generation_tokens=50_000_000,
    drafts=900_000, draft_tokens=3_000_000, accepted_tokens=2_000_000, accepted_per_pos=(800_000, 600_000, 400_000),
    step_sizes=(100_000,) * 12, step_positions=9_000_000, handoffs=(("handed_over", 1000), ("short", 100)),
    step_times=(
        StepTimes(kind="decode", steps=110_000, seconds=1234.567890123, floor_s=987.654321098),
        StepTimes(kind="prompts", steps=12_000, seconds=4567.890123456, floor_s=3456.789012345),
    ),
)  # fmt: skip


def watched() -> ASGIApp:
    """The app that serves, over an engine that costs nothing and a load as a busy worker's."""
    gateway = free_gateway()
    for link in gateway.links:
        gateway.deliver(link, LOAD)
    return create_app(gateway, ApiConfig(served_model_names=(MODEL,)))


class Page:
    """A page that watches: the stream of events is read by the kernel, which has room for an hour of them."""

    def __init__(self, port: int) -> None:
        """Raises OSError where the server does not answer."""
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.sendall(b"GET /engine HTTP/1.1\r\nhost: localhost\r\n\r\n")
        self.began = self._socket.recv(4096)

    def close(self) -> int:
        """Leaves; -> how many events had come."""
        self._socket.settimeout(0.0)
        seen = self.began
        try:
            while data := self._socket.recv(1 << 20):
                seen += data
        except BlockingIOError:
            pass
        self._socket.close()
        return seen.count(b"data: {")


def measure(server: Server, pages: int, streams: int, tokens: int) -> dict[str, float]:
    """Microseconds of the server's processor time per token, and events per page, while so many pages watch."""
    watching = [Page(server.port) for _ in range(pages)]
    run = server.measure(streams, tokens)
    events = [page.close() for page in watching]
    return {
        "us_per_token": 1e6 * run["cpu_s"] / (streams * tokens),
        "wall_s": run["wall_s"],
        "events_per_page": statistics.mean(events) if events else 0.0,
    }


def event_us(server: Server, pages: int, seconds: float) -> float:
    """Microseconds of the server's processor time per event, while so many pages watch and nothing else is asked."""
    before = server.cpu_s()
    clock.sleep(seconds)
    alone = server.cpu_s() - before
    watching = [Page(server.port) for _ in range(pages)]
    before = server.cpu_s()
    clock.sleep(seconds)
    spent = server.cpu_s() - before
    events = sum(page.close() for page in watching) - pages  # the first came before
    assert events > 0, "no event came"
    return 1e6 * (spent - alone) / events


def result_of(none: list[dict[str, float]], one: list[dict[str, float]], events: list[float]) -> dict[str, Any]:
    """Medians, ratios of neighbours, and the share of a core that a page takes, an event every EVERY_S seconds."""
    event, token = statistics.median(events), statistics.median(run["us_per_token"] for run in none)
    share = event / 1e6 / EVERY_S
    ratios = sorted(
        with_it["us_per_token"] / without["us_per_token"] for with_it, without in zip(one, none, strict=True)
    )
    return {
        "us_per_token": round(token, 3),
        "us_per_token_with_a_page": round(statistics.median(run["us_per_token"] for run in one), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "events_per_page": statistics.median(run["events_per_page"] for run in one),
        "us_per_event": [round(each, 1) for each in sorted(events)],
        "tokens_that_an_event_costs": round(event / token, 1),
        "share_of_a_core": round(share, 6),
        "goal": GOAL,
        "within_the_goal": share <= GOAL,
    }


def main() -> int:
    """Measures, prints, saves. 1 where a page costs more than the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=5, help="of each; they alternate")
    parser.add_argument("--pages", type=count, default=100, help="that watch at once, where many do")
    parser.add_argument("--seconds", type=count, default=4, help="for which many watch, in each round")
    parser.add_argument("--streams", type=count, default=STREAMS)
    parser.add_argument("--tokens", type=count, default=TOKENS, help="of each stream")
    parser.add_argument("--save", type=output, default="runs/page-cost-cpu.json")
    given = parser.parse_args()
    runs: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    events: list[float] = []
    server = Server(watched)
    try:
        for _ in range(given.rounds):
            for pages, of in runs.items():
                of.append(measure(server, pages, given.streams, given.tokens))
            events.append(event_us(server, given.pages, given.seconds))
    finally:
        server.stop()
    found = result_of(runs[0], runs[1], events)
    print(
        f"{found['us_per_token']:.2f} us of processor time per token, with a page {found['ratios']} times that; "
        f"an event {found['us_per_event']} us: {found['share_of_a_core']:.3%} of a core for a page, goal {GOAL:.0%}"
    )
    body = {
        "what": "the server's processor time per token with the page's event stream open and not, and per event",
        **provenance("uvicorn", "uvloop", "starlette", "msgspec"),
        "load_average": round(os.getloadavg()[0], 1),
        "rounds": given.rounds, "streams": given.streams, "tokens_each": given.tokens, "pages": given.pages, **found,
    }  # fmt: skip
    save(given.save, (json.dumps(body, indent=2) + "\n").encode())
    return 0 if found["within_the_goal"] else 1


if __name__ == "__main__":
    program(main)
