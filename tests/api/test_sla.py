"""SLO targets of requests, and their attainment."""

import math
from pathlib import Path

import pytest

from redline.api.auth.keys import Keyring
from redline.api.auth.quota import CALLER, Caller
from redline.api.config import KeyLimits, Sla
from redline.api.telemetry.metrics import Metrics
from redline.api.telemetry.sla import LATELY_S, Attainment, RequestTimes, TargetsMet, keeps, targets_of
from redline.messages.delta import Delta, Finish
from redline.messages.job import Job
from tests.api.test_edge import keys_file
from tests.api.test_gateway import text_ask
from tests.api.world import MODEL, World

pytestmark = pytest.mark.anyio

BOTH = Sla(ttft_ms=500, itl_ms=30)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize(
    ("took", "finish", "kept"),
    [
        (RequestTimes(1.0, 0.5, 0.03), "stop", (True, True)),
        (RequestTimes(1.0, 0.501, 0.03), "length", (False, True)),
        (RequestTimes(1.0, 0.1, 0.031), "stop", (True, False)),
        (RequestTimes(9.0, 0.1, None), "stop", (True, True)),  # an answer of one token
        (RequestTimes(0.1, 0.05, 0.01), "error", (False, False)),
        # aborted before the target: whether it would have been met is unknown
        (RequestTimes(0.4, None, None), "aborted", None),
        (RequestTimes(0.6, None, None), "aborted", (False, True)),
        (RequestTimes(0.6, 0.2, 0.05), "aborted", (True, False)),
    ],
)
def test_a_request_keeps_what_it_was_promised_or_does_not(
    took: RequestTimes, finish: Finish, kept: tuple[bool, bool] | None
) -> None:
    assert keeps(BOTH, took, finish) == (None if kept is None else TargetsMet(*kept))


def test_what_is_not_promised_is_kept() -> None:
    assert keeps(Sla(itl_ms=30), RequestTimes(99.0, 99.0, 0.02), "stop") == TargetsMet(ttft=True, itl=True)
    assert keeps(Sla(ttft_ms=30), RequestTimes(99.0, 0.01, 9.0), "stop") == TargetsMet(ttft=True, itl=True)


def test_a_class_without_targets_has_those_of_the_default_and_without_any_nothing_is_counted() -> None:
    now = 0.0
    metrics = Metrics(MODEL)
    attainment = Attainment({"default": BOTH, "batch": Sla(itl_ms=1000)}, metrics, lambda: now)
    attainment.ended("default", RequestTimes(1.0, 0.1, 0.01), "stop")
    attainment.ended("unknown", RequestTimes(1.0, 0.6, 0.01), "stop")
    attainment.ended("batch", RequestTimes(9.0, 5.0, 0.5), "stop")
    now = LATELY_S + 1
    attainment.ended("default", RequestTimes(1.0, 0.6, 0.04), "stop")
    told = attainment.told()
    counted = ("requests", "ttft_met", "itl_met", "both_met")
    assert [told["default"][key] for key in counted] == [3, 1, 2, 1]
    assert [told["default"]["last_minute"][key] for key in counted] == [1, 0, 0, 0]
    assert [told["batch"][key] for key in counted] == [1, 1, 1, 1]
    assert (told["default"]["ttft_ms"], told["batch"]["ttft_ms"]) == (500, None)

    def sample(**labels: str) -> float | None:
        own = {"model_name": MODEL, "engine": "0"}
        return metrics.registry.get_sample_value("redline:sla_requests_total", own | labels)

    assert sample(sla="default", ttft="met", itl="met") == 1
    assert sample(sla="default", ttft="missed", itl="met") == 1
    assert sample(sla="default", ttft="missed", itl="missed") == 1
    assert sample(sla="batch", ttft="missed", itl="met") == 0, "the series exists from the start"
    none = Attainment({}, metrics)
    none.ended("default", RequestTimes(1.0, 0.1, 0.01), "stop")
    assert none.told() == {}


async def test_a_request_counts_in_the_class_of_its_key_and_its_job_says_when_it_is_late(tmp_path: Path) -> None:
    keys = Keyring(keys_file(tmp_path, "alice one sla=quick\nbob two"), KeyLimits(), classes=("quick",))
    assert {name: account.sla for name, account in keys.accounts.items()} == {"alice": "quick", "bob": "default"}
    targets = {"default": BOTH, "quick": Sla(ttft_ms=0.001)}

    async def asked(name: str | None) -> None:
        token = CALLER.set(Caller("id", None if name is None else keys.accounts[name]))
        with await world.gateway.begin(text_ask()) as generation:
            async for _ in generation:
                pass
        CALLER.reset(token)

    left_ms: list[float] = []

    def answered(job: Job) -> list[Delta]:
        assert job.ttft_ms is not None
        left_ms.append(job.ttft_ms)
        return [Delta(job=job.id, tokens=(65,), finish="length")]

    async with World(answered, targets=targets) as world:
        for name in ("alice", "bob", None):
            await asked(name)
        told = world.gateway.attainment.told()
    assert left_ms[0] < 0.001, "part of the target has passed when the job is sent"
    assert all(0 < left <= 500 for left in left_ms[1:])
    assert (told["quick"]["requests"], told["quick"]["ttft_met"]) == (1, 0)
    assert (told["default"]["requests"], told["default"]["both_met"]) == (2, 2)
    keys.path.write_text("alice one\nbob two sla=quick\n")
    reading = keys.read()
    assert reading is not None
    keys.take(reading)
    assert {name: account.sla for name, account in keys.accounts.items()} == {"alice": "default", "bob": "quick"}


def test_what_is_not_promised_is_kept_by_everybody() -> None:
    targets = targets_of({"default": Sla(ttft_ms=500), "batch": Sla(itl_ms=100)})
    assert targets[""] == targets["default"] == (0.5, math.inf)
    assert targets["batch"] == (math.inf, 0.1)
    assert targets_of({}) == {"": (math.inf, math.inf)}
