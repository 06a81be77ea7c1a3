"""The target as a teacher: takes token ids, returns the hidden states that a drafter is trained on and compared with.

Every sequence is processed as a prompt: positions use the expanded form of attention, several sequences per call of
`K2.forward`, over their own KV pages. A call has at most `call_tokens` tokens; a longer sequence is processed in
chunks.

n tokens of a sequence, T tokens of a call, L captured layers, D hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from redline.errors import ConfigError
from redline.kernels.inputs import Chunk, Inputs
from redline.messages.job import PAGE_TOKENS
from redline.model.eagle3.config import default_layer_ids
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.config import K2Config
from redline.model.k2.cpu import K2, load
from redline.worker.engine import pick_device

CALL_TOKENS = 8192
CALL_TOKENS_GPU = 65536  # a call is hundreds of launches, regardless of its size
SCORES = 1 << 28  # maximum of heads x chunk x context in the reference attention: 1 GiB of float32


class States(NamedTuple):
    """The target's states over one sequence, bf16, both at the token's own position, not at the previous one."""

    features: Tensor  # [n, L, D]: the residual stream at the input of each captured layer, not normed
    last: Tensor  # [n, D]: the input of the head


@dataclass(frozen=True)
class _Piece:
    """Positions [start, start + count) of a group's sequence."""

    sequence: int
    start: int
    count: int


def layers_of(layer_ids: Sequence[int] | None, target: K2Config) -> tuple[int, ...]:
    """The layers to capture the input of; None: the engines' default. ConfigError if the target lacks such layers."""
    layers = target.num_hidden_layers
    if layer_ids is None:
        return default_layer_ids(layers)
    if not layer_ids or list(layer_ids) != sorted(set(layer_ids) & set(range(layers + 1))):
        raise ConfigError(f"layer_ids is {list(layer_ids)}; expected ascending ids from 0 (the embedding) to {layers}")
    return tuple(layer_ids)


class TargetModel:
    """A loaded K2 and its KV pages, which grow to the size of the largest group of sequences so far.

    fingerprint  of the checkpoint: equal files have equal states
    layer_ids    as in vLLM and SGLang: k is the input of layer k
    call_tokens  maximum tokens of one call of the model
    """

    def __init__(
        self, model: K2, fingerprint: str, layer_ids: Sequence[int] | None = None, call_tokens: int | None = None
    ) -> None:
        """Raises ConfigError if the model does not have these layers."""
        self.model = model
        self.fingerprint = fingerprint
        self.layer_ids = layers_of(layer_ids, model.config)
        self.call_tokens = call_tokens or (CALL_TOKENS_GPU if model.device.type == "cuda" else CALL_TOKENS)
        self._planes = torch.empty(0)

    @classmethod
    def open(
        cls,
        folder: Path | str,
        device: torch.device | None = None,
        layer_ids: Sequence[int] | None = None,
        progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> "TargetModel":
        """Loads a checkpoint. device None: the GPU, if there is one. layer_ids None: the engines' default.

        progress: (bytes read, bytes in total). Raises ConfigError or CheckpointError.
        """
        checkpoint = Checkpoint.open(folder)
        done = 0

        def read(count: int) -> None:
            nonlocal done
            done += count
            progress(done, checkpoint.bytes)

        checkpoint.progress = read
        return cls(load(checkpoint, device or pick_device(None)), checkpoint.fingerprint, layer_ids)

    @property
    def config(self) -> K2Config:
        """The sizes of the model."""
        return self.model.config

    @property
    def embedding(self) -> Tensor:
        """bf16 [V, D]."""
        return self.model.embedding_VD

    @property
    def head(self) -> Tensor:
        """bf16 [V, D]; a copy if the kernels use another layout."""
        return self.model.head.dense()

    def refusal(self, tokens: Sequence[int]) -> str | None:
        """The reason why the target cannot process these tokens; None if it can."""
        reads, vocabulary = self.config.max_position_embeddings, self.config.vocab_size
        if not tokens:
            return "no tokens"
        if len(tokens) > reads:
            return f"{len(tokens):,} tokens; this model supports at most {reads:,}"
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            return f"token id {wrong}; ids go from 0 to {vocabulary - 1}"
        return None

    def features(self, sequences: Sequence[Sequence[int]]) -> list[States]:
        """The states over each sequence of token ids, on the model's device.

        Raises ConfigError for a sequence that the target cannot process (`refusal`).
        """
        for number, tokens in enumerate(sequences):
            if (reason := self.refusal(tokens)) is not None:
                raise ConfigError(f"sequence {number}: {reason}")
        found: list[States] = []
        for group in _groups(sequences, self.call_tokens):
            states = self._room(sum(map(len, group)))  # ordinary tensors: training may need gradients
            with torch.inference_mode():
                self._compute(group, states)
            lengths = [len(tokens) for tokens in group]
            found += map(States, states.features.split(lengths), states.last.split(lengths))
        return found

    def _room(self, tokens: int) -> States:
        shape, device = (tokens, len(self.layer_ids), self.config.hidden_size), self.model.device
        features = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return States(features, features.new_empty(tokens, self.config.hidden_size))

    def _compute(self, group: Sequence[Sequence[int]], states: States) -> None:
        """Fills the states of sequences that share calls; their rows are concatenated. Their pages are kept until all
        of them are done."""
        tables = self._tables([len(tokens) for tokens in group])
        ids = [torch.tensor(tokens, dtype=torch.int64) for tokens in group]
        end = 0
        for call in self._calls(group):
            last_TD, features_TF = self.model.forward(self._inputs(call, ids, tables), self._planes, self.layer_ids)
            assert features_TF is not None
            first, end = end, end + last_TD.shape[0]
            states.features[first:end] = features_TF.unflatten(1, (len(self.layer_ids), -1))
            states.last[first:end] = last_TD

    def _calls(self, group: Sequence[Sequence[int]]) -> Iterator[list[_Piece]]:
        """All positions of the group, in order, at most `call_tokens` per call."""
        call: list[_Piece] = []
        room = self.call_tokens
        for number, tokens in enumerate(group):
            start = 0
            while start < len(tokens):
                if room == 0:
                    yield call
                    call, room = [], self.call_tokens
                longest = max(PAGE_TOKENS, SCORES // (self.config.num_attention_heads * len(tokens)))
                count = min(len(tokens) - start, room, longest)
                call.append(_Piece(number, start, count))
                start, room = start + count, room - count
        if call:
            yield call

    def _inputs(self, call: Sequence[_Piece], ids: Sequence[Tensor], tables: Tensor) -> Inputs:
        device = self.model.device
        slots = torch.cat([torch.full((piece.count,), piece.sequence) for piece in call]).to(device)
        positions = torch.cat([torch.arange(piece.start, piece.start + piece.count) for piece in call]).to(device)
        tokens = torch.cat([ids[piece.sequence][piece.start : piece.start + piece.count] for piece in call]).to(device)
        cos, sin = self.model.angles(positions)
        chunks: list[Chunk] = []
        first = 0
        for piece in call:
            chunks.append(Chunk(first, piece.count, piece.start, piece.sequence))
            first += piece.count
        none = torch.empty(0, dtype=torch.int32, device=device)
        pages = tables[slots, positions // PAGE_TOKENS].long()
        return Inputs(
            ids_T=tokens,
            cos_T=cos,
            sin_T=sin,
            rows_T=pages * PAGE_TOKENS + positions % PAGE_TOKENS,
            chunks=chunks,
            tokens_Q=none,
            slots_Q=none,
            lengths_Q=none,
            tables=tables,
        )

    def _tables(self, lengths: Sequence[int]) -> Tensor:
        """int32 [sequences, pages of the longest]: consecutive pages for each, from a pool that grows on demand."""
        needed = [-(-length // PAGE_TOKENS) for length in lengths]
        if self._planes.numel() == 0 or self._planes.shape[1] < sum(needed):
            config = self.config
            self._planes = torch.empty(0)  # the old pages are freed first
            shape = config.num_hidden_layers, sum(needed), PAGE_TOKENS, config.kv_width
            self._planes = torch.empty(shape, dtype=torch.bfloat16, device=self.model.device)
        tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
        begin = 0
        for number, count in enumerate(needed):
            tables[number, :count] = torch.arange(begin, begin + count, dtype=torch.int32)
            begin += count
        return tables.to(self.model.device)


def _groups(sequences: Sequence[Sequence[int]], tokens: int) -> Iterator[list[Sequence[int]]]:
    """Groups of consecutive sequences that fit into one call; a longer sequence is a group of its own."""
    group: list[Sequence[int]] = []
    total = 0
    for sequence in sequences:
        if group and total + len(sequence) > tokens:
            yield group
            group, total = [], 0
        group.append(sequence)
        total += len(sequence)
    if group:
        yield group
