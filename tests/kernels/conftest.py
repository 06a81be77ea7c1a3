from typing import Any

import pytest
import torch


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill uninitialised outputs with NaN, or a large number, to expose elements that a kernel did not write."""
    empty = torch.empty

    def poisoned(*args: Any, **given: Any) -> torch.Tensor:
        x = empty(*args, **given)
        return x.fill_(torch.nan if x.is_floating_point() else 0x7A)

    monkeypatch.setattr(torch, "empty", poisoned)
