import random
from pathlib import Path

import pytest
import tokenizers

from redline.bench.serving.datasets import DatasetConfig, asks
from redline.bench.serving.texts import RandomTexts, natural
from redline.bench.serving.vocabulary import open_vocabulary

NANO = Path("models/kimi-nano")


@pytest.fixture(scope="module", params=["tiktoken.model", "tokenizer.json"])
def vocabulary(request: pytest.FixtureRequest):
    return open_vocabulary(NANO / request.param)


def test_random_texts_have_exactly_the_tokens_asked_for(vocabulary) -> None:
    texts = RandomTexts(vocabulary)
    for seed in range(60):
        draw = random.Random(seed)
        tokens = draw.choice((1, 2, 9, 60, 500, 4002, 4100, 9000))
        opening = draw.randint(1, tokens)
        text = texts.opening(opening, draw) + texts.stretch(tokens - opening, draw)
        assert len(vocabulary.encode(text)) == tokens
        assert text.strip() == text  # so a chat template that strips changes no count


def test_a_vocabulary_with_word_marks_and_a_token_in_front_adds_up_too(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=900, special_tokens=["<unk>", "<s>"], show_progress=False)
    tokenizer.train_from_iterator([natural(9000, None, seed) for seed in range(3)], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = open_vocabulary(tmp_path)
    assert vocabulary.added == 1
    made = asks(DatasetConfig(num_prompts=20, random_input_len=400, random_prefix_len=30), vocabulary, pytest.fail)
    for ask in made:
        assert ask.messages is not None
        assert len(vocabulary.encode(ask.messages[0]["content"])) == ask.prompt_tokens == 429


def test_stretches_of_all_places_and_lengths_add_up() -> None:
    vocabulary = open_vocabulary(NANO)
    texts = RandomTexts(vocabulary)
    for seed in range(300):
        draw = random.Random(seed)
        tokens = draw.randint(0, 200)
        assert len(vocabulary.encode("of" + texts.stretch(tokens, draw))) == len(vocabulary.encode("of")) + tokens


def test_random_texts_spell_no_control_token() -> None:
    vocabulary = open_vocabulary(NANO)
    text = RandomTexts(vocabulary).stretch(8000, random.Random(0))
    assert "<|" not in text
    assert "\ufffd" not in text


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 40, 1000, 30_000])
def test_natural_texts_have_exactly_the_tokens_asked_for(vocabulary, tokens: int) -> None:
    assert len(vocabulary.encode(natural(tokens, vocabulary, 3))) == tokens


def test_natural_texts_are_prose_of_their_own_for_each_seed() -> None:
    vocabulary = open_vocabulary(NANO)
    one, again, other = (natural(800, vocabulary, seed) for seed in (1, 1, 2))
    assert one == again
    assert one.split()[:2] != other.split()[:2]
    shared = set(zip(one.split(), one.split()[1:], strict=False)) & set(
        zip(other.split(), other.split()[1:], strict=False)
    )
    assert len(shared) < len(one.split()) / 2
    assert one.count(". ") > 10


def test_natural_texts_without_a_vocabulary_are_about_as_long() -> None:
    words = len(natural(1000, None, 0).split())
    assert 700 < words < 1000
