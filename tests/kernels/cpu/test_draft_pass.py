"""The drafter's passes in one call give the bits of the separate ops, independent of the other rows of the batch."""

import copy
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from redline.kernels.cpu import native
from redline.kernels.cpu.blocks import draft_pass as one_call
from redline.kernels.cpu.blocks.draft_pass import DraftRows
from redline.kernels.kernel import fallbacks
from redline.kernels.record import layout_check, record
from redline.model.eagle3.one_call import draft_chain, draft_pass
from tests.tiny_model import tiny_drafter, tiny_model

WANTED = (3, 1, 6, 2, 4)


def crowd():
    """Five slots with different numbers of drafts; the rows of one of them cross a page boundary."""
    case = next(case for case in draft_chain.op.cases() if "each its own number" in case.name)
    feature, layer, pages, rows, wanted, plane = case.make(torch.Generator().manual_seed(1))
    assert tuple(wanted) == WANTED
    return feature, layer, pages, rows, plane


def rows_of(plane: Tensor) -> Tensor:
    return plane.view(torch.int16)


def test_what_is_written_has_the_bits_of_the_ops():
    feature, layer, pages, rows, plane = crowd()
    theirs = copy.deepcopy(plane)
    draft_chain.run(draft_chain.op.args(feature, layer, pages, rows, WANTED, plane))
    draft_chain.op.reference(draft_chain.op.args(feature, layer, pages, rows, WANTED, theirs))
    assert torch.equal(rows_of(plane), rows_of(theirs))


@pytest.mark.parametrize("slot", range(5))
def test_a_slot_drafts_alone_what_it_drafts_in_company(slot: int):
    feature, layer, pages, rows, plane = crowd()
    alone = copy.deepcopy(plane)
    together = draft_chain(feature, layer, pages, rows, WANTED, plane)
    mine = [i for i, owner in enumerate(rows.slots) if owner == slot]
    one = DraftRows([slot] * len(mine), [rows.positions[i] for i in mine], [len(mine) - 1])
    drafted = draft_chain(feature[mine], layer, pages, one, WANTED[slot : slot + 1], alone)
    assert drafted.tolist() == [together[slot, : WANTED[slot]].tolist()]
    table = pages.tables[slot].long()
    assert torch.equal(rows_of(alone[table]), rows_of(plane[table]))


def places(rows: Sequence[int], table: Tensor) -> Tensor:
    return table[torch.tensor(rows) // 64].long() * 64 + torch.tensor(rows) % 64


def test_a_slot_that_wants_fewer_drafts_leaves_what_is_behind_them():
    """The slot's pages may end after its last row."""
    feature, layer, pages, rows, plane = crowd()
    before = plane.clone()
    draft_chain(feature, layer, pages, rows, WANTED, plane)
    for slot, (query, wanted) in enumerate(zip(rows.queries, WANTED, strict=True)):
        last = (
            rows.positions[query] + wanted
        )  # position of its last row: one row for its own token and one for each draft fed
        behind = places([last + 1, last + 2], pages.tables[slot])
        assert torch.equal(rows_of(plane).flatten(0, 1)[behind], rows_of(before).flatten(0, 1)[behind])
        written = places([last], pages.tables[slot])
        assert not torch.equal(rows_of(plane).flatten(0, 1)[written], rows_of(before).flatten(0, 1)[written])


def test_the_features_that_are_given_stay_as_they_are():
    feature, layer, pages, rows, plane = crowd()
    before = feature.clone()
    draft_pass(feature, layer, pages, rows, plane)
    draft_chain(feature, layer, pages, rows, WANTED, plane)
    assert torch.equal(feature, before)


@pytest.mark.parametrize("name", ["DraftWeights", "DraftPages", "DraftFuseCall", "DraftPassCall", "DraftChainCall"])
def test_the_compiler_lays_a_struct_out_as_python_reads_it(name: str, tmp_path: Path):
    compiler = native.find_compiler()
    assert compiler is not None
    header = Path(one_call.__file__).with_suffix(".h")
    source = tmp_path / "layout.cpp"
    source.write_text(f'#include "{header}"\n{layout_check(record(header, name))}')
    built = subprocess.run([compiler, "-std=c++17", "-fsyntax-only", source], capture_output=True, check=False)
    assert built.returncode == 0, built.stderr.decode()


def test_a_drafter_of_kimis_kind_takes_the_kernels():
    """Its rotary angles have the same bits when they are looked up as when they are computed for a row."""
    served = tiny_drafter().served
    assert served.chains
    pages = served.pages(torch.zeros(1, 300, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.int32))
    some = torch.tensor([299, 7, 130])
    cos, sin = served.angles(some)
    assert torch.equal(pages.cos[some], cos)
    assert torch.equal(pages.sin[some], sin)
    plane = torch.zeros(5, 64, tiny_drafter().config.kv_width, dtype=torch.bfloat16)
    fused = served.fuse(torch.randn(2, 3 * tiny_model().config.hidden_size), [1])
    fallbacks.clear()
    assert draft_chain(fused, served.layer, pages, DraftRows([0], [5], [0]), [2], plane).shape == (1, 2)
    assert not fallbacks
