"""A capture: every file in the index is complete after any failure; stored and streamed sequences are equal."""

import errno
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from rich.console import Console
from safetensors import SafetensorError

from redline.disk import alone
from redline.draft.corpus import capture as room
from redline.draft.corpus.capture import (
    CaptureConfig,
    Sequence_,
    StoredCapture,
    StreamedCapture,
    capture,
    read_index,
    run,
    windows,
)
from redline.draft.corpus.corpus import About, CorpusWriter, Example, claim, read_examples
from redline.draft.corpus.target import TargetModel
from redline.errors import ConfigError
from redline.model.k2.write import random_checkpoint
from tests.tiny_model import kernel_config, prompt

LENGTHS = (10, 40, 3, 100, 64, 7, 150, 30, 20, 90)


def example(number: int, length: int, start: int = 2) -> Example:
    domain = ("code", "math")[number % 2]
    return Example(id=f"e{number}", domain=domain, tokens=prompt(number, length), prompt=start, finish="stop")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    random_checkpoint(folder, kernel_config())
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> TargetModel:
    return TargetModel.open(folder, torch.device("cpu"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    with CorpusWriter(path) as writer:
        for number, length in enumerate(LENGTHS):
            writer.append(example(number, length))
    return path


@pytest.fixture
def config(folder: Path, corpus: Path, tmp_path: Path) -> CaptureConfig:
    """About three sequences in a shard."""
    return CaptureConfig(
        target=str(folder), corpus=(str(corpus),), out=str(tmp_path / "capture"), shard_bytes=60_000, device="cpu"
    )


def change(config: CaptureConfig, **changes: object) -> CaptureConfig:
    return msgspec.structs.replace(config, **changes)


def everything(source: StoredCapture | StreamedCapture, **order: int) -> list[Sequence_]:
    return list(source.sequences(order.pop("epoch", 0), order.pop("seed", 0), **order))


def same(a: Sequence_, b: Sequence_) -> bool:
    tensors = ("tokens", "loss", "features", "last")
    return (a.id, a.domain, a.start) == (b.id, b.domain, b.start) and all(
        getattr(a, name).dtype == getattr(b, name).dtype and torch.equal(getattr(a, name), getattr(b, name))
        for name in tensors
    )


def quietly(config: CaptureConfig) -> tuple[int, str]:
    text = io.StringIO()
    return run(config, Console(file=text, width=500)), text.getvalue()


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_what_is_stored_is_what_the_target_thinks(config: CaptureConfig, target: TargetModel):
    capture(config, target)
    found = {one.id: one for one in everything(StoredCapture(Path(config.out), target.fingerprint))}
    assert len(found) == len(LENGTHS)
    for number, length in enumerate(LENGTHS):
        one = found[f"e{number}"]
        ((features, last),) = target.features([list(prompt(number, length))])
        assert torch.equal(one.features, features.flatten(1))
        assert torch.equal(one.last, last)
        assert tuple(one.tokens.tolist()) == prompt(number, length)
        assert one.loss.tolist() == [False] * 2 + [True] * (length - 2)
        assert one.domain == ("code", "math")[number % 2]


@pytest.mark.parametrize("max_tokens", [None, 32])
def test_stored_and_streamed_are_the_same(
    config: CaptureConfig, corpus: Path, target: TargetModel, max_tokens: int | None
):
    capture(change(config, max_tokens=max_tokens), target)
    stored, streamed = (
        StoredCapture(Path(config.out)),
        StreamedCapture(target, read_examples(corpus).examples, max_tokens),
    )
    assert stored.layer_ids == streamed.layer_ids
    for epoch in (0, 1):
        a, b = everything(stored, epoch=epoch), everything(streamed, epoch=epoch)
        assert all(same(*pair) for pair in zip(a, b, strict=True))


def test_an_epoch_has_an_order_of_its_own_and_every_rank_its_part(config: CaptureConfig, target: TargetModel):
    capture(config, target)
    stored = StoredCapture(Path(config.out))
    first = [one.id for one in everything(stored, epoch=0)]
    assert first == [one.id for one in everything(stored, epoch=0)]
    others = [[one.id for one in everything(stored, **order)] for order in ({"epoch": 1}, {"seed": 1})]
    assert all(sorted(other) == sorted(first) != other != first for other in others)
    parts = [[one.id for one in everything(stored, rank=rank, world=3)] for rank in range(3)]
    assert parts == [first[0::3], first[1::3], first[2::3]]


def test_windows_have_the_states_of_the_whole_sequence(config: CaptureConfig, target: TargetModel):
    capture(change(config, max_tokens=32), target)
    found = [one for one in everything(StoredCapture(Path(config.out))) if one.id == "e3"]
    ((features, _),) = target.features([list(prompt(3, 100))])
    assert [(one.start, len(one.tokens)) for one in found] == [(0, 32), (32, 32), (64, 32), (96, 4)]
    assert torch.equal(torch.cat([one.features for one in found]), features.flatten(1))


def test_windows_without_an_answer_are_left_out():
    assert windows(example(0, 100, start=64), 32) == [range(64, 96), range(96, 100)]
    assert windows(example(0, 100, start=63), 32)[0] == range(32, 64)
    assert windows(example(0, 100, start=63), None) == [range(100)]
    assert windows(example(0, 100, start=100), None) == []


def test_a_token_takes_the_bytes_that_are_announced(config: CaptureConfig, target: TargetModel):
    _, text = quietly(config)
    index = read_index(Path(config.out))
    assert index.bytes_per_token == 4 * target.config.hidden_size * 2 + 5
    assert f"= {index.bytes_per_token:,} bytes per token" in text
    assert index.tokens == sum(LENGTHS)
    assert index.bytes == pytest.approx(index.tokens * index.bytes_per_token, rel=0.05)


STEPS = ("save_file", "sync", "replace", "write_whole")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_at_any_step_loses_and_doubles_nothing(
    config: CaptureConfig, target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
):
    capture(change(config, out=str(tmp_path / "whole")), target)
    whole = everything(StoredCapture(tmp_path / "whole"))
    owner = Path if step == "replace" else room
    real: Callable[..., object] = getattr(owner, step)

    class Killed(BaseException):
        pass

    for turn in (1, 2, 1):
        calls = 0

        def killed(*arguments: object, turn: int = turn) -> object:
            nonlocal calls
            calls += 1
            if calls == turn and not after:
                raise Killed
            result = real(*arguments)
            if calls == turn:
                raise Killed
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, step, killed)
            with pytest.raises(Killed):
                capture(config, target)
    capture(config, target)
    index = read_index(Path(config.out))
    ids = [id for shard in index.shards for id in shard.examples]
    assert sorted(ids) == sorted(f"e{number}" for number in range(len(LENGTHS)))
    assert all(same(*pair) for pair in zip(everything(StoredCapture(Path(config.out))), whole, strict=True))
    files = {path.name for path in Path(config.out).iterdir()}
    assert files == {"index.json", *(shard.file for shard in index.shards)}


def test_ctrl_c_keeps_what_is_computed_and_the_next_run_goes_on(
    config: CaptureConfig, target: TargetModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(target, "call_tokens", 100)

    def interrupt(done: int, size: int, tokens: int) -> None:
        if tokens > 150:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(config, target, interrupt)
    kept = read_index(Path(config.out)).ids
    assert 3 < len(kept) < len(LENGTHS)
    assert capture(config, target).tokens == sum(LENGTHS) - sum(LENGTHS[: len(kept)])


def test_the_folder_stays_within_its_disk_and_grows_when_it_may(config: CaptureConfig):
    """For any limit: the folder never exceeds it, and a sequence is stored as soon as one fits."""
    sizes: list[int] = []
    for disk in (5_000, 30_000, 100_000, 150_000, 10_000_000):
        status, text = quietly(change(config, disk=disk))
        assert status == 0
        assert ("stopped at --disk" in text) == (disk < 10_000_000)
        sizes.append(len(read_index(Path(config.out)).ids) if (Path(config.out) / "index.json").exists() else 0)
        assert on_disk(Path(config.out)) <= disk
    assert sizes[0] == 0 < sizes[1] < sizes[2] < sizes[3] < sizes[4] == len(LENGTHS)


def test_the_folder_stays_within_its_disk_at_every_moment(
    config: CaptureConfig, corpus: Path, target: TargetModel, monkeypatch: pytest.MonkeyPatch
):
    """Also during a replacement of the index, when the old and the new one exist. They are most of the bytes here:
    answers are short, and ids are long with characters that JSON escapes. Two examples per call, several calls per
    shard."""
    examples = [change(example(n, 3), id=f"{n} " + 700 * '"') for n in range(30)]
    corpus.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in examples))
    monkeypatch.setattr(target, "call_tokens", 6)
    peak, replace = 0, Path.replace

    def measure(path: Path, target: Path) -> Path:
        nonlocal peak
        peak = max(peak, on_disk(path.parent))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", measure)
    stored: list[int] = []
    for disk in (*range(5_000, 12_000, 100), *range(12_000, 220_000, 4_900)):
        shutil.rmtree(config.out, ignore_errors=True)
        peak = 0
        done = capture(change(config, disk=disk, shard_bytes=60_000), target)
        assert max(peak, on_disk(Path(config.out))) <= disk
        stored.append(len(done.index.ids))
    assert stored == sorted(stored)
    assert (stored[0], stored[-1]) == (0, 30)


def test_a_shards_header_takes_no_more_than_is_counted_for_it(config: CaptureConfig, target: TargetModel):
    for shard in capture(config, target).index.shards:
        with open(Path(config.out) / shard.file, "rb") as file:
            header = 8 + int.from_bytes(file.read(8), "little") + 8 * (len(shard.examples) + 1)
        assert room.SHARD_OVERHEAD / 4 < header <= room.SHARD_OVERHEAD


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_stops_with_one_line_and_the_next_run_goes_on(
    config: CaptureConfig, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    real, shards = room.save_file, 0

    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        nonlocal shards
        shards += 1
        if shards == 3:
            path.write_bytes(b"half")
            raise error
        real(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(room, "save_file", full)
        status, text = quietly(config)
    assert status == 1
    assert "the disk is full" in text.splitlines()[-1]
    assert "in 2 shards; run the same command to resume" in text
    assert not [path for path in Path(config.out).iterdir() if path.name.endswith(".writing")]
    assert quietly(config)[0] == 0
    assert len(everything(StoredCapture(Path(config.out)))) == len(LENGTHS)


def test_another_targets_capture_is_refused(config: CaptureConfig, target: TargetModel, tmp_path: Path):
    capture(config, target)
    other = TargetModel(target.model, "another")
    with pytest.raises(ConfigError, match=rf"captured with fingerprint {target.fingerprint}, this run has another"):
        capture(config, other)
    with pytest.raises(ConfigError, match="this one has another"):
        StoredCapture(Path(config.out), "another")
    with pytest.raises(ConfigError, match=r"captured with layer_ids \(0, 2, 3\), this run has \(0, 1, 2\)"):
        capture(config, TargetModel(target.model, target.fingerprint, (0, 1, 2)))
    with pytest.raises(ConfigError, match="captured with max_tokens None, this run has 16"):
        capture(change(config, max_tokens=16), target)


def test_answers_of_another_target_are_captured_only_when_that_is_wanted(config: CaptureConfig, corpus: Path):
    claim(corpus, About(fingerprint="another bf16", temperature=1.0, top_p=1.0, top_k=0, min_p=0.0))
    with pytest.raises(ConfigError, match="answered by a target with fingerprint another, this one has"):
        quietly(config)
    assert quietly(change(config, other_answers=True))[0] == 0


def test_a_corpus_without_an_example_is_refused(config: CaptureConfig, tmp_path: Path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(ConfigError, match=r"empty\.jsonl: contains no example"):
        quietly(change(config, corpus=(str(empty),)))


def test_a_capture_that_the_disk_cannot_hold_does_not_begin(config: CaptureConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=30_000))
    monkeypatch.setattr(TargetModel, "open", None)
    with pytest.raises(
        ConfigError, match=r"the states of 514 tokens take .* and 30 kB are free: make room, or store what fits"
    ):
        quietly(config)
    monkeypatch.undo()
    assert quietly(change(config, disk=10_000_000))[0] == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    assert quietly(config)[0] == 0, "all sequences are stored already"


def test_a_shard_whose_bytes_are_not_a_shards_is_named(config: CaptureConfig, target: TargetModel):
    capture(config, target)
    shard = Path(config.out) / "shard-00001.safetensors"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(ConfigError, match=r"shard-00001.safetensors: damaged"):
        everything(StoredCapture(Path(config.out)))


def test_two_runs_do_not_write_one_capture(config: CaptureConfig):
    with alone(Path(config.out)), pytest.raises(ConfigError, match="another process is writing it"):
        quietly(config)


def test_a_shard_that_is_cut_or_gone_is_named(config: CaptureConfig, target: TargetModel):
    capture(config, target)
    shard = Path(config.out) / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"shard-00001\.safetensors: has [\d,]+ bytes; index\.json has"):
        StoredCapture(Path(config.out))
    shard.unlink()
    with pytest.raises(ConfigError, match=r"shard-00001\.safetensors: has 0 bytes"):
        StoredCapture(Path(config.out))


def test_examples_that_give_nothing_are_named_and_counted(config: CaptureConfig, corpus: Path, target: TargetModel):
    with CorpusWriter(corpus) as writer:
        writer.append(example(20, 5, start=5))
        writer.append(Example(id="far", domain="code", tokens=(1, 2, 100_000), prompt=1, finish="stop"))
    corpus.write_bytes(corpus.read_bytes() + b"nothing\n")
    status, text = quietly(config)
    assert status == 0
    for reason in ("e20: it has no answer", "far: token id 100000", f"{corpus}, line 13", "3 examples were skipped"):
        assert reason in text
    assert len(StreamedCapture(target, read_examples(corpus).examples).skipped) == 2


def test_sources_without_a_sequence_are_refused(tmp_path: Path, target: TargetModel):
    with pytest.raises(ConfigError, match=r"index\.json: cannot be read"):
        StoredCapture(tmp_path)
    with pytest.raises(ConfigError, match="no example that the target supports"):
        StreamedCapture(target, [])


def test_what_no_index_names_is_removed_before_the_folder_grows(config: CaptureConfig, target: TargetModel):
    folder = Path(config.out)
    folder.mkdir()
    for name in ("shard-00099.safetensors", ".shard-00000.safetensors.writing", "notes.txt"):
        (folder / name).write_bytes(b"left")
    capture(config, target)
    assert {path.name for path in folder.iterdir()} - {shard.file for shard in read_index(folder).shards} == {
        "index.json",
        "notes.txt",
    }
