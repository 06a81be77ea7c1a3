"""A result is read as it was written, by us and by vLLM's users, and contains no secret."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from redline.bench.serving import metrics, saved
from redline.bench.serving.metrics import figures
from redline.bench.serving.records import Usage
from redline.bench.serving.saved import BenchResult, command_without_secrets, without_secrets
from redline.bench.serving.target import LoadPace, ServerTarget
from redline.errors import ConfigError
from tests.bench.serving.answers import IDLE, answer, run


def result() -> BenchResult:
    usage = Usage(prompt_tokens=10, completion_tokens=4, reasoning_tokens=2)
    spoken = answer(
        0,
        sent=0.1234567,
        taken=0.1,
        kinds="ttaac",
        tokens=(1, 2, 1, None, 1),
        usage=usage,
        calls=({"name": "f", "arguments": ""},),
    )
    failed = answer(1, at=(), failure="http", error="503: busy", text="")
    measured = run(spoken, failed)
    return BenchResult(
        kind="serve",
        figures={"model_id": "nano", "request_rate": math.inf, **figures(measured)},
        command=("redline", "bench", "serve"),
        provenance={"commit": "abc"},
        target=without_secrets(ServerTarget(base_url="http://127.0.0.1:8000", key="sk-1")),
        dataset={"name": "random"},
        pace=LoadPace(max_concurrency=4),
        generator=IDLE,
        began=measured.began,
        notes=("a note",),
        details={"parts": [1, 2]},
        answers=measured.answers,
    )


def test_a_result_is_read_as_it_was_written(tmp_path: Path):
    path = tmp_path / "result.json"
    saved.save(path, result(), detailed=True)
    found = saved.read(path)
    before, after = result().answers, found.answers
    for one, other in zip(before, after, strict=True):
        assert [chunk.at for chunk in other.chunks] == pytest.approx([chunk.at for chunk in one.chunks], abs=0.6e-6)
        assert [(c.kind, c.characters, c.tokens) for c in other.chunks] == [
            (c.kind, c.characters, c.tokens) for c in one.chunks
        ]
        assert other.sent == pytest.approx(one.sent, abs=0.6e-6)
        assert other.taken == one.taken
        for name in ("text", "thinking", "calls", "usage", "finish", "status", "failure", "error"):
            assert getattr(other, name) == getattr(one, name)
    for name in ("kind", "command", "provenance", "dataset", "pace", "generator", "notes", "details", "began"):
        assert getattr(found, name) == getattr(result(), name)
    again = figures(run(*after))
    assert again["mean_ttft_ms"] == pytest.approx(found.figures["mean_ttft_ms"], abs=0.002)


def test_a_thousand_chunks_do_not_drift(tmp_path: Path):
    times = tuple(n / 3e4 for n in range(1, 1001))
    row = saved.row_of(answer(at=times, sent=0.0000004))
    back = [chunk.at for chunk in saved.answer_of(row).chunks]
    assert back == pytest.approx([at + 0.0000004 for at in times], abs=0.6e-6)


def test_vllms_users_find_their_keys_at_the_top(tmp_path: Path):
    path = tmp_path / "result.json"
    saved.save(path, result())
    found = json.loads(path.read_text())
    assert (found["model_id"], found["request_rate"], found["completed"]) == ("nano", "inf", 1)
    assert "mean_ttft_ms" in found
    assert "itls" not in found
    assert "abcde" not in path.read_text(), "texts are only saved with --save-detailed"
    saved.save(path, result(), detailed=True)
    found = json.loads(path.read_text())
    assert found["generated_texts"] == ["abcde", ""]
    assert len(found["itls"][0]) == 4


def test_a_file_of_vllms_client_is_read_too(tmp_path: Path):
    path = tmp_path / "vllm.json"
    path.write_text(json.dumps({"model_id": "m", "duration": 1.5, "completed": 3, "mean_ttft_ms": 12.0}))
    found = saved.read(path)
    assert (found.kind, found.figures["mean_ttft_ms"], found.answers) == ("vllm", 12.0, ())


def test_rows_of_vllms_client_are_read_where_it_saved_them(tmp_path: Path):
    path = tmp_path / "vllm.json"
    lists = {
        "start_times": [100.5, 100.0, 101.0],
        "ttfts": [0.2, 0.3, 0.0],
        "itls": [[0.1, 0.1], [], []],
        "input_lens": [7, 8, 9],
        "output_lens": [3, 1, 0],
        "errors": ["", "", "Traceback\n  ...\nTimeoutError: too late"],
    }
    whole = {"model_id": "m", "duration": 1.5, "completed": 2, **lists}
    path.write_text(json.dumps(whole))
    first, second, failed = saved.read(path).answers
    assert (metrics.ttft(first), metrics.tpot(first)) == (pytest.approx(0.2), pytest.approx(0.1))
    assert (second.sent, metrics.e2el(second)) == (0.0, pytest.approx(0.3))
    assert (failed.failure, failed.error, failed.chunks) == ("server", "TimeoutError: too late", ())
    path.write_text(json.dumps({**whole, "ttfts": [0.1]}))
    with pytest.raises(ConfigError, match="per-request lists"):
        saved.read(path)


def altered(change: Any) -> bytes:
    found = json.loads(saved.encode(result()))
    change(found["redline"])
    return json.dumps(found).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not json", "is not a benchmark result"),
        (b"[1]", "expected one JSON object"),
        (b'{"a": 1}', "neither a result"),
        (b'{"redline": 3}', "is invalid"),
        (altered(lambda ours: ours.update(format=99)), "has format 99"),
        (altered(lambda ours: ours["rows"][0].update(kinds="a3")), "do not match 5 chunks"),
        (altered(lambda ours: ours["rows"][0].update(kinds="a999999999999")), "do not match 5 chunks"),
        (altered(lambda ours: ours["rows"][0].update(kinds="z5")), "expected kinds such as"),
        (altered(lambda ours: ours["rows"][0].update(characters=[1])), "differ in number"),
    ],
)
def test_what_is_no_result_is_told_in_one_line(tmp_path: Path, data: bytes, message: str):
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        saved.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        saved.read(tmp_path / "absent.json")


def test_a_result_holds_no_secret():
    target = ServerTarget(
        base_url="https://user:hunter2@host:1/v1",
        key="sk-hunter2",
        headers={"X-Key": "hunter2"},
        body={"api_key": "hunter2", "top_p": 0.5, "max_tokens": 3},
    )
    kept = without_secrets(target)
    assert "hunter2" not in json.dumps(kept, default=str)
    assert (kept["base_url"], kept["body"]["top_p"], kept["body"]["max_tokens"]) == ("https://host:1/v1", 0.5, 3)
    words = "serve --header a=hunter2 b=hunter2 --header=c=hunter2 --base-url http://u:hunter2@h --extra-body"
    command = command_without_secrets([*words.split(), '{"api_key": "hunter2"}', "--seed", "1"])
    assert "hunter2" not in " ".join(command)
    assert command[-2:] == ("--seed", "1")


def test_secrets_are_left_out_wherever_they_stand():
    target = ServerTarget(
        base_url="http://h", body={"metadata": [{"api_key": "hunter2", "min_tokens": 5}], "min_tokens": 3}
    )
    kept = without_secrets(target)
    assert kept["body"] == {"metadata": [{"api_key": "given", "min_tokens": 5}], "min_tokens": 3}
    words = ["compare", "http://u:hunter2@a:1", "https://hunter2@b/x", "--metrics-url=u:hunter2@c:9", "u:hunter2@d"]
    words += ["--model", "a@b", "--extra-body", '{"user": "a@b"}']
    shown = command_without_secrets(words)
    assert "hunter2" not in " ".join(shown)
    assert shown[1:3] == ("http://...@a:1", "https://...@b/x")
    assert shown[-3:] == tuple(words[-3:])
