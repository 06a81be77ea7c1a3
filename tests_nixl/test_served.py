"""Two pools behind one server that hand prompts over through NIXL: what holds over shared memory holds here too."""

from collections.abc import Iterator

import pytest

from tests.deploy.test_pools import (  # noqa: F401
    served,
    test_prompts_are_computed_by_the_one_and_answers_given_by_the_other,
    test_streams_go_on_when_a_worker_is_killed,
    tokens_of,
    workers,
)
from tests.deploy.test_pools import test_it_ends_cleanly as ends_cleanly
from tests.deploy.test_serve import Server

NIXL = '[handoff]\ntransport = "nixl"\n'


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("pools"), NIXL) as server:
        yield server


def test_answers_are_those_over_shared_memory(pools: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    numbers = range(30, 36)
    answers = [tokens_of(pools, number) for number in numbers]
    assert workers(pools)["decode"]["epoch"] > 1, "it was started anew, and its peer with it, by the tests above"
    with served(tmp_path_factory.mktemp("shared")) as server:
        assert answers == [tokens_of(server, number) for number in numbers]
        ends_cleanly(server)


def test_it_ends_cleanly(pools: Server) -> None:
    ends_cleanly(pools)
