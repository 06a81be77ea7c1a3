"""Long prompts: the planted sentence is in the right place, once, and answers the question."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nano.data_recall import (
    AFTER,
    CHARACTERS_PER_TOKEN,
    GENERATORS,
    KINDS,
    PLANTED,
    STORY,
    copy,
    families,
    long_recall,
    reading,
    recall,
)
from nano.sample import Sample, Split
from redline.bench.quality.checks import grade
from redline.chat.conversation import Conversation, Message
from redline.chat.template import encode
from redline.chat.tokenizer import Tokenizer

GRADED = ("recall", "reading")


def planted(sample: Sample) -> list[str]:
    found = re.findall(r'^The text says about .*?: "(.*)"$', sample.messages[-1]["reasoning_content"], re.M)
    assert found
    return found


@pytest.mark.parametrize("split", ["train", "values", "families"])
@pytest.mark.parametrize("kind", GRADED)
def test_every_answer_passes_its_check_and_stands_in_the_prompt(kind: str, split: Split) -> None:
    rng = random.Random(f"{kind} {split}")
    for _ in range(200):
        sample = GENERATORS[kind][0](rng, split)
        assert sample.check
        assert grade(sample.check, sample.messages[-1]["content"], []).ok, sample
        prompt = sample.messages[0]["content"]
        assert all(value.lower() in prompt.lower() for value in sample.check["contains"])
        if sample.thinking:
            assert all(sentence in prompt for sentence in planted(sample)), sample


@pytest.mark.parametrize("kind", GRADED)
def test_evaluation_asks_one_question_and_training_many(kind: str) -> None:
    rng = random.Random(1)
    train = [GENERATORS[kind][0](rng, "train") for _ in range(100)]
    assert sum(len(sample.messages) > 4 for sample in train) > 15
    assert sum(sample.thinking and len(planted(sample)) > 2 for sample in train) > 10
    for sample in (GENERATORS[kind][0](rng, "families") for _ in range(20)):
        assert len(sample.messages) == 2
        assert len(planted(sample)) == 1


def test_what_is_copied_stands_in_the_request() -> None:
    rng = random.Random(2)
    for _ in range(500):
        sample = copy(rng, "train")
        assert sample.check is None
        assert all(line in sample.messages[0]["content"] for line in sample.messages[1]["content"].split("\n"))


@pytest.fixture(scope="module")
def count() -> Callable[[str], int]:
    tokenizer = Tokenizer.open(Path(__file__).parents[2] / "models/kimi-nano")
    return lambda text: len(encode(Conversation(messages=(Message("user", text),)), tokenizer))


def test_a_text_has_as_many_tokens_as_were_asked_for(count: Callable[[str], int]) -> None:
    """Plus the tokens of its frame: facts, question, a line before them; 30 to 165 tokens for any length."""
    rng = random.Random(0)
    short, long = (
        [count(recall(rng, "values", characters).messages[0]["content"]) for _ in range(30)]
        for characters in (2_000, 12_000)
    )
    grown = (sum(long) - sum(short)) / 30
    assert grown == pytest.approx(10_000 / CHARACTERS_PER_TOKEN, rel=0.04)
    assert all(0.96 < tokens / (12_000 / CHARACTERS_PER_TOKEN) < 1.06 for tokens in long), sorted(long)
    assert all(0 < tokens - 2_000 / CHARACTERS_PER_TOKEN < 180 for tokens in short), sorted(short)


@pytest.mark.parametrize("split", ["values", "families"])
def test_evaluation_plants_near_token_3500_or_at_a_tenth(split: Split, count: Callable[[str], int]) -> None:
    rng = random.Random(0)
    late = 0
    for _ in range(20):
        sample = long_recall(rng, split)
        prompt = sample.messages[0]["content"]
        assert count(prompt) < 4_096
        at = count(prompt[: prompt.index(planted(sample)[0])])
        assert abs(at - PLANTED) < 250 or 250 < at < 550, at
        late += abs(at - PLANTED) < 250
    assert 5 < late < 20


def test_held_out_facts_and_frames_never_appear_in_training() -> None:
    rng = random.Random(0)
    prompts = [recall(rng, "train", 1_700).messages[0]["content"] for _ in range(600)]
    prompts += [reading(rng, "train").messages[0]["content"] for _ in range(3_000)]
    for fact in KINDS["held"]:
        pattern = re.compile(re.escape(fact.statement).replace(r"\{k\}", r"\w+").replace(r"\{v\}", r"[\w-]+"))
        assert not any(pattern.search(prompt) for prompt in prompts), fact
    for statement, *_ in STORY[3::5]:
        pattern = re.compile(re.escape(statement).replace(r"\{who\}", r"\w+").replace(r"\{v\}", r"[\w:]+"))
        sentences = (sentence for prompt in prompts for sentence in re.split(r"(?<=[.?!]) |\n", prompt))
        assert not any(pattern.fullmatch(sentence) for sentence in sentences), statement
    for held in AFTER.held:
        assert not any(f"\n\n{held.split('{q}')[0]}" in prompt for prompt in prompts if held != "{q}")


def test_the_question_names_exactly_one_of_the_planted_facts() -> None:
    rng = random.Random(3)
    for _ in range(200):
        sample = recall(rng, "values", 400)
        question = sample.messages[0]["content"].split("\n\n")[-1]
        assert sample.check
        assert sample.check["contains"][0] not in question


@pytest.mark.parametrize("kind", GRADED)
def test_a_fifth_of_the_wordings_is_held_out(kind: str) -> None:
    train, held = families(kind)
    assert held / (train + held) >= 0.2


def test_a_seed_gives_the_same_samples() -> None:
    first, second = ([long_recall(random.Random(5), "train") for _ in range(5)] for _ in range(2))
    assert first == second
