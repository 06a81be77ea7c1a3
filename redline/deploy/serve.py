"""`redline serve`: worker processes with the model, one API process with everything else, and their lifecycle.

This process has the API. It binds its port first, so that a port in use is reported at once; starts the workers, and
serves while they load, if only with 503; prints how to reach the server once the model is loaded; restarts a worker
that ends; and stops the workers when it stops itself.
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

from redline.api.admin import create_admin_app
from redline.api.auth.access import is_loopback
from redline.api.auth.auth_state import measure_lag
from redline.api.auth.keys import read_keys
from redline.api.http.budget import Connections
from redline.api.http.cors import check_origins
from redline.api.http.server import Server
from redline.api.http.tls import server_context
from redline.api.telemetry.metrics import Metrics
from redline.api.telemetry.scrape import create_metrics_app
from redline.api.telemetry.spans import open_spans
from redline.chat.conversation import Conversation, Message
from redline.chat.template import Style, encode, style_of
from redline.chat.tokenizer import Tokenizer
from redline.deploy.config import ADMIN_HOST, ServeConfig
from redline.deploy.front import Doors, end, limits_of, open_front, serve_beside
from redline.deploy.lines import lines_on_stderr
from redline.deploy.machines import Machines, open_machines
from redline.deploy.process import STOP_SIGNALS
from redline.deploy.replicas import serve_replicas
from redline.deploy.signals import Signals
from redline.deploy.supervisor import Supervisor
from redline.disk import drop_held
from redline.errors import CheckpointError, ConfigError, RedlineError
from redline.folder import check_drafter, check_model
from redline.messages.news import Ready
from redline.model.spec import spec_of
from redline.worker.config import SUFFIX, DraftConfig, Learned

log = logging.getLogger("redline.deploy")

KEY_VARIABLE = "REDLINE_API_KEY"  # environment variable that the printed example commands read a key from
GRACE_S = 3.0  # for running streams to end with an error, after all workers failed
IDLE_S = 0.05  # between two checks whether answers still run
EXAMPLE = "What is 347 + 586?"
LEAST_ANSWER = 16  # tokens
SWITCH_S = 0.0005  # interpreter switch interval: the event loop waits at most this long for a thread that tokenizes


def serve(config: ServeConfig, console: Console) -> int:
    """Serve until one of STOP_SIGNALS arrives (returns 0), or until workers or server end by themselves (returns 1).

    Raises ConfigError for mistakes in the deployment or its files, and if no worker can load the model; WorkerLost if
    a worker ends while loading without a reason.
    """
    folder = Path(config.weights)
    here = any(place.at is None for place in config.places)
    check_model(folder, weights=here and config.engine.random_weights is None)
    speculation = config.engine.speculation
    if speculation is not None and here:
        _check_drafting(speculation)
    check_origins(config.cors_origins)
    if config.keys_file is not None:
        read_keys(Path(config.keys_file), config.per_key, config.sla)  # checked before minutes of loading the model
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
    """Whether it listens on loopback only and needs no keys; then it has admin routes with a generated key."""
    return (
        config.admin_keys_file is None
        and config.keys_file is None
        and config.unix_socket is None
        and is_loopback(config.host)
    )


def _serve_at(config: ServeConfig, folder: Path, doors: Doors, console: Console) -> int:
    for warning in _warnings(config):
        with suppress(OSError):  # such as a full disk, which is logged once the server is ready
            console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)
    sys.setswitchinterval(SWITCH_S)
    with lines_on_stderr(config.log_level, as_json=config.access_log == "json"):
        try:
            return uvloop.run(_serve(config, folder, doors, console))
        finally:
            # This thread blocks the signals by now, but they may be delivered to another thread that has not ended yet.
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)


def _warnings(config: ServeConfig) -> Iterator[str]:
    """Warnings for the operator about a deployment, printed before it is served."""
    speculation = config.engine.speculation
    if config.unix_socket is None and not is_loopback(config.host) and config.keys_file is None:
        yield (
            f"{config.host} is reachable from other machines and no keys_file is set: "
            "every client that can reach the port can use the server"
        )
    if config.events is not None and not config.events.local:
        yield "events: every client that can reach these addresses can read the tokens of all prompts, without a key"
    if speculation is not None and speculation.trace is not None:
        yield f"users' text is written to {speculation.trace} (engine.speculation.trace)"
    if config.engine.synthetic_rates():
        yield "synthetic acceptance: draft tokens are accepted at random, so the answers are not the model's"
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        yield "standard error is closed: what the server logs is lost"


def _check_tls(cert: str, key: str) -> None:
    """Raise ConfigError, before minutes of loading the model, if HTTPS cannot be served with these files."""
    try:
        server_context(cert, key)
    except OSError as error:
        raise ConfigError(f"tls_cert {cert}, tls_key {key}: expected PEM files that belong together: {error}") from None


def _check_drafting(speculation: DraftConfig) -> None:
    """Raise ConfigError, before minutes of loading the model, if the drafter's or trace's folder is missing."""
    if isinstance(speculation, Learned):
        try:
            check_drafter(Path(speculation.drafter))
        except CheckpointError as error:
            raise ConfigError(f"engine.speculation.drafter: {error}; --draft {SUFFIX} needs none") from None
    if speculation.trace is not None and not Path(speculation.trace).resolve().parent.is_dir():
        raise ConfigError(f"engine.speculation.trace: {speculation.trace}: its folder does not exist")


def _check_length(max_model_len: int, tokenizer: Tokenizer, style: Style) -> None:
    """Raise ConfigError if `max_model_len` is too short even for the printed example question."""
    prompt = len(encode(Conversation((Message("user", EXAMPLE),)), tokenizer, style))
    least = prompt + LEAST_ANSWER
    if max_model_len < least:
        raise ConfigError(
            f"max-model-len is {max_model_len}; expected at least {least}: {EXAMPLE!r} is a prompt of {prompt} tokens, "
            f"and its answer needs about {LEAST_ANSWER}; if max-model-len is not set, give a larger kv-memory"
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
            errno.EACCES: f"ports below 1024 need root privileges; choose another with {option}",
        }.get(error.errno or 0, "is host an address of this machine?")
        raise ConfigError(f"port {port} on {host} cannot be used ({error.strerror}): {why}") from None
    except (TypeError, ValueError):  # not a host name: too long, or with a zero byte
        listener.close()
        raise ConfigError(f"host is {host!r}; expected an address of this machine, such as 127.0.0.1") from None
    listener.setblocking(False)
    return listener


def _listen_at(path: str) -> socket.socket:
    """A Unix socket for its owner and group (mode 0660); a stale one of a server that has ended is replaced."""
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
    for number in STOP_SIGNALS:  # before there is anything to clean up
        if number is not signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup sets it to SIG_IGN
            handler = signals.hang_up if number is signal.SIGHUP else signals.end
            asyncio.get_running_loop().add_signal_handler(number, handler)
    try:
        with _sockets() as sockets:
            async with open_machines(config) as machines:
                return await _serve_through(sockets, machines, config, folder, doors, signals, console)
    finally:
        # Everything is shut down: another Ctrl-C would only interrupt the interpreter's own cleanup.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


@contextmanager
def _sockets() -> Generator[Path]:
    """A folder of mode 0700 for the sockets. Raises ConfigError."""
    try:
        sockets = Path(tempfile.mkdtemp(prefix="redline-"))
    except OSError as error:
        raise ConfigError(f"no folder for the sockets: {error}; set TMPDIR to a writable one") from None
    try:
        yield sockets
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def _with_admin_key(config: ServeConfig, doors: Doors, sockets: Path) -> tuple[ServeConfig, str | None]:
    """With an admin port and without admin_keys_file: a new key, in a file in `sockets` that the config then names."""
    if doors.admin is None or config.admin_keys_file is not None:
        return config, None
    admin_key, file = f"sk-{secrets.token_hex(16)}", sockets / "admin-keys.txt"
    file.write_text(f"admin {admin_key}\n")
    return msgspec.structs.replace(config, admin_keys_file=str(file)), admin_key


async def _serve_through(
    sockets: Path,
    machines: Machines | None,
    config: ServeConfig,
    folder: Path,
    doors: Doors,
    signals: Signals,
    console: Console,
) -> int:
    config, admin_key = _with_admin_key(config, doors, sockets)
    tokenizer, style = Tokenizer.open(folder), style_of(folder, spec_of(folder).chat)
    if config.engine.max_model_len is not None:
        _check_length(config.engine.max_model_len, tokenizer, style)  # checked before minutes of loading the model

    def announce(ready: Ready) -> None:
        _check_length(ready.max_model_len, tokenizer, style)
        try:
            _announce(config, doors, admin_key, ready, console)
        except OSError as error:  # standard output may be a file on a full disk
            log.error("standard output cannot be written (%s); the server is ready", error.strerror or error)
            drop_held(console.file)

    if config.api_replicas > 1:
        if (spans := open_spans()) is not None:  # each replica opens its own; opened here too, to raise its ConfigError
            await asyncio.to_thread(spans.close)
        return await serve_replicas(sockets, config, doors, signals, announce)
    connections = Connections(limits_of(config))
    front = open_front(config, tokenizer, style, Metrics(config.names[0]), connections)
    gateway, edge, server, spans = front
    if edge.keyring is not None:
        signals.reload = edge.reload_soon
    supervisor = Supervisor(config, gateway.monitor, sockets, machines)
    steering = None
    if config.steer is not None:
        from redline.deploy.role_controller import Steering  # imports numpy, which `--help` must not wait for

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
            ready = await supervisor.start(signals.stop, serving)
        except RedlineError as error:
            gateway.fail_all(str(error))
            raise
        if ready is None and gateway.ready is None:
            return 0
        if ready is not None:  # else it was stopped while some workers already serve and others load
            gc.collect()
            gc.freeze()  # a full collection over all these objects stalled streams for 30 to 100 ms
            announce(ready)
        stopping, given_up = asyncio.create_task(signals.stop.wait()), asyncio.create_task(supervisor.given_up())
        await asyncio.wait({stopping, given_up, serving}, return_when=asyncio.FIRST_COMPLETED)
        lost = not stopping.done()
        if lost:
            # A server that can only answer with errors must exit, so that its service manager restarts it.
            what = given_up.result() if given_up.done() else "the server has failed"
            gateway.fail_all(what)
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
        gateway.fail_all("the server is stopping")
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
    """Wait until no request is read or answered; at most `seconds`, or until one of `ends` is done or `now` is set."""
    until = asyncio.get_running_loop().time() + seconds
    while server.server_state.tasks and asyncio.get_running_loop().time() < until:
        if now.is_set() or any(task.done() for task in ends):
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(now.wait(), IDLE_S)


def _ourselves() -> str:
    """The shell command that runs this program: by its path if it is not found through PATH."""
    typed, found = sys.argv[0], shutil.which("redline")
    if Path(typed).name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m redline"
    return "redline" if found and os.path.exists(typed) and os.path.samefile(found, typed) else shlex.quote(typed)


def _announce(config: ServeConfig, doors: Doors, admin_key: str | None, ready: Ready, console: Console) -> None:
    """Print that the server is ready, and example commands. admin_key: the generated key of the admin routes."""
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
        console.print("open it in a browser for the web page", style="dim", highlight=False, soft_wrap=True)
    summary = f"{ready.summary}; contexts up to {ready.max_model_len:,} tokens\n"
    console.print(summary, style="dim", highlight=False, soft_wrap=True)
    # Plain prints: commands to be pasted must not be wrapped or coloured. JSON and repr() escape unprintable
    # characters; keys are not printed.
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
