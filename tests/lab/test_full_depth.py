"""A model is served at its full depth without its files, and its prompts have the requested lengths."""

import json
import random
from pathlib import Path

import pytest

from lab import full_depth
from redline.chat.tokenizer import Tokenizer
from redline.model.k2.config import K2Config
from redline.model.k2.shapes import shape
from tests import forked
from tests.tiny_tokenizer import RESERVED, words, write_tiny_tokenizer


def test_text_of_whole_words_has_as_many_tokens_as_words(tmp_path: Path):
    tokenizer = Tokenizer.open(write_tiny_tokenizer(tmp_path, words(20_000)))
    assert tokenizer.vocab_size == 256 + 20_000 + RESERVED
    draw = random.Random(0)
    ids = [draw.randrange(256, 20_256) for _ in range(200)]
    assert tokenizer.encode(tokenizer.decode_bytes(ids).decode()) == ids


def test_there_are_no_more_words_than_letters_make():
    with pytest.raises(ValueError, match="500000 merges were asked for; there are 475254"):
        words(500_000)


def test_a_folder_without_weights_is_the_shape(tmp_path: Path):
    full_depth.write_folder(shape("kimi-nano"), tmp_path)
    assert K2Config.from_folder(tmp_path) == shape("kimi-nano")


@pytest.mark.slow
def test_all_streams_are_answered_by_three_layers_in_memory(tmp_path: Path):
    saved, picture = tmp_path / "depth.json", tmp_path / "depth.png"
    words = "--shape kimi-nano --streams 3 --input 96 --output 12 --in-memory 3 --step-ms 500 --device cpu"
    with forked.all_processes():
        full_depth.main([*words.split(), "--save", str(saved), "--picture", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    record = json.loads(saved.read_text())
    (run,) = record["runs"]
    assert (run["layers"], run["layers_in_memory"], run["completed"], run["failed"]) == (8, 3, 3, 0)
    assert run["total_output_tokens"] == 3 * 12
    assert run["total_input_tokens"] == 3 * 96
    assert (run["ended"], run["tracebacks"]) == (0, 0)
    assert run["floor"]["tpot_ms"] > 0
