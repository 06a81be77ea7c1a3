"""The edge of a real server: draining, signals, SIGHUP, the admin port, HTTPS over a Unix socket."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.deploy.test_serve import Server, start, talk_for_ever, tiny, wait_for  # noqa: F401
from tests.waiting import LIMIT_S

Start = Callable[..., Server]


def deployment(folder: Path, weights: Path, text: str) -> Path:
    """A deployment file next to its key files; paths in it are relative to it."""
    (folder / "keys.txt").write_text("alice k1 concurrency=4\n")
    (folder / "admin.txt").write_text("root r1\n")
    path = folder / "deployment.toml"
    path.write_text(f"weights = {json.dumps(str(weights))}\n{text}")
    return path


def asked(url: str, key: str, body: dict[str, object] | None = None, method: str = "GET"):
    """The status, the body and Retry-After of an answer."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, headers, method=method if data is None else "POST")
    try:
        with urlopen(request, timeout=LIMIT_S) as answer:
            return answer.status, json.load(answer), None
    except HTTPError as error:
        with error:
            return error.code, json.load(error), error.headers["retry-after"]


def test_it_drains_when_it_is_told_to_and_reads_its_keys_again(start: Start, tiny: Path, tmp_path: Path):  # noqa: F811
    source = deployment(
        tmp_path,
        tiny,
        'served_model_name = ["tiny"]\nkeys_file = "keys.txt"\nadmin_port = 0\nadmin_keys_file = "admin.txt"\n'
        'access_log = "json"\ndrain_s = 600\n[requests]\ntimeout_s = 500.0\n',
    )
    server = start(source).until_ready()
    body: dict[str, object] = {"model": "tiny", "prompt": "the", "max_tokens": 3}
    completions = f"{server.url}/v1/completions"
    assert asked(completions, "k1", body)[0] == 200
    (tmp_path / "keys.txt").write_text("alice k2\n")
    os.kill(server.process.pid, signal.SIGHUP)  # without a terminal SIGHUP makes the server read its keys again
    wait_for(lambda: "1 keys are in effect now" in server.said, server)
    assert asked(completions, "k1", body)[0] == 401
    assert asked(completions, "k2", body)[0] == 200
    admin = re.search(r"admin routes are at (http://\S+)/status", server.said)
    assert admin is not None, server.said
    assert asked(f"{admin[1]}/status", "k2")[0] == 401
    status = asked(f"{admin[1]}/status", "r1")[1]
    assert (status["ready"], status["keys"]["alice"]["requests"]) == (True, 2)
    client = server.client.with_options(api_key="k2")
    stream = client.completions.create(
        model="tiny", prompt="the", max_tokens=800, stream=True, extra_body={"ignore_eos": True}
    )
    pieces = iter(stream)
    next(pieces)
    # A second stream runs until its client disconnects, so the server keeps draining until then.
    held = client.completions.create(
        model="tiny", prompt="the", max_tokens=50_000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(held))
    assert asked(f"{admin[1]}/drain", "r1", method="POST")[0] == 200
    wait_for(lambda: asked(f"{server.url}/health", "k2")[0] == 503, server)
    assert asked(f"{server.url}/health", "k2")[1] == {"status": "draining", "reason": "the server is stopping"}
    refused, error, retry_after = asked(completions, "k2", body)
    assert (refused, error["error"]["code"], retry_after) == (503, "overloaded", "600")
    assert [piece.choices[0].finish_reason for piece in pieces][-1] == "length", "the running answer is complete"
    held.close()
    assert server.ends() == 0
    lines = [json.loads(line) for line in server.said.splitlines() if line.startswith("{")]
    (finished,) = [line for line in lines if line.get("completion_tokens") == 800]
    assert (finished["key"], finished["status"], finished["complete"]) == ("alice", 200, True)


def test_a_second_signal_ends_it_now(start: Start, tiny: Path, tmp_path: Path):  # noqa: F811
    server = start(deployment(tmp_path, tiny, 'served_model_name = ["tiny"]\ndrain_s = 600\n')).until_ready()
    with talk_for_ever(server):
        os.kill(server.process.pid, signal.SIGTERM)
        wait_for(lambda: "stopping" in server.said, server)
        assert server.process.poll() is None
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.ends() == 0


def test_https_over_a_socket_in_the_file_system(start: Start, tiny: Path, tmp_path: Path):  # noqa: F811
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"]
    subprocess.run([*make, *names, *files], check=True, capture_output=True, timeout=LIMIT_S)
    place = Path(os.path.relpath(tmp_path))  # the path of a Unix socket has at most 107 bytes
    source = deployment(place, tiny, 'unix_socket = "redline.sock"\ntls_cert = "cert.pem"\ntls_key = "key.pem"\n')
    server = start(source)
    wait_for(lambda: "is ready at" in server.said or server.process.poll() is not None, server)
    assert "redline.sock" in server.said
    asking = [
        "curl",
        "--silent",
        "--show-error",
        "--unix-socket",
        place / "redline.sock",
        "--cacert",
        place / "cert.pem",
    ]
    body = ["-H", "content-type: application/json", "-d", '{"prompt": "the", "min_tokens": 3, "max_tokens": 3}']
    told = subprocess.run(
        [*asking, *body, "https://localhost/v1/completions"], check=True, capture_output=True, timeout=LIMIT_S
    )
    assert json.loads(told.stdout)["usage"]["completion_tokens"] == 3
    assert (place / "redline.sock").stat().st_mode & 0o777 == 0o660
    other = subprocess.run(
        [*server.process.args[:2], str(source), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert other.returncode == 1
    assert "another server answers there" in other.stdout + other.stderr
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.ends() == 0
    assert not (place / "redline.sock").exists()
