"""A group of GPUs closes everything that it opened, and wakes every waiting thread. The GPUs are replaced by records of
calls.
"""

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from redline.errors import ConfigError, RankLost
from redline.kernels.cuda import driver
from redline.kernels.cuda.collectives import gpu_group as group
from redline.kernels.cuda.collectives.gpu_group import GpuGroup
from redline.kernels.cuda.collectives.rank_links import UNSENT, new_control, rooms_of
from tests.seeds import fresh_generator
from tests.waiting import LIMIT_S, until

CPU = torch.device("cpu")
ROOMS = rooms_of(128, 32, heads=2, rank=256, rope=64, projected=704)
ONES = torch.ones(2, 4)


class Chips:
    """Stands in for the driver and NCCL of all ranks: records which memory is allocated and which
    ranks have it open.
    """

    CudaError = driver.CudaError

    def __init__(self) -> None:
        self.held: list[bytes] = []
        self.open: Counter[bytes] = Counter()
        self.freed_while_open = False
        self.joined = 0
        self.refused: set[bytes] = set()
        self.aborted = threading.Event()
        self.in_nccl: Callable[[], object] = lambda: None  # called when a rank begins to wait in NCCL
        self.group = SimpleNamespace(WORLD=SimpleNamespace(abort=self.aborted.set))
        self._lock = threading.Lock()

    def SharedMemory(self, size: int) -> SimpleNamespace:
        with self._lock:
            handle = bytes([len(self.held)]) * 64
            self.held.append(handle)

        def fill(word: int) -> None:
            assert word == UNSENT

        return SimpleNamespace(
            address=1 + handle[0], handle=handle, size=size, fill=fill, free=lambda: self.free(handle)
        )

    def free(self, handle: bytes) -> None:
        with self._lock:
            self.freed_while_open = self.freed_while_open or self.open[handle] > 0
            self.held.remove(handle)

    def open_shared(self, handle: bytes) -> int:
        if handle in self.refused:
            raise driver.CudaError("CUDA driver error 217: peer access is not supported")
        with self._lock:
            self.open[handle] += 1
        return 1 + handle[0]

    def close_shared(self, address: int) -> None:
        with self._lock:
            self.open[bytes([address - 1]) * 64] -= 1

    def init_process_group(self, *_: object, **__: object) -> None:
        with self._lock:
            self.joined += 1

    def destroy_process_group(self) -> None:
        with self._lock:
            self.joined -= 1

    def all_reduce(self, *_: Tensor, async_op: bool) -> None:
        """Behaves as NCCL does with a missing rank: waits until the communicator is aborted."""
        self.in_nccl()
        assert self.aborted.wait(LIMIT_S), "NCCL was not aborted"
        raise RuntimeError("NCCL communicator was aborted")

    reduce_scatter_tensor = reduce_scatter_single = all_reduce
    all_gather_into_tensor = all_gather_single = all_reduce


def unpinned(seconds: float, **_: bool) -> Tensor:
    return new_control(seconds, pinned=False)


@pytest.fixture
def chips(monkeypatch: pytest.MonkeyPatch) -> Chips:
    chips = Chips()
    monkeypatch.setattr(group, "driver", chips)
    monkeypatch.setattr(group, "dist", chips)
    monkeypatch.setattr(group, "new_control", unpinned)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return chips


def opened(file: Path, ranks: int) -> list[GpuGroup]:
    groups: dict[int, GpuGroup] = {}

    def open_rank(rank: int) -> None:
        groups[rank] = GpuGroup(str(file), rank, ranks, CPU, ROOMS)

    at_once([lambda rank=rank: open_rank(rank) for rank in range(ranks)])
    return [groups[rank] for rank in range(ranks)]


def at_once(work: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


CALLS: dict[str, Callable[[GpuGroup], object]] = {
    "add": lambda group: group.all_reduce(ONES),
    "add rows": lambda group: group.begin_reduce_scatter(ONES)(),
    "gather rows": lambda group: group.begin_all_gather_rows(ONES[:1], torch.zeros(2, 4))(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_waits_in_nccl_wakes_and_says_who_is_lost(call: str, chips: Chips, tmp_path: Path):
    zero, _ = opened(tmp_path / "meet", 2)
    reason = "rank 1 is lost in step 5: it has ended with code -9"
    chips.in_nccl = threading.Thread(target=zero.abort, args=[reason]).start
    with pytest.raises(RankLost, match=reason):
        CALLS[call](zero)
    with pytest.raises(RankLost, match=reason):
        CALLS[call](zero)


class Begun(SimpleNamespace):
    """An NCCL call that was started; it is aborted before its end is awaited."""

    def wait(self) -> None:
        raise RuntimeError("NCCL communicator was aborted")


@pytest.mark.parametrize("name", ["begin_all_reduce", "begin_reduce_scatter", "begin_all_gather_rows"])
def test_a_call_that_was_begun_before_a_rank_was_lost_says_so_at_its_end(
    name: str, chips: Chips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    zero, _ = opened(tmp_path / "meet", 2)
    for call in ("all_reduce", group._REDUCE_SCATTER, group._ALL_GATHER):
        monkeypatch.setattr(chips, call, lambda *_, async_op: Begun())
    end = getattr(zero, name)(*(ONES, torch.zeros(4, 4))[: 1 + (name == "begin_all_gather_rows")])
    zero.abort("rank 1 is lost")
    with pytest.raises(RankLost, match="rank 1 is lost"):
        end()


def test_rows_are_added_up_and_gathered_by_torchs_own_calls(
    chips: Chips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One rank, over another backend than NCCL: inputs and outputs must not be swapped."""
    monkeypatch.setattr(group, "dist", dist)
    begin = dist.init_process_group

    def gloo(_: str, *, device_id: object, **given: Any) -> None:
        begin("gloo", **given)

    monkeypatch.setattr(dist, "init_process_group", gloo)
    (alone,) = opened(tmp_path / "meet", 1)
    given, whole = torch.randn(6, 4, generator=fresh_generator()).bfloat16(), torch.zeros(8, 4).bfloat16()
    own = alone.begin_reduce_scatter(given)()
    assert torch.equal(own, given)
    assert own.data_ptr() != given.data_ptr()
    alone.begin_all_gather_rows(own, whole[1:7])()
    assert torch.equal(whole[1:7], given)
    assert not whole[0].any()
    alone.close()
    assert not dist.is_initialized()


def test_what_follows_a_lost_rank_is_told_so_though_no_kernel_has_waited(chips: Chips, tmp_path: Path):
    """An aborted NCCL all-reduce leaves finite numbers and no mark that they are wrong."""
    zero, one = opened(tmp_path / "meet", 2)
    zero.check()
    zero.abort("rank 1 is lost")
    with pytest.raises(RankLost, match="rank 1 is lost"):
        zero.check()
    chips.aborted.clear()
    with pytest.raises(RankLost, match="rank 1 is lost"):
        zero.all_reduce(ONES)
    zero.set_timeout(120.0)
    assert int(zero.links.control[0]) == 0, "a kernel launched now would wait"
    one.check()


def test_memory_is_freed_once_no_rank_has_it_open(chips: Chips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group, "CLOSE_S", LIMIT_S)
    groups = opened(tmp_path / "meet", 3)
    assert len(chips.held) == chips.joined == 3
    assert chips.open.total() == 6

    def close(rank: int) -> None:
        until(lambda: chips.open.total() <= 6 - 2 * rank)  # the ranks before this one have closed theirs, and wait
        groups[rank].close()

    at_once([lambda rank=rank: close(rank) for rank in range(3)])
    assert (chips.held, chips.open.total(), chips.joined) == ([], 0, 0)
    assert not chips.freed_while_open


def test_a_group_that_has_lost_a_rank_waits_for_nobody_at_its_end(
    chips: Chips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    zero, _ = opened(tmp_path / "meet", 2)
    zero.links.control[1] = 1 + 1  # as written by a kernel after its wait timed out
    with pytest.raises(RankLost, match="rank 1 has kept rank 0 waiting for 120 s"):
        zero.check()
    monkeypatch.setattr(zero, "_store", None)  # the store, through which it would notify the others and wait
    zero.close()
    assert len(chips.held) == 1
    assert chips.aborted.is_set(), "a prompt's all-reduce after that kernel would wait as well"


def test_a_group_that_cannot_be_opened_gives_back_what_it_has(chips: Chips, tmp_path: Path):
    """The third of three GPUs does not allow access to its memory."""
    file = tmp_path / "meet"
    others = [FileStore(str(file), 3) for _ in range(2)]
    for rank, store in enumerate(others, 1):
        store.set(f"inbox {rank}", (bytes([100 + rank]) * 64).hex())
    chips.refused = {bytes([102]) * 64}
    with pytest.raises(ConfigError, match=r"engine\.ranks is 3: this GPU and another cannot share memory .*217"):
        GpuGroup(str(file), 0, 3, CPU, ROOMS)
    assert chips.open == {bytes([101]) * 64: 0}
    assert (chips.held, chips.joined) == ([], 0)


def test_memory_that_gets_no_handle_is_freed(monkeypatch: pytest.MonkeyPatch):
    freed: list[int] = []

    class Cuda:
        def cuMemAlloc_v2(self, at: object, _: object) -> int:
            at._obj.value = 4096  # type: ignore[attr-defined]
            return 0

        def cuIpcGetMemHandle(self, *_: object) -> int:
            return 801

        def cuMemFree_v2(self, at: ctypes.c_uint64) -> int:
            freed.append(at.value)
            return 0

        def cuGetErrorString(self, *_: object) -> int:
            return 0

    monkeypatch.setattr(driver, "_cuda", Cuda)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    with pytest.raises(driver.CudaError, match="801"):
        driver.SharedMemory(64)
    assert freed == [4096]
