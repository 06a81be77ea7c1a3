"""Without a GPU, Triton's kernels run in its interpreter; its bf16 arithmetic has to be corrected first.

Ctrl-C is enabled: if the tests run in the background of a shell, SIGINT is ignored, and child processes inherit that.
The number of test processes is 1.5 times that of cores, since tests of servers wait more than they compute. The
processes are forks.
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from unittest import mock

import hypothesis
import pytest
import torch

from redline.bench import machine
from redline.kernels.cpu import native
from redline.limits import processors
from tests import forked, pairwise, real_time, seeds
from tests.waiting import LIMIT_S

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

native.instruction_set()  # by now the variable has set torch's own limit, which torch reads at its first operation

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is decorated
    from tests import triton_bf16

    triton_bf16.mend()


# Tests of programs that start servers or many processes: they run in `make test-all`.
PROGRAMS = (
    "lab/test_ab.py",
    "lab/test_bystander.py",
    "lab/test_golden.py",
    "lab/test_handoffs.py",
    "lab/test_peers_gpu.py",
)

# Its examples are the same in each run as well, and it has no deadline for slow machines.
hypothesis.settings.register_profile(
    "redline", derandomize=True, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("redline")


@pytest.hookimpl(optionalhook=True)  # a hook of a plugin that a nested pytest does not load
def pytest_xdist_auto_num_workers() -> int:
    """The number of processes for `-n auto`."""
    return processors() * 3 // 2


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    """pytest-xdist starts the test processes here. A forked process cannot use a GPU if its parent has initialised
    CUDA.
    """
    if sys.platform == "linux" and getattr(session.config.option, "tx", None) and not torch.cuda.is_available():
        with forked.testers(session.config.invocation_params.args):
            return (yield)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """The thousands of tests and the imported libraries stay until the end: freeze them, so that the garbage collector
    skips them.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before the tests marked `slow` are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of measurement programs as slow, and those that tests/pairwise.py leaves out."""
    for item in items:
        if item.path.relative_to(real_time.TESTS).as_posix().startswith(PROGRAMS):
            item.add_marker(pytest.mark.slow)
    pairwise.mark_others_slow([item for item in items if item.get_closest_marker("pairwise")])


@pytest.fixture(autouse=True, scope="session")
def tests_read_no_real_clock() -> Iterator[None]:
    """See tests/real_time.py."""
    with real_time.refusals():
        yield


@pytest.fixture(autouse=True, scope="session")
def pages_of_tiers_are_waited_for() -> Iterator[None]:
    """Engines have the same limits whichever test a process runs first, on fast and on slow machines."""
    with mock.patch.multiple("redline.worker.tiers", READ_S=LIMIT_S, ROOM_S=LIMIT_S, FLUSH_S=LIMIT_S):
        yield


@pytest.fixture(autouse=True, scope="session")
def a_cpu_is_measured_in_a_moment() -> Iterator[None]:
    """A printed floor divides by the machine's rates, which `bench.machine.measure` measures in 2 s of CPU. In tests a
    CPU multiplies smaller matrices, reads a megabyte, and is measured once.
    """
    read, multiply = machine.read_rate, machine.product_rate

    def read_rate(device: torch.device, size: int, rounds: int) -> float:
        return read(device, size, rounds) if device.type == "cuda" else read(device, min(size, 1 << 20), 1)

    def product_rate(device: torch.device, rounds: int) -> float:
        return multiply(device, rounds) if device.type == "cuda" else multiply(device, 1, 128)

    with mock.patch.multiple(machine, read_rate=read_rate, product_rate=product_rate, TRIES=1):
        yield


@pytest.fixture(autouse=True, scope="session")
def what_was_collected_is_looked_through_by_nobody() -> Iterator[None]:
    """A load of `redline bench` unfreezes what it froze, and would also unfreeze everything that `pytest_collection`
    has frozen.
    """
    with mock.patch.object(gc, "unfreeze"):
        yield


@pytest.fixture(autouse=True)
def random_numbers_are_the_same_in_each_run() -> None:
    """See tests/seeds.py."""
    seeds.seed_globals()


@pytest.fixture(autouse=True)
def logs_are_heard() -> None:
    """Reset levels and enable loggers, which a server that ran in this process may have changed."""
    logging.disable(logging.NOTSET)
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "redline"]:
        logger = logging.getLogger(name)
        logger.setLevel(logging.NOTSET)
        logger.disabled, logger.propagate = False, True


@pytest.fixture(autouse=True)
def signals_stay_as_they_are() -> Iterator[None]:
    """Restore signal handlers: child processes would inherit signals that a test set to be ignored, and could not be
    ended.
    """
    before = [signal.getsignal(number) for number in forked.SIGNALS]
    yield
    assert [signal.getsignal(number) for number in forked.SIGNALS] == before
