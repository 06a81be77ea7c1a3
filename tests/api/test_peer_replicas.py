"""How an API replica accounts for the load of other replicas: limits, quotas, placement, and one /metrics."""

import re

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from redline.api.auth.quota import KeyAccount, LimitReached
from redline.api.config import KeyLimits, Limits
from redline.api.telemetry.metrics import Metrics, OwnMetrics
from redline.api.telemetry.metrics_aggregator import MetricsAggregator, packed
from redline.errors import Overloaded
from redline.messages.channel import MemoryChannel
from redline.messages.job import JobId
from redline.messages.news import Load, Missed, Ready
from redline.messages.replicas import AtWorker, OfKey, Use
from tests.api.fake_engine import FakeEngine, deliver
from tests.api.test_gateway import text_ask
from tests.api.world import World, answer
from tests.fakes import make_job

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_what_waits_at_other_replicas_counts_where_a_queue_is_bounded() -> None:
    async with World(answer("a"), Limits(queue_tokens=1000, waiting=10)) as world:
        gateway = world.gateway
        with await gateway.begin(text_ask()):
            pass
        gateway.peers.update(Use(replica="b.1", roster=1, waiting=1, waiting_tokens=1000))
        with pytest.raises(Overloaded, match="1000 prompt tokens wait already"):
            await gateway.begin(text_ask())
        gateway.peers.update(Use(replica="b.1", roster=1, waiting=10))
        with pytest.raises(Overloaded, match="10 jobs wait already"):
            await gateway.begin(text_ask())
        assert gateway.peers.keep(["a.1"]) == ["b.1"]
        with await gateway.begin(text_ask()):
            pass


async def test_what_other_replicas_have_sent_to_a_worker_counts_where_one_is_chosen() -> None:
    async with World(answer("a")) as world:
        gateway, first = world.gateway, world.link
        second = FakeEngine(answer("a")).serve(gateway, name="second")
        job = make_job("a", tuple(range(70)))
        route = gateway.workers.route(job)
        assert route is not None
        chosen, other = (first, second) if route.worker is first else (second, first)
        busy = AtWorker(worker=chosen.name, epoch=chosen.epoch, jobs=3, tokens=5000)
        gateway.peers.update(Use(replica="b.1", roster=1, workers=(busy,)))
        route = gateway.workers.route(job)
        assert route is not None
        assert route.worker is other
        assert route.instead[0].queue_tokens == 5000
        assert route.instead[0].answers == 3
        gateway.peers.update(Use(replica="b.1", roster=2, workers=(AtWorker("worker", epoch=9, jobs=3, tokens=5000),)))
        assert gateway.workers.candidate(chosen, job, {}).queue == 0, "the report is about another start of the worker"


async def test_a_job_says_which_replica_has_sent_it_and_no_two_have_one_id() -> None:
    async with World(answer("a"), replica="replica-1.4") as world:
        ids: set[JobId] = set()
        for _ in range(3):
            with await world.gateway.begin(text_ask()) as generation:
                ids.add(generation.jobs[0].id)
        assert {job.replica for job in world.engine.jobs} == {"replica-1.4"}
        assert len(ids) == 3


async def test_a_worker_whose_first_words_to_a_replica_are_lost_is_not_lost_for_it() -> None:
    async with World(answer("a"), replica="replica-0.1") as world:
        link = world.gateway.monitor.join("other", FakeEngine(answer("a")), "both")
        deliver(world.gateway, link, Missed(messages=1))
        assert link.lost is None, "it sends them again"


async def test_a_worker_that_is_lost_may_say_again_that_it_is_ready_and_is_lost_still() -> None:
    async with World(answer("a")) as world:
        link, ready = world.link, world.link.ready
        assert ready is not None
        world.gateway.monitor.mark_down(link, "the server is stopping")
        deliver(world.gateway, link, ready)
        assert (link.ready, link.lost) == (None, "the server is stopping")
        await world.gateway.monitor.follow(
            link, MemoryChannel()
        )  # ends at once: none of its messages are read any more


# ---------------------------------------------------------------------------------------------------------- quotas


class Names:
    """The accounts of one key at two replicas, which exchange their use."""

    def __init__(self, limits: KeyLimits) -> None:
        self.now = 0.0
        self.here, self.there = (KeyAccount("alice", limits, lambda: self.now) for _ in range(2))

    def tell(self) -> None:
        told = [
            OfKey(name="alice", running=each.running, requests=each.requests, tokens=each.tokens, left=each.left())
            for each in (self.here, self.there)
        ]
        self.there.heard("here", told[0])
        self.here.heard("there", told[1])


def test_tokens_that_were_used_at_one_replica_are_missing_at_the_other() -> None:
    names = Names(KeyLimits(tokens_per_minute=600))
    names.tell()
    for _ in range(4):
        names.here.charge(100)
        names.there.charge(50)
        names.tell()
        names.tell()  # a repeated report changes nothing
    assert names.here.left() == names.there.left() == {"tokens_per_minute": 0.0}
    with pytest.raises(LimitReached):
        names.there.check_tokens(1)
    names.now += 30.0
    assert names.here.left() == names.there.left() == {"tokens_per_minute": 300.0}


def test_requests_that_run_at_one_replica_count_at_the_other_until_it_ends() -> None:
    names = Names(KeyLimits(concurrency=1, requests_per_s=2))
    names.tell()
    with names.here.request():
        names.tell()
        with pytest.raises(LimitReached, match="concurrency"), names.there.request():
            pass
        names.there.forget("here")
        with names.there.request():
            pass


def test_a_replica_that_begins_has_no_more_left_than_the_others() -> None:
    names = Names(KeyLimits(tokens_per_day=1000))
    names.here.charge(5000)
    names.now += 86400.0 * 4.5  # it has used much, and most of it has expired
    names.tell()
    assert names.here.left() == names.there.left() == {"tokens_per_day": 500.0}


# --------------------------------------------------------------------------------------------------------- metrics


def lines(text: bytes, name: str) -> dict[str, float]:
    """The samples with names that begin with `name`."""
    found = (line.rpartition(" ") for line in text.decode().splitlines() if line.startswith(name))
    return {series: float(number) for series, _, number in found}


def registry(counted: float, now: float, took_s: float) -> CollectorRegistry:
    made = CollectorRegistry()
    Counter("tokens", "...", ["by"], registry=made).labels("a").inc(counted)
    Gauge("queue", "...", registry=made).set(now)
    Gauge("redline:ready", "...", registry=made).set(float(now > 0))
    Gauge("process_open_fds", "...", registry=made).set(now)
    Histogram("seconds", "...", registry=made, buckets=(1, 2)).observe(took_s)
    return made


def test_a_scrape_is_the_sum_over_all_and_what_was_counted_stays() -> None:
    summed = MetricsAggregator()
    summed.told("a", packed(registry(5, 2, 0.5)))
    summed.told("b", packed(registry(7, 1, 1.5)))
    text = summed.expose()
    assert lines(text, "tokens_total") == {'tokens_total{by="a"}': 12}
    assert lines(text, "queue") == {"queue": 3}
    assert lines(text, "redline:ready") == {"redline:ready": 1}
    assert lines(text, "process_open_fds") == {
        'process_open_fds{process="a"}': 2,
        'process_open_fds{process="b"}': 1,
    }
    assert lines(text, "seconds_bucket") == {
        'seconds_bucket{le="1.0"}': 1, 'seconds_bucket{le="2.0"}': 2, 'seconds_bucket{le="+Inf"}': 2,
    }  # fmt: skip
    assert lines(text, "seconds_sum") == {"seconds_sum": 2.0}
    for _ in range(2):
        summed.ended("a")
        assert lines(summed.expose(), "tokens_total") == {'tokens_total{by="a"}': 12}
        assert lines(summed.expose(), "seconds_count") == {"seconds_count": 2}
        assert lines(summed.expose(), "queue") == {"queue": 1}
        assert lines(summed.expose(), "process_open_fds") == {'process_open_fds{process="b"}': 1}
    summed.told("a", packed(registry(1, 2, 0.5)))
    assert lines(summed.expose(), "tokens_total") == {'tokens_total{by="a"}': 13}


def test_a_replica_counts_its_own_requests_and_not_what_workers_tell_everybody() -> None:
    load = Load(running=1, waiting=2, pages_used=3, pages_cached=0, pages_total=10, steps=4, replayed=0, led=4,
                preemptions=0, prompt_tokens=70, prompt_tokens_cached=64, generation_tokens=9)  # fmt: skip
    ready = Ready(max_model_len=100, pages=10, fingerprint="", summary="")
    supervisor, replicas = Metrics("m"), [OwnMetrics("m"), OwnMetrics("m")]
    for each in (supervisor, *replicas):
        each.joined("worker")
        each.ready(ready, "worker")
        each.load(load, "worker")
        each.role("worker", "prefill")
        each.promised("default", 500, None)
        each.asked(1, 5)
    summed = MetricsAggregator()
    for name, each in zip(("supervisor", "a", "b"), (supervisor, *replicas), strict=True):
        summed.told(name, packed(each.registry))
    text = summed.expose()
    (hits,) = lines(text, "vllm:prefix_cache_hits_total").values()
    (running,) = lines(text, "vllm:num_requests_running").values()
    (pages,) = lines(text, "vllm:cache_config_info").values()
    assert (hits, running, pages) == (64, 1, 1)
    assert lines(text, "vllm:request_params_n_count") == {'vllm:request_params_n_count{engine="0",model_name="m"}': 3}
    roles = {name: number for name, number in lines(text, "redline:worker_role").items() if number}
    assert roles == {'redline:worker_role{engine="0",model_name="m",role="prefill"}': 1}
    assert list(lines(text, "redline:sla_target_seconds").values()) == [0.5], "a target is not summed"
    own = supervisor.expose()
    names = re.compile(rb"^# TYPE (\S+) \S+$", re.MULTILINE)
    assert set(names.findall(text)) == set(names.findall(own)), (
        "a scrape has the same series as that of a server with one process"
    )
