"""Data copied through pinned memory arrives unchanged, and no region is overwritten before its copy has completed."""

import random
from collections import deque
from collections.abc import Iterator

import pytest
import torch

from redline.model.k2 import staging as staging_module
from redline.model.k2.staging import Staging

CPU = torch.device("cpu")


class Events:
    """Events of a slow device: an event completes only when it is waited for."""

    def __init__(self) -> None:
        self.recorded = 0
        self.waited: list[int] = []

    def __call__(self, device: torch.device) -> "Event":
        assert device == CPU, "the event is recorded on another device than the copies"
        self.recorded += 1
        return Event(self, self.recorded - 1)


class Event:
    def __init__(self, events: Events, number: int) -> None:
        self._events = events
        self._number = number

    def synchronize(self) -> None:
        self._events.waited.append(self._number)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (300,), (64, 100), (7, 3, 20), (3, 5000)], ids=str)
def test_a_tensor_arrives_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """In pieces of 1,000 bytes, or whole rows if a row is larger."""
    size = torch.Size(shape).numel()
    bits = torch.randint(0, 256, (size * dtype.itemsize,), generator=torch.Generator().manual_seed(0))
    given = bits.to(torch.uint8).view(dtype).view(shape)
    came = Staging(CPU, 3000, 1000, Events()).put(given)
    assert (came.shape, came.dtype) == (given.shape, dtype)
    assert came.flatten().view(torch.uint8).tolist() == bits.tolist()
    assert came.data_ptr() != given.data_ptr() or not size


def test_a_part_of_columns_arrives_side_by_side() -> None:
    whole = torch.arange(6000, dtype=torch.int32).view(60, 100)
    came = Staging(CPU, 3000, 1000, Events()).put(whole[:, 25:50])
    assert came.is_contiguous()
    assert torch.equal(came, whole[:, 25:50])


def test_room_is_taken_again_once_what_lay_there_has_come() -> None:
    events = Events()
    staging = Staging(CPU, 3 * 1024, 1024, events)
    one = torch.zeros(1000, dtype=torch.uint8)
    for _ in range(3):
        staging.put(one)
    assert events.waited == [], "three tensors fit at once"
    staging.put(one)
    assert events.waited == [0]
    staging.put(one[:300])
    assert events.waited == [0, 1]
    staging.put(one)
    assert events.waited == [0, 1, 2], "after 300 bytes, across the end of the second region and into the third"
    staging.wait()
    assert events.waited == [0, 1, 2, 3, 4, 5]


def test_whatever_the_sizes_nothing_is_written_where_something_is_under_way() -> None:
    """Compared with a record of the occupied regions."""
    random_, events = random.Random(0), Events()
    staging = Staging(CPU, 4096, 2048, events)
    there: dict[int, tuple[int, int]] = {}  # by the number of the event that frees the region
    most = 0
    for number in range(500):
        size = random_.choice([1, 7, 255, 256, 257, 1000, 2048])
        staging.put(torch.zeros(size, dtype=torch.uint8))
        first, last, _ = staging._under_way[-1]
        assert (last - first, last <= 4096, first % 256) == (size, True, 0)
        for waited in events.waited:
            there.pop(waited, None)
        assert not [place for place in there.values() if place[0] < last and first < place[1]]
        there[number] = first, last
        most = max(most, len(there))
    assert most > 5, "several copies must be in flight at once"


def test_a_tensor_takes_as_long_however_many_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model has thousands in the ring; the test counts the entries inspected instead of seconds."""
    looked = 0

    class Counting(deque[tuple[int, int, Event]]):
        def __getitem__(self, index: int) -> tuple[int, int, Event]:  # type: ignore[override]
            nonlocal looked
            looked += 1
            return super().__getitem__(index)

        def __iter__(self) -> Iterator[tuple[int, int, Event]]:
            for one in super().__iter__():
                nonlocal looked
                looked += 1
                yield one

    monkeypatch.setattr(staging_module, "deque", Counting)
    staging = Staging(CPU, 100_000, 1024, Events())
    for _ in range(1000):
        staging.put(torch.zeros(16, dtype=torch.uint8))
    assert looked < 5000
