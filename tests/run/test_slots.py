"""The inputs of the model for the running jobs."""

import pytest
import torch

import redline.run.slots
from redline.kernels.inputs import Inputs
from redline.messages.job import PAGE_TOKENS, PageId, Sampling
from redline.messages.step import Begin, Row
from redline.run.slots import RowSpan, Slots
from tests.tiny_model import VOCABULARY, prompt, tiny_model

LENGTHS = [70, 128, 1, 191]  # lengths of the slots' prompts


def filled_slots() -> Slots:
    """Slots with all prompts computed: the next row of each slot decodes."""
    slots = Slots(len(LENGTHS), 1024, VOCABULARY, torch.device("cpu"))
    for slot, length in enumerate(LENGTHS):
        pages = tuple(PageId(97 * slot + 31 * page) for page in range(length // PAGE_TOKENS + 2))
        tokens = tuple(prompt(seed=slot, length=length))
        slots.begin(
            Begin(slot=slot, tokens=tokens, prompt=length, pages=pages, sampling=Sampling(max_tokens=9), limit=800)
        )
        slots.append(slot, [slot + 5], length)
    return slots


def copied(inputs: Inputs) -> list[torch.Tensor]:
    of = inputs.ids_T, inputs.cos_T, inputs.sin_T, inputs.rows_T, inputs.tokens_Q, inputs.slots_Q, inputs.lengths_Q
    return [tensor.clone() for tensor in of]


def decode(slots: Slots, which: list[int], drafts: int = 0) -> list[RowSpan]:
    return [slots.span(Row(slot=slot, start=None, count=1 + drafts, drafts=drafts)) for slot in which]


def test_a_decode_steps_inputs_are_the_same_from_kept_memory_and_from_new(monkeypatch: pytest.MonkeyPatch):
    """Equal bit for bit, step after step, and the angles equal those of the model."""
    model, slots = tiny_model(), filled_slots()
    for position in range(60):
        which = [3, 0, 2] if position % 3 else [1, 2, 3]
        spans = decode(slots, which)
        kept = slots.inputs(spans, model)
        with monkeypatch.context() as patch:
            patch.setattr(redline.run.slots, "MOST_KEPT", 0)
            made = slots.inputs(spans, model)
        assert kept is not made
        for ours, theirs in zip(copied(kept), copied(made), strict=True):
            assert torch.equal(ours, theirs)
            assert ours.dtype == theirs.dtype
        for ours, theirs in zip((kept.cos_T, kept.sin_T), model.angles(kept.lengths_Q - 1), strict=True):
            assert torch.equal(ours, theirs)
        for span in spans:
            slots.append(span.slot, [position], span.end)


def test_rows_that_verify_drafts_have_them_as_inputs():
    model, slots = tiny_model(), filled_slots()
    slots.at[1].proposal = redline.run.slots.Proposal([11, 12, 13])
    inputs = slots.inputs(decode(slots, [0, 1], drafts=2), model)
    assert inputs.ids_T.tolist() == [5, 6, 11, 12]
    assert inputs.slots_Q.tolist() == [0, 1, 1, 1]
    assert inputs.lengths_Q.tolist() == [71, 129, 130, 131]


def test_a_position_has_the_same_angles_in_a_prompt_and_behind_one():
    model, slots = tiny_model(), filled_slots()
    _, alone, *_ = copied(slots.inputs(decode(slots, [0]), model))
    row = Row(slot=3, start=64, count=100)
    _, beside, *_ = copied(slots.inputs([RowSpan(row, 3, 64, 100)], model))
    assert torch.equal(beside[70 - 64], alone[0])


@pytest.mark.parametrize(("limit", "start", "count"), [(71, 71, 0), (70, 71, 0), (72, 70, 1), (73, 70, 2), (99, 70, 3)])
def test_a_row_verifies_no_more_drafts_than_leave_room_for_a_token_and_none_runs_at_the_limit(
    limit: int, start: int, count: int
):
    slots = filled_slots()
    slots.at[0].limit = limit  # 71 tokens are in the slot
    slots.at[0].proposal = redline.run.slots.Proposal([11, 12, 13])
    (span,) = decode(slots, [0], drafts=2)
    assert (span.start, span.count, len(span.drafts.tokens)) == (start, count, max(count - 1, 0))
    slots.at[0].proposal = redline.run.slots.NOTHING
    (span,) = decode(slots, [0], drafts=2)
    assert (span.start, span.count) == (start, min(count, 1))


@pytest.mark.parametrize("drafting", [True, False])
@pytest.mark.parametrize("pages", [(), (PageId(3),)])
def test_a_drafter_is_a_row_behind_where_its_job_began_with_pages_that_were_there(
    drafting: bool, pages: tuple[PageId, ...]
):
    slots, tokens = filled_slots(), tuple(prompt(seed=1, length=70))
    slots.begin(
        Begin(
            slot=0, tokens=tokens, prompt=70, pages=pages, sampling=Sampling(max_tokens=9), limit=79, drafting=drafting
        )
    )
    assert slots.at[0].behind == (drafting and bool(pages))


@pytest.mark.parametrize(("computed", "pages"), [(128, 2), (128, 3), (100, 2), (129, 3)])
def test_behind_a_prompt_that_was_computed_elsewhere_a_row_is_missing_where_it_ends_at_a_pages_border(
    computed: int, pages: int
):
    """This holds if the page of the first token is already allocated, too. Otherwise the row was transferred with the
    last page.
    """
    slots = filled_slots()
    slots.begin(
        Begin(
            slot=0,
            tokens=tuple(prompt(seed=1, length=computed + 1)),
            prompt=computed,
            pages=tuple(map(PageId, range(pages))),
            sampling=Sampling(max_tokens=9),
            limit=computed + 9,
            drafting=True,
            computed=computed,
        )
    )
    assert slots.at[0].behind == (computed == 128)
