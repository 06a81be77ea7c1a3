"""Runs steps, one after another, in a thread of its own: the planner plans the next while one computes.

The thread takes a step's begins and rows, runs the model, samples, and leaves each new token in its slot, where the
next step finds it. Nothing is awaited between two steps.
"""

import itertools
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from redline.model.k2 import K2
from redline.run.fit import Layout
from redline.run.kv import KvPool
from redline.run.sample import is_plain_greedy, logprobs_of, sample
from redline.run.slots import Slots
from redline.wire.step import Row, RowResult, Step, StepResult, TokenLogprobs


class Launched:
    """A step that will run. `wait` raises what the step raised."""

    def __init__(self, future: "Future[StepResult]") -> None:
        self._future = future

    def wait(self) -> StepResult:
        return self._future.result()


class Runner:
    """One model, its pages and its slots."""

    def __init__(self, model: K2, layout: Layout, slots: int) -> None:
        self.model = model
        self.kv = KvPool(model.config, layout.pages, layout.kv_dtype, model.device)
        self.slots = Slots(slots, layout.max_model_len, model.config.vocab_size, model.device)
        self._steps: queue.SimpleQueue[tuple[Step, Future[StepResult]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="steps", daemon=True)
        self._thread.start()

    def launch(self, step: Step) -> Launched:
        future: Future[StepResult] = Future()
        self._steps.put((step, future))
        return Launched(future)

    def close(self) -> None:
        """Lets launched steps finish, and ends the thread."""
        self._steps.put(None)
        self._thread.join()

    def _serve(self) -> None:
        with torch.inference_mode():
            while (work := self._steps.get()) is not None:
                step, future = work
                try:
                    future.set_result(self.run(step))
                except Exception as error:
                    future.set_exception(error)

    def run(self, step: Step) -> StepResult:
        """The step, now, in this thread. Rows of a slot that has an error get it, and do not run."""
        for begin in step.begins:
            self.slots.begin(begin)
        for row in step.rows:
            self.slots.add_pages(row.slot, row.new_pages)
        errors = [self.slots.errors[row.slot] for row in step.rows]
        sound = [row for row, error in zip(step.rows, errors, strict=True) if error is None]
        computed = iter(self._compute(sound) if sound else ())
        results = tuple(next(computed) if error is None else RowResult(error=error) for error in errors)
        return StepResult(number=step.number, rows=results)

    def _compute(self, rows: Sequence[Row]) -> list[RowResult]:
        hidden, _ = self.model.forward(self.slots.inputs(rows, self.model), self.kv.planes)
        ends = list(itertools.accumulate(row.count for row in rows))
        results = self._prompt_logprobs(rows, ends, hidden)
        sampling = [i for i, row in enumerate(rows) if row.samples]
        if sampling:
            logits_RV = self.model.logits(hidden[[ends[i] - 1 for i in sampling]])
            for i, result in zip(sampling, self._sample([rows[i] for i in sampling], logits_RV), strict=True):
                results[i] = _merged(results[i], result)
        return results

    def _sample(self, rows: Sequence[Row], logits_RV: Tensor) -> list[RowResult]:
        finite = logits_RV.isfinite().all(-1).tolist()
        best = logits_RV.argmax(-1).tolist()
        results: list[RowResult] = []
        for i, row in enumerate(rows):
            if not finite[i]:
                results.append(RowResult(error=f"the model gave a logit that is not finite at position {row.start}"))
                continue
            slot, position = row.slot, row.start + row.count
            asked, prompt = self.slots.sampling[slot], self.slots.prompt[slot]
            tokens = self.slots.tokens[slot]
            if is_plain_greedy(asked, position - prompt):
                token = best[i]
            else:
                try:
                    token = sample(logits_RV[i], asked, tokens[:prompt], tokens[prompt:position], position)
                except Exception as error:  # this row's alone
                    results.append(RowResult(error=f"the next token could not be chosen: {error}"))
                    continue
            tokens[position] = token
            logprobs = () if asked.logprobs is None else (logprobs_of(logits_RV[i], token, asked.logprobs),)
            results.append(RowResult(tokens=(token,), logprobs=logprobs))
        return results

    def _prompt_logprobs(self, rows: Sequence[Row], ends: Sequence[int], hidden: Tensor) -> list[RowResult]:
        """One result a row, with the log probabilities of the prompt tokens that the row predicts, where asked for."""
        results: list[RowResult] = []
        for row, end in zip(rows, ends, strict=True):
            asked, prompt = self.slots.sampling[row.slot].prompt_logprobs, self.slots.prompt[row.slot]
            logprobs: tuple[TokenLogprobs, ...] = ()
            count = min(row.start + row.count, prompt - 1) - row.start
            if asked is not None and count > 0:
                first = end - row.count
                logits = self.model.logits(hidden[first : first + count])
                tokens = self.slots.tokens[row.slot, row.start + 1 : row.start + 1 + count].tolist()
                logprobs = tuple(logprobs_of(row_V, token, asked) for row_V, token in zip(logits, tokens, strict=True))
            results.append(RowResult(prompt_logprobs=logprobs))
        return results


def _merged(prompt: RowResult, sampled: RowResult) -> RowResult:
    if not prompt.prompt_logprobs:
        return sampled
    return RowResult(
        tokens=sampled.tokens,
        logprobs=sampled.logprobs,
        prompt_logprobs=prompt.prompt_logprobs,
        error=sampled.error,
    )
