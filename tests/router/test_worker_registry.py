"""Jobs that a decode worker will answer once a prefill worker has computed their prompts."""

import pytest

from redline.chat.page_hashes import make_job
from redline.messages.channel import MemoryChannel
from redline.messages.job import Job, JobId, Sampling
from redline.messages.news import Load, Ready
from redline.policy.pairs import Work
from redline.router.worker_registry import Route, WorkerHandle, WorkerRegistry

READY = Ready(max_model_len=1 << 20, pages=4096, fingerprint="f", summary="", area=b"area", format="f")


def job(number: int) -> Job:
    tokens = tuple(range(10 * number, 10 * number + 2000))
    return make_job(JobId(f"job-{number}"), tokens, Sampling(max_tokens=50), "f")


@pytest.fixture
def workers() -> WorkerRegistry:
    """One prefill worker and one decode worker. A prompt takes a second, an answer of 20 tokens 0.2 s."""
    found = WorkerRegistry(lambda: 0.0)
    for name, role in (("p", "prefill"), ("d", "decode")):
        worker = WorkerHandle(name, MemoryChannel(), role)  # type: ignore[arg-type]
        found.join(worker)
        assert found.set_ready(worker, READY) is None
    for _ in range(9):
        found.latency_model.stepped(Work(prompt=500, expanded=500), 0.25, 0)
        found.latency_model.stepped(Work(rows=1), 0.01, 1)
        found.latency_model.answered("", 20)
    return found


def load(used: int, total: int) -> Load:
    return Load(
        running=0, waiting=0, pages_used=used, pages_cached=0, pages_total=total, steps=0, replayed=0, led=0,
        preemptions=0, prompt_tokens=0, prompt_tokens_cached=0, generation_tokens=0,
    )  # fmt: skip


def sent(workers: WorkerRegistry, number: int) -> tuple[Route, Job]:
    one = job(number)
    route = workers.route(one)
    assert route is not None
    workers.assign(route, one)
    return route, one


def test_they_count_as_answers_until_prompts_wait_for_longer_than_an_answer_is_written(workers: WorkerRegistry) -> None:
    p, d = workers
    first, one = sent(workers, 1)
    assert first.prefill is p
    assert (d.jobs, len(d.awaiting_prefill)) == (1, 1)
    assert workers.candidate(d, job(2), {}, waits_s=workers.prefill_queue_s).answers == 0, (
        "its prompt takes 1 s, and its answer 0.2 s"
    )
    workers.latency_model.answered("", 10_000)
    assert workers.candidate(d, job(2), {}, waits_s=workers.prefill_queue_s).answers == 1, "answers are long now"
    workers.prefill_done(first, one.id)
    assert (d.jobs, len(d.awaiting_prefill)) == (1, 0)
    assert workers.candidate(d, job(2), {}, waits_s=workers.prefill_queue_s).answers == 1


def test_of_many_that_wait_for_prompts_few_are_answers_at_once(workers: WorkerRegistry) -> None:
    p, d = workers
    route, _ = sent(workers, 1)
    for number in range(2, 41):
        workers.assign(route, job(number))
    assert (d.jobs, len(d.awaiting_prefill), p.jobs) == (40, 40, 40)
    assert workers.candidate(d, job(50), {}, waits_s=workers.prefill_queue_s).answers <= 1, (
        "one prompt is finished each second"
    )


def test_no_transfer_is_chosen_whose_pages_can_be_had_neither_there_nor_here(workers: WorkerRegistry) -> None:
    """A prompt of 2,000 tokens has 32 pages."""
    p, d = workers

    def computed_by(p_used: int, d_used: int) -> WorkerHandle | None:
        for worker, used in ((p, p_used), (d, d_used)):
            workers.update_load(worker, load(used, 48))
        route = workers.route(job(9))
        assert route is not None
        assert route.worker is d
        return route.prefill

    assert computed_by(0, 0) is p
    assert computed_by(40, 0) is p
    assert computed_by(0, 40) is p
    assert computed_by(40, 40) is None
    computed_by(0, 0)
    route, one = sent(workers, 1)
    assert route.prefill is p
    assert computed_by(0, 0) is None, (
        "the first job will take pages of both workers, though their loads do not show it yet"
    )
    workers.prefill_done(route, one.id)
    assert computed_by(0, 32) is p
    assert computed_by(32, 32) is None
