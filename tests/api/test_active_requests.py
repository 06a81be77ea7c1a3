"""The load of workers is that of their active jobs; `check` notices any difference."""

from typing import Any

import pytest

from redline.messages.delta import Delta
from redline.messages.job import JobId
from redline.router.worker_registry import QueuedPrompt
from tests.api.fake_engine import deliver
from tests.api.test_gateway import Heard, resuming, text_ask
from tests.api.world import World

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize(
    ("of", "name", "value"),
    [
        ("worker", "jobs", 2),
        ("worker", "prompts", {JobId("ended"): QueuedPrompt(9, ())}),
        ("worker", "awaiting_prefill", {JobId("ended"): 9}),
        ("requests", "waiting", 0),
        ("requests", "preparing_tokens", -1),
        ("job", "worker", None),
    ],
)
async def test_a_wrong_load_is_noticed(of: str, name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with World(resuming) as world:
        world.engine.gate.clear()
        with await world.gateway.begin(text_ask()) as generation:
            requests = world.gateway.requests
            requests.check()
            owner = {"worker": world.link, "requests": requests, "job": generation.jobs[0]}[of]
            with monkeypatch.context() as wrong:
                wrong.setattr(owner, name, value)
                with pytest.raises(AssertionError):
                    requests.check()
            requests.check()


async def test_each_stage_of_a_job_with_a_prefill_worker_counts_where_it_is() -> None:
    async with World(resuming, resume_s=600.0) as world:
        gateway, requests = world.gateway, world.gateway.requests
        gateway.monitor.mark_down(world.link, "not used")
        first, second = Heard(gateway, "d", "decode"), Heard(gateway, "e", "decode")
        prefill = Heard(gateway, "p", "prefill")

        def jobs() -> list[int]:
            requests.check()
            return [each.link.jobs for each in (first, second, prefill)]

        with await gateway.begin(text_ask("the end " * 40)) as generation:
            (job,) = generation.jobs
            assert (jobs(), requests.waiting) == ([1, 0, 1], 1)
            gateway.monitor.mark_down(first.link, "gone")
            assert jobs() == [0, 1, 1]
            deliver(gateway, second.link, Delta(job=job.id, tokens=(65,)))
            assert (jobs(), requests.waiting) == ([0, 1, 0], 0)
            assert gateway.dispatcher.pause(job)
            assert jobs() == [0, 0, 0]
            gateway.dispatcher.resume(job)
            assert jobs() == [0, 1, 0]
        assert (jobs(), [*requests]) == ([0, 0, 0], [])
