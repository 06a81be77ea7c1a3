"""Answers to clients that do not read release their pages to others, and resume when the clients read again."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from redline.api.config import Limits
from redline.messages.delta import Delta
from redline.messages.job import Job
from tests.api.fake_engine import deliver
from tests.api.sockets import ASYNCIO, Client, serving
from tests.api.world import World, asked, ids
from tests.clocks import FakeClock
from tests.waiting import eventually, turns

pytestmark = pytest.mark.anyio
LENGTH = 2400  # tokens: several times the number buffered between a worker and a client that does not read
WHOLE = "".join(chr(ord("a") + at % 26) for at in range(LENGTH - 1))
TOKENS = ids(f"</think>{WHOLE}")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ASYNCIO


@pytest.fixture
async def clock() -> AsyncIterator[FakeClock]:
    with FakeClock().drives(asyncio.get_running_loop()) as clock:
        yield clock


def letters(job: Job) -> Iterator[Delta]:
    """The alphabet over and over, continued after the tokens already generated."""
    for at in range(len(job.answer), LENGTH):
        yield Delta(job=job.id, tokens=(TOKENS[at],), finish="length" if at + 1 == LENGTH else None)


def said(stream: bytes) -> str:
    parts = stream.split(b'"content":"')[1:]
    return "".join(part[: part.index(b'"')].decode() for part in parts)


async def test_an_answer_that_nobody_takes_pauses_and_goes_on_where_it_was(clock: FakeClock) -> None:
    async with (
        World(letters, max_model_len=2 * LENGTH, resume_s=30.0) as world,
        serving(world.app, Limits(), clock) as (port, _),
    ):
        with Client(port, receive_bytes=4096) as client:
            client.say(asked(max_tokens=LENGTH))
            await eventually(lambda: world.engine.aborted)
            (job,) = world.engine.jobs
            await turns(50)
            assert world.engine.sent < LENGTH // 2
            assert world.engine.aborted == {job.id}
            assert len(world.engine.jobs) == 1, "it was resumed although the client has read nothing"
            await client.until(b"[DONE]")
            assert said(client.got) == WHOLE
        later = [len(job.answer) for job in world.engine.jobs[1:]]
        assert later
        assert later == sorted(later)


async def test_a_prompt_is_awaited_only_until_its_job_has_gone_on(clock: FakeClock) -> None:
    coming: list[int] = []

    def watched(job: Job) -> Iterator[Delta]:
        for delta in letters(job):
            yield delta
            coming.append(len(world.link.prompts))

    async with (
        World(watched, max_model_len=2 * LENGTH, resume_s=30.0) as world,
        serving(world.app, Limits(), clock) as (port, _),
    ):
        with Client(port, receive_bytes=4096) as client:
            client.say(asked(max_tokens=LENGTH))
            await eventually(lambda: world.engine.aborted)
            await client.until(b"[DONE]")
        assert len(world.engine.jobs) > 1
    assert set(coming) == {0}


async def test_a_client_that_reads_is_never_paused(clock: FakeClock) -> None:
    async with World(letters, max_model_len=2 * LENGTH, resume_s=30.0) as world:
        async with serving(world.app, Limits(), clock) as (port, _):
            with Client(port) as client:
                await client.say(asked(max_tokens=LENGTH)).until(b"[DONE]")
                assert said(client.got) == WHOLE
            with Client(port) as client:
                await client.say(asked(max_tokens=LENGTH, stream=False)).until(WHOLE[-26:].encode())
        assert len(world.engine.jobs) == 2
        assert not world.engine.aborted


async def test_an_event_loop_that_was_held_up_pauses_nobody(clock: FakeClock) -> None:
    """The tokens generated during the stall arrive at once."""

    def burst(job: Job) -> Iterator[Delta]:
        yield Delta(job=job.id, tokens=tuple(TOKENS[:2]))
        for at in range(2, 1002):
            yield Delta(job=job.id, tokens=(TOKENS[at],), finish="length" if at == 1001 else None)

    async with World(burst, max_model_len=2 * LENGTH, resume_s=30.0) as world:
        world.engine.gate.clear()
        async with serving(world.app, Limits(), clock) as (port, _):
            with Client(port) as client:
                client.say(asked(max_tokens=LENGTH))
                await eventually(lambda: world.engine.jobs)
                (job,) = world.engine.jobs
                for delta in burst(job):
                    deliver(world.gateway, world.link, delta)
                await client.until(b"[DONE]")
                assert said(client.got) == WHOLE[:1001]
    assert not world.engine.aborted


async def test_where_nothing_is_resumed_nothing_pauses(clock: FakeClock) -> None:
    async with World(letters, max_model_len=2 * LENGTH) as world:
        async with serving(world.app, Limits(), clock) as (port, _):
            with Client(port, receive_bytes=4096) as client:
                client.say(asked(max_tokens=LENGTH))
                await eventually(lambda: world.engine.sent == LENGTH)
                await client.until(b"[DONE]")
                assert said(client.got) == WHOLE
        assert not world.engine.aborted


async def test_a_paused_answer_ends_with_its_client(clock: FakeClock) -> None:
    async with World(letters, max_model_len=2 * LENGTH, resume_s=30.0) as world:
        async with serving(world.app, Limits(write_seconds=30), clock) as (port, server):
            with Client(port, receive_bytes=4096) as client:
                client.say(asked(max_tokens=LENGTH))
                await eventually(lambda: world.engine.aborted)
                clock.advance(30)
                await eventually(lambda: not server.server_state.connections)
            await eventually(lambda: not world.gateway.requests.records)
        assert len(world.engine.jobs) == 1
