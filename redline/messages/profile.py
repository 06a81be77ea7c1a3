"""Request to profile a worker for some seconds, and the recorded spans."""

import msgspec

from redline.messages.base import Record, WireMessage


class Span(Record, frozen=True, array_like=True):
    """A profiled interval. Times are nanoseconds of the host's monotonic clock (time.monotonic_ns).

    lane: the row of the timeline; spans of one lane are nested or disjoint. facts: further attributes.
    """

    lane: str
    name: str
    began_ns: int
    ended_ns: int
    facts: dict[str, int | float | str] = msgspec.field(default_factory=dict[str, int | float | str])


class Profile(WireMessage, frozen=True):
    """Record spans for `seconds` from now. A new request ends an earlier one."""

    number: int
    seconds: float
    most: int  # maximum number of spans


class Profiled(WireMessage, frozen=True):
    """Recorded spans, in several messages. The one with `last` set is the end."""

    number: int
    data: bytes = b""  # encoded by `packed`; forwarders need not decode it
    left_out: int = 0  # number of spans dropped because of `most`; in the last message
    notes: tuple[str, ...] = ()  # remarks on the whole profile; in the last message
    last: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[Span, ...]).decode


def packed(spans: list[Span]) -> bytes:
    """Encode spans."""
    return _encode(spans)


def spans_of(data: bytes) -> tuple[Span, ...]:
    """Decode spans encoded by `packed`. Raises msgspec.ValidationError for other data."""
    return _decode(data) if data else ()
