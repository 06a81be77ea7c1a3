"""A drafter as run on a GPU, compared with its references; without a GPU its kernels are emulated."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from redline.errors import CheckpointError
from redline.kernels.cpu.blocks.draft_pass import DraftRows
from redline.kernels.cpu.panels import Matrix
from redline.kernels.cuda import linear as products
from redline.kernels.cuda.decode import gqa
from redline.kernels.cuda.layouts.tiled import Tiled
from redline.kernels.cuda.triton import dense as streamed
from redline.kernels.cuda.triton import linear
from redline.kernels.kernel import fallbacks, references
from redline.messages.job import PAGE_TOKENS
from redline.model.eagle3.cuda import GpuServed, check
from redline.model.eagle3.module import Eagle3, Eagle3Config
from redline.model.eagle3.serve import Served
from redline.model.k2.cpu import K2
from redline.model.k2.write import tiny_config
from tests.emulator.emulator import emulation
from tests.tiny_model import CPU

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMIT = 1e-2  # relative to a row's norm
KNOWN = 70, 5  # positions of each slot with rows in its pages; the first slot continues in its second page
PLACES = 2 * PAGE_TOKENS
HIDDEN = 96  # neither this width nor twice it fills the 128 columns of a product
TARGET = tiny_config(
    hidden_size=HIDDEN,
    num_attention_heads=2,
    q_lora_rank=64,
    kv_lora_rank=128,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=72,
    vocab_size=160,
)
FULL = Eagle3Config.for_target(TARGET)
CONFIGS = {
    "3.1": FULL,
    "EAGLE-3": replace(FULL, fc_norm=False, norm_output=False, draft_vocab_size=None),
    "reduced, normed residual": replace(FULL, norm_before_residual=True, fc_norm=False, draft_vocab_size=48),
    "Llama": Eagle3Config.for_target(TARGET, architecture="llama", num_key_value_heads=1, head_dim=64),
    "Llama, wide and EAGLE-3": replace(
        Eagle3Config.for_target(
            TARGET, architecture="llama", num_attention_heads=4, num_key_value_heads=2, head_dim=40
        ),
        fc_norm=False,
        norm_output=False,
        norm_before_residual=True,
        draft_vocab_size=48,
    ),
    "normed residual": replace(FULL, norm_before_residual=True, norm_output=False),
}
PASSES = {
    "a row": DraftRows([0], [70], [0]),
    "a row of a given token": DraftRows([1], [5], [0], [17]),
    "rows of two slots, some finished": DraftRows([1, 1, 0, 0, 0, 0, 1], [5, 6, 70, 71, 72, 73, 7], [6, 1, 3, 4, 5]),
    "rows of which none is finished": DraftRows([0, 1, 1, 1, 1], [70, 5, 6, 7, 8], []),
    "a slot's first rows": DraftRows([1] * 5, list(range(5)), [0, 1, 2, 3, 4]),
    "12 rows": DraftRows([0] * 8 + [1] * 4, [*range(70, 78), *range(5, 9)], [11, 0, 1, 2, 3, 7, 8, 9, 10]),
    "70 rows, five finished": DraftRows([0] * 40 + [1] * 30, [*range(70, 110), *range(5, 35)], [69, 30, 31, 32, 39]),
    "70 rows, none finished": DraftRows([0] * 40 + [1] * 30, [*range(70, 110), *range(5, 35)], []),
    "70 rows, 65 finished": DraftRows([0] * 40 + [1] * 30, [*range(70, 110), *range(5, 35)], range(5, 70)),
}


class Pair(NamedTuple):
    ours: Eagle3
    theirs: Eagle3


@pytest.fixture(scope="module", params=CONFIGS)
def drafters(request: pytest.FixtureRequest) -> Pair:
    return pair_of(request.param)


def pair_of(name: str, head_bits: int = 16) -> Pair:
    torch.manual_seed(3)
    drafter = Eagle3(CONFIGS[name])
    with torch.no_grad():
        for parameter in drafter.parameters():
            spread = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * spread if parameter.dim() == 1 else spread * parameter.shape[1] ** -0.5)
    if drafter.token_ids() is not None:
        drafter.keep(torch.randperm(TARGET.vocab_size)[: len(drafter.d2t)])
    embedding, head = torch.randn(2, TARGET.vocab_size, HIDDEN).to(torch.bfloat16)
    pair = Pair(drafter, copy.deepcopy(drafter))
    for each, device, laid_out in zip(pair, (DEVICE, CPU), (Tiled, Matrix), strict=True):
        norm = torch.ones(HIDDEN, device=device)
        each.prepare(K2(TARGET, embedding.to(device), (), norm, laid_out.prepare(head.to(device))), head_bits)
    assert isinstance(pair.ours.served, GpuServed)
    assert isinstance(pair.theirs.served, Served)
    return pair


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter is as slow for a small program as for a large one."""
    if DEVICE.type == "cpu":
        for module in (linear, streamed):
            monkeypatch.setattr(module, "block_rows", lambda *_: 256)
        monkeypatch.setattr(gqa, "_PROGRAMS", 16)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"intermediate_size": 76}, "intermediate_size is 76; the GPU's kernels take multiples of 8"),
        ({"kv_lora_rank": 96}, "kv_lora_rank is 96; the GPU's kernels take multiples of 64 up to 512"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim is 32; the GPU's kernels take 64"),
        ({"architecture": "llama", "kv_lora_rank": 0, "head_dim": 258}, "head_dim is 258; .* take 256 at most"),
        (
            {"architecture": "llama", "head_dim": 8, "num_attention_heads": 65, "num_key_value_heads": 1},
            "num_attention_heads is 65; the GPU's kernels take 64 at most, 64 for each key head",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_size_that_the_kernels_do_not_take_is_refused_by_name(changes: dict[str, Any], reason: str):
    with pytest.raises(CheckpointError, match=f"^drafter/config.json: {reason}$"):
        check(replace(FULL, **changes), "drafter/config.json")


def test_every_size_that_is_tried_here_is_one_that_the_kernels_take():
    for config in CONFIGS.values():
        check(config, "drafter/config.json")


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
    errors = (ours.cpu().float() - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert (errors < LIMIT).all(), errors


class Work:
    """Two slots' tokens, and their pages in random order. Unwritten rows, position 0 among them, are NaN."""

    def __init__(self, width: int = FULL.kv_width) -> None:
        """width: of a page's row."""
        self._g = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(TARGET.vocab_size, (2, PLACES), generator=self._g)
        self.tables = torch.randperm(4, generator=self._g).to(torch.int32).view(2, 2)
        plane = torch.full((4, PAGE_TOKENS, width), torch.nan)
        for table, known in zip(self.tables.long(), KNOWN, strict=True):
            rows = plane[table].flatten(0, 1)
            rows[1 : known + 1] = self.bf16(known, width).float()
            plane[table] = rows.unflatten(0, (2, PAGE_TOKENS))
        self.planes = plane.to(torch.bfloat16).to(DEVICE), plane
        self.before = self.planes[0].clone()

    def bf16(self, rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=self._g).to(torch.bfloat16)

    def read(
        self, drafters: Pair, rows: DraftRows, features: tuple[Tensor, Tensor]
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """-> (normed, fed) of the GPU drafter, and of the reference."""
        ours, theirs = (drafter.served for drafter in drafters)
        with kernels():
            pages = ours.pages(self.tokens.to(DEVICE), self.tables.to(DEVICE))
            given = ours.read(features[0].to(DEVICE), pages, rows, self.planes[0])
        with meaning():
            wanted = theirs.read(features[1].float(), theirs.pages(self.tokens, self.tables), rows, self.planes[1])
        return given, wanted

    def assert_written(self, *passes: DraftRows) -> None:
        """Exactly the rows of these passes were written, and are near the reference's."""
        places = torch.tensor(
            [(slot, t + 1) for rows in passes for slot, t in zip(rows.slots, rows.positions, strict=True)]
        )
        pages = self.tables[places[:, 0], places[:, 1] // PAGE_TOKENS].long()
        written = torch.zeros(4, PAGE_TOKENS, dtype=torch.bool)
        written[pages, places[:, 1] % PAGE_TOKENS] = True
        plane, before = self.planes[0].cpu(), self.before.cpu()
        assert torch.equal(plane[~written].view(torch.int16), before[~written].view(torch.int16))
        assert_near(plane[written], self.planes[1][written])


# With emulated kernels, one drafter of each architecture reads many rows, and one of all completes many: the number of
# rows does not depend on the config.
LONG = ("reduced, normed residual", "Llama")
CASES = [
    (config, name)
    for config in CONFIGS
    for name in PASSES
    if DEVICE.type == "cuda"
    or not name.startswith("70 rows")
    or (config in LONG and (config, name) != ("Llama", "70 rows, 65 finished"))
]


@pytest.mark.pairwise
@pytest.mark.parametrize(("drafters", "name"), CASES, indirect=["drafters"])
def test_a_gpus_pass_is_the_pass(drafters: Pair, name: str):
    work, rows = Work(drafters.ours.config.kv_width), PASSES[name]
    feature = 3 * work.bf16(len(rows.slots), HIDDEN)
    before = feature.clone()
    given, wanted = work.read(drafters, rows, (feature, feature))
    for ours, theirs in zip(given, wanted, strict=True):
        assert ours.dtype == torch.bfloat16
        assert_near(ours, theirs)
    work.assert_written(rows)
    assert torch.equal(feature, before)


def test_rows_take_what_those_before_them_fed_back(drafters: Pair):
    first = DraftRows([0, 0, 0, 1, 1], [70, 71, 72, 5, 6], range(5))
    work, then = (
        Work(drafters.ours.config.kv_width),
        replace(first, positions=[71, 72, 73, 6, 7], ids=[9, 150, 0, 9, 31]),
    )
    feature = work.bf16(5, HIDDEN)
    (_, ours), (_, theirs) = work.read(drafters, first, (feature, feature))
    for a, b in zip(*work.read(drafters, then, (ours, theirs)), strict=True):
        assert_near(a, b)
    work.assert_written(first, then)


@pytest.mark.parametrize("drafters", ["3.1", "Llama"], indirect=True)
def test_rows_whose_products_are_the_librarys(drafters: Pair, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    def product(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
        asked.append(len(x))
        return (x.float() @ weight.float()).to(out_dtype)

    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch, "mm", product)  # a CPU's product can only return its inputs' type
    most = 72  # fewer than in serving: a slot has two pages here
    monkeypatch.setattr(products, "STREAMED", most)
    work, positions = Work(drafters.ours.config.kv_width), [range(66), range(most - 65)]
    rows = DraftRows([0] * 66 + [1] * len(positions[1]), [t for each in positions for t in each], [most, 65, 9, 0, 66])
    features = work.bf16(most + 1, 3 * HIDDEN)
    with kernels():
        ours = drafters.ours.fuse(features.to(DEVICE))
    with meaning():
        theirs = drafters.theirs.fuse(features.float())
    assert_near(ours, theirs)
    for a, b in zip(*work.read(drafters, rows, (ours, ours.cpu())), strict=True):
        assert_near(a, b)
    work.assert_written(rows)
    assert DEVICE.type == "cuda" or set(asked) == {most + 1}


@pytest.mark.pairwise
@pytest.mark.parametrize("sources", [None, [4], [2, 0, 5]], ids=repr)
def test_a_gpus_fused_features_are_the_features(drafters: Pair, sources: list[int] | None):
    features = Work().bf16(6, 3 * HIDDEN) * torch.arange(1, 7)[:, None]
    ours, theirs = (drafter.served for drafter in drafters)
    with kernels():
        fused = ours.fuse(features.to(DEVICE), sources)
    with meaning():
        assert_near(fused, theirs.fuse(features.float(), sources))


@pytest.mark.parametrize("head", ["own", "the target's", "reduced"])
@pytest.mark.parametrize("rows", [1, 8, 9])
def test_a_gpus_head_in_8_bits_drafts_as_a_cpus_does(head: str, rows: int):
    drafters = pair_of({"own": "3.1", "the target's": "EAGLE-3", "reduced": "reduced, normed residual"}[head], 8)
    normed = Work().bf16(rows, 128)[:, :HIDDEN]
    ours, theirs = drafters
    with kernels():
        logits, drafted = ours.logits(normed.to(DEVICE)).cpu(), ours.likeliest(normed.to(DEVICE)).cpu()
    with meaning():
        wanted = theirs.logits(normed.float())
    known = wanted[0].isfinite()
    assert torch.equal(logits.isfinite(), wanted.isfinite())
    assert_near(logits[:, known], wanted[:, known])
    assert torch.equal(logits.argmax(-1), drafted)
    assert known[drafted].all()
    with kernels():
        of_nothing = ours.likeliest(torch.full_like(normed, torch.nan).to(DEVICE)).cpu()
    assert known[of_nothing].all(), "rows of NaN must still draft valid tokens"


@pytest.mark.pairwise
@pytest.mark.parametrize("rows", [1, 8, 9])
def test_a_gpus_logits_are_over_the_targets_vocabulary(drafters: Pair, rows: int):
    normed = Work().bf16(rows, 128)[:, :HIDDEN]
    ours, theirs = drafters
    with kernels():
        logits = ours.logits(normed.to(DEVICE)).cpu()
    with meaning():
        wanted = theirs.logits(normed.float())
    assert logits.dtype == torch.float32
    assert torch.equal(logits.isfinite(), wanted.isfinite())
    if ours.config.draft_vocab_size == 48:
        assert torch.equal(logits.isfinite()[0], ours.t2d.cpu())
    known = wanted[0].isfinite()
    assert_near(logits[:, known], wanted[:, known])
