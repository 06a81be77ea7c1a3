"""Which worker can take which role, and when the switch is complete."""

import pytest

from redline.messages.codec import Wire
from redline.messages.job import Job, JobId, PageHash, Sampling
from redline.messages.news import Heartbeat, Ready, Role, TakeRole
from redline.router.roles import is_done, refusal
from redline.router.worker_registry import MOVE_S, WorkerHandle, WorkerRegistry


class Told:
    """An outbox that keeps the messages put into it."""

    def __init__(self) -> None:
        self.messages: list[Wire] = []

    def put(self, message: Wire) -> None:
        self.messages.append(message)


class Fleet:
    """Workers a, b ... with these roles, ready and with a heartbeat at `now`."""

    def __init__(self, *roles: Role, area: bytes = b"here") -> None:
        self.now = 0.0
        self.workers = WorkerRegistry(lambda: self.now)
        self.of: list[WorkerHandle] = []
        ready = Ready(max_model_len=64, pages=9, fingerprint="tiny", summary="", area=area, format="rows")
        for name, role in zip("abcd", roles, strict=False):
            worker = WorkerHandle(name, Told(), role)
            self.workers.join(worker)
            assert self.workers.set_ready(worker, ready) is None
            worker.record_heartbeat(Heartbeat(), self.now)
            self.of.append(worker)


def job() -> Job:
    tokens = tuple(range(200))
    return Job(id=JobId("a"), tokens=tokens, pages=(PageHash(b"0"),) * 3, sampling=Sampling(max_tokens=9))


def test_new_jobs_go_by_the_new_role_at_once() -> None:
    fleet = Fleet("decode", "decode")
    first = fleet.workers.route(job())
    assert first is not None
    assert (first.worker, first.prefill) == (fleet.of[0], None)
    fleet.workers.switch_role(fleet.of[0], "prefill")
    route = fleet.workers.route(job())
    assert route is not None
    assert (route.worker, route.prefill) == (fleet.of[1], fleet.of[0])
    fleet.workers.switch_role(fleet.of[0], "decode")
    route = fleet.workers.route(job())
    assert route is not None
    assert (route.worker, route.prefill) == (fleet.of[0], None)
    assert fleet.of[0].outbox.messages == [TakeRole(role="prefill"), TakeRole(role="decode")]  # type: ignore[attr-defined]


def test_whoever_is_the_last_that_answers_cannot_compute_prompts() -> None:
    fleet = Fleet("decode", "both", "prefill")
    a, b, _ = fleet.of
    assert refusal(fleet.workers, a, "prefill") is None
    fleet.workers.switch_role(b, "prefill")
    assert (refusal(fleet.workers, a, "prefill") or "").startswith("a is the last worker that answers")
    b.switching_since = None
    assert refusal(fleet.workers, b, "decode") is None


@pytest.mark.parametrize("why", ["silent", "lost", "draining"])
def test_others_that_answer_no_more_do_not_count(why: str) -> None:
    fleet = Fleet("decode", "decode")
    a, b = fleet.of
    if why == "silent":
        fleet.now = MOVE_S + 0.1
        a.record_heartbeat(Heartbeat(), fleet.now)
    elif why == "lost":
        fleet.workers.mark_down(b, "gone")
    else:
        b.draining = True
    assert (refusal(fleet.workers, a, "prefill") or "").startswith("a is the last worker that answers")


def test_each_refusal_says_why_and_what_to_do() -> None:
    fleet = Fleet("decode", "decode", area=b"")
    a, b = fleet.of
    assert "no area for parcels" in (refusal(fleet.workers, a, "prefill") or "")
    fleet = Fleet("decode", "decode", "prefill")
    a, b, c = fleet.of
    fleet.workers.switch_role(a, "prefill")
    assert (refusal(fleet.workers, a, "decode") or "").startswith("a is already switching its role, to prefill")
    c.draining = True
    assert (refusal(fleet.workers, c, "decode") or "").startswith("c is about to be restarted")
    fleet.workers.mark_down(b, "it met a fault")
    assert refusal(fleet.workers, b, "prefill") == "b is not ready: it met a fault; retry once it is"


def test_parcels_of_another_format_could_not_be_read() -> None:
    fleet = Fleet("decode", "decode")
    a, b = fleet.of
    b.ready = Ready(max_model_len=64, pages=9, fingerprint="tiny", summary="", area=b"here", format="columns")
    assert refusal(fleet.workers, a, "prefill") == "b reads another format of parcels (KV chunks) than a would send"


def test_a_role_is_taken_once_the_worker_knows_and_what_it_answered_has_ended() -> None:
    fleet = Fleet("decode", "decode")
    a, _ = fleet.of
    fleet.workers.switch_role(a, "prefill")
    assert not is_done(a, 0), "the worker may not have received the message"
    a.confirmed_role = "prefill"
    assert not is_done(a, 1)
    assert is_done(a, 0)
    a.switching_since = None
    fleet.workers.switch_role(a, "both")
    a.confirmed_role = "both"
    assert is_done(a, 3), "a worker that answers may take any role"


def test_a_silent_worker_for_prompts_is_found_since_answers_may_be_left_there() -> None:
    fleet = Fleet("decode", "prefill")
    a, b = fleet.of
    fleet.now = MOVE_S + 0.1
    a.record_heartbeat(Heartbeat(), fleet.now)
    assert fleet.workers.silent() == [b]
