"""Corpora: skipped lines are reported, and a line cut off by a kill is removed."""

import errno
import os
from pathlib import Path

import msgspec
import pytest

from redline.disk import alone, human
from redline.draft.corpus.corpus import CorpusReader, CorpusWriter, Example, mend, read_examples
from redline.errors import ConfigError


def example(id: str = "a", **changes: object) -> Example:
    fields = {"id": id, "domain": "code", "tokens": (5, 6, 7), "prompt": 2, "finish": "stop", **changes}
    return Example(**fields)  # type: ignore[arg-type]


def write(path: Path, *examples: Example) -> Path:
    with CorpusWriter(path) as writer:
        for one in examples:
            writer.append(one)
    return path


def test_what_is_written_is_read(tmp_path: Path):
    all = [example("a", rounds=((3, 3, 1), (5, 3, 3))), example("b", language="zh", kind="greeting")]
    path = write(tmp_path / "new" / "corpus.jsonl", *all)
    assert read_examples(path) == (all, [])


def test_a_line_that_is_no_example_is_named_with_its_place(tmp_path: Path):
    path = tmp_path / "corpus.jsonl"
    good = msgspec.json.encode(example())
    bad = [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"id": 3}',
        msgspec.json.encode(example("none", tokens=())),
        msgspec.json.encode(example("low", tokens=(1, -2))),
        msgspec.json.encode(example("far", prompt=4)),
        msgspec.json.encode(example("no prompt", prompt=0)),
        good,
    ]
    path.write_bytes(b"\n".join([good, *bad]))
    corpus = read_examples(path)
    assert corpus.examples == [example()]
    assert [message.partition(": ")[0] for message in corpus.skipped] == [f"{path}, line {n}" for n in range(2, 11)]
    reasons = " ".join(corpus.skipped)
    for reason in ("the line is empty", "tokens is empty", "tokens has -2", "prompt is 4", "duplicate id 'a'"):
        assert reason in reasons


def test_a_second_file_does_not_repeat_the_first(tmp_path: Path):
    first, second = write(tmp_path / "1", example("a")), write(tmp_path / "2", example("a"), example("b"))
    reader = CorpusReader(first, second)
    assert [one.id for one in reader] == ["a", "b"]
    assert reader.skipped == [f"{second}, line 1: duplicate id 'a'"]
    assert reader.done == reader.size


def test_a_corpus_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read"):
        read_examples(tmp_path / "none.jsonl")


def test_a_line_that_a_kill_has_cut_goes_before_the_next_is_written(tmp_path: Path):
    whole = msgspec.json.encode(example("a")) + b"\n"
    torn = msgspec.json.encode(example("b", tokens=tuple(range(60_000)), prompt=1)) + b"\n"
    for kept in (0, 1, 30, 70_000, len(torn) - 2):
        path = tmp_path / f"cut at {kept}"
        path.write_bytes(whole + torn[:kept])
        write(path, example("c"))
        assert [one.id for one in read_examples(path).examples] == ["a", "c"]
        assert not read_examples(path).skipped


def test_a_last_line_without_its_end_is_whole(tmp_path: Path):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(msgspec.json.encode(example("a")))
    assert mend(path) == 0
    write(path, example("b"))
    assert [one.id for one in read_examples(path).examples] == ["a", "b"]


def test_a_full_disk_leaves_no_half_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "corpus.jsonl", example("a"))
    before, real = path.read_bytes(), os.write

    def little_room(file: int, data: bytes) -> int:
        if os.fstat(file).st_size >= len(before) + 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[:40])

    with CorpusWriter(path) as writer:
        monkeypatch.setattr(os, "write", little_room)
        with pytest.raises(OSError, match="No space"):
            writer.append(example("b"))
    assert path.read_bytes() == before


def test_two_processes_do_not_write_one_corpus(tmp_path: Path):
    path = tmp_path / "corpus.jsonl"
    with CorpusWriter(path) as writer:
        writer.append(example("a"))
        for second in (CorpusWriter, mend):
            with pytest.raises(ConfigError, match="another process is writing it"):
                second(path)
        assert [one.id for one in read_examples(path).examples] == ["a"]  # reading needs no lock
    write(path, example("b"))
    assert [one.id for one in read_examples(path).examples] == ["a", "b"]


def test_what_fails_before_its_first_example_leaves_no_file(tmp_path: Path):
    def failing(path: Path, *examples: Example) -> None:
        with CorpusWriter(path) as writer:
            for one in examples:
                writer.append(one)
            raise ZeroDivisionError

    for number, examples in enumerate(([], [example("a")])):
        path = tmp_path / f"{number}.jsonl"
        with pytest.raises(ZeroDivisionError):
            failing(path, *examples)
        assert path.exists() == bool(examples)


def test_a_folder_is_one_processs_until_it_ends(tmp_path: Path):
    folder = tmp_path / "new" / "folder"
    with alone(folder), pytest.raises(ConfigError, match="folder: another process"), alone(folder):
        raise AssertionError
    with alone(folder):
        pass


@pytest.mark.parametrize(("size", "text"), [(812, "812 B"), (65_200_000, "65.2 MB"), (1_204_000_000, "1.2 GB")])
def test_bytes_are_told_in_the_unit_that_fits(size: int, text: str):
    assert human(size) == text
