"""The eager computation of a step: one forward pass over all rows, then each row's tokens and drafts, on the host.

A row's result depends on its own slot and logits only. A row of a slot that has an error gets that error and does not
run; an error in one row that all ranks share ends that row alone.
"""

import itertools
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from redline.errors import WorkerLost
from redline.kernels.cpu.blocks.transformer import TransformerOutput
from redline.kernels.cuda.faults import is_device_error
from redline.messages.job import Sampling
from redline.messages.step import Begin, RowResult, Step, StepResult, TokenLogprobs
from redline.model.k2.cpu import K2
from redline.run.drafting.learned import SlotDrafters
from redline.run.drafting.verify import Verified, is_chosen_alone, verify, verify_chosen, verify_synthetic
from redline.run.grammar.matcher import masked
from redline.run.graphs.cuda_graph_runner import no_choice, not_finite
from redline.run.kv import KvPool
from redline.run.sampling.on_host import SCORED_ROWS, is_greedy, logprobs_of, sample_each, sample_token, uniform
from redline.run.slots import Proposal, RowSpan, Slot, Slots


class EagerSteps:
    """Computes steps over the slots and pages of one model. begins: called with the name of each part of a step as it
    begins; with "" when the step's work ends."""

    def __init__(
        self,
        model: K2,
        kv: KvPool,
        slots: Slots,
        drafting: SlotDrafters,
        layers: Sequence[int],
        rates: Sequence[float],
        begins: Callable[[str], object],
    ) -> None:
        """layers: those whose hidden states the drafter reads. rates: as in `Runner`."""
        self.model = model
        self.kv = kv
        self.slots = slots
        self.drafting = drafting
        self.begins = begins
        self._layers = layers
        self._rates = rates

    def run(self, step: Step) -> StepResult:
        """The result of a step. Raises an error that is not one row's."""
        for begin in step.begins:
            self.begin(begin)
        results: list[RowResult] = []
        spans: list[RowSpan] = []
        places: list[int] = []
        for row in step.rows:
            if row.new_pages:
                self.slots.add_pages(row.slot, row.new_pages)
            error = self.slots.at[row.slot].error
            results.append(_NOTHING if error is None else RowResult(error=error))
            if error is None and (span := self.slots.span(row)).count:
                spans.append(span)
                places.append(len(results) - 1)
        if spans:
            for place, result in zip(places, self._compute(spans), strict=True):
                results[place] = result
        return StepResult(number=step.number, rows=tuple(results), drafted=self.drafting.drafted)

    def begin(self, begin: Begin) -> None:
        """Begins a job in its slot. An error ends the job alone, unless it is not one row's."""
        try:
            self.slots.begin(begin)
        except Exception as error:
            if self._is_ours_alone(error):
                raise
            self.slots.at[begin.slot].error = f"the job could not begin: {error}"  # fails this job only

    def _compute(self, spans: Sequence[RowSpan]) -> list[RowResult]:
        asked: list[int] = []  # tokens with logits: all of a decode row, the last one of a prompt row that samples
        sampling: list[RowSpan] = []
        layers: Sequence[int] = ()
        end, prompts, drafts = 0, False, False
        for span in spans:
            row, first, end = span.row, end, end + span.count
            if row.samples:
                sampling.append(span)
                asked.extend(range(first if row.start is None else end - 1, end))
            prompts = prompts or row.start is not None
            drafts = drafts or row.drafting or row.propose > 0
            if row.drafting:
                layers = self._layers
        self.begins("inputs")
        inputs = self.slots.inputs(spans, self.model)
        self.begins("forward")
        out = self.model.predict(inputs, self.kv.planes, layers, asked)
        self.begins("choose")
        results = self._verify(sampling, out)
        if prompts:
            results = self._with_prompts(spans, results, out.hidden())
        if drafts:
            self.begins("draft")
            self._draft(spans, results, out.features)
        self.begins("")
        return results

    def _draft(self, spans: Sequence[RowSpan], results: Sequence[RowResult], features: Tensor | None) -> None:
        firsts = list(itertools.accumulate((span.count for span in spans), initial=0))
        # A row with tokens and an error continues like any other: its error may be on this rank only.
        sound = [i for i, result in enumerate(results) if result.tokens or result.error is None]
        if any(spans[i].row.drafting or spans[i].row.propose for i in sound):
            self.drafting.follow(
                [spans[i] for i in sound],
                [firsts[i] for i in sound],
                [spans[i].count - spans[i].proposed + results[i].accepted for i in sound],
                features,
            )

    def _verify(self, spans: Sequence[RowSpan], out: TransformerOutput) -> list[RowResult]:
        """The result of each row. Logits exist for all positions of a decode row, and for one of any other row."""
        chosen = self._chosen(spans, out)
        tokens = range(self.model.config.vocab_size)
        all_finite = -1 not in chosen
        results: list[RowResult] = []
        end = 0
        for span in spans:
            proposed = span.proposed
            first, end = end, end + 1 + proposed
            slot, position = self.slots.at[span.slot], span.end - proposed
            sound = end - first if all_finite else [*chosen[first:end], -1].index(-1)
            if not sound:
                results.append(RowResult(error=not_finite(position - 1)))
                continue
            # Drafts may leave the range that the model handles: from the first position with non-finite logits on, they
            # are dropped.
            drafts = span.drafts.until(sound)
            try:
                if self._rates:
                    given = self._verify_synthetic(span.slot, drafts.tokens[: sound - 1], out, first, chosen, position)
                elif is_chosen_alone(slot.choosing, position - slot.prompt, span.drafts.q):
                    given = verify_chosen(chosen[first : first + sound], drafts.tokens)
                else:
                    given = self._verify_drawn(span.slot, drafts, out.logits()[first : first + sound], position)
            except Exception as error:
                if self._is_ours_alone(error):
                    raise
                reason = f"the next token could not be chosen: {error}"
                results.append(_stuck(slot) or RowResult(error=reason))  # fails this row only
                continue
            if not given.tokens or not all(token in tokens for token in given.tokens):
                results.append(_stuck(slot) or RowResult(error=no_choice(position)))
                continue
            self.slots.append(span.slot, given.tokens, position)
            asked = slot.sampling.logprobs
            logprobs = (
                ()
                if asked is None
                else tuple(
                    logprobs_of(row_V, token, asked)
                    for row_V, token in zip(out.logits()[first:end], given.tokens, strict=False)
                )
            )
            why = None if slot.matcher is None else slot.matcher.error
            results.append(
                RowResult(
                    tokens=tuple(given.tokens),
                    proposed=proposed,
                    accepted=given.accepted,
                    by=span.drafts.by if proposed else None,
                    forced=len(slot.proposal.tokens),
                    logprobs=logprobs,
                    error=why,
                    refused=why is not None,
                )
            )
        return results

    def _chosen(self, spans: Sequence[RowSpan], out: TransformerOutput) -> list[int]:
        """The token of each row of logits for which `is_chosen_alone` holds; all random draws go in one call.

        For other rows it is the argmax. -1 if the logits are not finite, or if nothing can be drawn.
        """
        rows: list[int] = []
        asked: list[Sampling] = []
        us: list[float] = []
        end = 0
        for span in spans:
            first, end = end, end + 1 + span.proposed
            slot = self.slots.at[span.slot]
            sampling = slot.choosing
            if is_greedy(sampling):
                continue
            position = span.end - span.proposed
            if not is_chosen_alone(sampling, position - slot.prompt, span.drafts.q):
                continue
            rows.extend(range(first, end))
            asked.extend([sampling] * (end - first))
            us.extend(uniform(sampling.seed, position + i) for i in range(end - first))
        if not rows:
            return out.likeliest
        chosen, logits_RV = out.likeliest.copy(), out.logits()
        for row, token in zip(
            rows, sample_each(logits_RV if len(rows) == len(chosen) else logits_RV[rows], asked, us), strict=True
        ):
            if chosen[row] >= 0:
                chosen[row] = token
        return chosen

    def _verify_drawn(self, number: int, drafts: Proposal, logits_NV: Tensor, position: int) -> Verified:
        slot, tokens = self.slots.at[number], self.slots.tokens[number]
        prompt, generated = self.slots.known(number, 0, slot.prompt), tokens[slot.prompt : position]
        sampling = slot.choosing
        if slot.matcher is not None and sampling.grammar is not None:
            masks_NW = slot.matcher.masks(drafts.tokens)[: len(logits_NV)]
            logits_NV, drafts = masked(logits_NV[: len(masks_NW)], masks_NW), drafts.until(len(masks_NW))
        return verify(logits_NV, drafts.tokens, drafts.q, sampling, prompt, generated, position)

    def _verify_synthetic(
        self,
        number: int,
        drafts: Sequence[int],
        out: TransformerOutput,
        first: int,
        chosen: Sequence[int],
        position: int,
    ) -> Verified:
        """The drafts that the synthetic draw accepts, and the target model's own token after them. first: index of
        the slot's first row of logits."""
        slot, tokens = self.slots.at[number], self.slots.tokens[number]
        held = verify_synthetic(self._rates, slot.sampling.seed, position, len(drafts))
        if is_chosen_alone(slot.sampling, position - slot.prompt, None):
            return Verified([*drafts[:held], chosen[first + held]], held)
        # The slot's tensor holds the drafts after its tokens.
        generated = tokens[slot.prompt : position + held]
        logits_V = out.logits()[first + held]
        token = sample_token(
            logits_V, slot.sampling, self.slots.known(number, 0, slot.prompt), generated, position + held
        )
        return Verified([*drafts[:held], token], held)

    def _with_prompts(self, spans: Sequence[RowSpan], sampled: Sequence[RowResult], hidden: Tensor) -> list[RowResult]:
        """A result for each row: its sampled tokens, and log probabilities of prompt tokens if requested."""
        results: list[RowResult] = []
        left, end = iter(sampled), 0
        for span in spans:
            first, end = end, end + span.count
            result = next(left) if span.row.samples else _NOTHING
            logprobs = self._prompt_logprobs(span, hidden[first:end])
            results.append(msgspec.structs.replace(result, prompt_logprobs=logprobs) if logprobs else result)
        return results

    def _prompt_logprobs(self, span: RowSpan, hidden: Tensor) -> tuple[TokenLogprobs, ...]:
        slot = self.slots.at[span.slot]
        asked, count = slot.sampling.prompt_logprobs, min(span.end, slot.prompt - 1) - span.start
        if asked is None or count <= 0:
            return ()
        tokens = self.slots.known(span.slot, span.start + 1, span.start + 1 + count)
        return tuple(
            logprobs_of(row_V, token, asked)
            for some, of_some in zip(hidden[:count].split(SCORED_ROWS), tokens.split(SCORED_ROWS), strict=True)
            for row_V, token in zip(self.model.logits(some), of_some.tolist(), strict=True)
        )

    def _is_ours_alone(self, error: Exception) -> bool:
        """Whether an error may have occurred on this rank only, or leaves the worker unusable: such an error is not
        one row's."""
        short = isinstance(error, MemoryError | torch.OutOfMemoryError) and self.model.group.ranks > 1
        return short or isinstance(error, WorkerLost) or is_device_error(error)


def _stuck(slot: Slot) -> RowResult | None:
    """The result of a row for which the slot's grammar allows no token, if the grammar has reached a limit; else
    None."""
    if slot.matcher is None or slot.matcher.error is None:
        return None
    return RowResult(error=slot.matcher.error, refused=True)


_NOTHING = RowResult()
