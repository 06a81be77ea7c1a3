from typing import Any

import pytest
import torch


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write stays NaN, or a large number."""
    empty = torch.empty

    def poisoned(*args: Any, **given: Any) -> torch.Tensor:
        x = empty(*args, **given)
        return x.fill_(torch.nan if x.is_floating_point() else 0x7A)

    monkeypatch.setattr(torch, "empty", poisoned)
