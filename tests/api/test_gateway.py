"""The gateway alone: workers that start and go down, clients that disconnect, and the state afterwards."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import pytest
from starlette.types import Message

from redline.api.ask import WHAT_IS_LEFT, Ask
from redline.api.auth.quota import CALLER, Caller, KeyAccount, KeyLimits
from redline.api.config import DEFAULT_SLA, Limits, Sla
from redline.api.gateway.dispatcher import MAX_FAILURES
from redline.api.gateway.gateway import Gateway
from redline.api.gateway.generation import Generation
from redline.api.gateway.job_builder import derived_seed
from redline.api.gateway.worker_monitor import CHECK_S
from redline.chat.conversation import Conversation
from redline.chat.conversation import Message as Said
from redline.chat.known import KnownTexts
from redline.errors import MessageTooLarge, Overloaded, WorkerLost
from redline.messages.channel import MemoryChannel
from redline.messages.codec import Wire
from redline.messages.delta import Delta, Preempted, Resumed
from redline.messages.handoff import Prefill, WorkerDown
from redline.messages.job import Abort, Job, JobId, PageHash, Sampling
from redline.messages.news import Cached, Heartbeat, Load, Missed, Ping, Ready, Recall, Role
from redline.policy.pairs import Work
from redline.router.roles import STAY_S
from redline.router.worker_registry import MOVE_S, SILENT_S
from tests.api.fake_engine import FakeEngine, deliver, say
from tests.api.world import MODEL, World, answer
from tests.clocks import FakeClock
from tests.waiting import eventually, turns

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def text_ask(prompt: str = "hello") -> Ask:
    return Ask(prompts=(prompt,), sampling=Sampling(max_tokens=WHAT_IS_LEFT), param="prompt")


async def test_without_time_to_resume_a_lost_worker_ends_what_it_ran() -> None:
    async with World(answer("a")) as world:
        world.engine.gate.clear()
        with await world.gateway.begin(text_ask()) as generation:
            world.gateway.monitor.mark_down(world.link, "gone")
            world.engine.serve(world.gateway, epoch=2)
            with pytest.raises(WorkerLost):
                await anext(generation)
        assert world.gateway.ready is not None
        assert world.engine.aborted == set()  # the new worker never had the job


def resuming(job: Job) -> list[Delta]:
    """Six tokens; a worker that resumes the job sends only those that are missing."""
    said = [Delta(job=job.id, tokens=(65 + n,), finish="length" if n == 5 else None, cached_tokens=7) for n in range(6)]
    return said[len(job.answer) :]


async def tokens_of(generation: Generation) -> list[int]:
    return [token async for batches in generation for batch in batches for token in batch.token_ids or ()]


async def test_a_job_whose_worker_ends_goes_on_with_the_next_and_no_token_comes_twice() -> None:
    async with World(resuming, resume_s=600.0) as world:
        world.engine.gate.clear()
        with await world.gateway.begin(msgspec.structs.replace(text_ask(), token_ids=True)) as generation:
            id = generation.jobs[0].id
            for n in range(3):
                deliver(world.gateway, world.link, Delta(job=id, tokens=(65 + n,), cached_tokens=3))
            world.gateway.monitor.mark_down(world.link, "gone")
            deliver(world.gateway, world.link, Delta(job=id, tokens=(68,)))  # from the worker that is down: ignored
            other = FakeEngine(resuming)
            other.serve(world.gateway, epoch=2)
            assert await tokens_of(generation) == [65, 66, 67, 68, 69, 70]
        (job,) = other.jobs
        assert (job.id, job.answer) == (f"{id}.1", (65, 66, 67)), (
            "late messages about the job under its old ID are ignored"
        )
        assert (
            world.metrics.registry.get_sample_value("redline:jobs_moved_total", {"model_name": MODEL, "engine": "0"})
            == 1
        )
        assert not world.gateway.dispatcher.unassigned


async def test_what_is_left_of_jobs_that_have_not_ended_is_known() -> None:
    async with World(resuming) as world:
        world.gateway.history.start()
        world.engine.gate.clear()
        assert world.gateway.requests.records == []
        with await world.gateway.begin(msgspec.structs.replace(text_ask(), token_ids=True)) as generation:
            (active,) = generation.jobs
            deliver(world.gateway, world.link, Delta(job=active.id, tokens=(65, 66), cached_tokens=3))
            assert world.gateway.requests.records == [active.record]
            (left,) = world.gateway.history.remaining(world.gateway.requests.records)
            assert (left.cached, left.uncached) == (len(active.message.tokens) + 2, 0)
        assert world.gateway.requests.records == []


async def test_a_request_that_comes_while_the_worker_is_started_again_waits_for_it() -> None:
    async with World(resuming, resume_s=600.0) as world:
        world.gateway.monitor.mark_down(world.link, "gone")
        with await world.gateway.begin(msgspec.structs.replace(text_ask(), token_ids=True)) as generation:
            assert not world.engine.jobs
            world.engine.serve(world.gateway, epoch=2)
            assert await tokens_of(generation) == [65, 66, 67, 68, 69, 70]
        world.gateway.fail_all("the server ends")
        with pytest.raises(WorkerLost):
            await world.gateway.begin(text_ask())


async def test_a_job_that_nobody_goes_on_with_in_time_ends() -> None:
    with FakeClock().drives(asyncio.get_running_loop()) as clock:
        async with World(resuming, resume_s=5.0) as world:
            world.engine.gate.clear()
            with await world.gateway.begin(text_ask()) as generation:
                world.gateway.monitor.mark_down(world.link, "gone")
                clock.advance(4.9)
                await turns(3)
                assert world.gateway.dispatcher.unassigned
                clock.advance(1.0)
                with pytest.raises(WorkerLost):
                    await anext(generation)
            assert not [*world.gateway.requests]
            assert not world.gateway.dispatcher.unassigned


async def test_a_job_waits_for_as_long_as_a_start_takes_and_then_some() -> None:
    """A worker that reads its weights for minutes is not given up after seconds."""
    now = 0.0
    async with World(resuming, resume_s=0.01, clock=lambda: now) as world:
        world.engine.gate.clear()
        assert world.gateway.workers.start_s == 0.0
        slow = world.gateway.monitor.join("slow", MemoryChannel())
        now = 300.0
        ready = world.link.ready
        assert ready is not None
        deliver(world.gateway, slow, ready)
        assert world.gateway.workers.start_s == 300.0
        now = 301.0
        deliver(world.gateway, slow, ready)
        assert world.gateway.workers.start_s == 300.0, "a repeated Ready does not count"
        world.gateway.monitor.mark_down(slow, "gone")
        with await world.gateway.begin(msgspec.structs.replace(text_ask(), token_ids=True)) as generation:
            world.gateway.monitor.mark_down(world.link, "gone")
            (timer,) = world.gateway.dispatcher.unassigned.values()
            assert timer.when() - asyncio.get_running_loop().time() > 299
            world.engine.gate.set()
            world.engine.serve(world.gateway, epoch=2)
            assert await tokens_of(generation) == [65, 66, 67, 68, 69, 70]


async def test_when_a_job_goes_on_is_expected_of_answers_that_have_pages() -> None:
    lost = Preempted(by=JobId("-"), running=2, pages=9, lost_tokens=3, again_tokens=3, short_pages=1)

    def expected_s(generation: Generation) -> float:
        return generation.jobs[0].trace.told()["paused"][-1]["wait_expected_s"]

    async with World(resuming, resume_s=600.0) as world:
        world.engine.gate.clear()
        world.gateway.workers.latency_model.stepped(Work(rows=1), 0.01, 1)
        begun = [await world.gateway.begin(text_ask()) for _ in range(3)]
        first, second, third = (generation.jobs[0].id for generation in begun)
        for id in (first, second, third):
            deliver(world.gateway, world.link, Delta(job=id, tokens=(65,)))
        deliver(world.gateway, world.link, Delta(job=first, noted=(lost,)))
        assert expected_s(begun[0]) > 0, "two answers have pages"
        deliver(world.gateway, world.link, Delta(job=third, noted=(lost,)))
        deliver(world.gateway, world.link, Delta(job=second, noted=(lost,)))
        assert expected_s(begun[1]) == 0, "no answer has pages"
        again = Resumed(again_tokens=1, waited_s=0.1, paused_s=0.2)
        deliver(world.gateway, world.link, Delta(job=first, tokens=(66,), noted=(again,)))
        deliver(world.gateway, world.link, Delta(job=second, noted=(lost,)))
        assert expected_s(begun[1]) > 0, "the first has its pages again"
        for generation in begun:
            generation.close()


async def test_a_job_that_waited_for_a_worker_has_less_left_of_what_its_first_token_was_promised() -> None:
    sla = {DEFAULT_SLA: Sla(ttft_ms=60_000.0)}
    with FakeClock().installed() as clock:
        async with World(resuming, resume_s=60.0, targets=sla) as world:
            world.engine.gate.clear()
            with await world.gateway.begin(msgspec.structs.replace(text_ask(), token_ids=True)) as generation:
                (active,) = generation.jobs
                world.gateway.monitor.mark_down(world.link, "gone")
                clock.advance(0.05)
                second = world.engine.serve(world.gateway, epoch=2)
                deliver(world.gateway, second, Delta(job=active.id, tokens=(65,)))
                world.gateway.monitor.mark_down(second, "gone")
                world.engine.serve(world.gateway, epoch=3)
                first, moved, begun = (job.ttft_ms for job in world.engine.jobs)
            assert first is not None
            assert moved is not None
            assert (first, moved) == (pytest.approx(60_000), pytest.approx(60_000 - 50))
            assert begun is None, "the first token was sent already"


async def test_a_job_that_ends_every_worker_ends_itself() -> None:
    """The job may be the reason for their failure."""
    async with World(resuming, resume_s=600.0) as world:
        world.engine.gate.clear()
        link = world.link
        with await world.gateway.begin(text_ask()) as generation:
            for epoch in range(2, MAX_FAILURES + 3):
                assert [*world.gateway.requests]
                world.gateway.monitor.mark_down(link, "gone")
                link = world.engine.serve(world.gateway, epoch=epoch)
            with pytest.raises(WorkerLost):
                await anext(generation)
        assert len(world.engine.jobs) == 1 + MAX_FAILURES


async def test_a_worker_that_answers_no_more_ends_what_it_writes_and_what_is_left_moves() -> None:
    now = 0.0
    async with World(resuming, resume_s=600.0, clock=lambda: now) as world:
        other = FakeEngine(resuming)
        second = other.serve(world.gateway, name="other")
        world.engine.gate.clear()
        other.gate.clear()
        asked = msgspec.structs.replace(text_ask(), token_ids=True)
        with (
            await world.gateway.begin(asked) as writes,
            await world.gateway.begin(text_ask()) as elsewhere,
            await world.gateway.begin(text_ask()) as waits,
        ):
            active_jobs = [each.jobs[0] for each in (writes, elsewhere, waits)]
            assert [active.worker for active in active_jobs] == [world.link, second, world.link]
            deliver(world.gateway, world.link, Delta(job=active_jobs[0].id, tokens=(65,)))
            world.gateway.monitor.switch_role(world.link, "prefill")
            assert [active.worker for active in active_jobs] == [world.link, second, second], (
                "a job without output is requeued at once"
            )
            assert world.engine.aborted == {active_jobs[2].first_id}
            world.gateway.monitor.check_heartbeats()
            now = STAY_S - 0.1
            world.gateway.monitor.check_heartbeats()
            world.gateway.monitor.check_heartbeats()
            assert active_jobs[0].worker is world.link
            assert world.link.switching_since is not None
            now = STAY_S + 0.1
            world.gateway.monitor.check_heartbeats()
            assert active_jobs[0].worker is second
            assert world.link.switching_since is None
            assert other.jobs[-1].answer == (65,)
            assert world.engine.aborted == {active_jobs[0].first_id, active_jobs[2].first_id}
            assert not any(active.failures for active in active_jobs)
            other.gate.set()
            assert await tokens_of(writes) == [65, 66, 67, 68, 69, 70]
            assert not world.gateway.requests.at(world.link)


async def test_where_nothing_may_be_resumed_answers_end_where_they_are_however_long_it_takes() -> None:
    now = 0.0
    async with World(resuming, clock=lambda: now) as world:
        other = FakeEngine(resuming)
        other.serve(world.gateway, name="other")
        world.engine.gate.clear()
        with await world.gateway.begin(msgspec.structs.replace(text_ask(), token_ids=True)) as generation:
            world.gateway.monitor.switch_role(world.link, "prefill")
            world.gateway.monitor.check_heartbeats()
            now = 100.0
            world.gateway.monitor.check_heartbeats()
            world.gateway.monitor.check_heartbeats()
            assert generation.jobs[0].worker is world.link
            assert world.link.switching_since is not None
            world.engine.gate.set()
            assert await tokens_of(generation) == [65, 66, 67, 68, 69, 70]
            world.gateway.monitor.check_heartbeats()
            assert world.link.switching_since is None


async def test_a_role_that_may_have_been_lost_with_a_link_is_said_again() -> None:
    async with World(resuming, resume_s=600.0) as world:
        other = FakeEngine(resuming)
        other.serve(world.gateway, name="other")
        replies, world.engine._deliver = world.engine._deliver, lambda _: None
        world.gateway.monitor.switch_role(world.link, "prefill")
        assert world.link.confirmed_role == "both"
        world.engine._deliver = replies
        deliver(world.gateway, world.link, Missed(messages=1))
        assert world.link.confirmed_role == "prefill"


async def test_jobs_of_a_silent_worker_go_on_with_one_that_is_heard_of() -> None:
    now = 0.0
    async with World(resuming, resume_s=600.0, clock=lambda: now) as world:
        other = FakeEngine(resuming)
        second = other.serve(world.gateway, name="other")
        for link in (world.link, second):
            deliver(world.gateway, link, Heartbeat())
        world.engine.gate.clear()
        other.gate.clear()
        with await world.gateway.begin(text_ask()) as first, await world.gateway.begin(text_ask()) as last:
            assert (len(world.engine.jobs), len(other.jobs)) == (1, 1), "each job goes to the worker with fewer jobs"
            now = MOVE_S + 0.1
            world.gateway.monitor.check_heartbeats()
            assert len(other.jobs) == 1, "this process may have been stalled itself"
            world.gateway.monitor.check_heartbeats()
            assert len(other.jobs) == 1, "all are silent: no worker is a better choice"
            deliver(world.gateway, second, Heartbeat())
            world.gateway.monitor.check_heartbeats()
            assert [job.id for job in other.jobs] == [each.jobs[0].id for each in (last, first)]
            assert world.engine.aborted == {first.jobs[0].first_id}, "in case the worker continues"
            assert second.jobs == 2


READY = Ready(max_model_len=4096, pages=1000, fingerprint="tiny", summary="", area=b"an area", format="a format")


class Heard:
    """A worker that only records the messages sent to it."""

    def __init__(self, gateway: Gateway, name: str, role: Role = "both") -> None:
        """It sends one heartbeat, and is ready at once."""
        self.told: list[Wire] = []
        self.link = gateway.monitor.join(name, self, role)
        deliver(gateway, self.link, READY)
        deliver(gateway, self.link, Heartbeat())

    def put(self, message: Wire) -> None:
        self.told.append(message)

    @property
    def jobs(self) -> list[JobId]:
        """The IDs of the jobs sent to it, for prefill or decode."""
        sent = (message.job if isinstance(message, Prefill) else message for message in self.told)
        return [message.id for message in sent if isinstance(message, Job)]

    @property
    def aborted(self) -> list[JobId]:
        return [message.job for message in self.told if isinstance(message, Abort)]


async def test_where_messages_were_lost_all_jobs_of_that_worker_go_on_as_others_however_often() -> None:
    """Lost deltas can only be detected by the gap in message numbers; and a faulty link is not blamed on a job."""
    async with World(resuming, resume_s=600.0) as world:
        gateway = world.gateway
        gateway.monitor.mark_down(world.link, "gone")
        a, b = Heard(gateway, "a"), Heard(gateway, "b", "prefill")
        with await gateway.begin(text_ask()) as generation:
            id = generation.jobs[0].id
            assert a.jobs == [id]
            deliver(gateway, a.link, Delta(job=id, tokens=(65,)))
            for moves in range(1, MAX_FAILURES + 3):
                deliver(gateway, a.link, Missed(messages=2))
                assert a.aborted[-1] == a.jobs[-2]
                assert a.jobs[-1] == f"{id}.{moves}"
                assert WorkerDown(worker="a", epoch=1) in b.told, "KV transfers from and to it are lost too"
            deliver(gateway, a.link, Delta(job=id, tokens=(99,)))
            again = next(message for message in reversed(a.told) if isinstance(message, Job))
            assert again.answer == (65,)
            assert a.link.jobs == 1


async def test_a_worker_whose_first_words_are_lost_is_started_again() -> None:
    async with World(resuming, resume_s=600.0) as world:
        link = world.gateway.monitor.join("other", FakeEngine(resuming), "both")
        deliver(world.gateway, link, Missed(messages=1))
        assert link.lost == "1 messages of the worker's connections were lost"


async def test_jobs_that_do_not_reach_a_worker_that_is_heard_of_go_to_another() -> None:
    """Its heartbeats arrive, but messages to it do not; a worker that runs a long step is not silent."""
    now = 0.0
    async with World(resuming, resume_s=600.0, clock=lambda: now) as world:
        gateway = world.gateway
        gateway.monitor.mark_down(world.link, "gone")
        a, b = Heard(gateway, "a"), Heard(gateway, "b")
        with await gateway.begin(text_ask()):
            assert (len(a.jobs), len(b.jobs)) == (1, 0)
            gateway.monitor.check_heartbeats()

            def pass_time(seconds: float, turn_s: float) -> None:
                nonlocal now
                for _ in range(round(seconds / CHECK_S)):
                    now += CHECK_S
                    for each in (a, b):
                        deliver(gateway, each.link, Heartbeat(turn_s=turn_s))
                    gateway.monitor.check_heartbeats()
                    turn_s += CHECK_S if turn_s else 0.0

            pass_time(3.0, turn_s=CHECK_S)
            assert len(b.jobs) == 0, "it runs a step"
            knock = next(message for message in reversed(a.told) if isinstance(message, Ping))
            deliver(gateway, a.link, Heartbeat(knock=knock.number))
            pass_time(MOVE_S - CHECK_S, turn_s=0.0)
            assert len(b.jobs) == 0
            pass_time(3 * CHECK_S, turn_s=0.0)
            assert len(b.jobs) == 1
            assert a.aborted == a.jobs


async def test_a_server_that_was_stopped_itself_takes_no_worker_for_silent() -> None:
    now = 0.0
    async with World(resuming, resume_s=600.0, clock=lambda: now) as world:
        deliver(world.gateway, world.link, Heartbeat())
        world.gateway.monitor.check_heartbeats()
        now += SILENT_S + 1
        with await world.gateway.begin(text_ask()):
            pass
        world.gateway.monitor.check_heartbeats()
        assert world.gateway.workers.trouble is None
        now += SILENT_S + 1
        for _ in range(30):
            now += CHECK_S
            world.gateway.monitor.check_heartbeats()
        with pytest.raises(Overloaded, match="has not responded"):
            await world.gateway.begin(text_ask())


async def test_a_rolling_update_may_move_a_stream_as_often_as_there_are_workers() -> None:
    async with World(resuming, resume_s=600.0) as world:
        world.engine.gate.clear()
        link = world.link
        with await world.gateway.begin(text_ask()) as generation:
            for epoch in range(2, MAX_FAILURES + 6):
                world.gateway.monitor.mark_down(link, "it is replaced", asked=True)
                link = world.engine.serve(world.gateway, epoch=epoch)
            world.engine.gate.set()
            assert [batch async for batch in generation]


async def test_what_a_worker_still_says_of_a_job_that_it_has_lost_is_nobodys_even_where_it_has_it_again() -> None:
    now = 0.0
    async with World(resuming, resume_s=600.0, clock=lambda: now) as world:
        gateway = world.gateway
        gateway.monitor.mark_down(world.link, "not used")
        a = Heard(gateway, "a")
        with await gateway.begin(text_ask()) as generation:
            (active,) = generation.jobs
            b = Heard(gateway, "b")
            deliver(gateway, a.link, Delta(job=active.first_id, tokens=(65,)))
            now = MOVE_S + 0.1
            deliver(gateway, b.link, Heartbeat())
            gateway.monitor.check_heartbeats()
            gateway.monitor.check_heartbeats()
            assert active.worker is b.link, "a is silent"
            assert a.aborted == [active.first_id]
            deliver(gateway, b.link, Delta(job=active.id, tokens=(66,)))
            deliver(gateway, a.link, Heartbeat())
            gateway.monitor.mark_down(b.link, "killed")
            assert active.worker is a.link, "a continues, and gets the job again"
            deliver(gateway, a.link, Delta(job=active.first_id, tokens=(66,)))
            deliver(gateway, a.link, Delta(job=active.first_id, finish="aborted"))
            assert active.output == [65, 66]
            assert gateway.requests.requests == 1, "the stream continues"
            deliver(gateway, a.link, Delta(job=active.id, tokens=(67,)))
            assert active.output == [65, 66, 67]
        assert a.jobs == [active.first_id, f"{active.first_id}.2"]
        assert b.jobs == [f"{active.first_id}.1"]
        assert a.aborted == [active.first_id, f"{active.first_id}.2"], (
            "the client disconnects: the job is aborted under its newest ID"
        )


async def test_no_worker_is_sent_a_job_of_the_same_name_twice_however_often_it_moves() -> None:
    """A late message from one worker to another then matches no job."""
    async with World(resuming, resume_s=600.0) as world:
        gateway = world.gateway
        gateway.monitor.mark_down(world.link, "not used")
        workers = [Heard(gateway, name, "decode") for name in "abc"]
        computes = Heard(gateway, "p", "prefill")
        generations = [await gateway.begin(text_ask("the end " * 40)) for _ in range(6)]
        active_jobs = [active for generation in generations for active in generation.jobs]
        assert computes.jobs == [active.first_id for active in active_jobs]
        for worker in workers[:2]:
            for active in [active for active in active_jobs if active.worker is worker.link]:
                deliver(gateway, worker.link, Delta(job=active.id, finish="error", error="it ends", fault="lost"))
            gateway.monitor.mark_down(worker.link, "it ends")
        assert {active.worker for active in active_jobs} == {workers[2].link}
        assert len(computes.jobs) == 6 + sum(active.requeues for active in active_jobs), (
            "each prompt is prefilled again"
        )
        for worker in (*workers, computes):
            assert len(set(worker.jobs)) == len(worker.jobs), worker.link.name
        for generation in generations:
            generation.close()


async def test_a_prompt_that_lost_its_pages_where_it_was_computed_is_told_of_that_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lost = Preempted(by=JobId("-"), running=2, pages=9, lost_tokens=3, again_tokens=3, short_pages=1)
    again = Resumed(again_tokens=1, waited_s=0.1, paused_s=0.2)
    caplog.set_level("INFO", "redline.api")
    async with World(resuming, resume_s=600.0) as world:
        gateway = world.gateway
        gateway.monitor.mark_down(world.link, "not used")
        answers, _ = Heard(gateway, "d", "decode"), Heard(gateway, "p", "prefill")
        gateway.workers.latency_model.stepped(Work(rows=1), 0.01, 1)
        begun = [await gateway.begin(text_ask("the end " * 40)) for _ in range(2)]
        beside, computed = (generation.jobs[0] for generation in begun)
        deliver(gateway, answers.link, Delta(job=beside.id, tokens=(65,)))
        deliver(gateway, answers.link, Delta(job=computed.id, tokens=(65,), noted=(lost, again)))
        (paused,) = computed.trace.told()["paused"]
        assert (paused["worker"], paused["wait_expected_s"], paused["paused_s"]) == ("p", 0.0, 0.2)
        assert f"job {computed.first_id} was preempted on p after 0 tokens" in caplog.text
        assert not computed.preempted
        for generation in begun:
            generation.close()


async def test_a_worker_that_says_that_it_ends_gets_none_of_its_jobs_back() -> None:
    async with World(resuming, resume_s=600.0) as world:
        gateway = world.gateway
        gateway.monitor.mark_down(world.link, "not used")
        a, b = Heard(gateway, "a"), Heard(gateway, "b")
        generations = [await gateway.begin(text_ask()) for _ in range(4)]
        of_a = [active for generation in generations for active in generation.jobs if active.worker is a.link]
        assert len(of_a) == 2
        for active in of_a:
            deliver(gateway, a.link, Delta(job=active.id, finish="error", error="the device is gone", fault="lost"))
        assert [active.worker for active in of_a] == [b.link, b.link]
        assert (a.link.jobs, b.link.jobs, len(a.jobs)) == (0, 4, 2)
        for generation in generations:
            generation.close()


async def test_a_job_whose_answer_has_failed_meanwhile_is_not_sent_to_anybody() -> None:
    async with World(resuming, resume_s=600.0) as world:
        world.engine.gate.clear()
        with await world.gateway.begin(msgspec.structs.replace(text_ask(), n=2)) as generation:
            generation.jobs[
                0
            ].failures = MAX_FAILURES  # it has been requeued after more worker failures than the second
            other = Heard(world.gateway, "other")
            world.gateway.monitor.mark_down(world.link, "gone")
            assert world.gateway.requests.requests == 0
            assert (other.jobs, other.link.jobs) == ([], 0)
            assert not world.gateway.dispatcher.unassigned


async def test_a_job_that_is_too_large_with_its_answer_ends_and_the_worker_that_has_become_ready_does_not() -> None:
    class Full(Heard):
        def put(self, message: Wire) -> None:
            if isinstance(message, Job):
                raise MessageTooLarge("67 MB")

    async with World(resuming, resume_s=600.0) as world:
        world.engine.gate.clear()
        with await world.gateway.begin(text_ask()) as generation:
            world.gateway.monitor.mark_down(world.link, "gone")
            assert Full(world.gateway, "other").link.lost is None
            with pytest.raises(WorkerLost):
                await anext(generation)


async def test_a_worker_with_another_model_is_not_among_the_others() -> None:
    async with World(answer("a")) as world:
        link = world.gateway.monitor.join("other", FakeEngine(answer("b")))
        deliver(world.gateway, link, Ready(max_model_len=9, pages=9, fingerprint="another", summary=""))
        assert link.lost is not None
        assert "another model" in link.lost
        route = world.gateway.workers.route(Job(id=JobId("a"), tokens=(1,), pages=(), sampling=Sampling(max_tokens=1)))
        assert route is not None
        assert route.worker is world.link


async def test_a_worker_lost_while_a_prompt_is_encoded_gets_no_job() -> None:
    async with World(answer("a"), max_model_len=1 << 20) as world:
        beginning = asyncio.create_task(world.gateway.begin(text_ask("the end " * 20_000)))
        await turns()
        world.gateway.monitor.mark_down(world.link, "gone")
        with pytest.raises(WorkerLost):
            await beginning
    assert world.engine.jobs == []


async def test_what_arrived_before_the_loss_still_goes_out() -> None:
    async with World(answer("a")) as world:
        world.engine.gate.clear()
        with await world.gateway.begin(text_ask()) as generation:
            deliver(world.gateway, world.link, Delta(job=generation.jobs[0].id, tokens=(65,)))
            world.gateway.monitor.mark_down(world.link, "gone")
            assert [batch.completion_tokens for batch in await anext(generation)] == [1]
            with pytest.raises(WorkerLost):
                await anext(generation)


async def test_a_client_that_leaves_with_its_connection_full_aborts_its_job() -> None:
    body = b'{"prompt": "hello", "stream": true}'
    left, full = asyncio.Event(), asyncio.Event()
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await left.wait()
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            full.set()
            await asyncio.Event().wait()  # the client does not read

    async with World(say([65] * 1000)) as world:
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "root_path": ""}
        task = asyncio.ensure_future(world.app(scope, receive, send))
        await full.wait()
        left.set()
        await eventually(lambda: len(world.engine.aborted) == 1)
        task.cancel()


async def test_a_job_is_counted_as_vllms_abort_whoever_ended_it() -> None:
    async with World(answer("a")) as world:
        world.engine.gate.clear()
        with await world.gateway.begin(text_ask()):
            pass  # the client disconnects
        with await world.gateway.begin(text_ask()) as generation:
            deliver(world.gateway, world.link, Delta(job=generation.jobs[0].id, finish="aborted"))
        exposed = world.metrics.expose().decode()
    assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="kimi-nano"} 2.0' in exposed
    assert 'finished_reason="aborted"' not in exposed


async def test_jobs_that_were_given_up_do_not_count_as_waiting() -> None:
    async with World(answer("a"), limits=Limits(waiting=1)) as world:
        world.engine.gate.clear()
        for _ in range(3):
            with await world.gateway.begin(text_ask()), pytest.raises(Overloaded):
                await world.gateway.begin(text_ask())


async def test_a_job_that_is_too_large_to_travel_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with World(answer("a")) as world:
        send = world.engine.put

        def put(message: Wire) -> None:
            if isinstance(message, Job) and message.id.endswith("-1"):
                raise MessageTooLarge("too many bytes")
            send(message)

        monkeypatch.setattr(world.engine, "put", put)
        two = await world.http.post("/v1/completions", json={"prompt": "hello", "n": 2})
        assert (two.status_code, two.json()["error"]["message"]) == (413, "too many bytes")
        assert world.engine.aborted >= {job.id for job in world.engine.jobs}
        assert (await world.http.post("/v1/completions", json={"prompt": "hello"})).status_code == 200


async def test_requests_that_were_encoded_together_are_still_bounded_together() -> None:
    async with World(answer("a"), limits=Limits(waiting=2), max_model_len=1 << 20) as world:
        world.engine.gate.clear()
        begun = [asyncio.create_task(world.gateway.begin(text_ask("the end " * 2000))) for _ in range(3)]
        ends = await asyncio.gather(*begun, return_exceptions=True)
        assert sorted(type(end).__name__ for end in ends) == ["Generation", "Generation", "Overloaded"]
        assert len(world.engine.jobs) == 2


async def test_tokens_behind_a_stop_string_are_not_counted_in_its_batch() -> None:
    async with World(say(list(b"abSTOPcd"), per_delta=8)) as world:
        ask = Ask(prompts=("x",), sampling=Sampling(max_tokens=WHAT_IS_LEFT), stop=("STOP",), param="prompt")
        with await world.gateway.begin(ask) as generation:
            assert [batch.completion_tokens for batch in await anext(generation)] == [6]


async def test_a_delta_for_a_job_that_was_aborted_here_is_dropped() -> None:
    async with World(answer("a")) as world:
        world.engine.gate.clear()
        with await world.gateway.begin(text_ask()) as generation:
            id = generation.jobs[0].id
        assert world.engine.aborted == {id}
        deliver(world.gateway, world.link, Delta(job=id, tokens=(65,), finish="stop"))


def test_seeds_of_further_choices_are_neither_each_others_nor_a_neighbours() -> None:
    seeds = {derived_seed(seed, k) for seed in range(50) for k in range(8)}
    assert len(seeds) == 400
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert derived_seed(5, 0) == 5


async def test_what_was_encoded_before_is_known_to_its_own_tenant_and_salt_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    salts: list[str] = []

    def noted(_: KnownTexts, salt: str, text: str, encode: Callable[[str], Sequence[int]]) -> Sequence[int]:
        salts.append(salt)
        return encode(text)

    monkeypatch.setattr(KnownTexts, "ids", noted)
    prompt = Conversation(messages=(Said(role="user", content="hello the end " * 10),))
    async with World(answer("a")) as world:
        for account, salt in (
            (None, "x"),
            (KeyAccount("alice", KeyLimits()), "x"),
            (KeyAccount("bob", KeyLimits()), "x"),
        ):
            CALLER.set(Caller(account=account))
            ask = Ask(prompts=(prompt,), sampling=Sampling(max_tokens=1), salt=salt, param="messages")
            with await world.gateway.begin(ask):
                pass
        assert set(salts) == {job.salt for job in world.engine.jobs} == {"x", "alice\nx", "bob\nx"}
        salts.clear()
        await world.gateway.encoder.encode(prompt, "messages", 4096)  # for bob, to count its tokens
    assert set(salts) == {"bob\n"}


def cached(number: int, *pages: PageHash, whole: bool = False) -> Cached:
    return Cached(number=number, stored=pages, whole=whole)


async def test_what_a_worker_sends_after_it_was_lost_is_taken_for_nothing() -> None:
    """A draining spare sends its last messages after its removal: they raised KeyError, which ended the reader."""
    async with World(answer("a")) as world:
        world.gateway.monitor.mark_down(world.link, "it is not wanted for now")
        last = Load(**{field.name: 0 for field in msgspec.structs.fields(Load) if field.required})
        world.gateway.monitor.receive(world.link, [cached(1), last, Missed(messages=1)])
        assert (world.link.lost, world.link.load) == ("it is not wanted for now", None)


async def test_a_conversation_returns_to_the_worker_that_has_its_pages() -> None:
    async with World(resuming, resume_s=600.0) as world:
        gateway = world.gateway
        gateway.monitor.mark_down(world.link, "not used")
        a, b = Heard(gateway, "a"), Heard(gateway, "b")
        with await gateway.begin(text_ask("the end " * 200)) as first:
            (active,) = first.jobs
            assert active.worker is a.link
            with await gateway.begin(text_ask("the end " * 200)) as beside:
                assert beside.jobs[0].worker is a.link, "a is about to have all of these pages"
            with await gateway.begin(text_ask("another " * 200)) as other:
                assert other.jobs[0].worker is b.link
            deliver(gateway, b.link, cached(1, *active.message.pages, whole=True))
            deliver(gateway, a.link, Delta(job=active.id, tokens=(65,)))
        with await gateway.begin(text_ask("the end " * 200 + "and more " * 30)) as second:
            assert second.jobs[0].worker is b.link, "a has not reported them"
        deliver(gateway, b.link, Cached(number=2, removed=active.message.pages[:1]))
        deliver(gateway, a.link, cached(1, *active.message.pages, whole=True))
        with await gateway.begin(text_ask("the end " * 200 + "and more " * 30)) as third:
            assert third.jobs[0].worker is a.link, "b has evicted the first page, so the others are of no use"
        deliver(gateway, a.link, cached(3))
        deliver(gateway, a.link, cached(4))
        assert [message for message in a.told if isinstance(message, Recall)] == [Recall()], "message 2 was missed"
        gateway.monitor.mark_down(a.link, "killed")
        assert len(gateway.workers.index) == len(active.message.pages) - 1


async def test_one_with_another_salt_is_not_sent_after_pages_that_it_cannot_use() -> None:
    async with World(resuming) as world:
        gateway = world.gateway
        a, b = Heard(gateway, "a"), Heard(gateway, "b")
        gateway.monitor.mark_down(world.link, "not used")
        ask = text_ask("the end " * 200)
        with await gateway.begin(ask) as first, await gateway.begin(msgspec.structs.replace(ask, salt="x")) as salted:
            assert first.jobs[0].worker is a.link
            assert salted.jobs[0].worker is b.link
