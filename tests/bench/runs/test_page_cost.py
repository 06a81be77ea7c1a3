"""What a page costs the server: figures from rounds, and one small measurement."""

import pytest

from redline.bench.runs.frontend import Server
from redline.bench.runs.page_cost import event_us, measure, result_of, watched


def run(us: float) -> dict[str, float]:
    return {"us_per_token": us, "wall_s": 1.0, "events_per_page": 2.0}


def test_a_pages_share_is_its_events_time_and_ratios_are_of_neighbours():
    found = result_of([run(10), run(20), run(40)], [run(10.1), run(20.4), run(40)], [300.0, 200.0, 900.0])
    assert found["ratios"] == [1.0, 1.01, 1.02]
    assert (found["us_per_token"], found["tokens_that_an_event_costs"]) == (20, 15)
    assert (found["share_of_a_core"], found["within_the_goal"]) == (0.0003, True)
    assert not result_of([run(10)], [run(10)], [10_001.0])["within_the_goal"]


@pytest.mark.slow
def test_pages_hear_events_while_tokens_stream():
    server = Server(watched)
    try:
        heard = measure(server, 3, 2, 50)
        event = event_us(server, 20, 2.5)  # it fails where no page hears anything
    finally:
        server.stop()
    assert heard["events_per_page"] >= 1
    assert heard["us_per_token"] > 0
    assert abs(event) < 2.5e6, "more than all of the time"
