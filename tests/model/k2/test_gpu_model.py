"""K2 as run on a GPU, compared with K2 computed by the references; without a GPU its kernels are emulated."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import redline.kernels.cuda.decode.attend as attention
from redline.kernels.cuda import block, chips
from redline.kernels.cuda.block import ResidualStream, decode_block
from redline.kernels.cuda.decode import choose_experts
from redline.kernels.cuda.decode.attend import AttentionPlan
from redline.kernels.cuda.decode.embed import embed
from redline.kernels.cuda.prefill import stream as streams
from redline.kernels.cuda.prefill.rowwise import norm_rows, rotate_heads, split_a, swiglu
from redline.kernels.cuda.triton import dense as streamed
from redline.kernels.cuda.triton import linear
from redline.kernels.group import Group
from redline.kernels.inputs import Chunk, Inputs
from redline.kernels.kernel import fallbacks
from redline.model.k2 import cpu, cuda
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.config import K2Config
from redline.model.k2.cpu import K2
from redline.model.k2.shapes import KIMI_NANO
from redline.model.k2.write import random_checkpoint
from tests.emulator.emulator import emulation
from tests.ranks_in_turn import Meeting
from tests.tiny_model import CPU

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGES = 8


def small() -> K2Config:
    from dataclasses import replace

    return replace(KIMI_NANO, num_hidden_layers=2, n_routed_experts=8, vocab_size=256)


@pytest.fixture(scope="module", params=["int4", "nvfp4", "bf16"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[K2, K2]:
    folder: Path = tmp_path_factory.mktemp("nano")
    random_checkpoint(folder, small(), quantization=request.param)
    checkpoint = Checkpoint.open(folder)
    return cuda.load(checkpoint, DEVICE), cpu.load(checkpoint, CPU)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("nano")
    random_checkpoint(folder, small())
    return Checkpoint.open(folder)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter is as slow for a small program as for a large one; tests/ops has the chip's sizes."""
    if DEVICE.type == "cpu":
        for module in (linear, streamed):
            monkeypatch.setattr(module, "block_rows", lambda *_: 256)


@contextlib.contextmanager
def kernels() -> Iterator[None]:
    with contextlib.nullcontext() if DEVICE.type == "cuda" else emulation(), torch.inference_mode():
        yield


def inputs(
    model: K2, chunks: tuple[Chunk, ...], contexts: tuple[int, ...], slots: tuple[int, ...], positions: int = 1
) -> Inputs:
    """Chunks, then decode queries at the last tokens of `contexts` of their slots, `positions` to a row."""
    g = torch.Generator().manual_seed(5)
    places = [(c.slot, c.start + i) for c in chunks for i in range(c.count)]
    first = len(places)
    places += [(slot, context - 1) for slot, context in zip(slots, contexts, strict=True)]
    tables = torch.arange(PAGES, dtype=torch.int32).view(4, 2)
    at = torch.tensor([position for _, position in places])
    cos, sin = model.angles(at.to(model.device))
    rows = [int(tables[slot, p // 64]) * 64 + p % 64 for slot, p in places]
    ints = {"dtype": torch.int32, "device": model.device}
    return Inputs(
        ids_T=torch.randint(model.config.vocab_size, (len(places),), generator=g).to(model.device),
        cos_T=cos,
        sin_T=sin,
        rows_T=torch.tensor(rows, device=model.device),
        chunks=chunks,
        tokens_Q=torch.arange(first, len(places), **ints),
        slots_Q=torch.tensor(slots, **ints),
        lengths_Q=torch.tensor(contexts, **ints),
        tables=tables.to(model.device),
        positions=positions,
    )


def planes(model: K2, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(9)
    sizes = model.config.num_hidden_layers, PAGES, 64, model.config.kv_width
    return (torch.randn(sizes, generator=g) * 0.5).to(torch.bfloat16).to(dtype).to(model.device)


STEPS = {
    "one token": ((), (70,), (2,)),
    "verified drafts of one row": ((), (60, 61, 62), (1, 1, 1)),
    "nine rows": ((), (5, 64, 65, 128, 1, 2, 3, 100, 90), (0, 1, 2, 3, 0, 1, 2, 3, 0)),
    "a chunk and rows": ((Chunk(0, 40, 0, 0),), (64, 70), (1, 2)),
    "a later chunk": ((Chunk(0, 9, 64, 3), Chunk(9, 3, 0, 1)), (), ()),
}


# Formats differ in their experts alone: with emulated kernels, formats other than INT4 run one decode step and one
# chunk.
CASES = [
    (form, step)
    for form in ("int4", "nvfp4", "bf16")
    for step in STEPS
    if DEVICE.type == "cuda" or form == "int4" or step in ("nine rows", "a later chunk")
]


@pytest.mark.parametrize(("models", "step"), CASES, indirect=["models"])
def test_the_gpus_model_is_the_model(models: tuple[K2, K2], step: str):
    agree(models, *STEPS[step])


@pytest.mark.parametrize("models", ["int4"], indirect=True)
def test_drafts_whose_attention_is_together(models: tuple[K2, K2], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "plan", lambda *_: AttentionPlan(16, 1, 3))
    agree(models, (), (63, 64, 65), (0, 0, 0), positions=3)


@pytest.mark.parametrize("models", ["int4"], indirect=True)
def test_rows_that_are_too_many_for_lists_of_pairs(models: tuple[K2, K2]):
    agree(models, (), tuple(range(1, 34)), (0, 1, 2) * 11)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are those of another chip")
@pytest.mark.parametrize(("models", "chunk"), [("int4", 40), ("bf16", 34)], indirect=["models"])
def test_on_a_chip_without_wgmma_it_is_the_model_too(
    models: tuple[K2, K2], chunk: int, monkeypatch: pytest.MonkeyPatch
):
    """Attention of 64 heads, and experts of more tokens than lists of pairs hold, have other forms there."""
    monkeypatch.setattr(chips, "_present", lambda: chips.CHIPS[1])
    monkeypatch.setattr(block, "LISTED", 16)
    assert not attention.has_warpgroups(64, 512)
    agree(models, (Chunk(0, chunk, 0, 0),), (), ())


@pytest.mark.parametrize("models", ["int4"], indirect=True)
@pytest.mark.parametrize("step", ["one token", "a later chunk"])
def test_over_fp8_pages_it_is_the_model_too(models: tuple[K2, K2], step: str):
    """Some written values round to the neighbouring step of e4m3, an eighth of the value away."""
    agree(models, *STEPS[step], pages=(torch.float8_e4m3fn, torch.float8_e4m3fn), limit=3e-2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="each rank needs a GPU")
@pytest.mark.parametrize(("ranks", "divided"), [(4, 16), (2, 64)], ids=str)
def test_ranks_that_divide_rows_are_the_model(
    ranks: int, divided: int, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    """A prompt's rows and decode rows, in a number that no number of ranks divides; below `divided`, rows are not
    divided.

    Ops on single rows are left to the references, since Triton's interpreter is slow for each.
    """
    monkeypatch.setattr(streams, "DIVIDED", divided // ranks)
    monkeypatch.setattr(streams, "PART_ROWS", 16)
    for module, kernel in ((streams, norm_rows), (block, split_a), (block, rotate_heads), (block, swiglu)):
        monkeypatch.setattr(module, kernel.op.name, kernel.op)
    step, layers = ((Chunk(0, 31, 0, 0),), (64, 70), (1, 2)), (0, 1, 2)
    theirs = cpu.load(checkpoint, CPU)
    with torch.inference_mode():
        pages = planes(theirs, torch.float32)
        want = (*theirs.forward(inputs(theirs, *step), pages, layers), pages)

    def work(group: Group) -> tuple[Tensor | None, ...]:
        ours = cuda.load(checkpoint, CPU, group=group)
        pages, references = planes(ours, torch.bfloat16), fallbacks.copy()
        with kernels():
            hidden, features = ours.forward(inputs(ours, *step), pages, layers)
        assert fallbacks == references, "an op fell back to its reference"
        return hidden, features, pages

    meeting = Meeting(ranks)
    got = meeting.run(work)
    assert ("add rows" in meeting.said[0]) == (divided == 16)
    for name, *given, wanted in zip(("hidden", "features", "pages"), *got, want, strict=True):
        first = given[0]
        assert first is not None
        assert wanted is not None
        for other in given[1:]:
            assert other is not None
            assert torch.equal(first, other), f"the ranks' {name} differ"
        error = (first.float() - wanted.float()).norm() / wanted.float().norm()
        assert error < 2e-2, f"{name}: {error:.1e}"


def agree(
    models: tuple[K2, K2],
    chunks: tuple[Chunk, ...],
    contexts: tuple[int, ...],
    slots: tuple[int, ...],
    pages: tuple[torch.dtype, torch.dtype] = (torch.bfloat16, torch.float32),
    limit: float = 2e-2,
    positions: int = 1,
) -> None:
    ours, theirs = models
    kept = planes(ours, pages[0]), planes(theirs, pages[1])
    references = fallbacks.copy()
    with kernels():
        hidden, features = ours.forward(inputs(ours, chunks, contexts, slots, positions), kept[0], (0, 1, 2))
        logits = ours.logits(hidden)
    assert fallbacks == references, "an op fell back to its reference"
    with torch.inference_mode():
        wanted, wanted_features = theirs.forward(inputs(theirs, chunks, contexts, slots), kept[1], (0, 1, 2))
        wanted_logits = theirs.logits(wanted)
    assert features is not None
    assert wanted_features is not None
    for name, a, b in (
        ("features", features, wanted_features),
        ("hidden", hidden, wanted),
        ("logits", logits, wanted_logits),
        ("pages", kept[0], kept[1]),
    ):
        error = (a.cpu().float() - b.float()).norm() / b.float().norm()
        assert error < limit, f"{name}: {error:.1e}"


@pytest.mark.parametrize("layer", [0, 1], ids=["dense", "experts"])
@pytest.mark.parametrize("step", ["nine rows", "a later chunk"])
def test_one_layer_by_itself(checkpoint: Checkpoint, layer: int, step: str):
    rows = (0.1 * torch.randn(256, checkpoint.config.hidden_size)).to(torch.bfloat16)
    ours = cuda.load_layer(checkpoint, DEVICE, layer, rows)
    theirs = cpu.load_layer(checkpoint, CPU, layer, rows)
    with kernels():
        _, features = ours.forward(inputs(ours, *STEPS[step]), planes(ours, torch.bfloat16), (1,))
    with torch.inference_mode():
        _, wanted = theirs.forward(inputs(theirs, *STEPS[step]), planes(theirs, torch.float32), (1,))
    assert features is not None
    assert wanted is not None
    assert (features.cpu().float() - wanted).norm() / wanted.norm() < 2e-2


class Calls(TorchDispatchMode):
    """Names of the torch operations called, except views, empty allocations, and those within a kernel's launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if not func.is_view and "empty" not in func.__name__:
            self.names.append(func.__name__)
        return result


@pytest.mark.parametrize("models", ["int4"], indirect=True)
@pytest.mark.parametrize("rows", [9, 64])
def test_no_kernel_of_torch_runs_in_a_block_of_a_decode_step(
    models: tuple[K2, K2], rows: int, monkeypatch: pytest.MonkeyPatch
):
    """From 9 tokens on, each would be an additional launch next to the ten kernels of a block."""
    ours = models[0]
    assert isinstance(ours, cuda.GpuK2)
    step = inputs(ours, (), tuple(i // 4 + 1 for i in range(rows)), tuple(i % 4 for i in range(rows)))
    pages, norm, launch = planes(ours, torch.bfloat16)[0], ours.norm, streamed.launch

    def unseen(*args: Any, **given: Any) -> None:
        with _disable_current_modes():  # Triton's interpreter moves tensors with torch operations
            launch(*args, **given)

    monkeypatch.setattr(streamed, "launch", unseen)
    choose_experts._done(ours.device)  # created by the first launch of a process
    with kernels():
        for w in ours.gpu_blocks:
            stream = ResidualStream(*embed(step.ids_T, ours.embedding_VD, w.attention_norm))
            with Calls() as calls:
                decode_block(stream, w, step, pages, norm, None)
            assert calls.names == []
