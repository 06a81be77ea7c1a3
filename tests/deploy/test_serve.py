"""`redline serve` as an operator sees it: a child process, its output, its API, and how it ends."""

import asyncio
import io
import ipaddress
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import uvloop
from openai import APIError, OpenAI
from rich.console import Console

from redline.api.gateway.worker_monitor import WorkerMonitor
from redline.deploy import serve as fleet
from redline.deploy.config import ServeConfig
from redline.deploy.process import STOP_SIGNALS
from redline.deploy.serve import serve
from redline.errors import ConfigError
from redline.limits import open_files
from redline.messages.news import Ready
from redline.model.eagle3.module import Eagle3, Eagle3Config
from redline.model.k2.write import random_checkpoint
from tests import forked
from tests.api.fake_engine import FakeEngine, say
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer
from tests.waiting import LIMIT_S, until

ROOT = Path(__file__).parents[2]
NANO = ROOT / "models" / "kimi-nano"
REDLINE = Path(sys.executable).with_name("redline")

# Signals, sessions and /proc are specific to Linux; elsewhere the server is tested through its parts.
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


class Server:
    """A `redline serve` in a process group of its own, and all its output."""

    def __init__(
        self,
        *arguments: str | Path,
        environment: dict[str, str] | None = None,
        command: Sequence[str | Path] = (REDLINE, "serve"),
        really: bool = False,
    ) -> None:
        """really: start it, and so its workers, with a new interpreter; otherwise all are forked (`tests.forked`)."""
        start = subprocess.Popen if really else forked.Popen
        self.process = start(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        self.said = ""
        self._clients: list[OpenAI] = []
        self._heard = threading.Event()
        self._heard.set()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            self._heard.wait()

    def hold(self) -> None:
        """Stop reading its output, like a terminal that is suspended."""
        self._heard.clear()

    def let_go(self) -> None:
        self._heard.set()

    def until_ready(self) -> "Server":
        wait_for(lambda: "flush=True)" in self.said or self.process.poll() is not None, self)
        assert self.process.poll() is None, self.said
        return self

    @property
    def url(self) -> str:
        address = re.search(r"is ready at (http://\S+)", self.said)
        assert address is not None, self.said
        return address[1]

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    @property
    def client(self) -> OpenAI:
        """A new client. It is closed with the server: one that is left to the garbage collector may warn of its open
        connection in the middle of another test."""
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self._clients.append(client)
        return client

    @property
    def workers(self) -> set[int]:
        return group(self.process.pid) - {self.process.pid}

    def ends(self) -> int:
        """The exit code, once no process of the group is left."""
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {LIMIT_S:.0f} s: {self.said}") from None
        wait_for(lambda: not group(self.process.pid), self)
        self._listener.join()
        return code

    def ends_cleanly(self, everyone: bool = True) -> None:
        """SIGTERM, to the group or to the first process alone, ends it: exit code 0, and no traceback was printed.

        Called as a fixture ends: a test would not stay the last one where tests move between processes.
        """
        if everyone:
            os.killpg(self.process.pid, signal.SIGTERM)
        else:
            self.process.terminate()
        assert self.ends() == 0
        assert "Traceback" not in self.said

    def close(self) -> None:
        """Leave no process running, even if the test failed."""
        self.let_go()
        for client in self._clients:
            client.close()
        if group(self.process.pid):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._listener.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def group(leader: int) -> set[int]:
    """The live processes of a process group, except the one that forks them."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, rest = (entry / "stat").read_text().partition(" (")[2].rpartition(") ")
                state, _, its_group = rest.split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended during the search
            if int(its_group) == leader and state != "Z" and name != forked.NURSERY:
                found.add(int(entry.name))
    return found


def listening(pid: int) -> list[tuple[str, int]]:
    """The (host, port) pairs on which a process accepts TCP connections."""
    inodes: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if (found := re.match(r"socket:\[(\d+)\]", os.readlink(descriptor))) is not None:
                inodes.add(found[1])
        except FileNotFoundError:
            continue  # closed during the search
    places: list[tuple[str, int]] = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                packed = bytes.fromhex(address)
                shown = ipaddress.ip_address(packed[::-1] if len(packed) == 4 else packed).compressed
                places.append((shown, int(port, 16)))
    return places


def printed_python(server: Server) -> str:
    """The lines to paste into Python."""
    found = re.search(r"^import .*flush=True\)$", server.said, re.MULTILINE | re.DOTALL)
    assert found is not None, server.said
    return found[0]


def open_socket(server: Server, receive_buffer: int | None = None) -> socket.socket:
    """The socket of a client that has sent nothing."""
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(LIMIT_S)
    client.connect(server.address)
    return client


class Said(Protocol):
    """Anything with an output log."""

    @property
    def said(self) -> str: ...


def wait_for(condition: Callable[[], object], server: Said) -> None:
    """Wait until `condition` is true. Raises AssertionError at the limit, with the server's output."""
    until(condition, lambda: f"the server's output: {server.said}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model: it loads at once, and generates nonsense up to the token limit."""
    folder = tmp_path_factory.mktemp("serve") / "tiny"
    random_checkpoint(folder, kernel_config(vocab_size=TINY_VOCAB))
    return write_tiny_tokenizer(folder)


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Starts servers that are ended after the test."""
    servers: list[Server] = []

    def begin(*arguments: str | Path, **how: Any) -> Server:
        servers.append(Server(*arguments, "--port", "0", **how))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def nano() -> Iterator[Server]:
    server = Server(NANO, "--port", "0", "--kv-memory", "200MB", really=True)
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
    done = subprocess.run(
        f"{line} --silent --noproxy '*'", shell=True, capture_output=True, check=True, timeout=LIMIT_S
    )
    message = json.loads(done.stdout)["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["content"]


def test_the_python_lines_work_when_pasted_and_need_nothing_installed(nano: Server):
    snippet = printed_python(nano)
    assert "openai" not in snippet, "the run-time installation has no OpenAI client"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", snippet], capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    assert done.stderr == ""
    assert "def " in done.stdout


def test_metrics_health_and_models(nano: Server):
    assert urlopen(f"{nano.url}/health").status == 200
    model = nano.client.models.list().data[0]
    assert model.id == "kimi-nano"
    # The worker reports five times a second, and once when it becomes idle.
    running = 'vllm:num_requests_running{engine="0",model_name="kimi-nano"} 0.0'
    wait_for(lambda: running in urlopen(f"{nano.url}/metrics").read().decode(), nano)


def test_a_second_server_is_told_that_the_port_is_in_use(nano: Server):
    port = nano.url.rpartition(":")[2]
    done = subprocess.run([REDLINE, "serve", NANO, "--port", port], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(rf"error: port {port} on 127\.0\.0\.1 cannot be used .*--port\n", done.stderr)


@pytest.fixture
def goes_on() -> Iterator[None]:
    """Restore the signal handlers afterwards: a server that has ended leaves signals ignored in its process."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("goes_on")
def test_the_loop_that_serves_is_uvloops(monkeypatch: pytest.MonkeyPatch):
    """lab/frontend.py relies on it."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def look(*_: object) -> int:
        loops.append(asyncio.get_running_loop())
        return 0

    monkeypatch.setattr(fleet, "_serve", look)
    assert fleet.serve(ServeConfig(weights=str(NANO), port=0), Console(file=io.StringIO())) == 0
    assert isinstance(loops[0], uvloop.Loop)


@pytest.mark.usefixtures("goes_on")
@pytest.mark.parametrize("serves", [False, True])
def test_a_server_that_is_told_to_end_while_workers_load_drains_where_one_serves(
    serves: bool, monkeypatch: pytest.MonkeyPatch
):
    drained: list[float] = []

    class Loading:
        """Stands in for `Supervisor`; is stopped while one worker loads, and perhaps another serves."""

        replace = turn = None

        def __init__(self, config: ServeConfig, monitor: WorkerMonitor, *_: object) -> None:
            self._monitor = monitor

        async def start(self, stop: asyncio.Event, _: object) -> None:
            if serves:
                worker = self._monitor.join("worker", FakeEngine(say([])), "both", 1)
                self._monitor.receive(worker, [Ready(max_model_len=512, pages=8, fingerprint="", summary="")])
            stop.set()

        async def given_up(self) -> None:
            await asyncio.Event().wait()

        def end(self) -> None: ...

        async def ended(self) -> None: ...

    async def drain(_: object, seconds: float, *__: object) -> None:
        drained.append(seconds)

    monkeypatch.setattr(fleet, "Supervisor", Loading)
    monkeypatch.setattr(fleet, "_drain", drain)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: set[int]())
    assert fleet.serve(ServeConfig(weights=str(NANO), port=0, drain_s=7.0), Console(file=io.StringIO())) == 0
    assert drained == [7.0] * serves


def test_without_the_streams_that_it_prints_to_it_serves_and_says_so(start: Callable[..., Server], tiny: Path):
    """Standard error is closed, or standard output is a file on a full disk."""
    closed = start(tiny, command=("sh", "-c", 'exec "$0" serve "$@" 2>&-', REDLINE)).until_ready()
    assert "warning: standard error is closed: what the server logs is lost" in closed.said
    assert urlopen(f"{closed.url}/health").status == 200
    full = start(tiny, command=("sh", "-c", 'exec "$0" serve "$@" > /dev/full', REDLINE))
    line = "standard output cannot be written (No space left on device); the server is ready"
    wait_for(lambda: line in full.said or full.process.poll() is not None, full)
    assert full.process.poll() is None, full.said
    os.killpg(full.process.pid, signal.SIGTERM)
    assert full.ends() == 0
    assert "Traceback" not in full.said


@pytest.mark.usefixtures("goes_on")
def test_a_warning_that_cannot_be_printed_keeps_nobody_from_serving(monkeypatch: pytest.MonkeyPatch):
    async def served(*_: object) -> int:
        return 7

    monkeypatch.setattr(fleet, "_serve", served)
    with open("/dev/full", "w") as full:
        console = Console(file=full)
        assert fleet.serve(ServeConfig(weights=str(NANO), host="0.0.0.0", port=0), console) == 7
        with open(os.devnull, "w") as nowhere:  # the buffered output, flushed as the file is closed
            os.dup2(nowhere.fileno(), full.fileno())


def test_each_request_is_a_line_unless_it_is_a_machines_question(nano: Server):
    nano.client.chat.completions.create(
        model="kimi-nano",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=5,
        extra_headers={"x-request-id": "q7"},
    )
    wait_for(lambda: "id q7" in nano.said, nano)
    (line,) = [line for line in nano.said.splitlines() if line.endswith("id q7")]
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO POST /v1/chat/completions 200, \d+ ms, tokens \d+ \+ 5, id q7", line
    )
    assert not re.search("GET /(health|metrics)", nano.said)


def test_with_keys_the_printed_lines_take_one_from_the_environment(
    start: Callable[..., Server], tiny: Path, tmp_path: Path
):
    keys = tmp_path / "keys"
    keys.write_text("# ours\nours a-secret\n")
    server = start(tiny, "--keys-file", keys, "--log-level", "warning").until_ready()
    assert "a-secret" not in server.said
    with pytest.raises(HTTPError, match="401"):
        urlopen(f"{server.url}/v1/models")
    lines = server.said.splitlines()
    (export,) = [line for line in lines if line.startswith("export ")]
    assert str(keys) in export
    name = export.removeprefix("export ").partition("=")[0]
    curl = next(line for line in lines if line.startswith("curl "))
    # The tiny model generates up to the token limit.
    snippet = printed_python(server).replace('"stream": True', '"stream": True, "max_tokens": 5')
    curl = curl.replace('"messages"', '"max_tokens": 5, "messages"') + " --silent --noproxy '*'"
    alone = {**os.environ, name: "a-secret"}
    done = subprocess.run(curl, shell=True, capture_output=True, check=True, timeout=LIMIT_S, env=alone)
    assert "choices" in json.loads(done.stdout)
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", snippet], check=True, timeout=LIMIT_S, env=alone, capture_output=True
    )
    assert " INFO " not in server.said, "--log-level warning hides INFO lines"


def test_a_server_with_few_descriptors_serves_on(start: Callable[..., Server], tiny: Path):
    """More silent clients connect than the server can open files."""
    server = start(tiny, command=("prlimit", "--nofile=300:300", REDLINE, "serve")).until_ready()
    silent = [open_socket(server) for _ in range(400)]
    for _ in range(3):
        assert urlopen(f"{server.url}/health", timeout=LIMIT_S).status == 200
    wait_for(lambda: "open connections is reached" in server.said, server)
    for client in silent:
        client.close()
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.ends() == 0


def test_a_terminal_that_is_held_and_then_closed_holds_up_nobody(start: Callable[..., Server], tiny: Path):
    """Its output is not read: the pipe is full after 64 KiB, about 700 lines. nohup makes it ignore SIGHUP."""
    server = start(tiny, "--log-level", "debug", command=("nohup", REDLINE, "serve")).until_ready()
    server.hold()
    with socket.create_connection(server.address, timeout=LIMIT_S) as client:
        for _ in range(2500):
            client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answered = b""
            while not answered.endswith(b"}"):
                answered += client.recv(4096)
    os.killpg(server.process.pid, signal.SIGHUP)
    for _ in range(3):  # the signal has arrived by then
        assert urlopen(f"{server.url}/health", timeout=LIMIT_S).status == 200
    os.killpg(server.process.pid, signal.SIGTERM)
    server.process.wait(LIMIT_S)
    server.let_go()
    assert server.ends() == 0
    assert server.said.count("GET /health 200") < 2500


GATED = """
import sys
from redline.__main__ import main
from redline.deploy import process
gate, *sys.argv[1:] = sys.argv[1:]
worker = f"import runpy; open({gate!r}).read(); runpy.run_module('redline.worker.main', run_name='__main__')"
process.WORKER = [sys.executable, "-c", worker]
main()
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A FIFO at which the workers of a `gated` server wait, before they load the model, until it is written to."""
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


def gated(gate: Path) -> tuple[str | Path, ...]:
    """The command of a server that holds its workers at the gate."""
    return sys.executable, "-c", GATED, gate, "serve"


def answered(url: str, body: dict[str, object] | None = None) -> tuple[int, dict[str, object], str | None]:
    """Status, body and Retry-After of an answer."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url, data, {"content-type": "application/json"}), timeout=LIMIT_S) as answer:
            return answer.status, json.load(answer), answer.headers["retry-after"]
    except HTTPError as error:
        with error:
            return error.code, json.load(error), error.headers["retry-after"]


def test_while_the_model_loads_the_api_answers_and_says_so(start: Callable[..., Server], tiny: Path, gate: Path):
    asked = {"model": "tiny", "prompt": "the", "max_tokens": 3}
    server = start(tiny, command=gated(gate))
    wait_for(lambda: server.workers, server)
    # another one is of the admin routes
    urls = [f"http://{host}:{port}" for host, port in listening(server.process.pid)]
    [url] = [url for url in urls if answered(f"{url}/live") == (200, {"status": "live"}, None)]
    assert answered(f"{url}/health") == (503, {"status": "loading"}, None)
    status, body, retry_after = answered(f"{url}/v1/completions", asked)
    assert (status, retry_after) == (503, "1")
    assert body["error"]["message"] == "the model is still loading"
    assert "ready" not in server.said
    gate.write_text("go on")
    server.until_ready()
    assert answered(f"{url}/health") == (200, {"status": "ready"}, None)
    assert answered(f"{url}/v1/completions", asked)[0] == 200


def test_a_worker_that_is_stopped_is_noticed_is_ready_when_it_goes_on_and_goes_with_a_server_that_is_killed(
    start: Callable[..., Server], tiny: Path
):
    server = start(tiny).until_ready()
    asked = {"model": "tiny", "prompt": "the", "max_tokens": 3}
    (worker,) = server.workers
    with talk_for_ever(server) as stream:
        os.kill(worker, signal.SIGSTOP)
        wait_for(lambda: answered(f"{server.url}/health")[0] == 503, server)
        status, body, _ = answered(f"{server.url}/health")
        assert (status, body["status"]) == (503, "stalled")
        assert "has not responded" in str(body["reason"])
        assert answered(f"{server.url}/live")[0] == 200
        status, _, retry_after = answered(f"{server.url}/v1/completions", asked)
        assert (status, retry_after) == (503, "1")
        os.kill(worker, signal.SIGCONT)
        wait_for(lambda: answered(f"{server.url}/health")[0] == 200, server)
        next(iter(stream))
        assert answered(f"{server.url}/v1/completions", asked)[0] == 200
    assert server.workers == {worker}
    server.process.kill()
    assert server.ends() == -signal.SIGKILL


# -------------------------------------------------------------------------------------------------------- it ends


def test_silent_clients_and_clients_that_do_not_read_do_not_hold_up_its_end(start: Callable[..., Server], tiny: Path):
    server = start(tiny).until_ready()
    asks = {"prompt": "the", "max_tokens": 50_000, "stream": True, "ignore_eos": True, "logprobs": 5}
    body = json.dumps(asks).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    asked = head + b"content-length: %d\r\n\r\n" % len(body) + body
    open_files(4096)
    clients = [open_socket(server) for _ in range(1100)]
    for _ in range(200):
        clients.append(open_socket(server, receive_buffer=4096))
        clients[-1].sendall(asked)
    assert urlopen(f"{server.url}/v1/models", timeout=LIMIT_S).status == 200
    # By then some clients have filled the server's buffer of unread output.
    wait_for(lambda: metric(server, "vllm:generation_tokens_total") > 5000, server)
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.ends() == 0
    assert "Traceback" not in server.said
    for client in clients:
        client.close()


def metric(server: Server, name: str) -> float:
    """The sum of a series of /metrics, which may be a moment old."""
    text = urlopen(f"{server.url}/metrics", timeout=LIMIT_S).read().decode()
    found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    assert found, name
    return sum(map(float, found))


FAILING_WORKER = """
import subprocess, sys
from rich.console import Console
from redline.deploy import serve
from redline.deploy.config import ServeConfig
from redline.deploy.process import STOP_SIGNALS
worker = '''
import sys, msgspec
from redline.messages.channel import SocketInbox, SocketOutbox
from redline.messages.news import Heartbeat, Failed, Ready
from redline.worker.config import WorkerConfig
config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
with SocketInbox(config.inbox) as inbox, SocketOutbox(config.outbox) as outbox:
    outbox.put(Ready(max_model_len=500, pages=9, fingerprint="f", summary="a worker with a failing device"))
    outbox.put(Heartbeat())
    inbox.drain(wait=True)
    outbox.put(Failed(reason="the device gave an error: CudaError: [CUDA] gone"))
sys.exit(1)
'''
popen = subprocess.Popen
subprocess.Popen = lambda command, **how: popen([command[0], "-c", worker], **how)
sys.exit(serve.serve(ServeConfig(weights=sys.argv[1], port=0, resume_s=0), Console(stderr=True)))
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_group_ends_it_cleanly_in_the_middle_of_a_stream(
    start: Callable[..., Server], tiny: Path, tmp_path: Path, number: signal.Signals
):
    sockets = Path(os.path.relpath(tmp_path))  # the path of a Unix socket has at most 107 bytes
    server = start(tiny, environment={"TMPDIR": str(sockets)}).until_ready()
    with talk_for_ever(server) as stream:
        os.killpg(server.process.pid, number)  # as a closed terminal does
        with pytest.raises(APIError):
            list(stream)
    assert server.ends() == 0
    assert "Traceback" not in server.said
    assert not list(tmp_path.iterdir()), "its sockets are still there"


def test_ctrl_c_before_the_model_is_loaded_ends_it_cleanly(start: Callable[..., Server], tiny: Path, gate: Path):
    server = start(tiny, command=gated(gate))
    wait_for(lambda: server.workers, server)
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.ends() == 0
    assert server.said == ""


def test_ctrl_c_while_the_worker_imports_torch_ends_it_cleanly(start: Callable[..., Server], tiny: Path):
    server = start(tiny, really=True)
    wait_for(lambda: any("libtorch" in mapped(worker) for worker in server.workers), server)
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.ends() == 0
    assert server.said == "" or "is ready at" in server.said, "the server may have been ready before the signal"
    assert "Traceback" not in server.said


def mapped(pid: int) -> str:
    """The memory map of a process; empty if the process has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/maps").read_text()
    return ""


def test_ctrl_c_in_the_middle_of_a_stream_and_again_and_again_while_it_ends_interrupts_nothing(
    start: Callable[..., Server], tiny: Path, tmp_path: Path
):
    sockets = Path(os.path.relpath(tmp_path))
    server = start(tiny, environment={"TMPDIR": str(sockets)}).until_ready()

    def has_ended() -> bool:
        with suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
        return server.process.poll() is not None

    with talk_for_ever(server) as stream:
        wait_for(has_ended, server)
        with pytest.raises(APIError):
            list(stream)
    assert server.ends() == 0
    assert "Traceback" not in server.said
    assert "KeyboardInterrupt" not in server.said
    assert not list(tmp_path.iterdir()), "its sockets are still there"


def test_a_worker_that_is_killed_while_it_loads_is_one_line(start: Callable[..., Server], tiny: Path, gate: Path):
    server = start(tiny, command=gated(gate))
    wait_for(lambda: server.workers, server)
    for worker in server.workers:
        os.kill(worker, signal.SIGKILL)  # as the kernel does when memory runs out
    assert server.ends() == 1
    assert server.said == "error: the worker has ended with code -9 while it was loading the model\n"


def test_a_worker_that_is_stopped_while_it_loads_does_not_keep_ctrl_c_waiting(
    start: Callable[..., Server], tiny: Path, gate: Path
):
    server = start(tiny, command=gated(gate))
    wait_for(lambda: server.workers, server)
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


@pytest.mark.usefixtures("goes_on")
def test_no_folder_for_sockets_is_said(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(**_: str) -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: set[int]())
    with pytest.raises(ConfigError, match=r"no folder for the sockets: .*TMPDIR"):
        serve(ServeConfig(weights=str(tiny), port=0), Console())


def test_a_stream_goes_on_when_its_worker_is_killed_and_started_again(start: Callable[..., Server], tiny: Path):
    """Long answers are read until well past the token at which they moved to the restarted worker.

    If the client is slow, its job is paused and has no worker that could be killed: the next one is.
    """
    server = start(tiny).until_ready()
    asked = {"model": "tiny", "prompt": "the functions of", "max_tokens": 50_000, "stream": True}
    asked["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    places = re.compile(r"is requeued after (\d+) tokens: the worker has ended with code -9")
    for number, how in enumerate(({"temperature": 0}, {"temperature": 1.0, "seed": 5})):
        moved, kill_at = list[int](), 100
        with server.client as client, client.completions.create(**asked, **how) as stream:
            pieces = tokens_of(stream)
            while len(found := places.findall(server.said)) == number:
                moved += next(pieces)
                if len(moved) >= kill_at:
                    for worker in server.workers:
                        os.kill(worker, signal.SIGKILL)
                    kill_at = len(moved) + 5000  # more than are generated ahead of a client that does not read
            least = int(found[number]) + 1000
            while len(moved) < least:
                moved += next(pieces)
        undisturbed = list[int]()
        with server.client as client, client.completions.create(**asked, **how) as stream:
            pieces = tokens_of(stream)
            while len(undisturbed) < least:
                undisturbed += next(pieces)
        assert moved[:least] == undisturbed[:least]
    assert server.said.count("the worker has ended with code -9; it is restarted") >= 2
    wait_for(lambda: metric(server, "redline:jobs_moved_total") == 2.0, server)
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.ends() == 0
    assert "Traceback" not in server.said


def tokens_of(stream: Any) -> Iterator[list[int]]:
    """The tokens of each chunk of a completion."""
    for chunk in stream:
        yield chunk.choices[0].model_dump().get("token_ids") or []


def test_without_time_to_resume_a_worker_that_is_killed_ends_the_server_with_code_1(
    start: Callable[..., Server], tiny: Path, tmp_path: Path
):
    deployment = tmp_path / "deployment.toml"
    deployment.write_text(f'weights = "{tiny}"\nresume_s = 0\n')
    server = start(deployment).until_ready()
    with talk_for_ever(server) as stream:
        for worker in server.workers:
            os.kill(worker, signal.SIGKILL)
        with pytest.raises(APIError, match="worker"):
            list(stream)
    assert server.ends() == 1
    assert "the worker has ended with code -9; stopping" in server.said
    assert "worker is down with 1 jobs: the worker has ended with code -9" in server.said, (
        "waiting clients get the error at once"
    )
    assert "Traceback" not in server.said


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
        (["{tiny}", "--max-model-len", "100000"], "this model supports 1 to 65,536 tokens"),
        (
            ["{tiny}", "--max-model-len", "10"],
            r"max-model-len is 10; expected at least \d+: .* is a prompt of \d+ tokens",
        ),
        (["{tiny}", "--kv-memory", "much"], "expected a size such as 500MB"),
        (
            ["{tiny}", "--host", "192.0.2.1"],
            r"port 0 on 192\.0\.2\.1 cannot be used .*is host an address of this machine",
        ),
        (["{tiny}", "--host", "ü" * 70], "host is 'ü+'; expected an address of this machine"),
        (["{tiny}/" + "x" * 300], "File name too long"),
        (["{tiny}/[/bold] [red]"], r"/\[/bold\] \[red\]: no such folder or file"),
        (["{tiny}", "--keys-file", "{tiny}/no-keys"], "the file of API keys cannot be read"),
        (["{tiny}", "--draft", "{tiny}/nowhere"], "drafter: .*/nowhere: no such folder; expected a drafter's folder"),
        (["{tiny}", "--draft", "suffix", "--draft-tokens", "16"], "speculation.tokens is 16; expected 0 to 15"),
        (
            ["{tiny}", "--draft", "suffix", "--draft-trace", "{tiny}/no/file"],
            "speculation.trace: .*: its folder does not exist",
        ),
        (["{tiny}", "--draft-tokens", "3"], "speculation.tokens is set, but there is no drafter: .*--draft FOLDER"),
    ],
)
def test_a_mistake_of_the_operator_is_one_line(
    start: Callable[..., Server], tiny: Path, arguments: list[str], words: str
):
    server = start(*(argument.format(tiny=tiny) for argument in arguments))
    assert server.ends() == 1
    assert re.fullmatch(rf"error: .*{words}.*\n", server.said)


def test_the_shortest_context_answers_the_example_that_is_printed(start: Callable[..., Server], tiny: Path):
    refused = start(tiny, "--max-model-len", "10")
    assert refused.ends() == 1
    least = re.search(r"expected at least (\d+)", refused.said)
    assert least is not None, refused.said
    server = start(tiny, "--max-model-len", least[1]).until_ready()
    asked = [{"role": "user", "content": "What is 347 + 586?"}]
    # A random model also writes tool-call marks, and without tools such a mark ends the answer: bias it to "a".
    asked_for = {"ignore_eos": True, "logit_bias": {str(ord("a")): 100}}
    answer = server.client.chat.completions.create(model="tiny", messages=asked, extra_body=asked_for)
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= 16


def test_a_name_is_text_and_what_is_printed_with_it_works_when_pasted(start: Callable[..., Server], tiny: Path):
    """A warning is also printed when the server listens on all networks without keys."""
    name = 'it\'s [bold]"6 x 7"[/red] $HOME :smile:'
    server = start(tiny, "--served-model-name", name, "--host", "0.0.0.0").until_ready()
    assert "every client that can reach the port can use the server" in " ".join(server.said.split())
    assert server.url.startswith("http://127.0.0.1:")
    assert f"{name} is ready at http://" in server.said
    before, after = server.said.split("\ncurl ")
    chat = before.strip().splitlines()[-1]
    done = subprocess.run(f"{chat} hi", shell=True, capture_output=True, timeout=LIMIT_S)
    assert b"tokens/s" in done.stderr, done
    curl, python = after.split("\n\n", 1)
    done = subprocess.run(f"curl {curl} --silent --noproxy '*'", shell=True, capture_output=True, timeout=LIMIT_S)
    assert json.loads(done.stdout)["model"] == name
    subprocess.run([sys.executable, "-I", "-S", "-c", python], capture_output=True, check=True, timeout=LIMIT_S)


def test_a_drafter_of_another_model_is_one_line(start: Callable[..., Server], tiny: Path, tmp_path: Path):
    Eagle3(Eagle3Config.for_target(kernel_config(hidden_size=128))).save(tmp_path)
    server = start(tiny, "--draft", tmp_path)
    assert server.ends() == 1
    assert re.fullmatch(r"error: .*/config\.json: \w*hidden_size is 128; this target needs \d+\n", server.said)
