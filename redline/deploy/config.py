"""A deployment: one TOML file, or one checkpoint folder and flags. docs/serve.md lists the keys, from these records."""

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast, get_type_hints

import msgspec
from msgspec import Meta

from redline.api.auth.access import is_loopback
from redline.api.config import DEFAULT_SLA, Count, KeyLimits, Limits, Sla
from redline.deploy.cluster import check_listen
from redline.errors import ConfigError
from redline.messages.base import Record, bounds_of, explained, parts, setting
from redline.messages.news import Role
from redline.policy.synthetic import read_acceptance
from redline.transport.choice import WITHIN_A_HOST, TransportName, check_installed
from redline.worker.config import (
    HEAD_BITS,
    SUFFIX,
    EngineConfig,
    EventsConfig,
    Learned,
    Suffix,
    drafts_of,
    new_spelling,
)

ADMIN_HOST = "127.0.0.1"  # the admin routes are reachable from this machine only; use a proxy or a tunnel from others
MOST_REPLICAS = 16  # of the API; every worker sends its status messages to each replica

SIZES = "kv_memory", "host_memory", "disk_size"  # keys of [engine] that may be strings such as 8GB

_FILES = ("keys_file", "responses_file", "admin_keys_file", "unix_socket", "tls_cert", "tls_key")

_SYNTHETIC = "synthetic_acceptance"

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class Requests(Record, frozen=True):
    """Limits of every request; `redline.api.config.Limits` has the same fields."""

    default_max_tokens: Annotated[
        Count | None,
        setting("`max_tokens` of a request that sets none", absent="up to the context length", example=4096),
    ] = None
    most_max_tokens: Annotated[
        Count | None,
        setting("highest `max_tokens` that a request may set", absent="up to the context length", example=32768),
    ] = None
    timeout_s: Annotated[
        Annotated[float, Meta(ge=0.001, le=86400)] | None,
        setting("seconds from a request's arrival to its last token, then 504", absent="no limit", example=600.0),
    ] = None
    images: Annotated[
        Annotated[int, Meta(ge=0, le=256)],
        setting("images and videos in one request, of a model that reads images; 0: it reads none"),
    ] = 16
    video_frames: Annotated[
        Annotated[int, Meta(ge=0, le=256)],
        setting("frames in the videos of one request, two a second, with the extra `video`; 0: none"),
    ] = Limits().video_frames
    queue_tokens: Annotated[Count, setting("prompt tokens that may wait for a first token; beyond them 503")] = (
        Limits().queue_tokens
    )


class Handoff(Record, frozen=True):
    """KV transfer between prefill and decode workers."""

    transport: Annotated[
        TransportName,
        setting(
            "`peer`: from GPU to GPU of one host; `shared`: through shared memory of one host; `auto`: `peer` if both "
            "workers support it, else `shared`; `nixl`: NIXL, also between machines"
        ),
    ] = "auto"


Seconds = Annotated[float, Meta(ge=0.1, le=86400)]


class Steer(Record, frozen=True):
    """Role switches and autoscaling: the roles and the number of workers follow the traffic (`role_controller`)."""

    every_s: Annotated[Seconds, setting("seconds between two evaluations of the traffic")] = 5.0
    window_s: Annotated[Seconds, setting("seconds of recent traffic that are evaluated")] = 60.0
    rest_s: Annotated[Seconds, setting("least seconds between two changes")] = 30.0
    horizon_s: Annotated[Seconds, setting("seconds within which a change must pay for itself")] = 300.0
    spare_s: Annotated[Seconds, setting("seconds for which fewer workers must suffice before one is stopped")] = 300.0


class Cluster(Record, frozen=True):
    """Machines other than the one that serves the API."""

    listen: Annotated[
        str,
        setting(
            "IPv4 address and port where agents join; the address by which other machines reach this one",
            example="10.0.0.1:7600",
        ),
    ]
    key_file: Annotated[
        str,
        setting(
            "secret shared by all machines, at least 32 characters, not readable by every user; with Ray at the same "
            "path on each machine",
            example="cluster.key",
        ),
    ]
    kind: Annotated[
        Literal["agents", "ray"],
        setting(
            "`agents`: an operator starts the agents; `ray`: Ray starts one per worker (`pip install 'redline[ray]'`)"
        ),
    ] = "agents"


class KvEvents(Record, frozen=True):
    """Where workers publish KV cache events in vLLM's format. Subscribers need no key."""

    endpoint: Annotated[
        str,
        setting(
            "`tcp://ADDRESS:PORT` or `ipc://PATH` of the first worker; the others have the next ports, or PATH.1 ...",
            example="tcp://127.0.0.1:5557",
        ),
    ]
    replay: Annotated[
        str | None,
        setting(
            "an address in the same form, to request missed events",
            absent="missed events are not sent again",
            example="tcp://127.0.0.1:5657",
        ),
    ] = None
    topic: Annotated[str, setting("topic of each message", example="kv@host@kimi-k2.6")] = ""

    @property
    def local(self) -> bool:
        """Whether the endpoints are reachable from this machine only."""
        hosts = [_TCP.fullmatch(address) for address in (self.endpoint, self.replay or "")]
        return all(is_loopback(host[1].strip("[]")) for host in hosts if host is not None)


_TABLES: dict[str, type[Record]] = {
    "per_key": KeyLimits, "requests": Requests, "handoff": Handoff, "steer": Steer, "cluster": Cluster,
    "events": KvEvents,
}  # fmt: skip
_TCP = re.compile(r"tcp://([^\s/]+):([0-9]{1,5})")  # a ZeroMQ TCP address
_EVERY = {"*", "0.0.0.0", "[::]"}  # hosts that mean all addresses of a machine
_NAMED = re.compile(r"[A-Za-z0-9_-]{1,32}")  # the name of a worker, or of a class of requests


class Workers(Record, frozen=True):
    """A kind of worker in [[workers]]."""

    role: Annotated[
        Role, setting("`prefill`: computes prompts for decode workers; `decode`: answers; `both`: does all")
    ] = "both"
    count: Annotated[int, Meta(ge=1, le=64), setting("workers of this kind")] = 1
    least: Annotated[
        Annotated[int, Meta(ge=0, le=64)] | None,
        setting(
            "the first `least` always run, [steer] starts and stops the others; needs `resume_s` above 0, not with Ray",
            absent="all",
            example=1,
        ),
    ] = None
    name: Annotated[
        str | None,
        setting("with a count `-0`, `-1` and so on are appended", absent="its role, or `worker`", example="worker"),
    ] = None
    devices: Annotated[
        tuple[int, ...],
        setting("GPUs, divided among the `count` workers", absent="all visible GPUs", example=(0, 1)),
    ] = ()
    cores: Annotated[
        tuple[int, ...],
        setting(
            "CPU cores that each of them may use; prefill workers run there at nice 10", absent="all", example=(0, 1)
        ),
    ] = ()
    engine: Annotated[
        EngineConfig,
        setting(
            "keys that differ from [engine], `ranks` too; `speculation` is the same for all",
            absent="[engine]",
            example={"step_tokens": 4096},
        ),
    ] = EngineConfig()
    at: Annotated[str | None, setting("name of the machine's agent", absent="this machine", example="gpu-1")] = None
    weights: Annotated[
        str | None,
        setting("the checkpoint's folder on that machine", absent="the same path as here", example="/srv/kimi-k2.6"),
    ] = None
    drafter: Annotated[
        str | None,
        setting(
            "the drafter's folder on that machine", absent="the same path as here", example="/srv/kimi-k2.6-eagle3"
        ),
    ] = None


class WorkerSpec(NamedTuple):
    """One worker of a deployment: its name, role, configuration and machine."""

    name: str
    role: Role
    engine: EngineConfig
    devices: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    transport: TransportName | None = None  # of its KV transfers; None: it neither sends nor receives prompts
    tells_cache: bool = False  # it reports its cached pages to the router, which chooses among several workers
    events: EventsConfig | None = None  # None: it publishes no KV cache events
    at: str | None = None  # the name of another machine's agent; None: this machine
    weights: str | None = None  # the checkpoint's folder on that machine
    alone: bool = False  # no other worker of the deployment uses its GPUs
    spare: bool = False  # it runs only while the autoscaler wants it


Port = Annotated[int, Meta(ge=0, le=65535)]


class ServeConfig(Record, frozen=True):
    """A deployment; its fields are the keys of the file."""

    weights: Annotated[str, setting("folder of the checkpoint", example="weights/kimi-k2.6")]
    host: Annotated[str, setting("Address to listen on. 0.0.0.0: all networks; then set keys_file.")] = "127.0.0.1"
    port: Annotated[Port, setting("Port. 0: any free one.")] = 8000
    api_replicas: Annotated[int, Meta(ge=1, le=MOST_REPLICAS), setting("API processes that share the port")] = 1
    served_model_name: Annotated[
        tuple[str, ...],
        setting("Model name for clients (repeatable).", absent="the folder's name", example=("kimi-k2.6",)),
    ] = ()
    keys_file: Annotated[
        str | None, setting("API keys, one per line.", absent="requests need no key", example="keys.txt")
    ] = None
    responses_file: Annotated[
        str | None,
        setting(
            "SQLite file in which `/v1/responses` stores responses",
            absent="/v1/responses stores nothing",
            example="responses.sqlite",
        ),
    ] = None
    reasoning_field: Annotated[
        Literal["reasoning_content", "reasoning"],
        setting("field of a chat answer's reasoning; `reasoning`: as in newer vLLM"),
    ] = "reasoning_content"
    cors_origins: Annotated[
        tuple[str, ...],
        setting(
            "origins of web pages and apps (`app://obsidian.md`) that may send requests",
            absent="cross-origin requests are not allowed",
            example=("https://chat.example",),
        ),
    ] = ()
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], setting("Log level while serving; info: one line per request.")
    ] = "info"
    access_log: Annotated[Literal["text", "json"], setting("`json`: every log line is a JSON object")] = "text"
    drain_s: Annotated[
        float, Meta(ge=0, le=86400), setting("seconds that running answers have to finish when the server stops")
    ] = 3.0
    admin_port: Annotated[
        Port | None,
        setting(
            "port of the admin routes, on 127.0.0.1; 0: any free one",
            absent="any free port if host is loopback and there is no keys_file; else no admin routes",
            example=8001,
        ),
    ] = None
    admin_keys_file: Annotated[
        str | None,
        setting(
            "keys that the admin routes accept; required with `admin_port`",
            absent="a generated key, printed at the start, if host is loopback; else no admin routes",
            example="admin-keys.txt",
        ),
    ] = None
    page: Annotated[bool, setting("the chat page at `/`, which asks for a key if keys_file is set")] = True
    metrics_port: Annotated[
        Port | None,
        setting(
            "serves `/metrics` on `host` without a key, too; 0: any free port",
            absent="/metrics is on the API's port only",
            example=9090,
        ),
    ] = None
    unix_socket: Annotated[
        str | None,
        setting(
            "listen on this socket (mode 0660) instead of host and port",
            absent="the server listens on host and port",
            example="redline.sock",
        ),
    ] = None
    tls_cert: Annotated[
        str | None,
        setting("HTTPS: certificate with its chain, PEM; with tls_key", absent="HTTP without TLS", example="cert.pem"),
    ] = None
    tls_key: Annotated[
        str | None, setting("HTTPS: its private key, PEM", absent="HTTP without TLS", example="key.pem")
    ] = None
    per_key: KeyLimits = KeyLimits()
    requests: Requests = Requests()
    handoff: Handoff = Handoff()
    sla: dict[str, Sla] = msgspec.field(
        default_factory=dict[str, Sla]
    )  # SLO targets by class of requests; DEFAULT_SLA is the class of all other requests
    steer: Annotated[
        Steer | None, setting("[steer]", absent="workers keep their roles unless an operator switches one")
    ] = None
    cluster: Annotated[Cluster | None, setting("[cluster]", absent="all workers are on this machine")] = None
    events: Annotated[KvEvents | None, setting("[events]", absent="KV cache events are not published")] = None
    engine: EngineConfig = EngineConfig()
    resume_s: Annotated[
        float,
        Meta(ge=0, le=86400),
        setting(
            "seconds, beyond the time of a worker's start, that a request whose worker is down waits for another; 0: "
            "such requests fail, and no process is restarted"
        ),
    ] = 30.0
    workers: tuple[Workers, ...] = ()  # empty: one worker that does everything

    @property
    def places(self) -> tuple[WorkerSpec, ...]:
        """Every worker of the deployment."""
        by_ray = self.cluster is not None and self.cluster.kind == "ray"
        if not self.workers:
            only = _own_folder(WorkerSpec("worker", "both", self.engine, events=own_events(self.events, 0)))
            return (_elsewhere(only._replace(alone=True), "worker" if by_ray else None, self.weights),)
        found: list[WorkerSpec] = []
        hands_over = self.steer is not None or any(kind.role == "prefill" for kind in self.workers)
        transport = self.handoff.transport if hands_over else None
        for kind in self.workers:
            name, each = kind.name or {"both": "worker"}.get(kind.role, kind.role), len(kind.devices) // kind.count
            for number in range(kind.count):
                own = name if kind.count == 1 else f"{name}-{number}"
                devices = kind.devices[number * each : (number + 1) * each]
                place = _own_folder(WorkerSpec(own, kind.role, kind.engine, devices, kind.cores, transport))
                place = place._replace(spare=kind.least is not None and number >= kind.least)
                at = own if by_ray else kind.at
                found.append(_elsewhere(place, at, kind.weights or self.weights, kind.drafter))
        return tuple(
            place._replace(
                tells_cache=len(found) > 1,
                events=own_events(self.events, number),
                alone=by_ray or _alone(place, found),
            )
            for number, place in enumerate(found)
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The model names that requests may use; a response carries the one that its request used."""
        return self.served_model_name or (Path(self.weights).resolve().name,)


def own_events(events: KvEvents | None, number: int) -> EventsConfig | None:
    """The addresses where worker `number` publishes its KV cache events. Raises ConfigError for a malformed address."""
    if events is None:
        return None
    replay = None if events.replay is None else _own_address(events.replay, number, "replay")
    return EventsConfig(
        endpoint=_own_address(events.endpoint, number, "endpoint"), number=number, replay=replay, topic=events.topic
    )


def _own_address(address: str, number: int, key: str) -> str:
    if address.startswith("ipc://") and len(address) > len("ipc://"):
        return f"{address}.{number}" if number else address
    tcp = _TCP.fullmatch(address)
    if tcp is None or not 1 <= int(tcp[2]) + number <= 65535:
        raise ConfigError(
            f"events.{key} is {address!r}; expected tcp://ADDRESS:PORT, with a port for each worker up to 65535, or "
            "ipc://PATH"
        )
    return f"tcp://{tcp[1]}:{int(tcp[2]) + number}"


def _check_events(config: ServeConfig, source: Path) -> None:
    try:
        told = [place.events for place in config.places if place.events is not None]
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    addresses = [address for each in told for address in (each.endpoint, each.replay) if address is not None]
    if _meet(addresses):
        raise ConfigError(
            f"{source}: events.endpoint and events.replay overlap: each of the {len(told)} workers uses the next port "
            f"of both; leave a gap of at least {len(told)}"
        )


def _check_ports(config: ServeConfig, source: Path) -> None:
    """Raise ConfigError if two listeners of the server's own machine share a port; port 0 (any free one) is exempt."""
    listens: list[tuple[str, str, int]] = []  # key, host, port
    if config.unix_socket is None:
        listens.append(("port", config.host, config.port))
    if config.admin_port is not None:
        listens.append(("admin_port", ADMIN_HOST, config.admin_port))
    if config.metrics_port is not None:
        listens.append(("metrics_port", config.host, config.metrics_port))
    if config.cluster is not None:
        host, _, port = config.cluster.listen.rpartition(":")
        listens.append(("cluster.listen", host, int(port)))
    for place in config.places:
        if place.at is None and place.events is not None:
            for key, address in (("endpoint", place.events.endpoint), ("replay", place.events.replay)):
                if (tcp := _TCP.fullmatch(address or "")) is not None:
                    listens.append((f"events.{key} of {place.name}", tcp[1], int(tcp[2])))
    for number, (key, host, port) in enumerate(listens):
        for other, its_host, its_port in listens[:number]:
            hosts = {each.strip("[]").replace("localhost", ADMIN_HOST) for each in (host, its_host)}
            if port == its_port != 0 and (len(hosts) == 1 or hosts & {"*", "0.0.0.0", "::"}):
                raise ConfigError(f"{source}: {other} and {key} are both port {port}; give each a port of its own")


def _meet(addresses: list[str]) -> bool:
    """Whether two addresses conflict: they are equal, or one is `*`, which takes its port on every address."""
    hosts: dict[str, set[str]] = {}  # by port, or by path for ipc
    for address in addresses:
        tcp = _TCP.fullmatch(address)
        host, place = ("", address) if tcp is None else (tcp[1], tcp[2])
        there = hosts.setdefault(place, set())
        if host in there or (there and ({host} | there) & _EVERY):
            return True
        there.add(host)
    return False


def _own_folder(place: WorkerSpec) -> WorkerSpec:
    """The place with a disk tier folder of its own, since two workers must not write to the same folder."""
    if place.engine.disk is None:
        return place
    disk = os.path.join(os.path.abspath(place.engine.disk), place.name)
    return place._replace(engine=msgspec.structs.replace(place.engine, disk=disk))


def _alone(place: WorkerSpec, places: list[WorkerSpec]) -> bool:
    """Whether no other worker shares a GPU with this one. A worker without `devices` has all GPUs of its machine."""
    beside = [other for other in places if other is not place and other.at == place.at]
    apart = all(other.devices and not {*place.devices} & {*other.devices} for other in beside)
    return apart and (bool(place.devices) or not beside)


def _elsewhere(place: WorkerSpec, at: str | None, weights: str, drafter: str | None = None) -> WorkerSpec:
    """The place on machine `at`, with the paths of that machine; unchanged if `at` is None."""
    if at is None:
        return place
    drafts = place.engine.speculation
    if isinstance(drafts, Learned):
        drafts = msgspec.structs.replace(drafts, drafter=os.path.abspath(drafter or drafts.drafter))
    engine = msgspec.structs.replace(place.engine, speculation=drafts)
    return place._replace(at=at, weights=os.path.abspath(weights), engine=engine)


def read(source: Path, flags: dict[str, Any]) -> ServeConfig:
    """Read a deployment file, or take a checkpoint's folder; then apply the flags, which override the file.

    flags: values by key of the file; a key of a table is spelled as `engine.kv_memory`. `engine.speculation` is the
    drafter, a folder or "suffix"; its options stay as in the file. Raises ConfigError naming file and key.
    """
    if source.is_dir():
        values: dict[str, Any] = {"weights": str(source)}
        kinds: list[dict[str, Any]] = []
    elif source.is_file():
        try:
            values = tomllib.loads(source.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{source}: cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{source}: not a TOML file: {error}") from None
        kinds = _worker_tables(values.pop("workers", []), source)
        _check_keys(values, source)
        _resolve(values, ("weights", *_FILES), source.parent)
        _resolve(_table(values, "engine"), ("disk",), source.parent)
        _resolve(_table(values, "engine.speculation"), ("drafter", "trace"), source.parent)
        _resolve(_table(values, "cluster"), ("key_file",), source.parent)
    else:
        raise ConfigError(f"{source}: no such folder or file; {_instead(source)}")
    for key, value in flags.items():
        table, _, last = key.rpartition(".")
        drafting = key == "engine.speculation"
        _table(values, table, make=True)[last] = _drafting(value, _table(values, key)) if drafting else value
    _check_keys(values, source)
    engine = _table(values, "engine")
    _read_sizes(engine, f"{source}: engine")
    for number, kind in enumerate(kinds):
        own = kind.get("engine", {})
        _resolve(own, ("disk",), source.parent)
        _read_sizes(own, f"{source}: workers[{number}].engine")
        kind["engine"] = engine | own
    if kinds:
        values["workers"] = kinds
    drafting = _table(values, "engine.speculation")
    if isinstance(drafting.get(_SYNTHETIC), str):
        drafting[_SYNTHETIC] = read_acceptance(drafting[_SYNTHETIC], f"{source}: engine.speculation.{_SYNTHETIC}")
    _check_type(engine, source)
    try:
        config = msgspec.convert(values, ServeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_wrong(values, error)}") from None
    if (config.admin_port is None) != (config.admin_keys_file is None):
        raise ConfigError(f"{source}: admin_port and admin_keys_file need each other; set both, or neither")
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError(f"{source}: tls_cert and tls_key need each other; set both, or neither")
    if config.per_key != KeyLimits() and config.keys_file is None:
        raise ConfigError(f"{source}: [per_key] limits the names in keys_file; set keys_file too")
    if not config.host:
        raise ConfigError(f"{source}: host is empty; expected an address, such as 127.0.0.1, or 0.0.0.0 for every one")
    for name in config.names:
        if not name.isprintable() or not name:
            raise ConfigError(f"{source}: the model would be called {name!r}; set served_model_name to printable text")
    _check_engine(config.engine, f"{source}: engine")
    for number, kind in enumerate(config.workers):
        _check_engine(kind.engine, f"{source}: workers[{number}].engine")
    _check_events(config, source)
    _check_workers(config, source)
    _check_promises(config, source)
    _check_machines(config, source)
    _check_ports(config, source)
    try:
        if any(place.at is None for place in config.places):
            check_installed(config.handoff.transport)
    except ConfigError as error:
        raise ConfigError(f"{source}: handoff.transport: {error}") from None
    drafts = config.engine.speculation
    if isinstance(drafts, Learned) and drafts.head_bits not in HEAD_BITS:
        raise ConfigError(f"{source}: engine.speculation.head_bits is {drafts.head_bits}; expected 16 or 8")
    try:
        rates = config.engine.synthetic_rates()
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    if config.engine.random_weights is not None and not is_loopback(config.host):
        raise ConfigError(
            f"{source}: engine.random_weights is for benchmarks: answers are noise; host is {config.host}, which other "
            f"machines reach, so leave one of the two out"
        )
    if rates and not is_loopback(config.host):
        raise ConfigError(
            f"{source}: engine.speculation.{_SYNTHETIC} is for benchmarks: answers contain draft tokens accepted at "
            f"random; host is {config.host}, which other machines reach, so leave one of the two out"
        )
    return config


def _wrong(values: dict[str, Any], error: msgspec.ValidationError) -> str:
    """What is wrong with these values: for a number out of bounds its key, the value and the bounds."""
    message, at = explained(error, ServeConfig)
    hint: Any = ServeConfig
    value: Any = values
    for name in re.findall(r"\w+", at):
        if name.isdigit():
            value = value[int(name)]
            continue
        value = cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None
        records = (each for each in parts(hint) if isinstance(each, type) and issubclass(each, msgspec.Struct))
        hints = (get_type_hints(record, include_extras=True) for record in records)
        hint = next((of[name] for of in hints if name in of), None)
    bounds = bounds_of(hint)
    if bounds is None or not isinstance(value, int | float):
        return message + (f" - at `${at}`" if at else "")
    return f"{at.lstrip('.')} is {value}; expected {bounds[0]} to {bounds[1]}"


def _table(values: dict[str, Any], dotted: str, *, make: bool = False) -> dict[str, Any]:
    """The table of that name, or {} if there is none. make: insert a missing table; a value of another type stays."""
    place = values
    for name in filter(None, dotted.split(".")):
        inner = place.setdefault(name, {}) if make else place.get(name)
        place = cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}
    return place


def _worker_tables(tables: Any, source: Path) -> list[dict[str, Any]]:
    """The tables under [[workers]]. Raise ConfigError if they are not a list of tables, and for unknown keys."""
    known = list(Workers.__struct_fields__)
    own = [key for key in EngineConfig.__struct_fields__ if key != "speculation"]
    if not isinstance(tables, list):
        raise ConfigError(f"{source}: workers is {tables!r}; expected tables, each headed [[workers]]")
    found: list[dict[str, Any]] = []
    for number, table in enumerate(cast("list[Any]", tables)):
        if not isinstance(table, dict):
            raise ConfigError(f"{source}: workers[{number}] is {table!r}; expected a table, headed [[workers]]")
        kind = cast("dict[str, Any]", table)
        engine = kind.get("engine", {})
        if not isinstance(engine, dict):
            raise ConfigError(f"{source}: workers[{number}].engine is {engine!r}; expected a table")
        for place, keys, table in (("", known, kind), (".engine", own, cast("dict[str, Any]", engine))):
            for key in table:
                if key not in keys:
                    near = difflib.get_close_matches(key, keys, 1)
                    meant = f"did you mean {near[0]}? " if near else ""
                    raise ConfigError(
                        f"{source}: unknown key workers[{number}]{place}.{key}; {meant}the keys are {', '.join(keys)}"
                    )
        found.append({**kind, "engine": dict(cast("dict[str, Any]", engine))})
    return found


def _check_engine(engine: EngineConfig, place: str) -> None:
    if (engine.disk is None) != (engine.disk_size is None):
        raise ConfigError(
            f"{place}.disk and {place.rpartition(': ')[2]}.disk_size need each other; set both, or neither"
        )
    if engine.disk == "":
        raise ConfigError(f"{place}.disk is empty; expected a folder, or leave it out")


def _read_sizes(engine: dict[str, Any], place: str) -> None:
    """Convert sizes given as strings to bytes."""
    for key in SIZES:
        if isinstance(engine.get(key), str):
            engine[key] = size(engine[key], f"{place}.{key}")


def _check_workers(config: ServeConfig, source: Path) -> None:
    """Raise ConfigError if the workers could not serve, or two have the same name."""
    for number, kind in enumerate(config.workers):
        if kind.name is not None and not _NAMED.fullmatch(kind.name):
            raise ConfigError(
                f"{source}: workers[{number}].name is {kind.name!r}; expected 1 to 32 letters, digits, - or _"
            )
        if len(kind.devices) % kind.count:
            raise ConfigError(
                f"{source}: workers[{number}].devices has {len(kind.devices)} GPUs for count = {kind.count} workers; "
                "expected the same number for each"
            )
        if kind.devices and len(kind.devices) // kind.count < kind.engine.ranks:
            raise ConfigError(
                f"{source}: workers[{number}] has {len(kind.devices) // kind.count} GPUs for each worker, and "
                f"engine.ranks is {kind.engine.ranks}"
            )
    _check_spares(config, source)
    names = [place.name for place in config.places]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise ConfigError(f"{source}: two kinds of [[workers]] are called {twice}; set name for one of them")
    if all(place.role == "prefill" for place in config.places):
        raise ConfigError(f'{source}: all [[workers]] have role = "prefill"; add one with role = "decode"')


def _check_spares(config: ServeConfig, source: Path) -> None:
    """Raise ConfigError if `least` is set and workers cannot be started and stopped on demand."""
    for number, kind in enumerate(config.workers):
        place = f"{source}: workers[{number}].least is {kind.least}"
        if kind.least is None:
            continue
        if kind.least > kind.count:
            raise ConfigError(f"{place}, and count is {kind.count}; expected at most {kind.count}")
        if config.steer is None:
            raise ConfigError(f"{place}, and only [steer] starts the others; set [steer], or leave it out")
        if config.resume_s <= 0:
            raise ConfigError(
                f"{place}, and resume_s is 0: requests of a stopped worker cannot resume on another; leave one of the "
                "two out"
            )
        if config.cluster is not None and config.cluster.kind == "ray":
            raise ConfigError(f'{place}, and cluster.kind is "ray", which keeps an agent per worker; leave it out')
    places = config.places
    if any(place.spare for place in places) and all(place.spare or place.role == "prefill" for place in places):
        raise ConfigError(
            f'{source}: no worker with role "decode" or "both" always runs; set least to 1 or more for one of these '
            "roles"
        )


def _check_promises(config: ServeConfig, source: Path) -> None:
    """Raise ConfigError for empty SLO targets, and for a [steer] that cannot work."""
    for name, sla in config.sla.items():
        if not _NAMED.fullmatch(name):
            raise ConfigError(f"{source}: a class of requests is called {name!r}; expected letters, digits, - or _")
        if sla == Sla():
            raise ConfigError(f"{source}: [sla.{name}] has no target; set ttft_ms, itl_ms, or both")
    if config.steer is None:
        return
    if len(config.places) < 2:
        raise ConfigError(
            f"{source}: [steer] switches roles between workers, and there is one; add [[workers]], or leave it out"
        )
    if DEFAULT_SLA not in config.sla:
        raise ConfigError(f"{source}: [steer] needs SLO targets; set [sla.{DEFAULT_SLA}]")
    if config.api_replicas > 1:
        raise ConfigError(
            f"{source}: api_replicas is {config.api_replicas}, and [steer] is set; each replica sees a part of the "
            "traffic, so leave one of the two out"
        )


def _check_machines(config: ServeConfig, source: Path) -> None:
    """Raise ConfigError for workers on machines that cannot be reached, or that cannot do KV transfers."""
    if config.cluster is not None:
        check_listen(config.cluster.listen, f"{source}: cluster.listen")
        if config.api_replicas > 1:
            raise ConfigError(
                f"{source}: api_replicas is {config.api_replicas}, and [cluster] is set; API replicas reach only "
                "workers of their own machine, so leave one of the two out"
            )
    by_ray = config.cluster is not None and config.cluster.kind == "ray"
    for number, kind in enumerate(config.workers):
        place = f"{source}: workers[{number}]"
        if kind.at is not None and config.cluster is None:
            raise ConfigError(f"{place}.at is {kind.at}; set [cluster] listen and key_file, for that machine to join")
        if kind.at is not None and by_ray:
            raise ConfigError(f'{place}.at is {kind.at}, and cluster.kind is "ray", which chooses the machine itself')
        if kind.at is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,63}", kind.at):
            raise ConfigError(f"{place}.at is {kind.at!r}; expected 1 to 63 letters, digits, ., - or _")
        if kind.devices and by_ray:
            raise ConfigError(f'{place}.devices is set, and cluster.kind is "ray", which chooses GPUs by engine.ranks')
        for key in ("weights", "drafter"):
            path: str | None = getattr(kind, key)
            if path is not None and kind.at is None and not by_ray:
                raise ConfigError(f"{place}.{key} is a path on another machine; set at, or leave it out")
            if path is not None and not os.path.isabs(path):
                raise ConfigError(f"{place}.{key} is {path}; expected an absolute path on that machine")
    machines = {place.at: place.name for place in config.places if place.transport in WITHIN_A_HOST}
    if len(machines) > 1:
        where = ", ".join(f"{name} is {f'at {at}' if at else 'here'}" for at, name in machines.items())
        raise ConfigError(
            f'{source}: handoff.transport is "{config.handoff.transport}", which works within one machine, and '
            f'{where}: set handoff.transport = "nixl"'
        )
    if config.cluster is not None and all(place.at is None for place in config.places):
        raise ConfigError(f"{source}: [cluster] is for workers on other machines, and no [[workers]] has `at`")


def _instead(source: Path) -> str:
    """A hint if neither folder nor file exists. OWNER/NAME is the form of a Hugging Face model id."""
    if re.fullmatch(r"[\w-]+/[\w.-]+", str(source)) and not source.parent.exists():
        return (
            f"to fetch it from Hugging Face: hf download {source} --local-dir {source.name}, then serve {source.name}; "
            "or install 'redline[hub]', and the same command fetches it"
        )
    return "expected a checkpoint's folder or a deployment.toml"


def _drafting(source: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the drafter of the table; keep the options that the new one also has."""
    drafts = drafts_of(source)
    return {key: table[key] for key in drafts.__struct_fields__ if key in table} | msgspec.to_builtins(drafts)


def _check_keys(values: dict[str, Any], source: Path) -> None:
    """Raise ConfigError for an unknown key, listing the known ones, and for a string with a zero byte."""
    outer = [key for key in ServeConfig.__struct_fields__ if key not in ("engine", "workers", "sla", *_TABLES)]
    tables = {name: list(table.__struct_fields__) for name, table in _TABLES.items()}
    inner = [key for key in EngineConfig.__struct_fields__ if key != "speculation"]
    speculation = _table(values, "engine.speculation")
    kind = Suffix if speculation.get("type") == "suffix" else Learned
    drafting = ["type", *kind.__struct_fields__]
    places = {
        **{key: f"engine.speculation.{key}" for key in drafting},
        "engine": "[engine]",
        "speculation": "[engine.speculation]",
        **{key: f"engine.{key}" for key in inner},
        **{name: f"[{name}]" for name in tables},
        **{key: f"{name}.{key}" for name, keys in tables.items() for key in keys},
        **{key: f"sla.NAME.{key}" for key in Sla.__struct_fields__},
        **{key: key for key in outer},
    }
    for place, known, found in (
        ("", [*outer, *tables, "sla", "engine"], values),
        *((f"{name}.", keys, _table(values, name)) for name, keys in tables.items()),
        *((f"sla.{name}.", list(Sla.__struct_fields__), table) for name, table in _classes(values)),
        ("engine.", [*inner, "speculation"], _table(values, "engine")),
        ("engine.speculation.", drafting, speculation),
    ):
        for key, value in found.items():
            if isinstance(value, str) and "\0" in value:
                raise ConfigError(f"{source}: {place}{key} is {value!r}; expected text without zero bytes")
            if key in known:
                continue
            spelled = key.lower().replace("-", "_")
            now = new_spelling(spelled, value)
            if now is not None and found is not speculation:
                raise ConfigError(f"{source}: unknown key {place}{key}; it is {now} now")
            near = difflib.get_close_matches(spelled, places, 1)
            raise ConfigError(
                f"{source}: unknown key {place}{key}; "
                + (f"did you mean {places[near[0]]}? " if near else "")
                + f"the keys are {', '.join(outer)}, under [engine] {', '.join(inner)}, "
                + "".join(f"under [{name}] {', '.join(keys)}, " for name, keys in tables.items())
                + f"under [sla.NAME] {', '.join(Sla.__struct_fields__)}, "
                + f'and under [engine.speculation] ("{kind.__struct_config__.tag}") {", ".join(drafting)}'
            )


def _classes(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tables under [sla]; values of another type are skipped, and rejected later by type."""
    for name, table in _table(values, "sla").items():
        if isinstance(table, dict):
            yield name, cast("dict[str, Any]", table)


def _resolve(values: dict[str, Any], keys: Sequence[str], folder: Path) -> None:
    """Make the paths under `keys` relative to `folder`, that of the deployment file."""
    for key in keys:
        if isinstance(values.get(key), str):
            values[key] = str(folder / values[key])


def _check_type(engine: Mapping[str, Any], source: Path) -> None:
    """Raise ConfigError if options of speculative decoding are set without its type."""
    table = engine.get("speculation")
    if table is None:
        return
    who = f'"learned" with drafter, a folder, or "{SUFFIX}" (--draft FOLDER|{SUFFIX})'
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: engine.speculation is {table!r}; expected a table with type = {who}")
    if "type" not in table:
        key = "".join(f".{key}" for key in list(cast("dict[str, Any]", table))[:1])
        raise ConfigError(
            f"{source}: engine.speculation{key} is set, but there is no drafter: set engine.speculation.type to {who}"
        )


def size(text: str, place: str) -> int:
    """Bytes of a size such as 4096, 500MB, 2GB or 1.5GiB. Raises ConfigError, naming `place`, for any other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None:
        raise ConfigError(f"{place} is {text!r}; expected a size such as 500MB, 2GB or 1.5GiB")
    return round(float(match[1]) * _UNITS[match[2] or ""])  # 1.13e9 is a little less in binary
