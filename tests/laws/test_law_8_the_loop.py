"""Law 8, from the loop on: the deltas of a job, joined, are its whole answer; through memory channels and through
sockets.
"""

import threading
from pathlib import Path

import pytest

from redline.messages.channel import MemoryChannel, SocketInbox, SocketOutbox, ipc_address
from redline.messages.delta import Delta
from redline.messages.job import JobId
from redline.messages.news import Stop
from redline.scheduler.config import PlanConfig
from redline.scheduler.planner import Planner
from redline.worker.loop import lead
from tests.fakes import FakeRunner, hash_page, make_job, whole_answer
from tests.waiting import LIMIT_S

MAX_MODEL_LEN = 320
PAGES = 9  # too few for all jobs at once: some are pre-empted


@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize("through", ["memory", "sockets"])
def test_the_deltas_joined_are_the_answer(through: str, draft_tokens: int, tmp_path: Path):
    config = PlanConfig(max_running=6, step_tokens=64, draft_tokens=draft_tokens, learned=draft_tokens > 0)
    planner, runner = Planner(PAGES, config, MAX_MODEL_LEN, hash_page), FakeRunner(PAGES, config)
    jobs = [
        make_job(
            f"job-{n}", tuple(range(n, n + 50)), max_tokens=20 * n, seed=n, stop_ids=(n,) if n % 3 else (), logprobs=0
        )
        for n in range(12, 0, -1)
    ]
    if through == "memory":
        to_worker, from_worker = MemoryChannel(), MemoryChannel()
        arguments = [planner, runner, to_worker, from_worker]
        thread = threading.Thread(target=lead, args=arguments)
    else:
        requests, answers = ipc_address(tmp_path / "run", "jobs"), ipc_address(tmp_path / "run", "deltas")
        to_worker, from_worker = SocketOutbox(requests), SocketInbox(answers)

        def work() -> None:
            with SocketInbox(requests) as inbox, SocketOutbox(answers) as outbox:
                lead(planner, runner, inbox, outbox)

        thread = threading.Thread(target=work)
    thread.start()
    for job in jobs:
        to_worker.put(job)
    deltas: dict[JobId, list[Delta]] = {job.id: [] for job in jobs}
    open_jobs = set(deltas)
    while open_jobs:
        messages = from_worker.drain(wait=True, timeout=LIMIT_S)
        assert messages, f"{open_jobs} did not end"
        for message in messages:
            if isinstance(message, Delta):
                deltas[message.job].append(message)
                if message.finish:
                    open_jobs.remove(message.job)
    to_worker.put(Stop())
    thread.join(LIMIT_S)
    for job in jobs:
        told = deltas[job.id]
        answer = whole_answer(job, MAX_MODEL_LEN)
        assert tuple(token for delta in told for token in delta.tokens) == answer
        assert tuple(item.token for delta in told for item in delta.logprobs) == answer
        assert [delta.finish for delta in told[:-1]] == [None] * (len(told) - 1)
        assert told[-1].finish == ("stop" if answer and answer[-1] in job.sampling.stop_ids else "length")
    assert planner.load().preemptions > 0
    assert (planner.load().accepted_tokens > 0) == (draft_tokens > 0)
    planner.check()
    if through == "sockets":
        to_worker.close()
        from_worker.close()
