"""Two pools on two machines that hand prompts over through NIXL, as processes of loopback."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.deploy.test_machines import agent_of
from tests.deploy.test_pools import (  # noqa: F401
    served,
    test_prompts_are_computed_by_the_one_and_answers_given_by_the_other,
    tokens_of,
    workers,
)
from tests.deploy.test_pools import test_it_ends_cleanly as ends_cleanly
from tests.deploy.test_serve import Server

MACHINES = """at = "gpu-1"
[cluster]
listen = "127.0.0.1:0"
key_file = "cluster.key"
[handoff]
transport = "nixl"
"""


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Prompts are computed on the server's machine, and answers given on another."""
    folder = tmp_path_factory.mktemp("pools")
    key_file = folder / "cluster.key"
    key_file.write_text("a shared key of forty characters, no less")
    key_file.chmod(0o600)
    with ExitStack() as agents:

        def join(server: Server) -> None:
            agents.callback(agent_of(server, key_file, "gpu-1").close)

        yield agents.enter_context(served(folder, MACHINES, meanwhile=join))


def test_each_is_on_its_own_machine(pools: Server) -> None:
    assert {name: worker["at"] for name, worker in workers(pools).items()} == {"prefill": None, "decode": "gpu-1"}


def test_answers_are_those_of_one_machine(pools: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    numbers = range(30, 36)
    answers = [tokens_of(pools, number) for number in numbers]
    with served(tmp_path_factory.mktemp("shared")) as server:
        assert answers == [tokens_of(server, number) for number in numbers]
        ends_cleanly(server)


def test_it_ends_cleanly(pools: Server) -> None:
    ends_cleanly(pools)
