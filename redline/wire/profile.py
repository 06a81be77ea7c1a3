"""What a worker is asked to write down of its next seconds, and what it answers."""

import msgspec

from redline.wire.base import Message, Record


class Span(Record, frozen=True, array_like=True):
    """Something that began and ended. Times are nanoseconds of the host's monotonic clock (time.monotonic_ns).

    lane: what it belongs to; spans of one lane lie in or behind one another. facts: what else is known of it.
    """

    lane: str
    name: str
    began_ns: int
    ended_ns: int
    facts: dict[str, int | float | str] = msgspec.field(default_factory=dict[str, int | float | str])


class Profile(Message, frozen=True):
    """A worker is asked to write down what it does for so many seconds from now. A later one ends an earlier one."""

    number: int
    seconds: float
    most: int  # spans, at most


class Profiled(Message, frozen=True):
    """Spans of a Profile, in pieces as they come. Nothing follows the `last`."""

    number: int
    data: bytes = b""  # of `spans_of`: whoever passes them on need not read them
    left_out: int = 0  # spans for which there was no room; with the last
    notes: tuple[str, ...] = ()  # what is to be known of the whole; with the last
    last: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[Span, ...]).decode


def packed(spans: list[Span]) -> bytes:
    """Spans as bytes."""
    return _encode(spans)


def spans_of(data: bytes) -> tuple[Span, ...]:
    """The spans in bytes that `packed` gave. Raises msgspec.ValidationError where these are others."""
    return _decode(data) if data else ()
