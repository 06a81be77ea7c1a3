"""`redline serve` and `redline config`: the configuration from flags, the shipped model, models fetched by name."""

import hashlib
import json
import os
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from redline.cli import app
from redline.cli.deploy import SHIPPED
from redline.errors import ConfigError
from tests import forked

REVISION = "0" * 40


def shown(*words: str) -> dict[str, object]:
    done = CliRunner().invoke(app, ["config", *words], catch_exceptions=False)
    assert done.exit_code == 0
    return tomllib.loads(done.stdout)


def test_the_shipped_model_is_served_with_its_drafter_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = shown("--nano", "--draft-tokens", "2")
    assert Path(str(config["weights"])) == SHIPPED / "kimi-nano"
    drafting = config["engine"]["speculation"]  # type: ignore[index]
    assert (drafting["drafter"], drafting["tokens"]) == (str(SHIPPED / "kimi-nano-eagle3"), 2)
    assert shown("--nano", "--draft", "suffix")["engine"]["speculation"]["type"] == "suffix"  # type: ignore[index]
    for folder in ("kimi-nano", "kimi-nano-eagle3"):
        assert list((SHIPPED / folder).glob("*.safetensors"))
        assert (SHIPPED / folder / "config.json").is_file()


def test_any_key_can_be_set_and_flags_of_the_engine_are_its_keys():
    words = [
        "--set",
        "requests.timeout_s=60",
        "--set",
        "engine.device=cpu",
        "--set",
        'cors_origins=["https://a.example"]',
    ]
    words += ["--served-model-name", "k2", "--served-model-name", "kimi, or K2"]
    config = shown(
        str(SHIPPED / "kimi-nano"), *words, "--max-running", "3", "--admit-together", "2", "--step-tokens", "99"
    )
    assert config["served_model_name"] == ["k2", "kimi, or K2"]
    assert config["requests"]["timeout_s"] == 60  # type: ignore[index]
    assert config["cors_origins"] == ["https://a.example"]
    engine = config["engine"]
    assert [engine[key] for key in ("device", "max_running", "admit_together", "step_tokens")] == ["cpu", 3, 2, 99]  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a checkpoint's folder or a deployment.toml, or use --nano"),
        (["--nano", "models"], "leave one of them out"),
        (["--nano", "--set", "port"], "expected KEY=VALUE"),
        (["--nano", "--set", "engine.max_runing=3"], "did you mean engine.max_running?"),
        (["--nano", "--set", "port=many"], "port"),
    ],
)
@pytest.mark.parametrize("verb", ["serve", "config"])
def test_what_cannot_be_meant_is_said(verb: str, words: list[str], said: str):
    with pytest.raises(ConfigError, match=said.replace("?", r"\?").replace(".", r"\.")):
        CliRunner().invoke(app, [verb, *words], catch_exceptions=False)


FILES = {"config.json": b"{}", "model.safetensors": b"w" * 200_000, "modeling.py": b"no code is fetched"}


class Hub(BaseHTTPRequestHandler):
    """The parts of the Hugging Face API that a download uses: one model, owner/tiny."""

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        headers = {"X-Repo-Commit": REVISION}
        if path.startswith("/api/models/owner/tiny/tree/"):
            data = json.dumps(
                [
                    {"type": "file", "path": name, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                    for name, d in FILES.items()
                ]
            ).encode()
        elif path.startswith("/api/models/owner/tiny"):
            siblings = [{"rfilename": name} for name in FILES]
            data = json.dumps({"id": "owner/tiny", "sha": REVISION, "siblings": siblings}).encode()
        elif path.startswith("/owner/tiny/resolve/") and name in FILES:
            data = FILES[name]
            headers["ETag"] = f'"{hashlib.sha1(data).hexdigest()}"'
        else:
            headers["X-Error-Code"] = "RepoNotFound"
            self.send_response(404)
            self.send_header("Content-Length", "0")
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            return
        self.server.asked.append(path)  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=[0.05], daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


PROGRAM = """
import sys
from pathlib import Path
from redline.cli import hub
from redline.cli.terminal import Terminal
from redline.errors import RedlineError
limit = sys.argv[2:]
if limit:
    import redline.worker.engine as engine
    engine.free_memory = lambda device: int(limit[0])
try:
    print("at", hub.fetched(Path(sys.argv[1]), Terminal(stderr=True)))
except RedlineError as error:
    print("error", error)
"""


def fetch(server: ThreadingHTTPServer | None, home: Path, *words: str) -> tuple[str, str]:
    port = 9 if server is None else server.server_address[1]
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_ETAG_TIMEOUT": "60",
        "NO_PROXY": "127.0.0.1",
    }
    done = forked.run(
        [sys.executable, "-c", PROGRAM, *words], env=environment, cwd=home, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_a_model_that_is_named_is_fetched_once_and_found_again_without_the_hub(
    hub: ThreadingHTTPServer, tmp_path: Path
):
    said, beside = fetch(hub, tmp_path, "owner/tiny")
    folder = Path(said.removeprefix("at "))
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not (folder / "modeling.py").exists()
    assert "owner/tiny: 200 kB of 200 kB to fetch" in " ".join(beside.split())
    before = len([path for path in hub.asked if "resolve" in path])  # type: ignore[attr-defined]
    assert before
    assert "to fetch" not in fetch(hub, tmp_path, "owner/tiny")[1]
    assert fetch(None, tmp_path, "owner/tiny")[0] == said, "a fetched model is found without a hub"


def test_a_model_that_fits_nowhere_is_not_fetched(hub: ThreadingHTTPServer, tmp_path: Path):
    said, _ = fetch(hub, tmp_path, "owner/tiny", "100000")
    assert said.startswith("error owner/tiny: its weights are 200 kB, and this machine has 100 kB")
    assert not list(tmp_path.rglob("*.safetensors"))
    assert fetch(hub, tmp_path, "owner/none")[0].startswith("error owner/none: no such folder here, and no such model")
    assert fetch(None, tmp_path, "owner/tiny")[0].startswith("error owner/tiny: cannot be fetched")
