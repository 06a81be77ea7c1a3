"""Prompts for the drafter: equal in answer tokens, the same each time, and none of the held-out ones in training."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano.data import _message, _tool
from nano.draft_prompts import DOMAINS, Exhausted, as_drawn, digest, digests_of, main, opened, samples
from redline.chat.conversation import Conversation
from redline.chat.template import encode
from redline.chat.tokenizer import Tokenizer
from redline.draft.corpus.corpus import read_examples

FOLDER = Path(__file__).parents[2] / "models/kimi-nano"


def made(out: Path, *options: str) -> list[dict[str, Any]]:
    main(["--out", str(out), "--tokenizer", str(FOLDER), "--processes", "1", *options])
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nano.draft_prompts.WAVE", 4)  # otherwise far more prompts are made than requested
        yield tmp_path_factory.mktemp("prompts")


@pytest.fixture(scope="module")
def train(folder: Path) -> list[dict[str, Any]]:
    return made(folder / "train.jsonl", "--answer-tokens", "6000")


def test_domains_are_equal_in_answer_tokens_wherever_the_file_is_cut(
    folder: Path, train: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    made(folder / "half.jsonl", "--count", str(len(train) // 2))
    printed = [line.split() for line in capsys.readouterr().out.splitlines()[:-1]]
    tokens = {words[0]: int(words[5].replace(",", "")) for words in printed}
    assert set(tokens) == set(DOMAINS)
    assert max(tokens.values()) - min(tokens.values()) < 1_500  # about the longest answer
    assert (folder / "half.jsonl").read_text() == "".join(
        line + "\n" for line in (folder / "train.jsonl").read_text().splitlines()[: len(train) // 2]
    )


def test_every_prompt_has_its_own_id_and_says_something_else(train: list[dict[str, Any]]) -> None:
    assert len({line["id"] for line in train}) == len(train)
    assert len({digest(line["messages"], line["tools"]) for line in train}) == len(train)


def test_the_number_of_processes_changes_nothing(folder: Path, train: list[dict[str, Any]]) -> None:
    again = made(folder / "again.jsonl", "--answer-tokens", "6000", "--processes", "2")
    assert again == train


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_prompt_is_what_the_model_was_trained_to_answer(domain: str) -> None:
    encoder, pieces = opened(FOLDER)
    tokenizer = Tokenizer.open(FOLDER)
    for sample in samples(domain, "train", "key", pieces):
        drawn = as_drawn(encoder, "name", domain, sample)
        asked = encoder.prompt(sample)
        assert encode(conversation(drawn.line), tokenizer) == asked
        assert (drawn.prompt, drawn.prompt + drawn.answer) == (len(asked), len(encoder.sample(sample)))


def conversation(line: dict[str, Any]) -> Conversation:
    """The conversation that a server reads from the line."""
    messages = tuple(_message(message, thought=True) for message in line["messages"])
    return Conversation(messages, tuple(map(_tool, line["tools"])), line["thinking"])


def test_documents_of_recall_are_short_middle_and_long(folder: Path) -> None:
    tokenizer = Tokenizer.open(FOLDER)
    lines = made(folder / "recall.jsonl", "--domains", "recall", "--split", "values", "--count", "150")
    lengths = [
        len(tokenizer.encode_pieces((line["messages"][0]["content"],))) for line in lines if line["kind"] == "recall"
    ]
    thirds = [sum(low <= length < high for length in lengths) for low, high in ((0, 800), (800, 2000), (2000, 4000))]
    assert sum(thirds) == len(lengths)
    assert min(thirds) > 0.15 * len(lengths)


def test_no_held_out_prompt_stands_in_training_not_even_at_the_end_of_a_chain(
    folder: Path, train: list[dict[str, Any]]
) -> None:
    first = made(folder / "held.jsonl", "--count", "60", "--split", "families", "--domains", "words")
    chained = train[0] | {"messages": [*train[0]["messages"], *first[0]["messages"]]}
    (folder / "avoid.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (chained, *first[1:30])))
    second = made(
        folder / "held2.jsonl", "--count", "60", "--split", "families", "--domains", "words",
        "--avoid", str(folder / "train.jsonl"), str(folder / "avoid.jsonl"),
    )  # fmt: skip
    forbidden = digests_of([folder / "avoid.jsonl"])
    assert all(digest(line["messages"], line["tools"]) in forbidden for line in first[:30])
    assert not any(digest(line["messages"], line["tools"]) in forbidden for line in second)
    assert [line["messages"] for line in second[:30]] == [line["messages"] for line in first[30:]]


def test_languages_are_told_apart(train: list[dict[str, Any]]) -> None:
    spoken = Counter(line["language"] for line in train if line["domain"] == "words")
    assert {"en", "de", "fr", "nl"} <= set(spoken)
    assert {line["language"] for line in train if line["domain"] == "code"} == {"en"}


def test_a_domain_that_has_no_more_to_say_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano.draft_prompts.LEAST_NEW", 0.5)
    made(folder / "few.jsonl", "--count", "100", "--domains", "chat", "--split", "values", "--seed", "5")
    with pytest.raises(Exhausted, match=r"chat: 2[0-9] different prompts of values"):
        made(
            folder / "none.jsonl", "--count", "64", "--domains", "chat", "--split", "values", "--seed", "5",
            "--avoid", str(folder / "few.jsonl"),
        )  # fmt: skip


def test_the_generators_own_answers_are_examples_that_end_as_the_model_ends(folder: Path) -> None:
    lines = made(folder / "short.jsonl", "--count", "70", "--seed", "3", "--short", "--own", str(folder / "own.jsonl"))
    tokenizer = Tokenizer.open(FOLDER)
    own = read_examples(folder / "own.jsonl")
    assert not own.skipped
    for line, example in zip(lines, own.examples, strict=True):
        assert (example.id, example.domain, example.kind) == (line["id"], line["domain"], line["kind"])
        assert list(example.tokens[: example.prompt]) == encode(conversation(line), tokenizer)
        assert tokenizer.special("<|im_end|>") == example.tokens[-1]
        assert tokenizer.special("<|im_end|>") not in example.tokens[example.prompt : -1]
