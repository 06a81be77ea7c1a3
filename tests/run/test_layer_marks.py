"""How many layers of a step a device has finished, as seen by another thread."""

import pytest

from redline.errors import RankLost
from redline.kernels.group import ALONE
from redline.run.layer_marks import LayerMarks
from redline.run.pending import LaunchedStep


class Device:
    """A stream that has passed a given number of the marks recorded on it."""

    def __init__(self) -> None:
        self.marked = self.passed = 0
        self.error: Exception | None = None

    def mark(self) -> "OnDevice":
        self.marked += 1
        return OnDevice(self, self.marked)


class OnDevice:
    def __init__(self, device: Device, number: int) -> None:
        self._device, self._number = device, number

    def query(self) -> bool:
        if self._device.error is not None:
            raise self._device.error
        return self._device.passed >= self._number


def test_marks_are_over_once_the_device_has_passed_the_last_that_will_be_made() -> None:
    device = Device()
    marks = LayerMarks(device.mark)
    assert (marks.passed(), marks.over) == (0, False)
    for layers in (1, 2, 5):
        marks.launched(layers)
    device.passed = 2
    assert (marks.passed(), marks.over) == (2, False)
    device.passed = 3
    assert (marks.passed(), marks.over) == (5, False), "more marks may follow"
    marks.end()
    assert marks.over


def test_a_step_that_marks_nothing_is_not_looked_at_for_ever() -> None:
    marks = LayerMarks(Device().mark)
    marks.end()
    assert marks.over


def launched(marks: LayerMarks | None) -> LaunchedStep:
    return LaunchedStep(None, ALONE, marks)  # type: ignore[arg-type]


def test_whoever_watches_is_told_of_layers_until_all_are_computed() -> None:
    device, seen = Device(), list[int]()
    marks = LayerMarks(device.mark)
    for layers in range(1, 4):
        marks.launched(layers)
    marks.end()

    def meanwhile(layers: int) -> None:
        seen.append(layers)
        device.passed += len(seen) % 2

    launched(marks).watch(meanwhile)
    assert seen == [0, 1, 1, 2, 2, 3]
    launched(None).watch(lambda _: pytest.fail("no marks were requested"))


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access was encountered"), RankLost("1")])
def test_what_goes_wrong_while_it_is_watched_is_left_to_the_wait(error: Exception) -> None:
    device = Device()
    marks = LayerMarks(device.mark)
    marks.launched(1)
    device.error = error
    launched(marks).watch(lambda _: pytest.fail("the progress of this step is unknown"))
