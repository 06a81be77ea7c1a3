"""Prefill of a step: a prompt chunk that the host launches after the step's decode rows without waiting for it.

The host knows everything about a prompt's positions: the slot, the places, the tokens. It does not know the token that
follows the prompt. That token is chosen on the device, as in a captured decode step: the last positions of prompts form
a decode step with one position per row and the logits that the chunk has computed. The token is written to its slot,
the drafter writes the drafts for the slot's first decode row there, and the host reads both with the step's result.

T tokens of the chunk, R rows that sample, D hidden, F width of the target's concatenated hidden states.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch
from torch import Tensor

from redline.kernels.cuda.step.step_rows import MOST_DRAFTS, MOST_ROWS, step_rows
from redline.messages.job import PAGE_TOKENS
from redline.messages.step import Row, RowResult, Shape, Step, StepResult
from redline.run.drafting.learned import SlotDrafters
from redline.run.graphs.cuda_graph_runner import CudaGraphRunner, GraphReplay, HostBuffers
from redline.run.graphs.decode_step import DecodeStep, SharedState
from redline.run.layer_marks import LayerMarks
from redline.run.slots import RowSpan


class PromptChunks:
    """The prompt chunks of one runner. Only the thread that runs its steps calls this; any thread may wait for a
    result."""

    def __init__(self, shared: SharedState, captured: CudaGraphRunner, drafting: SlotDrafters) -> None:
        self._shared = shared
        self._captured = captured
        self._drafting = drafting

    def refused(self, rows: Sequence[Row]) -> bool:
        """Whether these prompt rows must run eagerly, with the host waiting. Their jobs have begun in their slots."""
        if not self._shared.model.recordable or sum(row.samples for row in rows) > MOST_ROWS:
            return True
        return any(map(self._refuses, rows))

    def _refuses(self, row: Row) -> bool:
        if self._shared.slots.at[row.slot].sampling.prompt_logprobs is not None:
            return True
        return row.samples and self._captured.refuses(row.slot) is not None

    def launch(self, step: Step, marks: LayerMarks | None = None) -> Callable[[], StepResult]:
        """Launches a step of prompt rows; the returned call waits for the result. marks: records each launched layer.

        The jobs must have begun, and `refused` must have returned False. Rows of a slot that has an error get that
        error and do not run.
        """
        self._captured.note_landed()
        slots = self._shared.slots
        errors: list[str | None] = []
        spans: list[RowSpan] = []
        for row in step.rows:
            slots.add_pages(row.slot, row.new_pages)
            errors.append(slots.at[row.slot].error)
            if errors[-1] is None:
                spans.append(slots.span(row))
        replay = self._run(step.number, spans, marks) if spans else None

        def result() -> StepResult:
            outcomes = iter(replay.outcomes if replay is not None else ())

            def rows() -> Iterator[RowResult]:
                for row, error in zip(step.rows, errors, strict=True):
                    if error is not None:
                        yield RowResult(error=error)
                    else:
                        yield next(outcomes).result if row.samples else RowResult()

            return StepResult(number=step.number, rows=tuple(rows()))

        return result

    def _run(self, number: int, spans: Sequence[RowSpan], marks: LayerMarks | None) -> GraphReplay:
        """Launches the positions; returns the replay of the rows that sample, in their order."""
        shared = self._shared
        reading = any(span.row.drafting for span in spans)
        inputs = shared.slots.inputs(spans, shared.model)
        layers = shared.layers if reading else ()
        launched = None if marks is None else marks.launched
        hidden_TD, features_TF = shared.model.forward(inputs, shared.kv.planes, layers, launched)
        firsts = list(itertools.accumulate((span.count for span in spans), initial=0))
        if reading:
            assert features_TF is not None, "the drafter needs the model's hidden states"
            followed = [i for i, span in enumerate(spans) if span.row.drafting]
            self._drafting.read([spans[i] for i in followed], [firsts[i] for i in followed], features_TF)
        sampling = [i for i, span in enumerate(spans) if span.row.samples]
        ends = [firsts[i] + spans[i].count - 1 for i in sampling]
        step = Step(number=number, rows=tuple(self._ending(spans[i].row) for i in sampling))
        if not sampling:
            nothing = HostBuffers(shared.plan, shared.results, shared.scores)
            return GraphReplay(step, (), 1, nothing, self._captured.mark(), scored=False)
        return self._end(step, _rows(hidden_TD, ends), None if features_TF is None else _rows(features_TF, ends))

    def _ending(self, row: Row) -> Row:
        """The row reduced to its last position. A drafter's row without a page yet comes with the slot's next row."""
        drafting = row.drafting and not self._shared.slots.at[row.slot].behind
        return msgspec.structs.replace(row, new_pages=(), drafting=drafting)

    def _end(self, step: Step, hidden_RD: Tensor, features_RF: Tensor | None) -> GraphReplay:
        captured, rows = self._captured, step.rows
        end = _ChunkEnd(self._shared, len(rows))
        asked = captured.asked(rows)
        masks = captured.masks(rows, end.shape.positions)
        captured.send(end.shape, rows, masks)
        end.take(hidden_RD, features_RF)
        for place, allowed in masks.items():
            end.allow(place, allowed())
        end.settle(asked.kind, adjusted=asked.adjusted)
        if asked.scores:
            end.score()
        wanted = [min(row.propose, MOST_DRAFTS) for row in rows if row.drafting]
        if wanted:
            end.draft()
            for _ in range(1, max(wanted)):
                end.draft_on()
        return captured.fetch(step, end.shape, asked)


class _ChunkEnd(DecodeStep):
    """A decode step with one position per row, the last one of its prompt. The chunk replaces its forward pass."""

    def __init__(self, shared: SharedState, rows: int) -> None:
        super().__init__(shared, Shape(rows, 1, shared.slots.tables.shape[1] * PAGE_TOKENS))

    def take(self, hidden_RD: Tensor, features_RF: Tensor | None) -> None:
        """Reads the plan, and takes the chunk's last hidden states of the rows and the states for the drafter."""
        shared = self._shared
        plan = self._plan_BC, shared.standing, shared.results
        self._ids_T = step_rows(*plan, shared.frequencies, self.shape.positions, shared.spare_page).ids_T
        self._features = features_RF
        self._logits_TV = shared.model.logits(hidden_RD)


def _rows(x_TX: Tensor, places: Sequence[int]) -> Tensor:
    """The rows at these places, [R, X]. Slices, because an index tensor would have to be copied to the device first."""
    return torch.cat([x_TX[place : place + 1] for place in places])
