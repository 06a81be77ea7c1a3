"""The gateway alone: workers that come and go, clients that leave, and what is left behind."""

import asyncio
from collections.abc import Iterator

import pytest

from redline.api.ask import WHAT_IS_LEFT, Ask
from redline.api.gateway import derived_seed
from redline.errors import WorkerLost
from redline.wire.delta import Delta
from redline.wire.job import Job, Sampling
from tests.api.world import MODEL, World, answer, openai_client, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def text_ask(prompt: str = "hello") -> Ask:
    return Ask(prompts=(prompt,), sampling=Sampling(max_tokens=WHAT_IS_LEFT), param="prompt")


async def test_a_new_worker_ends_what_the_old_one_ran() -> None:
    async with World(answer("a")) as world:
        world.engine.gate.clear()
        with await world.gateway.begin(text_ask()) as generation:
            world.engine.serve(world.gateway)
            with pytest.raises(WorkerLost):
                await anext(generation)
        assert world.gateway.ready is not None
        assert world.engine.aborted == set()  # the new worker never had the job


async def test_a_worker_lost_while_a_prompt_is_encoded_gets_no_job() -> None:
    async with World(answer("a"), max_model_len=1 << 20) as world:
        beginning = asyncio.create_task(world.gateway.begin(text_ask("the end " * 20_000)))
        await asyncio.sleep(0)
        world.gateway.lose("gone")
        with pytest.raises(WorkerLost):
            await beginning
    assert world.engine.jobs == []


async def test_what_arrived_before_the_loss_still_goes_out() -> None:
    async with World(answer("a")) as world:
        world.engine.gate.clear()
        with await world.gateway.begin(text_ask()) as generation:
            world.gateway.deliver(Delta(job=generation.lanes[0].job.id, tokens=(65,)))
            world.gateway.lose("gone")
            assert [batch.completion_tokens for batch in await anext(generation)] == [1]
            with pytest.raises(WorkerLost):
                await anext(generation)


async def test_a_client_that_leaves_an_answer_without_end_aborts_it() -> None:
    def endless(job: Job) -> Iterator[Delta]:
        while True:
            yield Delta(job=job.id, tokens=(65,))

    async with World(endless) as world, world.listening() as address:
        client = openai_client(address)
        messages = [{"role": "user", "content": "hello"}]
        async for _ in await client.chat.completions.create(model=MODEL, messages=messages, stream=True):  # type: ignore[call-overload]
            break
        await client.close()
        await until(lambda: len(world.engine.aborted) == 1)


async def test_a_delta_for_a_job_that_was_aborted_here_is_dropped() -> None:
    async with World(answer("a")) as world:
        world.engine.gate.clear()
        with await world.gateway.begin(text_ask()) as generation:
            id = generation.lanes[0].job.id
        assert world.engine.aborted == {id}
        world.gateway.deliver(Delta(job=id, tokens=(65,), finish="stop"))


def test_seeds_of_further_choices_are_neither_each_others_nor_a_neighbours() -> None:
    seeds = {derived_seed(seed, k) for seed in range(50) for k in range(8)}
    assert len(seeds) == 400
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert derived_seed(5, 0) == 5
