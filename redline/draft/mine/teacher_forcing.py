"""A drafter scored by teacher forcing, over the target's states: the forward pass behind `mine` and `eval`."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from redline.draft.corpus.corpus import Example
from redline.draft.corpus.target import Target
from redline.draft.mine.difficulty import Scores, Serving, score
from redline.draft.train.ttt import unroll
from redline.model.eagle3.module import Eagle3
from redline.model.k2.checkpoint import Checkpoint
from redline.worker.engine import pick_device

BATCH_TOKENS = 16_384  # tokens that go through the target at once


class TeacherForcing:
    """A target and a drafter, loaded. On a CPU the drafter computes in float32, as when it serves; else in bf16."""

    def __init__(self, target: Target, drafter: Eagle3) -> None:
        device = target.model.device
        self._target = target
        self._drafter = drafter.to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
        self._drafter.attach(target.embedding, target.head)

    @classmethod
    def open(cls, target: str, draft: str, device: str | None) -> "TeacherForcing":
        """Loads both from their folders; device: None: the GPU, if there is one.

        Raises CheckpointError or ConfigError.
        """
        drafter = Eagle3.open(Path(draft), Checkpoint.open(target).config)
        return cls(Target.open(target, pick_device(device), drafter.config.layer_ids), drafter)

    def refusal(self, example: Example) -> str | None:
        """Why the target cannot read the example; None: it can."""
        return self._target.refusal(example.tokens)

    def scores(self, examples: Iterable[Example], steps: int, serving: Serving) -> Iterator[Scores]:
        """Yields the scores of each example, in order; steps: drafts of a round.

        Raises ConfigError for an example that the target cannot read (`refusal`).
        """
        for batch in _batches(examples):
            found = self._target.features([list(example.tokens) for example in batch])
            for example, (features, last) in zip(batch, found, strict=True):
                yield self._score(example, features, last, steps, serving)

    def _score(self, example: Example, features: Tensor, last: Tensor, steps: int, serving: Serving) -> Scores:
        tokens = torch.tensor(example.tokens, dtype=torch.int64, device=last.device)
        model = self._target.model
        with torch.inference_mode():
            unrolled = unroll(self._drafter, tokens[None], features.flatten(1)[None], steps)
            return score(
                tokens,
                torch.arange(len(tokens)) >= example.prompt,
                last,
                [normed[0] for normed in unrolled],
                target=lambda hidden: model.logits(hidden.to(model.dtype)),
                drafter=self._drafter.logits,
                vocabulary=model.config.vocab_size,
                serving=serving,
            )


def _batches(examples: Iterable[Example]) -> Iterator[list[Example]]:
    batch: list[Example] = []
    tokens = 0
    for example in examples:
        if batch and tokens + len(example.tokens) > BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(example)
        tokens += len(example.tokens)
    if batch:
        yield batch
