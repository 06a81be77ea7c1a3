"""`redline serve` as its operator meets it: a child process, its words, its API, its ends."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from openai import APIError, OpenAI
from rich.console import Console

from redline.errors import ConfigError
from redline.fleet.config import ServeConfig
from redline.fleet.serve import serve
from redline.model.eagle3 import Eagle3, Eagle3Config
from redline.model.write import random_checkpoint
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer

ROOT = Path(__file__).parents[2]
NANO = ROOT / "models" / "kimi-nano"
REDLINE = Path(sys.executable).with_name("redline")
START_S = 60.0  # torch's import on a busy machine, and once the CPU kernels' build
END_S = 15.0

# Signals, sessions and /proc are Linux's; elsewhere the server is tested through its parts.
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


class Server:
    """A `redline serve` in a process group of its own, and everything that it has said."""

    def __init__(
        self,
        *arguments: str | Path,
        environment: dict[str, str] | None = None,
        command: Sequence[str | Path] = (REDLINE, "serve"),
    ) -> None:
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        self.said = ""
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line

    def until_ready(self) -> "Server":
        wait_for(lambda: "flush=True)" in self.said or self.process.poll() is not None, START_S, self)
        assert self.process.poll() is None, self.said
        return self

    @property
    def url(self) -> str:
        address = re.search(r"is ready at (http://\S+)", self.said)
        assert address is not None, self.said
        return address[1]

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def workers(self) -> set[int]:
        return group(self.process.pid) - {self.process.pid}

    def ends(self) -> int:
        """The exit code, once no process of the group is left."""
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {END_S} s: {self.said}") from None
        wait_for(lambda: not group(self.process.pid), END_S, self)
        self._listener.join()
        return code

    def close(self) -> None:
        """Leaves nothing behind, whatever the test came to."""
        if group(self.process.pid):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._listener.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def group(leader: int) -> set[int]:
    """The live processes of a process group."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
            if int(its_group) == leader and state != "Z":
                found.add(int(entry.name))
    return found


def wait_for(condition: Callable[[], object], seconds: float, server: Server) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing for {seconds} s; the server has said: {server.said}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model: it loads at once, and talks nonsense for as long as it is let."""
    folder = tmp_path_factory.mktemp("serve") / "tiny"
    random_checkpoint(folder, kernel_config(vocab_size=TINY_VOCAB))
    return write_tiny_tokenizer(folder)


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Starts servers that are gone at the end."""
    servers: list[Server] = []

    def begin(*arguments: str | Path, **how: dict[str, str]) -> Server:
        servers.append(Server(*arguments, "--port", "0", **how))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def nano() -> Iterator[Server]:
    server = Server(NANO, "--port", "0", "--kv-memory", "200MB")
    try:
        yield server.until_ready()
    finally:
        server.close()


def talk_for_ever(server: Server, model: str = "tiny"):
    """A stream that has begun and will not end soon."""
    body = {"ignore_eos": True}
    stream = server.client.completions.create(
        model=model, prompt="the", max_tokens=50_000, stream=True, extra_body=body
    )
    next(iter(stream))
    return stream


# ------------------------------------------------------------------------------------------------------ it serves


def test_the_bundled_model_streams_an_answer(nano: Server):
    asked = [{"role": "user", "content": "What is 347 + 586?"}]
    stream = nano.client.chat.completions.create(model="kimi-nano", messages=asked, temperature=0, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    answer = "".join(delta.content or "" for delta in deltas)
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert "933" in answer
    assert thought
    assert len(deltas) > 10


def test_the_curl_line_works_when_pasted(nano: Server):
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    line = next(line for line in nano.said.splitlines() if line.startswith("curl "))
    done = subprocess.run(f"{line} --silent --noproxy '*'", shell=True, capture_output=True, check=True, timeout=60)
    message = json.loads(done.stdout)["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["content"]


def test_the_python_lines_work_when_pasted_and_need_nothing_installed(nano: Server):
    lines = nano.said.splitlines()
    first = next(n for n, line in enumerate(lines) if re.match(r"(import|from) ", line))
    snippet = "\n".join(lines[first:])
    assert "openai" not in snippet, "the run-time installation has no OpenAI client"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", snippet], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    assert "def " in done.stdout


def test_metrics_health_and_models(nano: Server):
    assert urlopen(f"{nano.url}/health").status == 200
    model = nano.client.models.list().data[0]
    assert model.id == "kimi-nano"
    # The worker reports five times a second, and once it is idle.
    running = 'vllm:num_requests_running{model_name="kimi-nano"} 0.0'
    wait_for(lambda: running in urlopen(f"{nano.url}/metrics").read().decode(), 5, nano)


def test_a_second_server_is_told_that_the_port_is_in_use(nano: Server):
    port = nano.url.rpartition(":")[2]
    done = subprocess.run([REDLINE, "serve", NANO, "--port", port], capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(rf"error: port {port} on 127\.0\.0\.1 cannot be used .*--port\n", done.stderr)


def answered(url: str, body: dict[str, object] | None = None) -> tuple[int, dict[str, object], str | None]:
    """Status, body and Retry-After."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url, data, {"content-type": "application/json"}), timeout=10) as answer:
            return answer.status, json.load(answer), answer.headers["retry-after"]
    except HTTPError as error:
        with error:
            return error.code, json.load(error), error.headers["retry-after"]


def test_while_the_model_loads_the_api_answers_and_says_so(tiny: Path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url, asked = f"http://127.0.0.1:{port}", {"model": "tiny", "prompt": "the", "max_tokens": 3}
    server = Server(tiny, "--port", str(port))
    try:
        wait_for(lambda: server.workers, START_S, server)
        assert answered(f"{url}/live") == (200, {"status": "live"}, None)
        assert answered(f"{url}/health") == (503, {"status": "loading"}, None)
        status, body, retry_after = answered(f"{url}/v1/completions", asked)
        assert (status, retry_after) == (503, "1")
        assert body["error"]["message"] == "the model is still loading"
        assert "ready" not in server.said
        server.until_ready()
        assert answered(f"{url}/health") == (200, {"status": "ready"}, None)
        assert answered(f"{url}/v1/completions", asked)[0] == 200
    finally:
        server.close()


def test_a_stopped_worker_is_noticed_and_one_that_goes_on_is_ready_again(start: Callable[..., Server], tiny: Path):
    server = start(tiny).until_ready()
    asked = {"model": "tiny", "prompt": "the", "max_tokens": 3}
    (worker,) = server.workers
    with talk_for_ever(server) as stream:
        os.kill(worker, signal.SIGSTOP)
        wait_for(lambda: answered(f"{server.url}/health")[0] == 503, 30, server)
        status, body, _ = answered(f"{server.url}/health")
        assert (status, body["status"]) == (503, "stalled")
        assert "has not been heard of" in str(body["reason"])
        assert answered(f"{server.url}/live")[0] == 200
        status, _, retry_after = answered(f"{server.url}/v1/completions", asked)
        assert (status, retry_after) == (503, "1")
        os.kill(worker, signal.SIGCONT)
        wait_for(lambda: answered(f"{server.url}/health")[0] == 200, 30, server)
        next(iter(stream))
        assert answered(f"{server.url}/v1/completions", asked)[0] == 200


# -------------------------------------------------------------------------------------------------------- it ends


FAILING_WORKER = """
import subprocess, sys
from rich.console import Console
from redline.fleet import serve
from redline.fleet.config import ServeConfig
worker = '''
import sys, msgspec
from redline.wire.channel import SocketInbox, SocketOutbox
from redline.wire.news import Beat, Failed, Ready
from redline.worker.config import WorkerConfig
config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
with SocketInbox(config.inbox) as inbox, SocketOutbox(config.outbox) as outbox:
    outbox.put(Ready(max_model_len=500, pages=9, fingerprint="f", summary="a worker whose device fails"))
    outbox.put(Beat())
    inbox.drain(wait=True)
    outbox.put(Failed(reason="the device gave an error: CudaError: [CUDA] gone"))
sys.exit(1)
'''
popen = subprocess.Popen
subprocess.Popen = lambda command, **how: popen([command[0], "-c", worker], **how)
sys.exit(serve.serve(ServeConfig(weights=sys.argv[1], port=0), Console(stderr=True)))
"""


def test_a_worker_that_ends_says_why_to_the_operator_and_to_clients_that_it_is_lost(tiny: Path):
    server = Server(command=[sys.executable, "-c", FAILING_WORKER, str(tiny)])
    try:
        server.until_ready()
        status, body, retry_after = answered(f"{server.url}/v1/completions", {"model": "tiny", "prompt": "the"})
        assert (status, body["error"]["code"], retry_after) == (503, "worker_lost", "1")
        assert server.ends() == 1
        assert "the worker has ended: the device gave an error: CudaError: [CUDA] gone; stopping\n" in server.said
        assert "Traceback" not in server.said
    finally:
        server.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_group_ends_it_cleanly_in_the_middle_of_a_stream(
    start: Callable[..., Server], tiny: Path, tmp_path: Path, number: signal.Signals
):
    sockets = Path(os.path.relpath(tmp_path))  # a socket's path has 107 bytes at most
    server = start(tiny, environment={"TMPDIR": str(sockets)}).until_ready()
    with talk_for_ever(server) as stream:
        os.killpg(server.process.pid, number)  # as a terminal does with Ctrl-C
        with pytest.raises(APIError):
            list(stream)
    assert server.ends() == 0
    assert "Traceback" not in server.said
    assert not list(tmp_path.iterdir()), "its sockets are still there"


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_ctrl_c_while_the_model_loads_ends_it_cleanly(start: Callable[..., Server], tiny: Path, seconds: float):
    server = start(tiny)
    wait_for(lambda: server.workers, START_S, server)
    time.sleep(seconds)  # the worker imports torch
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.ends() == 0
    assert server.said == ""


def test_ctrl_c_again_and_again_while_it_ends_interrupts_nothing(
    start: Callable[..., Server], tiny: Path, tmp_path: Path
):
    sockets = Path(os.path.relpath(tmp_path))
    server = start(tiny, environment={"TMPDIR": str(sockets)}).until_ready()
    with talk_for_ever(server):
        while server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGINT)
            time.sleep(0.01)
    assert server.ends() == 0
    assert "Traceback" not in server.said
    assert "KeyboardInterrupt" not in server.said
    assert not list(tmp_path.iterdir()), "its sockets are still there"


def test_a_worker_that_is_killed_while_it_loads_is_one_line(start: Callable[..., Server], tiny: Path):
    server = start(tiny)
    wait_for(lambda: server.workers, START_S, server)
    for worker in server.workers:
        os.kill(worker, signal.SIGKILL)  # as the kernel does where memory runs out
    assert server.ends() == 1
    assert server.said == "error: the worker ended with code -9 while it was loading the model\n"


def test_a_worker_that_is_stopped_while_it_loads_does_not_keep_ctrl_c_waiting(start: Callable[..., Server], tiny: Path):
    server = start(tiny)
    wait_for(lambda: server.workers, START_S, server)
    for worker in server.workers:
        os.kill(worker, signal.SIGSTOP)
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.ends() == 0
    assert server.said == ""


def test_a_folder_that_is_too_deep_for_sockets_is_one_line_and_stays_empty(
    start: Callable[..., Server], tiny: Path, tmp_path: Path
):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    server = start(tiny, environment={"TMPDIR": str(deep)})
    assert server.ends() == 1
    assert re.fullmatch(r"error: .*: a socket's path has at most 107 bytes\n", server.said)
    assert not list(deep.iterdir())


def test_no_folder_for_sockets_is_said(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(**_: str) -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: set[int]())  # this process goes on
    with pytest.raises(ConfigError, match=r"no folder for the sockets: .*TMPDIR"):
        serve(ServeConfig(weights=str(tiny), port=0), Console())


def test_a_worker_that_is_killed_ends_the_server_with_code_1(start: Callable[..., Server], tiny: Path):
    server = start(tiny).until_ready()
    with talk_for_ever(server) as stream:
        for worker in server.workers:
            os.kill(worker, signal.SIGKILL)
        with pytest.raises(APIError, match="worker"):
            list(stream)
    assert server.ends() == 1
    assert "the worker has ended with code -9; stopping" in server.said
    assert "Traceback" not in server.said


def test_a_server_that_is_killed_takes_its_worker_with_it(start: Callable[..., Server], tiny: Path):
    server = start(tiny).until_ready()
    assert len(server.workers) == 1
    server.process.kill()
    assert server.ends() == -signal.SIGKILL


def test_a_broken_checkpoint_is_one_line(start: Callable[..., Server], tiny: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    shard = next(broken.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    server = start(broken)
    assert server.ends() == 1
    assert re.fullmatch(r"error: .*/broken/model-\S+\.safetensors: \S+: truncated: the file has .*\n", server.said)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{tiny}/nowhere"], "no such folder or file"),
        (["{tiny}", "--max-model-len", "100000"], "this model reads 65,536 tokens at most"),
        (["{tiny}", "--kv-memory", "much"], "expected a size such as 500MB"),
        (["{tiny}", "--keys-file", "{tiny}/no-keys"], "the file of API keys cannot be read"),
        (["{tiny}", "--draft", "{tiny}/nowhere"], "draft: .*/nowhere: no such folder; expected a drafter's folder"),
        (["{tiny}", "--draft", "suffix", "--draft-tokens", "16"], "draft_tokens is 16; expected 0 to 15"),
        (
            ["{tiny}", "--draft", "suffix", "--draft-trace", "{tiny}/no/file"],
            "draft_trace: .*: its folder does not exist",
        ),
    ],
)
def test_a_mistake_of_the_operator_is_one_line(
    start: Callable[..., Server], tiny: Path, arguments: list[str], words: str
):
    server = start(*(argument.format(tiny=tiny) for argument in arguments))
    assert server.ends() == 1
    assert re.fullmatch(rf"error: .*{words}.*\n", server.said)


def test_a_drafter_of_another_model_is_one_line(start: Callable[..., Server], tiny: Path, tmp_path: Path):
    Eagle3(Eagle3Config.for_target(kernel_config(hidden_size=128))).save(tmp_path)
    server = start(tiny, "--draft", tmp_path)
    assert server.ends() == 1
    assert re.fullmatch(r"error: .*/config\.json: \w*hidden_size is 128; this target needs \d+\n", server.said)


def test_every_network_without_keys_is_warned_about(start: Callable[..., Server], tiny: Path):
    server = start(tiny, "--host", "0.0.0.0").until_ready()
    assert "everyone who reaches the port is served" in " ".join(server.said.split())
    assert server.url.startswith("http://127.0.0.1:")
