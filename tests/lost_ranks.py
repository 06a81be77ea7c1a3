"""Faults of a rank in a step."""

from collections.abc import Callable
from typing import Any

import pytest

from redline.messages.step import Step
from redline.worker.ranks import LeadingRunner


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Call `act` before the step of this number is launched."""
    launch = LeadingRunner.launch

    def launched(self: LeadingRunner, step: Step) -> Any:
        if step.number == number:
            act()
        return launch(self, step)

    monkeypatch.setattr(LeadingRunner, "launch", launched)
