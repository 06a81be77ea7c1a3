"""What vLLM's workers tell of their prefix caches, as bytes: batches of blocks that came and went.

A batch is an array: seconds, events, and the number of the worker among several. An event is a map with its name as
`type`; older releases have an array that begins with it. Both are read, maps are written. A block is named by a hash
that only its worker can compute; with its tokens and its parent's name others can name it as they like.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, cast

import msgspec
from msgspec import Meta

BlockHash = bytes | int
Token = Annotated[int, Meta(ge=0, lt=1 << 32)]  # pages are named by four bytes of each

GPU = "GPU"  # the medium of what a worker computes from, whatever its device is; others lie below it


class CacheSalt(msgspec.Struct, frozen=True, tag="cache_salt"):
    """Of a first block: it is shared among those who have the same salt, and the text stands for that."""

    salt: str


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks that follow one another have come."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None  # of the block before the first; None: it begins a prompt
    token_ids: list[Token]  # of all of them
    block_size: int  # tokens of one
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None  # for each block what its hash depends on beside tokens; None: nothing
    group_idx: int | None = None  # of a model whose layers have several caches


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks have gone."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing is cached any more."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared

# What stands in an array behind the name, in the order of the releases that added it.
_PLACES: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


class KvBatch(NamedTuple):
    """What one message holds."""

    at: float  # seconds since 1970
    events: Sequence[KvEvent]
    worker: int | None = None  # its number among several


def encode_batch(batch: KvBatch) -> bytes:
    """A batch as msgpack, its events as maps."""
    return msgspec.msgpack.encode([batch.at, batch.events, batch.worker])


def decode_batch(data: bytes) -> KvBatch:
    """The batch in `data`; events of other names are left out. Raises msgspec.ValidationError, which names the place,
    where it is no batch, and msgspec.DecodeError where it is no msgpack, is nested too deeply or has
    texts that are none."""
    try:
        parts = msgspec.msgpack.decode(data, type=list[Any])
    except RecursionError:
        raise msgspec.DecodeError("a batch of events is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"a text is no UTF-8: {error}") from None
    if len(parts) < 2:
        raise msgspec.ValidationError(f"a batch of events has a time and events; got {len(parts)} parts")
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
        raise msgspec.ValidationError(f"an event is a map or an array that begins with its name - at `$[1][{place}]`")
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
