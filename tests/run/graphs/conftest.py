"""Fixtures shared by the tests of CUDA graphs."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from redline.run.runner import Runner
from redline.worker.engine import EngineCore
from tests.tiny_model import open_engine, tiny_model

Open = Callable[..., EngineCore]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens engines that run their decode steps as CUDA graphs."""

    def opened(**config: Any) -> EngineCore:
        with monkeypatch.context() as patch:
            patch.setattr("redline.worker.engine.Runner", functools.partial(Runner, captured=True))
            return open_engine(tiny_model(), **config)

    return opened
