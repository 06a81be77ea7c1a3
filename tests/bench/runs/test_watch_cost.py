"""What the program about the cost of a look compares, and what it makes of times."""

import re

import pytest

from redline.bench.runs.watch_cost import Looks, result_of, without_a_look
from redline.kernels.cpu import native


def test_the_build_without_a_look_differs_in_that_alone() -> None:
    header = (native.HERE / "core" / "watch.h").read_text()
    changed = without_a_look(header)
    assert changed[: changed.index("class OpSpan")] == header[: header.index("class OpSpan")]
    [body] = re.findall(r"class OpSpan \{(.*?)\n\};", changed, re.DOTALL)
    assert "redline_watching" not in body
    with pytest.raises(ValueError, match="substring"):
        without_a_look("struct Other {};")


def test_a_share_is_one_look_from_afar_and_all_others_behind_an_op() -> None:
    took = {"as it is": [2.0, *[9.0] * 9], "without": [*[9.0] * 9, 1.6], "copy": [9.0, 2.2, *[9.0] * 8]}
    found = result_of(took, ops=51, look=Looks(near=2.0, behind_an_op=20.0, far=1000.0))
    assert found["step_ms"] == 2.0, "the fastest tenth"
    assert found["share_of_a_step"] == pytest.approx((1000 + 50 * 20) / 2e6)
    assert found["share_of_a_step_near"] == pytest.approx(51 * 2 / 2e6, abs=1e-6)
    assert (found["time_over_without"], found["time_of_a_copy_over_its_own"]) == (1.25, 1.1)
