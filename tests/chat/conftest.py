"""The tiny tokenizer, and Moonshot's own if REDLINE_KIMI_TOKENIZER names its folder."""

import os
from pathlib import Path

import pytest

from redline.chat.tokenizer import Tokenizer
from tests.tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.open(write_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def kimi() -> Tokenizer:
    folder = os.environ.get("REDLINE_KIMI_TOKENIZER")
    if not folder:
        pytest.skip("REDLINE_KIMI_TOKENIZER names no folder with Moonshot's tiktoken.model")
    return Tokenizer.open(Path(folder))
