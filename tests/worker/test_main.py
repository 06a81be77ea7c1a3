"""A worker's process ends with one line for the operator and exit code 1, for every cause."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from redline.chat.page_hashes import make_job
from redline.messages.channel import SocketInbox, SocketOutbox, ipc_address
from redline.messages.codec import Wire
from redline.messages.delta import Delta
from redline.messages.job import JobId, Sampling
from redline.messages.news import Failed, Heartbeat, Ready
from redline.model.k2.write import random_checkpoint
from redline.worker.config import EngineConfig, WorkerConfig
from tests import forked
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB
from tests.waiting import LIMIT_S, until

BROKEN = """
import signal, sys, torch
from redline.messages.channel import SocketInbox
from redline.messages.job import Job
from redline.worker import engine, main, heartbeat
drain, heard = SocketInbox.drain, []
def all_jobs(self, **how):
    # The first jobs are received together, independent of timing.
    heard.extend(found := drain(self, **how))
    while found and sum(isinstance(each, Job) for each in heard) < {jobs}:
        heard.extend(more := drain(self, wait=True))
        found += more
    return found
SocketInbox.drain = all_jobs
load = engine.EngineCore.load
def broken(*arguments, **named):
    assert named["alone"], "the worker is configured to be alone"
    loaded = load(*arguments, **named)
    loaded.model.predict = fails
    return loaded
def fails(*_):
    {step}
main.EngineCore.load = broken
{more}
sys.exit(main.main())
"""
DEVICE = 'raise torch.AcceleratorError("CUDA error: unspecified launch failure\\nCompile with TORCH_USE_CUDA_DSA")'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("main")
    random_checkpoint(folder, kernel_config(vocab_size=TINY_VOCAB))
    return folder


@pytest.mark.parametrize(
    ("step", "more", "reason", "faults"),
    [
        (
            DEVICE,
            "",
            "device error: AcceleratorError: CUDA error: unspecified launch failure",
            ["lost"] * 2,
        ),
        (
            'raise ValueError("out of luck")',
            "",
            "3 steps in a row failed, the last one with ValueError: out of luck",
            ["failed", "failed", "lost", "lost"],
        ),
        (
            "signal.pause()",
            'heartbeat.BEAT_S, heartbeat.TURN_S, heartbeat.TURN_S_PER_TOKEN = 0.02, 0.5, {"cpu": 0, "cuda": 0}',
            "a step has not ended in 1 s: a kernel or the device hangs",
            [],
        ),
        (
            "",
            'def fails(self): raise RuntimeError("no such luck")\nengine.EngineCore.ready = property(fails)',
            "unexpected error in worker: RuntimeError: no such luck; set REDLINE_LOG=INFO for the traceback",
            [],
        ),
        (
            "",
            'def fails(*_, **__): raise torch.OutOfMemoryError("CUDA out of memory.")\nmain.EngineCore.load = fails',
            "out of memory: OutOfMemoryError: CUDA out of memory.; `redline doctor` prints what fits",
            [],
        ),
    ],
    ids=["device", "three", "hangs", "ours", "memory"],
)
def test_a_worker_that_cannot_go_on_says_why_and_exits_with_1(
    folder: Path, tmp_path: Path, step: str, more: str, reason: str, faults: list[str]
):
    jobs, deltas = ipc_address(tmp_path / "run", "jobs"), ipc_address(tmp_path / "run", "deltas")
    engine = EngineConfig(kv_memory=1_000_000, max_model_len=512, max_running=1)
    config = WorkerConfig(weights=str(folder), engine=engine, inbox=jobs, outbox=deltas, alone=True)
    with SocketInbox(deltas) as inbox, SocketOutbox(jobs) as outbox:
        start = subprocess.Popen if step == DEVICE else forked.Popen
        process = start(
            [sys.executable, "-c", BROKEN.format(step=step or "pass", more=more, jobs=len(faults))],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            process.stdin.flush()
            for n in range(len(faults)):
                outbox.put(make_job(JobId(f"{n}"), (1, 2, 3), Sampling(max_tokens=4), "tiny"))
            if not faults:
                outbox.put(make_job(JobId("0"), (1, 2, 3), Sampling(max_tokens=4), "tiny"))
            messages: list[Wire] = []

            def failed() -> bool:
                messages.extend(inbox.drain(wait=False))
                return any(isinstance(message, Failed) for message in messages)

            until(failed, "the worker reported no failure")
            assert process.wait(LIMIT_S) == 1
        finally:
            process.kill()
            said = process.communicate()[1].decode()
    assert [message.reason for message in messages if isinstance(message, Failed)] == [reason]
    assert [message.fault for message in messages if isinstance(message, Delta)] == faults
    if faults:
        assert {Ready, Heartbeat} <= {type(message) for message in messages}
    assert "Traceback" not in said


def test_a_worker_says_why_it_ends_before_it_closes_anything(folder: Path, tmp_path: Path):
    """Closing the other ranks, or a device, may take seconds."""
    jobs, deltas = ipc_address(tmp_path / "run", "jobs"), ipc_address(tmp_path / "run", "deltas")
    engine = EngineConfig(kv_memory=1_000_000, max_model_len=512, max_running=1)
    config = WorkerConfig(weights=str(folder), engine=engine, inbox=jobs, outbox=deltas, alone=True)
    slow = "def close(_): print('closing', flush=True); signal.pause()\nengine.Runner.close = close"
    program = BROKEN.format(step=DEVICE, more=slow, jobs=1)
    with SocketInbox(deltas) as inbox, SocketOutbox(jobs) as outbox:
        process = forked.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            process.stdin.flush()
            outbox.put(make_job(JobId("0"), (1, 2, 3), Sampling(max_tokens=4), "tiny"))
            reasons = until(lambda: [each.reason for each in inbox.drain(wait=False) if isinstance(each, Failed)])
            assert process.stdout is not None
            assert process.stdout.readline() == b"closing\n"
            assert process.poll() is None
        finally:
            process.kill()
            process.communicate()
    assert reasons == ["device error: AcceleratorError: CUDA error: unspecified launch failure"]
