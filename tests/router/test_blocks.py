"""KV events of a vLLM worker, added to our page index; the bytes are written by hand according to the format."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from redline.chat.page_hashes import page_hash, page_hashes
from redline.errors import ConfigError
from redline.messages.job import PAGE_TOKENS, PageHash
from redline.messages.kv_events import BlockStored, decode_batch
from redline.router.blocks import Blocks
from redline.router.index import PageIndex
from redline.scheduler.prefix_cache import Changed
from redline.worker.page_events import PageEvents, events_of

PROMPT = tuple(range(7, 7 + 5 * PAGE_TOKENS))
PAGES = page_hashes(PROMPT, "", "model")


def named(previous: PageHash | None, tokens: tuple[int, ...], salt: str) -> PageHash:
    return page_hashes(tokens, salt, "model")[0] if previous is None else page_hash(previous, tokens, "model")


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, events, 0])


def stored(first: int, count: int, size: int, parent: int | bytes | None = None, **more: Any) -> dict[str, Any]:
    """A stored event for blocks [first, first + count) of PROMPT; block i has the hash i."""
    tokens = list(PROMPT[first * size : (first + count) * size])
    return {
        "type": "BlockStored", "block_hashes": list(range(first, first + count)), "parent_block_hash": parent,
        "token_ids": tokens, "block_size": size, "lora_id": None, "medium": "GPU", "lora_name": None, **more,
    }  # fmt: skip


def removed(*names: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU", **more}


class Followed:
    """A page index with the blocks of one worker."""

    def __init__(self) -> None:
        self.blocks, self.index, self._number = Blocks("vllm-0", named), PageIndex(), 0
        self.index.begin("vllm-0")

    def says(self, *events: Any, number: int | None = None) -> None:
        self._number = self._number if number is None else number
        news = self.blocks.take(self._number, batch(*events))
        self._number += 1
        assert news is None or self.index.take("vllm-0", news)
        self.index.check()

    @property
    def pages(self) -> int:
        """How many of the prompt's first pages the worker has."""
        return self.index.cached(PAGES)["vllm-0"]


@pytest.mark.parametrize("size", [64, 32, 16, 1])
def test_pages_have_the_names_of_our_jobs_whatever_the_blocks_size_is(size: int) -> None:
    each, followed = PAGE_TOKENS // size, Followed()
    followed.says(stored(0, 2 * each, size))
    assert followed.pages == 2
    followed.says(stored(2 * each, 2 * each, size, parent=2 * each - 1))
    assert followed.pages == 4
    followed.says(removed(3 * each))
    assert followed.pages == 3
    followed.says({"type": "AllBlocksCleared"})
    assert followed.pages == len(followed.blocks) == len(followed.index) == 0


def test_a_page_is_there_once_all_its_blocks_are_and_while_they_are() -> None:
    followed = Followed()
    followed.says(stored(0, 3, 16))
    assert followed.pages == 0
    followed.says(stored(3, 1, 16, parent=2))
    assert followed.pages == 1
    followed.says(removed(1))
    assert followed.pages == 0
    assert followed.index.pages_of("vllm-0") == 0
    followed.says(stored(1, 1, 16, parent=0))
    assert followed.pages == 1


def test_what_comes_behind_a_block_that_has_gone_is_known_once_that_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed = Followed()
    followed.says(stored(0, 2, 64), removed(0, 1), stored(2, 1, 64, parent=1))
    assert (followed.pages, followed.index.pages_of("vllm-0"), len(followed.blocks)) == (0, 1, 1)
    followed.says(stored(0, 2, 64))
    assert (followed.pages, followed.blocks.left_out) == (3, 0)
    monkeypatch.setattr("redline.router.blocks.MOST_GONE", 1)
    followed.says(removed(1, 0), stored(1, 1, 64, parent=0))
    assert followed.blocks.left_out == 0
    followed.says(removed(1))
    followed.says(stored(1, 1, 64, parent=0))
    assert followed.blocks.left_out == 1, "the contents of block 0 are no longer known"


def test_an_older_releases_arrays_are_read_too() -> None:
    event = stored(0, 2, 64)
    followed = Followed()
    followed.says(["BlockStored", [b"a", b"b"], None, event["token_ids"], 64, None], ["BlockTransferred", [b"a"], 1])
    assert followed.pages == 2
    followed.says(["BlockRemoved", [b"b"]])
    assert followed.pages == 1
    followed.says(["AllBlocksCleared"])
    assert followed.pages == 0


def test_what_is_not_of_tokens_alone_is_left_out_and_what_hangs_on_it() -> None:
    followed = Followed()
    followed.says(
        stored(0, 1, 64, lora_id=3, lora_name="own"),
        stored(1, 1, 64, parent=0),
        stored(0, 1, 64, extra_keys=[[{"type": "mm", "modality": "image", "hash": "x", "block_offset": 2}]]),
        stored(0, 1, 64, medium="CPU"),
        stored(0, 1, 64, group_idx=1),
    )
    assert (followed.pages, followed.blocks.left_out) == (0, 3)
    followed.says(stored(0, 2, 64), removed(1, medium="CPU"))
    assert followed.pages == 2


@pytest.mark.parametrize("key", ["tenant", {"type": "cache_salt", "salt": "tenant"}])
def test_a_salt_is_in_the_names_as_it_is_in_those_of_our_jobs(key: Any) -> None:
    followed = Followed()
    followed.says(stored(0, 2, 64, extra_keys=[[key], None]))
    assert followed.pages == 0
    assert followed.index.cached(page_hashes(PROMPT, "tenant", "model"))["vllm-0"] == 2


@pytest.mark.parametrize("size", [48, 128, 0])
def test_blocks_of_which_no_pages_can_be_made_are_refused_in_one_line(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"^vllm-0 has blocks of {size} tokens, .*--block-size 64, 32 or 16$"):
        Blocks("vllm-0", named).take(0, batch(stored(0, 1, size)))


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", batch()[:3], msgspec.msgpack.encode([1.0]), batch(7), batch({"type": "BlockRemoved"}),
             batch({**stored(0, 1, 64), "token_ids": [1, 2]}), batch(["BlockStored", [1], None, ["x"] * 64, 64]),
             batch({**stored(0, 1, 64), "token_ids": [-1] * 64}),
             batch({**stored(0, 1, 64), "token_ids": [1 << 32] * 64}), batch([["BlockStored"], 1]),
             batch({"type": []}), batch({"block_hashes": [1]}), b"\x91" * 100_000,
             batch({"type": "x"}).replace(b"x", b"\xff")],
)  # fmt: skip
def test_bytes_that_are_no_batch_change_nothing(data: bytes) -> None:
    blocks = Blocks("vllm-0", named)
    blocks.take(0, batch(stored(0, 1, 64)))
    with pytest.raises(msgspec.DecodeError):
        blocks.take(1, data)
    assert len(blocks) == 1


def test_two_names_of_the_same_content_are_one_page_whichever_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    same = {**stored(0, 1, 64), "block_hashes": [b"salted, which is not told"]}
    gone = {"type": "BlockRemoved", "block_hashes": same["block_hashes"]}
    for kept in (0, 100):
        monkeypatch.setattr("redline.router.blocks.MOST_GONE", kept)
        followed = Followed()
        followed.says(stored(0, 1, 64), same)
        assert followed.pages == 1
        followed.says(gone)
        assert followed.pages == 1
        followed.says(removed(0))
        assert followed.pages == 0
        followed.says(same)
        assert followed.pages == 1
        followed.says(stored(0, 1, 64), gone)
        followed.says(removed(0))
        assert (followed.pages, len(followed.blocks)) == (0, 0)


def test_blocks_of_another_size_within_a_page_are_left_out() -> None:
    followed = Followed()
    followed.says(stored(0, 1, 16), stored(1, 1, 64, parent=0))
    assert (followed.pages, followed.blocks.left_out) == (0, 1)


def test_nothing_is_known_of_before_a_gap_or_of_another_start() -> None:
    followed = Followed()
    followed.says(stored(0, 3, 64))
    followed.says(stored(3, 1, 64, parent=2), number=5)
    assert (followed.pages, len(followed.index), followed.blocks.left_out) == (0, 0, 1)
    followed.says(stored(0, 2, 64))
    assert followed.pages == 2
    followed.says(stored(0, 1, 64), number=0)
    assert followed.pages == 1


class Said:
    """Keeps the messages that are sent."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []

    def send(self, batch: bytes) -> None:
        self.batches.append(batch)

    def close(self) -> None:
        pass


def changed(pages: Sequence[int]) -> list[Changed]:
    return [
        Changed(
            PAGES[page], there=True, previous=PAGES[page - 1] if page else None,
            tokens=PROMPT[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS],
        )
        for page in pages
    ]  # fmt: skip


def test_our_own_events_lead_to_what_our_own_news_would() -> None:
    said, followed = Said(), Followed()
    news = [
        [],
        changed([0, 1, 2]),
        [Changed(PAGES[2], there=False), Changed(PAGES[1], there=False), *changed([1])],
    ]
    changes = iter(news)
    events = PageEvents(lambda: next(changes), said, 3, clock=lambda: 2.5)
    for _ in news:
        events.work()
    events.stop()
    read = [decode_batch(data) for data in said.batches]
    assert [(len(each.events), each.worker, each.at) for each in read] == [
        (1, 3, 2.5), (1, 3, 2.5), (2, 3, 2.5), (1, 3, 2.5),
    ]  # fmt: skip
    for number, (data, pages) in enumerate(zip(said.batches, (0, 3, 2, 0), strict=True)):
        news = followed.blocks.take(number, data)
        assert news is not None
        assert followed.index.take("vllm-0", news)
        assert followed.pages == pages


def test_a_salt_is_told_by_a_hash_of_it_with_the_first_page_alone() -> None:
    pages = [each._replace(salt="secret") for each in changed([0, 1])]
    first, second = (events_of(each)[0] for each in (pages, pages[1:]))
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.extra_keys is not None
    assert first.extra_keys[1] is None
    assert b"secret" not in msgspec.msgpack.encode(first)
    assert second.extra_keys is None


def test_whatever_comes_and_goes_the_pages_that_are_known_are_those_that_are_whole() -> None:
    draw = random.Random(5)
    for size in (16, 32):
        followed, there, each = Followed(), set[int](), PAGE_TOKENS // size
        for _ in range(300):
            if there and draw.random() < 0.4:  # from the end, as a cache evicts
                gone = max(there)
                there.discard(gone)
                followed.says(removed(gone))
            elif (first := len(there)) < len(PROMPT) // size:
                count = draw.randint(1, min(4, len(PROMPT) // size - first))
                there |= set(range(first, first + count))
                followed.says(stored(first, count, size, parent=first - 1 if first else None))
            assert followed.pages == len(there) // each
