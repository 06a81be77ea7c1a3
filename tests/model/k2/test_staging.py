"""What goes through pinned memory arrives as it was, and nothing is written where something has not left yet."""

import pytest
import torch

from redline.model.k2.staging import Staging

CPU = torch.device("cpu")


class Events:
    """Those of a device that is late: a place is reached when somebody waits for it."""

    def __init__(self) -> None:
        self.recorded = 0
        self.waited: list[int] = []

    def __call__(self, device: torch.device) -> "Event":
        assert device == CPU, "another device than has the copies"
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
    """In pieces of 1,000 bytes, or whole where one row is more."""
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
    assert events.waited == [], "three have room side by side"
    staging.put(one)
    assert events.waited == [0]
    staging.put(one[:300])
    assert events.waited == [0, 1]
    staging.put(one)
    assert events.waited == [0, 1, 2], "behind 300 bytes, over the end of the second's place and into the third's"
    staging.wait()
    assert events.waited == [0, 1, 2, 3, 4, 5]
