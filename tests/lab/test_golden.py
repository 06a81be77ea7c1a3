"""Requests to two trees, the compared parts of their answers, and the report of differences."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lab import golden
from lab.attack.raw_http import Reply
from lab.golden import (
    CHAT_GREEDY,
    CHAT_SEEDED,
    KINDS,
    MIXES,
    TEMPLATE,
    TEXT_GREEDY,
    Answer,
    Asked,
    Number,
    Request,
    Tally,
    apart,
    chosen,
    read,
    requests,
    settings,
    template,
)
from lab.trees import MODEL, ROOT
from redline.bench.quality.prompts import EvalPrompt, read_sets
from redline.chat.lines import Turn
from redline.errors import ConfigError
from tests.lab.fake_tree import fake_model, fake_tree


def prompt(kind: str, text: str = "Hello") -> EvalPrompt:
    return EvalPrompt(kind=kind, messages=(Turn(role="user", content=text),), check={"number": 1})


def answered(body: dict[str, Any], status: int = 200) -> Reply:
    return Reply("answered", status, json.dumps(body).encode(), 0.1, whole=True)


def test_prompts_are_spread_over_all_kinds_and_are_always_the_same():
    sets = {"a": [prompt("sum")] * 100 + [prompt("chat")] * 3, "b": [prompt("sum")] * 10}
    ten = chosen(sets, 10)
    assert ten == chosen(sets, 10)
    assert Counter(asked.place.split(" ", 1)[0] + asked.prompt.kind for asked in ten) == {
        "asum": 4,
        "achat": 3,
        "bsum": 3,
    }
    assert {asked.place for asked in ten} >= {"a 0 (sum)", "a 25 (sum)", "a 50 (sum)", "a 75 (sum)"}
    assert len(chosen(sets, None)) == 113
    assert len({asked.place for asked in chosen(sets, 5000)}) == 113


def test_sixty_prompts_of_the_evaluation_set_are_asked_everything():
    prompts = chosen(read_sets(ROOT / MODEL / "eval"), golden.PROMPTS)
    assert len({asked.prompt.kind for asked in prompts}) > 8
    made = [request for k, asked in enumerate(prompts) for request in requests(k, asked, [5, 6, 7])]
    assert {request.kind for request in made} == {*KINDS} - {TEMPLATE}
    seeded = [request.body for request in made if request.kind == CHAT_SEEDED]
    for mix in MIXES:
        assert any(mix.items() <= body.items() for body in seeded), mix
    assert len({body["seed"] for body in seeded}) == 60
    assert sum("tools" in request.body for request in made) > 2
    forms = {(request.path, *sorted({"echo", "prompt_logprobs"} & set(request.body))) for request in made}
    assert forms >= {
        ("/v1/completions", "echo"),
        *(((path, "prompt_logprobs")) for path in (golden.CHAT, golden.COMPLETIONS)),
    }
    assert {type(request.body["prompt"]) for request in made if request.kind == TEXT_GREEDY} == {str, list}


def test_every_answer_is_greedy_or_has_a_seed():
    rng = random.Random(1)
    for _ in range(200):
        for request in requests(rng.randrange(4000), Asked("a 0 (sum)", prompt("sum", "x" * 5000)), [5]):
            assert ("seed" in request.body) != (request.body["temperature"] == 0), request
            assert request.body.get("prompt_logprobs", 0) <= 1, "few log probabilities for a long prompt"


def test_messages_are_as_clients_send_them():
    asked = Asked("a 0 (sum)", prompt("sum"))
    assert template(asked).body["messages"] == [{"role": "user", "content": "Hello"}]
    assert requests(0, asked, [5])[0].kind == CHAT_GREEDY


def test_what_depends_on_the_moment_does_not_count_and_digits_do():
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 64},
        "completion_tokens_details": {"reasoning_tokens": 1, "accepted_prediction_tokens": 2},
    }
    told = read(answered({"id": "x", "created": 7, "usage": usage, "choices": [{"logprob": -0.10}]}))
    assert told.body == {
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "reasoning_tokens": 1},
        "choices": [{"logprob": "-0.1"}],
    }
    digits = [read(Reply("answered", 200, b'{"logprob": %b}' % text, 0.1, whole=True)) for text in (b"-0.1", b"-0.10")]
    assert digits[0] != digits[1]
    assert read(Reply("unanswered", 0, b"", 600.0)) == Answer(0, "unanswered")


def test_places_where_answers_part_are_named():
    before = {"choices": [{"text": "a", "logprobs": [Number("-0.5"), Number("-1.5")]}], "same": 1}
    after = {"choices": [{"text": "b", "logprobs": [Number("-0.5")]}], "same": 1}
    assert apart(before, after) == [
        'answer.choices[0].text: "a" before, "b" after',
        'answer.choices[0].logprobs[1]: -1.5 before, "nothing" after',
    ]
    many = apart([Number("1.0")] * 9, [Number("2.0")] * 9)
    assert len(many) == golden.PLACES + 1
    assert many[-1] == "and 4 more"


def test_two_equal_refusals_are_no_equal_answers():
    tally = Tally()
    request = Request(CHAT_GREEDY, "a 0 (sum)", golden.CHAT, {})
    tally.add("plain", request, Answer(200, {"logprob": Number("-0.5")}), Answer(200, {"logprob": Number("-0.5")}))
    tally.add("plain", request, Answer(400, {"error": "no"}), Answer(400, {"error": "no"}))
    tally.add("plain", request, Answer(0, "closed"), Answer(0, "closed"))
    assert tally.different == 2
    assert tally.numbers == 1
    assert tally.rows() == [{"setting": "plain", "kind": CHAT_GREEDY, "answers": 3, "equal": 1}]
    assert "1 / 3" in tally.table()
    assert "before: 400" in tally.differences[0].told()


def test_settings_are_what_the_server_offers():
    exact = ["--kv-dtype", "float32"]
    assert settings("--kv-dtype bf16|fp8|float32", "d") == {
        "plain": [],
        "drafter": ["--draft", "d"],
        "float32": exact,
        "float32, drafter": [*exact, "--draft", "d"],
        "fp8, drafter": ["--kv-dtype", "fp8", "--draft", "d"],
    }
    assert settings("--draft", "d") == {"plain": [], "drafter": ["--draft", "d"]}
    assert settings("--kv-dtype bf16|fp8|float32", None) == {
        "plain": [],
        "float32": exact,
        "fp8": ["--kv-dtype", "fp8"],
    }


def test_trees_that_answer_alike_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pair = [str(fake_tree(tmp_path / name)) for name in ("before", "after")]
    saved = tmp_path / "golden.json"
    assert golden.main([*pair, f"--model={fake_model(tmp_path / 'model')}", f"--save={saved}"]) == 0
    assert "all equal: 16 answers with 24 log probabilities" in capsys.readouterr().out
    record = json.loads(saved.read_text())
    assert (record["different"], record["prompts"], record["differences"]) == (0, 2, [])
    assert {row["setting"] for row in record["compared"]} == {"plain", "float32"}
    assert {"machine", "versions", "commit", "date", "before", "after"} <= set(record)


def test_a_number_that_differs_in_its_last_digit_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pair = [str(fake_tree(tmp_path / name, offset=offset)) for name, offset in (("before", 0.0), ("after", 1e-12))]
    saved = tmp_path / "golden.json"
    words = [*pair, f"--model={fake_model(tmp_path / 'model')}", "--prompts=1", "--only=plain", f"--save={saved}"]
    assert golden.main(words) == 1
    told = capsys.readouterr().out
    assert "3 DIFFER: 4 answers" in told
    assert "answer.choices[0].logprobs[0]: -" in told
    first = json.loads(saved.read_text())["differences"][0]
    assert first["request"]["path"] == golden.CHAT
    assert first["before"][1]["choices"][0]["text"] == first["after"][1]["choices"][0]["text"]


def test_a_tree_that_refuses_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pair = [str(fake_tree(tmp_path / name, refuses=name == "after")) for name in ("before", "after")]
    assert golden.main([*pair, f"--model={fake_model(tmp_path / 'model')}", "--only=plain"]) == 1
    assert 'after:  400 {"error": "no seeds here"}' in capsys.readouterr().out


def test_what_cannot_be_asked_is_said_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, model = str(fake_tree(tmp_path / "tree")), fake_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"^--only fp9: the settings are plain; float32$"):
        golden.main([folder, folder, f"--model={model}", "--only=fp9"])
    with pytest.raises(SystemExit):
        golden.main([folder, folder, "--prompts=0"])
    assert "0 is no number from 1 on" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="is a folder; name a file in it"):
        golden.main([folder, folder, f"--save={tmp_path}"])
