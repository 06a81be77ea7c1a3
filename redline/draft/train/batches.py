"""Sequences become batches of like lengths, in an order that depends on the seed alone, made ahead in a thread.

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

from redline.draft.train.losses import Targets
from redline.errors import ConfigError

A = TypeVar("A")
ROWS = 16  # T is a multiple of it
AHEAD = 3  # batches made before they are asked for


class Captured(Protocol):
    """A sequence and the target's states over it (`corpus.capture`)."""

    @property
    def id(self) -> str:
        """The id of the sequence's example; the windows of one example share it."""
        ...

    @property
    def domain(self) -> str:
        """The example's kind of traffic, by which held-out figures are told apart."""
        ...

    @property
    def tokens(self) -> Tensor:
        """The token ids, int64 [n]."""
        ...

    @property
    def loss(self) -> Tensor:
        """bool [n]: True where the token is the answer's."""
        ...

    @property
    def features(self) -> Tensor:
        """The target's states as they enter the captured layers, [n, F]."""
        ...

    @property
    def last(self) -> Tensor:
        """The state that the target's head reads, [n, D]."""
        ...


class Source(Protocol):
    """Where sequences come from: stored, or computed as they are asked for."""

    def sequences(self, epoch: int, seed: int, rank: int = 0, world: int = 1) -> Iterator[Captured]:
        """An epoch in an order of its own, or this rank's part of it: sequences rank, rank + world, ..."""
        ...


class Batch(NamedTuple):
    """Sequences of like lengths, filled up on the right to T rows."""

    tokens: Tensor  # int64 [B, T]
    features: Tensor  # [B, T, F]
    targets: Targets
    sequences: int  # B
    positions: int  # rows that are no filling


def is_held_out(id: str, share: float) -> bool:
    """Whether a sequence is never trained on: by a hash of its id, so the same ones in every run, whatever the seed.

    share: how many of all sequences are held out.
    """
    digest = hashlib.blake2b(id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def usable(sequence: Captured, max_length: int) -> bool:
    """Whether some row predicts a token of the answer within `max_length`: no row predicts the first two tokens."""
    return bool(sequence.loss[2:max_length].any())


def held_out(source: Source, share: float, tokens: int, max_length: int, seed: int) -> list[Captured]:
    """Held-out sequences of the first epoch, until they have `tokens` tokens, each counted up to `max_length`."""
    found: list[Captured] = []
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
) -> Iterator[list[Captured]]:
    """Yields sequences of like lengths, without end: at most `tokens` rows of a batch each, filling included.

    Sequences are gathered for `pool` batches, sorted by length and cut; so filling is a small share wherever lengths
    are spread over less than the pool. share: of sequences that are held out. Raises ConfigError where an epoch has
    nothing to learn from.
    """
    epoch = number = 0
    while True:
        gathered: list[Captured] = []
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


def _rows(sequence: Captured, max_length: int) -> int:
    return -(-min(len(sequence.tokens), max_length) // ROWS) * ROWS


def _cut(
    gathered: list[Captured], tokens: int, max_length: int, name: str
) -> tuple[list[list[Captured]], list[Captured]]:
    """(full batches in random order, what is left for the next time: the shortest)."""
    found: list[list[Captured]] = [[]]
    for sequence in sorted(gathered, key=lambda one: -len(one.tokens)):
        if found[-1] and (len(found[-1]) + 1) * _rows(found[-1][0], max_length) > tokens:
            found.append([])
        found[-1].append(sequence)
    rest = found.pop()
    random.Random(name).shuffle(found)
    return found, rest


def cut(sequences: Sequence[Captured], tokens: int, max_length: int) -> list[list[Captured]]:
    """All of the sequences, in batches of like lengths of at most `tokens` rows, filling included."""
    found, rest = _cut(list(sequences), tokens, max_length, "")
    return [*found, rest]


def collate(group: Sequence[Captured], max_length: int, chunk: int, pin: bool = False) -> Batch:
    """One batch of these sequences, on the CPU, each cut to `max_length` tokens.

    chunk: N is filled up to a multiple of it. pin: in memory that a GPU copies from without waiting.
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
    targets = Targets(
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
    return Batch(tokens, features, targets, len(group), sum(min(len(one.tokens), max_length) for one in group))


def to(batch: Batch, device: torch.device) -> Batch:
    """The batch on another device; copies from pinned memory are not waited for."""
    targets = Targets(*(x.to(device, non_blocking=True) for x in batch.targets))
    tokens, features = (x.to(device, non_blocking=True) for x in (batch.tokens, batch.features))
    return batch._replace(tokens=tokens, features=features, targets=targets)


class Ahead(Iterator[A]):
    """An iterator that runs in a thread of its own, a few items ahead. `close` ends the thread.

    What the items raise is raised by `next` in their place.
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
        except BaseException as error:  # raised where the item would have come
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
        """Ends the thread and waits for it; items that were made ahead are lost."""
        self._closed.set()
        self._thread.join()
