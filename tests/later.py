"""The threads of `Matchers`, replaced by executors that run when a test asks for it."""

import functools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from redline.run.grammar import matcher
from redline.run.grammar.matcher import Matchers


class Later(Executor):
    """Runs submitted calls when a test asks for it, in order. `compiled`: the texts of grammars, in that order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.compiled: list[str] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, functools.partial(fn, *args, **kwargs)))
        return future

    def run(self, count: int | None = None) -> None:
        """Run at most `count` calls; None: all."""
        while self._waiting and count != 0:
            future, call = self._waiting.popleft()
            future.set_result(call())
            count = None if count is None else count - 1


def compile_later(monkeypatch: pytest.MonkeyPatch, count: int) -> list[Later]:
    """Replace the threads of the next `count` `Matchers`, in the order of their creation. A compiled grammar is
    represented by its text.
    """
    threads = [Later() for _ in range(count)]
    made = iter(threads)

    def compile_text(matchers: Matchers, text: str) -> str:
        thread = matchers._threads
        assert isinstance(thread, Later)
        thread.compiled.append(text)
        return text

    monkeypatch.setattr(matcher, "ThreadPoolExecutor", lambda *_, **__: next(made))
    monkeypatch.setattr(Matchers, "_compile", compile_text)
    return threads
