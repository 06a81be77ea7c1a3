"""Traces: reading, writing, generating; and the errors for wrong lines."""

import itertools
from collections import Counter
from pathlib import Path

import pytest

from redline.errors import ConfigError
from redline.simulate.traces import AGENTS, BLOCK_TOKENS, CHAT, DOCUMENTS, Phase, made, read, write

LINE = '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 2353]}'


def test_a_line_of_mooncakes_is_read(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE + "\n\n" + LINE.replace("27482", "5"))
    first, second = read(path)
    assert first.at_s == 0.005
    assert second == (27.482, 6955, 52, (46, 47, 48, 2353), "", None)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not a request"),
        (LINE.replace('"input_length": 6955, ', ""), "line 2: .*input_length"),
        (LINE.replace("6955", "0"), "line 2: `input_length` is 0; give 1"),
        (LINE.replace("27482", "-1"), "line 2: `timestamp` is -1"),
        (LINE.replace("52", "-52"), "line 2: `output_length` is -52"),
        (LINE.replace("6955", "1024"), "line 2: `hash_ids` has 4 blocks of 512 tokens; a prompt of 1024 has 2"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, said: str):
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE + "\n" + line)
    with pytest.raises(ConfigError, match=said):
        read(path)


def test_a_file_that_is_missing_or_empty_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="contains no requests"):
        read(tmp_path / "empty.jsonl")


def test_what_is_written_is_read_again(tmp_path: Path):
    requests = list(made([Phase(AGENTS, 60, 2.0)], seed=3))
    assert write(tmp_path / "trace.jsonl", iter(requests)) == len(requests)
    again = read(tmp_path / "trace.jsonl")
    assert [each[1:] for each in again] == [each[1:] for each in requests]
    assert all(abs(a.at_s - b.at_s) <= 0.0006 for a, b in zip(again, requests, strict=True))


def test_phases_come_one_after_another_at_their_rates():
    phases = [Phase(CHAT, 300, 20.0), Phase(DOCUMENTS, 300, 5.0), Phase(AGENTS, 300, 10.0)]
    requests = list(made(phases, seed=1))
    assert [each.at_s for each in requests] == sorted(each.at_s for each in requests)
    assert requests[-1].at_s < 900
    for kind, rate, start in (("chat", 20, 0), ("documents", 5, 300), ("agents", 10, 600)):
        some = [each.at_s for each in requests if each.of == kind]
        assert min(some) >= start
        settled = sum(start + 150 <= at < start + 300 for at in some)
        assert 0.5 * rate < settled / 150 < 1.4 * rate
    begins = sum(each.at_s < 50 for each in requests)
    assert begins > 0.7 * 50 * 20, "sessions that began before the trace are missing in it"
    assert requests == list(made(phases, seed=1))


def test_a_turns_prompt_begins_with_all_blocks_of_the_one_before():
    requests = list(made([Phase(AGENTS, 120, 2.0)], seed=1))
    shared = AGENTS.shared // BLOCK_TOKENS
    assert len({each.blocks[:shared] for each in requests}) == 1
    most, _ = Counter(each.blocks[shared] for each in requests if len(each.blocks) > shared).most_common()[0]
    conversation = [each for each in requests if each.blocks[shared : shared + 1] == (most,)]
    assert len(conversation) > 2
    for before, after in itertools.pairwise(conversation):
        assert after.blocks[: len(before.blocks)] == before.blocks
        assert after.prompt > before.prompt
    assert all(len(each.blocks) == each.prompt // BLOCK_TOKENS for each in requests)
