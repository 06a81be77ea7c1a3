"""vLLM's KV cache events as bytes: batches of blocks that were stored or removed.

A batch is an array: a time in seconds, events, and the data-parallel rank of the worker. An event is a map with its
name as `type`; older releases send an array that begins with the name. Both are read, maps are written. A block is
identified by a hash that only its worker can compute; from its tokens and its parent's hash a reader can compute its
own.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, cast

import msgspec
from msgspec import Meta

BlockHash = bytes | int
Token = Annotated[int, Meta(ge=0, lt=1 << 32)]  # page hashes use four bytes of each token

GPU = "GPU"  # the medium of the blocks that a worker computes from, on any device; other media are offload tiers


class CacheSalt(msgspec.Struct, frozen=True, tag="cache_salt"):
    """Extra key of a prompt's first block: the block is shared only between requests with the same salt."""

    salt: str


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Consecutive blocks were stored."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None  # of the block before the first; None: the first block begins a prompt
    token_ids: list[Token]  # of all the blocks
    block_size: int  # tokens per block
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None  # for each block, other inputs of its hash than tokens; None: there are none
    group_idx: int | None = None  # KV cache group, for a model with several kinds of attention layers


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks were removed."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The cache was cleared."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared

# The fields that follow the name in an array, in the order of the releases that added them.
_PLACES: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


class KvBatch(NamedTuple):
    """The content of one message."""

    at: float  # seconds since 1970
    events: Sequence[KvEvent]
    worker: int | None = None  # its data-parallel rank


def encode_batch(batch: KvBatch) -> bytes:
    """A batch as msgpack, its events as maps."""
    return msgspec.msgpack.encode([batch.at, batch.events, batch.worker])


def decode_batch(data: bytes) -> KvBatch:
    """The batch in `data`, without events of unknown names. Raises msgspec.ValidationError, which names the place,
    if it is not a batch, and msgspec.DecodeError if it is not msgpack, is nested too deeply or contains invalid
    UTF-8."""
    try:
        parts = msgspec.msgpack.decode(data, type=list[Any])
    except RecursionError:
        raise msgspec.DecodeError("a batch of events is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"a string is not valid UTF-8: {error}") from None
    if len(parts) < 2:
        raise msgspec.ValidationError(f"a batch of events needs a time and events; got {len(parts)} elements")
    at, events = msgspec.convert(parts[0], float), msgspec.convert(parts[1], list[Any])
    worker = msgspec.convert(parts[2], int | None) if len(parts) > 2 else None
    read = [_event(each, place) for place, each in enumerate(events)]
    return KvBatch(at, [event for event in read if event is not None], worker)


def _event(said: Any, place: int) -> KvEvent | None:
    if isinstance(said, list) and said:
        name, *values = cast("list[Any]", said)
        fields: dict[str, Any] = dict(zip(_PLACES.get(str(name), ()), values, strict=False))
    elif isinstance(said, dict):
        fields = cast("dict[str, Any]", said)
        name = fields.get("type")
    else:
        name, fields = None, {}
    if not isinstance(name, str):
        raise msgspec.ValidationError(
            f"an event must be a map or an array that begins with its name - at `$[1][{place}]`"
        )
    if name not in _PLACES:
        return None
    try:
        event = msgspec.convert({**fields, "type": name}, KvEvent)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"{name}: {error}, in event {place}") from None
    if isinstance(event, BlockStored) and len(event.token_ids) != event.block_size * len(event.block_hashes):
        raise msgspec.ValidationError(
            f"BlockStored: {len(event.token_ids)} tokens in {len(event.block_hashes)} blocks of {event.block_size}, "
            f"in event {place}"
        )
    return event
