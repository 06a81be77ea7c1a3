"""KV transfers from GPU to GPU, with records in place of driver and GPU: launched operations complete
later, or never.
"""

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from redline.messages.handoff import Piece
from redline.messages.job import Abort, Job, JobId, PageId
from redline.run.kv import KvPool
from redline.run.kv_chunks import KvChunkLayout
from redline.transport.base import MemoryRange
from redline.transport.memory import MemoryTransport
from redline.transport.peer import GpuDriver, PeerTransport
from redline.worker.parcel_memory import Ended, HostParcels, Summed
from redline.worker.rank_memory import FollowedMemory, RankMemory
from redline.worker.rank_parcels import RankParcels
from redline.worker.ranks import Ranks
from redline.worker.transfer_paths import Carrier
from tests.handoff import Pair
from tests.tiny_model import BOTH, Answer, job, open_engine, prompt, run_alone, tiny_model
from tests.transport.books import Book


class LateParcels(HostParcels):
    """Behaves as a GPU's memory: an operation completes some polls after its launch."""

    fill_s = patience_s = 0.001

    def __init__(self, looks: int) -> None:
        self._looks = looks

    def later(self) -> Ended:
        left = [self._looks]

        def ended() -> bool:
            left[0] -= 1
            return left[0] < 0

        return ended

    def sum(self, parcel_B: Tensor, seed: int) -> Summed:
        return Summed(self.later(), super().sum(parcel_B, seed).number)

    def scatter(self, parcels: KvChunkLayout, piece: Piece, pages: Sequence[int], from_B: Tensor) -> Ended:
        super().scatter(parcels, piece, pages, from_B)
        return self.later()


@pytest.fixture
def book() -> Book:
    return Book(polls=2)


def pair(book: Book, looks: int = 2) -> Pair:
    """Two workers with the `peer` transport, and `memory` as the fallback."""
    memory = MemoryTransport()
    engines = [open_engine(tiny_model(), speculation=BOTH, step_tokens=100) for _ in range(2)]

    def carriers() -> list[Carrier]:
        return [
            Carrier("peer", PeerTransport(book.gpu()), LateParcels(looks)),
            Carrier("memory", memory, HostParcels()),
        ]

    return Pair(*engines, carriers=carriers)


def asked(name: str = "asked", seed: int = 1) -> Job:
    return job(name, prompt(seed=seed, length=300), max_tokens=12)


def told(answer: Answer) -> Answer:
    return answer._replace(cached_tokens=0, proposed=0, accepted=0)


def alone(one: Job) -> Answer:
    return told(run_alone(tiny_model(), one))


def finished(both: Pair) -> None:
    for side in (both.computes, both.answers):
        side.engine.planner.check()
        side.exchange.check()
        assert side.engine.planner.load().pages_used == 0
        assert side.exchange.idle


@pytest.mark.parametrize("looks", [0, 200], ids=["within the turn", "turns later"])
def test_a_prompt_travels_from_gpu_to_gpu(book: Book, looks: int) -> None:
    both = pair(book, looks)
    try:
        answers = both.run([asked(), asked("other", seed=2)])
        assert both.answers.exchange.counts == {"taken over": 2}
        assert both.answers.engine.planner.load().prompt_tokens == 0
        assert book.mapped.total() == 1
        finished(both)
    finally:
        both.close()
    assert book.mapped.total() == 0
    for one in (asked(), asked("other", seed=2)):
        assert told(answers[one.id]) == alone(one)


class OneMore:
    """Replaces `worker.ranks.Ranks`: one additional rank with pages like those of rank 0."""

    def __init__(self, chip_of: Callable[[], GpuDriver], like: KvPool) -> None:
        planes, draft, tails = (torch.zeros_like(each) for each in (like.planes, like.draft, like.tails))
        self.kv = cast("KvPool", SimpleNamespace(planes=planes, draft=draft, tails=tails))
        self._memory = RankMemory(2)
        self._other = FollowedMemory(os.dup(self._memory.file), 1, self.kv, lambda _: chip_of())

    def export(self, chip: GpuDriver, size: int) -> MemoryRange:
        memory, told = self._memory.export(chip, size)
        self._other.map(told)
        return memory

    def scatter(self, piece: Piece, pages: Sequence[PageId], from_B: Tensor) -> Ended:
        self._other.scatter(self._memory.scatter(piece, pages, from_B))
        number = self._memory.told
        return lambda: self._memory.all_have(number)


def test_what_comes_to_the_gpu_of_rank_0_reaches_the_pages_of_all_ranks(book: Book) -> None:
    computes, writes = (open_engine(tiny_model(), speculation=BOTH, step_tokens=100) for _ in range(2))
    kv = writes.runner.kv
    more = [OneMore(book.gpu, engine.runner.kv) for engine in (computes, writes)]
    ranks = iter([cast("Ranks", each) for each in more])

    def carriers() -> list[Carrier]:
        chip = book.gpu()
        return [Carrier("peer", PeerTransport(chip), RankParcels(next(ranks), LateParcels(2), chip))]

    both = Pair(computes, writes, carriers=carriers)
    try:
        answers = both.run([asked()])
        assert both.answers.exchange.counts == {"taken over": 1}
        finished(both)
    finally:
        both.close()
    assert told(answers["asked"]) == alone(asked())
    came = more[1].kv.planes != 0
    assert came.any(-1).sum() == kv.planes.shape[0] * len(asked().tokens)
    assert torch.equal(more[1].kv.planes[came], kv.planes[came])
    assert more[1].kv.draft.any()
    assert not more[0].kv.planes.any(), "the prefill worker must not receive anything"


def test_where_the_gpus_do_not_reach_each_other_it_travels_over_the_next_way(
    book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    book.refuse = "CUDA driver error 217: peer access is not supported between these two devices"
    both = pair(book)
    try:
        answers = both.run([asked()])
        assert both.answers.exchange.counts == {"taken over": 1}
        finished(both)
    finally:
        both.close()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("KV chunks of worker prefill are read over `memory`: `peer`: this GPU cannot map")
    assert "217" in line
    assert told(answers["asked"]) == alone(asked())


def flip(address: int, count: int) -> None:
    import ctypes

    byte = ctypes.c_ubyte.from_address(address + count // 2)
    byte.value ^= 4


def failing(book: Book) -> None:
    book.fail = "CUDA driver error 719: unspecified launch failure"


def flipping(book: Book) -> None:
    book.change = flip


@pytest.mark.parametrize("harm", [failing, flipping], ids=["no copy", "a wrong bit"])
def test_what_does_not_come_right_is_computed_where_the_answer_is(book: Book, harm: Callable[[Book], None]) -> None:
    harm(book)
    both = pair(book)
    try:
        answers = both.run([asked()])
        assert both.answers.exchange.counts == {"transfer": 1}
        finished(both)
    finally:
        both.close()
    assert told(answers["asked"]) == alone(asked())


def test_a_connection_that_has_failed_is_closed_before_another_is_made(book: Book) -> None:
    both = pair(book)
    try:
        for number in range(3):
            book.change = flip
            both.run([asked(f"{number}", seed=number)])
            assert book.mapped.total() == 0
        book.change = None
        both.run([asked("3", seed=3)])
        assert both.answers.exchange.counts == {"transfer": 3, "taken over": 1}
        assert book.mapped.total() == 1
        finished(both)
        both.stop_computing()
        both.turn()
        assert book.mapped.total() == 0
    finally:
        both.close()


def test_a_connection_that_has_failed_is_closed_once_what_others_read_over_it_is_there(book: Book) -> None:
    """One byte of one job's chunk is wrong, while a chunk of another job is in flight over the same connection."""
    both = pair(book)
    arrivals = both.answers.exchange._ways["peer"].arrivals
    under_way = arrivals.under_way
    arrivals._memory._looks = 1 << 30  # type: ignore[attr-defined]  # no checksum completes yet
    try:
        both.send([asked(), asked("other", seed=2)])
        with torch.inference_mode():
            for _ in range(100):
                both.turn()
            assert {arrival.of.job.id for arrival in under_way if arrival.summed} == {"asked", "other"}
            arrivals._memory._looks = 0  # type: ignore[attr-defined]
            for arrival in [one for one in under_way if one.of.job.id == "asked"]:
                arrival.summed = Summed(lambda: True, lambda: 0)
            both.turn()
            assert both.answers.exchange.counts == {"transfer": 1}
            assert {arrival.of.job.id for arrival in under_way} == {"other"}
            assert book.mapped.total() == 1, "the connection is still being read"
            for arrival in under_way:
                assert arrival.summed is not None
                arrival.summed = arrival.summed._replace(ended=lambda: True)
        answers = both.run()
        assert both.answers.exchange.counts == {"transfer": 1, "taken over": 1}
        assert book.mapped.total() <= 1
        finished(both)
    finally:
        both.close()
    assert book.mapped.total() == 0
    for one in (asked(), asked("other", seed=2)):
        assert told(answers[one.id]) == alone(one)


def test_what_is_lent_of_a_job_is_known_no_longer_than_it_is_lent(book: Book) -> None:
    """While another reader never takes its chunk, so that one lease is always active."""
    both = pair(book)
    computes = both.computes.exchange
    (first, *_) = computes._outgoing._departures
    other = first.lender.lend(256, "another reader", 1e9)
    assert other is not None
    try:
        for number in range(4):
            both.send([asked(f"{number}", seed=number)])
            with torch.inference_mode():
                for _ in range(1000):
                    both.turn()
                    if both.answers.idle and not computes._outgoing.prompts:
                        break
            both.turn()  # processes the last message
            assert first.lender.lent == (other,)
            assert computes._outgoing._leases == {}
        assert computes.counts["handed over"] == 4
    finally:
        first.lender.drop(other)
        both.close()


@pytest.mark.parametrize("turns", [2, 3, 5])
def test_an_abort_or_an_end_may_come_while_things_are_on_their_way(book: Book, turns: int) -> None:
    """One job is aborted by its client; then the prefill worker ends, and its exported memory is gone."""
    both = pair(book, looks=200)
    try:
        both.send([asked(), asked("other", seed=2)])
        with torch.inference_mode():
            for _ in range(turns):
                both.turn()
            both.answers.box.put(Abort(job=JobId("asked")))
            for _ in range(2):
                both.turn()
        both.stop_computing()
        answers = both.run()
        both.answers.exchange.check()
        both.answers.engine.planner.check()
        assert both.answers.exchange.idle
        assert book.mapped.total() == 0, "none of its memory may stay mapped"
    finally:
        both.close()
    assert told(answers["other"]) == alone(asked("other", seed=2))
