"""The memory that `fit` counts besides the pages, compared with the anonymous memory of an engine in a process of its
own.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from redline.kernels.cpu import native
from redline.model.k2.write import random_checkpoint
from tests.tiny_model import kernel_config

RUN = """
import json, sys, threading
from pathlib import Path

import torch
from redline.chat.page_hashes import make_job
from redline.kernels.cpu import native
from redline.run.kv import KvPool
from redline.messages.job import JobId, Sampling
from redline.worker.config import EngineConfig
from redline.worker.engine import EngineCore, kv_dtype_of, sizes_of
from redline.worker.turn import turn


def anonymous():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def watch():
    global peak
    while not over.wait(0.002):
        peak = max(peak, anonymous())


folder, config = sys.argv[1], EngineConfig(**json.loads(sys.argv[2]))
assert native.library() is not None, native.why_not()
torch.zeros(1000).clone()  # what torch allocates once is not the engine's
peak = before = anonymous()
over = threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
engine = EngineCore.load(folder, config)
loaded = anonymous() - before
engine.runner.kv.planes.zero_()
vocabulary, reach = engine.model.config.vocab_size, engine.layout.max_model_len


def submit(name, count, **sampling):
    tokens = tuple((len(name) * 7919 + place * 104729) % vocabulary for place in range(count))
    job = make_job(JobId(name), tokens, Sampling(**{"max_tokens": 20, **sampling}), engine.fingerprint)
    assert not engine.planner.submit(job)


submit("a long prompt, scored", reach - 20, prompt_logprobs=20)
for n in range(config.max_running - 1):
    how = {"temperature": 1.0, "top_p": 0.9, "seed": n} if n % 2 else {"logprobs": 20, "presence_penalty": 0.5}
    submit(f"{n}" * (n + 1), 40 + 30 * n, **how)
ends, last = 0, None
with torch.inference_mode():
    while not engine.planner.idle:
        last, deltas = turn(engine.planner, engine.runner, last)
        for delta in deltas:
            assert delta.error is None, delta.error
            ends += delta.finish is not None
assert ends == config.max_running
over.set()
watcher.join()
sizes = sizes_of(engine.model.config, config, engine.model.device, kv_dtype_of(config.kv_dtype), 0, engine.drafter)
needs = sizes.needs(reach)
print(json.dumps([peak - before, engine.layout.kv_bytes, needs.whole, needs.scratch, loaded]))
"""


@pytest.mark.skipif(native.find_compiler() is None, reason="the figures are those of the CPU's kernels")
@pytest.mark.parametrize(
    "asked",
    [
        {"max_model_len": 2048, "max_running": 16, "step_tokens": 512, "kv_memory": 1 << 24},
        {"max_model_len": 4096, "max_running": 4, "step_tokens": 2048, "kv_memory": 1 << 25, "kv_dtype": "float32"},
    ],
    ids=lambda asked: asked.get("kv_dtype", "bf16"),
)
def test_an_engine_takes_no_more_than_is_counted(tmp_path: Path, asked: dict[str, object]):
    random_checkpoint(tmp_path, kernel_config(vocab_size=8000))
    child = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), json.dumps(asked)], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr[-2000:]
    peak, pages, counted, scratch, _ = json.loads(child.stdout.splitlines()[-1])
    taken = f"{peak / 1e6:.0f} MB taken; {counted / 1e6:.0f} MB counted, of them {scratch / 1e6:.0f} MB of scratch"
    assert peak - pages <= counted, taken
    assert counted <= 3 * (peak - pages) + (64 << 20), taken
