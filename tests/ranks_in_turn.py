"""Ranks as threads of this process, of which one computes at a time, with exact all-reduces in rank order.

The kernels' emulator and Triton's interpreter are single-threaded; a rank yields whenever it waits for the others.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
WAIT_S = 60.0


class Meeting:
    """The tensors that ranks have contributed to their calls so far. said: names of calls and of their
    ends, by rank.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.said: list[list[str]] = [[] for _ in range(ranks)]
        self._brought: dict[int, dict[int, Tensor]] = {}
        self._turn = threading.Condition()
        self._failed = False

    def run(self, work: Callable[["InTurn"], T]) -> list[T]:
        """The results of all ranks. Raises the exception of a rank that fails."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def rank(number: int) -> None:
            with self._turn, torch.inference_mode():
                try:
                    results[number] = work(InTurn(self, number))
                except BaseException as error:  # for any exception, the others must not wait
                    errors.append(error)
                    self._failed = True
                self._turn.notify_all()

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
        if errors:
            raise errors[0]
        return [results[number] for number in range(self.ranks)]

    def bring(self, call: int, rank: int, given: Tensor) -> Callable[[], list[Tensor]]:
        """Contributes a rank's tensor to its call of this number. -> a function that waits until all have, and returns
        the tensors in rank order.
        """
        brought = self._brought.setdefault(call, {})
        brought[rank] = given
        self._turn.notify_all()

        def all_of_them() -> list[Tensor]:
            assert self._turn.wait_for(lambda: self._failed or len(brought) == self.ranks, WAIT_S), "a rank is missing"
            assert len(brought) == self.ranks, "another rank has failed"
            assert len({each.shape for each in brought.values()}) == 1, (
                "all ranks must contribute the same number of rows"
            )
            return [brought[other] for other in range(self.ranks)]

        return all_of_them


class InTurn:
    """A rank's `Group`. Inputs of a call are NaN until its end, and so are its outputs."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.ranks = rank, meeting.ranks
        self._meeting = meeting
        self._calls = 0

    def all_reduce(self, partial: Tensor) -> Tensor:
        """As `Group.all_reduce`."""
        return self.begin_all_reduce(partial)()

    def begin_all_reduce(self, partial: Tensor) -> Callable[[], Tensor]:
        """As `Group.begin_all_reduce`."""
        end = self._begin("add", partial)
        partial.fill_(torch.nan)
        return lambda: partial.copy_(_sum(end()))

    def begin_reduce_scatter(self, partial: Tensor) -> Callable[[], Tensor]:
        """As `Group.begin_reduce_scatter`."""
        end, dtype = self._begin("add rows", partial), partial.dtype
        assert partial.shape[0] % self.ranks == 0
        partial.fill_(torch.nan)
        return lambda: _sum(end()).chunk(self.ranks)[self.rank].to(dtype)

    def begin_all_gather_rows(self, own: Tensor, whole: Tensor) -> Callable[[], Tensor]:
        """As `Group.begin_all_gather_rows`."""
        end = self._begin("gather rows", own)
        assert (whole.shape, whole.dtype) == ((self.ranks * own.shape[0], *own.shape[1:]), own.dtype)
        assert whole.is_contiguous()
        whole.fill_(torch.nan)
        return lambda: whole.copy_(torch.cat(end()))

    def all_gather(self, part_RV: Tensor) -> Tensor:
        """As `Group.all_gather`."""
        return torch.cat(self._begin("gather", part_RV)(), 1)

    def check(self) -> None:
        """No rank is lost."""

    def set_timeout(self, seconds: float) -> None:
        """Does nothing: the timeout is always WAIT_S."""

    def abort(self, reason: str) -> None:
        """Does nothing: no rank is lost."""

    def close(self) -> None:
        """Does nothing: no resource is shared."""

    def _begin(self, name: str, given: Tensor) -> Callable[[], list[Tensor]]:
        assert given.is_contiguous(), "NCCL accepts contiguous tensors only"
        said, self._calls = self._meeting.said[self.rank], self._calls + 1
        said.append(name)
        end = self._meeting.bring(self._calls, self.rank, given.clone())

        def ended() -> list[Tensor]:
            said.append(f"{name}: end")
            return end()

        return ended


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).float().sum(0)
