import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from redline.bench.serving import datasets
from redline.bench.serving.datasets import DatasetConfig, asks
from redline.bench.serving.presets import PRESETS, with_preset
from redline.bench.serving.records import LoadRequest
from redline.bench.serving.vocabulary import open_vocabulary
from redline.errors import ConfigError

NANO = Path("models/kimi-nano")


@pytest.fixture(scope="module")
def vocabulary():
    return open_vocabulary(NANO)


def written(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def text(ask: LoadRequest) -> str:
    assert (ask.text is None) != (ask.messages is None)
    return ask.text if ask.text is not None else "".join(message["content"] for message in ask.messages or ())


def test_random_prompts_have_the_tokens_that_they_claim(vocabulary) -> None:
    config = DatasetConfig(num_prompts=20, random_input_len=300, random_output_len=40, random_range_ratio=0.25)
    made = asks(config, vocabulary)
    assert len(made) == 20
    for ask in made:
        assert ask.prompt_tokens == len(vocabulary.encode(text(ask)))
        assert 225 <= ask.prompt_tokens <= 375
        assert 30 <= ask.max_tokens <= 50
    assert len({ask.prompt_tokens for ask in made}) > 5


def test_lengths_below_stay_within_inferencex_range(vocabulary) -> None:
    config = DatasetConfig(num_prompts=200, random_input_len=100, random_range_ratio=0.2, random_range="below")
    lengths = [ask.prompt_tokens or 0 for ask in asks(config, vocabulary)]
    assert min(lengths) >= 80
    assert max(lengths) <= 100
    assert 87 < sum(lengths) / len(lengths) < 93


def test_a_completion_gets_a_text_and_a_chat_one_message(vocabulary) -> None:
    config = DatasetConfig(num_prompts=2, random_input_len=16, backend="openai", ignore_eos=True)
    bare = asks(config, vocabulary)
    chat = asks(DatasetConfig(num_prompts=2, random_input_len=16), vocabulary)
    assert [ask.text for ask in bare] == [ask.messages[0]["content"] for ask in chat if ask.messages]
    assert all(ask.messages is None and ask.extra == {"ignore_eos": True} for ask in bare)
    assert all(ask.text is None and ask.extra == {} for ask in chat)


def test_prompts_share_the_prefix_and_no_token_more(vocabulary) -> None:
    config = DatasetConfig(num_prompts=200, random_input_len=40, random_prefix_len=32)
    one = asks(config, vocabulary)
    other = asks(DatasetConfig(num_prompts=200, random_input_len=40, random_prefix_len=32, seed=1), vocabulary)
    ids = [tuple(vocabulary.encode(text(ask))) for ask in one]
    assert len({those[:32] for those in ids}) == 1
    assert all(len(those) == 72 for those in ids)
    openings = {tuple(vocabulary.encode(text(ask))[:40]) for ask in one + other}
    assert len(openings) == 400


def test_the_first_prompts_do_not_depend_on_how_many_are_asked(vocabulary) -> None:
    few, many = (asks(DatasetConfig(num_prompts=n, random_input_len=20), vocabulary) for n in (3, 9))
    assert many[:3] == few


def test_without_a_tokenizer_lengths_are_about_right_and_it_is_said(vocabulary) -> None:
    notes: list[str] = []
    made = asks(DatasetConfig(num_prompts=5, random_input_len=500), None, notes.append)
    assert all(ask.prompt_tokens is None for ask in made)
    assert all(len(text(ask).split()) == 500 for ask in made)
    assert len(notes) == 1
    assert "approximate" in notes[0]


def test_a_thousand_prompts_of_8192_tokens_are_all_different(vocabulary) -> None:
    made = asks(DatasetConfig(num_prompts=1000, random_input_len=8192), vocabulary)
    assert len({text(ask) for ask in made}) == 1000
    assert len(vocabulary.encode(text(made[500]))) == 8192


def test_progress_is_told_where_it_takes_long(vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    config = DatasetConfig(num_prompts=3, random_input_len=20)
    asks(config, vocabulary, watch=lambda done, total: told.append((done, total)))
    assert told == []
    monkeypatch.setattr(datasets, "_SHOWN_AFTER_S", -1.0)
    asks(config, vocabulary, watch=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_vocabulary_that_does_not_add_up_is_counted_and_it_is_said(vocabulary) -> None:
    class Odd:
        name, size, specials, added = "odd", vocabulary.size, vocabulary.specials, 0
        decode = staticmethod(vocabulary.decode)

        @staticmethod
        def encode(text: str) -> list[int]:
            ids = vocabulary.encode(text)
            return ids if len(ids) < 20 else ids[:-3]

    notes: list[str] = []
    made = asks(DatasetConfig(num_prompts=3, random_input_len=100), Odd(), notes.append)
    assert [ask.prompt_tokens for ask in made] == [len(Odd.encode(text(ask))) for ask in made]
    assert any(ask.prompt_tokens != 100 for ask in made)
    assert "approximate (counted)" in notes[0]


def test_very_long_prompts_are_counted_one_by_one(vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cutting:
        name, size, specials, added = "cutting", vocabulary.size, vocabulary.specials, 0
        decode = staticmethod(vocabulary.decode)

        @staticmethod
        def encode(text: str) -> list[int]:
            return vocabulary.encode(text) + [0] * (len(text) > 2000)

    monkeypatch.setattr(datasets, "_LONG", 2000)
    config = DatasetConfig(num_prompts=20, random_input_len=600, random_range_ratio=0.5)
    made = asks(config, Cutting(), pytest.fail)
    assert all(ask.prompt_tokens == len(Cutting.encode(text(ask))) for ask in made)
    assert 0 < sum(len(text(ask)) > 2000 for ask in made) < 20


def test_prefix_repetition_asks_each_prefix_equally_often(vocabulary) -> None:
    notes: list[str] = []
    config = DatasetConfig(
        dataset_name="prefix_repetition",
        num_prompts=11,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_prefix_len=20,
        prefix_repetition_suffix_len=12,
        prefix_repetition_output_len=5,
    )
    made = asks(config, vocabulary, notes.append)
    ids = [tuple(vocabulary.encode(text(ask))) for ask in made]
    assert Counter(those[:20] for those in ids).most_common() == [
        (prefix, 3) for prefix in dict.fromkeys(i[:20] for i in ids)
    ]
    assert all(len(those) == 32 for those in ids)
    assert len(set(ids)) == 9
    assert all(ask.max_tokens == 5 for ask in made)
    assert [ask.name for ask in made] != sorted(ask.name for ask in made)
    assert "9 prompts instead of 11" in notes[0]


@pytest.mark.parametrize("lines", [True, False])
def test_sharegpt_asks_the_first_turn_and_prunes_as_vllm(tmp_path: Path, vocabulary, lines: bool) -> None:
    def talk(*turns: tuple[str, str]) -> dict[str, Any]:
        return {"id": "x", "conversations": [{"from": who, "value": said} for who, said in turns]}

    good = talk(("human", "What is the answer to all of this?"), ("gpt", "It is, as far as I know, forty two."))
    entries = [
        good,
        talk(("human", "Hi"), ("gpt", "It is, as far as I know, forty two.")),  # prompt too short
        talk(("human", "What is the answer to all of this?"), ("gpt", "no")),  # reply too short
        talk(("human", "What is this? " * 1000), ("gpt", "It is, as far as I know, forty two.")),  # prompt too long
        # prompt and reply too long together
        talk(("human", "What is the answer to all of this?"), ("gpt", "forty two " * 1000)),
        talk(("human", "What is the answer to all of this?")),  # without a reply
        talk(
            ("system", "Be kind to all who ask."),
            ("human", "Who wrote the book of all books?"),
            ("gpt", "Many have done so."),
        ),
    ]
    path = tmp_path / "talks.json"
    path.write_text("\n".join(map(json.dumps, entries)) if lines else json.dumps(entries, indent=1))
    config = DatasetConfig(
        dataset_name="sharegpt", dataset_path=str(path), num_prompts=9, no_oversample=True, disable_shuffle=True
    )
    notes: list[str] = []
    made = asks(config, vocabulary, notes.append)
    assert [text(ask) for ask in made] == ["What is the answer to all of this?", "Who wrote the book of all books?"]
    assert made[0].max_tokens == len(vocabulary.encode("It is, as far as I know, forty two."))
    assert made[0].prompt_tokens == len(vocabulary.encode(text(made[0])))
    assert "2 prompts instead of 9" in notes[0]
    fixed = DatasetConfig(
        dataset_name="sharegpt", dataset_path=str(path), num_prompts=9, no_oversample=True, sharegpt_output_len=33
    )
    assert sorted(ask.max_tokens for ask in asks(fixed, vocabulary)) == [33] * 4  # a reply's own length is ignored then


def test_custom_lines_say_prompts_or_messages_and_lengths(tmp_path: Path, vocabulary) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    path = written(tmp_path / "p.jsonl", {"prompt": "Say hello.", "output_tokens": 7}, {"messages": messages}, "")
    config = DatasetConfig(dataset_name="custom", dataset_path=path, num_prompts=2, disable_shuffle=True)
    first, second = asks(config, vocabulary)
    assert first.messages == ({"role": "user", "content": "Say hello."},)
    assert (first.max_tokens, second.max_tokens) == (7, 256)
    assert second.messages == tuple(messages)
    assert first.prompt_tokens == len(vocabulary.encode("Say hello."))
    fixed = DatasetConfig(dataset_name="custom", dataset_path=path, num_prompts=2, custom_output_len=9)
    assert [ask.max_tokens for ask in asks(fixed, vocabulary)] == [9, 9]


def test_too_few_lines_are_asked_again_and_it_is_said(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", *({"prompt": f"prompt {n}"} for n in range(4)))
    notes: list[str] = []
    made = asks(DatasetConfig(dataset_name="custom", dataset_path=path, num_prompts=10), None, notes.append)
    assert len(made) == 10
    assert {text(ask) for ask in made[:4]} == {f"prompt {n}" for n in range(4)}
    assert "are repeated" in notes[0]


def test_our_sets_are_asked_in_equal_parts_by_kind() -> None:
    config = DatasetConfig(dataset_name="redline", dataset_path=str(NANO / "eval" / "hand.jsonl"), num_prompts=24)
    made = asks(config, None)
    counts = Counter(ask.name for ask in made)
    assert len(counts) == 12
    assert set(counts.values()) == {2}
    assert any(ask.tools for ask in made if ask.name == "tools")
    assert all("thinking" in ask.extra["chat_template_kwargs"] for ask in made if ask.name == "arithmetic")
    other = asks(DatasetConfig(dataset_name="redline", dataset_path=config.dataset_path, num_prompts=24, seed=1), None)
    assert [text(ask) for ask in made] != [text(ask) for ask in other]


def test_our_sets_may_be_a_folder_or_packed(tmp_path: Path) -> None:
    line = {"kind": "a", "messages": [{"role": "user", "content": "one"}], "check": {"number": 1}}
    written(tmp_path / "a.jsonl", line)
    written(tmp_path / "b.jsonl", {**line, "kind": "b"})
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(json.dumps({**line, "kind": "c"}).encode()))

    def kinds(path: Path) -> set[str]:
        config = DatasetConfig(dataset_name="redline", dataset_path=str(path), num_prompts=5, no_oversample=True)
        return {ask.name for ask in asks(config, None)}

    assert kinds(tmp_path) == {"a", "b"}
    assert kinds(tmp_path / "c.jsonl.gz") == {"c"}


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        ("custom", '{"prompt": "a"', "line 2: "),
        ("custom", '{"prompt": 5}', r"line 2: Expected `str \| null`, got `int` - at `\$.prompt`.*output_tokens"),
        ("custom", '{"text": "a"}', "line 2: expected one of `prompt` and `messages`"),
        ("custom", '{"prompt": "a", "output_tokens": 0}', "line 2: `output_tokens` is 0; must be at least 1"),
        ("custom", '{"messages": []}', "line 2: `messages` needs at least one message"),
        ("custom", '{"messages": [{"content": "x"}]}', "line 2: `messages` needs.*`role`"),
        (
            "sharegpt",
            '{"conversations": [{"from": "human"}]}',
            r"line 2: .*`value` - at `\$.conversations\[0\]`.*gpt",
        ),
        ("redline", '{"messages": []}', "line 2: .*missing required field `kind`"),
    ],
)
def test_a_bad_line_is_named_with_its_field_and_the_fix(tmp_path: Path, name: Any, line: str, said: str) -> None:
    good: dict[str, Any] = {
        "kind": "k",
        "conversations": [],
        **({"messages": [{"role": "user", "content": "x"}]} if name == "redline" else {"prompt": "x"}),
    }
    path = written(tmp_path / "bad.jsonl", good, line)
    with pytest.raises(ConfigError, match=said) as caught:
        asks(DatasetConfig(dataset_name=name, dataset_path=path, num_prompts=2), None)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dataset_name": "sonnet"}, "--dataset-name sonnet: expected one of random, sharegpt"),
        ({"dataset_name": "custom"}, "needs --dataset-path"),
        ({"dataset_name": "redline"}, "such as models/kimi-nano/eval"),
        ({"dataset_name": "custom", "dataset_path": "/nowhere/x.jsonl"}, "/nowhere/x.jsonl: cannot be read"),
        ({"random_range_ratio": 1.0}, "--random-range-ratio 1.0"),
        ({"random_input_len": 0}, "--random-input-len 0: must be at least 1"),
        (
            {"random_input_len": 1, "random_range_ratio": 0.3},
            "with --random-range-ratio 0.3 some prompts would have no token",
        ),
        ({"num_prompts": 0}, "--num-prompts 0"),
        ({"custom_output_len": 0}, "--custom-output-len 0: .* or -1"),
        ({"sharegpt_output_len": 0}, "--sharegpt-output-len 0"),
        ({"dataset_name": "prefix_repetition", "num_prompts": 3}, "--prefix-repetition-num-prefixes, 10"),
    ],
)
def test_a_wrong_flag_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        asks(DatasetConfig(**fields), None)


def test_lines_must_say_lengths_where_only_they_may(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", {"prompt": "x", "output_tokens": 3}, {"prompt": "y"})
    with pytest.raises(ConfigError, match="line 2: `output_tokens` is missing"):
        asks(DatasetConfig(dataset_name="custom", dataset_path=path, custom_output_len=-1), None)


def test_messages_need_a_chat(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", {"messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(ConfigError, match="line 1: `messages` need a chat API; use --backend openai-chat"):
        asks(DatasetConfig(dataset_name="custom", dataset_path=path, backend="openai"), None)


def test_a_file_of_nothing_usable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no usable prompt"):
        asks(DatasetConfig(dataset_name="custom", dataset_path=written(tmp_path / "none.jsonl")), None)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_whole_configurations(name: str, vocabulary) -> None:
    config, pace = with_preset(name, {"num_prompts": 2}, {})
    assert len(asks(config, vocabulary)) == 2
    assert pace.max_concurrency == PRESETS[name].streams
    assert pace.warmups > 0


def test_lambdas_preset_and_how_flags_win_over_it() -> None:
    config, pace = with_preset("lambda", {}, {})
    assert (config.random_input_len, config.random_output_len, config.ignore_eos) == (8192, 2048, True)
    assert pace.max_concurrency == 32
    config, pace = with_preset("lambda", {"random_input_len": 512}, {"max_concurrency": 4, "seed": 3})
    assert (config.random_input_len, config.random_output_len, config.num_prompts) == (512, 2048, 20)
    assert (pace.max_concurrency, pace.warmups, pace.seed) == (4, 4, 3)


def test_inferencex_asks_ten_prompts_and_two_warmups_of_each_stream() -> None:
    config, pace = with_preset("inferencex-8k-1k", {}, {"max_concurrency": 64})
    assert (config.num_prompts, pace.warmups) == (640, 128)
    assert (config.random_range, config.random_range_ratio) == ("below", 0.2)


def test_no_preset_leaves_the_flags_as_they_are_and_an_unknown_one_is_named() -> None:
    config, pace = with_preset(None, {"num_prompts": 5}, {"rate": 2.0})
    assert (config.num_prompts, pace.rate, pace.max_concurrency) == (5, 2.0, None)
    with pytest.raises(ConfigError, match="--preset lamda: expected one of lambda, inferencex-8k-1k"):
        with_preset("lamda", {}, {})
