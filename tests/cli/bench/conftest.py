"""A scripted server, and an environment without keys."""

from collections.abc import Iterator

import pytest

from tests.bench.serving.scripted import Scripted


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with Scripted() as server:
        yield server


@pytest.fixture(autouse=True)
def _still(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """The server's counters count as settled at once; no API keys in the environment."""
    monkeypatch.setattr("redline.bench.serving.accept.STILL_S", 0.0)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("REDLINE_API_KEY", raising=False)
