"""`redline serve`: worker processes with the model, one API process with everything else, and the life of all.

This process has the API. It claims its port first, so that a port in use is said at once; starts the workers, and
serves while they load, if only to say so; prints how to reach the server once the model is loaded; starts a worker
again that ends; and stops the workers when it stops itself.
"""

import asyncio
import errno
import gc
import json
import logging
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.text import Text

from redline.api.access import is_loopback
from redline.api.admin import create_admin_app
from redline.api.budget import Connections
from redline.api.cors import check_origins
from redline.api.edge import measure_lag
from redline.api.keys import read_keys
from redline.api.metrics import Metrics
from redline.api.scrape import create_metrics_app
from redline.api.server import Server
from redline.api.spans import open_spans
from redline.api.tls import server_context
from redline.chat.conversation import Conversation, Message
from redline.chat.template import Style, encode, style_of
from redline.chat.tokenizer import Tokenizer
from redline.disk import drop_held
from redline.errors import CheckpointError, ConfigError, RedlineError
from redline.fleet.config import ADMIN_HOST, ServeConfig
from redline.fleet.front import Doors, end, limits_of, open_front, serve_beside
from redline.fleet.lines import lines_on_stderr
from redline.fleet.machines import Machines, open_machines
from redline.fleet.process import STOP_SIGNALS
from redline.fleet.replicas import serve_replicas
from redline.fleet.signals import Signals
from redline.fleet.supervisor import Supervisor
from redline.folder import check_drafter, check_model
from redline.wire.news import Ready
from redline.worker.config import SUFFIX, DraftConfig, Learned

log = logging.getLogger("redline.fleet")

KEY_VARIABLE = "REDLINE_API_KEY"  # where the printed lines look for a key
GRACE_S = 3.0  # for clients to be told that it is over
IDLE_S = 0.05  # between two looks whether answers still run
EXAMPLE = "What is 347 + 586?"
LEAST_ANSWER = 16  # tokens
SWITCH_S = 0.0005  # for so long a thread that encodes keeps the interpreter while the event loop waits for it


def serve(config: ServeConfig, console: Console) -> int:
    """Serve until one of STOP_SIGNALS comes (returns 0), or until worker or server end by themselves (returns 1).

    Raises ConfigError for what is wrong with the deployment or its files, and where the worker cannot load the model;
    WorkerLost where it ends while loading and cannot say why.
    """
    folder = Path(config.weights)
    here = any(place.at is None for place in config.places)
    check_model(folder, weights=here and config.engine.random_weights is None)
    speculation = config.engine.speculation
    if speculation is not None and here:
        _check_drafting(speculation)
    check_origins(config.cors_origins)
    if config.keys_file is not None:
        read_keys(Path(config.keys_file), config.per_key, config.sla)  # before a model is loaded for minutes
    if config.admin_keys_file is not None:
        read_keys(Path(config.admin_keys_file))
    if config.tls_cert is not None and config.tls_key is not None:
        _check_tls(config.tls_cert, config.tls_key)
    with ExitStack() as listeners:
        listener = listeners.enter_context(
            _listen(config.host, config.port) if config.unix_socket is None else _listen_at(config.unix_socket)
        )
        if config.unix_socket is not None:
            listeners.callback(Path(config.unix_socket).unlink, missing_ok=True)
        admin = None
        if config.admin_port is not None or _for_this_machine(config):
            admin = listeners.enter_context(_listen(ADMIN_HOST, config.admin_port or 0, "admin_port"))
        scrape = None
        if config.metrics_port is not None:
            scrape = listeners.enter_context(_listen(config.host, config.metrics_port, "metrics_port"))
        return _serve_at(config, folder, Doors(listener, admin, scrape), console)


def _for_this_machine(config: ServeConfig) -> bool:
    """Whether it serves whoever uses this machine, without keys: then it has admin routes with a key of its own."""
    return (
        config.admin_keys_file is None
        and config.keys_file is None
        and config.unix_socket is None
        and is_loopback(config.host)
    )


def _serve_at(config: ServeConfig, folder: Path, doors: Doors, console: Console) -> int:
    for warning in _warnings(config):
        with suppress(OSError):  # as of a file on a full disk, which is logged once the server is ready
            console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)
    sys.setswitchinterval(SWITCH_S)
    with lines_on_stderr(config.log_level, as_json=config.access_log == "json"):
        try:
            return uvloop.run(_serve(config, folder, doors, console))
        finally:
            # This thread has them blocked by now, but a thread that still ends beside it may be given one.
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)


def _warnings(config: ServeConfig) -> Iterator[str]:
    """What an operator should know of a deployment before it is served."""
    speculation = config.engine.speculation
    if config.unix_socket is None and not is_loopback(config.host) and config.keys_file is None:
        yield (
            f"{config.host} is reachable from other machines and no keys_file is set: "
            "everyone who reaches the port is served"
        )
    if config.events is not None and not config.events.local:
        yield "events: whoever reaches these addresses is told the tokens of all prompts, without a key"
    if speculation is not None and speculation.trace is not None:
        yield f"users' text is written to {speculation.trace} (engine.speculation.trace)"
    if config.engine.synthetic_rates():
        yield "synthetic acceptance: a draw says which drafts hold, so the answers are not the model's"
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        yield "standard error is closed: what the server logs is lost"


def _check_tls(cert: str, key: str) -> None:
    """ConfigError, before a model is loaded for minutes, where HTTPS cannot be served with these files."""
    try:
        server_context(cert, key)
    except OSError as error:
        raise ConfigError(f"tls_cert {cert}, tls_key {key}: expected PEM files that belong together: {error}") from None


def _check_drafting(speculation: DraftConfig) -> None:
    """ConfigError, before a model is loaded for minutes."""
    if isinstance(speculation, Learned):
        try:
            check_drafter(Path(speculation.drafter))
        except CheckpointError as error:
            raise ConfigError(f"engine.speculation.drafter: {error}; --draft {SUFFIX} needs none") from None
    if speculation.trace is not None and not Path(speculation.trace).resolve().parent.is_dir():
        raise ConfigError(f"engine.speculation.trace: {speculation.trace}: its folder does not exist")


def _check_length(max_model_len: int, tokenizer: Tokenizer, style: Style) -> None:
    """ConfigError where not even the question that we print could be asked."""
    prompt = len(encode(Conversation((Message("user", EXAMPLE),)), tokenizer, style))
    least = prompt + LEAST_ANSWER
    if max_model_len < least:
        raise ConfigError(
            f"max-model-len is {max_model_len}; expected {least} at least: {EXAMPLE!r} is a prompt of {prompt} tokens, "
            f"and its answer needs some, say {LEAST_ANSWER}; where max-model-len is not set, give a larger kv-memory"
        )


def _listen(host: str, port: int, option: str = "--port") -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        why = {
            errno.EADDRINUSE: f"another server may be running there; choose one with {option}",
            errno.EACCES: f"ports below 1024 are the administrator's; choose one with {option}",
        }.get(error.errno or 0, "is host an address of this machine?")
        raise ConfigError(f"port {port} on {host} cannot be used ({error.strerror}): {why}") from None
    except (TypeError, ValueError):  # no name at all: too long, or with a zero byte
        listener.close()
        raise ConfigError(f"host is {host!r}; expected an address of this machine, such as 127.0.0.1") from None
    listener.setblocking(False)
    return listener


def _listen_at(path: str) -> socket.socket:
    """A socket in the file system, for its owner and group; one that a server which ended left behind is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    raise ConfigError(f"unix_socket: {path}: another server answers there")
            Path(path).unlink()
        listener.bind(path)
        os.chmod(path, 0o660)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(f"unix_socket: {path} cannot be used: {error.strerror or error}") from None
    except ConfigError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


async def _serve(config: ServeConfig, folder: Path, doors: Doors, console: Console) -> int:
    signals = Signals()
    for number in STOP_SIGNALS:  # before there is anything to leave behind
        if number is not signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup has it ignored
            handler = signals.hang_up if number is signal.SIGHUP else signals.end
            asyncio.get_running_loop().add_signal_handler(number, handler)
    try:
        with _sockets() as sockets:
            async with open_machines(config) as machines:
                return await _serve_through(sockets, machines, config, folder, doors, signals, console)
    finally:
        # The end has come: another Ctrl-C would only interrupt the interpreter's own clearing up.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


@contextmanager
def _sockets() -> Generator[Path]:
    """A folder of mode 0700 for the sockets. Raises ConfigError."""
    try:
        sockets = Path(tempfile.mkdtemp(prefix="redline-"))
    except OSError as error:
        raise ConfigError(f"no folder for the sockets: {error}; TMPDIR names one that can be written") from None
    try:
        yield sockets
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


async def _serve_through(
    sockets: Path,
    machines: Machines | None,
    config: ServeConfig,
    folder: Path,
    doors: Doors,
    signals: Signals,
    console: Console,
) -> int:
    stop, admin_key = signals.stop, None
    if doors.admin is not None and config.admin_keys_file is None:
        admin_key, file = f"sk-{secrets.token_hex(16)}", sockets / "admin-keys.txt"
        file.write_text(f"admin {admin_key}\n")
        config = msgspec.structs.replace(config, admin_keys_file=str(file))
    tokenizer, style = Tokenizer.open(folder), style_of(folder)
    if config.engine.max_model_len is not None:
        _check_length(config.engine.max_model_len, tokenizer, style)  # before a model is loaded for minutes

    def announce(ready: Ready) -> None:
        _check_length(ready.max_model_len, tokenizer, style)
        try:
            _announce(config, doors, admin_key, ready, console)
        except OSError as error:  # the file that it goes to may be on a full disk
            log.error("standard output cannot be written (%s); the server is ready", error.strerror or error)
            drop_held(console.file)

    if config.api_replicas > 1:
        if (spans := open_spans()) is not None:  # each replica has its own: what cannot be had is said here
            await asyncio.to_thread(spans.close)
        return await serve_replicas(sockets, config, doors, signals, announce)
    connections = Connections(limits_of(config))
    front = open_front(config, tokenizer, style, Metrics(config.names[0]), connections)
    gateway, edge, server, spans = front
    if edge.keyring is not None:
        signals.reload = edge.reload_soon
    supervisor = Supervisor(config, gateway, sockets, machines)
    steering = None
    if config.steer is not None:
        from redline.fleet.steer import Steering  # which brings numpy: `--help` does without

        steering = Steering(config.steer, gateway, supervisor, config.sla)
    told = (lambda: None) if steering is None else steering.told
    beside = [asyncio.create_task(edge.follow_keys()), asyncio.create_task(measure_lag(gateway.metrics))]
    if steering is not None:
        beside.append(asyncio.create_task(steering.run()))
    others = serve_beside(
        config,
        doors,
        lambda own: create_admin_app(gateway, edge, own, signals.end, supervisor.replace, supervisor.turn, told),
        lambda own: create_metrics_app(gateway.metrics, own),
        connections,
    )
    serving = asyncio.create_task(server.serve(sockets=[doors.api]))
    try:
        try:
            ready = await supervisor.start(stop, serving)
        except RedlineError as error:
            gateway.lose_all(str(error))
            raise
        if ready is None and gateway.ready is None:
            return 0
        if ready is not None:  # else it is to end, while some workers serve already and others load
            gc.collect()
            gc.freeze()  # a full collection that walked through all of this took 30 to 100 ms of a stream
            announce(ready)
        stopping, given_up = asyncio.create_task(stop.wait()), asyncio.create_task(supervisor.given_up())
        await asyncio.wait({stopping, given_up, serving}, return_when=asyncio.FIRST_COMPLETED)
        lost = not stopping.done()
        if lost:
            # Whatever has ended, a server that answers nothing but errors must end too, so that it is restarted.
            what = given_up.result() if given_up.done() else "the server has failed"
            gateway.lose_all(what)
            log.error("%s; stopping", what)
        else:
            log.info("stopping")
        stopping.cancel()
        if not lost:
            edge.draining = "the server is stopping"
            await _drain(server, config.drain_s, {given_up, serving}, signals.now)
        given_up.cancel()
        server.should_exit = True
        if lost:
            await asyncio.wait({serving}, timeout=GRACE_S)
        supervisor.end()
        gateway.lose_all("the server is stopping")
        await end(server, serving)
        serving.result()
        gateway.close()
        return int(lost)
    finally:
        gateway.close()
        await end(server, serving)
        for other in others:
            await end(*other)
        for task in beside:
            task.cancel()
        supervisor.end()
        await supervisor.ended()
        await gateway.ended()
        if spans is not None:
            await asyncio.to_thread(spans.close)


async def _drain(server: Server, seconds: float, ends: set["asyncio.Task[Any]"], now: asyncio.Event) -> None:
    """Wait until no request is read or answered; no longer than so many seconds, until one of `ends` ends, or `now`."""
    until = asyncio.get_running_loop().time() + seconds
    while server.server_state.tasks and asyncio.get_running_loop().time() < until:
        if now.is_set() or any(task.done() for task in ends):
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(now.wait(), IDLE_S)


def _ourselves() -> str:
    """How a shell here calls the command that runs now: by its path, where no path leads to it."""
    typed, found = sys.argv[0], shutil.which("redline")
    if Path(typed).name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m redline"
    return "redline" if found and os.path.exists(typed) and os.path.samefile(found, typed) else shlex.quote(typed)


def _announce(config: ServeConfig, doors: Doors, admin_key: str | None, ready: Ready, console: Console) -> None:
    """admin_key: of the admin routes, where it was made for this start."""
    name, listener, explain = config.names[0], doors.api, ""
    scheme = "http" if config.tls_cert is None else "https"
    if doors.admin is not None:
        admin = f"{scheme}://{ADMIN_HOST}:{doors.admin.getsockname()[1]}"
        console.print(f"admin routes are at {admin}/admin/status", style="dim", highlight=False, soft_wrap=True)
        whose = "an answer's X-Request-Id" + ("" if admin_key else f"; ADMIN-KEY: in {config.admin_keys_file}")
        explain = (
            f"{_ourselves()} explain REQUEST --url {admin} --key {admin_key or 'ADMIN-KEY'}   # REQUEST: {whose}\n"
        )
    if config.unix_socket is not None:
        where = f"is ready at {config.unix_socket}   (Ctrl-C stops it)\n{ready.summary}"
        console.print(f"{name} {where}", highlight=False, soft_wrap=True, markup=False)
        return
    port = listener.getsockname()[1]
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": EXAMPLE}]})
    console.print(Text.assemble((name, "bold"), " is ready at ", (url, "bold"), "   (Ctrl-C stops it)"), soft_wrap=True)
    if config.page:
        console.print("a browser finds a page there", style="dim", highlight=False, soft_wrap=True)
    summary = f"{ready.summary}; contexts up to {ready.max_model_len:,} tokens\n"
    console.print(summary, style="dim", highlight=False, soft_wrap=True)
    # Plain prints: what is pasted must not be wrapped or coloured. JSON and repr() escape what is not text; keys stay
    # in their file.
    curl_key = python_key = python_import = ""
    if config.keys_file is not None:
        curl_key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"'
        python_key = f', "Authorization": "Bearer " + os.environ["{KEY_VARIABLE}"]'
        python_import = "os, "
        print(f"export {KEY_VARIABLE}=...   # one of the keys in {config.keys_file}\n")
    print(
        f"{_ourselves()} chat --url {url}\n{explain}\n"
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{curl_key} -d {shlex.quote(body)}\n\n"
        f"import json, {python_import}urllib.request\n"
        'question = "Write a Python function that adds two numbers."\n'
        f'body = {{"model": {name!r}, "stream": True,\n'
        '    "messages": [{"role": "user", "content": question}]}\n'
        f'request = urllib.request.Request("{url}/v1/chat/completions", json.dumps(body).encode(),\n'
        f'    {{"Content-Type": "application/json"{python_key}}})\n'
        "for line in urllib.request.urlopen(request):\n"
        '    if line.startswith(b"data: {"):\n'
        '        delta = json.loads(line[6:])["choices"][0]["delta"]\n'
        f'        print(delta.get("{config.reasoning_field}") or delta.get("content") or "", end="", flush=True)\n',
        flush=True,
    )
