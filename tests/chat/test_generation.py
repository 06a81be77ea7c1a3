"""Default sampling parameters of a checkpoint."""

from pathlib import Path

import pytest

from redline.chat.generation import generation_config_of
from redline.errors import ConfigError
from redline.messages.job import Sampling


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("{}", Sampling(max_tokens=1)),
        ('{"temperature": 0.6, "top_p": 0.95, "top_k": null}', Sampling(max_tokens=1, temperature=0.6, top_p=0.95)),
        ('{"top_k": -1}', Sampling(max_tokens=1)),
        ('{"do_sample": false}', Sampling(max_tokens=1, temperature=0.0)),
        ('{"do_sample": false, "temperature": 0.6}', Sampling(max_tokens=1, temperature=0.0)),
        ('{"do_sample": true, "temperature": 0.6}', Sampling(max_tokens=1, temperature=0.6)),
    ],
)
def test_what_the_file_says(tmp_path: Path, text: str, meant: Sampling):
    (tmp_path / "generation_config.json").write_text(text)
    assert generation_config_of(tmp_path) == meant


def test_a_checkpoint_without_the_file(tmp_path: Path):
    assert generation_config_of(tmp_path) == Sampling(max_tokens=1)


def test_a_wrong_value_names_the_file_and_the_field(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"temperature": "warm"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json.*temperature"):
        generation_config_of(tmp_path)


@pytest.mark.parametrize("content", [b'{"a": ' + b"[" * 100_000, b'{"a": "\xff"}', b"[]"])
def test_a_file_that_is_no_json_is_named(tmp_path: Path, content: bytes):
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json: "):
        generation_config_of(tmp_path)


@pytest.mark.parametrize(
    "text",
    ['{"temperature": -1}', '{"temperature": 1e30}', '{"top_p": -1}', '{"top_k": 1099511627776}', '{"min_p": 2}'],
)
def test_a_value_that_no_request_may_ask_for_is_refused_here_too(tmp_path: Path, text: str):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json.*Expected"):
        generation_config_of(tmp_path)


def test_nano_is_greedy():
    assert generation_config_of(Path("models/kimi-nano")).temperature == 0
