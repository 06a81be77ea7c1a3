"""The splitting of a body into server-sent events."""

import random

import pytest

from redline.bench.serving.connection import EVENT_BYTES, EventSplitter, TooLarge

STREAM = (
    b": a comment\n\n"
    b"data: one\n\n"
    b"event: message\ndata:two\ndata: lines\nid: 7\n\n"
    b"data: 4\r\n\r\ndata: 5\r\n\r\n"
    b"\n\ndata: {}\n\n"
    b"data: six\r\r"
    b"data: [DONE]\n\n"
)
FOUND = [b"one", b"two\nlines", b"4", b"5", b"{}", b"six", b"[DONE]"]


def test_events_are_the_same_however_the_bytes_are_cut():
    assert EventSplitter().feed(STREAM) == FOUND
    single = EventSplitter()
    assert [found for byte in STREAM for found in single.feed(bytes([byte]))] == FOUND
    chance = random.Random(1)
    for _ in range(200):
        cuts = sorted(chance.sample(range(len(STREAM)), 6))
        events = EventSplitter()
        pieces = [STREAM[a:b] for a, b in zip([0, *cuts], [*cuts, len(STREAM)], strict=True)]
        assert [found for piece in pieces for found in events.feed(piece)] == FOUND


def test_an_event_comes_out_with_the_bytes_that_complete_it():
    events = EventSplitter()
    assert events.feed(b"data: a\n") == []
    assert events.feed(b"\ndata: b") == [b"a"]
    assert events.feed(b"\r\n\r") == [b"b"]
    assert events.feed(b"\ndata: c\n\n") == [b"c"]


def test_the_last_event_may_lack_its_empty_line():
    events = EventSplitter()
    assert events.feed(b"data: a\n\ndata: [DONE]\n") == [b"a"]
    assert events.finish() == [b"[DONE]"]
    assert events.finish() == []


def test_an_event_has_a_most_size():
    events = EventSplitter()
    events.feed(b"data: ")
    assert events.feed(b"x" * (EVENT_BYTES - 6)) == []
    with pytest.raises(TooLarge, match="16 MiB"):
        events.feed(b"x")
