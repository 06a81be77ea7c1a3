"""Batches of sequences of similar length, in an order that depends only on the seed, prepared ahead in a thread.

B sequences, T rows, F target features, D hidden, N answer tokens.
"""

import hashlib
import queue
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from redline.draft.train.losses import TrainTargets
from redline.errors import ConfigError

A = TypeVar("A")
ROWS = 16  # T is a multiple of this
AHEAD = 3  # number of batches prepared in advance


class TrainSequence(Protocol):
    """A sequence and the target's states over it (`corpus.capture`)."""

    @property
    def id(self) -> str:
        """The id of the sequence's example; windows of one example share it."""
        ...

    @property
    def domain(self) -> str:
        """The example's kind of traffic; held-out results are reported by domain."""
        ...

    @property
    def tokens(self) -> Tensor:
        """The token ids, int64 [n]."""
        ...

    @property
    def loss(self) -> Tensor:
        """bool [n]: True for tokens of the answer."""
        ...

    @property
    def features(self) -> Tensor:
        """The target's states at the input of the captured layers, [n, F]."""
        ...

    @property
    def last(self) -> Tensor:
        """The input of the target's head, [n, D]."""
        ...


class Source(Protocol):
    """A source of sequences: stored, or computed on demand."""

    def sequences(self, epoch: int, seed: int, rank: int = 0, world: int = 1) -> Iterator[TrainSequence]:
        """One epoch, in an order of its own, or this rank's part of it: sequences rank, rank + world, ..."""
        ...


class TrainBatch(NamedTuple):
    """Sequences of similar length, padded on the right to T rows."""

    tokens: Tensor  # int64 [B, T]
    features: Tensor  # [B, T, F]
    targets: TrainTargets
    sequences: int  # B
    positions: int  # number of rows that are not padding


def is_held_out(id: str, share: float) -> bool:
    """Whether a sequence is held out from training: by a hash of its id, so the same in every run and for every seed.

    share: share of all sequences to hold out.
    """
    digest = hashlib.blake2b(id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def usable(sequence: TrainSequence, max_length: int) -> bool:
    """Whether any row predicts an answer token within `max_length`; the first two tokens are never predicted."""
    return bool(sequence.loss[2:max_length].any())


def held_out(source: Source, share: float, tokens: int, max_length: int, seed: int) -> list[TrainSequence]:
    """Held-out sequences of the first epoch with at least `tokens` tokens in total, each counted up to `max_length`."""
    found: list[TrainSequence] = []
    total = 0
    for sequence in source.sequences(0, seed) if share > 0 else ():
        if is_held_out(sequence.id, share) and usable(sequence, max_length):
            found.append(sequence)
            total += min(len(sequence.tokens), max_length)
            if total >= tokens:
                break
    return found


def groups(
    source: Source,
    *,
    tokens: int,
    max_length: int,
    pool: int,
    share: float,
    seed: int,
    rank: int = 0,
    world: int = 1,
) -> Iterator[list[TrainSequence]]:
    """Yields groups of sequences of similar length, endlessly: at most `tokens` rows per batch, padding included.

    Sequences are collected for `pool` batches, sorted by length and split, so padding is a small share if the pool has
    enough sequences of each length. share: share of sequences held out. Raises ConfigError if an epoch has nothing to
    train on.
    """
    epoch = number = 0
    while True:
        gathered: list[TrainSequence] = []
        rows = seen = 0
        for sequence in source.sequences(epoch, seed, rank, world):
            if is_held_out(sequence.id, share) or not usable(sequence, max_length):
                continue
            seen += 1
            gathered.append(sequence)
            rows += _rows(sequence, max_length)
            if rows >= pool * tokens:
                whole, gathered = _cut(gathered, tokens, max_length, f"{seed} {epoch} {number}")
                rows = sum(_rows(one, max_length) for one in gathered)
                number += 1
                yield from whole
        if not seen:
            raise ConfigError("the capture has no sequence with an answer to train on: capture a corpus with answers")
        whole, rest = _cut(gathered, tokens, max_length, f"{seed} {epoch} {number}")
        yield from [*whole, rest] if rest else whole
        epoch, number = epoch + 1, 0


def _rows(sequence: TrainSequence, max_length: int) -> int:
    return -(-min(len(sequence.tokens), max_length) // ROWS) * ROWS


def _cut(
    gathered: list[TrainSequence], tokens: int, max_length: int, name: str
) -> tuple[list[list[TrainSequence]], list[TrainSequence]]:
    """(full batches in random order, the remaining sequences, which are the shortest)."""
    found: list[list[TrainSequence]] = [[]]
    for sequence in sorted(gathered, key=lambda one: -len(one.tokens)):
        if found[-1] and (len(found[-1]) + 1) * _rows(found[-1][0], max_length) > tokens:
            found.append([])
        found[-1].append(sequence)
    rest = found.pop()
    random.Random(name).shuffle(found)
    return found, rest


def cut(sequences: Sequence[TrainSequence], tokens: int, max_length: int) -> list[list[TrainSequence]]:
    """All sequences, in batches of similar length of at most `tokens` rows, padding included."""
    found, rest = _cut(list(sequences), tokens, max_length, "")
    return [*found, rest]


def collate(group: Sequence[TrainSequence], max_length: int, chunk: int, pin: bool = False) -> TrainBatch:
    """One batch of these sequences, on the CPU, each truncated to `max_length` tokens.

    chunk: N is padded to a multiple of it. pin: in pinned memory, for asynchronous copies to a GPU.
    """
    rows = max(_rows(one, max_length) for one in group)
    first = group[0]
    tokens = torch.zeros(len(group), rows, dtype=torch.int64, pin_memory=pin)
    features = torch.zeros(len(group), rows, first.features.shape[-1], dtype=first.features.dtype, pin_memory=pin)
    places = [one.loss[:max_length].clone() for one in group]
    for number, one in enumerate(group):
        length = min(len(one.tokens), max_length)
        tokens[number, :length] = one.tokens[:length]
        features[number, :length] = one.features[:length]
        places[number][:2] = False
    found = [place.nonzero()[:, 0] for place in places]
    total = sum(map(len, found))
    count = max(1, -(-total // chunk)) * chunk
    targets = TrainTargets(
        torch.zeros(count, dtype=torch.int64, pin_memory=pin),
        torch.full((count,), -1, dtype=torch.int64, pin_memory=pin),
        torch.zeros(count, dtype=torch.int64, pin_memory=pin),
        torch.zeros(count, first.last.shape[-1], dtype=first.last.dtype, pin_memory=pin),
    )
    begin = 0
    for number, (one, place) in enumerate(zip(group, found, strict=True)):
        part = slice(begin, begin + len(place))
        targets.rows_N[part] = place + number * rows
        targets.places_N[part] = place
        targets.sequences_N[part] = number
        torch.index_select(one.last, 0, place - 1, out=targets.last_ND[part])
        begin += len(place)
    return TrainBatch(tokens, features, targets, len(group), sum(min(len(one.tokens), max_length) for one in group))


def to(batch: TrainBatch, device: torch.device) -> TrainBatch:
    """The batch on another device; copies from pinned memory are asynchronous."""
    targets = TrainTargets(*(x.to(device, non_blocking=True) for x in batch.targets))
    tokens, features = (x.to(device, non_blocking=True) for x in (batch.tokens, batch.features))
    return batch._replace(tokens=tokens, features=features, targets=targets)


class PrefetchIterator(Iterator[A]):
    """An iterator that runs in its own thread, a few items ahead. `close` ends the thread.

    An exception of the underlying iterator is raised by `next` at the position of its item.
    """

    def __init__(self, items: Iterable[A], ahead: int = AHEAD) -> None:
        self._queue: queue.Queue[tuple[A | None, BaseException | None]] = queue.Queue(ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(iter(items),), daemon=True, name="batches")
        self._thread.start()

    def _run(self, items: Iterator[A]) -> None:
        try:
            for item in items:
                if not self._put((item, None)):
                    return
            self._put((None, StopIteration()))
        except BaseException as error:  # re-raised by `next` at this item's position
            self._put((None, error))

    def _put(self, entry: tuple[A | None, BaseException | None]) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(entry, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def __next__(self) -> A:
        item, error = self._queue.get()
        if error is not None:
            self._put((None, error))
            raise error
        return item  # type: ignore[return-value]

    def close(self) -> None:
        """Ends the thread and waits for it; items prepared in advance are dropped."""
        self._closed.set()
        self._thread.join()
