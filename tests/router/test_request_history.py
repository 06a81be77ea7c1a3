"""Recent requests: which are kept, for how long, and the reported lengths of answers that have not ended."""

from redline.router.request_history import KNOWN, MOST, RequestHistory, RequestLengths


class Clock:
    """A clock that shows the seconds it is set to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_answer_that_has_not_ended_becomes_as_long_as_those_of_its_class_that_have() -> None:
    lately = RequestHistory(Clock())
    lately.start()
    for of, output in (("chat", 10), ("chat", 30), ("batch", 500)):
        came = lately.add(of, 64)
        came.output, came.ended = output, True
    begun = lately.add("chat", 200)
    begun.cached, begun.output = 128, 5
    longer = lately.add("chat", 200)
    longer.output = 70
    lately.add("new", 8)
    assert lately.lengths(60)[3:] == [
        RequestLengths(128, 72, 20, "chat"),
        RequestLengths(0, 200, 70, "chat"),
        RequestLengths(0, 8, 180, "new"),
    ]


def test_where_no_answer_of_the_window_has_ended_those_before_it_say_how_long_they_become() -> None:
    """Answers that take longer than the window: the short ones among earlier answers count, except for shorter ones
    than an answer that is still running.
    """
    clock = Clock()
    lately = RequestHistory(clock)
    lately.start()
    for output in (10, 20, 200, 400):
        came = lately.add("chat", 64)
        came.output, came.ended = output, True
    clock.now += 100
    for output in (0, 15, 90, 300, 500):
        lately.add("chat", 64).output = output
    assert [each.output for each in lately.lengths(8)] == [158, 207, 300, 400, 500]


def test_the_newest_that_ended_say_how_long_answers_become() -> None:
    lately = RequestHistory(Clock())
    lately.start()
    for output in [1000] * KNOWN + [50] * KNOWN:
        came = lately.add("chat", 64)
        came.output, came.ended = output, True
    lately.add("chat", 64)
    assert lately.lengths(60)[-1].output == 50


def test_more_cached_than_the_prompt_has_is_the_prompt() -> None:
    lately = RequestHistory(Clock())
    lately.start()
    lately.add("", 10).cached = 64
    assert lately.lengths(60) == [RequestLengths(10, 0, 0, "")]


def test_what_came_before_the_window_does_not_count() -> None:
    clock = Clock()
    lately = RequestHistory(clock)
    lately.start()
    assert lately.rate(60) == 0
    for _ in range(30):
        lately.add("", 10)
    clock.now += 10
    assert lately.rate(60) == 3, "the clock has run for 10 s"
    clock.now += 90
    assert lately.rate(60) == 0
    assert lately.lengths(60) == []


def test_where_more_came_than_is_remembered_the_rate_is_of_those_that_are() -> None:
    clock = Clock()
    lately = RequestHistory(clock)
    lately.start()
    for _ in range(2 * MOST):
        lately.add("", 10)
        clock.now += 1 / 128
    assert abs(lately.rate(60) - 128) < 1


def test_nothing_is_remembered_before_somebody_plans_by_it() -> None:
    clock = Clock()
    lately = RequestHistory(clock)
    lately.add("default", 10).ended = True
    assert not lately.lengths(60.0)
    lately.start()
    lately.add("default", 20)
    assert [each.uncached for each in lately.lengths(60.0)] == [20]


def test_of_what_is_under_way_what_is_left_is_told() -> None:
    lately = RequestHistory(Clock())
    lately.start()
    ended = lately.add("chat", 64)
    ended.output, ended.ended = 100, True
    waits, writes, longer = (lately.add("chat", 200) for _ in range(3))
    waits.cached = 128
    writes.output, longer.output = 30, 150
    left = lately.remaining([waits, writes, longer])
    assert left == [
        RequestLengths(128, 72, 100, "chat"),
        RequestLengths(230, 0, 70, "chat"),
        RequestLengths(350, 0, 1, "chat"),
    ]
