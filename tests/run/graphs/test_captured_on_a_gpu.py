"""The CUDA graphs that are captured on a GPU, and the memory that they take. Run by hand:

python -m pytest -m gpu tests/run/graphs/test_captured_on_a_gpu.py
"""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from redline.run.fit import Layout
from redline.run.graphs.decode_step import SamplingKind
from redline.run.graphs.shapes import FIRST_SHAPES, shapes
from redline.run.runner import Runner
from redline.worker.config import EngineConfig, Suffix
from redline.worker.engine import Engine, EngineCore, sizes_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NANO = Path(__file__).parents[3] / "models" / "kimi-nano"


def held() -> int:
    """Bytes of device memory in use: torch's own, and those of its CUDA graphs."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("drafts", [0, 3, 7])
def test_every_wanted_shape_is_recorded_and_takes_no_more_than_is_counted(drafts: int):
    """Captured before the first job, and then one by one: later graphs reuse the memory pool of the first."""
    config = EngineConfig(
        max_model_len=65_536,
        kv_memory=1 << 30,
        device="cuda",
        speculation=Suffix(tokens=drafts, adaptive=False) if drafts else None,
    )
    engine = EngineCore.load(NANO, config)  # compiles the kernels that a capture needs
    engine.runner.close()
    model, layout = engine.model, engine.layout
    assert isinstance(layout, Layout)
    del engine
    wanted = shapes(config.max_running, 1 + drafts, layout.max_model_len)
    # to get the sizes only; no step is run
    sizes = sizes_of(model.config, config, model.device, layout.kv_dtype, free=0)
    needs = sizes.needs(layout.max_model_len)
    counted = sizes.recorded_steps(layout.max_model_len)
    before = held()
    runner = Runner(model, layout, config.max_running, suffix=bool(drafts), drafts=drafts)
    try:
        captured = runner._captured
        assert captured is not None
        assert set(runner.recorded.shapes) == set(wanted[:FIRST_SHAPES])
        pages = (layout.pages + 1) * layout.page_bytes
        first = held() - before - pages - needs.slots
        while runner.record_more():
            pass
        assert set(runner.recorded.shapes) == set(wanted) == set(counted.shapes)
        assert all(
            recorded.score is not None and len(recorded.settle) == 2 * len(SamplingKind)
            for recorded in captured._recorded.values()
        )
        taken = held() - before - pages - needs.slots
        print(
            f"{drafts} drafts: {min(len(wanted), FIRST_SHAPES)} shapes take {first / 1e6:.0f} MB, "
            f"all {len(wanted)} {taken / 1e6:.0f} MB; {counted.whole / 1e6:.0f} counted, of which "
            f"{counted.between / 1e6:.0f} between launches"
        )
        launches = sum(counted.shapes[shape].launches for shape in wanted[FIRST_SHAPES:])
        assert taken <= counted.whole
        assert taken - first <= launches, "memory other than that of launches has grown"
    finally:
        runner.close()


def test_what_nano_takes_on_a_gpu_is_no_more_than_is_counted():
    """A prompt of 60,000 tokens in chunks, for which the latents of the whole prefix are expanded."""
    from redline.chat.page_hashes import make_job
    from redline.messages.job import JobId, Sampling

    config = EngineConfig(max_model_len=65_536, kv_memory=1 << 30, device="cuda")
    torch.cuda.synchronize()
    before = held()
    with Engine.open(NANO, config) as engine:
        tokens = tuple((place * 104_729) % 4000 for place in range(60_000))
        job = make_job(JobId("long"), tokens, Sampling(max_tokens=20, prompt_logprobs=1), engine.fingerprint)
        deltas = engine.generate([job])[job.id]
        assert deltas[-1].error is None
        free, total = torch.cuda.mem_get_info()
        taken = total - free - before  # includes memory that torch's allocator keeps
        core = engine.engine
        sizes = sizes_of(core.model.config, config, core.model.device, core.layout.kv_dtype, free=0)
        sizes = replace(sizes, step_tokens=core.step_tokens)
        counted = sizes.needs(65_536).whole + engine.engine.layout.kv_bytes
        print(f"{taken / 1e6:.0f} MB taken, {counted / 1e6:.0f} MB counted")
        assert taken <= counted


def test_what_requests_ask_for_is_the_same_in_recorded_steps_and_where_the_host_leads():
    """One prompt with every sampling option. In eager steps, products of other sizes may swap two tokens with nearly
    equal logits, and so change the rest of the answer; most answers are equal.
    """
    from redline.chat.page_hashes import make_job
    from redline.messages.job import JobId, Sampling

    asked = (
        Sampling(max_tokens=60, temperature=0, logprobs=20),
        Sampling(max_tokens=60, temperature=0, frequency_penalty=0.5, presence_penalty=0.2, logprobs=2),
        Sampling(max_tokens=60, temperature=1, seed=3, seeded=True, repetition_penalty=1.2),
        Sampling(max_tokens=60, temperature=0, logit_bias=tuple((token, 3.0) for token in range(200, 500))),
        Sampling(max_tokens=60, temperature=0.8, top_p=0.9, seed=4, seeded=True, min_tokens=50, stop_ids=(*range(96),)),
    )
    config = EngineConfig(max_model_len=4096, kv_memory=1 << 28, device="cuda", speculation=Suffix(tokens=3))
    answers: dict[str, list[tuple[int, ...]]] = {}
    with Engine.open(NANO, config) as engine:
        captured = engine.engine.runner._captured
        assert captured is not None
        tokens = tuple((place * 104_729) % 4000 for place in range(90))
        for way in ("replayed", "led"):
            if way == "led":
                captured._recorded.clear()
            jobs = [make_job(JobId(f"{way} {n}"), tokens, one, engine.fingerprint) for n, one in enumerate(asked)]
            told = engine.generate(jobs)
            answers[way] = [tuple(token for delta in told[job.id] for token in delta.tokens) for job in jobs]
            if way == "replayed":
                assert engine.engine.runner.led == {}
    same = [replayed == led for replayed, led in zip(answers["replayed"], answers["led"], strict=True)]
    print(f"the same where the host runs eagerly: {same}")
    assert sum(same) >= 3
    assert all(len(answer) == 60 for answer in answers["replayed"][:2])
    assert set(answers["replayed"][4][:49]).isdisjoint(range(96))
