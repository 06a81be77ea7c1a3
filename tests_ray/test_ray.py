"""Workers on the two nodes of a Ray cluster, all of it on loopback: placed, started again, moved, ended."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from redline.model.k2.write import random_checkpoint
from tests.deploy.test_machines import (
    ADMIN_KEY,
    ANSWER,
    CLUSTER_KEY,
    Machines,
    again,
    the_same,
    tokens_of,
    tokens_while,
)
from tests.deploy.test_serve import Server, wait_for
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer

pytestmark = pytest.mark.timeout(300)
NODE = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "include_dashboard": False, "object_store_memory": 80 << 20}


class ByRay(Machines):
    """A server whose two workers are wherever Ray has room for one."""

    def __init__(self, folder: Path, address: str) -> None:
        random_checkpoint(folder / "tiny", kernel_config(vocab_size=TINY_VOCAB))
        write_tiny_tokenizer(folder / "tiny")
        (folder / "admin.txt").write_text(f"{ADMIN_KEY}\n")
        (folder / "cluster.key").write_text(f"{CLUSTER_KEY}\n")
        (folder / "cluster.key").chmod(0o600)
        (folder / "ray.toml").write_text(
            'weights = "tiny"\nport = 0\nadmin_port = 0\nadmin_keys_file = "admin.txt"\n'
            '[cluster]\nkind = "ray"\nlisten = "127.0.0.1:0"\nkey_file = "cluster.key"\n'
            '[engine]\ndevice = "cpu"\nkv_memory = "20MB"\n[engine.speculation]\ntype = "suffix"\n'
            '[[workers]]\ncount = 2\nname = "w"\n'
        )
        self.agents = {}
        self.server = Server(folder / "ray.toml", environment={"RAY_ADDRESS": address})


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    two = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        two.add_node(**{key: value for key, value in NODE.items() if key != "include_dashboard"})
        yield two
    finally:
        two.shutdown()


@pytest.fixture(scope="module")
def machines(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ByRay]:
    both = ByRay(tmp_path_factory.mktemp("ray"), cluster.address)
    try:
        wait_for(lambda: "flush=True)" in both.server.said or both.server.process.poll() is not None, both.server)
        wait_for(both.all_ready, both)
        yield both
    finally:
        both.close()


def parents() -> dict[int, int]:
    """Process -> its parent, of all that live."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z":
                found[int(entry.name)] = int(parent)
    return found


def raylet(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid


def workers_below(node: Any) -> dict[int, int]:
    """Worker -> its agent's process, of those whose agents a node has."""
    above = parents()
    ours: dict[int, int] = {}
    for pid in above:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"redline.worker.main" in words and above.get(above[pid]) == raylet(node):
            ours[pid] = above[pid]
    return ours


def test_each_node_has_an_agent_and_both_answer(cluster: Cluster, machines: ByRay) -> None:
    nodes = cluster.list_all_nodes()
    assert [len(workers_below(node)) for node in nodes] == [1, 1]
    assert {name: worker["at"] for name, worker in machines.workers().items()} == {"w-0": "w-0", "w-1": "w-1"}
    first = tokens_of(machines, 0)
    answers = tokens_while(machines, range(4), lambda: None)
    assert answers[0] == first
    assert all(len(answer) == ANSWER for answer in answers.values())


def test_the_api_has_none_of_ray_and_the_key_is_nowhere_in_it(cluster: Cluster, machines: ByRay) -> None:
    maps = Path(f"/proc/{machines.server.process.pid}/maps").read_text()
    assert "_raylet" not in maps
    for pid in parents():
        try:
            shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        assert pid == os.getpid() or CLUSTER_KEY.encode() not in shown
    assert CLUSTER_KEY not in machines.said
    session = Path(cluster.head_node.get_session_dir_path())
    logs = [path for path in session.rglob("*") if path.is_file()]
    assert logs
    assert not [path for path in logs if CLUSTER_KEY.encode() in path.read_bytes()]


def test_an_agent_that_is_killed_is_started_again_by_ray_and_its_streams_go_on(
    cluster: Cluster, machines: ByRay
) -> None:
    wait_for(machines.all_ready, machines)
    epochs = {name: worker["epoch"] for name, worker in machines.workers().items()}
    ((worker, agent),) = workers_below(cluster.list_all_nodes()[1]).items()
    answers = tokens_while(machines, range(10, 14), lambda: os.kill(agent, signal.SIGKILL))
    wait_for(lambda: worker not in parents(), machines)
    wait_for(lambda: any(again(machines, name, epoch) for name, epoch in epochs.items()), machines)
    assert the_same(machines, answers)


def test_a_node_that_is_lost_loses_no_stream_and_another_takes_its_worker(cluster: Cluster, machines: ByRay) -> None:
    wait_for(machines.all_ready, machines)
    epochs = {name: worker["epoch"] for name, worker in machines.workers().items()}
    lost = cluster.list_all_nodes()[1]
    ((worker, _),) = workers_below(lost).items()
    answers = tokens_while(machines, range(20, 24), lambda: os.kill(raylet(lost), signal.SIGKILL))
    wait_for(lambda: worker not in parents(), machines)
    assert the_same(machines, answers), "by the other"
    cluster.remove_node(lost)
    new = cluster.add_node(**{key: value for key, value in NODE.items() if key != "include_dashboard"})
    wait_for(lambda: any(again(machines, name, epoch) for name, epoch in epochs.items()), machines)
    wait_for(machines.all_ready, machines)
    assert len(workers_below(new)) == 1


def test_it_ends_cleanly_and_leaves_the_cluster(cluster: Cluster, machines: ByRay) -> None:
    machines.server.process.terminate()
    assert machines.server.ends() == 0
    nodes = cluster.list_all_nodes()
    wait_for(lambda: not any(workers_below(node) for node in nodes), machines)
    assert all(raylet(node) in parents() for node in nodes)
    assert "Traceback" not in machines.server.said
    own = re.compile(r"(\S*\(AgentActor pid=\d+\)\S* )?\d{4}-\d\d-\d\d \S+ [A-Z]+ (?!POST|GET)")
    print(*filter(own.match, machines.server.said.splitlines()), sep="\n")
