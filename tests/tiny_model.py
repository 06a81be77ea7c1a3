"""Tiny random models in sizes that the CPU kernels take, and jobs run through the real planner and runner.

A tiny model of 3 layers answers in milliseconds, and every position of it goes through every op.
"""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline.chat.page_hashes import make_job
from redline.messages.delta import Delta, Finish
from redline.messages.job import PAGE_TOKENS, Job, JobId, Sampling
from redline.messages.step import TokenLogprobs
from redline.model.block.config import BlockConfig
from redline.model.block.module import BlockDrafter
from redline.model.drafter import Drafter
from redline.model.eagle3.module import Eagle3, Eagle3Config
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.config import K2Config
from redline.model.k2.cpu import K2, load
from redline.model.k2.write import random_checkpoint, tiny_config
from redline.run.fit import Layout
from redline.worker.config import EngineConfig, Learned, Suffix
from redline.worker.engine import EngineCore, Loaded
from redline.worker.turn import StepInFlight, turn
from tests.waiting import until

FINGERPRINT = "tiny"
VOCABULARY = 512
CPU = torch.device("cpu")
LEARNED = Learned(drafter="tiny", adaptive=False, suffix=False)  # always three drafts by `tiny_drafter`
BOTH = Learned(drafter="tiny", adaptive=False)  # with suffix matches in addition
BLOCK = Learned(drafter="tiny block", adaptive=False, suffix=False, tokens=5)  # a whole block by `tiny_block`
SUFFIX = Suffix(adaptive=False)


def kernel_config(**changes: Any) -> K2Config:
    """`tiny_config`, its widths multiples of 32 as in every Kimi."""
    heads = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    sizes = {"q_lora_rank": 64, "kv_lora_rank": 64, **heads}
    return tiny_config(**{**sizes, **changes})


@functools.cache
def tiny_model() -> K2:
    """One random model for all tests; it must not be modified."""
    with tempfile.TemporaryDirectory() as folder:
        random_checkpoint(folder, kernel_config())
        return load(Checkpoint.open(folder), CPU)


@functools.cache
def tiny_drafter() -> Eagle3:
    """One random drafter for `tiny_model`: it is rarely right."""
    torch.manual_seed(0)
    model = tiny_model()
    drafter = Eagle3(Eagle3Config.for_target(model.config))
    drafter.prepare(model)
    return drafter


@functools.cache
def tiny_block() -> BlockDrafter:
    """One random block drafter for `tiny_model`: it is rarely right."""
    torch.manual_seed(0)
    model = tiny_model()
    sizes = {"block_size": 5, "num_hidden_layers": 2, "markov_rank": 32, "num_key_value_heads": 2}
    config = BlockConfig.for_target(model.config, layer_ids=(1, 3), mask_token_id=5, **sizes)
    drafter = BlockDrafter(config)
    torch.nn.init.normal_(drafter.markov_head.markov_w2.weight)
    drafter.prepare(model)
    return drafter


def load_folder(folder: Path, low_rank_norm_eps: float | None = None) -> K2:
    return load(Checkpoint.open(folder), CPU, low_rank_norm_eps=low_rank_norm_eps)


def open_engine(
    model: K2,
    *,
    pages: int = 64,
    step_tokens: int = 512,
    max_running: int = 16,
    max_model_len: int = 1024,
    kv_dtype: torch.dtype = torch.bfloat16,
    drafter: Drafter | None = None,
    **config: Any,
) -> EngineCore:
    """An engine with its own pages; `config` as in EngineConfig. Close its runner at the end.

    drafter: the drafter of a Learned speculation; default: `tiny_drafter`, or `tiny_block` for BLOCK.
    """
    layout = Layout(pages, max_model_len, kv_dtype, model.config.kv_bytes_per_token(kv_dtype) * PAGE_TOKENS)
    asked = EngineConfig(max_running=max_running, step_tokens=step_tokens, **config)
    if isinstance(asked.speculation, Learned):
        drafter = drafter or (tiny_block() if asked.speculation.drafter == BLOCK.drafter else tiny_drafter())
    return EngineCore(Loaded(model, layout, FINGERPRINT, drafter), asked)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """Random tokens; the same for the same seed, and a longer prompt continues a shorter one."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(VOCABULARY, (4096,), generator=generator)[:length].tolist())


def job(name: str, tokens: Sequence[int], **sampling: Any) -> Job:
    """A greedy job of 8 tokens with their 3 best alternatives, by default."""
    asked = Sampling(**{"max_tokens": 8, "temperature": 0.0, "logprobs": 3, **sampling})
    return make_job(JobId(name), tuple(tokens), asked, FINGERPRINT)


def drafter_rows(engine: EngineCore, slot: int, count: int) -> Tensor:
    """The drafter's rows at positions [1, count) of a slot: position 0 of a job has none."""
    table = engine.runner.slots.tables[slot].long()
    return engine.runner.kv.draft[table].flatten(0, 1)[1:count].clone()


class Answer(NamedTuple):
    """The complete answer that a client gets."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    finish: Finish
    error: str | None
    cached_tokens: int
    proposed: int = 0
    accepted: int = 0


def run(engine: EngineCore, *waves: Sequence[Job], every: int = 3) -> dict[str, Answer]:
    """Run all jobs to their ends; a wave of them arrives every `every` iterations of the loop.

    Their grammars are compiled before the next iteration: otherwise the number of steps would depend on the compiling
    threads.
    """
    deltas: dict[str, list[Delta]] = {job.id: [] for wave in waves for job in wave}
    arriving = list(waves)
    flight: StepInFlight | None = None
    turns = 0
    while arriving or flight or not engine.planner.idle:
        told: list[Delta] = []
        if arriving and turns % every == 0:
            told = [delta for job in arriving.pop(0) for delta in engine.planner.submit(job)]
            until(lambda: all(job.is_compiled for job in engine.planner._table.jobs.values()))
        flight, settled = turn(engine.planner, engine.runner, flight)
        for delta in told + settled:
            deltas[delta.job].append(delta)
        engine.planner.check()
        turns += 1
    return {name: joined(parts) for name, parts in deltas.items()}


def run_alone(model: K2, job: Job, **engine: Any) -> Answer:
    """The job's answer from an engine of its own."""
    opened = open_engine(model, **engine)
    try:
        return run(opened, [job])[job.id]
    finally:
        opened.runner.close()


def joined(parts: list[Delta]) -> Answer:
    last = parts[-1]
    assert last.finish is not None
    assert all(part.finish is None for part in parts[:-1])
    return Answer(
        tokens=tuple(token for part in parts for token in part.tokens),
        logprobs=tuple(item for part in parts for item in part.logprobs),
        prompt_logprobs=tuple(item for part in parts for item in part.prompt_logprobs),
        finish=last.finish,
        error=last.error,
        cached_tokens=last.cached_tokens,
        proposed=sum(part.proposed for part in parts),
        accepted=sum(part.accepted for part in parts),
    )
