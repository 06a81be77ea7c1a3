"""Translations and facts: the tables are sound, the answers pass, the held-out questions stay out of training."""

import random
from collections import Counter

import pytest

from nano import data_words
from nano.data_words import FROM_ENGLISH, GENERATORS, INTO_ENGLISH, PAIRS, RELATIONS, SCIENCE, families
from nano.sample import Sample, Split
from nano.wordings import reserved
from redline.bench.quality.checks import grade


def drawn(kind: str, split: Split, count: int = 1_000) -> list[Sample]:
    rng = random.Random(f"{kind} {split}")
    return [GENERATORS[kind][0](rng, split) for _ in range(count)]


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("split", ["train", "values", "families"])
def test_every_answer_passes_its_check(kind: str, split: Split) -> None:
    for sample in drawn(kind, split):
        assert sample.check
        verdict = grade(sample.check, sample.messages[-1]["content"], [])
        assert verdict.ok, (verdict, sample)


@pytest.mark.parametrize("kind", GENERATORS)
def test_prompts_and_answers_have_no_hole(kind: str) -> None:
    for split in ("train", "values", "families"):
        for sample in drawn(kind, split):
            assert not any(mark in message["content"] for message in sample.messages for mark in "{}|"), sample


def test_every_translation_is_there_in_every_language() -> None:
    for name, languages in (("lexicon.txt", 6), ("phrases.txt", 6), ("lexicon_scripts.txt", 3)):
        rows = data_words._table(name)
        assert all(len(row) == languages + 1 for row in rows)
        assert not [word for word, count in Counter(row[0] for row in rows).items() if count > 1]
    assert len(PAIRS) == 6 * (282 + 60) + 3 * 45


def test_capitals_are_different_cities() -> None:
    capitals = Counter(row[1] for row in next(r for r in RELATIONS if r.name == "capital").rows)
    assert len(capitals) >= 120
    assert max(capitals.values()) == 1


def test_every_science_answer_holds_its_key_word() -> None:
    for _, _, answer, keys in SCIENCE:
        assert any(key.casefold() in answer.casefold() for key in keys.split(", ")), answer


def test_every_relation_is_asked_in_twenty_ways_of_which_a_fifth_is_held_out() -> None:
    for relation in RELATIONS:
        train, held = relation.asked
        assert len(train) + len(held) >= 20, relation.name
        assert len(held) / (len(train) + len(held)) >= 0.2, relation.name


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_fifth_of_the_wordings_is_held_out(kind: str) -> None:
    train, held = families(kind)
    assert held / (train + held) >= 0.2


def test_held_out_questions_never_appear_in_training() -> None:
    prompts = {sample.messages[0]["content"].lower().rstrip(".?!") for sample in drawn("fact", "train", 20_000)}
    for relation in RELATIONS:
        for row in relation.rows:
            for held in relation.asked.held:
                assert data_words._sentence(held, row).lower().rstrip(".?!") not in prompts
    lexicon = {sample.messages[0]["content"].lower().rstrip(".?!") for sample in drawn("lexicon", "train", 20_000)}
    for pair in PAIRS:
        for held, word in (
            *((h, pair.english) for h in FROM_ENGLISH.held),
            *((h, pair.foreign) for h in INTO_ENGLISH.held),
        ):
            question = held.replace("{L}", pair.language).replace("{w}", f'"{word}"')
            assert question.lower().rstrip(".?!") not in lexicon


def test_values_are_pairs_that_training_never_shows() -> None:
    train = {sample.messages[0]["content"] for sample in drawn("fact", "train", 20_000)}
    values = [sample.messages[0]["content"] for sample in drawn("fact", "values")]
    assert not train & set(values)
    assert sum(reserved(i) for i in range(8_000)) == pytest.approx(1_000, rel=0.15)


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_seed_gives_the_same_samples(kind: str) -> None:
    assert drawn(kind, "train", 50) == drawn(kind, "train", 50)
