"""`redline draft capture`: the target's hidden states over a corpus, stored in shards that are listed in an index.

A shard is written under a temporary name, then renamed, then added to the index; files that are not in the index are
not part of the capture. So a kill at any point loses at most the unfinished shard and duplicates nothing.
`StoredCapture` reads a capture; `StreamedCapture` returns the same sequences, in the same order, computed on demand.

S sequences of a shard, N tokens of all of them, L captured layers, D hidden.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from redline import clock
from redline.disk import alone, check_room, human, is_full, sync, unwritable, write_whole
from redline.draft.corpus.corpus import CorpusReader, Example, read_about
from redline.draft.corpus.synth import Told
from redline.draft.corpus.target import TargetModel, layers_of
from redline.errors import ConfigError
from redline.messages.base import Record
from redline.model.k2.checkpoint import Checkpoint
from redline.progress import Working
from redline.worker.engine import pick_device

INDEX = "index.json"
SHARD_BYTES = 256 << 20
SHARD_OVERHEAD = 1024  # maximum bytes of a shard's header: five names, types, shapes and offsets
OPEN_SHARDS = 32  # shards that a reader keeps mapped
NAMED = 20  # maximum number of skipped examples that are printed one by one
INTERRUPTED = 130  # the exit status of shells for SIGINT


class CaptureConfig(Record, frozen=True, kw_only=True):
    """Settings of `redline draft capture`."""

    target: str  # a checkpoint's folder
    corpus: tuple[str, ...]
    out: str  # a folder
    disk: int | None = None  # maximum bytes of the folder
    max_tokens: int | None = None  # longer sequences are split into windows of this length; None: not split
    shard_bytes: int = SHARD_BYTES
    layer_ids: tuple[int, ...] | None = None  # None: the layers that engines capture by default
    other_answers: bool = False  # also accept a corpus with answers of another target
    device: str | None = None  # cpu or cuda; None: the GPU, if there is one


class CaptureShard(Record, frozen=True):
    """A file of tensors: tokens int32 [N], loss uint8 [N], offsets int64 [S + 1], features bf16 [N, L, D], last [N, D].

    Sequence s is rows [offsets[s], offsets[s + 1]); loss is 1 for tokens of the answer.
    """

    file: str
    bytes: int
    tokens: int
    examples: tuple[str, ...]  # ids, one per sequence; windows of one example are adjacent
    domains: tuple[str, ...]
    starts: tuple[int, ...]  # position in its example at which each sequence begins


class Index(Record, frozen=True):
    """The contents of a capture: properties common to all shards, and the shards in order. hidden: D."""

    fingerprint: str  # of the target
    layer_ids: tuple[int, ...]
    hidden: int
    max_tokens: int | None
    bytes_per_token: int
    shards: tuple[CaptureShard, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Bytes of all shards on disk."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def ids(self) -> set[str]:
        """The ids of all stored examples, complete or in windows."""
        return {id for shard in self.shards for id in shard.examples}


@dataclass(frozen=True)
class Sequence_:
    """An example, or a window of one, on the CPU."""

    id: str
    domain: str
    start: int  # position of the window in the example
    tokens: Tensor  # int64 [n]
    loss: Tensor  # bool [n]: True for tokens of the answer
    features: Tensor  # bf16 [n, L * D]
    last: Tensor  # bf16 [n, D]


class CaptureResult(Record, frozen=True):
    """The result of one run of `capture`, and the index after it."""

    index: Index
    tokens: int  # number stored by this run
    seconds: float
    full: bool  # whether it stopped because the next example would exceed `disk`
    skipped: tuple[str, ...]


def run(config: CaptureConfig, console: Console, told: Told = lambda tokens, seconds: None) -> int:
    """Returns 0, also if `disk` is reached; 1 if the disk is full; 130 after Ctrl-C.

    Raises ConfigError, and CheckpointError if the target cannot be read.
    """
    check(config)
    with alone(Path(config.out)):
        return _run(config, console, told)


def _run(config: CaptureConfig, console: Console, told: Told) -> int:
    out = Path(config.out)
    try:
        with Working("reading the corpus") as working:
            _check_room(config)
            working.show(what="loading weights")
            target = TargetModel.open(
                config.target,
                pick_device(config.device),
                config.layer_ids,
                lambda done, total: working.show(done / total, 1.0),
            )
            start = clock.monotonic()

            def show(done: int, total: int, tokens: int) -> None:
                rate = f"{tokens / max(clock.monotonic() - start, 1e-9):,.0f} tokens/s"
                working.show(done / max(total, 1), 1.0, what="capture", note=rate)

            if not config.other_answers:
                taught_by(config.corpus, target.fingerprint)
            console.print(explain(index_of(config, target)), highlight=False)
            done = capture(config, target, show)
    except KeyboardInterrupt:
        console.print(
            f"stopped: {_holds(out)}; run the same command to resume", highlight=False, markup=False, soft_wrap=True
        )
        return INTERRUPTED
    except Exception as error:  # for a full disk safetensors raises its own error type
        if not is_full(error):
            raise
        sweep(out)
        console.print(
            f"the disk is full: {_holds(out)}; run the same command to resume",
            style="red",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return 1
    for message in done.skipped[:NAMED]:
        console.print(f"skipped {message}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    if done.skipped:
        console.print(f"{len(done.skipped):,} examples were skipped", style="yellow", highlight=False)
    told(done.tokens, done.seconds)
    rate = done.tokens / max(done.seconds, 1e-9)
    console.print(
        f"{done.tokens:,} tokens captured ({rate:,.0f} tokens/s); {_holds(out)}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if done.full:
        console.print(
            f"stopped at --disk {human(config.disk or 0)} before the end of the corpus; resume with a larger --disk",
            style="yellow",
            highlight=False,
        )
    elif not done.index.shards:
        raise ConfigError(f"{', '.join(config.corpus)}: contains no example; `redline draft synth` makes a corpus")
    return 0


def capture(
    config: CaptureConfig,
    target: TargetModel,
    progress: Callable[[int, int, int], None] = lambda done, size, tokens: None,
) -> CaptureResult:
    """Stores the states of every example that the folder does not contain yet.

    progress(bytes of the corpus read, bytes in total, tokens computed). Raises ConfigError if the folder contains
    another target's states, OSError or SafetensorError if the disk is full; shards in the index are kept.
    """
    start = clock.monotonic()
    folder = _Folder(Path(config.out), index_of(config, target), config.shard_bytes, config.disk)
    before, computed, full = folder.index.tokens, 0, False
    reader = CorpusReader(*map(Path, config.corpus))
    skipped: list[str] = []
    try:
        for batch in _batches(
            _captured(reader, target, config.max_tokens, folder.index.ids, skipped), target.call_tokens
        ):
            fitting = folder.fitting(batch)
            for example, cut, states in _states(target, batch[:fitting]):
                folder.add(example, cut, *states)
            computed += sum(len(example.tokens) for example, _ in batch[:fitting])
            progress(reader.done, reader.size, computed)
            if fitting < len(batch):
                full = True
                break
    except KeyboardInterrupt:
        folder.write()
        raise
    folder.write()
    return CaptureResult(
        index=folder.index,
        tokens=folder.index.tokens - before,
        seconds=clock.monotonic() - start,
        full=full,
        skipped=(*reader.skipped, *skipped),
    )


def index_of(config: CaptureConfig, target: TargetModel) -> Index:
    """An empty index for a capture of this target."""
    hidden, layers = target.config.hidden_size, len(target.layer_ids)
    return Index(
        fingerprint=target.fingerprint,
        layer_ids=target.layer_ids,
        hidden=hidden,
        max_tokens=config.max_tokens,
        bytes_per_token=token_bytes(layers, hidden),
    )


def taught_by(corpus: Sequence[str], fingerprint: str) -> None:
    """Raises ConfigError if a corpus was answered by a target with another fingerprint than `fingerprint`."""
    for path in corpus:
        about = read_about(Path(path))
        if about is not None and about.fingerprint.split()[0] != fingerprint:
            raise ConfigError(
                f"{path}: answered by a target with fingerprint {about.fingerprint.split()[0]}, this one has "
                f"{fingerprint}: a drafter learns its own target's answers (--other-answers captures others)"
            )


def explain(index: Index) -> str:
    """The bytes per token with their arithmetic, in one line."""
    layers = len(index.layer_ids)
    return (
        f"({layers} layers {list(index.layer_ids)} + 1 last) x {index.hidden:,} x 2 bytes + 4 of id + 1 of loss "
        f"= {index.bytes_per_token:,} bytes per token"
    )


def read_index(folder: Path) -> Index:
    """The index of a capture.

    Raises ConfigError if there is none, or if the size of a shard differs from the size in the index.
    """
    path = folder / INDEX
    try:
        index = msgspec.json.decode(path.read_bytes(), type=Index)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a capture") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    for shard in index.shards:
        file = folder / shard.file
        size = file.stat().st_size if file.exists() else 0
        if size != shard.bytes:
            raise ConfigError(f"{file}: has {size:,} bytes; {INDEX} has {shard.bytes:,}: copy or capture it again")
    return index


def sweep(folder: Path) -> None:
    """Removes leftovers of a killed run: shards that are not in the index, and unfinished files.

    Raises ConfigError if the index exists and cannot be read.
    """
    named = {shard.file for shard in read_index(folder).shards} if (folder / INDEX).exists() else set[str]()
    for path in [*folder.glob("shard-*.safetensors"), *folder.glob(".*.writing")]:
        if path.name not in named:
            path.unlink()


class _Folder:
    """A capture being written. Sequences are collected in memory until they fill a shard."""

    def __init__(self, folder: Path, index: Index, shard_bytes: int, disk: int | None) -> None:
        """Raises ConfigError if the folder contains another capture."""
        self.folder = folder
        self.index = index
        self._shard_bytes = shard_bytes
        self._disk = disk
        self._gathered: list[Sequence_] = []
        self._gathered_bytes = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(folder, error) from None
        if (folder / INDEX).exists():
            self.index = read_index(folder)
            for field in ("fingerprint", "layer_ids", "hidden", "max_tokens"):
                was, now = getattr(self.index, field), getattr(index, field)
                if was != now:
                    raise ConfigError(f"{folder}: captured with {field} {was}, this run has {now}: use another folder")
        sweep(folder)

    def fitting(self, batch: "Sequence[tuple[Example, Sequence[range]]]") -> int:
        """Number of leading examples of the batch that fit within `disk`."""
        if self._disk is None:
            return len(batch)
        # The new index is written to a second file before it replaces the old one.
        used = self.index.bytes + 2 * len(msgspec.json.encode(self.index)) + self._gathered_bytes + 2 * SHARD_OVERHEAD
        for number, (example, cut) in enumerate(batch):
            used += self._cost(example.id, example.domain, cut)
            if used > self._disk:
                return number
        return len(batch)

    def _cost(self, id: str, domain: str, cut: Sequence[range]) -> int:
        """Maximum bytes of an example: its rows, offsets and entries in the index."""
        rows = sum(len(window) for window in cut)
        names = 2 * (len(id.encode()) + len(domain.encode()) + 32)
        return rows * self.index.bytes_per_token + len(cut) * (8 + 2 * names)

    def add(self, example: Example, cut: Sequence[range], features: Tensor, last: Tensor) -> None:
        """Adds an example's states, features [n, L, D] and last [n, D].

        First writes a shard if they would not fit into the current one.
        """
        cost = self._cost(example.id, example.domain, cut)
        if self._gathered and self._gathered_bytes + cost > self._shard_bytes:
            self.write()
        self._gathered += _windows(example, cut, features, last)
        self._gathered_bytes += cost

    def write(self) -> None:
        """Writes the collected sequences as a shard."""
        if not self._gathered:
            return
        lengths = torch.tensor([0, *(len(one.tokens) for one in self._gathered)])
        layers, hidden = len(self.index.layer_ids), self.index.hidden
        tensors = {
            "tokens": torch.cat([one.tokens for one in self._gathered]).int(),
            "loss": torch.cat([one.loss for one in self._gathered]).to(torch.uint8),
            "offsets": lengths.cumsum(0),
            "features": torch.cat([one.features for one in self._gathered]).unflatten(1, (layers, hidden)),
            "last": torch.cat([one.last for one in self._gathered]),
        }
        file = f"shard-{len(self.index.shards):05}.safetensors"
        building = self.folder / f".{file}.writing"
        save_file(tensors, building)
        building.chmod(0o644)  # safetensors makes files that only their owner can read
        sync(building)
        shard = CaptureShard(
            file=file,
            bytes=building.stat().st_size,
            tokens=len(tensors["tokens"]),
            examples=tuple(one.id for one in self._gathered),
            domains=tuple(one.domain for one in self._gathered),
            starts=tuple(one.start for one in self._gathered),
        )
        building.replace(self.folder / file)
        sync(self.folder)
        index = msgspec.structs.replace(self.index, shards=(*self.index.shards, shard))
        write_whole(self.folder / INDEX, msgspec.json.encode(index))
        self.index = index
        self._gathered, self._gathered_bytes = [], 0


# ---------------------------------------------------------------------------------------------------------- sources


class StoredCapture:
    """A capture on disk, as a source of sequences. only: ids of the examples to return; None: all."""

    def __init__(self, folder: Path, fingerprint: str | None = None, only: Collection[str] | None = None) -> None:
        """Raises ConfigError if the capture is broken, empty, or of another target than `fingerprint`."""
        self.index = read_index(folder)
        if not self.index.shards:
            raise ConfigError(f"{folder}: the capture is empty")
        if fingerprint is not None and fingerprint != self.index.fingerprint:
            raise ConfigError(
                f"{folder}: captured from a target with fingerprint {self.index.fingerprint}, this one has "
                f"{fingerprint}: use another folder for this one"
            )
        self._folder = folder
        # (id, shard, sequences [first, end)) of each example
        self._examples: list[tuple[str, int, int, int]] = []
        for number, shard in enumerate(self.index.shards):
            first = 0
            for id, same in groupby(shard.examples):
                end = first + len(list(same))
                if only is None or id in only:
                    self._examples.append((id, number, first, end))
                first = end

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers whose inputs are in the features."""
        return self.index.layer_ids

    def sequences(self, epoch: int, seed: int, rank: int = 0, world: int = 1) -> Iterator[Sequence_]:
        """One epoch, in an order of its own; with several ranks, the examples rank, rank + world, ... of that order.

        Reads only what it returns. Raises ConfigError if a shard is damaged.
        """

        @lru_cache(OPEN_SHARDS)
        def opened(number: int) -> tuple[Any, list[int]]:
            file = self._folder / self.index.shards[number].file
            try:
                tensors = safe_open(file, framework="pt")
                return tensors, tensors.get_tensor("offsets").tolist()
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{file}: damaged ({error}): copy or capture it again") from None

        for place in shuffled([id for id, *_ in self._examples], epoch, seed)[rank::world]:
            id, number, first, end = self._examples[place]
            shard = self.index.shards[number]
            tensors, offsets = opened(number)
            for sequence in range(first, end):
                rows = slice(offsets[sequence], offsets[sequence + 1])
                yield Sequence_(
                    id=id,
                    domain=shard.domains[sequence],
                    start=shard.starts[sequence],
                    tokens=tensors.get_slice("tokens")[rows].long(),
                    loss=tensors.get_slice("loss")[rows].bool(),
                    features=tensors.get_slice("features")[rows].flatten(1),
                    last=tensors.get_slice("last")[rows],
                )


class StreamedCapture:
    """A corpus and its target: the states are computed on demand, one call of the model at a time.

    max_tokens: longer examples are split into windows of this length. skipped: unusable examples, "id: reason".
    """

    def __init__(self, target: TargetModel, examples: Sequence[Example], max_tokens: int | None = None) -> None:
        """Raises ConfigError if no example is usable."""
        self.skipped: list[str] = []
        self._target = target
        self._examples = list(_captured(examples, target, max_tokens, set(), self.skipped))
        if not self._examples:
            raise ConfigError(f"no example that the target supports; {len(self.skipped):,} were skipped")

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers whose inputs are in the features."""
        return self._target.layer_ids

    def sequences(self, epoch: int, seed: int, rank: int = 0, world: int = 1) -> Iterator[Sequence_]:
        """The same sequences as `StoredCapture.sequences` of a capture, in the same order."""
        order = shuffled([example.id for example, _ in self._examples], epoch, seed)[rank::world]
        for batch in _batches((self._examples[place] for place in order), self._target.call_tokens):
            for example, cut, states in _states(self._target, batch):
                yield from _windows(example, cut, *states)


def shuffled(ids: Sequence[str], epoch: int, seed: int) -> list[int]:
    """Indices of the ids in an order that depends only on the ids, the epoch and the seed, not on their positions."""

    def key(place: int) -> bytes:
        return blake2b(f"{seed}/{epoch}/{ids[place]}".encode(), digest_size=16).digest()

    return sorted(range(len(ids)), key=key)


# ------------------------------------------------------------------------------------------------------------ parts


def _captured(
    examples: "CorpusReader | Sequence[Example]",
    target: TargetModel,
    max_tokens: int | None,
    there: set[str],
    skipped: list[str],
) -> Iterator[tuple[Example, list[range]]]:
    """Examples that are not in `there`, with their windows; unusable ones are added to `skipped`."""
    for example in examples:
        if example.id in there:
            continue
        cut = windows(example, max_tokens)
        reason = target.refusal(example.tokens) or (None if cut else "it has no answer")
        if reason is None:
            yield example, cut
        else:
            skipped.append(f"{example.id}: {reason}")


def windows(example: Example, max_tokens: int | None) -> list[range]:
    """The whole example, or windows of `max_tokens` tokens; windows without a token of the answer are dropped."""
    end = len(example.tokens)
    size = max_tokens or end
    cut = (range(start, min(start + size, end)) for start in range(0, end, size))
    return [window for window in cut if window.stop > example.prompt]


def _batches(
    examples: "Iterator[tuple[Example, list[range]]]", tokens: int
) -> Iterator[list[tuple[Example, list[range]]]]:
    """Groups of examples that the target computes in one call."""
    batch: list[tuple[Example, list[range]]] = []
    total = 0
    for example, cut in examples:
        if batch and total + len(example.tokens) > tokens:
            yield batch
            batch, total = [], 0
        batch.append((example, cut))
        total += len(example.tokens)
    if batch:
        yield batch


def _states(
    target: TargetModel, batch: Sequence[tuple[Example, list[range]]]
) -> Iterator[tuple[Example, list[range], tuple[Tensor, Tensor]]]:
    """Each example with its features and last states, for all of its positions, on the CPU."""
    computed = target.features([example.tokens for example, _ in batch])
    for (example, cut), (features, last) in zip(batch, computed, strict=True):
        yield example, cut, (features.cpu(), last.cpu())


def _windows(example: Example, cut: Sequence[range], features: Tensor, last: Tensor) -> list[Sequence_]:
    tokens = torch.tensor(example.tokens, dtype=torch.int64)
    answer = torch.arange(len(tokens)) >= example.prompt
    return [
        Sequence_(
            id=example.id,
            domain=example.domain,
            start=window.start,
            tokens=tokens[window.start : window.stop],
            loss=answer[window.start : window.stop],
            features=features[window.start : window.stop].flatten(1),
            last=last[window.start : window.stop],
        )
        for window in cut
    ]


def check(config: CaptureConfig) -> None:
    """Raises ConfigError if a setting is wrong or missing, and CheckpointError if the target cannot be read.

    Does not load the model.
    """
    if not config.corpus:
        raise ConfigError("corpus: nothing to capture; give a file written by `redline draft synth`")
    for name in ("disk", "max_tokens", "shard_bytes"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; expected more than 0")
    pick_device(config.device)
    layers_of(config.layer_ids, Checkpoint.open(config.target).config)


def _check_room(config: CaptureConfig) -> None:
    """Raises ConfigError if the disk has less free space than the states still to be stored need.

    They need at most the part of `disk` that is not used yet.
    """
    out, target = Path(config.out), Checkpoint.open(config.target).config
    index = read_index(out) if (out / INDEX).exists() else None
    there = set[str]() if index is None else index.ids
    reader = CorpusReader(*map(Path, config.corpus))
    tokens = sum(len(example.tokens) for example in reader if example.id not in there)
    layers = len(layers_of(config.layer_ids, target))
    needed = tokens * token_bytes(layers, target.hidden_size)
    if config.disk is not None:
        needed = min(needed, config.disk - (0 if index is None else index.bytes))
    otherwise = "store what fits (--disk SIZE)"
    check_room(out, needed, f"the states of {tokens:,} tokens take", otherwise)


def token_bytes(layers: int, hidden: int) -> int:
    """Bytes per stored token: bf16 states of the captured layers and the last one, 4 for its id, 1 for its loss."""
    return (layers + 1) * hidden * 2 + 4 + 1


def _holds(out: Path) -> str:
    if not (out / INDEX).exists():
        return f"{out} is empty"
    index = read_index(out)
    return (
        f"{out} holds {len(index.ids):,} examples, {index.tokens:,} tokens, {human(index.bytes)} in "
        f"{len(index.shards):,} shard{'s' * (len(index.shards) != 1)}"
    )
