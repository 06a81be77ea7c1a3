"""Where there is no GPU, Triton's kernels run in its interpreter, whose bf16 has to be mended first.

And Ctrl-C is heard: who runs the tests in the background of a shell has it ignored, which children inherit. Tests run
in half as many processes again as there are cores, since those of servers wait more than they compute. They are forks.
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

native.instruction_set()  # what it names has bounded torch by now, which reads that when it first computes

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

# Its examples are the same in each run as well, and no machine is too slow for them.
hypothesis.settings.register_profile(
    "redline", derandomize=True, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("redline")


@pytest.hookimpl(optionalhook=True)  # of a plugin that a test's own pytest leaves out
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means."""
    return processors() * 3 // 2


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    """pytest-xdist starts the processes that run tests here. A fork cannot use a GPU that was looked for before it."""
    if sys.platform == "linux" and getattr(session.config.option, "tx", None) and not torch.cuda.is_available():
        with forked.testers(session.config.invocation_params.args):
            return (yield)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of tests and the libraries that they import are kept to the end: nobody looks for garbage in them."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before those that are marked `slow` are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of measurement programs are slow, and so is what tests/pairwise.py leaves out."""
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
    """Whichever test a process begins with, and however slow the machine is, engines have the same limits."""
    with mock.patch.multiple("redline.worker.tiers", READ_S=LIMIT_S, ROOM_S=LIMIT_S, FLUSH_S=LIMIT_S):
        yield


@pytest.fixture(autouse=True, scope="session")
def a_cpu_is_measured_in_a_moment() -> Iterator[None]:
    """A floor that is printed divides by what a machine can do, which `bench.machine.measure` finds in 2 s of CPU. In
    tests a CPU multiplies smaller matrices, reads a megabyte, and is tried once."""
    read, multiply = machine.read_rate, machine.product_rate

    def read_rate(device: torch.device, size: int, rounds: int) -> float:
        return read(device, size, rounds) if device.type == "cuda" else read(device, min(size, 1 << 20), 1)

    def product_rate(device: torch.device, rounds: int) -> float:
        return multiply(device, rounds) if device.type == "cuda" else multiply(device, 1, 128)

    with mock.patch.multiple(machine, read_rate=read_rate, product_rate=product_rate, TRIES=1):
        yield


@pytest.fixture(autouse=True, scope="session")
def what_was_collected_is_looked_through_by_nobody() -> Iterator[None]:
    """A load of `redline bench` thaws what it froze, and would thaw all that `pytest_collection` has frozen."""
    with mock.patch.object(gc, "unfreeze"):
        yield


@pytest.fixture(autouse=True)
def random_numbers_are_the_same_in_each_run() -> None:
    """See tests/seeds.py."""
    seeds.seed_globals()


@pytest.fixture(autouse=True)
def logs_are_heard() -> None:
    """A server that ran in this process may have left its own level behind, or loggers that are off."""
    logging.disable(logging.NOTSET)
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "redline"]:
        logger = logging.getLogger(name)
        logger.setLevel(logging.NOTSET)
        logger.disabled, logger.propagate = False, True


@pytest.fixture(autouse=True)
def signals_stay_as_they_are() -> Iterator[None]:
    """What a test's process ignores from then on, those that it starts would too, and could not be ended."""
    before = [signal.getsignal(number) for number in forked.SIGNALS]
    yield
    assert [signal.getsignal(number) for number in forked.SIGNALS] == before
