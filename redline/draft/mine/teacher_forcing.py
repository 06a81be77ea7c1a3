"""Scores a drafter by teacher forcing over the target's states: the forward pass of `mine` and `eval`.

B sequences, T rows of the longest, N tokens of all sequences, D hidden.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from redline.draft.corpus.corpus import Example
from redline.draft.corpus.target import States, TargetModel
from redline.draft.mine.difficulty import Scores, Serving, score
from redline.draft.train.ttt import Way, choose, unroll
from redline.errors import ConfigError
from redline.model.drafter import is_block
from redline.model.eagle3.module import Eagle3
from redline.model.k2.checkpoint import Checkpoint
from redline.worker.engine import pick_device

BATCH_TOKENS = 16_384  # maximum tokens per call of the target, and rows per call of the drafter, padding included


class TeacherForcing:
    """A loaded target and drafter. On a CPU the drafter computes in float32, as in serving, else in bf16."""

    def __init__(self, target: TargetModel, drafter: Eagle3) -> None:
        device, config = target.model.device, drafter.config
        self._target = target
        self._drafter = drafter.to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
        self._drafter.attach(target.embedding, target.head)
        self._way: Way = choose(device, config.num_attention_heads, config.query_width, config.value_width)[0]
        # One sequence keeps a CPU busy; a GPU needs many, since a launch costs about the same for one as for many.
        self.together = 1 if device.type == "cpu" else BATCH_TOKENS

    @classmethod
    def open(cls, target: str, draft: str, device: str | None) -> "TeacherForcing":
        """Loads both from their folders. device None: the GPU, if there is one.

        Raises CheckpointError or ConfigError; a block drafter is refused.
        """
        if is_block(draft):
            raise ConfigError(f"{draft}: a block drafter; teacher forcing, and so mining, scores EAGLE-3 drafters only")
        drafter = Eagle3.open(Path(draft), Checkpoint.open(target).config)
        return cls(TargetModel.open(target, pick_device(device), drafter.config.layer_ids), drafter)

    def refusal(self, example: Example) -> str | None:
        """The reason why the target cannot process the example; None if it can."""
        return self._target.refusal(example.tokens)

    def scores(self, examples: Iterable[Example], steps: int, serving: Serving) -> Iterator[Scores]:
        """Yields the scores of each example, in order. steps: drafts per round.

        Raises ConfigError for an example that the target cannot process (`refusal`).
        """
        for batch in _batches(examples):
            states = self._target.features([example.tokens for example in batch])
            groups = _like_lengths(batch, self.together)
            scored = (
                self._score([batch[place] for place in group], [states[place] for place in group], steps, serving)
                for group in groups
            )
            by_place = dict(zip(chain(*groups), chain(*scored), strict=True))
            yield from (by_place[place] for place in range(len(batch)))

    def _score(
        self, examples: Sequence[Example], states: Sequence[States], steps: int, serving: Serving
    ) -> list[Scores]:
        model, lengths = self._target.model, [len(example.tokens) for example in examples]
        with torch.inference_mode():
            ids = [torch.tensor(example.tokens, dtype=torch.int64) for example in examples]
            answer = [torch.arange(len(example.tokens)) >= example.prompt for example in examples]
            tokens_BT = pad_sequence(ids, batch_first=True).to(model.device)
            features_BTF = pad_sequence([features.flatten(1) for features, _ in states], batch_first=True)
            rows = [torch.arange(length) + line * tokens_BT.shape[1] for line, length in enumerate(lengths)]
            rows_N = torch.cat(rows).to(model.device)  # without padding
            unrolled = unroll(self._drafter, tokens_BT, features_BTF, steps, self._way)
            return score(
                tokens_BT.flatten()[rows_N],
                torch.cat(answer),
                torch.cat([last for _, last in states]),
                [normed.flatten(0, 1)[rows_N] for normed in unrolled],
                lengths,
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


def _like_lengths(batch: Sequence[Example], rows: int) -> list[list[int]]:
    """Indices of the examples in groups of at most `rows` rows each, padding included; a longer one is alone."""
    groups: list[list[int]] = []
    longest = 0
    for place in sorted(range(len(batch)), key=lambda place: -len(batch[place].tokens)):
        if not groups or (len(groups[-1]) + 1) * longest > rows:
            groups.append([])
            longest = len(batch[place].tokens)
        groups[-1].append(place)
    return groups
