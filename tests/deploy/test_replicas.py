"""Two replicas of the API over two workers, as processes of one `redline serve`: what clients and operators see."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from rich.console import Console

from redline.cli.explain import show
from redline.model.k2.write import random_checkpoint
from tests.deploy.test_serve import NANO, Server, wait_for
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")

KEY = "sk-admin-0123456789abcdef"
ASKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("The first page of a book about rivers", {}),
    ("def add(a, b):", {}),
    ("Once upon a time", {"temperature": 1.0, "seed": 7}),
    ("Ein Haus am See", {}),
)
TOKENS = 300  # tokens of each answer to ASKS
ENDLESS = 9000  # tokens: longer than anything else in a test takes


class Client:
    """One keep-alive connection, and the answers that came through it."""

    def __init__(self, server: Server) -> None:
        self._http = HTTPConnection(*server.address, timeout=LIMIT_S)
        self._http.connect()

    def ask(self, prompt: str, tokens: int, id: str, *, key: str = "alice", **how: Any) -> Iterator[str]:
        """Yields the pieces of a streamed answer. Raises ConnectionError if the connection ends before the stream."""
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0, **how}
        headers = {"content-type": "application/json", "x-request-id": id, "authorization": f"Bearer {key}"}
        self._http.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = self._http.getresponse()
        assert answer.status == 200, (answer.status, answer.read())
        try:
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    yield event["choices"][0]["text"]
                elif line.startswith(b"data: [DONE]"):
                    answer.read()
                    return
        except HTTPException as error:
            raise ConnectionError(error) from error
        raise ConnectionError("the stream ended before its end")

    def status(self, body: dict[str, Any], key: str = "alice") -> int:
        """The status of a request, ignoring its answer."""
        return self.post("/v1/completions", body, key)[0]

    def post(self, path: str, body: dict[str, Any], key: str = "alice") -> tuple[int, dict[str, Any]]:
        """The status of a request, and its answer."""
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        self._http.request("POST", path, json.dumps(body), headers)
        answer = self._http.getresponse()
        return answer.status, json.load(answer)

    def leave(self) -> None:
        """Shut down the connection while another thread reads an answer from it."""
        assert self._http.sock is not None
        self._http.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._http.close()


class Stream(threading.Thread):
    """An answer that is read by a thread of its own."""

    def __init__(self, client: Client, prompt: str, tokens: int, id: str, **how: Any) -> None:
        super().__init__(daemon=True)
        self.text, self.error, self.id = "", None, id
        self._pieces = client.ask(prompt, tokens, id, **how)
        self.start()

    def run(self) -> None:
        try:
            for piece in self._pieces:
                self.text += piece
        except (ConnectionError, TimeoutError) as error:
            self.error = error


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("two")
    (folder / "admin.txt").write_text(f"{KEY}\n")
    (folder / "keys.txt").write_text("alice alice\nbob bob concurrency=1\n")
    (folder / "deployment.toml").write_text(
        f'weights = {json.dumps(str(NANO))}\nport = 0\nadmin_port = 0\nadmin_keys_file = "admin.txt"\n'
        'keys_file = "keys.txt"\nresponses_file = "kept"\napi_replicas = 2\ndrain_s = 30\n'
        '[engine]\nkv_memory = "120MB"\n[[workers]]\ncount = 2\n[sla.default]\nttft_ms = 1000000\n'
    )
    server = Server(folder / "deployment.toml")
    try:
        wait_for(lambda: settled(server.until_ready()), server)
        yield server
    finally:
        server.close()


def admin(server: Server, path: str, method: str = "GET", body: bytes | None = None) -> dict[str, Any]:
    found = re.search(r"admin routes are at (http://\S+)/admin/status", server.said)
    assert found is not None, server.said
    request = Request(f"{found[1]}/admin/{path}", body, {"authorization": f"Bearer {KEY}"}, method=method)
    with urlopen(request, timeout=LIMIT_S) as answer:
        return json.load(answer)


def settled(server: Server) -> bool:
    """Whether all workers and replicas are ready, and no request runs."""
    status = admin(server, "status")
    everybody = [*status["workers"].values(), *status["replicas"].values()]
    return len(status["replicas"]) == 2 and all(each["ready"] for each in everybody) and free(server)


def free(server: Server) -> bool:
    """Whether no worker runs a job or holds a page for one."""
    return not jobs(server) and not pages_used(server)


def loads(server: Server) -> list[dict[str, int]]:
    """The last load report of each worker that has sent one."""
    told = [worker["load"] for worker in admin(server, "status")["workers"].values()]
    return [load for load in told if load is not None]


def jobs(server: Server) -> int:
    """The number of jobs that the workers report."""
    return sum(load["running"] + load["waiting"] for load in loads(server))


def pages_used(server: Server) -> int:
    """The number of pages that the workers hold for jobs."""
    return sum(load["pages_used"] for load in loads(server))


def epochs(server: Server) -> list[int]:
    """The epoch (number of starts) of each worker."""
    return [worker["epoch"] for worker in admin(server, "status")["workers"].values()]


def replica_of(server: Server, id: str) -> str:
    """The replica that has a request which has begun."""

    return job_of(server, id)["replica"]


def job_of(server: Server, id: str) -> dict[str, Any]:
    """The record of a request with one choice that has begun."""

    def known() -> dict[str, Any] | None:
        try:
            return admin(server, f"requests/{id}")
        except OSError:
            return None

    (job,) = until(known, lambda: f"request {id}: {server.said}")["jobs"]
    return job


def worker_of(server: Server, id: str) -> str:
    return job_of(server, id)["sent"][-1]["worker"]


@contextmanager
def connected(server: Server, each: int = 1) -> Iterator[tuple[list[Client], list[Client]]]:
    """`each` connections to replica-0, and `each` to replica-1. The server chooses the replica of a connection, so
    a request over each connection finds out which one it is."""
    with ExitStack() as opened:
        found: dict[str, list[Client]] = {"replica-0": [], "replica-1": []}
        for _ in range(200):
            if all(len(clients) == each for clients in found.values()):
                break
            client = opened.enter_context(closing(Client(server)))
            "".join(client.ask("a", 1, id := uuid.uuid4().hex))
            clients = found[replica_of(server, id)]
            if len(clients) < each:
                clients.append(client)
            else:
                client.close()
        else:
            raise AssertionError((found, server.said))
        yield found["replica-0"], found["replica-1"]


@pytest.fixture(scope="module")
def undisturbed(two: Server) -> Iterator[list[str]]:
    """The answers to ASKS while no other request runs and no process ends."""
    with closing(Client(two)) as client:
        texts = ["".join(client.ask(prompt, TOKENS, f"alone-{n}", **how)) for n, (prompt, how) in enumerate(ASKS)]
    yield texts
    drained_it_leaves_nothing(two, texts)


def drained_it_leaves_nothing(two: Server, undisturbed: list[str]) -> None:
    """Called as the fixtures end, since no test can come after it."""
    wait_for(lambda: settled(two), two)
    with connected(two) as at:
        streams = [stream(client, place, f"last-{place}") for place, (client,) in enumerate(at)]
        wait_for(lambda: all(each.text for each in streams), two)
        os.killpg(two.process.pid, signal.SIGINT)  # Ctrl-C reaches the whole group
        assert read(streams) == undisturbed[:2], "a running answer may end"
    assert two.ends() == 0
    assert "Traceback" not in two.said


def stream(client: Client, number: int, id: str) -> Stream:
    """A stream for one of ASKS."""
    prompt, how = ASKS[number]
    return Stream(client, prompt, TOKENS, id, **how)


def read(streams: Iterable[Stream]) -> list[str]:
    """The texts of streams, once each has ended."""
    texts: list[str] = []
    for each in streams:
        each.join(LIMIT_S)
        assert not each.is_alive()
        assert each.error is None
        texts.append(each.text)
    return texts


def test_answers_are_those_of_one_alone_whichever_replica_gives_them(two: Server, undisturbed: list[str]) -> None:
    with connected(two, 2) as at:
        for number in (0, 2):
            streams = [
                stream(client, number + place, f"same-{number}-{place}-{replica}")
                for replica, clients in enumerate(at)
                for place, client in enumerate(clients)
            ]
            assert read(streams) == undisturbed[number : number + 2] * 2
            assert [replica_of(two, each.id) for each in streams] == ["replica-0"] * 2 + ["replica-1"] * 2


def test_each_replica_knows_the_pages_that_a_worker_has_of_a_conversation_that_another_began(two: Server) -> None:
    """The choice of a worker also depends on measured step times: see tests/router/test_placement.py."""
    with connected(two) as ((first,), (other,)):
        for number, (asks, returns) in enumerate(((first, other), (other, first))):
            text = f"Chapter {number}. " + "The river runs by the house and on to the sea. " * 30
            "".join(asks.ask(text, 4, f"begun-{number}"))
            worker = worker_of(two, f"begun-{number}")
            for turn in range(1000):  # until the replica has received the worker's cache events
                "".join(returns.ask(f"{text} And then", 1, id := f"again-{number}-{turn}"))
                (sent,) = job_of(two, id)["sent"]
                known = {each["worker"]: each["cached_tokens"] for each in (sent["expected"], *sent["instead"])}
                if known[worker] >= 256:
                    break
            assert known[worker] >= 256
            assert replica_of(two, f"begun-{number}") != replica_of(two, id)
            "".join(returns.ask(f"{text} And then", 1, f"last-{number}"))
            job = job_of(two, f"last-{number}")
            (sent,) = job["sent"]  # perhaps to the other worker, which may have cached more than the replica knows of
            assert job["cached_tokens"] >= sent["expected"]["cached_tokens"]
            assert sent["expected"]["cached_tokens"] >= 256 or sent["expected"]["worker"] != worker


def test_a_response_that_one_keeps_goes_on_at_the_other(two: Server) -> None:
    with connected(two) as ((first,), (other,)):
        clients = first, other
        asked = {"model": "kimi-nano", "input": "Hello", "max_output_tokens": 4}
        kept = [client.post("/v1/responses", asked) for client in clients]
        assert [status for status, _ in kept] == [200, 200]
        for client, (_, answer) in zip(clients[::-1], kept, strict=True):
            status, more = client.post("/v1/responses", {**asked, "previous_response_id": answer["id"]})
            assert (status, more["previous_response_id"]) == (200, answer["id"])
            assert more["usage"]["input_tokens"] > answer["usage"]["input_tokens"]


def test_a_replica_that_is_killed_under_load_ends_its_own_streams_alone(two: Server, undisturbed: list[str]) -> None:
    wait_for(lambda: settled(two), two)
    counted, before = scraped(two), epochs(two)
    earlier = {name: replica["epoch"] for name, replica in admin(two, "status")["replicas"].items()}
    with connected(two, 2) as (doomed, spared):
        long = "The river runs by the house and on to the sea. " * 60
        lost = [Stream(client, f"Part {n}. {long}", ENDLESS, f"lost-{n}") for n, client in enumerate(doomed)]
        wait_for(lambda: all(each.text for each in lost), two)
        kept = [stream(client, n, f"kept-{n}") for n, client in enumerate(spared)]
        most = 5 * len(kept)  # the most pages that these can hold
        wait_for(lambda: all(each.text for each in kept) and pages_used(two) > most, two)
        os.kill(admin(two, "status")["replicas"]["replica-0"]["pid"], signal.SIGKILL)
        wait_for(lambda: jobs(two) <= len(kept) and pages_used(two) <= most, two)
        for each in lost:
            each.join(LIMIT_S)
            assert isinstance(each.error, ConnectionError), "its client sees the end of the connection"
        assert read(kept) == undisturbed[:2]
    wait_for(lambda: settled(two), two)
    killed, other = (admin(two, "status")["replicas"][name] for name in ("replica-0", "replica-1"))
    assert (killed["epoch"], other["epoch"]) == (earlier["replica-0"] + 1, earlier["replica-1"])
    assert other["lost_before"] is None
    assert "code -9" in killed["lost_before"]
    assert epochs(two) == before
    with connected(two) as at:
        streams = [stream(client, 2, f"after-{place}") for place, (client,) in enumerate(at)]
        assert read(streams) == [undisturbed[2]] * 2
    now = scraped(two)
    assert all(now[name] >= number for name, number in counted.items()), "counters never decrease"


def scraped(server: Server) -> dict[str, float]:
    """The counters of /metrics, except those of single processes."""
    request = Request(f"{server.url}/metrics", headers={"authorization": "Bearer alice"})
    with urlopen(request, timeout=LIMIT_S) as answer:
        lines = answer.read().decode().splitlines()
    samples = [line.rpartition(" ") for line in lines if re.match(r"(vllm|redline):\w+(_total|_count)\{", line)]
    assert samples
    return {name: float(number) for name, _, number in samples}


def prompt_tokens(server: Server) -> float:
    """The prompt tokens of all requests so far. A scrape may be some time old, since replicas cache it."""
    return scraped(server)['vllm:prompt_tokens_total{engine="0",model_name="kimi-nano"}']


def test_streams_of_both_go_on_where_a_worker_is_killed_and_the_other_replaced(
    two: Server, undisturbed: list[str]
) -> None:
    wait_for(lambda: settled(two), two)
    before = epochs(two)
    with connected(two, 2) as (first, other):
        streams = [stream(client, n, f"moved-{n}") for n, client in enumerate((*first, *other))]
        wait_for(lambda: all(len(each.text) > 20 for each in streams), two)
        name = worker_of(two, streams[0].id)
        (other_name,) = {"worker-0", "worker-1"} - {name}
        running = [each for each in streams if each.is_alive() and worker_of(two, each.id) == name]
        os.kill(admin(two, "status")["workers"][name]["pid"], signal.SIGKILL)
        # A job that had its last token before the kill stays on its worker.
        wait_for(lambda: all(not each.is_alive() or worker_of(two, each.id) == other_name for each in running), two)
        assert admin(two, f"workers/{other_name}/replace", "POST")["worker"] == other_name
        assert read(streams) == undisturbed
    wait_for(lambda: epochs(two) == [epoch + 1 for epoch in before], two)
    wait_for(lambda: settled(two), two)


def test_a_key_s_limit_holds_across_replicas(two: Server) -> None:
    wait_for(lambda: settled(two), two)
    with connected(two) as ((first,), (other,)):
        running = Stream(first, "On and on", ENDLESS, "bob", key="bob")
        wait_for(lambda: running.text, two)
        body = {"prompt": "a", "max_tokens": 1}
        wait_for(lambda: other.status(body, "bob") == 429, two)  # once the replicas have exchanged their use of the key
        assert other.status(body) == 200, "another key is not limited"
        first.leave()
        running.join(LIMIT_S)
        wait_for(lambda: other.status(body, "bob") == 200, two)


def test_the_operator_is_told_of_the_server_and_not_of_a_replica(two: Server) -> None:
    wait_for(lambda: settled(two), two)
    with connected(two) as ((first,), (other,)):
        before = prompt_tokens(two)  # a moment old, up to a few tokens of the requests of `connected`
        for place, client in enumerate((first, other)):
            "".join(client.ask("a b c d " * 300, 3, f"counted-{place}"))
        status = admin(two, "status")
        assert status["keys"]["alice"]["requests"] >= 2
        assert status["sla"]["default"]["ttft_ms"] == 1000000
        assert status["sla"]["default"]["ttft_met"] >= 2, "the sum of both replicas"
        each = job_of(two, "counted-0")["prompt_tokens"]
        wait_for(lambda: prompt_tokens(two) >= before + 2 * each, two)
        "".join(first.ask("a", 3, "later"))
        assert prompt_tokens(two) < before + 3 * each, "requests are not counted by both replicas"
        kept = [number for name, number in scraped(two).items() if name.startswith("redline:sla_requests_total")]
        assert sum(kept) >= 2
    console = Console(width=160, record=True, file=io.StringIO())
    show(admin(two, "requests/counted-1"), console)
    assert f"at {replica_of(two, 'counted-1')}" in console.export_text(), "as redline explain prints it"


def test_no_role_changes_and_the_operator_is_told_why(two: Server) -> None:
    with pytest.raises(HTTPError) as error:
        admin(two, "workers/worker-0/role", "POST", b'{"role": "prefill"}')
    with error.value as refused:
        assert refused.code == 409
        assert "leave api_replicas out" in refused.read().decode()
    with pytest.raises(HTTPError) as error:
        admin(two, "workers/nobody/role", "POST", b'{"role": "prefill"}')
    with error.value as refused:
        assert refused.code == 404


def test_keys_are_read_again_by_all(two: Server) -> None:
    keys = Path(two.process.args[-1]).parent / "keys.txt"  # type: ignore[index]
    keys.write_text("alice alice\nbob bob concurrency=1\ncarol carol\n")
    os.kill(two.process.pid, signal.SIGHUP)  # without a terminal SIGHUP makes the server read its keys again
    wait_for(lambda: two.said.count("3 keys are in effect now") >= 2, two)
    with connected(two) as at:
        assert [client.status({"prompt": "a", "max_tokens": 1}, "carol") for (client,) in at] == [200, 200]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replicas") / "tiny"
    random_checkpoint(folder, kernel_config(vocab_size=TINY_VOCAB))
    return write_tiny_tokenizer(folder)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a short path: the path of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="r-") as folder:
        yield Path(folder)


def test_https_over_a_socket_in_the_file_system_and_no_process_is_left_of_a_server_that_is_killed(
    tiny: Path, place: Path
) -> None:
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", place / "key.pem", "-out", place / "cert.pem"]
    subprocess.run([*make, *names, *files], check=True, capture_output=True, timeout=LIMIT_S)
    (place / "t").mkdir()
    (place / "d.toml").write_text(
        f'weights = {json.dumps(str(tiny))}\napi_replicas = 2\nunix_socket = "r.sock"\ntls_cert = "cert.pem"\n'
        'tls_key = "key.pem"\n[engine]\nkv_memory = "20MB"\n'
    )
    server = Server(place / "d.toml", environment={"TMPDIR": str(place / "t")})
    try:
        wait_for(lambda: "is ready at" in server.said or server.process.poll() is not None, server)
        asking = ["curl", "--silent", "--show-error", "--unix-socket", place / "r.sock", "--cacert", place / "cert.pem"]
        body = ["-H", "content-type: application/json", "-d", '{"prompt": "the", "min_tokens": 3, "max_tokens": 3}']
        for _ in range(2):
            told = subprocess.run(
                [*asking, *body, "https://localhost/v1/completions"], check=True, capture_output=True, timeout=LIMIT_S
            )
            assert json.loads(told.stdout)["usage"]["completion_tokens"] == 3
        server.process.kill()
        assert server.ends() == -signal.SIGKILL
        assert not [*(place / "t").glob("redline-*")]
        assert "Traceback" not in server.said
    finally:
        server.close()


def test_a_model_that_cannot_be_loaded_is_said_in_one_line(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text(
        f'weights = {json.dumps(str(tiny))}\nport = 0\napi_replicas = 2\n[engine]\nkv_memory = "1"\n'
    )
    server = Server(tmp_path / "d.toml")
    try:
        wait_for(lambda: server.process.poll() is not None, server)
        assert server.ends() == 1
        assert "kv" in server.said.lower()
        assert "Traceback" not in server.said
    finally:
        server.close()
