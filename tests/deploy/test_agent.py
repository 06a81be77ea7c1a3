"""An agent and the server's side of it in one process: orders, worker ends, missed heartbeats, and refused agents."""

import asyncio
import subprocess
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from redline.deploy import agent as agents
from redline.deploy import machines as server
from redline.deploy.agent import Agent, AgentConfig, agent_of, check_name
from redline.deploy.cluster import LEAST_KEY
from redline.deploy.machines import QUIET, Machines, RemoteProcess
from redline.errors import ConfigError
from redline.limits import FILES
from redline.messages.channel import SocketOutbox
from redline.messages.machines import Order
from redline.worker.config import EngineConfig, WorkerConfig
from tests.waiting import LIMIT_S, eventually

pytestmark = pytest.mark.anyio

KEY = "a shared key of forty characters, no less"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Workers:
    """Stands in for `start_worker`: starts processes that only sleep, and records the config of each."""

    def __init__(self) -> None:
        self.told: list[WorkerConfig] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.most = 0

    def __call__(self, config: WorkerConfig, devices: tuple[int, ...]) -> "subprocess.Popen[bytes]":
        self.told.append(config)
        self.processes.append(subprocess.Popen(["sleep", "100"], stdin=subprocess.PIPE))
        self.most = max(self.most, self.running)
        return self.processes[-1]

    @property
    def running(self) -> int:
        return sum(process.poll() is None for process in self.processes)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    made = Workers()
    monkeypatch.setattr(agents, "start_worker", made)
    for module in (agents, server):
        monkeypatch.setattr(module, "SAY_S", 0.05)
    return made


@asynccontextmanager
async def living(life: Any) -> AsyncGenerator[Any]:
    """Run `life.live()` as a task while the context is open."""
    task = asyncio.create_task(life.live())
    try:
        yield life
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=LIMIT_S)


@asynccontextmanager
async def a_server(listen: str = "127.0.0.1:0") -> AsyncGenerator[Machines]:
    with Machines(listen, KEY) as made:
        async with living(made):
            yield made


def an_agent(machines: Machines, name: str = "gpu-1", key: str = KEY) -> Agent:
    return Agent(machines.address, key, name, "127.0.0.1")


def order(name: str = "one", epoch: int = 1, outbox: str = "tcp://127.0.0.1:9", **more: Any) -> Order:
    config = WorkerConfig(weights="w", engine=EngineConfig(), inbox="", outbox=outbox, name=name, epoch=epoch, **more)
    return Order(name=name, epoch=epoch, config=msgspec.json.encode(config))


async def joined(machines: Machines, name: str = "gpu-1") -> None:
    await asyncio.wait_for(machines.joined(name), LIMIT_S)


async def heard_again(machines: Machines, name: str = "gpu-1", times: int = 3) -> None:
    """Wait for `times` more messages of a machine, so that the effects of earlier ones have arrived."""
    for _ in range(times):
        word = machines._joined[name].word
        await eventually(lambda word=word: machines._joined[name].word is not word)


async def test_a_worker_is_started_with_what_the_machine_alone_knows_and_ended_as_ordered(workers: Workers) -> None:
    async with a_server() as machines, living(an_agent(machines)):
        await joined(machines)
        process = machines.start("gpu-1", order())
        await eventually(lambda: workers.running == 1)
        told = workers.told[0]
        assert (told.weights, told.inbox, told.key) == ("w", "tcp://127.0.0.1:*", KEY)
        assert not process.ended.done()
        process.kill()
        await asyncio.wait_for(process.ended, LIMIT_S)
        assert workers.running == 0
        assert not process.gone


async def test_its_end_is_told_with_its_code_and_the_next_start_runs_alone(workers: Workers) -> None:
    async with a_server() as machines, living(an_agent(machines)):
        await joined(machines)
        first = machines.start("gpu-1", order())
        await eventually(lambda: workers.running == 1)
        workers.processes[0].terminate()
        assert await asyncio.wait_for(first.ended, LIMIT_S) == " with code -15"
        machines.start("gpu-1", order(epoch=2))
        await eventually(lambda: workers.running == 1)
        machines.start("gpu-1", order(epoch=3))  # while the second still runs
        await eventually(lambda: [told.epoch for told in workers.told] == [1, 2, 3])
        assert workers.most == 1


async def test_several_workers_of_a_machine_have_lives_of_their_own(workers: Workers) -> None:
    async with a_server() as machines, living(an_agent(machines)):
        await joined(machines)
        one, two = machines.start("gpu-1", order("one")), machines.start("gpu-1", order("two"))
        await eventually(lambda: workers.running == 2)
        one.kill()
        await asyncio.wait_for(one.ended, LIMIT_S)
        await heard_again(machines)
        assert workers.running == 1
        assert not two.ended.done()


async def test_an_agent_ends_its_workers_with_itself(workers: Workers) -> None:
    async with a_server() as machines:
        async with living(an_agent(machines)):
            await joined(machines)
            machines.start("gpu-1", order())
            await eventually(lambda: workers.running == 1)
        assert workers.running == 0


async def test_workers_that_no_server_hears_of_are_ended(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "ALONE", 30)
    with Machines("127.0.0.1:0", KEY) as machines:
        life = asyncio.create_task(machines.live())
        async with living(an_agent(machines)):
            await joined(machines)
            machines.start("gpu-1", order())
            await eventually(lambda: workers.running == 1)
            life.cancel()  # as if the server had been killed: it sends nothing more
            await asyncio.wait({life})
            await eventually(lambda: workers.running == 0)


async def test_a_server_that_was_started_anew_has_none_of_the_workers_of_the_one_before(workers: Workers) -> None:
    async with AsyncExitStack() as opened:
        with Machines("127.0.0.1:0", KEY) as before:
            life = asyncio.create_task(before.live())
            listen = before.address.removeprefix("tcp://")
            await opened.enter_async_context(living(an_agent(before)))
            await joined(before)
            before.start("gpu-1", order())
            await eventually(lambda: workers.running == 1)
            life.cancel()
            await asyncio.wait({life})
            before._door.close()
            machines = await opened.enter_async_context(living(await bound(listen)))
            await joined(machines)
            second = machines.start("gpu-1", order("two"))  # the same epoch as the worker of the previous server
            await eventually(lambda: len(workers.told) == 2 and workers.running == 1)
            assert workers.told[1].name == "two"
            assert not second.ended.done()
            machines.close()


async def bound(listen: str) -> Machines:
    """A listener on `listen`. Retries, because ZeroMQ releases the port in the background, shortly after the close."""

    def made() -> Machines | None:
        with suppress(ConfigError):
            return Machines(listen, KEY)
        return None

    found = await eventually(made)
    assert found is not None
    return found


async def test_what_cannot_be_started_is_said_and_named(workers: Workers) -> None:
    async with a_server() as machines, living(an_agent(machines)):
        await joined(machines)
        for number, (bad, why) in enumerate(
            [
                (order(outbox="ipc:///tmp/elsewhere"), "which is not on the network"),
                (Order(name="two", epoch=1, config=b"{}"), "gpu-1 cannot start it: Object missing required field"),
            ]
        ):
            process = machines.start("gpu-1", msgspec.structs.replace(bad, name=f"bad-{number}"))
            assert why in await asyncio.wait_for(process.ended, LIMIT_S)
        assert workers.told == []


async def test_a_machine_that_is_silent_counts_as_gone_and_so_do_its_workers(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GONE", 30)
    async with a_server() as machines, living(agent := an_agent(machines)):
        await joined(machines)
        wanted, killed = machines.start("gpu-1", order("one")), machines.start("gpu-1", order("two"))
        await eventually(lambda: workers.running == 2)
        agent._word = lambda: None  # type: ignore[method-assign, return-value]
        agent._changed.set()
        await eventually(lambda: machines._joined["gpu-1"].unheard >= QUIET)
        assert not killed.ended.done()
        killed.kill()
        assert "gpu-1 sends no reports" in await asyncio.wait_for(killed.ended, LIMIT_S)
        assert not wanted.ended.done(), "its stream may go on yet"
        assert "no report from the agent of gpu-1 for 30 s" in await asyncio.wait_for(wanted.ended, LIMIT_S)
        assert wanted.gone
        assert killed.gone


async def test_an_agent_that_leaves_has_its_workers_told_and_ends_with_them(workers: Workers) -> None:
    async with a_server() as machines:
        agent = an_agent(machines)
        life = asyncio.create_task(agent.live())
        await joined(machines)
        process = machines.start("gpu-1", order())
        await eventually(lambda: workers.running == 1)
        agent.leave()
        await asyncio.wait_for(process.leaving.wait(), LIMIT_S)
        with pytest.raises(OSError, match="gpu-1 has left"):
            machines.start("gpu-1", order("two"))
        assert not life.done(), "its worker has not ended"
        process.kill()
        await asyncio.wait_for(life, LIMIT_S)
        await eventually(lambda: "gpu-1" not in machines._joined)
        assert await process.ended


async def test_who_is_asked_twice_to_leave_ends_at_once(workers: Workers) -> None:
    async with a_server() as machines:
        agent = an_agent(machines)
        life = asyncio.create_task(agent.live())
        await joined(machines)
        machines.start("gpu-1", order())
        await eventually(lambda: workers.running == 1)
        agent.leave()
        agent.leave()
        await asyncio.wait_for(life, LIMIT_S)
        assert workers.running == 0


async def test_an_agent_whose_server_is_not_there_leaves_when_it_is_told_to(workers: Workers) -> None:
    agent = Agent("tcp://127.0.0.1:9", KEY, "gpu-1", "127.0.0.1")
    life = asyncio.create_task(agent.live())
    await eventually(lambda: agent._unanswered >= 2)
    agent.leave()
    await asyncio.wait_for(life, LIMIT_S)


async def test_agents_that_are_not_taken_in_are_told_why(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_server() as machines, living(an_agent(machines)):
        await joined(machines)
        process = machines.start("gpu-1", order())
        await eventually(lambda: workers.running == 1)
        async with living(an_agent(machines)):
            await eventually(lambda: "the server refused this agent: another agent has joined as gpu-1" in caplog.text)
            assert caplog.text.count("the agent of gpu-1 is refused") == 1, "however often it asks"
        monkeypatch.setattr(agents, "__version__", "9.9")
        async with living(an_agent(machines, "gpu-2")):
            await eventually(
                lambda: "the server refused this agent: it runs Redline 9.9, and the server " in caplog.text
            )
        assert list(machines._joined) == ["gpu-1"]
        assert not process.ended.done()


async def test_an_agent_with_another_key_is_not_heard_and_both_sides_log_it_once(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    def said(words: str) -> int:
        return sum(words in line for line in caplog.messages)

    async with a_server() as machines, living(an_agent(machines, key="another key of forty characters, no less")):
        await eventually(lambda: said("is --key-file the same key as its cluster.key_file?"))
        await eventually(lambda: said("is the --key-file of each agent the same key as cluster.key_file?"))
        looks = machines._strangers_told
        await eventually(lambda: machines._strangers_told != looks, "another look")
        assert machines._joined == {}
    assert said("closes every connection") == 1
    assert said("connections were refused") == 1


async def test_an_agent_without_a_server_logs_once_that_nobody_answers(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    async with living(Agent("tcp://127.0.0.1:9", KEY, "gpu-1", "127.0.0.1")) as agent:
        await eventually(lambda: agent._unanswered > 2 * agents.REJOIN)
    assert [line for line in caplog.messages if "has not answered" in line] == [
        "tcp://127.0.0.1:9 has not answered for 10 s: is --join the server's cluster.listen?"
    ]


async def test_what_is_not_understood_is_said_and_does_no_harm(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages from a peer with the key but another version, sent to the server's socket and to an agent's."""
    async with a_server() as machines, living(agent := an_agent(machines)):
        await joined(machines)
        process = machines.start("gpu-1", order())
        await eventually(lambda: workers.running == 1)
        heads = (b"", b"short", bytes(16) + b"\xc1", bytes(8) + b"\1" + bytes(7) + b"\x81\xa4type\xa7Unknown")
        for address in (machines.address, agent._inbox):
            with SocketOutbox(address, KEY.encode()) as friend:
                for head in heads:
                    friend._socket.send(head)
        await eventually(lambda: "an agent sent a message that cannot be decoded" in caplog.text)
        await eventually(lambda: f"{machines.address} sent a message that cannot be decoded" in caplog.text)
        second = machines.start("gpu-1", order("two"))
        await eventually(lambda: workers.running == 2)
        second.kill()
        await asyncio.wait_for(second.ended, LIMIT_S)
        assert not process.ended.done()


# -------------------------------------------------------------------------------------------- configuration


def config(folder: Path, **other: Any) -> AgentConfig:
    key_file = folder / "cluster.key"
    if not key_file.exists():
        key_file.write_text(KEY)
        key_file.chmod(0o640)
    return AgentConfig(**{"join": "tcp://127.0.0.1:7600", "key_file": key_file, "name": "gpu-1", **other})


def test_an_agent_raises_the_bound_on_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers inherit the limit."""
    bounds = [(1024, 1 << 20)]
    monkeypatch.setattr("resource.getrlimit", lambda _: bounds[-1])
    monkeypatch.setattr("resource.setrlimit", lambda _, pair: bounds.append(pair))
    agent_of(config(tmp_path))
    assert bounds[-1] == (FILES, 1 << 20)


def test_its_own_address_is_the_one_towards_the_server(tmp_path: Path) -> None:
    assert agent_of(config(tmp_path))._listen == "127.0.0.1"
    assert agent_of(config(tmp_path, listen="127.0.0.2"))._listen == "127.0.0.2"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"join": "127.0.0.1:7600"}, "--join is '127.0.0.1:7600'; expected tcp://HOST:PORT"),
        ({"join": "tcp://127.0.0.1:70000"}, "--join is .*; expected tcp://HOST:PORT"),
        ({"listen": "0.0.0.0"}, "--listen is at 0.0.0.0, all addresses of this machine; give the one"),
        ({"listen": "*"}, r"--listen is at '\*'; expected the IPv4 address"),
        ({"listen": "eth0"}, "--listen is at 'eth0'; expected the IPv4 address"),
        ({"key_file": Path("/nowhere/key")}, "--key-file: /nowhere/key cannot be read: No such file"),
    ],
)
def test_what_it_is_told_wrongly_is_said_in_one_line(tmp_path: Path, other: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        agent_of(config(tmp_path, **other))


@pytest.mark.parametrize("bit", [0o004, 0o002, 0o001])
def test_a_key_that_every_user_can_use_is_refused(tmp_path: Path, bit: int) -> None:
    told = config(tmp_path)
    told.key_file.chmod(0o600 | bit)
    with pytest.raises(ConfigError, match=r"every user of this machine can use .*: chmod o= "):
        agent_of(told)


def test_a_key_that_could_be_guessed_is_refused(tmp_path: Path) -> None:
    told = config(tmp_path)
    told.key_file.write_text("x" * (LEAST_KEY - 1) + "\n")
    with pytest.raises(ConfigError, match="has 31 characters; expected at least 32"):
        agent_of(told)


@pytest.mark.parametrize("name", ["", "a b", "x" * 64, "é", "a/b"])
def test_a_name_that_no_deployment_could_say_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--name is "):
        check_name(name)
    assert check_name("gpu-1.rack_2") == "gpu-1.rack_2"


def test_a_port_in_use_is_said_with_its_key() -> None:
    async def twice() -> None:
        with Machines("127.0.0.1:0", KEY) as machines:
            listen = machines.address.removeprefix("tcp://")
            with pytest.raises(ConfigError, match=r"cluster\.listen: .*(?i:address already in use)"):
                Machines(listen, KEY)

    asyncio.run(twice())


async def test_a_process_is_told_once_to_end() -> None:
    said: list[str] = []

    class Joined:
        def say(self) -> None:
            said.append("say")

    process = RemoteProcess(Joined(), order())  # type: ignore[arg-type]
    process.kill()
    process.kill()
    assert said == ["say"]
    process.end("first")
    process.end("second", gone=True)
    assert (process.ended.result(), process.gone) == ("first", False)
