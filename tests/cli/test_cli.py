"""The verbs, as typed: help that teaches, one line for a mistake, and what each prints."""

import errno
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from redline.cli import app
from redline.cli.chat import Client, talk
from redline.errors import ConfigError
from redline.model.checkpoint import Checkpoint
from redline.model.eagle3 import Eagle3, Eagle3Config
from redline.model.write import random_checkpoint
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer

REDLINE = Path(sys.executable).with_name("redline")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    random_checkpoint(folder, kernel_config(vocab_size=TINY_VOCAB))
    return write_tiny_tokenizer(folder)


def typed(*words: str | Path) -> str:
    """What is printed."""
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


# ----------------------------------------------------------------------------------------------------------- words


def test_the_installed_command_without_a_verb_teaches_and_imports_no_torch():
    done = subprocess.run([REDLINE], capture_output=True, text=True, timeout=60)
    assert all(verb in done.stdout for verb in ("serve", "chat", "eval", "doctor", "bench"))
    program = "import sys, redline.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


VERBS = ["serve", "chat", "eval", "doctor", "bench decode", "bench speculate"]
DRAFT_VERBS = [f"draft {verb}" for verb in ("synth", "capture", "train", "mine", "eval", "run")]


@pytest.mark.parametrize("verb", [*VERBS, *DRAFT_VERBS])
def test_every_verb_has_help_for_every_option(verb: str):
    lines = typed(*verb.split(), "--help").splitlines()
    options = [line for line in lines if "--" in line and "--help" not in line]
    assert lines[1].strip().startswith("Usage:")
    assert all(len(line.split()) > 4 for line in options), "an option that nobody explains"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["serve", "nowhere"], "nowhere: no such folder or file"),
        (["eval", "nowhere"], "nowhere"),
        (["doctor", "nowhere"], "nowhere"),
        (["bench", "decode", "nowhere"], "nowhere"),
        (["bench", "speculate", "nowhere", "--draft", "nobody"], "nowhere"),
        (["draft", "run", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (["draft", "eval", "nowhere", "--draft", "nobody"], "give one of --prompts, --corpus and --domain"),
        (["chat", "--url", "http://127.0.0.1:9", "hi"], "no server at http://127.0.0.1:9"),
    ],
)
def test_a_mistake_is_one_line_and_code_1(words: list[str], says: str):
    done = subprocess.run([REDLINE, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last.startswith("error: ")
    assert says in last
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------------------------------------------------- doctor


def test_doctor_prints_what_fits_with_its_arithmetic(tiny: Path):
    said = typed("doctor", tiny)
    for words in ("reads memory at", "multiplies at", "CPU kernels", "parameters", "a page ", "KV capacity", "floor "):
        assert words in said
    # 3 layers x (64 + 32) values x 2 bytes
    assert "64 tokens x 576 bytes = 36,864 bytes" in said


def test_doctor_without_a_folder_speaks_of_the_machine_alone():
    said = typed("doctor")
    assert "reads memory at" in said
    assert "a page " not in said


# ---------------------------------------------------------------------------------------------------- bench decode


def test_bench_decode_prints_floor_and_ratio_and_keeps_where_the_numbers_come_from(tiny: Path, tmp_path: Path):
    result = tmp_path / "decode.json"
    said = typed("bench", "decode", tiny, "--batch", "2", "--context", "70", "--repeats", "3", "--save", result)
    assert "floor/time" in said
    record = json.loads(result.read_bytes())
    assert {"machine", "commit", "date", "versions"} <= set(record)
    (case,) = record["cases"]
    assert (case["batch"], case["context"]) == (2, 70)
    assert case["floor_ms"] > 0  # no bound from above: a disturbed machine may measure its limits lower than they are
    assert case["p10_ms"] <= case["ms"] <= case["p90_ms"]


# ------------------------------------------------------------------------------------------------- bench speculate


def test_bench_speculate_compares_every_variant_with_no_drafts_and_times_the_parts(tiny: Path, tmp_path: Path):
    drafter, prompts, result = tmp_path / "drafter", tmp_path / "prompts.jsonl", tmp_path / "speculate.json"
    Eagle3(Eagle3Config.for_target(Checkpoint.open(tiny).config)).save(drafter)
    lines = [{"domain": name, "messages": [{"role": "user", "content": "hello"}]} for name in ("code", "math")]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    shape = ["--k", "2", "--batch", "2", "--rounds", "1", "--max-tokens", "8", "--repeats", "2", "--context", "70"]
    said = typed("bench", "speculate", tiny, "--draft", drafter, "--prompts", prompts, *shape, "--save", result)
    assert "mean over domains" in said
    record = json.loads(result.read_bytes())
    assert {"machine", "commit", "date", "versions"} <= set(record)
    by_variant = {(rate["domain"], rate["variant"]): rate for rate in record["rates"]}
    assert set(by_variant) == {(name, how) for name in ("code", "math") for how in ("off", "k2", "suffix", "auto")}
    assert by_variant["code", "off"]["times"] == 1
    assert by_variant["code", "off"]["length"] is None
    assert by_variant["code", "k2"]["rounds"] > 0
    assert 1 <= by_variant["code", "k2"]["length"] <= 3
    parts = {part["name"]: part["ms"] for part in record["parts"]}
    assert set(parts) == {"verify 1", "verify 2", "verify 4", "verify 8", "drafter pass"}
    assert all(ms > 0 for ms in parts.values())


# ----------------------------------------------------------------------------------------------------------- draft


def test_the_verbs_of_the_factory_follow_one_another(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a folder whose name markup would eat; heard of while they work."""
    monkeypatch.setattr("redline.progress.EVERY_S", 0.001)
    tmp_path = tmp_path / "[bold] [/] :x:"
    tmp_path.mkdir(parents=True)
    corpus, states, drafter, mined = (tmp_path / name for name in ("corpus.jsonl", "states", "drafter", "mined"))
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "eval.json"
    lines = [{"domain": "code", "messages": [{"role": "user", "content": f"{i}"}]} for i in range(3)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    said = typed("draft", "synth", tiny, "--out", corpus, "--prompts", prompts, "--max-tokens", "12")
    assert f"{corpus} holds 3" in said
    assert "answers: 0:00 passed" in said
    said = typed("draft", "capture", tiny, "--corpus", corpus, "--out", states, "--disk", "10MB")
    assert f"{states} holds 3 examples" in said
    assert "loading weights: " in said
    (tmp_path / "t.toml").write_text("[recipe]\nmax_length = 256\ntokens_per_batch = 512\nheld_out = 0.0\n")
    learn = ["--capture", states, "--settings", tmp_path / "t.toml", "--steps", "1", "--steps-ahead", "2"]
    assert "training: 0:00 passed" in typed("draft", "train", tiny, "--out", drafter, *learn)
    budget = ["--budget", "40", "--answers", "1", "--max-tokens", "12", "--traffic", "code=1"]
    said = typed("draft", "mine", tiny, "--draft", drafter, "--corpus", corpus, "--out", mined, *budget)
    assert f"{mined / 'mixed.jsonl'}: " in said
    assert "scored examples: 0 of 3" in said
    assert "fresh answers: " in said
    assert (mined / "mixed.jsonl").stat().st_size > 0
    empty, little = tmp_path / "empty", ["--budget", "1", "--answers", "1"]
    typed("draft", "mine", tiny, "--draft", drafter, "--corpus", corpus, "--out", empty, *little)
    assert (empty / "mixed.jsonl").read_bytes() == b"", "nothing fits, so nothing is asked, and nothing is missed"
    shape = ["--k", "1", "--mode", "greedy", "--rounds", "0", "--max-tokens", "8"]
    said = typed("draft", "eval", tiny, "--draft", drafter, "--prompts", prompts, *shape, "--save", report)
    assert "first draft, greedy: the engine accepts" in said
    assert f"written to {report}" in said
    assert "loading the engine: " in said
    assert json.loads(report.read_bytes())["measured"][0]["rounds"] > 0


def test_a_disk_that_fails_in_the_midst_is_one_line(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stale(*_: Any, **__: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(tmp_path / "corpus.jsonl"))

    monkeypatch.setattr("redline.draft.synth.synth", stale)
    words = ["draft", "synth", tiny, "--out", tmp_path / "corpus.jsonl", "--domain", "code", "--count", "1"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith(f"{tmp_path / 'corpus.jsonl'}: cannot be read or written (Stale file handle)")


def test_a_share_that_is_none_is_refused():
    done = CliRunner().invoke(
        app, ["draft", "mine", "t", "--draft", "d", "--corpus", "c", "--out", "o", "--traffic", "code"]
    )
    assert done.exit_code == 2
    assert "expected DOMAIN=SHARE" in done.output


# ------------------------------------------------------------------------------------------------------------ eval


def test_eval_prints_a_table_and_saves_it(tiny: Path, tmp_path: Path):
    sets = tmp_path / "sets"
    sets.mkdir()
    asked = {"kind": "add", "messages": [{"role": "user", "content": "1 + 1?"}], "check": {"number": 2}}
    (sets / "values.jsonl").write_text(json.dumps(asked) + "\n")
    (sets / "targets.json").write_text(json.dumps({"values": {"add": 90}}))
    result = tmp_path / "report.json"
    said = typed("eval", tiny, "--sets", sets, "--save", result)
    assert "add" in said
    assert "90" in said
    assert json.loads(result.read_bytes())


# ------------------------------------------------------------------------------------------------------------ chat

CHUNKS = [
    {"choices": [{"delta": {"role": "assistant", "reasoning": "Two "}}]},
    {"choices": [{"delta": {"reasoning": "and two."}}]},
    {"choices": [{"delta": {"content": "It is "}}]},
    {"choices": [{"delta": {"content": "[4]."}}]},
    {"choices": [], "usage": {"completion_tokens": 7}},
]


class Fake(BaseHTTPRequestHandler):
    """Any OpenAI server: it says CHUNKS, and refuses whoever says no."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "fake"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        if body["messages"][-1]["content"] == "no":
            self._answer(400, json.dumps({"error": {"message": "messages: not that"}}))
            return
        self._answer(200, "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in CHUNKS) + "data: [DONE]\n\n")

    def _answer(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def fake_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Server", (Fake,), {"asked": asked}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def client(url: str, **changes: Any) -> Client:
    return Client(
        **{"url": url, "key": "k", "model": None, "thinking": True, "temperature": 0.6, "system": None, **changes}
    )


def test_a_question_is_answered_with_the_thinking_dimmed_and_the_rate_below():
    with fake_server() as (url, asked):
        screen = io.StringIO()
        assert talk(client(url, system="Be brief."), "2 + 2?", Console(file=screen, force_terminal=True)) == 0
    said = screen.getvalue()
    assert "\x1b[2mTwo \x1b[0m" in said
    assert "It is [4]." in said.replace("\x1b[0m", ""), "brackets are text, not markup"
    assert "7 tokens" in said
    assert "tokens/s" in said
    assert asked[0]["model"] == "fake"
    assert [message["role"] for message in asked[0]["messages"]] == ["system", "user"]
    assert asked[0]["chat_template_kwargs"] == {"thinking": True}


@pytest.mark.parametrize(
    ("details", "says"),
    [
        ({"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2}, "6 of 8 drafts accepted (75%)"),
        ({"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}, None),
        ({"reasoning_tokens": 1, "accepted_prediction_tokens": None}, None),
        (None, None),
    ],
)
def test_acceptance_stands_below_an_answer_where_the_server_tells_it(
    monkeypatch: pytest.MonkeyPatch, details: dict[str, int | None] | None, says: str | None
):
    usage = {"choices": [], "usage": {"completion_tokens": 7, "completion_tokens_details": details}}
    monkeypatch.setitem(globals(), "CHUNKS", [*CHUNKS[:-1], usage])
    screen = io.StringIO()
    with fake_server() as (url, _):
        talk(client(url), "2 + 2?", Console(file=screen, width=200))
    said = screen.getvalue()
    assert "7 tokens" in said
    assert says in said if says else "drafts" not in said


def test_a_conversation_remembers_what_was_said_but_not_the_thinking(monkeypatch: pytest.MonkeyPatch):
    lines = iter(["2 + 2?", "And now?", ""])
    console = Console(file=io.StringIO())
    monkeypatch.setattr(console, "input", lambda _: next(lines))
    with fake_server() as (url, asked):
        assert talk(client(url, thinking=False), None, console) == 0
    assert asked[1]["messages"] == [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "It is [4]."},
        {"role": "user", "content": "And now?"},
    ]
    assert asked[0]["chat_template_kwargs"] == {"thinking": False}


def test_a_refused_question_is_said_and_forgotten(monkeypatch: pytest.MonkeyPatch):
    lines = iter(["no", "2 + 2?", ""])
    screen = io.StringIO()
    console = Console(file=screen)
    monkeypatch.setattr(console, "input", lambda _: next(lines))
    with fake_server() as (url, asked):
        talk(client(url), None, console)
    assert "error: messages: not that" in screen.getvalue()
    assert [message["content"] for message in asked[1]["messages"]] == ["2 + 2?"]


def test_nobody_there():
    with pytest.raises(ConfigError, match="start one with `redline serve FOLDER`"):
        talk(client("http://127.0.0.1:9"), "hi", Console(file=io.StringIO()))
