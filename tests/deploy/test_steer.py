"""Role switches and the autoscaler: their inputs, their decisions, and the limits on the number of changes."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from redline.api.config import Sla
from redline.api.gateway.active_requests import ActiveRequests
from redline.api.gateway.gateway import Gateway
from redline.api.telemetry.metrics import Metrics
from redline.chat.template import K2_6
from redline.deploy.autoscaler import AGAIN_S
from redline.deploy.config import Steer
from redline.deploy.role_controller import CONFIRM, LEAST_REQUESTS, Measured, Steering, roles_of
from redline.deploy.supervisor import WorkerStatus
from redline.errors import RedlineError
from redline.messages.news import STEP_SIZES, Heartbeat, Load, Ready, Role, TimedStep
from redline.policy.expected import RequestTokens, Roles, Traffic
from redline.router.roles import is_done, refusal
from tests.api.fake_engine import FakeEngine
from tests.api.world import TOKENIZER

pytestmark = pytest.mark.anyio

PROMPT_MS, ROW_MS, BASE_MS = 0.5, 0.2, 5.0  # the step time of these workers by its parts
SLA = {"default": Sla(ttft_ms=2000, itl_ms=12)}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def load(number: int, *timed: TimedStep) -> Load:
    names = "running waiting pages_used pages_cached pages_total replayed led preemptions prompt_tokens"
    counters: dict[str, Any] = dict.fromkeys(f"{names} prompt_tokens_cached generation_tokens".split(), 0)
    return Load(**counters, steps=number, step_sizes=(0,) * (len(STEP_SIZES) + 1), timed=timed)


def step(number: int, prompt: int, rows: int, tokens: int | None = None) -> TimedStep:
    ms = BASE_MS + PROMPT_MS * prompt + ROW_MS * rows
    return TimedStep(
        number=number,
        prompt=prompt,
        pairs=0.0,
        expanded=0,
        rows=rows,
        context=0,
        tokens=rows if tokens is None else tokens,
        ms=ms,
    )


class Fleet:
    """Workers a, b ... with these roles, which follow every order, and their `Steering`, with a clock of its own."""

    def __init__(self, *roles: Role, spares: int = 0, sla: Mapping[str, Sla] = SLA, **config: float) -> None:
        """spares: further workers, idle at first, that run while they are needed."""
        self.now = 0.0
        self.states: dict[str, WorkerStatus] = {}
        self.gateway = Gateway(TOKENIZER, K2_6, Metrics("m"), clock=lambda: self.now, resume_s=5.0)
        self.turned: list[tuple[str, Role]] = []
        self.steering = Steering(Steer(window_s=60, rest_s=30, **config), self.gateway, self, sla, lambda: self.now)
        for name, role in zip("abcd", roles, strict=False):
            self.states[name] = WorkerStatus(name, "ready", spare=False)
            self.serves(name, role)
        for name in "wxyz"[:spares]:
            self.states[name] = WorkerStatus(name, "idle", spare=True)
        self.steps = 0
        self.now = 1000.0
        self.heard()

    def serves(self, name: str, role: Role) -> None:
        """Make a worker ready."""
        epoch = 1 + sum(link.name == name for link in self.gateway.workers)
        link = FakeEngine(lambda _: ()).serve(self.gateway, name=name, role=role, epoch=epoch)
        link.ready = Ready(max_model_len=99, pages=9999, fingerprint="tiny", summary="", area=b"here", format="rows")
        self.gateway.monitor.receive(link, [Heartbeat()])

    @property
    def seats(self) -> list[WorkerStatus]:
        return list(self.states.values())

    def want(self, name: str, role: Role) -> str | None:
        self.states[name] = WorkerStatus(name, "starting", spare=True)
        self.turned.append((name, role))
        return None

    def spare(self, name: str) -> str | None:
        self.states[name] = WorkerStatus(name, "ending", spare=True)
        self.gateway.monitor.drain(next(link for link in self.gateway.workers if link.name == name))
        return None

    def turn(self, name: str, role: Role) -> str | None:
        link = next(link for link in self.gateway.workers if link.name == name)
        if (why_not := refusal(self.gateway.workers, link, role)) is None:
            self.gateway.monitor.switch_role(link, role)
            self.turned.append((name, role))
        return why_not

    def measure(self) -> None:
        """Report steps of each kind from each worker."""
        for worker in "abcd":
            for prompt, rows in ((512, 0), (512, 8), (256, 4), (0, 1), (0, 8), (0, 32)):
                self.steps += 1
                self.steering.measured.hear(worker, load(self.steps, step(self.steps, prompt, rows)))

    def comes(self, prompt: int, output: int, per_s: float, seconds: float = 60.0) -> None:
        """`per_s` requests a second of these lengths, evenly spaced over the last `seconds`."""
        end = self.now
        for number in range(int(per_s * seconds)):
            self.now = end - seconds + number / per_s
            came = self.gateway.history.add("default", prompt)
            came.output, came.ended = output, True
        self.now = end
        self.heard()

    def heard(self) -> None:
        for link in self.gateway.workers:
            if link.ready is not None:
                self.gateway.monitor.receive(link, [Heartbeat()])

    def settle(self) -> None:
        """Complete the role switches that are done."""
        for link in self.gateway.workers:
            if link.switching_since is not None and is_done(link, len(self.gateway.requests.at(link))):
                link.switching_since = None

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.heard()
        self.settle()


async def test_long_prompts_get_more_workers_after_two_looks_that_say_so_one_at_a_time() -> None:
    fleet = Fleet("both", "both", "both", "both")
    fleet.measure()
    fleet.comes(prompt=1000, output=100, per_s=4)
    first = await fleet.steering.look()
    assert first.worker is None
    assert first.why.endswith("a role switches if the next evaluation confirms it")
    assert first.now is not None
    assert first.expected is not None
    assert first.expected.attainment > first.now.attainment
    assert first.expected.roles == Roles(prefill=3, decode=1)
    second = await fleet.steering.look()
    assert (second.worker, second.role) == ("a", "prefill")
    assert (await fleet.steering.look()).why == "a is still switching its role"
    fleet.passes(5)
    third = await fleet.steering.look()
    assert (third.worker, third.role) == ("b", "prefill"), "a partial change may be worse than none"
    fleet.passes(5)
    assert (await fleet.steering.look()).worker == "c"
    fleet.passes(5)
    assert "the next switch is possible in 25 s" in (await fleet.steering.look()).why
    assert fleet.turned == [("a", "prefill"), ("b", "prefill"), ("c", "prefill")]
    told = fleet.steering.told()
    assert told["roles"] == {"prefill": 3, "decode": 1, "both": 0}
    assert [change["worker"] for change in told["changes"]] == ["c", "b", "a"]
    assert all(change["expected"]["attainment"] > change["now"]["attainment"] for change in told["changes"])
    assert told["last"]["workers_wanted"] is None, "the last look did not evaluate roles"
    weighed = told["weighed"]  # by the look that began the changes
    assert [weighed[f"{what}_tokens"] for what in ("prompt", "cached", "answer")] == [1000, 0, 100]
    assert weighed["requests_per_s"] == pytest.approx(4, rel=0.02)
    assert weighed["step_ms"] == pytest.approx({"1": BASE_MS + ROW_MS, "16": BASE_MS + 16 * ROW_MS}, rel=0.02)
    assert weighed["prompt_ms"] == pytest.approx(BASE_MS + 512 * PROMPT_MS, rel=0.02)


async def test_roles_are_chosen_with_the_bound_that_workers_have_on_steps() -> None:
    """Prefill of a prompt takes half a second in large chunks: an answer of ten tokens that runs at the same time
    misses 40 ms between tokens. In steps with one page of the prompt each token takes 37 ms."""
    promised = {"default": Sla(ttft_ms=20_000, itl_ms=40)}
    for step_ms, changes in ((None, True), (60.0, False)):
        fleet = Fleet("both", "both", "both", "both", sla=promised)
        for link in fleet.gateway.workers:
            assert link.ready is not None
            link.ready = msgspec.structs.replace(link.ready, step_ms=step_ms)
        fleet.measure()
        fleet.comes(prompt=1000, output=10, per_s=4)
        decision = await fleet.steering.look()
        assert decision.expected is not None
        assert (decision.expected.roles != Roles(both=4)) == changes, decision.why


async def test_where_little_is_to_be_gained_by_prediction_roles_are_not_even_tried() -> None:
    fleet = Fleet("both", "both", "both", "both", sla={"default": Sla(ttft_ms=20_000, itl_ms=40)})
    fleet.measure()
    fleet.comes(prompt=1000, output=10, per_s=1.5)
    looks = [await fleet.steering.look() for _ in range(CONFIRM + 1)]
    assert all(look.why.endswith(", too small a gain for a change") for look in looks)
    assert fleet.turned == []


async def test_where_none_is_better_roles_are_tried_again_after_a_rest_and_where_they_cannot_be_they_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet("both", "both", "both", "both", sla={"default": Sla(ttft_ms=20_000, itl_ms=40)})
    fleet.measure()
    fleet.comes(prompt=1000, output=10, per_s=2.4)
    assert (await fleet.steering.look()).why.startswith("simulated good requests: 9")
    fleet.passes(5)
    assert (await fleet.steering.look()).why == "roles were simulated recently; the next simulation is in 25 s"

    async def fails(*_: object) -> Mapping[Roles, float]:
        raise RedlineError("the simulation of roles ended with code -9")

    monkeypatch.setattr("redline.deploy.role_controller.tried", fails)
    fleet.passes(26)
    fleet.comes(prompt=1000, output=10, per_s=4)
    decision = await fleet.steering.look()
    assert (decision.worker, decision.why) == (None, "the simulation of roles ended with code -9")
    assert decision.expected is not None
    assert decision.expected.roles == Roles(both=4)
    assert caplog.messages == ["the simulation of roles ended with code -9; the roles stay as they are"]


async def test_what_is_under_way_is_played_first(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet("both", "both", "both", "both")
    fleet.measure()
    fleet.comes(prompt=1000, output=100, per_s=4)
    writes, waits = (fleet.gateway.history.add("default", prompt) for prompt in (500, 700))
    writes.output = 40
    monkeypatch.setattr(ActiveRequests, "records", property(lambda _: [writes, waits]))
    played: list[Traffic] = []

    async def tried(traffic: Traffic, *_: object) -> Mapping[Roles, float]:
        played.append(traffic)
        return {Roles(both=4): 1.0}

    monkeypatch.setattr("redline.deploy.role_controller.tried", tried)
    await fleet.steering.look()
    assert played[0].under_way == [RequestTokens(540, 0, 60, "default"), RequestTokens(0, 700, 100, "default")]


async def test_a_worker_that_is_lost_on_the_way_has_all_weighed_anew() -> None:
    fleet = Fleet("both", "both", "both", "both")
    fleet.measure()
    fleet.comes(prompt=1000, output=100, per_s=4)
    for _ in range(CONFIRM):
        await fleet.steering.look()
    fleet.gateway.monitor.mark_down(next(link for link in fleet.gateway.workers if link.name == "d"), "it has ended")
    fleet.passes(5)
    assert "the next switch is possible in 25 s" in (await fleet.steering.look()).why
    assert fleet.turned == [("a", "prefill")]


async def test_when_prompts_are_short_and_answers_long_the_worker_answers_again() -> None:
    fleet = Fleet("prefill", "prefill", "prefill", "decode")
    fleet.measure()
    fleet.comes(prompt=20, output=600, per_s=8)
    looks = [await fleet.steering.look() for _ in range(CONFIRM)]
    assert [look.worker is None for look in looks] == [True] * (CONFIRM - 1) + [False]
    assert looks[-1].expected is not None
    assert looks[-1].expected.roles == Roles(both=4), "of equally good roles, those that are good for any traffic"
    for _ in "bc":
        fleet.passes(5)
        await fleet.steering.look()
    assert fleet.turned == [("a", "both"), ("b", "both"), ("c", "both")]


async def test_where_nobody_is_to_compute_prompts_for_others_the_worker_does_both() -> None:
    fleet = Fleet("prefill", "decode")
    fleet.measure()
    fleet.comes(prompt=20, output=600, per_s=6)
    for _ in range(CONFIRM):
        await fleet.steering.look()
    assert fleet.turned == [("a", "both")]


async def test_a_look_that_says_otherwise_begins_the_count_anew() -> None:
    fleet = Fleet("both", "both", "both", "both")
    fleet.measure()
    fleet.comes(prompt=1000, output=100, per_s=4)
    await fleet.steering.look()
    fleet.passes(120)
    fleet.comes(prompt=20, output=20, per_s=1.0)
    assert (await fleet.steering.look()).worker is None
    fleet.passes(120)
    fleet.comes(prompt=1000, output=100, per_s=4)
    assert (await fleet.steering.look()).worker is None
    assert (await fleet.steering.look()).worker is not None


async def test_without_enough_traffic_or_measured_steps_nothing_is_concluded() -> None:
    fleet = Fleet("both", "both")
    fleet.comes(prompt=3000, output=40, per_s=(LEAST_REQUESTS - 1) / 60)
    assert "requests arrived in 60 s" in (await fleet.steering.look()).why
    fleet.comes(prompt=3000, output=40, per_s=2)
    assert "have been measured yet" in (await fleet.steering.look()).why
    fleet.steering.measured.hear("a", load(1, step(1, 512, 0)))
    assert "have been measured yet" in (await fleet.steering.look()).why
    fleet = Fleet("both")
    assert "roles need at least 2" in (await fleet.steering.look()).why


async def test_where_nobody_is_left_that_answers_one_that_computes_prompts_does_at_once() -> None:
    fleet = Fleet("prefill", "decode", "prefill")
    link = next(link for link in fleet.gateway.workers if link.name == "b")
    fleet.gateway.monitor.mark_down(link, "it has ended")
    decision = await fleet.steering.look()
    assert (decision.worker, decision.role) == ("a", "decode")
    assert decision.why == "no other worker can answer"


async def test_a_worker_that_cannot_is_told_with_its_reason() -> None:
    fleet = Fleet("both", "both", "both", "both")
    for link in fleet.gateway.workers:
        link.ready = Ready(max_model_len=99, pages=9999, fingerprint="tiny", summary="")
    fleet.measure()
    fleet.comes(prompt=1000, output=100, per_s=4)
    decision = [await fleet.steering.look() for _ in range(CONFIRM)][-1]
    assert decision.worker is None
    assert "but a has no area for parcels" in decision.why
    assert not fleet.turned


MANY = {"prompt": 20, "output": 200, "per_s": 80.0}  # more than three workers can answer within the SLO target


async def look(fleet: Fleet, times: int, seconds: float = 5.0) -> list[str]:
    """The decisions of `times` looks, `seconds` apart."""
    found: list[str] = []
    for _ in range(times):
        decision = await fleet.steering.look()
        found.append(f"{decision.worker} {decision.does}" if decision.does else "")
        fleet.passes(seconds)
    return found


async def test_where_the_best_roles_do_not_keep_what_is_promised_others_are_started_one_look_after_another() -> None:
    fleet = Fleet("both", "both", spares=2)
    fleet.measure()
    fleet.comes(**MANY)
    first = await fleet.steering.look()
    assert first.worker is None
    assert first.wanted is not None
    assert first.wanted > 4
    second = await fleet.steering.look()
    assert (second.worker, second.does) == ("w", "starts")
    assert second.why == f"{first.wanted} workers are needed to meet the SLO targets, 2 are running"
    assert second.now is not None
    assert second.expected is not None
    assert second.expected.roles == Roles(both=3), "prefill and decode are not split before that has been simulated"
    assert second.role == "both"
    assert second.expected.attainment >= second.now.attainment
    third = await fleet.steering.look()
    assert (third.worker, third.does) == ("x", "starts"), "the worker that is being started is not started again"
    assert (await fleet.steering.look()).worker is None, "there are no more"
    told = fleet.steering.told()
    assert told["workers"] == {
        "least": 2, "most": 4, "wanted": 4, "states": {"ready": 2, "starting": 2}, "failed": {}
    }  # fmt: skip
    assert [(change["worker"], change["does"]) for change in told["changes"]] == [("x", "starts"), ("w", "starts")]


async def test_where_other_roles_are_enough_nobody_is_started() -> None:
    fleet = Fleet("both", "both", "both", "both", spares=1)
    fleet.measure()
    fleet.comes(prompt=1000, output=100, per_s=4)
    assert await look(fleet, 3) == ["", "a turns", "b turns"]
    assert fleet.states["w"].state == "idle"


async def test_who_is_not_wanted_any_more_ends_after_long_and_one_at_a_time() -> None:
    fleet = Fleet("both", spares=2, spare_s=60.0)
    for name in "wx":
        fleet.states[name] = WorkerStatus(name, "ready", spare=True)
        fleet.serves(name, "both")
    for link in fleet.gateway.workers:
        link.jobs = {"a": 0, "w": 2, "x": 1}[link.name]
    assert await look(fleet, 13) == [""] * 12 + ["x ends"], "it has less to end, and the one without any runs always"
    assert (await fleet.steering.look()).why.endswith("but x is still draining")
    fleet.states["x"] = WorkerStatus("x", "idle", spare=True)
    fleet.gateway.monitor.mark_down(
        next(link for link in fleet.gateway.workers if link.name == "x"), "not wanted", asked=True
    )
    assert await look(fleet, 1) == ["w ends"]
    fleet.states["w"] = WorkerStatus("w", "idle", spare=True)
    assert await look(fleet, 3) == [""] * 3


async def test_nobody_ends_while_requests_wait_though_none_come_any_more() -> None:
    fleet = Fleet("both", spares=1, spare_s=60.0)
    fleet.states["w"] = WorkerStatus("w", "ready", spare=True)
    fleet.serves("w", "both")
    first = next(iter(fleet.gateway.workers))
    first.load = msgspec.structs.replace(load(1), waiting=8)
    assert await look(fleet, 20, seconds=10) == [""] * 20
    first.load = msgspec.structs.replace(load(2), waiting=7)
    assert "w ends" in await look(fleet, 8, seconds=10)


async def test_a_wave_in_between_keeps_those_who_run() -> None:
    fleet = Fleet("both", spares=1, spare_s=60.0)
    fleet.measure()
    fleet.states["w"] = WorkerStatus("w", "ready", spare=True)
    fleet.serves("w", "both")
    assert await look(fleet, 6, seconds=10) == [""] * 6
    fleet.comes(prompt=20, output=200, per_s=12)
    assert await look(fleet, 8, seconds=10) == [""] * 8, "while the burst is in the window, and a minute more"
    assert "w ends" in await look(fleet, 6, seconds=10)


async def test_one_whose_start_fails_is_left_out_for_a_while_and_another_is_tried() -> None:
    fleet = Fleet("both", spares=2)
    fleet.measure()
    fleet.comes(prompt=20, output=200, per_s=16)
    assert await look(fleet, 2, seconds=1) == ["", "w starts"]
    fleet.states["w"] = WorkerStatus("w", "idle", spare=True, failed="no memory")
    assert await look(fleet, 1, seconds=1) == ["x starts"]
    fleet.states["x"] = WorkerStatus("x", "idle", spare=True, failed="no memory")
    last = await fleet.steering.look()
    assert last.worker is None
    assert fleet.steering.told()["workers"]["failed"] == {"w": "no memory", "x": "no memory"}
    fleet.passes(AGAIN_S)
    fleet.comes(prompt=20, output=200, per_s=16)
    assert await look(fleet, 1) == ["w starts"]


async def test_where_a_worker_that_runs_in_any_case_is_given_up_another_is_started_without_a_look_at_the_traffic() -> (
    None
):
    fleet = Fleet("both", "both", spares=1)
    fleet.states["b"] = WorkerStatus("b", "given up", spare=False)
    assert await look(fleet, 2) == ["w starts", ""]


async def test_who_is_the_last_that_answers_does_not_end() -> None:
    fleet = Fleet("prefill", spares=1, spare_s=5.0)
    fleet.states["w"] = WorkerStatus("w", "ready", spare=True)
    fleet.serves("w", "decode")
    assert await look(fleet, 3) == [""] * 3
    assert fleet.steering.last is not None
    assert fleet.steering.last.why.endswith("but no worker that runs on demand can be stopped yet")


async def test_one_mistake_in_a_look_does_not_end_the_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet("both", "both")
    looks: list[int] = []

    async def fails() -> Any:
        looks.append(1)
        if len(looks) == 3:
            raise KeyboardInterrupt
        raise ValueError("an unexpected error")

    monkeypatch.setattr(fleet.steering, "look", fails)
    monkeypatch.setattr("asyncio.sleep", _at_once)
    with pytest.raises(KeyboardInterrupt):
        await fleet.steering.run()
    assert len(looks) == 3


async def _at_once(_: float) -> None:
    return


def test_a_step_is_counted_once_and_a_worker_that_is_started_again_counts_anew() -> None:
    measured = Measured()
    measured.hear("a", load(5, step(4, 0, 2), step(5, 100, 0)))
    measured.hear("a", load(6, step(4, 0, 2), step(5, 100, 0)))
    assert len(measured.steps) == 2
    measured.hear("a", load(3, step(2, 0, 2)))
    assert len(measured.steps) == 3
    measured.hear("b", load(3, step(2, 0, 2, tokens=6)))
    assert 1.5 < measured.tokens_per_step < 2.0
    assert measured.enough


def test_where_every_step_has_a_prompt_there_is_none_of_answers_alone_to_wait_for() -> None:
    measured = Measured()
    measured.hear("a", load(9, *(step(n, 512, 2) for n in range(1, 10))))
    assert not measured.enough
    measured.hear("a", load(99, *(step(n, 512, 2) for n in range(10, 100))))
    assert measured.enough


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (["both", "both"], Roles(both=2)),
        (["decode", "both"], Roles(both=2)),
        (["prefill", "both", "decode"], Roles(prefill=1, decode=2)),
    ],
)
def test_roles_are_counted_as_they_work(roles: list[Role], expected: Roles) -> None:
    assert roles_of(roles) == expected
