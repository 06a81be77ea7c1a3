"""A drafter divided over several ranks equals the drafter, to rounding: emulated kernels, one process per rank."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cuda.collectives.rank_links import UNSENT
from redline.kernels.cuda.layouts.tiled import Tiled
from redline.kernels.cuda.triton import dense, linear
from redline.model.block.config import BlockConfig
from redline.model.block.cuda import GpuServedBlock
from redline.model.block.module import BlockDrafter
from redline.model.draft_shard import body_ranks, head_ranks, left_out
from redline.model.eagle3.config import Eagle3Config
from redline.model.eagle3.module import Eagle3
from redline.model.k2.shapes import KIMI_K26
from redline.model.k2.shard import rooms_of
from tests import forked
from tests.model.eagle3.ranks_program import CONFIGS, FEW, PASSES, TARGET, TWO, Ranks, Result, computed, served

LIMIT = 1e-2  # relative to a row's norm
State = dict[str, Tensor]


def state_of(config: Eagle3Config | BlockConfig) -> State:
    """Random weights in bf16."""
    g = torch.Generator().manual_seed(3)

    def made(shape: Sequence[int]) -> Tensor:
        spread = torch.randn(*shape, generator=g)
        return (1 + 0.2 * spread if len(shape) == 1 else spread * shape[1] ** -0.5).to(torch.bfloat16)

    with torch.device("meta"):
        drafter = BlockDrafter(config) if isinstance(config, BlockConfig) else Eagle3(config)
    return {name: made(one.shape) for name, one in drafter.named_parameters()}


def inboxes(file: Path, ranks: int) -> Path:
    """A file of inboxes to which no rank has sent anything."""
    file.write_bytes(UNSENT.to_bytes(4, "little") * (ranks * ranks * rooms_of(TARGET, ranks).words))
    return file


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter is as slow for a small program as for a large one."""
    for module in (linear, dense):
        monkeypatch.setattr(module, "block_rows", lambda *_: 256)


emulated = pytest.mark.skipif(
    torch.cuda.is_available() or native.find_compiler() is None,
    reason="kernels are emulated, which needs a C++ compiler; law 6 on GPUs has the engine",
)


@pytest.fixture(scope="module")
def states() -> dict[str, State]:
    return {name: state_of(config) for name, config in CONFIGS.items()}


def computed_by_ranks(folder: Path, states: Mapping[str, State]) -> list[dict[Any, Result]]:
    """The results of each of four ranks, two of which formed a group of two before."""
    torch.save(states, folder / "states.pt")
    files = [inboxes(folder / f"inboxes-{ranks}", ranks) for ranks in (2, 4)]
    command = [sys.executable, "-m", "tests.model.eagle3.ranks_program", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for file in files:
        left = torch.from_file(str(file), size=file.stat().st_size // 4, dtype=torch.int32)
        assert (left == torch.tensor(UNSENT - 2**32, dtype=torch.int32)).all(), (
            "a word that was read is not reset to unsent"
        )
    loaded = [torch.load(folder / f"{rank}.pt") for rank in range(4)]
    return [{key: Result(*of) for key, of in each.items()} for each in loaded]


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    """Compare row by row."""
    assert ours.shape == theirs.shape
    errors = (ours.float() - theirs.float()).norm(dim=-1) / theirs.float().norm(dim=-1)
    assert (errors < LIMIT).all(), errors


@emulated
def test_ranks_that_divide_a_drafter_draft_as_one_does_and_in_the_same_bits(
    states: Mapping[str, State], tmp_path: Path
):
    """All cases in one test, so that the ranks start once."""
    found = computed_by_ranks(tmp_path, states)
    for case, given in PASSES.items():
        name, ranks = case
        config = CONFIGS[name]
        assert body_ranks(config, ranks) == head_ranks(config, ranks) == ranks
        one, first = computed(served(config, states[name]), config.kv_width, given), found[0][case]
        for ours, theirs in zip(first.passes, one.passes, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert_near(a, b)
        if name == "block":  # its second layer's rows are of states that differ by rounding; the last page is spare
            assert_near(first.plane[:4].flatten(0, 1), one.plane[:4].flatten(0, 1))
        else:
            assert torch.equal(first.plane, one.plane), f"{case}: every rank must write complete rows"
        for other in found[1:ranks]:
            assert torch.equal(other[case].plane, first.plane), case
            for ours, theirs in zip(other[case].passes, first.passes, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), case


UNEVEN = {
    "heads": replace(CONFIGS["latent"], num_attention_heads=3, num_key_value_heads=3),
    "key heads": replace(CONFIGS["grouped"], num_attention_heads=2, num_key_value_heads=1),
    "width": replace(CONFIGS["latent"], intermediate_size=72),
    "block": replace(CONFIGS["block"], num_key_value_heads=1),
}


@emulated
@pytest.mark.parametrize("config", UNEVEN.values(), ids=UNEVEN)
def test_what_two_ranks_cannot_share_evenly_stays_whole_and_waits_for_nobody(
    config: Eagle3Config | BlockConfig, tmp_path: Path
):
    """The other rank never arrives."""
    config = replace(config, draft_vocab_size=44)  # so that its rows cannot be divided either
    assert body_ranks(config, 2) == head_ranks(config, 2) == 1
    assert left_out(config, 2) == 0
    quick = isinstance(config, BlockConfig) or config.architecture == "llama"
    state, given = state_of(config), [TWO if quick else FEW]
    group = Ranks(inboxes(tmp_path / "inboxes", 2), 0, 2, seconds=0.1)
    ours, theirs = (computed(served(config, state, *of), config.kv_width, given) for of in ((group,), ()))
    assert not group.links.control[1], "a rank was waited for"
    assert torch.equal(ours.plane, theirs.plane)
    assert all(torch.equal(a, b) for a, b in zip(ours.passes[0], theirs.passes[0], strict=True))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_numbers_that_are_left_out_are_those_that_a_rank_does_not_hold(
    name: str, ranks: int, states: Mapping[str, State], tmp_path: Path
):
    config = CONFIGS[name]

    def held(*group: Ranks) -> int:
        """Elements of all tiles, without padding."""
        drafter, numbers = served(config, states[name], *group), 0
        parts = [vars(drafter)]
        if isinstance(drafter, GpuServedBlock):
            parts += [layer._asdict() for layer in drafter._layers]
        else:
            parts.append(vars(drafter._attention))
            if hasattr(drafter._attention, "_w"):
                parts.append(vars(drafter._attention._w))
        for part in parts:
            for one in part.values():
                numbers += torch.Size(one.shape).numel() if isinstance(one, Tiled) else 0
        return numbers

    of = held(Ranks(inboxes(tmp_path / "inboxes", ranks), ranks - 1, ranks))
    # taken from its target
    shared = 0 if config.draft_vocab_size else (1 - 1 / ranks) * config.vocab_size * config.hidden_size
    assert held() - of == left_out(config, ranks) + shared


def test_ranks_divide_most_of_the_public_drafter():
    """All weights but the fusion, which only the first pass of a round reads, and the projections into attention."""
    config = Eagle3Config.for_target(KIMI_K26)
    whole = 7168 * 3 * 7168 + 2 * 7168 * (1536 + 576)
    everything = sum(one.numel() for one in meta(config).parameters() if one.dim() > 1)
    for ranks in (2, 4, 8):
        assert left_out(config, ranks) == (everything - whole) * (ranks - 1) // ranks


def meta(config: Eagle3Config) -> Eagle3:
    with torch.device("meta"):
        return Eagle3(config)
