"""The drafter's two implementations of the same arithmetic: over pages through the ops (`forward.py`), and dense as in
training (`module.py`).
"""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from redline.kernels.cpu.blocks.draft_pass import DraftRows
from redline.kernels.inputs import Chunk, Inputs
from redline.kernels.kernel import fallbacks, references
from redline.messages.job import PAGE_TOKENS
from redline.model.eagle3.module import Eagle3, Eagle3Config
from redline.model.eagle3.one_call import draft_pass
from tests.tiny_model import tiny_model

ROWS = 150  # rows of each job: pages end before positions 64 and 128
TARGET = tiny_model().config
CONFIGS = {
    "mla, 3.1": Eagle3Config.for_target(TARGET),
    "mla, EAGLE-3": Eagle3Config.for_target(TARGET, fc_norm=False, norm_output=False, draft_vocab_size=None),
    "llama, reduced": Eagle3Config.for_target(
        TARGET, architecture="llama", draft_vocab_size=96, num_key_value_heads=2, head_dim=24
    ),
    "llama, EAGLE-3": Eagle3Config.for_target(TARGET, architecture="llama", fc_norm=False, norm_output=False),
}
CONFIGS["mla, normed residual"] = replace(CONFIGS["mla, 3.1"], norm_before_residual=True)
CONFIGS["llama, normed residual"] = replace(CONFIGS["llama, EAGLE-3"], norm_before_residual=True)


class Pair(NamedTuple):
    served: Eagle3
    dense: Eagle3  # the same weights in their training form


def pair(config: Eagle3Config, folder: Path) -> Pair:
    torch.manual_seed(3)
    drafter = Eagle3(config)
    with torch.no_grad():
        for parameter in drafter.parameters():  # far from identity, so that a forgotten weight shows
            spread = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * spread if parameter.dim() == 1 else spread * parameter.shape[1] ** -0.5)
    drafter.save(folder)
    served, dense = Eagle3.open(folder, TARGET), Eagle3.open(folder, TARGET).float()
    model = tiny_model()
    served.prepare(model)
    dense.attach(model.embedding_VD, model.head.dense())
    return Pair(served, dense)


@pytest.fixture(params=CONFIGS)
def drafters(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return pair(CONFIGS[request.param], tmp_path)


class Job(NamedTuple):
    tokens: Tensor  # [ROWS + 1]
    features: Tensor  # [ROWS, 3 D]


def job(seed: int) -> Job:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(TARGET.vocab_size, (ROWS + 1,), generator=generator)
    return Job(tokens, 3 * torch.randn(ROWS, 3 * TARGET.hidden_size, generator=generator))


def densely(drafter: Eagle3, job: Job) -> tuple[Tensor, Tensor]:
    """normed, fed [ROWS, D]: one causal attention over all rows."""
    feature = drafter.fuse(job.features)
    cos, sin = drafter.angles(torch.arange(ROWS))
    q, kv = drafter.project(drafter.embed(job.tokens[1:]), feature, cos, sin)
    keys, values = drafter.expand(kv)
    scores = torch.einsum("qhx,khx->hqk", q, keys) * drafter.config.softmax_scale
    scores = scores.masked_fill(torch.ones(ROWS, ROWS).triu(1).bool(), -torch.inf)
    return drafter.finish(torch.einsum("hqk,khv->qhv", scores.softmax(-1), values), feature)


class Pages:
    """Two slots' pages in random order, filled with NaN, so that reads of unwritten rows show."""

    def __init__(self, config: Eagle3Config, dtype: torch.dtype = torch.float32) -> None:
        per_slot = ROWS // PAGE_TOKENS + 1
        order = torch.randperm(2 * per_slot, generator=torch.Generator().manual_seed(1))
        self.tables = order.to(torch.int32).view(2, per_slot)
        self.plane = torch.full((2 * per_slot, PAGE_TOKENS, config.kv_width), torch.nan, dtype=dtype)

    def forward(
        self,
        drafter: Eagle3,
        parts: Sequence[tuple[int, Job, range]],
        *,
        chunks: bool,
        queries: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rows of slots in one pass, as chunks of a prompt or as decode rows."""
        slots = torch.tensor([slot for slot, _, rows in parts for _ in rows])
        positions = torch.tensor([t for _, _, rows in parts for t in rows])
        places = positions + 1
        firsts = itertools.accumulate((len(rows) for _, _, rows in parts), initial=0)
        queries = [] if chunks else list(range(len(slots))) if queries is None else list(queries)
        cos, sin = drafter.angles(positions)
        pages = self.tables[slots, places // PAGE_TOKENS].long()
        inputs = Inputs(
            ids_T=torch.cat([job.tokens[rows.start + 1 : rows.stop + 1] for _, job, rows in parts]),
            cos_T=cos,
            sin_T=sin,
            rows_T=pages * PAGE_TOKENS + places % PAGE_TOKENS,
            chunks=[
                Chunk(first, len(rows), rows.start + 1, slot)
                for first, (slot, _, rows) in zip(firsts, parts, strict=False)
            ]
            if chunks
            else [],
            tokens_Q=torch.tensor(queries, dtype=torch.int32),
            slots_Q=slots[queries].to(torch.int32),
            lengths_Q=(places[queries] + 1).to(torch.int32),
            tables=self.tables,
        )
        features = torch.cat([job.features[rows.start : rows.stop] for _, job, rows in parts])
        return drafter.forward(inputs, drafter.fuse(features), self.plane)


def assert_close(ours: tuple[Tensor, ...], theirs: tuple[Tensor, Tensor], rows: slice) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b[rows], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_pages_give_what_dense_attention_gives(drafters: Pair):
    served, dense = drafters
    expected, pages, work = densely(dense, job(0)), Pages(served.config), job(0)
    for rows in (range(50), range(50, 63), range(63, 100)):
        assert_close(pages.forward(served, [(0, work, rows)], chunks=True), expected, slice(rows.start, rows.stop))
    for t in range(100, ROWS):
        assert_close(pages.forward(served, [(0, work, range(t, t + 1))], chunks=False), expected, slice(t, t + 1))


@pytest.mark.parametrize("meaning", [False, True], ids=["kernels", "references"])
@torch.no_grad()
def test_a_pass_whose_rows_are_looked_up_gives_what_dense_attention_gives(drafters: Pair, meaning: bool):
    """As the engine calls it: rows of two slots, some of them complete, then one more for each slot, with a given
    token.
    """
    served, dense = drafters
    pages, jobs, stops = Pages(served.config), (job(0), job(1)), (ROWS - 1, 64)
    tokens = torch.stack([each.tokens for each in jobs])
    places = served.served.pages(tokens, pages.tables)
    slots = [slot for slot, stop in enumerate(stops) for _ in range(stop)]
    positions = [t for stop in stops for t in range(stop)]
    queries = [len(slots) - 1, 7, stops[0] - 1]
    feature = torch.cat([served.fuse(each.features[:stop]) for each, stop in zip(jobs, stops, strict=True)])
    expected = [densely(dense, each) for each in jobs]
    behind = [int(each.tokens[stop + 1]) for each, stop in zip(jobs, stops, strict=True)]
    places.tokens[[0, 1], [stop + 1 for stop in stops]] = 0  # the given tokens must be used instead
    with references() if meaning else contextlib.nullcontext():
        first = draft_pass(feature, served.served.layer, places, DraftRows(slots, positions, queries), pages.plane)
        then = torch.cat([served.fuse(each.features[stop : stop + 1]) for each, stop in zip(jobs, stops, strict=True)])
        rows = DraftRows([0, 1], stops, [0, 1], behind)
        last = draft_pass(then, served.served.layer, places, rows, pages.plane)
    for i, query in enumerate(queries):
        at = positions[query]
        assert_close(tuple(x[i : i + 1] for x in first), expected[slots[query]], slice(at, at + 1))
    for slot, stop in enumerate(stops):
        assert_close(tuple(x[slot : slot + 1] for x in last), expected[slot], slice(stop, stop + 1))


@torch.no_grad()
def test_rows_that_only_leave_their_latents_serve_the_one_that_drafts(drafters: Pair):
    served, dense = drafters
    pages = Pages(served.config)
    drafted = pages.forward(served, [(1, job(0), range(ROWS))], chunks=False, queries=[ROWS - 1])
    assert_close(drafted, densely(dense, job(0)), slice(ROWS - 1, ROWS))
    none = pages.forward(served, [(0, job(1), range(ROWS))], chunks=False, queries=[])
    assert [x.shape for x in none] == [(0, TARGET.hidden_size)] * 2


@torch.no_grad()
def test_the_drafters_words_are_the_same_in_training_and_serving(drafters: Pair):
    served, dense = drafters
    normed, _ = densely(dense, job(0))
    ours, theirs = served.logits(normed), dense.logits(normed)
    assert ours.shape == (ROWS, TARGET.vocab_size)
    assert ours.dtype == torch.float32
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    if served.config.draft_vocab_size == 96:
        assert torch.equal(ours.isfinite()[0], served.t2d)


@torch.no_grad()
def test_a_fed_back_row_is_a_step_of_training_time_test(drafters: Pair):
    """The second step: a row's own output is the feature of the next; the pass does not change its input."""
    served, dense = drafters
    pages, work = Pages(served.config), job(0)
    _, fed = pages.forward(served, [(0, work, range(100))], chunks=False, queries=[99])
    before = fed.clone()
    cos, sin = served.angles(torch.tensor([100]))
    at = int(pages.tables[0, 101 // PAGE_TOKENS]) * PAGE_TOKENS + 101 % PAGE_TOKENS
    one = torch.tensor([0], dtype=torch.int32)
    inputs = Inputs(work.tokens[101:102], cos, sin, torch.tensor([at]), (), one, one, one + 102, pages.tables)
    drafted = served.forward(inputs, fed, pages.plane)

    feature = torch.cat([dense.fuse(work.features[:100]), before])
    cos, sin = dense.angles(torch.arange(101))
    q, kv = dense.project(dense.embed(work.tokens[1:102]), feature, cos, sin)
    keys, values = dense.expand(kv)
    weights = (torch.einsum("hx,khx->hk", q[-1], keys) * dense.config.softmax_scale).softmax(-1)
    expected = dense.finish(torch.einsum("hk,khv->hv", weights, values)[None], before)
    assert_close(drafted, expected, slice(None))
    assert torch.equal(fed, before)


@pytest.mark.parametrize("name", ["mla, 3.1", "mla, EAGLE-3"])
@torch.no_grad()
def test_a_row_alone_is_the_row_in_company_to_the_bit(name: str, tmp_path: Path):
    served = pair(CONFIGS[name], tmp_path).served
    alone, together = Pages(served.config, torch.bfloat16), Pages(served.config, torch.bfloat16)
    fallbacks.clear()
    steps = [(range(70), range(33)), (range(70, 71), range(33, 34)), (range(71, 140), range(34, 37))]
    for mine, theirs in steps:
        one = alone.forward(served, [(0, job(0), mine)], chunks=False)
        both = together.forward(served, [(1, job(1), theirs), (0, job(0), mine)], chunks=False)
        assert all(torch.equal(a, b[len(theirs) :]) for a, b in zip(one, both, strict=True))
        assert torch.equal(served.logits(one[0]), served.logits(both[0])[len(theirs) :])
    assert not fallbacks
    mine = alone.tables[0].long()
    same = alone.plane[mine].flatten(0, 1)[1:140].view(torch.int16)
    assert torch.equal(same, together.plane[mine].flatten(0, 1)[1:140].view(torch.int16))


def test_gradients_reach_every_weight(drafters: Pair):
    dense = drafters.dense
    work = job(0)
    normed, fed = densely(dense, work)
    ids = dense.token_ids()
    known = dense.logits(normed + fed)[:, slice(None) if ids is None else ids]
    known.logsumexp(-1).sum().backward()
    for name, parameter in dense.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_a_pass_is_eight_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It runs once per draft, and there the cost of a call is as large as that of its arithmetic."""
    from redline.model.eagle3 import forward as page
    from redline.model.k2 import forward as attention

    served = pair(CONFIGS["mla, 3.1"], tmp_path).served
    pages, calls = Pages(served.config), []
    called = {page: ("add_norm", "linear", "mla_qkv", "moe"), attention: ("mla_prefill", "mla_decode")}
    for module, names in called.items():
        for name in names:
            op = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *a, op=op: (calls.append(op.op.name), op(*a))[1])
    fused = served.fuse(job(0).features[:1])
    calls.clear()
    monkeypatch.setattr(served, "fuse", lambda _: fused)
    pages.forward(served, [(0, job(0), range(1))], chunks=False)
    assert len(calls) == 8, calls
