"""A block drafter as run on a GPU, compared with its CPU form; without a GPU its kernels are emulated."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from redline.bench.step.drafters import public_drafter
from redline.errors import CheckpointError
from redline.kernels.cpu.panels import Matrix
from redline.kernels.cuda.decode import gqa
from redline.kernels.cuda.layouts.tiled import Tiled
from redline.kernels.cuda.triton import dense as streamed
from redline.kernels.cuda.triton import linear
from redline.kernels.kernel import fallbacks, references
from redline.messages.job import PAGE_TOKENS
from redline.model.block.config import BlockConfig
from redline.model.block.cuda import GpuServedBlock, check
from redline.model.block.module import BlockDrafter
from redline.model.block.serve import BlockRows, ServedBlock
from redline.model.k2.cpu import K2
from redline.model.k2.shapes import KIMI_K26
from redline.model.k2.write import tiny_config
from tests.emulator.emulator import emulation
from tests.tiny_model import CPU

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMIT = 2e-2  # relative to a row's norm: two layers in bf16
TARGET = tiny_config(hidden_size=96, num_attention_heads=4, intermediate_size=72, vocab_size=160, v_head_dim=32)
WHOLE = BlockConfig.for_target(
    TARGET, layer_ids=(1, 2), mask_token_id=9, num_hidden_layers=2, num_key_value_heads=2, markov_rank=64, block_size=4
)
CONFIGS = {
    "dspark": WHOLE,
    "dspark, reduced": replace(WHOLE, draft_vocab_size=48, num_hidden_layers=1, windows=(None,)),
    "dflash": BlockConfig.for_target(
        TARGET, kind="dflash", layer_ids=(3,), mask_token_id=9, num_hidden_layers=1, head_dim=40, block_size=3
    ),
}
KIMI = replace(KIMI_K26, vocab_size=4096)
if DEVICE.type == "cuda":  # too large for an interpreter
    CONFIGS["kimi"] = replace(public_drafter("dspark", KIMI), num_hidden_layers=1, windows=(None,))
STARTS = 70, 5  # positions of the anchors; the first slot continues in its second page
SPARE = 4


class Pair(NamedTuple):
    ours: GpuServedBlock
    theirs: ServedBlock


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest) -> Pair:
    torch.manual_seed(3)
    config = CONFIGS[request.param]
    drafter, target = BlockDrafter(config), KIMI if config.hidden_size == KIMI.hidden_size else TARGET
    with torch.no_grad():
        for parameter in drafter.parameters():
            spread = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * spread if parameter.dim() == 1 else spread * parameter.shape[1] ** -0.5)
    if drafter.token_ids() is not None:
        drafter.keep(torch.randperm(target.vocab_size)[: len(drafter.d2t)])
    embedding, head = torch.randn(2, target.vocab_size, target.hidden_size).to(torch.bfloat16)
    both = drafter, copy.deepcopy(drafter)
    for each, device, laid_out in zip(both, (DEVICE, CPU), (Tiled, Matrix), strict=True):
        norm = torch.ones(target.hidden_size, device=device)
        each.prepare(K2(target, embedding.to(device), (), norm, laid_out.prepare(head.to(device))))
    ours, theirs = (each.served for each in both)
    assert isinstance(ours, GpuServedBlock)
    assert isinstance(theirs, ServedBlock)
    return Pair(ours, theirs)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter is as slow for a small program as for a large one."""
    if DEVICE.type == "cpu":
        for module in (linear, streamed):
            monkeypatch.setattr(module, "block_rows", lambda *_: 256)
        monkeypatch.setattr(gqa, "_PROGRAMS", 16)


@contextlib.contextmanager
def kernels() -> Iterator[None]:
    before = fallbacks.copy()
    with contextlib.nullcontext() if DEVICE.type == "cuda" else emulation(), torch.inference_mode():
        yield
    assert fallbacks == before, "an op fell back to its reference"


@contextlib.contextmanager
def meaning() -> Iterator[None]:
    with references(), torch.inference_mode():
        yield


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    """Compare row by row."""
    assert ours.shape == theirs.shape
    errors = (ours.cpu().float() - theirs.float()).norm(dim=-1) / theirs.float().norm(dim=-1)
    assert (errors < LIMIT).all(), errors


def test_a_gpus_rounds_are_the_rounds(pair: Pair):
    """Contexts of two slots are read, then a block follows each: one whole, one of which two positions are used."""
    config = pair.ours.config
    g = torch.Generator().manual_seed(5)
    tables = torch.randperm(4, generator=g).to(torch.int32).view(2, 2)
    planes = [torch.full((5, PAGE_TOKENS, config.kv_width), torch.nan, dtype=torch.bfloat16) for _ in range(2)]
    planes[0] = planes[0].to(DEVICE)
    place_T = torch.cat([torch.arange(start) for start in STARTS])
    slot_T = torch.repeat_interleave(torch.arange(2), torch.tensor(STARTS))
    rows_T = tables[slot_T, place_T // PAGE_TOKENS].long() * PAGE_TOKENS + place_T % PAGE_TOKENS
    features = torch.randn(len(place_T), config.fused_width, generator=g).to(torch.bfloat16)
    with kernels():
        pair.ours.read(features.to(DEVICE), place_T.to(DEVICE), rows_T.to(DEVICE), planes[0])
    with meaning():
        pair.theirs.read(features.float(), place_T, rows_T, planes[1])
    flat = [plane.flatten(0, 1).cpu() for plane in planes]
    assert_near(flat[0][rows_T], flat[1][rows_T])
    unwritten = torch.ones(len(flat[0]), dtype=torch.bool)
    unwritten[rows_T] = False
    assert flat[0][unwritten].isnan().all()

    counts = torch.tensor([config.block_size, 2])
    asked = BlockRows(torch.tensor([7, 150]), torch.tensor(STARTS), counts, tables, max(STARTS), SPARE)
    with kernels():
        found = pair.ours.states(BlockRows(*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in asked)), planes[0])
    with meaning():
        wanted = pair.theirs.states(asked, planes[1])
    assert_near(found[0], wanted[0])
    assert_near(found[1, :2], wanted[1, :2])
    after = planes[0].flatten(0, 1).cpu()
    assert torch.equal(after[rows_T].view(torch.int16), flat[0][rows_T].view(torch.int16)), "the contexts are unchanged"
    block = [(0, STARTS[0] + n) for n in range(config.block_size)] + [(1, STARTS[1] + n) for n in range(2)]
    written = {int(tables[slot, place // PAGE_TOKENS]) * PAGE_TOKENS + place % PAGE_TOKENS for slot, place in block}
    changed = set((~after.isnan().all(-1) & unwritten).nonzero().flatten().tolist())
    assert {row for row in changed if row < SPARE * PAGE_TOKENS} == written, (
        "positions that are not used go to the spare page"
    )

    before = torch.tensor([3, 80])
    normed = wanted[:, 1].to(torch.bfloat16)
    with kernels():
        ours = pair.ours.biased(pair.ours.logits(normed.to(DEVICE)), before.to(DEVICE))
        drafted = pair.ours.likeliest(ours).cpu()
    with meaning():
        theirs = pair.theirs.biased(pair.theirs.logits(normed.float()), before)
        wanted_tokens = pair.theirs.likeliest(ours.cpu().float())
    assert_near(ours, theirs)
    assert torch.equal(drafted, wanted_tokens)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"intermediate_size": 76}, "intermediate_size is 76; the GPU's kernels take multiples of 8"),
        ({"head_dim": 258}, "head_dim is 258; the GPU's kernels take 256 at most"),
        ({"num_attention_heads": 130}, "num_attention_heads is 130; the GPU's kernels take 128 at most, 64 for each"),
        ({"windows": (None, 9)}, r"sliding_window is \(None, 9\); the GPU's kernels take layers without a window"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_size_that_the_kernels_do_not_take_is_refused_by_name(changes: dict[str, Any], reason: str):
    check(WHOLE, "drafter/config.json")
    with pytest.raises(CheckpointError, match=f"^drafter/config.json: {reason}"):
        check(replace(WHOLE, **changes), "drafter/config.json")
