"""Encoding of messages: lists of one tagged union, as msgpack, validated while they are decoded."""

from collections.abc import Sequence

import msgspec

from redline.messages.delta import Delta
from redline.messages.handoff import (
    ChunkAck,
    ChunkReady,
    Prefill,
    PrefillDone,
    PrefillStarted,
    PullRequest,
    Queued,
    WorkerDown,
)
from redline.messages.job import Abort, Job
from redline.messages.machines import Listening, Machine, Orders, Refused
from redline.messages.media import ImageData, ImageWanted
from redline.messages.news import (
    Cached,
    Failed,
    Heartbeat,
    Load,
    Missed,
    Ping,
    Ready,
    Recall,
    RoleTaken,
    Stop,
    TakeRole,
)
from redline.messages.profile import Profile, Profiled
from redline.messages.ranks import Export, Grow, Scatter
from redline.messages.replicas import Drain, ReplicaQuery, ReplicaReply, Replicas, Roster, Use
from redline.messages.step import Compile, Forget, Hurry, Place, RecordMore, Step

Wire = (
    Job | Abort | Step | Delta | Ready | Failed | Heartbeat | Ping | Missed | Load | Stop | Place | RecordMore | Hurry
    | Compile | Forget | Export | Grow | Scatter
    | Cached | Recall | Prefill | Queued
    | PrefillStarted | PullRequest | ChunkReady | ChunkAck | PrefillDone | WorkerDown
    | TakeRole | RoleTaken
    | Listening | Machine | Orders | Refused
    | Replicas | Roster | Use | ReplicaQuery | ReplicaReply | Drain
    | Profile | Profiled
    | ImageWanted | ImageData
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder[list[Wire]](list[Wire])


def encode(messages: Sequence[Wire]) -> bytes:
    """Messages as msgpack, each tagged with its class name."""
    return _encoder.encode(messages)


def decode(data: bytes | memoryview) -> list[Wire]:
    """The messages in `data`. Raises msgspec.ValidationError, which names the place, if it is not a list of Wire
    messages, and msgspec.DecodeError if it is not msgpack."""
    return _decoder.decode(data)
