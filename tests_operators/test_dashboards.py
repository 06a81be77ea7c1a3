"""Debian's Prometheus reads a loaded `redline serve`: every query gives numbers, and alerts fire when they should.

`make test-operators` runs it. It wants `prometheus` and `promtool` on the PATH (apt-get install prometheus).
"""

import itertools
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from openai import APIError, OpenAI

from lab.trees import free_port
from tests.deploy.test_serve import NANO, Server, wait_for
from tests.operators.queries import EXAMPLES, panels

WINDOW = "15s"  # in the place of Grafana's $__rate_interval, which follows from the scrapes' interval
LOADED_S = 120.0
POOLS = '[[workers]]\nrole = "prefill"\n[[workers]]\nrole = "decode"\n'
SCRAPES = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs: [{{job_name: redline, static_configs: [{{targets: ["{target}"]}}]}}]
"""
TEXT = "Write a function that adds two numbers, and say what each of its lines does. " * 8
SHAPE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}


class Prometheus:
    """One that reads this server every second, and knows the alerts."""

    def __init__(self, target: str, folder: Path) -> None:
        """Starts it on a free port of loopback. folder: for its configuration, its data and what it says."""
        config = folder / "prometheus.yml"
        config.write_text(SCRAPES.format(rules=EXAMPLES / "alerts.yml", target=target))
        self._port = free_port()
        self._said = folder / "said.txt"
        with self._said.open("w") as said:
            words = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
            listens = f"--web.listen-address=127.0.0.1:{self._port}"
            self.process = subprocess.Popen(["prometheus", *words, listens], stdout=said, stderr=said)

    def asked(self, path: str, **fields: str) -> Any:
        """What its API answers. Raises OSError while it does not, or for a query that it refuses."""
        with urlopen(f"http://127.0.0.1:{self._port}/api/v1/{path}?{urlencode(fields)}", timeout=10) as answer:
            return json.load(answer)["data"]

    def numbers(self, query: str) -> list[float]:
        """The finite values of a query at this moment: none where there is no data, or 0 / 0 alone."""
        query = query.replace("$__rate_interval", WINDOW).replace("$instance", ".+")
        values = (float(one["value"][1]) for one in self.asked("query", query=query)["result"])
        return [value for value in values if math.isfinite(value)]

    def has_read(self) -> bool:
        """Whether it has scraped the server."""
        with suppress(OSError):
            return self.numbers("redline:ready") != []
        return False

    def alerts(self) -> dict[str, dict[str, Any]]:
        """By name, those that are pending or fire."""
        return {one["labels"]["alertname"]: one for one in self.asked("alerts")["alerts"]}

    def close(self) -> None:
        """Ends it, and waits for that."""
        self.process.terminate()
        self.process.wait(30)


class World(NamedTuple):
    """A server under load, and who watches it."""

    server: Server
    prometheus: Prometheus


@contextmanager
def watched(folder: Path, workers: str) -> Iterator[World]:
    """A Kimi-Nano with its drafter, requests of all kinds without end, and a Prometheus."""
    (folder / "deployment.toml").write_text(
        f'weights = "{NANO}"\nport = 0\nresume_s = 60\n[requests]\nqueue_tokens = 1500\n'
        '[engine]\nkv_memory = "60MB"\nmax_running = 4\n[engine.speculation]\n'
        f'type = "learned"\ndrafter = "{NANO}-eagle3"\nsuffix = true\n{workers}'
    )
    server = Server(folder / "deployment.toml")
    try:
        server.until_ready()
        prometheus = Prometheus(":".join(map(str, server.address)), folder)
        try:
            wait_for(prometheus.has_read, server)
            with under_load(server):
                yield World(server, prometheus)
        finally:
            prometheus.close()
        server.process.terminate()
        assert server.ends() == 0, server.said
    finally:
        server.close()


@contextmanager
def under_load(server: Server) -> Iterator[None]:
    """Clients that ask, each again as soon as it is answered, until the end."""
    ended = threading.Event()
    kinds = (chat, chat, constrained, leaves, burst)

    def asks(number: int, kind: Callable[[OpenAI, int], None]) -> None:
        with server.client as client:
            for turn in itertools.count():
                if ended.wait(0.1):
                    return
                with suppress(APIError):  # it is refused, or its worker was killed
                    kind(client, number * 100_000 + turn)

    with ThreadPoolExecutor(len(kinds)) as pool:
        futures = [pool.submit(asks, number, kind) for number, kind in enumerate(kinds)]
        try:
            yield
        finally:
            ended.set()
    for future in futures:
        future.result()


def chat(client: OpenAI, number: int) -> None:
    """Half of its prompt is every time the same."""
    messages: list[Any] = [{"role": "user", "content": f"{TEXT}{number} {TEXT}"}]
    for _ in client.chat.completions.create(model=NANO.name, messages=messages, max_tokens=60, stream=True):
        pass


def constrained(client: OpenAI, number: int) -> None:
    """An answer of which a grammar knows a part."""
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SHAPE}}
    messages: list[Any] = [{"role": "user", "content": f"Name city {number}."}]
    client.chat.completions.create(
        model=NANO.name,
        messages=messages,
        max_tokens=60,
        response_format=schema,
        extra_body={"chat_template_kwargs": {"thinking": False}},
    )


def leaves(client: OpenAI, number: int) -> None:
    """A client that has read enough."""
    stream = client.completions.create(model=NANO.name, prompt=f"{number} def f", max_tokens=400, stream=True)
    next(iter(stream))
    stream.close()
    time.sleep(1)


def burst(client: OpenAI, number: int) -> None:
    """More prompts at once than may wait: some of them are turned away."""
    prompts = [f"{number} {place} {TEXT}" for place in range(12)]
    with ThreadPoolExecutor(6) as pool:
        for half in (prompts[::2], prompts[1::2]):
            list(pool.map(lambda prompt: _quietly(client, prompt), half))
    time.sleep(3)


def _quietly(client: OpenAI, prompt: str) -> None:
    with suppress(APIError):
        client.completions.create(model=NANO.name, prompt=prompt, max_tokens=4)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One worker that does everything."""
    with watched(tmp_path_factory.mktemp("one"), "") as world:
        yield world


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A worker that computes prompts, and one that answers."""
    with watched(tmp_path_factory.mktemp("pools"), POOLS) as world:
        yield world


def without_data(world: World, expected: set[str]) -> set[str]:
    """Queries without numbers, once no others than the expected are left, or LOADED_S seconds from now."""
    queries = {(panel["title"], target["refId"]): target["expr"] for panel in panels() for target in panel["targets"]}
    seen: dict[tuple[str, str], list[float]] = {}
    deadline = time.monotonic() + LOADED_S
    while time.monotonic() < deadline:
        seen = {place: world.prometheus.numbers(query) for place, query in queries.items()}
        if {title for (title, _), numbers in seen.items() if not numbers} <= expected:
            break
        time.sleep(0.5)
    for (title, reference), numbers in seen.items():
        print(f"{title}, {reference}: {', '.join(f'{number:.4g}' for number in numbers) or 'no data'}")
    return {title for (title, _), numbers in seen.items() if not numbers}


def test_every_panel_has_data_of_one_worker_but_for_what_two_do(one: World) -> None:
    assert without_data(one, {"Handoffs"}) == {"Handoffs"}


def test_every_panel_has_data_of_two_pools(pools: World) -> None:
    assert without_data(pools, set()) == set()


def test_the_dashboard_finds_the_server(one: World) -> None:
    (choice,) = [
        variable
        for variable in json.loads((EXAMPLES / "grafana.json").read_text())["templating"]["list"]
        if variable["type"] == "query"
    ]
    assert choice["definition"] == "label_values(redline:ready, instance)"
    found = one.prometheus.asked("label/instance/values", **{"match[]": "redline:ready"})
    assert found == [":".join(map(str, one.server.address))]


def test_prometheus_takes_every_alert_and_none_fires_while_all_is_well(one: World) -> None:
    def found() -> set[str]:
        (group,) = one.prometheus.asked("rules")["groups"]
        return {rule["health"] for rule in group["rules"]}

    wait_for(lambda: "unknown" not in found(), one.server)  # each has been evaluated
    assert found() == {"ok"}
    assert not [name for name, alert in one.prometheus.alerts().items() if alert["state"] == "firing"]


def test_a_worker_that_is_killed_raises_two_alerts_and_the_one_is_over_once_it_is_back(one: World) -> None:
    os.kill(max(one.server.workers, key=resident_pages), signal.SIGKILL)  # who holds the model
    seen: dict[str, dict[str, Any]] = {}

    def told() -> bool:
        seen.update(one.prometheus.alerts())
        return {"RedlineNotReady", "RedlineWorkerRestarted"} <= seen.keys()

    wait_for(told, one.server)
    assert seen["RedlineNotReady"]["state"] == "pending", "it loads again within five minutes"
    assert seen["RedlineWorkerRestarted"]["state"] == "firing"
    instance = ":".join(map(str, one.server.address))
    assert seen["RedlineWorkerRestarted"]["annotations"]["summary"] == f"Worker 0 of {instance} was started again"
    wait_for(lambda: "RedlineNotReady" not in one.prometheus.alerts(), one.server)


def resident_pages(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1])


def promtool(*words: str | Path) -> str:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_rules_are_rules() -> None:
    assert "SUCCESS" in promtool("check", "rules", EXAMPLES / "alerts.yml")


def test_each_alert_fires_on_what_is_bad_and_on_nothing_else() -> None:
    assert "SUCCESS" in promtool("test", "rules", EXAMPLES / "alerts_test.yml")


def test_an_alert_that_is_missing_is_noticed(tmp_path: Path) -> None:
    rules = (EXAMPLES / "alerts.yml").read_text()
    (tmp_path / "alerts_test.yml").write_text((EXAMPLES / "alerts_test.yml").read_text())
    for alert in ("RedlineDown", "RedlineAcceptanceFallen"):
        (tmp_path / "alerts.yml").write_text(rules.replace(f"alert: {alert}\n", "alert: Another\n"))
        with pytest.raises(AssertionError, match=f"FAILED(?s:.*){alert}"):
            promtool("test", "rules", tmp_path / "alerts_test.yml")
